//! Checkpoints of Qwen3.5/3.6-MoE models as MLX stores them: configuration, safetensors, quantised
//! tensors. Everything in a checkpoint file is untrusted; every defect is an error that names the file,
//! the tensor, what was expected and what was found.
//!
//! [`Checkpoint`] opens weights; [`DeclaredModel`] works from a `config.json` alone.

mod checkpoint;
mod config;
mod config_json;
mod declared;
mod error;
mod files;
pub mod fuzzing;
mod header;
mod inventory;
pub mod numbers;
mod summary;
mod weight;
mod weights;

pub use checkpoint::{Checkpoint, TensorCount};
pub use config::{LayerKind, ModelConfig};
pub use declared::{DeclaredModel, DeclaredQuantization};
pub use error::CheckpointError;
pub use header::{Header, HeaderTensor, MAX_HEADER_BYTES, StoredType, parse_header};
pub use numbers::{bf16_to_f32, f16_to_f32, f32_to_bf16};
pub use summary::{FileSummary, FormatSummary, Summary};
pub use weight::{Weight, WeightData};
pub use weights::{DType, WeightFormat, WeightId, WeightRole, WeightShape, WeightSpec};
