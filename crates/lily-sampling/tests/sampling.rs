//! What callers rely on, case by case.

use lily_sampling::{Sampler, SamplingError, SamplingParameters, uniform};

const NEUTRAL: f32 = 1.0;

fn sampler(parameters: SamplingParameters, vocab_size: u32) -> Sampler {
    Sampler::new(parameters, vocab_size, vocab_size, &[]).unwrap()
}

fn warm() -> SamplingParameters {
    SamplingParameters {
        temperature: NEUTRAL,
        ..SamplingParameters::default()
    }
}

/// Logits in [-8, 8) without two alike.
fn noise(count: u32, seed: u64) -> Vec<f32> {
    (0..u64::from(count))
        .map(|step| (uniform(seed, step) * 16.0 - 8.0) as f32)
        .collect()
}

fn token(sampler: &mut Sampler, logits: &[f32]) -> u32 {
    sampler.sample(logits, None).unwrap().token
}

fn argmax(logits: &[f32]) -> u32 {
    let best = logits.iter().copied().fold(f32::MIN, f32::max);
    logits.iter().position(|&logit| logit == best).unwrap() as u32
}

/// Draws at successive steps, as a session would.
fn draws(sampler: &mut Sampler, logits: &[f32], count: usize) -> Vec<u32> {
    (0..count)
        .map(|_| {
            let token = token(sampler, logits);
            sampler.accept(token);
            token
        })
        .collect()
}

#[test]
fn greedy_takes_the_lowest_of_equal_tokens() {
    let mut greedy = sampler(SamplingParameters::default(), 6);
    assert_eq!(token(&mut greedy, &[0.0, 2.0, 1.0, 2.0, 2.0, -1.0]), 1);
    assert_eq!(token(&mut greedy, &[-0.0, 0.0, -1.0, -1.0, -1.0, -1.0]), 0);
    assert_eq!(token(&mut greedy, &[-3.0; 6]), 0);
}

#[test]
fn top_k_of_one_a_tiny_top_p_and_a_tiny_temperature_are_greedy() {
    for seed in 0..50 {
        let logits = noise(3000, seed);
        let expected = argmax(&logits);
        for parameters in [
            SamplingParameters {
                top_k: Some(1),
                ..warm()
            },
            SamplingParameters {
                top_p: 1e-6,
                ..warm()
            },
            SamplingParameters {
                temperature: 1e-6,
                ..warm()
            },
            SamplingParameters {
                temperature: f32::MIN_POSITIVE,
                ..warm()
            },
            SamplingParameters::default(),
        ] {
            let mut sampler = sampler(SamplingParameters { seed, ..parameters }, 3000);
            assert_eq!(token(&mut sampler, &logits), expected);
        }
    }
}

#[test]
fn top_k_keeps_exactly_k_of_equal_tokens_the_lowest() {
    let mut sampler = sampler(
        SamplingParameters {
            top_k: Some(3),
            ..warm()
        },
        6,
    );
    let kept = sampler
        .distribution(&[1.0, 0.0, 1.0, 1.0, 1.0, 1.0], None)
        .unwrap();
    let third = 1.0 / 3.0;
    assert_eq!(kept, [(0, third), (2, third), (3, third)]);
}

#[test]
fn top_p_takes_its_share_of_what_top_k_left() {
    // Probabilities 0.4, 0.3, 0.2, 0.1. Of all tokens, 0.55 takes two. Top-k of two leaves 4/7 and 3/7, of
    // which 0.55 takes one.
    let logits = [0.4_f32.ln(), 0.3_f32.ln(), 0.2_f32.ln(), 0.1_f32.ln()];
    let count = |top_k| {
        let parameters = SamplingParameters {
            top_k,
            top_p: 0.55,
            ..warm()
        };
        sampler(parameters, 4)
            .distribution(&logits, None)
            .unwrap()
            .len()
    };
    assert_eq!((count(None), count(Some(2))), (2, 1));
}

