//! Checkpoints of any shape with random weights, written as MLX writes them: headers of arbitrary length,
//! so that tensors lie at odd addresses.

use lily_checkpoint::{
    Checkpoint, DeclaredModel, WeightFormat, WeightRole, WeightSpec, f32_to_bf16,
};
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::io::{BufWriter, Write};
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
        let mut end = 0;
        let mut declare = |name: &str, tensor: &Tensor| {
            let offsets = [end, end + tensor.bytes()];
            end = offsets[1];
            header.insert(
                name.to_string(),
                json!({"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets}),
            );
        };
        // Twice the same tensors: their sizes for the header, then their bytes, one after the other.
        for spec in model.config.weights() {
            let format = model.quantization.format_of(&spec);
            for (name, tensor) in self.tensors(&spec, format) {
                declare(&name, &tensor);
            }
        }
        let mut header = Value::Object(header).to_string().into_bytes();
        if header.len().is_multiple_of(2) {
            header.push(b' ');
        }
        let path = folder.path().join("model.safetensors");
        let mut file = BufWriter::new(std::fs::File::create(path).expect("a file"));
        file.write_all(&(header.len() as u64).to_le_bytes())
            .expect("room");
        file.write_all(&header).expect("room");
        for spec in model.config.weights() {
            let format = model.quantization.format_of(&spec);
            for (_, tensor) in self.tensors(&spec, format) {
                tensor.write(&mut file, &spec, &mut random);
            }
        }
        file.flush().expect("room");
        drop(file);
        // The mapping outlives the folder.
        Arc::new(Checkpoint::open(folder.path()).expect("a sound checkpoint"))
    }
}

/// A tensor to be written.
struct Tensor {
    dtype: &'static str,
    shape: Vec<usize>,
    content: Content,
}

enum Content {
    Given(Vec<u8>),
    /// bf16 numbers of the size that trained models have them.
    Plain,
    /// Random codes.
    Codes,
    /// bf16 scales or biases of codes up to `levels`; the same numbers make both.
    Affine {
        levels: f32,
        step: f32,
        biases: bool,
    },
}

/// Words of random codes that a larger tensor repeats.
const BLOCK: usize = 1 << 20;

impl Tensor {
    fn count(&self) -> usize {
        self.shape.iter().product()
    }

    fn bytes(&self) -> usize {
        self.count() * if self.dtype == "BF16" { 2 } else { 4 }
    }

    fn write(&self, file: &mut impl Write, spec: &WeightSpec, random: &mut Random) {
        let count = self.count();
        match &self.content {
            Content::Given(bytes) => file.write_all(bytes).expect("room"),
            Content::Plain => {
                let values = (0..count).map(|_| f32_to_bf16(plain(spec, random)));
                let bytes: Vec<u8> = values.flat_map(u16::to_le_bytes).collect();
                file.write_all(&bytes).expect("room");
            }
            Content::Codes => {
                let block: Vec<u8> = (0..count.min(BLOCK))
                    .flat_map(|_| (random.next() as u32).to_le_bytes())
                    .collect();
                let mut left = count * 4;
                while left > 0 {
                    let now = left.min(block.len());
                    file.write_all(&block[..now]).expect("room");
                    left -= now;
                }
            }
            &Content::Affine {
                levels,
                step,
                biases,
            } => {
                // Symmetric about zero, scales of either sign.
                let mut same = Random(random.0 ^ count as u64);
                let mut bytes = Vec::with_capacity(count * 2);
                for _ in 0..count {
                    let scale = step * (0.5 + same.unit()) * same.sign();
                    let value = if biases { -scale * levels / 2.0 } else { scale };
                    bytes.extend(f32_to_bf16(value).to_le_bytes());
                }
                file.write_all(&bytes).expect("room");
            }
        }
    }
}

impl Synthetic {
    /// The tensors that a weight is stored as.
    fn tensors(&self, spec: &WeightSpec, format: WeightFormat) -> Vec<(String, Tensor)> {
        let path = format!("language_model.{}", spec.id);
        let name = if spec.id.role.is_bare() {
            path.clone()
        } else {
            format!("{path}.weight")
        };
        let shape = spec.shape.stored();
        let tensor = |dtype, shape, content| Tensor {
            dtype,
            shape,
            content,
        };
        let given = |dtype, (shape, bytes): &(Vec<usize>, Vec<u8>)| {
            tensor(dtype, shape.clone(), Content::Given(bytes.clone()))
        };
        let three = |codes, scales, biases| {
            vec![
                (name.clone(), codes),
                (format!("{path}.scales"), scales),
                (format!("{path}.biases"), biases),
            ]
        };
        if let Some(packed) = self.packed.get(&spec.id.module_path()) {
            return three(
                given("U32", &packed.codes),
                given("BF16", &packed.scales),
                given("BF16", &packed.biases),
            );
        }
        if let Some(values) = self.given.get(&spec.id.module_path()) {
            let bytes = values.iter().flat_map(|value| value.to_le_bytes());
            return vec![(name, tensor("F32", shape, Content::Given(bytes.collect())))];
        }
        let WeightFormat::Affine { bits, group, .. } = format else {
            return vec![(name, tensor("BF16", shape, Content::Plain))];
        };
        let (_, columns) = spec.shape.rows_and_columns();
        let with_last = |last: usize| {
            let mut shape = shape.clone();
            *shape.last_mut().expect("a dimension") = last;
            shape
        };
        let groups = columns / usize::from(group);
        // Of a size that keeps activations of order one.
        let levels = f32::from((1_u16 << bits) - 1);
        let step = 3.4 / (columns as f32).sqrt() / levels;
        let affine = |biases| {
            let content = Content::Affine {
                levels,
                step,
                biases,
            };
            tensor("BF16", with_last(groups), content)
        };
        let words = with_last(columns * usize::from(bits) / 32);
        three(
            tensor("U32", words, Content::Codes),
            affine(false),
            affine(true),
        )
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
