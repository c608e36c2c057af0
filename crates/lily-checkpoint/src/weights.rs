//! The weights of the model by name and shape: what the plan refers to, what a checkpoint must hold
//! (docs/model.md, sections 3 and 4).

use crate::config::{LayerKind, ModelConfig};
use std::fmt;

/// How a stored number is encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// bfloat16.
    Bf16,
    /// IEEE half precision.
    F16,
    /// IEEE single precision.
    F32,
}

impl DType {
    /// Bytes of one element.
    pub fn bytes(self) -> usize {
        match self {
            DType::Bf16 | DType::F16 => 2,
            DType::F32 => 4,
        }
    }
}

/// How a weight is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WeightFormat {
    /// One element a number.
    Plain(DType),
    /// MLX affine quantisation: `w = scale · code + bias`, `bits`-wide unsigned codes in one
    /// little-endian bit stream a row, a scale and a bias for each `group` codes of a row.
    Affine {
        /// Width of a code: 2, 3, 4, 5, 6 or 8.
        bits: u8,
        /// Codes that share a scale and a bias: 32, 64 or 128.
        group: u16,
        /// Type of the scales and biases.
        scales: DType,
    },
}

impl WeightFormat {
    /// Bytes of one row of `columns` weights, scales and biases included.
    pub fn row_bytes(self, columns: usize) -> usize {
        match self {
            WeightFormat::Plain(dtype) => columns * dtype.bytes(),
            WeightFormat::Affine {
                bits,
                group,
                scales,
            } => {
                columns * usize::from(bits) / 8 + columns / usize::from(group) * 2 * scales.bytes()
            }
        }
    }
}

impl fmt::Display for WeightFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WeightFormat::Plain(DType::Bf16) => write!(f, "bf16"),
            WeightFormat::Plain(DType::F16) => write!(f, "f16"),
            WeightFormat::Plain(DType::F32) => write!(f, "f32"),
            WeightFormat::Affine { bits, group, .. } => {
                write!(f, "affine {bits}-bit, groups of {group}")
            }
        }
    }
}

/// What a weight is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum WeightRole {
    /// Embedding rows.
    Embedding,
    /// Norm before the head.
    FinalNorm,
    /// Head (logits); the embedding's rows again where the model ties them.
    Head,
    /// Norm before the mixer.
    InputNorm,
    /// Norm before the experts.
    PostNorm,
    /// Gated DeltaNet: queries, keys and values.
    DeltaQkv,
    /// Gated DeltaNet: output gate z.
    DeltaZ,
    /// Gated DeltaNet: write strength b.
    DeltaB,
    /// Gated DeltaNet: decay input a.
    DeltaA,
    /// Gated DeltaNet: convolution taps.
    DeltaConv,
    /// Gated DeltaNet: A_log.
    DeltaALog,
    /// Gated DeltaNet: dt_bias.
    DeltaDtBias,
    /// Gated DeltaNet: gated norm.
    DeltaNorm,
    /// Gated DeltaNet: output projection.
    DeltaOut,
    /// Attention: query and gate rows, interleaved by head.
    Query,
    /// Attention: keys.
    Key,
    /// Attention: values.
    Value,
    /// Attention: query norm.
    QueryNorm,
    /// Attention: key norm.
    KeyNorm,
    /// Attention: output projection.
    AttentionOut,
    /// Router logits.
    Router,
    /// The shared expert's scalar gate.
    SharedGate,
    /// Shared expert: gate projection.
    SharedGateProjection,
    /// Shared expert: up projection.
    SharedUp,
    /// Shared expert: down projection.
    SharedDown,
    /// Routed experts: gate projection.
    ExpertGateProjection,
    /// Routed experts: up projection.
    ExpertUp,
    /// Routed experts: down projection.
    ExpertDown,
}

/// One weight of the model: a role, in a layer unless it is global.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WeightId {
    /// The layer, `None` for embedding, final norm and head.
    pub layer: Option<u16>,
    /// What it is for.
    pub role: WeightRole,
}

