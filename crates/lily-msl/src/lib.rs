//! Metal kernels without a Metal device: a translator from the Metal Shading Language to C++, and an
//! emulator that runs the result on the processor.
//!
//! This crate is for development alone. It needs the system's C++ compiler (`CXX`, else `c++`, `g++` or
//! `clang++`), C++17 and nothing else.
//!
//! - [`translate`] turns one kernel file into C++ (or CUDA, or the dialect of a strict check) and reads off
//!   each kernel's [`KernelSignature`], against which host code can be checked;

mod compiler;
mod lexer;
mod preprocess;
mod signature;
mod translate;

pub use preprocess::Sources;
pub use signature::{
    AddressSpace, BufferBinding, Builtin, FunctionConstant, KernelSignature, ThreadgroupBinding,
};
pub use translate::{Rejection, Target, TranslateError, Translated, translate, translate_sources};
