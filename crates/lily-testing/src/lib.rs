//! What the tests of several crates share: where fixtures lie, recorded tensors, synthetic checkpoints, and a plain way
//! to run a model on any device. Not part of the product.

#![forbid(unsafe_code)]

mod fixtures;
mod runner;
mod synthetic;
mod watched;

pub use fixtures::{
    GoldenPrompt, arg_max, distance, fixture, golden_prompts, read_stored, read_tensors, repository,
};
pub use runner::Runner;
pub use synthetic::{Packed, Synthetic};
pub use watched::{Seen, Watched};
