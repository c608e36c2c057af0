//! Executes plans with the kernels of `kernels/*.metal`, on anything that runs them: operations become dispatches
//! ([`record`](mod@record)), and a [`Gpu`] encodes those. Knows nothing of sessions beyond their memory, of text or
//! of HTTP.

#![forbid(unsafe_code)]

mod ahead;
pub mod batch;
mod cache;
mod device;
mod gpu;
pub mod kernels;
pub mod record;
pub mod route;
mod run;
mod sampling;
mod state;
mod switches;
pub mod timing;
mod weights;

pub use device::{GpuDevice, GpuOptions};
pub use gpu::{Argument, Cost, Dispatch, Divisible, Gpu, GpuDescription, MatrixUnits, Stage};
pub use state::{GpuState, PAGE, StateLayout};
pub use switches::{Switch, Switches};
pub use weights::matrix_bytes;
