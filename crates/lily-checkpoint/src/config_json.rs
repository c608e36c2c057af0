//! Reads `config.json` (docs/model.md, section 2). The file is untrusted: every dimension has a maximum,
//! chosen far above any real model and low enough that no product of dimensions overflows.

use crate::config::{LayerKind, ModelConfig};
use crate::error::{CheckpointError, printable};
use serde_json::{Map, Value};

/// Bounds of single dimensions.
const MAX_LAYERS: usize = 1024;
const MAX_WIDTH: usize = 1 << 17;
const MAX_HEADS: usize = 1 << 12;
const MAX_HEAD_DIM: usize = 1 << 12;
const MAX_EXPERTS: usize = 1 << 12;
const MAX_CONV_KERNEL: usize = 16;
const MAX_VOCABULARY: usize = 1 << 22;
const MAX_POSITIONS: usize = 1 << 26;
/// Bound of heads × width: keeps rows of a projection in the same order of magnitude as a width.
const MAX_PROJECTION: usize = 1 << 20;
/// Bound of the whole model: hundreds of times the largest one published.
const MAX_PARAMETERS: u64 = 1 << 49;
/// Least value of what must be positive, also as an f32.
const TINY: f64 = 1e-30;
/// End-of-sequence ids a configuration may name.
const MAX_EOS_TOKENS: usize = 64;

const ARCHITECTURES: [&str; 2] = ["qwen3_5_moe", "qwen3_5_moe_text"];

impl ModelConfig {
    /// Reads the text of a `config.json`, with the text model's fields in `text_config` or flat. `file` is
    /// what errors call it. Absent fields have mlx-lm's defaults.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Json`] for what is not a JSON table,
    /// [`CheckpointError::UnsupportedArchitecture`] for another model,
    /// [`CheckpointError::UnsupportedFeature`] for what this engine does not do (scaled rotary embeddings,
    /// dense models, attention biases), [`CheckpointError::ConfigField`] for impossible values.
    pub fn parse(json: &str, file: &str) -> Result<ModelConfig, CheckpointError> {
        parse_table(&json_table(json, file)?, file)
    }
}

/// The file's outermost table.
pub(crate) fn json_table(json: &str, file: &str) -> Result<Map<String, Value>, CheckpointError> {
    let malformed = |found| CheckpointError::Json {
        file: file.to_string(),
        expected: "a JSON table",
        found,
    };
    match serde_json::from_str(json) {
        Ok(Value::Object(table)) => Ok(table),
        Ok(other) => Err(malformed(describe(&other))),
        Err(error) => Err(malformed(printable(&error.to_string()))),
    }
}

/// Reads the text model's configuration from the file's outermost table.
pub(crate) fn parse_table(
    top: &Map<String, Value>,
    file: &str,
) -> Result<ModelConfig, CheckpointError> {
    let outer = Fields {
        file,
        prefix: "",
        table: top,
    };
    check_architecture(&outer)?;
    let text = match outer.get("text_config") {
        None => Fields {
            file,
            prefix: "",
            table: top,
        },
        Some(Value::Object(table)) => {
            let text = Fields {
                file,
                prefix: "text_config.",
                table,
            };
            if text.get("model_type").is_some() {
                check_architecture(&text)?;
            }
            text
        }
        Some(other) => return Err(outer.wrong("text_config", "a table", describe(other))),
    };
    check_features(&text)?;

    let hidden_size = text.dimension("hidden_size", 4096, MAX_WIDTH)?;
    let layers = text.dimension("num_hidden_layers", 32, MAX_LAYERS)?;
    let full_attention_interval = text.dimension("full_attention_interval", 4, MAX_LAYERS)?;
    let attention_heads = text.dimension("num_attention_heads", 32, MAX_HEADS)?;
    let key_value_heads = text.dimension("num_key_value_heads", 8, MAX_HEADS)?;
    let head_dim = text.dimension("head_dim", hidden_size / attention_heads, MAX_HEAD_DIM)?;
    let experts = text.integer("num_experts", 0, MAX_EXPERTS)?;
    if experts == 0 {
        let found = "0 (a dense model)".to_string();
        return Err(text.unsupported("num_experts", "a mixture of experts", found));
    }
    let (rotary_dim, rope_theta) = rotary(&text, head_dim)?;
    let vocab_size = text.dimension("vocab_size", 151_936, MAX_VOCABULARY)?;
    let config = ModelConfig {
        hidden_size,
        layers,
        full_attention_interval,
        attention_heads,
        key_value_heads,
        head_dim,
        rotary_dim,
        rope_theta,
        linear_key_heads: text.dimension("linear_num_key_heads", 16, MAX_HEADS)?,
        linear_value_heads: text.dimension("linear_num_value_heads", 64, MAX_HEADS)?,
        linear_key_dim: text.dimension("linear_key_head_dim", 192, MAX_HEAD_DIM)?,
        linear_value_dim: text.dimension("linear_value_head_dim", 128, MAX_HEAD_DIM)?,
        conv_kernel: text.dimension("linear_conv_kernel_dim", 4, MAX_CONV_KERNEL)?,
        experts,
        experts_per_token: text.dimension("num_experts_per_tok", 0, experts)?,
        expert_intermediate: text.dimension("moe_intermediate_size", 0, MAX_WIDTH)?,
        shared_intermediate: text.dimension("shared_expert_intermediate_size", 0, MAX_WIDTH)?,
        rms_norm_eps: text.number("rms_norm_eps", 1e-6, TINY, 1.0)?,
        vocab_size,
        max_positions: text.dimension("max_position_embeddings", 131_072, MAX_POSITIONS)?,
        // mlx-lm reads the text model's own field; Hugging Face repeats it outside.
        tie_word_embeddings: match text.flag("tie_word_embeddings")? {
            Some(tied) => tied,
            None => outer.flag("tie_word_embeddings")?.unwrap_or(false),
        },
        eos_token_ids: match eos_token_ids(&outer, vocab_size)? {
            Some(ids) => ids,
            None => eos_token_ids(&text, vocab_size)?.unwrap_or_default(),
        },
    };
    check_relations(&config, &text)?;
    check_layer_types(&config, &text)?;
    check_size(&config, &text)?;
    Ok(config)
}

