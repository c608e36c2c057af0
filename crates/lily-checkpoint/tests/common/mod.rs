//! A small valid checkpoint that tests spoil in one place, and the fixtures' whereabouts.
#![allow(dead_code)] // Each test file uses a part of it.

use lily_checkpoint::{Checkpoint, CheckpointError, DeclaredModel, WeightFormat};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// A path below `fixtures/` or `models/`.
pub fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .join(path)
}

/// A tensor to be written.
#[derive(Clone, Debug)]
pub struct Tensor {
    pub name: String,
    pub dtype: String,
    pub shape: Vec<usize>,
    pub data: Vec<u8>,
}

/// Files of a checkpoint by name, as bytes.
pub type Files = BTreeMap<String, Vec<u8>>;

/// A checkpoint before it is written: the configuration and the tensors of each shard.
#[derive(Clone, Debug)]
pub struct Draft {
    pub config: Value,
    /// Tensors by shard.
    pub shards: Vec<(String, Vec<Tensor>)>,
    /// The shard index; `None` for a single file.
    pub index: Option<Value>,
}

/// Two layers (one of each kind), 4-bit matrices with 8-bit routers, some bfloat16.
pub fn small_config() -> Value {
    let router = json!({"group_size": 32, "bits": 8});
    json!({
        "model_type": "qwen3_5_moe",
        "eos_token_id": [3, 2],
        "quantization": {
            "group_size": 32, "bits": 4, "mode": "affine",
            "language_model.model.layers.0.mlp.gate": router,
            "language_model.model.layers.1.mlp.gate": router,
            "language_model.model.layers.0.mlp.shared_expert_gate": false,
        },
        "text_config": {
            "model_type": "qwen3_5_moe_text",
            "hidden_size": 64, "num_hidden_layers": 2, "full_attention_interval": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
            "linear_num_key_heads": 1, "linear_num_value_heads": 2,
            "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4,
            "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25
            },
            "rms_norm_eps": 1e-6, "vocab_size": 96, "max_position_embeddings": 4096,
            "tie_word_embeddings": false,
        }
    })
}

/// The tensors that the configuration asks for, with the prefix that MLX gives them and data that differs
/// from byte to byte.
pub fn tensors_of(model: &DeclaredModel) -> Vec<Tensor> {
    let mut tensors = Vec::new();
    let mut seed = 1u32;
    let mut add = |name: String, dtype: &str, shape: Vec<usize>, width: usize| {
        let length = shape.iter().product::<usize>() * width;
        let data = (0..length)
            .map(|_| {
                seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                // No byte makes a bfloat16 infinite: the upper one stays below 0x7f.
                (seed >> 24) as u8 & 0x3f
            })
            .collect();
        tensors.push(Tensor {
            name,
            dtype: dtype.to_string(),
            shape,
            data,
        });
    };
    for spec in model.config.weights() {
        let path = format!("language_model.{}", spec.id);
        let name = if spec.id.role.is_bare() {
            path.clone()
        } else {
            format!("{path}.weight")
        };
        let mut shape = spec.shape.stored();
        match model.quantization.format_of(&spec) {
            WeightFormat::Plain(_) => add(name, "BF16", shape, 2),
            WeightFormat::Affine { bits, group, .. } => {
                let columns = shape.pop().unwrap();
                let with = |last: usize| [shape.as_slice(), &[last]].concat();
                add(name, "U32", with(columns * usize::from(bits) / 32), 4);
                add(
                    format!("{path}.scales"),
                    "BF16",
                    with(columns / usize::from(group)),
                    2,
                );
                add(
                    format!("{path}.biases"),
                    "BF16",
                    with(columns / usize::from(group)),
                    2,
                );
            }
        }
    }
    tensors
}

impl Draft {
    /// One weight file.
    pub fn single() -> Draft {
        let config = small_config();
        let model = DeclaredModel::parse(&config.to_string(), "config.json").unwrap();
        let mut tensors = tensors_of(&model);
        let extra = |name: &str| Tensor {
            name: name.to_string(),
            dtype: "BF16".to_string(),
            shape: vec![3],
            data: vec![1; 6],
        };
        tensors.push(extra("vision_tower.blocks.0.norm1.weight"));
        tensors.push(extra("language_model.mtp.norm.weight"));
        tensors.push(extra("language_model.model.something_new"));
        Draft {
            config,
            shards: vec![("model.safetensors".to_string(), tensors)],
            index: None,
        }
    }

