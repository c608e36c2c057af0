//! A checkpoint: opened, verified as a whole, its weights handed out as bytes.

use crate::config::ModelConfig;
use crate::config_json::{json_table, parse_table};
use crate::declared::DeclaredQuantization;
use crate::error::{CheckpointError, printable};
use crate::files::{
    Content, MAX_CONFIG_BYTES, MAX_INDEX_BYTES, MAX_SMALL_BYTES, Source, is_plain_name, text_of,
};
use crate::header::parse_header;
use crate::inventory::{Inventory, Located, NameKind, Placement, Span, Spans, kind_of};
use crate::weight::{Weight, WeightData};
use crate::weights::{WeightId, WeightRole};
use serde_json::Value;
use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::path::Path;

const CONFIG: &str = "config.json";
const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Tensors and their bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TensorCount {
    /// How many.
    pub tensors: usize,
    /// Their bytes.
    pub bytes: u64,
}

impl TensorCount {
    fn add(&mut self, bytes: u64) {
        self.tensors += 1;
        self.bytes += bytes;
    }
}

/// A weight file, open.
pub(crate) struct WeightFile {
    /// Its name in the checkpoint.
    pub name: String,
    pub content: Content,
    /// Bytes before the data.
    pub header_bytes: u64,
    pub tensors: usize,
}

/// A checkpoint of a Qwen3.5/3.6-MoE model as MLX stores it.
///
/// Opening reads the configuration and the headers of the weight files, verifies that every weight of the
/// model is there in its shape, and maps the files: it takes milliseconds and hardly any memory, whatever
/// the size. Weights are handed out as the bytes of the files.
pub struct Checkpoint {
    pub(crate) source: Source,
    pub(crate) config: ModelConfig,
    pub(crate) config_text: String,
    pub(crate) files: Vec<WeightFile>,
    /// In the order of [`ModelConfig::weights`].
    pub(crate) placements: Vec<Placement>,
    by_id: HashMap<WeightId, usize>,
    pub(crate) counts: [TensorCount; 4],
}

/// Where [`Checkpoint::counts`] keeps the count of each kind of tensor.
pub(crate) const TEXT: usize = 0;
pub(crate) const VISION: usize = 1;
pub(crate) const MULTI_TOKEN: usize = 2;
pub(crate) const UNKNOWN: usize = 3;

impl Checkpoint {
    /// Opens the checkpoint in a directory: `config.json` and either the shards that
    /// `model.safetensors.index.json` names or `model.safetensors`.
    ///
    /// The files stay mapped while the checkpoint lives and must not be changed meanwhile: truncating a
    /// mapped file ends the process on the next access.
    ///
    /// # Errors
    ///
    /// Any [`CheckpointError`]: the whole inventory is verified.
    pub fn open(directory: &Path) -> Result<Checkpoint, CheckpointError> {
        let source = Source::Directory(directory.to_path_buf());
        let file = source.display(CONFIG);
        let bytes = source.small(CONFIG, MAX_CONFIG_BYTES).unwrap_or_else(|| {
            Err(CheckpointError::MissingFile {
                file: file.clone(),
                needed_for: "the model's configuration".to_string(),
                remedy: "name the directory of an MLX checkpoint",
            })
        })?;
        let config_text = text_of(bytes, &file)?;
        Self::from_source(source, config_text)
    }

    /// Opens a checkpoint that is in memory, e.g. embedded in the program: the text of `config.json` and all
    /// other files by name, weight files as well as small ones.
    ///
    /// # Errors
    ///
    /// As [`Checkpoint::open`].
    pub fn from_memory(
        config_json: &str,
        files: &[(&str, &'static [u8])],
    ) -> Result<Checkpoint, CheckpointError> {
        let files = files
            .iter()
            .map(|(name, bytes)| (name.to_string(), *bytes))
            .collect();
        Self::from_source(Source::Memory(files), config_json.to_string())
    }

    fn from_source(source: Source, config_text: String) -> Result<Checkpoint, CheckpointError> {
        let config_file = source.display(CONFIG);
        let table = json_table(&config_text, &config_file)?;
        let config = parse_table(&table, &config_file)?;
        // Formats come from the tensors; the table is read for what it must not ask for.
        DeclaredQuantization::from_table(&table, &config_file)?;

        let index = read_index(&source)?;
        let names: Vec<String> = match &index {
            Some(map) => map
                .values()
                .cloned()
                .collect::<BTreeSet<_>>()
                .into_iter()
                .collect(),
            None => vec![SINGLE.to_string()],
        };
        let mut files = Vec::with_capacity(names.len());
        let mut text = Vec::new();
        let mut counts = [TensorCount::default(); 4];
        for name in names {
            if !source.has(&name) {
                return Err(missing_weights(&source, &name, index.is_some()));
            }
            let content = source.large(&name)?;
            let header = parse_header(&content, content.len() as u64, &source.display(&name))?;
            let (file, tensors) = (files.len(), header.tensors.len());
            for tensor in header.tensors {
                match kind_of(&tensor.name) {
                    NameKind::Vision => counts[VISION].add(tensor.length),
                    NameKind::MultiToken => counts[MULTI_TOKEN].add(tensor.length),
                    NameKind::Text => {
                        // Counted as unknown until a weight claims it.
                        counts[UNKNOWN].add(tensor.length);
                        text.push(Located { file, tensor });
                    }
                }
            }
            files.push(WeightFile {
                name,
                content,
                header_bytes: header.bytes,
                tensors,
            });
        }

        let displayed: Vec<String> = files
            .iter()
            .map(|file| source.display(&file.name))
            .collect();
        let index = index.as_ref().map(|map| (map, source.display(INDEX)));
        let inventory = Inventory::new(text, &displayed, index)?;
        let placements = config
            .weights()
            .iter()
            .map(|spec| inventory.place(spec))
            .collect::<Result<Vec<_>, _>>()?;
        for placement in &placements {
            for span in placement.spans.all() {
                counts[TEXT].add(span.length as u64);
                counts[UNKNOWN].tensors -= 1;
                counts[UNKNOWN].bytes -= span.length as u64;
            }
        }
        let by_id = placements
            .iter()
            .enumerate()
            .map(|(at, placed)| (placed.spec.id, at))
            .collect();
        Ok(Checkpoint {
            source,
            config,
            config_text,
            files,
            placements,
            by_id,
            counts,
        })
    }

    /// The model's shape.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// A weight's bytes. Where the model ties its embeddings, the head is the embedding: what comes back is
    /// the embedding, under its own name.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::NoSuchWeight`] if the model has no such weight. Everything else was verified when
    /// the checkpoint was opened.
    pub fn weight(&self, id: WeightId) -> Result<Weight<'_>, CheckpointError> {
        let tied = self.config.tie_word_embeddings && id == WeightId::global(WeightRole::Head);
        let stored = if tied {
            WeightId::global(WeightRole::Embedding)
        } else {
            id
        };
        match self.by_id.get(&stored) {
            Some(at) => Ok(self.resolve(&self.placements[*at])),
            None => Err(CheckpointError::NoSuchWeight {
                file: self.source.display(CONFIG),
                weight: id,
            }),
        }
    }

    /// All weights in the order of [`ModelConfig::weights`].
    pub fn weights(&self) -> impl Iterator<Item = Weight<'_>> {
        self.placements
            .iter()
            .map(|placement| self.resolve(placement))
    }