fn check_architecture(fields: &Fields<'_>) -> Result<(), CheckpointError> {
    let found = match fields.get("model_type") {
        None => "none".to_string(),
        Some(Value::String(name)) if ARCHITECTURES.contains(&name.as_str()) => return Ok(()),
        Some(other) => describe(other),
    };
    Err(CheckpointError::UnsupportedArchitecture {
        file: fields.file.to_string(),
        field: fields.name("model_type"),
        found,
    })
}

/// Switches that change the forward pass and are implemented in one position only.
fn check_features(text: &Fields<'_>) -> Result<(), CheckpointError> {
    for (name, supported) in [
        ("attention_bias", false),
        ("norm_topk_prob", true),
        ("attn_output_gate", true),
    ] {
        if let Some(found) = text.flag(name)?
            && found != supported
        {
            return Err(text.unsupported(name, &supported.to_string(), found.to_string()));
        }
    }
    for (name, supported) in [
        ("hidden_act", ["silu", "swish"].as_slice()),
        ("output_gate_type", &["swish", "silu"]),
    ] {
        match text.get(name) {
            None => {}
            Some(Value::String(found)) if supported.contains(&found.as_str()) => {}
            Some(other) => return Err(text.unsupported(name, supported[0], describe(other))),
        }
    }
    match text.get("mlp_only_layers") {
        None => {}
        Some(Value::Array(layers)) if layers.is_empty() => {}
        Some(other) => {
            return Err(text.unsupported("mlp_only_layers", "no dense layers", describe(other)));
        }
    }
    let step = text.integer("decoder_sparse_step", 1, MAX_LAYERS)?;
    if step != 1 {
        return Err(text.unsupported("decoder_sparse_step", "1", step.to_string()));
    }
    Ok(())
}

