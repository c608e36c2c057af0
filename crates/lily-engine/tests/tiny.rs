//! The embedded model end to end: what MLX-LM answered, Lily answers, token for token.

mod support;

use lily_engine::{
    CancelFlag, FinishReason, GenerationRequest, Precision, Progress, SamplingParameters,
};
use serde_json::Value;
use support::{engine, engine_with, tiny};

struct Expected {
    id: String,
    prompt: Vec<u32>,
    completion: Vec<u32>,
    text: String,
    robust: bool,
}

fn expected() -> Vec<Expected> {
    let ids = |value: &Value| -> Vec<u32> {
        value
            .as_array()
            .unwrap()
            .iter()
            .map(|id| id.as_u64().unwrap() as u32)
            .collect()
    };
    let text = std::fs::read_to_string(tiny().join("expected.jsonl")).unwrap();
    text.lines()
        .map(|line| {
            let line: Value = serde_json::from_str(line).unwrap();
            Expected {
                id: line["id"].as_str().unwrap().to_string(),
                prompt: ids(&line["prompt_ids"]),
                completion: ids(&line["completion_ids"]),
                text: line["text"].as_str().unwrap().to_string(),
                robust: line["min_margin"].as_f64().unwrap() >= 0.5,
            }
        })
        .collect()
}

/// Generates greedily for each case, checks those that `must` names, and returns how many those were.
fn check(precision: Precision, chunk: usize, must: impl Fn(&Expected) -> bool) -> usize {
    let mut engine = engine_with(|options| {
        options.precision = precision;
        options.prefill_chunk = chunk;
    });
    let mut checked = 0;
    for case in expected().into_iter().filter(must) {
        let request = GenerationRequest {
            prompt: case.prompt,
            sampling: SamplingParameters::default(),
            max_tokens: Some(case.completion.len() + 8),
            ..GenerationRequest::default()
        };
        let generation = engine.start(None, request, CancelFlag::default()).unwrap();
        let mut text = String::new();
        let done = engine
            .run(generation, |progress| match progress {
                Progress::Token(token) => text.push_str(&token.text),
                Progress::Finished(finished) => text.push_str(&finished.text),
                Progress::Prefilled { .. } => {}
            })
            .unwrap();
        assert_eq!(done.tokens(), case.completion, "{}: {text}", case.id);
        assert_eq!(format!("{text}<|im_end|>"), case.text, "{}", case.id);
        assert!(
            matches!(done.finish_reason(), Some(FinishReason::StopToken(_))),
            "{}",
            case.id
        );
        checked += 1;
    }
    checked
}

#[test]
fn in_f32_all_67_completions_are_reproduced_token_for_token() {
    assert_eq!(check(Precision::F32, 512, |_| true), 67);
}

#[test]
fn in_the_default_precision_the_63_robust_completions_are_reproduced() {
    let chunk = engine().options().prefill_chunk;
    assert_eq!(engine().options().precision, Precision::Bf16);
    assert_eq!(check(Precision::Bf16, chunk, |case| case.robust), 63);
}

/// The longest of the recorded prompts: a word is to be found again 2,909 tokens back.
#[test]
fn the_passkey_is_found_at_2909_tokens_through_chunks_of_64() {
    let longest = |case: &Expected| case.prompt.len() == 2_909;
    for precision in [Precision::F32, Precision::Bf16] {
        assert_eq!(check(precision, 64, longest), 1);
    }
}
