//! What a plan has to know of a model: dimensions and how each weight is stored.

use lily_checkpoint::{
    Checkpoint, CheckpointError, ModelConfig, WeightFormat, WeightId, WeightRole, WeightShape,
    WeightSpec,
};
use std::collections::HashMap;

/// A model without its weights: enough to record, count and price plans.
#[derive(Clone, Debug)]
pub struct ModelDescription {
    /// Its dimensions.
    pub config: ModelConfig,
    weights: HashMap<WeightId, (WeightShape, WeightFormat)>,
}

impl ModelDescription {
    /// Describes the model `config`, asking `format_of` how each of its weights is stored.
    pub fn new(
        config: ModelConfig,
        mut format_of: impl FnMut(&WeightSpec) -> WeightFormat,
    ) -> Self {
        let weights = config
            .weights()
            .iter()
            .map(|spec| (spec.id, (spec.shape, format_of(spec))))
            .collect();
        ModelDescription { config, weights }
    }

    /// Describes an opened checkpoint.
    ///
    /// # Errors
    /// Where a weight cannot be had.
    pub fn of(checkpoint: &Checkpoint) -> Result<Self, CheckpointError> {
        let config = checkpoint.config().clone();
        let describe = |spec: WeightSpec| {
            let format = checkpoint.weight(spec.id)?.format;
            Ok((spec.id, (spec.shape, format)))
        };
        let weights = config.weights().into_iter().map(describe);
        let weights = weights.collect::<Result<_, CheckpointError>>()?;
        Ok(ModelDescription { config, weights })
    }

    /// The weight that holds the head's rows: the embedding where the model ties them.
    pub fn head(&self) -> WeightId {
        WeightId::global(if self.config.tie_word_embeddings {
            WeightRole::Embedding
        } else {
            WeightRole::Head
        })
    }

    /// Shape of a weight. Panics for a weight the model does not have: plans only name those it has.
    pub fn shape(&self, id: WeightId) -> WeightShape {
        self.weights[&id].0
    }

    /// Storage of a weight; panics like [`shape`](Self::shape).
    pub fn format(&self, id: WeightId) -> WeightFormat {
        self.weights[&id].1
    }

    /// Rows (of one expert, where there are several) and columns of a weight.
    pub fn dimensions(&self, id: WeightId) -> (usize, usize) {
        match self.shape(id) {
            WeightShape::Experts {
                outputs, inputs, ..
            } => (outputs, inputs),
            other => other.rows_and_columns(),
        }
    }

    /// Stored bytes of a weight, or of one expert of it.
    pub fn bytes(&self, id: WeightId) -> u64 {
        let (rows, columns) = self.dimensions(id);
        rows as u64 * self.format(id).row_bytes(columns) as u64
    }

    /// Stored bytes of all the weights.
    pub fn total_bytes(&self) -> u64 {
        self.weights
            .iter()
            .map(|(_, (shape, format))| {
                let (rows, columns) = shape.rows_and_columns();
                rows as u64 * format.row_bytes(columns) as u64
            })
            .sum()
    }
}