/// How many dimensions rotate, and the base of their frequencies.
fn rotary(text: &Fields<'_>, head_dim: usize) -> Result<(usize, f64), CheckpointError> {
    // The older name of the table. Only its type matters: an unscaled one says nothing more.
    if let Some(Value::Object(table)) = text.get("rope_scaling") {
        let prefix = format!("{}rope_scaling.", text.prefix);
        check_rope_type(&Fields {
            file: text.file,
            prefix: &prefix,
            table,
        })?;
    }
    let prefix = format!("{}rope_parameters.", text.prefix);
    let parameters = match text.get("rope_parameters") {
        None => None,
        Some(Value::Object(table)) => Some(Fields {
            file: text.file,
            prefix: &prefix,
            table,
        }),
        Some(other) => return Err(text.wrong("rope_parameters", "a table", describe(other))),
    };
    if let Some(parameters) = &parameters {
        check_rope_type(parameters)?;
        // A table for each kind of layer is another convention; its base would go unread.
        if let Some((name, _)) = parameters.table.iter().find(|(_, value)| value.is_object()) {
            let found = "a nested table".to_string();
            return Err(parameters.unsupported(name, "one set of rope parameters", found));
        }
    }
    let nested = parameters.as_ref();
    let place = |name: &str| {
        nested
            .filter(|fields| fields.get(name).is_some())
            .unwrap_or(text)
    };
    let theta_fields = place("rope_theta");
    if nested.is_some() && theta_fields.get("rope_theta").is_none() {
        // mlx-lm refuses this too; its default belongs to files without any rope parameters.
        return Err(theta_fields.wrong("rope_theta", "a number", "none".to_string()));
    }
    let rope_theta = theta_fields.number("rope_theta", 100_000.0, 1.0, 1e15)?;
    let factor_fields = place("partial_rotary_factor");
    let factor = factor_fields.number("partial_rotary_factor", 0.25, TINY, 1.0)?;
    // Rounded down, as mlx-lm does. Exact enough: a head is at most 4096 wide.
    let rotary_dim = (head_dim as f64 * factor) as usize;
    if rotary_dim == 0 || !rotary_dim.is_multiple_of(2) {
        return Err(factor_fields.wrong(
            "partial_rotary_factor",
            "an even number of rotating dimensions",
            format!("{factor} of {head_dim}, which is {rotary_dim}"),
        ));
    }
    Ok((rotary_dim, rope_theta))
}

fn check_rope_type(parameters: &Fields<'_>) -> Result<(), CheckpointError> {
    for name in ["rope_type", "type"] {
        match parameters.get(name) {
            None => {}
            Some(Value::String(kind)) if kind == "default" => {}
            Some(other) => {
                return Err(parameters.unsupported(name, "\"default\"", describe(other)));
            }
        }
    }
    Ok(())
}

fn eos_token_ids(
    fields: &Fields<'_>,
    vocab_size: usize,
) -> Result<Option<Vec<u32>>, CheckpointError> {
    let Some(value) = fields.get("eos_token_id") else {
        return Ok(None);
    };
    let wrong = |found| {
        let expected = format!("token ids below {vocab_size}, at most {MAX_EOS_TOKENS}");
        fields.wrong("eos_token_id", &expected, found)
    };
    let list = match value {
        Value::Array(list) => list.as_slice(),
        single => std::slice::from_ref(single),
    };
    if list.len() > MAX_EOS_TOKENS {
        return Err(wrong(format!("{} ids", list.len())));
    }
    let mut ids = Vec::with_capacity(list.len());
    for value in list {
        match value.as_u64().and_then(|id| u32::try_from(id).ok()) {
            Some(id) if (id as usize) < vocab_size => ids.push(id),
            _ => return Err(wrong(describe(value))),
        }
    }
    Ok(Some(ids))
}

/// What must hold between dimensions.
fn check_relations(config: &ModelConfig, text: &Fields<'_>) -> Result<(), CheckpointError> {
    let divides = |part: usize, part_name: &str, whole: usize, whole_name: &str| {
        if whole.is_multiple_of(part) {
            return Ok(());
        }
        Err(text.wrong(
            part_name,
            &format!("a divisor of {whole_name} {whole}"),
            part.to_string(),
        ))
    };
    divides(
        config.key_value_heads,
        "num_key_value_heads",
        config.attention_heads,
        "num_attention_heads",
    )?;
    divides(
        config.linear_key_heads,
        "linear_num_key_heads",
        config.linear_value_heads,
        "linear_num_value_heads",
    )?;
    if config.conv_kernel < 2 {
        let found = config.conv_kernel.to_string();
        return Err(text.wrong("linear_conv_kernel_dim", "at least 2", found));
    }
    // Factors are at most 2^12 each: these products fit everywhere.
    for (name, width) in [
        ("num_attention_heads × head_dim", config.attention_width()),
        (
            "linear_num_key_heads × linear_key_head_dim",
            config.linear_key_heads * config.linear_key_dim,
        ),
        (
            "linear_num_value_heads × linear_value_head_dim",
            config.linear_value_width(),
        ),
    ] {
        if width > MAX_PROJECTION {
            return Err(text.wrong(
                name,
                &format!("at most {MAX_PROJECTION}"),
                width.to_string(),
            ));
        }
    }
    Ok(())
}

