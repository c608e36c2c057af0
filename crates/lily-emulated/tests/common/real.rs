//! Layers of the real model's dimensions, with fewer experts and a short vocabulary.

use lily_checkpoint::Checkpoint;
use lily_testing::Synthetic;
use serde_json::json;
use std::sync::Arc;

/// Experts of a layer: 32 of 256, of which 8 are chosen as there.
pub const EXPERTS: usize = 32;
/// Tokens: 1,000 of 248,320.
pub const VOCABULARY: usize = 1_000;

/// One layer of Gated DeltaNet and one of attention, each with its experts.
pub fn layers() -> Arc<Checkpoint> {
    let mut synthetic = Synthetic::small(json!({
        "hidden_size": 2_048, "num_hidden_layers": 2, "full_attention_interval": 2,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
        "num_experts": EXPERTS, "num_experts_per_tok": 8,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "vocab_size": VOCABULARY,
    }));
    // As the published checkpoint has them.
    for layer in 0..2 {
        for module in ["mlp.gate", "mlp.shared_expert_gate"] {
            let path = format!("language_model.model.layers.{layer}.{module}");
            synthetic.config["quantization"][path] = json!({"group_size": 64, "bits": 8});
        }
    }
    synthetic.open()
}
