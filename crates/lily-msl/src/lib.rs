//! Metal kernels without a Metal device: a translator from the Metal Shading Language to C++, and an
//! emulator that runs the result on the processor.
//!
//! It is for development, and for what is built ahead: translating needs the system's C++ compiler (`CXX`, else `c++`,
//! `g++` or `clang++`), C++17 and nothing else. Only [`nvrtc`] is for programs when they run.
//!
//! - [`translate`] turns one kernel file into C++ (or CUDA, or the dialect of a strict check) and reads off
//!   each kernel's [`KernelSignature`], against which host code can be checked;
//! - [`Emulator`] builds such a file for this machine and [`Library::dispatch`] runs its kernels: every thread
//!   is a fiber, simdgroups exchange in lockstep, barriers hold. A dispatch reports divergence always, and in
//!   the race build also races and accesses out of bounds, with counts of all memory traffic;
//! - [`StrictCheck`] holds a file against MSL's type system, address spaces included, by means of clang;
//! - [`cuda`] makes one text of a file for NVIDIA GPUs, which [`nvrtc`] compiles, with what each kernel takes.
//!
//! # What a kernel file may contain
//!
//! - Every kernel parameter has an explicit attribute; buffer indices are plain numbers.
//! - Every instantiation of a kernel template has a `host_name`.
//! - Functions are not overloaded by address space alone, which C++ does not have.
//! - Simdgroup functions are reached by all lanes of a simdgroup that have not returned.
//! - Rows of 16-bit simdgroup matrices begin at even elements.
//! - `#include "x.h"` names another file of the same [`Sources`], taken once; macros are the system
//!   preprocessor's.
//! - Threadgroup variables are declared without an initialiser, in a kernel's own body.
//!
//! # What it cannot show
//!
//! How Apple's compiler rounds under fast math, the order of sums in a simdgroup, weak ordering of memory
//! between threadgroups, occupancy, and time. Here a product and a sum are fused only where the kernel says
//! `fma`; a simdgroup's sum is a tree over its lanes. The counters count what the C++ compiler left of the
//! kernel's loads and stores: exact and repeatable for one compiler; another may keep a value in a register
//! that this one loads twice. Two buffers with the same memory are counted as one of them.

mod arguments;
mod compiler;
mod cubin;
pub mod cuda;
mod emulator;
mod lexer;
mod library;
mod mutation;
mod native;
pub mod nvrtc;
mod preprocess;
mod report;
mod signature;
mod strict;
mod translate;

pub use cubin::KernelResources;
pub use cuda::source as cuda_source;

pub use arguments::{
    Argument, Constant, ConstantValue, LINE_BYTES, Launch, Schedule, SharedBuffer,
};
pub use emulator::{BuildKind, Emulator};
pub use library::Library;
pub use mutation::removable_barriers;
pub use preprocess::Sources;
pub use report::{
    EmulatorError, Fault, FaultKind, MemoryCounters, Report, ThreadgroupTraffic, Traffic,
};
pub use signature::{
    AddressSpace, BufferBinding, Builtin, FunctionConstant, KernelSignature, ThreadgroupBinding,
};
pub use strict::{StrictCheck, StrictError};
pub use translate::{Rejection, Target, TranslateError, Translated, translate, translate_sources};
