//! What can be wrong with a checkpoint, said so that its owner can act on it.

/// A defect of a checkpoint, or a checkpoint of a kind this engine does not run.
///
/// Every variant names the file; those about one tensor name it as the file spells it. Texts in
/// `expected` and `found` are for people, the variant is for programs.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// A file could not be read.
    #[error("{file}: cannot be read: {source}")]
    Io {
        /// The file.
        file: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file that the checkpoint needs is not there.
    #[error("{file}: not found ({needed_for}); {remedy}")]
    MissingFile {
        /// The file that was looked for.
        file: String,
        /// Why it was looked for.
        needed_for: String,
        /// What to do.
        remedy: &'static str,
    },
    /// A file that is read whole is larger than any sane one.
    #[error("{file}: expected at most {limit} bytes, found more")]
    FileTooLarge {
        /// The file.
        file: String,
        /// The limit in bytes.
        limit: u64,
    },
    /// A text file is not UTF-8.
    #[error("{file}: expected UTF-8 text, found an invalid sequence after byte {after}")]
    NotText {
        /// The file.
        file: String,
        /// How many bytes are valid.
        after: usize,
    },
    /// A file is not JSON, or not of the outline it must have.
    #[error("{file}: expected {expected}, found {found}")]
    Json {
        /// The file.
        file: String,
        /// The outline that was expected.
        expected: &'static str,
        /// What the parser said.
        found: String,
    },
    /// The model is of another architecture.
    #[error(
        "{file}: unsupported architecture: expected {field} qwen3_5_moe or qwen3_5_moe_text, \
         found {found}; only Qwen3.5/3.6 mixture-of-experts models run here"
    )]
    UnsupportedArchitecture {
        /// The configuration file.
        file: String,
        /// The field that names the architecture.
        field: String,
        /// What it names.
        found: String,
    },
    /// A configuration asks for something that this engine does not do.
    #[error("{file}: {field}: unsupported: expected {expected}, found {found}")]
    UnsupportedFeature {
        /// The configuration file.
        file: String,
        /// The field.
        field: String,
        /// What is supported.
        expected: String,
        /// What the field asks for.
        found: String,
    },
    /// A configuration field is missing or has an impossible value.
    #[error("{file}: {field}: expected {expected}, found {found}")]
    ConfigField {
        /// The configuration file.
        file: String,
        /// The field, with the name of the table it is in.
        field: String,
        /// What was expected.
        expected: String,
        /// What was found.
        found: String,
    },
    /// A quantisation other than MLX affine.
    #[error(
        "{file}: {subject}: unsupported quantisation: expected affine, found {mode}; convert the \
         original model with `mlx_lm.convert -q --q-mode affine`"
    )]
    UnsupportedQuantization {
        /// The file.
        file: String,
        /// The tensor, or the field of the configuration.
        subject: String,
        /// The mode by name.
        mode: String,
    },
    /// The weights are laid out as Hugging Face publishes them, not as MLX stores them.
    #[error(
        "{file}: {tensor}: expected the MLX layout, found the original Hugging Face layout ({sign}); \
         convert the model with `mlx_lm.convert`"
    )]
    RawLayout {
        /// The file.
        file: String,
        /// The tensor that gives it away.
        tensor: String,
        /// What about the tensor gives it away.
        sign: String,
    },
    /// The head of a safetensors file is damaged.
    #[error("{file}: damaged safetensors file: expected {expected}, found {found}")]
    Header {
        /// The file.
        file: String,
        /// What was expected.
        expected: String,
        /// What was found.
        found: String,
    },
    /// A tensor's entry in the head of a safetensors file is impossible.
    #[error("{file}: {tensor}: damaged safetensors header: expected {expected}, found {found}")]
    HeaderTensor {
        /// The file.
        file: String,
        /// The tensor.
        tensor: String,
        /// What was expected.
        expected: String,
        /// What was found.
        found: String,
    },
    /// A tensor is there twice.
    #[error("{file}: {tensor}: expected once, found again in {other}")]
    DuplicateTensor {
        /// The file.
        file: String,
        /// The tensor as `file` names it.
        tensor: String,
        /// The other occurrence: a file, and the tensor's name there.
        other: String,
    },
    /// The shard index names a file it must not name, or contradicts the shards.
    #[error("{file}: {tensor}: expected {expected}, found {found}")]
    Index {
        /// The index file.
        file: String,
        /// The tensor of the entry.
        tensor: String,
        /// What was expected.
        expected: String,
        /// What was found.
        found: String,
    },
    /// A tensor of the model is not in the checkpoint.
    #[error(
        "{file}: {tensor}: expected {expected}, found no such tensor; the download is incomplete or \
         config.json is of another model"
    )]
    MissingTensor {
        /// The file that should hold it, or the index of the files.
        file: String,
        /// The tensor.
        tensor: String,
        /// What should be there.
        expected: String,
    },
    /// A tensor has another shape than the configuration says.
    #[error("{file}: {tensor}: expected shape {expected}, found {found}")]
    WrongShape {
        /// The file.
        file: String,
        /// The tensor.
        tensor: String,
        /// The shape that follows from the configuration.
        expected: String,
        /// The shape stored.
        found: String,
    },
    /// A tensor has an element type that it must not have.
    #[error("{file}: {tensor}: expected element type {expected}, found {found}")]
    WrongType {
        /// The file.
        file: String,
        /// The tensor.
        tensor: String,
        /// The types allowed.
        expected: String,
        /// The type stored.
        found: String,
    },
    /// The shapes of a quantised weight imply a width or a group size that does not exist.
    #[error("{file}: {tensor}: expected {expected}, found {found}")]
    WrongWidth {
        /// The file.
        file: String,
        /// The tensor.
        tensor: String,
        /// The widths allowed.
        expected: String,
        /// What the shapes imply.
        found: String,
    },
    /// A tensor that would change the result and that the architecture does not have.
    #[error("{file}: {tensor}: expected {expected}, found the tensor")]
    UnexpectedTensor {
        /// The file.
        file: String,
        /// The tensor.
        tensor: String,
        /// Why it must not be there.
        expected: String,
    },
    /// A weight was asked for that the model does not have.
    #[error("{file}: the model has no weight {weight}")]
    NoSuchWeight {
        /// The configuration file.
        file: String,
        /// The weight.
        weight: crate::WeightId,
    },
}

/// A text from a file as it may stand in a message: cut to a sane length, and without control characters,
/// which would speak to the reader's terminal.
pub(crate) fn printable(text: &str) -> String {
    const LONGEST: usize = 200;
    let mut shown = String::new();
    for (count, character) in text.chars().enumerate() {
        if count == LONGEST {
            shown.push('…');
            break;
        }
        if character.is_control() {
            shown.extend(character.escape_default());
        } else {
            shown.push(character);
        }
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::printable;

    #[test]
    fn messages_are_short_and_say_nothing_to_the_terminal() {
        assert_eq!(printable("größe \"x\""), "größe \"x\"");
        assert_eq!(printable("a\x1b[2J\u{9b}\n"), "a\\u{1b}[2J\\u{9b}\\n");
        let long = printable(&"ä".repeat(1000));
        assert_eq!(
            (long.chars().count(), long.chars().last()),
            (201, Some('…'))
        );
    }
}
