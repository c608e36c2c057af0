//! The model's shape, as `config.json` declares it (docs/model.md, section 2).

/// Which token mixer a layer has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LayerKind {
    /// Gated DeltaNet: causal convolution and a recurrent state.
    GatedDelta,
    /// Gated full attention with a KV cache.
    Attention,
}

/// The dimensions of a Qwen3.5/3.6-MoE text model. Every field is validated by [`ModelConfig::parse`]:
/// no dimension is zero, every product of dimensions fits, head counts divide.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// H: width of the residual stream.
    pub hidden_size: usize,
    /// L: number of layers.
    pub layers: usize,
    /// Layer `i` is attention iff `(i + 1) % full_attention_interval == 0`.
    pub full_attention_interval: usize,
    /// Nq: query heads.
    pub attention_heads: usize,
    /// Nkv: KV heads; divides `attention_heads`.
    pub key_value_heads: usize,
    /// D: width of an attention head.
    pub head_dim: usize,
    /// How many leading dimensions of a head rotate (even, at most `head_dim`).
    pub rotary_dim: usize,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Hk: key (and query) heads of a Gated DeltaNet layer.
    pub linear_key_heads: usize,
    /// Hv: value heads of a Gated DeltaNet layer; a multiple of `linear_key_heads`.
    pub linear_value_heads: usize,
    /// Dk: width of a Gated DeltaNet key head.
    pub linear_key_dim: usize,
    /// Dv: width of a Gated DeltaNet value head.
    pub linear_value_dim: usize,
    /// K: taps of the causal convolution (at least 2).
    pub conv_kernel: usize,
    /// E: routed experts of a layer.
    pub experts: usize,
    /// k: experts a token is routed to; at most `experts`.
    pub experts_per_token: usize,
    /// I: width of a routed expert.
    pub expert_intermediate: usize,
    /// Is: width of the shared expert.
    pub shared_intermediate: usize,
    /// Epsilon of every RMS norm.
    pub rms_norm_eps: f64,
    /// V: rows of the embedding and of the head (some may have no token).
    pub vocab_size: usize,
    /// Longest sequence the model was made for, in tokens.
    pub max_positions: usize,
    /// Whether the head shares the embedding's rows.
    pub tie_word_embeddings: bool,
    /// End-of-sequence ids named in config.json (generation_config.json has the last word).
    pub eos_token_ids: Vec<u32>,
}

impl ModelConfig {
    /// The mixer of layer `layer`.
    pub fn layer_kind(&self, layer: usize) -> LayerKind {
        if (layer + 1).is_multiple_of(self.full_attention_interval) {
            LayerKind::Attention
        } else {
            LayerKind::GatedDelta
        }
    }

    /// How many layers are attention layers.
    pub fn attention_layers(&self) -> usize {
        self.layers / self.full_attention_interval
    }

    /// Channels of the causal convolution: query, key and value heads side by side (2·Hk·Dk + Hv·Dv).
    pub fn conv_channels(&self) -> usize {
        2 * self.linear_key_heads * self.linear_key_dim + self.linear_value_width()
    }

    /// Hv·Dv: width of a Gated DeltaNet layer's value stream.
    pub fn linear_value_width(&self) -> usize {
        self.linear_value_heads * self.linear_value_dim
    }

    /// Nq·D: width of an attention layer's output before its projection.
    pub fn attention_width(&self) -> usize {
        self.attention_heads * self.head_dim
    }

    /// Nkv·D: width of one token's keys (or values) in one layer's cache.
    pub fn key_value_width(&self) -> usize {
        self.key_value_heads * self.head_dim
    }
}