/// Logical shape of a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WeightShape {
    /// `length` numbers, never quantised.
    Vector {
        /// How many.
        length: usize,
    },
    /// Convolution taps, stored [channels, taps, 1], never quantised; the last tap is the current token.
    Taps {
        /// Channels.
        channels: usize,
        /// Taps a channel.
        taps: usize,
    },
    /// A linear map y = x·Wᵀ with rows of `inputs` weights.
    Matrix {
        /// Rows of W.
        outputs: usize,
        /// Columns of W.
        inputs: usize,
    },
    /// One matrix an expert, stored one after the other.
    Experts {
        /// Experts.
        experts: usize,
        /// Rows of each.
        outputs: usize,
        /// Columns of each.
        inputs: usize,
    },
}

impl WeightShape {
    /// Rows and columns of the weight read as one matrix (experts stacked, a vector as one row).
    pub fn rows_and_columns(self) -> (usize, usize) {
        match self {
            WeightShape::Vector { length } => (1, length),
            WeightShape::Taps { channels, taps } => (channels, taps),
            WeightShape::Matrix { outputs, inputs } => (outputs, inputs),
            WeightShape::Experts {
                experts,
                outputs,
                inputs,
            } => (experts * outputs, inputs),
        }
    }

    /// Dimensions of the weight's tensor where it is stored plainly.
    pub fn stored(self) -> Vec<usize> {
        match self {
            WeightShape::Vector { length } => vec![length],
            WeightShape::Taps { channels, taps } => vec![channels, taps, 1],
            WeightShape::Matrix { outputs, inputs } => vec![outputs, inputs],
            WeightShape::Experts {
                experts,
                outputs,
                inputs,
            } => vec![experts, outputs, inputs],
        }
    }

    /// Whether the weight may be quantised.
    pub fn is_linear(self) -> bool {
        matches!(
            self,
            WeightShape::Matrix { .. } | WeightShape::Experts { .. }
        )
    }
}

/// A weight the model needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightSpec {
    /// Which.
    pub id: WeightId,
    /// Its logical shape.
    pub shape: WeightShape,
}

impl WeightId {
    /// A global weight.
    pub fn global(role: WeightRole) -> Self {
        WeightId { layer: None, role }
    }

    /// A weight of layer `layer`.
    pub fn in_layer(layer: usize, role: WeightRole) -> Self {
        WeightId {
            layer: Some(layer as u16),
            role,
        }
    }

    /// The module path in an MLX checkpoint, without prefix and without `.weight`,
    /// e.g. `model.layers.3.mlp.switch_mlp.up_proj`, `lm_head`, `model.layers.0.linear_attn.A_log`.
    pub fn module_path(self) -> String {
        match self.layer {
            None => self.role.path().to_string(),
            Some(layer) => format!("model.layers.{layer}.{}", self.role.path()),
        }
    }
}

impl fmt::Display for WeightId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.module_path())
    }
}

impl WeightRole {
    fn path(self) -> &'static str {
        match self {
            WeightRole::Embedding => "model.embed_tokens",
            WeightRole::FinalNorm => "model.norm",
            WeightRole::Head => "lm_head",
            WeightRole::InputNorm => "input_layernorm",
            WeightRole::PostNorm => "post_attention_layernorm",
            WeightRole::DeltaQkv => "linear_attn.in_proj_qkv",
            WeightRole::DeltaZ => "linear_attn.in_proj_z",
            WeightRole::DeltaB => "linear_attn.in_proj_b",
            WeightRole::DeltaA => "linear_attn.in_proj_a",
            WeightRole::DeltaConv => "linear_attn.conv1d",
            WeightRole::DeltaALog => "linear_attn.A_log",
            WeightRole::DeltaDtBias => "linear_attn.dt_bias",
            WeightRole::DeltaNorm => "linear_attn.norm",
            WeightRole::DeltaOut => "linear_attn.out_proj",
            WeightRole::Query => "self_attn.q_proj",
            WeightRole::Key => "self_attn.k_proj",
            WeightRole::Value => "self_attn.v_proj",
            WeightRole::QueryNorm => "self_attn.q_norm",
            WeightRole::KeyNorm => "self_attn.k_norm",
            WeightRole::AttentionOut => "self_attn.o_proj",
            WeightRole::Router => "mlp.gate",
            WeightRole::SharedGate => "mlp.shared_expert_gate",
            WeightRole::SharedGateProjection => "mlp.shared_expert.gate_proj",
            WeightRole::SharedUp => "mlp.shared_expert.up_proj",
            WeightRole::SharedDown => "mlp.shared_expert.down_proj",
            WeightRole::ExpertGateProjection => "mlp.switch_mlp.gate_proj",
            WeightRole::ExpertUp => "mlp.switch_mlp.up_proj",
            WeightRole::ExpertDown => "mlp.switch_mlp.down_proj",
        }
    }

    /// Whether the tensor is named by the module path alone (no `.weight` behind it).
    pub fn is_bare(self) -> bool {
        matches!(self, WeightRole::DeltaALog | WeightRole::DeltaDtBias)
    }
}