#[test]
fn top_p_keeps_the_token_that_reaches_the_share_exactly() {
    let parameters = SamplingParameters {
        top_p: 0.5,
        ..warm()
    };
    let kept = sampler(parameters, 4)
        .distribution(&[1.0; 4], None)
        .unwrap();
    assert_eq!(kept, [(0, 0.5), (1, 0.5)]);
}

#[test]
fn min_p_compares_with_the_best_token_after_temperature() {
    // At temperature 2 the weights are 1, e^-1 = 0.37 and e^-2 = 0.14.
    let parameters = SamplingParameters {
        temperature: 2.0,
        min_p: 0.3,
        ..warm()
    };
    let kept = sampler(parameters, 3)
        .distribution(&[0.0, -2.0, -4.0], None)
        .unwrap();
    let tokens: Vec<u32> = kept.iter().map(|&(token, _)| token).collect();
    assert_eq!(tokens, [0, 1]);
}

/// One history, three penalties, worked out by hand. The adjusted logits are read off the distribution:
/// differences of logarithms of probabilities are differences of logits.
#[test]
fn penalties_by_hand() {
    // Token:        0    1     2    3     4
    let logits = [4.0, 2.0, -2.0, 1.0, -1.0];
    let prompt = [0, 2];
    let answer = [1, 1, 2];
    let cases: [(f32, f32, f32, [f64; 5]); 6] = [
        (1.0, 0.0, 0.0, [4.0, 2.0, -2.0, 1.0, -1.0]),
        // Prompt and answer: positive divided, negative multiplied, once however often it occurs.
        (2.0, 0.0, 0.0, [2.0, 1.0, -4.0, 1.0, -1.0]),
        // The answer alone, once for each token.
        (1.0, 0.5, 0.0, [4.0, 1.5, -2.5, 1.0, -1.0]),
        // The answer alone, as often as the token occurs.
        (1.0, 0.0, 0.5, [4.0, 1.0, -2.5, 1.0, -1.0]),
        // All three: repetition first, then the others.
        (2.0, 0.5, 0.25, [2.0, 0.0, -4.75, 1.0, -1.0]),
        // Rewards in place of penalties.
        (0.5, -1.0, -0.5, [8.0, 6.0, 0.5, 1.0, -1.0]),
    ];
    for (repetition_penalty, presence_penalty, frequency_penalty, expected) in cases {
        let parameters = SamplingParameters {
            repetition_penalty,
            presence_penalty,
            frequency_penalty,
            ..warm()
        };
        let mut sampler = Sampler::new(parameters, 5, 5, &prompt).unwrap();
        for token in answer {
            sampler.accept(token);
        }
        let found = sampler.distribution(&logits, None).unwrap();
        for (&(token, probability), logit) in found.iter().zip(expected) {
            let difference = (probability / found[4].1).ln();
            assert!(
                (difference - (logit - expected[4])).abs() < 1e-9,
                "token {token} of case {repetition_penalty}/{presence_penalty}/{frequency_penalty}"
            );
        }
    }
}

#[test]
fn a_bias_bans_a_token_unless_all_are_banned() {
    let bans = |tokens: &[u32]| SamplingParameters {
        logit_bias: tokens.iter().map(|&token| (token, -100.0)).collect(),
        ..warm()
    };
    let logits = [5.0, 1.0, 0.0];
    let mut sampler_without = sampler(bans(&[0]), 3);
    assert!(!draws(&mut sampler_without, &logits, 10_000).contains(&0));
    // All banned alike is none banned.
    let all = sampler(bans(&[0, 1, 2]), 3)
        .distribution(&logits, None)
        .unwrap();
    assert_eq!(all, sampler(warm(), 3).distribution(&logits, None).unwrap());
    // And a bias of 100 is a choice.
    let parameters = SamplingParameters {
        logit_bias: vec![(2, 100.0)],
        ..warm()
    };
    let chosen = draws(&mut sampler(parameters, 3), &logits, 1000);
    assert!(chosen.iter().all(|&token| token == 2));
}

