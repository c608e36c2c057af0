//! What the tests of this crate share: the embedded model on the CPU device.
#![allow(dead_code)]

use lily_checkpoint::Checkpoint;
use lily_cpu::{CpuDevice, CpuOptions};
use lily_engine::{Engine, EngineOptions, TextModel};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Where the embedded model's files lie.
pub fn tiny() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/lily-tiny")
}

/// An engine as a caller gets it who asks for nothing.
pub fn engine() -> Engine {
    engine_with(|_| {})
}

/// An engine with other options.
pub fn engine_with(change: impl FnOnce(&mut EngineOptions)) -> Engine {
    let checkpoint = Arc::new(Checkpoint::open(&tiny()).unwrap());
    let text = Arc::new(TextModel::load(&checkpoint).unwrap());
    let device = CpuDevice::new(checkpoint, &CpuOptions::default()).unwrap();
    let model = device.model().clone();
    let mut options = EngineOptions::default();
    change(&mut options);
    Engine::new(Box::new(device), model, text, options).unwrap()
}
