//! The Metal device: the kernels of `kernels/*.metal`, compiled when the program runs, on the GPU of an Apple
//! Silicon Mac, behind the interface that CUDA and the emulator have too ([`lily_gpu::Gpu`]).
//!
//! Outside of macOS there is no Metal, and this crate is empty; tests of what needs no Metal (inlining, the reading of
//! errors, the numbers of the probe) are compiled and run everywhere.
//! Everything else has been type-checked, linted and linked for `aarch64-apple-darwin`, and has never been run.
//!
//! - **Memory** is shared: processor and GPU see the same bytes, nothing is copied between them. A `Buffer` owns
//!   its memory. All buffers are in one residency set that belongs to the queue, because kernels reach sessions by
//!   addresses that no argument names. Buffers are not hazard-tracked: barriers come from the plan, and a
//!   fence between command buffers.
//! - **Work** goes out as one concurrent compute encoder a command buffer, with a barrier between stages and nowhere
//!   else. `submit` does not wait, so two runs can be under way in alternation.
//! - **Kernels** are compiled from the text in the program; no part of Xcode is needed. There is no cache of pipelines
//!   on disk (`MTLBinaryArchive`): the system keeps one of its own.
//!
//! `unsafe` is in this crate because Metal's interface is; each block says why it holds.

#![warn(missing_docs)]

// What needs no Metal, so that its tests run everywhere.
#[cfg(any(target_os = "macos", test))]
mod fault;
#[cfg(any(target_os = "macos", test))]
mod probe;
#[cfg(any(target_os = "macos", test))]
mod source;

#[cfg(target_os = "macos")]
mod capture;
#[cfg(target_os = "macos")]
mod compile;
#[cfg(target_os = "macos")]
mod encode;
#[cfg(target_os = "macos")]
mod machine;
#[cfg(target_os = "macos")]
mod memory;
#[cfg(target_os = "macos")]
mod metal;
#[cfg(target_os = "macos")]
mod registry;

#[cfg(target_os = "macos")]
pub use compile::Pipeline;
#[cfg(target_os = "macos")]
pub use machine::Machine;
#[cfg(target_os = "macos")]
pub use memory::Buffer;
#[cfg(target_os = "macos")]
pub use metal::{Metal, MetalOptions, open};
