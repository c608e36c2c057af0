//! Models on the emulated device.
#![allow(dead_code)] // Each test file uses a part of it.

use lily_checkpoint::Checkpoint;
use lily_emulated::{Emulated, EmulatedOptions};
use lily_gpu::{GpuDevice, GpuOptions};
use lily_plan::Precision;
use lily_testing::Runner;
use std::path::Path;
use std::sync::Arc;

/// A device for a model at hand.
pub fn device(checkpoint: &Arc<Checkpoint>, options: EmulatedOptions) -> GpuDevice<Emulated> {
    let gpu = Emulated::new(options);
    GpuDevice::new(gpu, checkpoint, GpuOptions::default(), &mut |_, _| {}).expect("a device")
}

/// A stored model.
pub fn runner(directory: &Path, precision: Precision) -> Runner<GpuDevice<Emulated>> {
    let checkpoint = Arc::new(Checkpoint::open(directory).expect("a sound checkpoint"));
    let device = device(&checkpoint, EmulatedOptions::default());
    let model = device.model().clone();
    Runner::new(device, model, precision)
}
