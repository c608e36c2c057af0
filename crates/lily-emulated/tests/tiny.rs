//! The embedded model end to end on the kernels: what MLX-LM answered, they answer, token for token. All robust cases
//! take a quarter of an hour here: `cargo test --release -p lily-emulated --test tiny -- --ignored`.

mod common;

use common::device;
use lily_checkpoint::Checkpoint;
use lily_emulated::EmulatedOptions;
use lily_engine::{
    CancelFlag, Engine, EngineOptions, GenerationRequest, SamplingParameters, TextModel,
};
use lily_plan::Precision;
use lily_testing::repository;
use serde_json::Value;
use std::sync::Arc;

struct Case {
    id: String,
    prompt: Vec<u32>,
    completion: Vec<u32>,
}

/// The cases whose every choice was clear, the shortest first.
fn robust() -> Vec<Case> {
    let ids = |value: &Value| -> Vec<u32> {
        let ids = value.as_array().unwrap().iter();
        ids.map(|id| id.as_u64().unwrap() as u32).collect()
    };
    let text = std::fs::read_to_string(repository("models/lily-tiny/expected.jsonl")).unwrap();
    let mut cases: Vec<Case> = text
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap())
        .filter(|line| line["min_margin"].as_f64().unwrap() >= 0.5)
        .map(|line| Case {
            id: line["id"].as_str().unwrap().to_string(),
            prompt: ids(&line["prompt_ids"]),
            completion: ids(&line["completion_ids"]),
        })
        .collect();
    cases.sort_by_key(|case| case.prompt.len() + 4 * case.completion.len());
    assert_eq!(cases.len(), 63);
    cases
}

fn check(cases: &[Case]) {
    let checkpoint = Arc::new(Checkpoint::open(&repository("models/lily-tiny")).unwrap());
    let device = device(&checkpoint, EmulatedOptions::default());
    let model = device.model().clone();
    let text = Arc::new(TextModel::load(&checkpoint).unwrap());
    let options = EngineOptions {
        precision: Precision::Bf16,
        prefill_chunk: 64,
        ..EngineOptions::default()
    };
    let mut engine = Engine::new(Box::new(device), model, text, options).unwrap();
    for case in cases {
        let request = GenerationRequest {
            prompt: case.prompt.clone(),
            sampling: SamplingParameters::default(),
            max_tokens: Some(case.completion.len() + 8),
            ..GenerationRequest::default()
        };
        let generation = engine.start(None, request, CancelFlag::default()).unwrap();
        let done = engine.run(generation, |_| {}).unwrap();
        assert_eq!(done.tokens(), case.completion, "{}", case.id);
        println!(
            "{}: {} and {} tokens",
            case.id,
            case.prompt.len(),
            case.completion.len()
        );
    }
}

#[test]
fn the_shortest_robust_completions_are_reproduced_token_for_token() {
    check(&robust()[..3]);
}

#[test]
#[ignore = "a quarter of an hour"]
fn all_robust_completions_are_reproduced_token_for_token() {
    check(&robust());
}