impl ModelConfig {
    /// Every weight of the model in the order in which a forward pass first reads them.
    pub fn weights(&self) -> Vec<WeightSpec> {
        let mut specs = Vec::new();
        let global = |role, shape| WeightSpec {
            id: WeightId::global(role),
            shape,
        };
        let matrix = |outputs, inputs| WeightShape::Matrix { outputs, inputs };
        let vector = |length| WeightShape::Vector { length };
        let hidden = self.hidden_size;

        specs.push(global(
            WeightRole::Embedding,
            matrix(self.vocab_size, hidden),
        ));
        for layer in 0..self.layers {
            let mut add = |role, shape| {
                specs.push(WeightSpec {
                    id: WeightId::in_layer(layer, role),
                    shape,
                })
            };
            add(WeightRole::InputNorm, vector(hidden));
            match self.layer_kind(layer) {
                LayerKind::GatedDelta => {
                    let (heads, width) = (self.linear_value_heads, self.linear_value_width());
                    let (channels, taps) = (self.conv_channels(), self.conv_kernel);
                    add(WeightRole::DeltaQkv, matrix(channels, hidden));
                    add(WeightRole::DeltaZ, matrix(width, hidden));
                    add(WeightRole::DeltaB, matrix(heads, hidden));
                    add(WeightRole::DeltaA, matrix(heads, hidden));
                    add(WeightRole::DeltaConv, WeightShape::Taps { channels, taps });
                    add(WeightRole::DeltaALog, vector(heads));
                    add(WeightRole::DeltaDtBias, vector(heads));
                    add(WeightRole::DeltaNorm, vector(self.linear_value_dim));
                    add(WeightRole::DeltaOut, matrix(hidden, width));
                }
                LayerKind::Attention => {
                    let (queries, keys) = (self.attention_width(), self.key_value_width());
                    add(WeightRole::Query, matrix(2 * queries, hidden));
                    add(WeightRole::Key, matrix(keys, hidden));
                    add(WeightRole::Value, matrix(keys, hidden));
                    add(WeightRole::QueryNorm, vector(self.head_dim));
                    add(WeightRole::KeyNorm, vector(self.head_dim));
                    add(WeightRole::AttentionOut, matrix(hidden, queries));
                }
            }
            let (experts, inner, shared) = (
                self.experts,
                self.expert_intermediate,
                self.shared_intermediate,
            );
            let each = |outputs, inputs| WeightShape::Experts {
                experts,
                outputs,
                inputs,
            };
            add(WeightRole::PostNorm, vector(hidden));
            add(WeightRole::Router, matrix(experts, hidden));
            add(WeightRole::SharedGate, matrix(1, hidden));
            add(WeightRole::SharedGateProjection, matrix(shared, hidden));
            add(WeightRole::SharedUp, matrix(shared, hidden));
            add(WeightRole::ExpertGateProjection, each(inner, hidden));
            add(WeightRole::ExpertUp, each(inner, hidden));
            add(WeightRole::ExpertDown, each(hidden, inner));
            add(WeightRole::SharedDown, matrix(hidden, shared));
        }
        specs.push(global(WeightRole::FinalNorm, vector(hidden)));
        if !self.tie_word_embeddings {
            specs.push(global(WeightRole::Head, matrix(self.vocab_size, hidden)));
        }
        specs
    }
}
