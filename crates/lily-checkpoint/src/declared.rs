//! What a `config.json` alone says of a model: its shape, and how each weight would be stored. This is for
//! working without weights (plans, cost models, synthetic checkpoints); a [`Checkpoint`](crate::Checkpoint)
//! infers the formats from the tensors themselves.

use crate::config::ModelConfig;
use crate::config_json::{Fields, describe, json_table, parse_table};
use crate::error::CheckpointError;
use crate::files::text_of;
use crate::weights::{DType, WeightFormat, WeightSpec};
use serde_json::{Map, Value};
use std::collections::HashMap;
use std::path::Path;

/// Code widths of affine quantisation.
pub(crate) const AFFINE_BITS: [u8; 6] = [2, 3, 4, 5, 6, 8];
/// Group sizes of affine quantisation.
pub(crate) const AFFINE_GROUPS: [u16; 3] = [32, 64, 128];

/// Width and group size of an affine quantisation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Affine {
    bits: u8,
    group: u16,
}

/// The `quantization` (or `quantization_config`) table of a `config.json`: a default and exceptions by
/// module path.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DeclaredQuantization {
    /// For modules without an entry; `None` where there is no table, which means plain bfloat16.
    default: Option<Affine>,
    /// By module path without the `language_model.` prefix; `None` for a module kept plain.
    entries: HashMap<String, Option<Affine>>,
}

impl DeclaredQuantization {
    /// Reads the table from the text of a `config.json`. `file` is what errors call it.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::UnsupportedQuantization`] for modes other than affine,
    /// [`CheckpointError::ConfigField`] for widths or group sizes that do not exist,
    /// [`CheckpointError::Json`] for what is not a JSON table.
    pub fn parse(json: &str, file: &str) -> Result<DeclaredQuantization, CheckpointError> {
        Self::from_table(&json_table(json, file)?, file)
    }

    /// Reads the table from the file's outermost one.
    pub(crate) fn from_table(
        top: &Map<String, Value>,
        file: &str,
    ) -> Result<DeclaredQuantization, CheckpointError> {
        let outer = Fields {
            file,
            prefix: "",
            table: top,
        };
        let Some((name, value)) = ["quantization", "quantization_config"]
            .iter()
            .find_map(|name| outer.get(name).map(|value| (*name, value)))
        else {
            return Ok(Self::default());
        };
        let Value::Object(table) = value else {
            return Err(outer.wrong(name, "a table", describe(value)));
        };
        let prefix = format!("{name}.");
        let fields = Fields {
            file,
            prefix: &prefix,
            table,
        };
        if let Some(method) = fields.get("quant_method") {
            return Err(unsupported_mode(&fields, "quant_method", method));
        }
        check_mode(&fields, "mode")?;
        let default = Affine {
            bits: bits_of(&fields, None)?,
            group: group_of(&fields, None)?,
        };
        let mut entries = HashMap::new();
        for (path, value) in table {
            let path = path.strip_prefix("language_model.").unwrap_or(path);
            let entry = match value {
                // Vision modules are not loaded: how they are quantised is nobody's concern here.
                _ if crate::inventory::is_skipped(path) => continue,
                Value::Bool(true) => Some(default),
                Value::Bool(false) => None,
                Value::Object(table) => {
                    let prefix = format!("{}{path}.", fields.prefix);
                    let fields = Fields {
                        file,
                        prefix: &prefix,
                        table,
                    };
                    check_mode(&fields, "mode")?;
                    // What an entry leaves out is MLX's own default, not that of the table.
                    Some(Affine {
                        bits: bits_of(&fields, Some(4))?,
                        group: group_of(&fields, Some(64))?,
                    })
                }
                _ => continue,
            };
            entries.insert(path.to_string(), entry);
        }
        Ok(DeclaredQuantization {
            default: Some(default),
            entries,
        })
    }

