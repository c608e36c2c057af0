//! The errors of this crate.

use std::error::Error;

/// Why a tokenizer could not be loaded. The texts do not name the file: who read it knows which it was.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// The file is not JSON, or not JSON of a tokenizer.
    #[error("not the JSON of a tokenizer: {0}")]
    Json(#[from] serde_json::Error),
    /// The file is well formed, but its parts contradict each other.
    #[error("not consistent: {0}")]
    Inconsistent(String),
    /// The file describes a kind of tokenizer other than byte-level BPE.
    #[error("a kind of tokenizer that is not supported: {0}")]
    Unsupported(String),
    /// The tokenizer library refused the file.
    #[error("refused by the tokenizer library: {0}")]
    Library(#[source] Box<dyn Error + Send + Sync>),
}

/// Why a chat template could not be compiled or rendered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TemplateError {
    /// None of the files given holds a template.
    #[error("the checkpoint has no chat template")]
    Missing,
    /// `tokenizer_config.json` cannot be read.
    #[error("tokenizer_config.json cannot be read: {0}")]
    Config(#[from] serde_json::Error),
    /// The template has a syntax error.
    #[error("not a valid template: {0:#}")]
    Invalid(#[source] minijinja::Error),
    /// The template called `raise_exception`: it does not accept these
    /// messages. The text is exactly the template's own.
    #[error("{0}")]
    Refused(String),
    /// A message is not of the shape that templates expect.
    #[error("message {index}: {reason}")]
    Message {
        /// Position in the list of messages.
        index: usize,
        /// What is wrong with it.
        reason: String,
    },
    /// The template used up the work it is allowed.
    #[error("rendering the chat template takes too long and was stopped")]
    OutOfFuel,
    /// Rendering failed in another way. The text has nothing of the messages: what is rendered stays out of logs.
    #[error("the chat template failed: {0}")]
    Render(#[source] minijinja::Error),
}

/// Why `generation_config.json` was not accepted. The texts do not name the file: who read it knows.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GenerationDefaultsError {
    /// The file is not a JSON object.
    #[error("not a JSON object: {0}")]
    Json(#[from] serde_json::Error),
    /// A field has a value of the wrong type or out of bounds. The reason continues the field's name.
    #[error("{field} {reason}")]
    Field {
        /// The name of the field.
        field: &'static str,
        /// What is wrong with it.
        reason: String,
    },
}
