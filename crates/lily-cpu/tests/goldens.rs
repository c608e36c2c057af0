//! Whole small models against the recorded numbers of MLX-LM: prefill whole and in chunks, decode, and
//! mixed. The bounds are those of fixtures/README.md.

mod common;

use common::{native, open, reference};
use lily_cpu::{CpuOptions, InstructionSet};
use lily_plan::Precision;
use lily_testing::{GoldenPrompt, arg_max, distance, fixture, golden_prompts, read_tensors};
use std::path::{Path, PathBuf};

/// The oracles of the repository, and the one that is too large for it where it is at hand.
fn oracles() -> Vec<PathBuf> {
    let mut found =
        Vec::from(["oracle-small-b", "oracle-small-c"].map(|name| fixture(name).unwrap()));
    found.extend(fixture("oracle-small-a"));
    found
}

/// In f32: relative RMS at most 2e-5, largest difference at most 5e-4.
fn assert_close(what: &str, found: &[f32], expected: &[f32]) {
    let (relative, largest) = distance(found, expected);
    assert!(
        relative <= 2e-5 && largest <= 5e-4,
        "{what}: rel. RMS {relative:.1e}, max {largest:.1e}"
    );
}

/// How a prompt goes through: tokens prefilled, chunk length; the rest is decoded.
fn ways(length: usize) -> [(&'static str, usize, usize); 5] {
    [
        ("whole", length, 4_096),
        ("chunks of 64", length, 64),
        ("chunks of 7", length, 7),
        ("decoded", 0, 64),
        ("mixed", length / 2, 64),
    ]
}

fn check_f32(directory: &Path, options: &CpuOptions, expanded: bool, longest: usize) {
    let goldens = read_tensors(&directory.join("golden.safetensors"));
    let prompts = golden_prompts(directory);
    assert!(prompts.len() >= 3);
    for prompt in prompts
        .iter()
        .filter(|prompt| prompt.tokens.len() <= longest)
    {
        let GoldenPrompt { name, tokens, .. } = prompt;
        let expected = &goldens[&format!("{name}.logits")].1;
        let last = &goldens[&format!("{name}.greedy_last_logits")].1;
        for (way, prefilled, chunk) in ways(tokens.len()) {
            let what = format!("{} {name}, {way}", directory.display());
            let mut runner = open(directory, Precision::F32, options);
            runner.expanded = expanded;
            let mut logits = runner.prefill(&tokens[..prefilled], chunk);
            logits.extend(runner.feed(&tokens[prefilled..]));
            let rows: Vec<&[f32]> = logits.chunks(runner.model.config.vocab_size).collect();
            assert_eq!(rows.len(), tokens.len(), "{what}");
            let chosen: Vec<u32> = rows.iter().map(|row| arg_max(row)).collect();
            assert_eq!(chosen, prompt.argmax_all, "{what}: argmax");
            let wanted: Vec<f32> = prompt
                .logit_positions
                .iter()
                .flat_map(|&at| rows[at].to_vec())
                .collect();
            assert_close(&what, &wanted, expected);
            let (greedy, logits) = runner.greedy(chosen[tokens.len() - 1], prompt.greedy.len());
            assert_eq!(greedy, prompt.greedy, "{what}: greedy");
            assert_close(&format!("{what}, greedy"), &logits, last);
        }
    }
}

#[test]
fn in_f32_every_way_through_the_native_kernels_matches() {
    for directory in oracles() {
        check_f32(&directory, &native(), false, usize::MAX);
    }
}

#[test]
fn in_f32_expanded_plans_match() {
    for directory in oracles() {
        check_f32(&directory, &native(), true, 70);
    }
}

#[test]
fn in_f32_the_kernels_of_every_instruction_set_match() {
    for set in InstructionSet::available() {
        let options = CpuOptions {
            instruction_set: Some(set),
            ..native()
        };
        for directory in oracles() {
            check_f32(&directory, &options, false, 17);
        }
    }
}

#[test]
fn in_f32_the_reference_matches() {
    for directory in oracles() {
        check_f32(&directory, &reference(), false, 17);
    }
}

/// bf16 activations: the bounds for engines with bf16 activations.
#[test]
fn in_bf16_logits_stay_within_the_bounds() {
    for directory in oracles() {
        let goldens = read_tensors(&directory.join("golden.safetensors"));
        for prompt in golden_prompts(&directory) {
            for (way, prefilled, chunk) in ways(prompt.tokens.len()) {
                let what = format!("{} {}, {way}", directory.display(), prompt.name);
                let mut runner = open(&directory, Precision::Bf16, &native());
                let mut logits = runner.prefill(&prompt.tokens[..prefilled], chunk);
                logits.extend(runner.feed(&prompt.tokens[prefilled..]));
                let vocabulary = runner.model.config.vocab_size;
                let rows: Vec<&[f32]> = logits.chunks(vocabulary).collect();
                let expected = &goldens[&format!("{}.logits", prompt.name)].1;
                let pairs: Vec<(&[f32], &[f32])> = prompt
                    .logit_positions
                    .iter()
                    .map(|&at| rows[at])
                    .zip(expected.chunks(vocabulary))
                    .collect();
                let cosines: Vec<f64> = pairs.iter().map(|(a, b)| cosine(a, b)).collect();
                let mean = cosines.iter().sum::<f64>() / cosines.len() as f64;
                let least = cosines.iter().copied().fold(1.0, f64::min);
                assert!(
                    mean >= 0.998 && least >= 0.98,
                    "{what}: cosine {mean}, least {least}"
                );
                let divergence = pairs.iter().map(|(a, b)| divergence(b, a)).sum::<f64>();
                let divergence = divergence / pairs.len() as f64;
                assert!(divergence <= 0.02, "{what}: KL {divergence}");
                let same = rows
                    .iter()
                    .zip(&prompt.argmax_all)
                    .filter(|&(row, &expected)| arg_max(row) == expected)
                    .count();
                let share = same as f64 / rows.len() as f64;
                let least = if rows.len() > 17 { 0.9 } else { 0.8 };
                assert!(share >= least, "{what}: argmax {share}");
            }
        }
    }
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| -> f64 {
        a.iter()
            .zip(b)
            .map(|(&a, &b)| f64::from(a) * f64::from(b))
            .sum()
    };
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

/// Kullback-Leibler divergence of the distributions that two rows of logits stand for.
fn divergence(expected: &[f32], found: &[f32]) -> f64 {
    let log_softmax = |row: &[f32]| -> Vec<f64> {
        let largest = f64::from(row.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        let sum: f64 = row.iter().map(|&x| (f64::from(x) - largest).exp()).sum();
        row.iter()
            .map(|&x| f64::from(x) - largest - sum.ln())
            .collect()
    };
    let (p, q) = (log_softmax(expected), log_softmax(found));
    p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum()
}
