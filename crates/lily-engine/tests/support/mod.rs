//! What the tests of this crate share: the embedded model on the CPU device.
#![allow(dead_code)] // Each test file uses a part of it.

use lily_checkpoint::Checkpoint;
use lily_cpu::{CpuDevice, CpuOptions};
use lily_engine::{
    CancelFlag, Engine, EngineError, EngineOptions, Generation, GenerationRequest, Progress,
    TextModel, TokenEvent,
};
use lily_testing::repository;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

/// Where the embedded model's files lie.
pub fn tiny() -> PathBuf {
    repository("models/lily-tiny")
}

/// An engine as a caller gets it who asks for nothing.
pub fn engine() -> Engine {
    engine_with(|_| {})
}

/// An engine with other options.
pub fn engine_with(change: impl FnOnce(&mut EngineOptions)) -> Engine {
    engine_on(&CpuOptions::default(), change)
}

/// An engine with options that may not do.
pub fn try_engine(change: impl FnOnce(&mut EngineOptions)) -> Result<Engine, EngineError> {
    try_engine_on(&CpuOptions::default(), change)
}

/// An engine on a device of its own kind.
pub fn engine_on(device: &CpuOptions, change: impl FnOnce(&mut EngineOptions)) -> Engine {
    try_engine_on(device, change).unwrap()
}

fn try_engine_on(
    device: &CpuOptions,
    change: impl FnOnce(&mut EngineOptions),
) -> Result<Engine, EngineError> {
    static OPENED: OnceLock<(Arc<Checkpoint>, Arc<TextModel>)> = OnceLock::new();
    let (checkpoint, text) = OPENED.get_or_init(|| {
        let checkpoint = Arc::new(Checkpoint::open(&tiny()).unwrap());
        let text = Arc::new(TextModel::load(&checkpoint).unwrap());
        (checkpoint, text)
    });
    let device = CpuDevice::new(checkpoint.clone(), device).unwrap();
    let model = device.model().clone();
    let mut options = EngineOptions::default();
    change(&mut options);
    Engine::new(Box::new(device), model, text.clone(), options)
}

/// A prompt that asks `question`, thinking off.
pub fn question(engine: &Engine, question: &str) -> Vec<u32> {
    let text = format!(
        "<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    );
    engine.text().tokenizer().encode(&text).unwrap()
}

/// A whole answer.
pub struct Answer {
    pub generation: Generation,
    pub tokens: Vec<TokenEvent>,
    pub text: String,
}

/// Generates to the end.
pub fn answer(engine: &mut Engine, request: GenerationRequest) -> Result<Answer, EngineError> {
    let generation = engine.start(None, request, CancelFlag::default())?;
    let (mut tokens, mut text) = (Vec::new(), String::new());
    let generation = engine.run(generation, |progress| match progress {
        Progress::Token(token) => {
            text.push_str(&token.text);
            tokens.push(token.clone());
        }
        Progress::Finished(finished) => text.push_str(&finished.text),
        Progress::Prefilled { .. } => {}
    })?;
    Ok(Answer {
        generation,
        tokens,
        text,
    })
}
