//! The sampler against a naive reference: f64 throughout, a full sort, a vector for each step.

use std::collections::BTreeSet;

use lily_sampling::{Sampler, SamplingParameters};
use proptest::prelude::*;

/// What the reference knows of one case.
#[derive(Debug, Clone)]
struct Case {
    parameters: SamplingParameters,
    logits: Vec<f32>,
    sampleable: u32,
    prompt: Vec<u32>,
    answer: Vec<u32>,
    allowed: Option<Vec<u32>>,
}

/// A token of the ranking with its adjusted logit and its weight.
#[derive(Debug, Clone, Copy)]
struct Ranked {
    token: u32,
    logit: f64,
    weight: f64,
}

/// All tokens that may be chosen before any filter, best first.
fn ranking(case: &Case) -> Vec<Ranked> {
    let parameters = &case.parameters;
    let seen: BTreeSet<u32> = case.prompt.iter().chain(&case.answer).copied().collect();
    let mut ranked = Vec::new();
    for token in 0..case.sampleable {
        let is_allowed = case
            .allowed
            .as_ref()
            .is_none_or(|words| words[token as usize / 32] >> (token % 32) & 1 == 1);
        if !is_allowed {
            continue;
        }
        let mut logit = f64::from(case.logits[token as usize]);
        for &(biased, bias) in &parameters.logit_bias {
            if biased == token {
                logit += f64::from(bias);
            }
        }
        if seen.contains(&token) {
            let penalty = f64::from(parameters.repetition_penalty);
            logit = if logit > 0.0 {
                logit / penalty
            } else {
                logit * penalty
            };
        }
        let count = case.answer.iter().filter(|&&other| other == token).count();
        if count > 0 {
            logit -= f64::from(parameters.presence_penalty);
            logit -= count as f64 * f64::from(parameters.frequency_penalty);
        }
        ranked.push(Ranked {
            token,
            logit,
            weight: 0.0,
        });
    }
    ranked.sort_by(|left, right| {
        right
            .logit
            .partial_cmp(&left.logit)
            .unwrap()
            .then(left.token.cmp(&right.token))
    });
    let best = ranked.first().map_or(0.0, |first| first.logit);
    for entry in &mut ranked {
        entry.weight = ((entry.logit - best) / f64::from(parameters.temperature)).exp();
    }
    ranked
}

/// How many of the ranking pass the filters. Where a sum comes as near to a threshold as rounding is large,
/// there is more than one right answer: the shortest and the longest are given.
fn lengths(ranked: &[Ranked], parameters: &SamplingParameters) -> (usize, usize) {
    const ROUNDING: f64 = 1e-12;
    let after_top_k = parameters
        .top_k
        .map_or(ranked.len(), |count| ranked.len().min(count as usize));
    let total: f64 = ranked[..after_top_k].iter().map(|entry| entry.weight).sum();
    let nucleus = |target: f64| {
        let mut sum = 0.0;
        for (index, entry) in ranked[..after_top_k].iter().enumerate() {
            sum += entry.weight;
            if sum >= target {
                return index + 1;
            }
        }
        after_top_k
    };
    let above = |least: f64| {
        ranked
            .iter()
            .take_while(|entry| entry.weight >= least)
            .count()
    };
    let (shortest, longest) = if parameters.top_p < 1.0 {
        let target = f64::from(parameters.top_p) * total;
        (
            nucleus(target * (1.0 - ROUNDING)),
            nucleus(target * (1.0 + ROUNDING)),
        )
    } else {
        (after_top_k, after_top_k)
    };
    let min_p = f64::from(parameters.min_p);
    (
        shortest.min(above(min_p * (1.0 + ROUNDING))),
        longest.min(above(min_p * (1.0 - ROUNDING))),
    )
}

fn sampler_of(case: &Case) -> Sampler {
    let mut sampler = Sampler::new(
        case.parameters.clone(),
        case.logits.len() as u32,
        case.sampleable,
        &case.prompt,
    )
    .unwrap();
    for &token in &case.answer {
        sampler.accept(token);
    }
    sampler
}

fn check(case: &Case) -> Result<(), TestCaseError> {
    let ranked = ranking(case);
    let mut sampler = sampler_of(case);
    let allowed = case.allowed.as_deref();
    let Ok(distribution) = sampler.distribution(&case.logits, allowed) else {
        prop_assert!(ranked.is_empty(), "refused though tokens are left");
        return Ok(());
    };
    let sampled = sampler.sample(&case.logits, allowed).unwrap();
    if case.parameters.temperature == 0.0 {
        prop_assert_eq!(&distribution, &[(ranked[0].token, 1.0)]);
        prop_assert_eq!(sampled.token, ranked[0].token);
    } else {
        let (shortest, longest) = lengths(&ranked, &case.parameters);
        let length = distribution.len();
        prop_assert!(
            (shortest..=longest).contains(&length),
            "{length} candidates; the reference has {shortest} to {longest}"
        );
        let total: f64 = ranked[..length].iter().map(|entry| entry.weight).sum();
        let mut expected: Vec<(u32, f64)> = ranked[..length]
            .iter()
            .map(|entry| (entry.token, entry.weight / total))
            .collect();
        expected.sort_by_key(|&(token, _)| token);
        for (&(token, probability), (expected_token, expected_probability)) in
            distribution.iter().zip(expected)
        {
            prop_assert_eq!(token, expected_token);
            prop_assert!(
                (probability - expected_probability).abs() <= 1e-12 * expected_probability + 1e-300,
                "token {}: {} and not {}",
                token,
                probability,
                expected_probability
            );
        }
        prop_assert!(
            distribution
                .iter()
                .any(|&(token, probability)| token == sampled.token && probability > 0.0)
        );
    }
    check_logprobs(case, &sampled)
}

