//! Whole small models against the recorded numbers of MLX-LM: prefill whole and in chunks, decode, and
//! mixed, in f32 at the tolerances of fixtures/README.md.

mod support;

use lily_cpu::CpuOptions;
use lily_plan::Precision;
use std::path::Path;
use support::{Runner, arg_max, distance, fixture, read_tensors};

struct Prompt {
    tokens: Vec<u32>,
    logit_positions: Vec<usize>,
    argmax_all: Vec<u32>,
    greedy: Vec<u32>,
}

fn prompts(directory: &Path) -> Vec<(String, Prompt)> {
    let text = std::fs::read_to_string(directory.join("golden.json")).unwrap();
    let golden: serde_json::Value = serde_json::from_str(&text).unwrap();
    golden["prompts"]
        .as_object()
        .unwrap()
        .iter()
        .map(|(name, prompt)| {
            let list = |key: &str| -> Vec<u32> {
                prompt[key]
                    .as_array()
                    .unwrap()
                    .iter()
                    .map(|n| n.as_u64().unwrap() as u32)
                    .collect()
            };
            let prompt = Prompt {
                tokens: list("tokens"),
                logit_positions: list("logit_positions")
                    .into_iter()
                    .map(|n| n as usize)
                    .collect(),
                argmax_all: list("argmax_all"),
                greedy: list("greedy"),
            };
            (name.clone(), prompt)
        })
        .collect()
}

/// The f32 bounds: relative RMS 2e-5, largest difference 5e-4.
fn assert_close(what: &str, found: &[f32], expected: &[f32]) {
    let (relative, largest) = distance(found, expected);
    assert!(
        relative <= 2e-5 && largest <= 5e-4,
        "{what}: rel. RMS {relative:.1e}, max {largest:.1e}"
    );
}

fn check(directory: &Path, options: &CpuOptions, expanded: bool) {
    let goldens = read_tensors(&directory.join("golden.safetensors"));
    let prompts = prompts(directory);
    assert!(prompts.len() >= 3);
    for (name, prompt) in prompts {
        let vocabulary = prompt_vocabulary(directory, options);
        let expected = &goldens[&format!("p{name}.logits")].1;
        let last = &goldens[&format!("p{name}.greedy_last_logits")].1;
        // Prefill whole; chunks of 64; odd chunks; token by token; half prefilled, half decoded.
        let length = prompt.tokens.len();
        for (way, prefilled, chunk) in [
            ("whole", length, 4_096),
            ("chunks of 64", length, 64),
            ("chunks of 7", length, 7),
            ("decoded", 0, 64),
            ("mixed", length / 2, 64),
        ] {
            let what = format!("{} prompt {name}, {way}", directory.display());
            let mut runner = Runner::open(directory, Precision::F32, options);
            runner.expanded = expanded;
            let mut logits = runner.prefill(&prompt.tokens[..prefilled], chunk);
            logits.extend(runner.feed(&prompt.tokens[prefilled..]));
            let rows: Vec<&[f32]> = logits.chunks(vocabulary).collect();
            assert_eq!(rows.len(), length, "{what}");
            let chosen: Vec<u32> = rows.iter().map(|row| arg_max(row)).collect();
            assert_eq!(chosen, prompt.argmax_all, "{what}: argmax");
            let wanted: Vec<f32> = prompt
                .logit_positions
                .iter()
                .flat_map(|&at| rows[at].to_vec())
                .collect();
            assert_close(&what, &wanted, expected);
            let (greedy, logits) = runner.greedy(chosen[length - 1], prompt.greedy.len());
            assert_eq!(greedy, prompt.greedy, "{what}: greedy");
            assert_close(&format!("{what}, greedy"), &logits, last);
        }
    }
}

fn prompt_vocabulary(directory: &Path, options: &CpuOptions) -> usize {
    Runner::open(directory, Precision::F32, options)
        .model()
        .config
        .vocab_size
}

#[test]
fn small_models_match_their_goldens() {
    for name in ["oracle-small-a", "oracle-small-b", "oracle-small-c"] {
        if let Some(directory) = fixture(name) {
            check(&directory, &CpuOptions::default(), false);
        }
    }
}
