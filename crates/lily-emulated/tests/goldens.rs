//! Whole small models through the kernels against the recorded numbers of MLX-LM, in f32: prefill whole and in chunks,
//! decode, and mixed. The bounds are those of fixtures/README.md.

mod common;

use common::runner;
use lily_plan::Precision;
use lily_testing::{GoldenPrompt, arg_max, distance, fixture, golden_prompts, read_tensors};
use std::path::PathBuf;

/// The oracle of the repository whose formats the kernels have, and the one that is too large for it where it is at
/// hand. (oracle-small-c has every affine format; the GPU takes two.)
fn oracles() -> Vec<PathBuf> {
    let mut found = vec![fixture("oracle-small-b").expect("in the repository")];
    found.extend(fixture("oracle-small-a"));
    found
}

#[test]
fn in_f32_every_way_through_the_kernels_matches() {
    for directory in oracles() {
        let goldens = read_tensors(&directory.join("golden.safetensors"));
        for prompt in golden_prompts(&directory) {
            let GoldenPrompt { name, tokens, .. } = &prompt;
            // The longest prompt is the native kernels' business: here it would take minutes.
            if tokens.len() > 70 {
                continue;
            }
            let expected = &goldens[&format!("{name}.logits")].1;
            for (way, prefilled, chunk) in [
                ("chunks of 64", tokens.len(), 64),
                ("decoded", 0, 64),
                ("mixed", tokens.len() / 2, 7),
            ] {
                let what = format!("{} {name}, {way}", directory.display());
                let mut runner = runner(&directory, Precision::F32);
                let mut logits = runner.prefill(&tokens[..prefilled], chunk);
                logits.extend(runner.feed(&tokens[prefilled..]));
                let rows: Vec<&[f32]> = logits.chunks(runner.model.config.vocab_size).collect();
                let chosen: Vec<u32> = rows.iter().map(|row| arg_max(row)).collect();
                assert_eq!(chosen, prompt.argmax_all, "{what}: argmax");
                let wanted: Vec<f32> = prompt
                    .logit_positions
                    .iter()
                    .flat_map(|&at| rows[at].to_vec())
                    .collect();
                let (relative, largest) = distance(&wanted, expected);
                assert!(
                    relative <= 2e-5 && largest <= 5e-4,
                    "{what}: rel. RMS {relative:.1e}, max {largest:.1e}"
                );
                let (greedy, _) = runner.greedy(chosen[tokens.len() - 1], prompt.greedy.len());
                assert_eq!(greedy, prompt.greedy, "{what}: greedy");
            }
        }
    }
}