fn check_logprobs(case: &Case, sampled: &lily_sampling::Sampled) -> Result<(), TestCaseError> {
    let Some(count) = case.parameters.logprobs else {
        prop_assert_eq!(sampled.logprob, None);
        prop_assert!(sampled.alternatives.is_empty());
        return Ok(());
    };
    let raw = &case.logits[..case.sampleable as usize];
    let sum: f64 = raw.iter().map(|&logit| f64::from(logit).exp()).sum();
    let logprob = |token: u32| (f64::from(raw[token as usize]) - sum.ln()) as f32;
    let mut order: Vec<u32> = (0..case.sampleable).collect();
    order.sort_by(|&left, &right| {
        raw[right as usize]
            .partial_cmp(&raw[left as usize])
            .unwrap()
            .then(left.cmp(&right))
    });
    order.truncate(count as usize);
    let expected = std::iter::once(sampled.token).chain(order);
    let found = std::iter::once((sampled.token, sampled.logprob.unwrap()))
        .chain(sampled.alternatives.iter().copied());
    prop_assert_eq!(expected.clone().count(), found.clone().count());
    for (token, (found_token, found_logprob)) in expected.zip(found) {
        prop_assert_eq!(found_token, token);
        prop_assert!((found_logprob - logprob(token)).abs() <= 1e-5);
    }
    Ok(())
}

/// Parameters whose arithmetic on the logits below is exact in f32: the reference's f64 then ranks alike.
fn parameters(vocab_size: u32) -> impl Strategy<Value = SamplingParameters> {
    let filters = (
        prop_oneof![Just(0.0_f32), 0.05_f32..3.0, Just(100.0)],
        proptest::option::of(1_u32..vocab_size + 10),
        prop_oneof![Just(1.0_f32), 0.01_f32..1.0],
        prop_oneof![Just(0.0_f32), 0.001_f32..0.9],
    );
    let penalties = (
        proptest::sample::select(vec![0.5_f32, 1.0, 1.0, 2.0]),
        (-8_i8..=8).prop_map(|quarters| f32::from(quarters) / 4.0),
        (-8_i8..=8).prop_map(|quarters| f32::from(quarters) / 4.0),
        proptest::collection::btree_map(0..vocab_size, -100_i8..=100, 0..4),
    );
    (
        filters,
        penalties,
        any::<u64>(),
        proptest::option::of(0_u32..=20),
    )
        .prop_map(|(filters, penalties, seed, logprobs)| SamplingParameters {
            temperature: filters.0,
            top_k: filters.1,
            top_p: filters.2,
            min_p: filters.3,
            repetition_penalty: penalties.0,
            presence_penalty: penalties.1,
            frequency_penalty: penalties.2,
            logit_bias: penalties
                .3
                .into_iter()
                .map(|(token, bias)| (token, f32::from(bias)))
                .collect(),
            seed,
            logprobs,
        })
}

fn case(sizes: std::ops::Range<u32>) -> impl Strategy<Value = Case> {
    sizes.prop_flat_map(|vocab_size| {
        let size = vocab_size as usize;
        // A coarse grid, so that equal logits are common.
        let logits = proptest::collection::vec(
            (-160_i16..160).prop_map(|eighths| f32::from(eighths) / 8.0),
            size,
        );
        let words = proptest::collection::vec(any::<u32>(), size.div_ceil(32));
        (
            parameters(vocab_size),
            logits,
            1..=vocab_size,
            proptest::collection::vec(0..vocab_size, 0..8),
            proptest::collection::vec(0..vocab_size, 0..8),
            proptest::option::of(words),
        )
            .prop_map(
                |(parameters, logits, sampleable, prompt, answer, allowed)| Case {
                    parameters,
                    logits,
                    sampleable,
                    prompt,
                    answer,
                    allowed,
                },
            )
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(2000) })]

    #[test]
    fn small_vocabularies_agree(case in case(1..80)) {
        check(&case)?;
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(60) })]

    #[test]
    fn vocabularies_longer_than_every_list_agree(case in case(9000..30_000)) {
        check(&case)?;
    }
}
