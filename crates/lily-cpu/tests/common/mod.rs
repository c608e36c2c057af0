//! Models on the CPU device.
#![allow(dead_code)] // Each test file uses a part of it.

use lily_checkpoint::Checkpoint;
use lily_cpu::{CpuDevice, CpuOptions, Kernels};
use lily_plan::Precision;
use lily_testing::Runner;
use std::path::Path;
use std::sync::Arc;

/// The kernels a caller gets who asks for nothing.
pub fn native() -> CpuOptions {
    CpuOptions::default()
}

/// The oracle.
pub fn reference() -> CpuOptions {
    CpuOptions {
        kernels: Kernels::Reference,
        ..CpuOptions::default()
    }
}

/// A stored model.
pub fn open(directory: &Path, precision: Precision, options: &CpuOptions) -> Runner<CpuDevice> {
    on(
        Arc::new(Checkpoint::open(directory).unwrap()),
        precision,
        options,
    )
}

/// A model at hand.
pub fn on(
    checkpoint: Arc<Checkpoint>,
    precision: Precision,
    options: &CpuOptions,
) -> Runner<CpuDevice> {
    let device = CpuDevice::new(checkpoint, options).unwrap();
    let model = device.model().clone();
    Runner::new(device, model, precision)
}