    /// How the weight is stored: what its entry says, else the default for matrices, else bfloat16. A matrix
    /// whose rows are no whole number of groups is plain, as MLX's converter leaves it. Scales are bfloat16.
    pub fn format_of(&self, spec: &WeightSpec) -> WeightFormat {
        let plain = WeightFormat::Plain(DType::Bf16);
        if !spec.shape.is_linear() {
            return plain;
        }
        let entry = self
            .entries
            .get(&spec.id.module_path())
            .copied()
            .unwrap_or(self.default);
        let (_, columns) = spec.shape.rows_and_columns();
        match entry {
            Some(Affine { bits, group }) if columns.is_multiple_of(usize::from(group)) => {
                WeightFormat::Affine {
                    bits,
                    group,
                    scales: DType::Bf16,
                }
            }
            _ => plain,
        }
    }
}

fn bits_of(fields: &Fields<'_>, default: Option<u8>) -> Result<u8, CheckpointError> {
    one_of(fields, "bits", default, &AFFINE_BITS)
}

fn group_of(fields: &Fields<'_>, default: Option<u16>) -> Result<u16, CheckpointError> {
    one_of(fields, "group_size", default, &AFFINE_GROUPS)
}

/// The field's value, which must be among `allowed`.
fn one_of<T: Copy + Into<u64> + std::fmt::Debug>(
    fields: &Fields<'_>,
    name: &str,
    default: Option<T>,
    allowed: &[T],
) -> Result<T, CheckpointError> {
    let value = fields.get(name);
    if let (None, Some(default)) = (value, default) {
        return Ok(default);
    }
    let number = value.and_then(Value::as_u64);
    allowed
        .iter()
        .copied()
        .find(|allowed| number == Some((*allowed).into()))
        .ok_or_else(|| {
            let found = value.map_or("none".to_string(), describe);
            fields.wrong(name, &format!("one of {allowed:?}"), found)
        })
}

fn check_mode(fields: &Fields<'_>, name: &str) -> Result<(), CheckpointError> {
    match fields.get(name) {
        None => Ok(()),
        Some(Value::String(mode)) if mode == "affine" => Ok(()),
        Some(other) => Err(unsupported_mode(fields, name, other)),
    }
}

fn unsupported_mode(fields: &Fields<'_>, name: &str, found: &Value) -> CheckpointError {
    CheckpointError::UnsupportedQuantization {
        file: fields.file.to_string(),
        subject: fields.name(name),
        mode: found
            .as_str()
            .map_or_else(|| describe(found), str::to_string),
    }
}

/// A model known by its `config.json` alone.
#[derive(Clone, Debug, PartialEq)]
pub struct DeclaredModel {
    /// The model's shape.
    pub config: ModelConfig,
    /// How its weights would be stored.
    pub quantization: DeclaredQuantization,
}

impl DeclaredModel {
    /// Reads a `config.json`, or the one in a directory.
    ///
    /// # Errors
    ///
    /// Those of [`ModelConfig::parse`] and [`DeclaredQuantization::parse`], and those of reading the file.
    pub fn read(path: &Path) -> Result<DeclaredModel, CheckpointError> {
        let path = if path.is_dir() {
            path.join("config.json")
        } else {
            path.to_path_buf()
        };
        let file = path.display().to_string();
        let bytes = crate::files::read_capped(&path, &file, crate::files::MAX_CONFIG_BYTES)?;
        Self::parse(&text_of(bytes, &file)?, &file)
    }

    /// Reads the text of a `config.json`. `file` is what errors call it.
    ///
    /// # Errors
    ///
    /// Those of [`ModelConfig::parse`] and [`DeclaredQuantization::parse`].
    pub fn parse(json: &str, file: &str) -> Result<DeclaredModel, CheckpointError> {
        let table = json_table(json, file)?;
        Ok(DeclaredModel {
            config: parse_table(&table, file)?,
            quantization: DeclaredQuantization::from_table(&table, file)?,
        })
    }

    /// Bytes of the weight as declared, scales and biases included.
    pub fn weight_bytes(&self, spec: &WeightSpec) -> u64 {
        let (rows, columns) = spec.shape.rows_and_columns();
        rows as u64 * self.quantization.format_of(spec).row_bytes(columns) as u64
    }
}
