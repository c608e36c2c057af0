//! Answers held to a grammar: JSON by a schema, calls of tools that have to be called; and limits on reasoning and on the
//! number of calls.
//!
//! The grammars are run by `llguidance`, which says before each token which may come. What this crate adds is when: a
//! grammar begins where the reasoning has ended, and a call's arguments are written as the model writes them (`tools.rs`).

#![forbid(unsafe_code)]

mod follow;
mod grammars;
mod limits;
mod tools;
mod vocabulary;
mod written;

pub use follow::Constraint;
pub use grammars::{Grammar, Grammars};

/// Why an answer cannot be held to what was asked for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConstraintError {
    /// A JSON schema is not sound, says what cannot be enforced, or is too large.
    #[error("the JSON schema{} cannot be enforced: {reason}", of.as_ref().map(|tool| format!(" of tool {tool}")).unwrap_or_default())]
    Schema {
        /// The tool whose parameters it describes.
        of: Option<String>,
        /// What is wrong.
        reason: String,
    },
    /// A tool that has to be called is not there.
    #[error("there is no tool {0}")]
    UnknownTool(String),
    /// Calls are asked for and there are no tools.
    #[error("a call is asked for, and there are no tools")]
    NoTools,
    /// The model's vocabulary is not one that grammars can be made for.
    #[error("no grammar can be made for this model's vocabulary: {0}")]
    Vocabulary(String),
}