#[test]
fn logprobs_are_of_the_model_and_sum_to_one() {
    let logits = noise(20, 3);
    let parameters = SamplingParameters {
        temperature: 0.3,
        top_k: Some(2),
        repetition_penalty: 1.5,
        logit_bias: vec![(7, 50.0)],
        logprobs: Some(20),
        ..warm()
    };
    let mut sampler = Sampler::new(parameters, 20, 20, &[1, 2, 3]).unwrap();
    let sampled = sampler.sample(&logits, None).unwrap();
    assert_eq!(sampled.token, 7);
    assert_eq!(sampled.alternatives.len(), 20);
    assert!(
        sampled
            .alternatives
            .windows(2)
            .all(|pair| pair[0].1 >= pair[1].1)
    );
    let sum: f64 = sampled
        .alternatives
        .iter()
        .map(|&(_, logprob)| f64::from(logprob).exp())
        .sum();
    assert!((sum - 1.0).abs() < 1e-6, "probabilities sum to {sum}");
    let listed = sampled.alternatives.iter().find(|&&(token, _)| token == 7);
    assert_eq!(listed.map(|&(_, logprob)| logprob), sampled.logprob);
}

#[test]
fn logits_that_are_not_finite_are_an_error() {
    let refused = |logits: &[f32]| {
        let mut errors = Vec::new();
        for parameters in [SamplingParameters::default(), warm()] {
            let size = logits.len() as u32;
            errors.push(sampler(parameters, size).sample(logits, None).unwrap_err());
        }
        assert_eq!(errors[0], errors[1]);
        errors.remove(0)
    };
    let none = f32::NEG_INFINITY;
    for (logits, count) in [
        (vec![f32::NAN; 40], 40),
        (vec![none; 3], 3),
        (vec![1.0, f32::NAN, 2.0], 1),
        (vec![f32::NAN, none, none], 3),
        (vec![1.0, f32::INFINITY, f32::NAN], 2),
    ] {
        let total = logits.len();
        assert_eq!(refused(&logits), SamplingError::NotFinite { count, total });
    }
    assert_eq!(
        refused(&[1.0, f32::NAN, 2.0]).to_string(),
        "1 of 3 logits are not finite"
    );
}

#[test]
fn negative_infinity_excludes_single_tokens() {
    let none = f32::NEG_INFINITY;
    let logits = [none, 1.0, none, 1.0];
    let kept = sampler(warm(), 4).distribution(&logits, None).unwrap();
    assert_eq!(kept, [(1, 0.5), (3, 0.5)]);
    // A bonus does not bring one back.
    let parameters = SamplingParameters {
        logit_bias: vec![(0, 100.0)],
        logprobs: Some(4),
        ..warm()
    };
    let sampled = sampler(parameters, 4).sample(&logits, None).unwrap();
    assert_ne!(sampled.token, 0);
    assert_eq!(sampled.alternatives.len(), 2);
}

#[test]
fn extreme_logits_and_parameters_neither_overflow_nor_ban() {
    // A positive logit divided by next to nothing, a negative one multiplied by much: both leave the range.
    for (repetition_penalty, logits, expected) in [
        (1e-30, [f32::MAX, f32::MIN, 0.0], vec![0]),
        (1e30, [f32::MIN, f32::MIN, f32::MIN], vec![0, 1, 2]),
    ] {
        let parameters = SamplingParameters {
            repetition_penalty,
            ..warm()
        };
        let mut sampler = Sampler::new(parameters, 3, 3, &[0, 1, 2]).unwrap();
        let found = sampler.distribution(&logits, None).unwrap();
        let probable: Vec<u32> = found
            .iter()
            .filter(|&&(_, probability)| probability > 0.1)
            .map(|&(token, _)| token)
            .collect();
        assert_eq!(probable, expected);
        assert!(expected.contains(&token(&mut sampler, &logits)));
    }
}