/// mlx-lm reads the interval alone; a list that says otherwise means a model that we would run wrongly.
fn check_layer_types(config: &ModelConfig, text: &Fields<'_>) -> Result<(), CheckpointError> {
    let list = match text.get("layer_types") {
        None => return Ok(()),
        Some(Value::Array(list)) => list,
        Some(other) => return Err(text.wrong("layer_types", "a list", describe(other))),
    };
    if list.len() != config.layers {
        let expected = format!("{} entries (num_hidden_layers)", config.layers);
        return Err(text.wrong("layer_types", &expected, format!("{}", list.len())));
    }
    for (layer, found) in list.iter().enumerate() {
        let expected = match config.layer_kind(layer) {
            LayerKind::GatedDelta => "linear_attention",
            LayerKind::Attention => "full_attention",
        };
        if found.as_str() != Some(expected) {
            let interval = config.full_attention_interval;
            return Err(text.wrong(
                &format!("layer_types[{layer}]"),
                &format!("\"{expected}\" (full_attention_interval {interval})"),
                describe(found),
            ));
        }
    }
    Ok(())
}

/// Bounds the whole: sums over all weights, in bytes and whatever the format, then fit 64 bits and the
/// address space.
fn check_size(config: &ModelConfig, text: &Fields<'_>) -> Result<(), CheckpointError> {
    let parameters = config.weights().iter().try_fold(0u64, |sum, spec| {
        // One matrix is at most experts × width × width, 2^46.
        let (rows, columns) = spec.shape.rows_and_columns();
        (rows as u64)
            .checked_mul(columns as u64)
            .and_then(|count| sum.checked_add(count))
    });
    match parameters {
        Some(count) if count <= MAX_PARAMETERS => Ok(()),
        _ => {
            let expected = format!("at most {MAX_PARAMETERS} parameters in all");
            Err(text.wrong("dimensions", &expected, "more".to_string()))
        }
    }
}

/// A table of the file, with the name under which errors speak of it.
pub(crate) struct Fields<'a> {
    pub file: &'a str,
    pub prefix: &'a str,
    pub table: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    /// The field's value; `null` counts as absent, as it does in mlx-lm and transformers.
    pub fn get(&self, name: &str) -> Option<&'a Value> {
        self.table.get(name).filter(|value| !value.is_null())
    }

    pub fn name(&self, name: &str) -> String {
        printable(&format!("{}{name}", self.prefix))
    }

    pub fn wrong(&self, name: &str, expected: &str, found: String) -> CheckpointError {
        CheckpointError::ConfigField {
            file: self.file.to_string(),
            field: self.name(name),
            expected: expected.to_string(),
            found,
        }
    }

    pub fn unsupported(&self, name: &str, expected: &str, found: String) -> CheckpointError {
        CheckpointError::UnsupportedFeature {
            file: self.file.to_string(),
            field: self.name(name),
            expected: expected.to_string(),
            found,
        }
    }

    /// A whole number from 0 to `max`.
    fn integer(&self, name: &str, default: usize, max: usize) -> Result<usize, CheckpointError> {
        let Some(value) = self.get(name) else {
            return Ok(default);
        };
        match value
            .as_u64()
            .and_then(|number| usize::try_from(number).ok())
        {
            Some(number) if number <= max => Ok(number),
            _ => Err(self.wrong(
                name,
                &format!("a whole number up to {max}"),
                describe(value),
            )),
        }
    }

    /// A whole number from 1 to `max`; a default of zero means that the field must be there.
    fn dimension(&self, name: &str, default: usize, max: usize) -> Result<usize, CheckpointError> {
        match self.integer(name, default, max)? {
            number if (1..=max).contains(&number) => Ok(number),
            number => {
                let found = match self.get(name) {
                    Some(_) => number.to_string(),
                    None => format!("none (and {number} by default)"),
                };
                Err(self.wrong(name, &format!("a whole number from 1 to {max}"), found))
            }
        }
    }

    /// A number from `least` to `most`.
    fn number(
        &self,
        name: &str,
        default: f64,
        least: f64,
        most: f64,
    ) -> Result<f64, CheckpointError> {
        let Some(value) = self.get(name) else {
            return Ok(default);
        };
        match value.as_f64() {
            Some(number) if (least..=most).contains(&number) => Ok(number),
            _ => {
                let expected = format!("a number from {least:e} to {most:e}");
                Err(self.wrong(name, &expected, describe(value)))
            }
        }
    }

    fn flag(&self, name: &str) -> Result<Option<bool>, CheckpointError> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(other) => Err(self.wrong(name, "true or false", describe(other))),
        }
    }
}

/// A JSON value in words fit for a message.
pub(crate) fn describe(value: &Value) -> String {
    match value {
        Value::Array(list) => format!("a list of {}", list.len()),
        Value::Object(table) => format!("a table of {}", table.len()),
        simple => printable(&simple.to_string()),
    }
}
