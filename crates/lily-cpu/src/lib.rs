//! The CPU device: executes plans with all cores, reading packed weights where they lie in the mapped
//! file; and the reference, every operation as plain loops, which is the oracle of every device.

mod arena;
mod check;
mod context;
mod device;
mod native;
mod reference;
mod sample;
mod state;
mod weights;

pub use check::{ExpectedOutput, ReferenceStep, StepDifference, compare_device};
pub use device::{CpuDevice, CpuOptions, Kernels};
pub use native::{InstructionSet, measure_bandwidth};
