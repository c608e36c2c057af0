//! Checkpoints of any shape with random weights, written as MLX writes them: headers of arbitrary length,
//! so that tensors lie at odd addresses.

use lily_checkpoint::{
    Checkpoint, DeclaredModel, WeightFormat, WeightRole, WeightSpec, f32_to_bf16,
};
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::io::Write;
use std::sync::Arc;

/// A quantised weight as it is stored: shape and bytes of codes, scales and biases.
#[derive(Clone, Debug)]
pub struct Packed {
    /// u32 words.
    pub codes: (Vec<usize>, Vec<u8>),
    /// bf16 numbers.
    pub scales: (Vec<usize>, Vec<u8>),
    /// bf16 numbers.
    pub biases: (Vec<usize>, Vec<u8>),
}

/// A checkpoint to be made.
#[derive(Clone, Debug)]
pub struct Synthetic {
    /// Its config.json; a `quantization` table decides the formats.
    pub config: Value,
    /// Weights with given values, by module path (`model.layers.0.input_layernorm`); stored plainly, in f32.
    pub given: HashMap<String, Vec<f32>>,
    /// Weights given as they are stored, by module path.
    pub packed: HashMap<String, Packed>,
    /// Seed of the random weights.
    pub seed: u64,
}

impl Synthetic {
    /// A small model of two layers, one of each kind, its `text_config` changed by `changes`.
    pub fn small(changes: Value) -> Self {
        let mut text = json!({
            "model_type": "qwen3_5_moe_text",
            "hidden_size": 256, "num_hidden_layers": 2, "full_attention_interval": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
            "linear_num_key_heads": 2, "linear_num_value_heads": 4,
            "linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4,
            "num_experts": 16, "num_experts_per_tok": 4,
            "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25
            },
            "rms_norm_eps": 1e-6, "vocab_size": 320, "max_position_embeddings": 262_144,
            "tie_word_embeddings": false,
        });
        if let (Value::Object(text), Value::Object(changes)) = (&mut text, changes) {
            text.extend(changes);
        }
        let config = json!({
            "model_type": "qwen3_5_moe",
            "quantization": {"group_size": 64, "bits": 4, "mode": "affine"},
            "text_config": text,
        });
        Synthetic {
            config,
            given: HashMap::new(),
            packed: HashMap::new(),
            seed: 1,
        }
    }

    /// Writes and opens it.
    ///
    /// # Panics
    /// If the configuration is refused or the disk is full.
    pub fn open(&self) -> Arc<Checkpoint> {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let config = self.config.to_string();
        std::fs::write(folder.path().join("config.json"), &config).expect("config.json");
        let model = DeclaredModel::parse(&config, "config.json").expect("a sound configuration");
        let mut random = Random(self.seed);
        let mut header = Map::new();
        let mut data: Vec<u8> = Vec::new();
        let mut add = |name: String, dtype: &str, shape: Vec<usize>, bytes: Vec<u8>| {
            let offsets = [data.len(), data.len() + bytes.len()];
            header.insert(
                name,
                json!({"dtype": dtype, "shape": shape, "data_offsets": offsets}),
            );
            data.extend(bytes);
        };
        for spec in model.config.weights() {
            let path = format!("language_model.{}", spec.id);
            let name = if spec.id.role.is_bare() {
                path.clone()
            } else {
                format!("{path}.weight")
            };
            let shape = spec.shape.stored();
            if let Some(Packed {
                codes,
                scales,
                biases,
            }) = self.packed.get(&spec.id.module_path())
            {
                add(name, "U32", codes.0.clone(), codes.1.clone());
                add(
                    format!("{path}.scales"),
                    "BF16",
                    scales.0.clone(),
                    scales.1.clone(),
                );
                add(
                    format!("{path}.biases"),
                    "BF16",
                    biases.0.clone(),
                    biases.1.clone(),
                );
                continue;
            }
            if let Some(values) = self.given.get(&spec.id.module_path()) {
                let bytes = values
                    .iter()
                    .flat_map(|value| value.to_le_bytes())
                    .collect();
                add(name, "F32", shape, bytes);
                continue;
            }
            match model.quantization.format_of(&spec) {
                WeightFormat::Plain(_) => {
                    let count = shape.iter().product::<usize>();
                    let values = (0..count).map(|_| f32_to_bf16(plain(&spec, &mut random)));
                    add(
                        name,
                        "BF16",
                        shape,
                        values.flat_map(u16::to_le_bytes).collect(),
                    );
                }
                WeightFormat::Affine { bits, group, .. } => {
                    let (rows, columns) = spec.shape.rows_and_columns();
                    let with_last = |last: usize| {
                        let mut shape = shape.clone();
                        *shape.last_mut().expect("a dimension") = last;
                        shape
                    };
                    let words = columns * usize::from(bits) / 32;
                    let codes =
                        (0..rows * words).flat_map(|_| (random.next() as u32).to_le_bytes());
                    add(name, "U32", with_last(words), codes.collect());
                    // Symmetric about zero, of a size that keeps activations of order one, scales of
                    // either sign.
                    let groups = columns / usize::from(group);
                    let step = 3.4 / (columns as f32).sqrt() / f32::from((1_u16 << bits) - 1);
                    let mut scales = Vec::new();
                    let mut biases = Vec::new();
                    for _ in 0..rows * groups {
                        let scale = step * (0.5 + random.unit()) * random.sign();
                        scales.extend(f32_to_bf16(scale).to_le_bytes());
                        let bias = -scale * f32::from((1_u16 << bits) - 1) / 2.0;
                        biases.extend(f32_to_bf16(bias).to_le_bytes());
                    }
                    add(format!("{path}.scales"), "BF16", with_last(groups), scales);
                    add(format!("{path}.biases"), "BF16", with_last(groups), biases);
                }
            }
        }
        let mut header = Value::Object(header).to_string().into_bytes();
        if header.len().is_multiple_of(2) {
            header.push(b' ');
        }
        let path = folder.path().join("model.safetensors");
        let mut file = std::fs::File::create(path).expect("a file");
        file.write_all(&(header.len() as u64).to_le_bytes())
            .expect("room");
        file.write_all(&header).expect("room");
        file.write_all(&data).expect("room");
        // The mapping outlives the folder.
        Arc::new(Checkpoint::open(folder.path()).expect("a sound checkpoint"))
    }
}

/// Vectors and taps of the size that trained models have them.
fn plain(spec: &WeightSpec, random: &mut Random) -> f32 {
    match spec.id.role {
        WeightRole::DeltaALog => random.unit() * 2.0,
        WeightRole::DeltaDtBias => random.unit() * 2.0 - 1.0,
        WeightRole::DeltaConv => random.unit() - 0.5,
        _ if spec.shape.is_linear() => {
            let (_, columns) = spec.shape.rows_and_columns();
            (random.unit() * 2.0 - 1.0) * 1.7 / (columns as f32).sqrt()
        }
        _ => 0.8 + 0.4 * random.unit(),
    }
}

/// SplitMix64 (Steele, Lea, Flood 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// From 0 up to 1.
    fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 24) as f32
    }

    fn sign(&mut self) -> f32 {
        if self.next() & 1 == 0 { 1.0 } else { -1.0 }
    }
}
