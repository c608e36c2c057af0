//! Metal kernels without a Metal device: a translator from the Metal Shading Language to C++, and an
//! emulator that runs the result on the processor.
//!
//! This crate is for development alone. It needs the system's C++ compiler (`CXX`, else `c++`, `g++` or
//! `clang++`), C++17 and nothing else.
//!
//! - [`translate`] turns one kernel file into C++ (or CUDA, or the dialect of a strict check) and reads off
//!   each kernel's [`KernelSignature`], against which host code can be checked;
//! - [`Emulator`] builds such a file for this machine and [`Library::dispatch`] runs its kernels: every thread
//!   is a fiber, simdgroups exchange in lockstep, barriers hold. A dispatch reports divergence always, and in
//!   the race build also races and accesses out of bounds, with counts of all memory traffic.
//!
//! What it cannot show: how Apple's compiler rounds under fast math, its order of sums in a simdgroup, weak
//! ordering of memory between threadgroups, and time.

mod arguments;
mod compiler;
mod emulator;
mod lexer;
mod library;
mod native;
mod preprocess;
mod report;
mod signature;
mod translate;

pub use arguments::{
    Argument, Constant, ConstantValue, LINE_BYTES, Launch, Schedule, SharedBuffer,
};
pub use emulator::{BuildKind, Emulator};
pub use library::Library;
pub use preprocess::Sources;
pub use report::{
    EmulatorError, Fault, FaultKind, MemoryCounters, Report, ThreadgroupTraffic, Traffic,
};
pub use signature::{
    AddressSpace, BufferBinding, Builtin, FunctionConstant, KernelSignature, ThreadgroupBinding,
};
pub use translate::{Rejection, Target, TranslateError, Translated, translate, translate_sources};
