//! Checkpoints of Qwen3.5/3.6-MoE models as MLX stores them: configuration, safetensors, quantised
//! tensors. Everything in a checkpoint file is untrusted; every defect is an error that names the file,
//! the tensor, what was expected and what was found.

mod config;
mod weights;

pub use config::{LayerKind, ModelConfig};
pub use weights::{DType, WeightFormat, WeightId, WeightRole, WeightShape, WeightSpec};
