//! Models on the emulated device.
#![allow(dead_code)] // Each test file uses a part of it.

pub mod alone;
pub mod real;
pub mod scan;

use lily_checkpoint::Checkpoint;
use lily_emulated::{Emulated, EmulatedOptions};
use lily_gpu::{GpuDevice, GpuOptions, Switches};
use lily_plan::Precision;
use lily_testing::Runner;
use std::path::Path;
use std::sync::Arc;

/// A device for a model at hand.
pub fn device(checkpoint: &Arc<Checkpoint>, options: EmulatedOptions) -> GpuDevice<Emulated> {
    device_with(checkpoint, options, Switches::default())
}

/// The same with mechanisms turned off or on.
pub fn device_with(
    checkpoint: &Arc<Checkpoint>,
    options: EmulatedOptions,
    switches: Switches,
) -> GpuDevice<Emulated> {
    let gpu = Emulated::new(options);
    let options = GpuOptions { switches };
    GpuDevice::new(gpu, checkpoint, options, &mut |_, _| {}).expect("a device")
}

/// A stored model.
pub fn runner(directory: &Path, precision: Precision) -> Runner<GpuDevice<Emulated>> {
    let checkpoint = Arc::new(Checkpoint::open(directory).expect("a sound checkpoint"));
    let device = device(&checkpoint, EmulatedOptions::default());
    let model = device.model().clone();
    Runner::new(device, model, precision)
}