#[test]
fn a_mask_limits_every_way_of_choosing() {
    let logits = noise(100, 9);
    let mut allowed = [0_u32; 4];
    for token in [31, 32, 63, 99] {
        allowed[token / 32] |= 1 << (token % 32);
    }
    for parameters in [
        SamplingParameters::default(),
        warm(),
        SamplingParameters {
            top_k: Some(50),
            top_p: 0.9,
            ..warm()
        },
    ] {
        let mut sampler = sampler(parameters, 100);
        for _ in 0..200 {
            let token = sampler.sample(&logits, Some(&allowed)).unwrap().token;
            assert!([31, 32, 63, 99].contains(&token));
            sampler.accept(token);
        }
        assert_eq!(
            sampler.sample(&logits, Some(&[0; 4])),
            Err(SamplingError::NothingAllowed { total: 100 })
        );
        assert_eq!(
            sampler.sample(&logits, Some(&[u32::MAX; 3])),
            Err(SamplingError::MaskLength {
                expected: 4,
                found: 3
            })
        );
    }
}

#[test]
fn rows_without_a_token_are_never_chosen_or_reported() {
    // The padding rows hold the best logits, and NaN, which is nobody's business there.
    let mut logits = vec![0.0; 10];
    logits.extend([50.0, f32::NAN, f32::INFINITY]);
    for parameters in [SamplingParameters::default(), warm()] {
        let parameters = SamplingParameters {
            logit_bias: vec![(10, 100.0)],
            logprobs: Some(20),
            ..parameters
        };
        let mut sampler = Sampler::new(parameters, 13, 10, &[12]).unwrap();
        for _ in 0..500 {
            let sampled = sampler.sample(&logits, None).unwrap();
            assert!(sampled.token < 10);
            assert_eq!(sampled.alternatives.len(), 10);
            assert!((sampled.logprob.unwrap() - 0.1_f32.ln()).abs() < 1e-6);
            sampler.accept(sampled.token);
        }
    }
}

#[test]
fn sizes_that_do_not_fit_are_refused() {
    for sampleable in [0, 11] {
        let refused = Sampler::new(warm(), 10, sampleable, &[]).err();
        let vocab_size = 10;
        assert_eq!(
            refused,
            Some(SamplingError::Sampleable {
                sampleable,
                vocab_size
            })
        );
    }
    assert_eq!(
        sampler(warm(), 10).sample(&[0.0; 9], None),
        Err(SamplingError::LogitsLength {
            expected: 10,
            found: 9
        })
    );
    let parameters = SamplingParameters {
        top_p: 0.0,
        ..warm()
    };
    assert!(matches!(
        Sampler::new(parameters, 10, 10, &[]),
        Err(SamplingError::OutOfRange {
            parameter: "top_p",
            ..
        })
    ));
}

#[test]
fn a_seed_fixes_the_tokens_whatever_other_sessions_do() {
    let logits = noise(500, 1);
    let with_seed = |seed| sampler(SamplingParameters { seed, ..warm() }, 500);
    let alone = draws(&mut with_seed(42), &logits, 200);
    let (mut one, mut other) = (with_seed(42), with_seed(43));
    let mut interleaved = Vec::new();
    for _ in 0..200 {
        interleaved.extend(draws(&mut one, &logits, 1));
        draws(&mut other, &logits, 1);
        // Sampling without accepting, as a rejected draft does, leaves no trace.
        assert_eq!(token(&mut one, &logits), token(&mut one, &logits));
    }
    assert_eq!(interleaved, alone);
    assert_ne!(draws(&mut with_seed(43), &logits, 200), alone);
    // A session taken up again from its history goes on as it would have.
    let mut resumed = with_seed(42);
    alone[..100].iter().for_each(|&token| resumed.accept(token));
    assert_eq!(draws(&mut resumed, &logits, 100), alone[100..]);
}

