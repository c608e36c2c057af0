//! Weights as the CPU device holds them: matrices stay packed in the mapped file, vectors and
//! convolution taps (a few kilobytes a layer) are read into f32 once.

use lily_checkpoint::{Checkpoint, ModelConfig, Weight, WeightId};
use lily_plan::DeviceError;
use std::collections::HashMap;
use std::sync::Arc;

/// The weights of one checkpoint.
pub(crate) struct Weights {
    matrices: HashMap<WeightId, Weight<'static>>,
    vectors: HashMap<WeightId, Vec<f32>>,
    checkpoint: Arc<Checkpoint>,
}

impl Weights {
    pub fn new(checkpoint: Arc<Checkpoint>) -> Result<Self, DeviceError> {
        let mut matrices = HashMap::new();
        let mut vectors = HashMap::new();
        for spec in checkpoint.config().weights() {
            let weight = checkpoint
                .weight(spec.id)
                .map_err(|error| DeviceError::Weight {
                    weight: spec.id.to_string(),
                    reason: error.to_string(),
                })?;
            if spec.shape.is_linear() {
                // SAFETY: the weight borrows from the checkpoint's mapping, which does not move and lives
                // as long as the `Arc` in this struct; `matrix` gives it out for no longer than `&self`.
                let weight = unsafe { std::mem::transmute::<Weight<'_>, Weight<'static>>(weight) };
                matrices.insert(spec.id, weight);
            } else {
                vectors.insert(spec.id, weight.read_plain());
            }
        }
        Ok(Weights {
            matrices,
            vectors,
            checkpoint,
        })
    }

    /// A linear weight. Panics for one the model does not have: plans only name those it has.
    pub fn matrix(&self, id: WeightId) -> &Weight<'_> {
        &self.matrices[&id]
    }

    /// A norm, a bias or convolution taps as f32.
    pub fn vector(&self, id: WeightId) -> &[f32] {
        &self.vectors[&id]
    }

    pub fn config(&self) -> &ModelConfig {
        self.checkpoint.config()
    }
}