    /// Two shards and their index.
    pub fn sharded() -> Draft {
        let mut draft = Draft::single();
        let mut first = draft.shards.remove(0).1;
        let second = first.split_off(first.len() / 2);
        let mut map = serde_json::Map::new();
        for (number, tensors) in [first, second].into_iter().enumerate() {
            let shard = format!("model-{:05}-of-00002.safetensors", number + 1);
            for tensor in &tensors {
                map.insert(tensor.name.clone(), json!(shard));
            }
            draft.shards.push((shard, tensors));
        }
        draft.index = Some(json!({"metadata": {"total_size": 0}, "weight_map": map}));
        draft
    }

    /// The tensor of that name.
    pub fn tensor(&mut self, name: &str) -> &mut Tensor {
        let mut tensors = self.shards.iter_mut().flat_map(|(_, tensors)| tensors);
        tensors
            .find(|tensor| tensor.name == name)
            .unwrap_or_else(|| panic!("no tensor {name}"))
    }

    /// Gives a tensor another type and shape, with data to match.
    pub fn reshape(&mut self, name: &str, dtype: &str, shape: &[usize], width: usize) {
        let tensor = self.tensor(name);
        tensor.dtype = dtype.to_string();
        tensor.shape = shape.to_vec();
        tensor
            .data
            .resize(shape.iter().product::<usize>() * width, 7);
    }

    /// Removes a tensor.
    pub fn remove(&mut self, name: &str) {
        self.tensor(name);
        for (_, tensors) in &mut self.shards {
            tensors.retain(|tensor| tensor.name != name);
        }
    }

    /// Adds a tensor of bfloat16 to the first shard.
    pub fn add(&mut self, name: &str, shape: &[usize]) {
        self.shards[0].1.push(Tensor {
            name: name.to_string(),
            dtype: "BF16".to_string(),
            shape: shape.to_vec(),
            data: vec![1; shape.iter().product::<usize>() * 2],
        });
    }

    /// The text model's table in the configuration.
    pub fn text(&mut self) -> &mut Value {
        &mut self.config["text_config"]
    }

    /// The checkpoint's files.
    pub fn files(&self) -> Files {
        let mut files = Files::new();
        files.insert(
            "config.json".to_string(),
            self.config.to_string().into_bytes(),
        );
        for (name, tensors) in &self.shards {
            files.insert(
                name.clone(),
                write_safetensors(&header_of(tensors), tensors),
            );
        }
        if let Some(index) = &self.index {
            let name = "model.safetensors.index.json".to_string();
            files.insert(name, index.to_string().into_bytes());
        }
        files
    }
}

/// The header that describes the tensors laid one after the other.
pub fn header_of(tensors: &[Tensor]) -> Value {
    let mut header = serde_json::Map::new();
    let mut start = 0;
    for tensor in tensors {
        let end = start + tensor.data.len();
        header.insert(
            tensor.name.clone(),
            json!({"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, end]}),
        );
        start = end;
    }
    header.insert("__metadata__".to_string(), json!({"format": "mlx"}));
    Value::Object(header)
}

/// A safetensors file. Its header is of odd length, as MLX's may be, so every tensor of 16-bit or 32-bit
/// numbers lies at an odd address.
pub fn write_safetensors(header: &Value, tensors: &[Tensor]) -> Vec<u8> {
    let mut json = header.to_string();
    if json.len().is_multiple_of(2) {
        json.push(' ');
    }
    let mut bytes = join_header(json.as_bytes());
    for tensor in tensors {
        bytes.extend_from_slice(&tensor.data);
    }
    bytes
}

/// A header's JSON behind its length.
pub fn join_header(json: &[u8]) -> Vec<u8> {
    [&(json.len() as u64).to_le_bytes(), json].concat()
}

/// Changes the JSON of a safetensors file's header as text, and the length with it.
pub fn edit_header(file: &mut Vec<u8>, edit: impl FnOnce(String) -> String) {
    let length = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let json = edit(String::from_utf8(file[8..8 + length].to_vec()).unwrap());
    let data = file.split_off(8 + length);
    *file = join_header(json.as_bytes());
    file.extend(data);
}

/// Writes the files to a new directory and opens it.
pub fn open(files: &Files) -> Result<Checkpoint, CheckpointError> {
    let directory = write(files);
    // On Linux a mapped file may be unlinked; the checkpoint outlives its directory.
    Checkpoint::open(directory.path())
}

/// Writes the files to a new directory.
pub fn write(files: &Files) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    for (name, bytes) in files {
        std::fs::write(directory.path().join(name), bytes).unwrap();
    }
    directory
}