#[test]
fn history_does_not_change_draws_without_penalties() {
    let logits = noise(50, 2);
    let mut with_prompt = Sampler::new(warm(), 50, 50, &[1, 2, 3]).unwrap();
    assert_eq!(
        draws(&mut with_prompt, &logits, 50),
        draws(&mut sampler(warm(), 50), &logits, 50)
    );
}

fn chi_square(counts: &[u32], expected: &[f64]) -> f64 {
    counts
        .iter()
        .zip(expected)
        .map(|(&count, &expected)| (f64::from(count) - expected).powi(2) / expected)
        .sum()
}

/// Draws follow the distribution, one after the other independently, over steps and over seeds. The bounds
/// are the 99.9% points of chi-square; the seeds are fixed, so the outcome is too.
#[test]
fn draws_follow_the_distribution() {
    const COUNT: usize = 40_000;
    let logits = [0.5, 1.0, -0.5, 0.0, 1.5, -1.0, 0.25, 0.75, -9.0, 3.0];
    let parameters = SamplingParameters {
        temperature: 1.5,
        top_k: Some(8),
        seed: 2024,
        ..warm()
    };
    let mut sampler_over_steps = sampler(parameters.clone(), 10);
    let distribution = sampler_over_steps.distribution(&logits, None).unwrap();
    assert_eq!(distribution.len(), 8);
    let index = |token: u32| {
        distribution
            .iter()
            .position(|&(other, _)| other == token)
            .unwrap()
    };
    let expected: Vec<f64> = distribution
        .iter()
        .map(|&(_, probability)| probability * COUNT as f64)
        .collect();

    let over_steps = draws(&mut sampler_over_steps, &logits, COUNT);
    let over_seeds: Vec<u32> = (0..COUNT as u64)
        .map(|seed| {
            let parameters = SamplingParameters {
                seed,
                ..parameters.clone()
            };
            token(&mut sampler(parameters, 10), &logits)
        })
        .collect();
    for drawn in [&over_steps, &over_seeds] {
        let mut counts = [0; 8];
        drawn.iter().for_each(|&token| counts[index(token)] += 1);
        let statistic = chi_square(&counts, &expected);
        assert!(statistic < 24.3, "chi-square {statistic}");

        let mut pairs = [0; 64];
        for pair in drawn.windows(2) {
            pairs[index(pair[0]) * 8 + index(pair[1])] += 1;
        }
        let expected: Vec<f64> = (0..64)
            .map(|pair| distribution[pair / 8].1 * distribution[pair % 8].1 * (COUNT - 1) as f64)
            .collect();
        let statistic = chi_square(&pairs, &expected);
        assert!(statistic < 103.4, "chi-square of pairs {statistic}");
    }
}

/// At the model's own size, through every path: few candidates, many, all.
#[test]
fn draws_follow_a_large_distribution() {
    const SIZE: u32 = 248_320;
    let logits = noise(SIZE, 4);
    for (top_k, top_p) in [(None, 1.0), (None, 0.9), (Some(20), 0.95), (None, 0.001)] {
        let parameters = SamplingParameters {
            top_k,
            top_p,
            seed: 5,
            ..warm()
        };
        let mut sampler = sampler(parameters, SIZE);
        let distribution = sampler.distribution(&logits, None).unwrap();
        let sum: f64 = distribution
            .iter()
            .map(|&(_, probability)| probability)
            .sum();
        assert!((sum - 1.0).abs() < 1e-9);
        // The token that a walk over the reported distribution picks with the same number.
        for step in 0..10 {
            let target = uniform(5, step);
            let mut running = 0.0;
            let expected = distribution.iter().find(|&&(_, probability)| {
                running += probability;
                running > target
            });
            let token = token(&mut sampler, &logits);
            assert_eq!(Some(token), expected.map(|&(token, _)| token));
            sampler.accept(token);
        }
    }
}