    fn resolve(&self, placement: &Placement) -> Weight<'_> {
        let bytes =
            |span: Span| &self.files[span.file].content[span.start..span.start + span.length];
        let data = match placement.spans {
            Spans::Plain(numbers) => WeightData::Plain(bytes(numbers)),
            Spans::Affine {
                codes,
                scales,
                biases,
            } => WeightData::Affine {
                codes: bytes(codes),
                scales: bytes(scales),
                biases: bytes(biases),
            },
        };
        Weight {
            spec: placement.spec,
            format: placement.format,
            data,
        }
    }

    /// The content of a small file of the checkpoint, such as `tokenizer.json`, `tokenizer_config.json`,
    /// `generation_config.json` or `chat_template.jinja`; `None` where there is none. Only names within the
    /// checkpoint's directory are looked up, and at most 128 MiB are read.
    pub fn small_file(&self, name: &str) -> Option<Result<Vec<u8>, CheckpointError>> {
        if name == CONFIG {
            return Some(Ok(self.config_text.clone().into_bytes()));
        }
        self.source.small(name, MAX_SMALL_BYTES)
    }

    /// As [`Checkpoint::small_file`], for text.
    pub fn small_text(&self, name: &str) -> Option<Result<String, CheckpointError>> {
        let content = self.small_file(name)?;
        Some(content.and_then(|bytes| text_of(bytes, &self.source.display(name))))
    }
}

impl fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let files: Vec<&str> = self.files.iter().map(|file| file.name.as_str()).collect();
        f.debug_struct("Checkpoint")
            .field("config", &self.config)
            .field("files", &files)
            .finish()
    }
}

impl Spans {
    /// The parts, one a tensor.
    fn all(&self) -> impl Iterator<Item = Span> {
        match *self {
            Spans::Plain(numbers) => [Some(numbers), None, None],
            Spans::Affine {
                codes,
                scales,
                biases,
            } => [Some(codes), Some(scales), Some(biases)],
        }
        .into_iter()
        .flatten()
    }
}

fn missing_weights(source: &Source, name: &str, sharded: bool) -> CheckpointError {
    let (needed_for, remedy) = if sharded {
        (
            format!("named by {}", source.display(INDEX)),
            "download the missing shard",
        )
    } else {
        (
            "the model's weights".to_string(),
            "sharded weights need their model.safetensors.index.json",
        )
    };
    CheckpointError::MissingFile {
        file: source.display(name),
        needed_for,
        remedy,
    }
}

/// The index of a sharded checkpoint: the shard of each tensor. `None` where there is no index.
fn read_index(source: &Source) -> Result<Option<HashMap<String, String>>, CheckpointError> {
    let file = source.display(INDEX);
    let Some(content) = source.small(INDEX, MAX_INDEX_BYTES) else {
        return Ok(None);
    };
    let table = json_table(&text_of(content?, &file)?, &file)?;
    let Some(Value::Object(entries)) = table.get("weight_map") else {
        return Err(CheckpointError::Json {
            file,
            expected: "a table named weight_map",
            found: "none".to_string(),
        });
    };
    if entries.is_empty() {
        return Err(CheckpointError::Json {
            file,
            expected: "tensors in weight_map",
            found: "none".to_string(),
        });
    }
    let mut map = HashMap::with_capacity(entries.len());
    for (tensor, shard) in entries {
        match shard {
            // A name that leads out of the directory would read other files of the user's.
            Value::String(name) if is_plain_name(name) => {
                map.insert(tensor.clone(), name.clone());
            }
            other => {
                return Err(CheckpointError::Index {
                    file,
                    tensor: printable(tensor),
                    expected: "the name of a file beside the index".to_string(),
                    found: crate::config_json::describe(other),
                });
            }
        }
    }
    Ok(Some(map))
}
