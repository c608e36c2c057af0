//! Everything between text and tokens: the tokenizer, the incremental
//! detokenizer, stop strings, the chat template, the sampling defaults a
//! checkpoint ships with, and the parser that turns the model's output into
//! reasoning, content and tool calls.
//!
//! All inputs (tokenizer files, templates, prompts, model output) are
//! untrusted: they lead to errors, never to panics.

#![forbid(unsafe_code)]

mod detokenizer;
mod error;
pub mod fuzzing;
mod generation;
pub mod output;
mod stop;
mod template;
mod tokenizer;

pub use detokenizer::Detokenizer;
pub use error::{GenerationDefaultsError, TemplateError, TextError};
pub use generation::GenerationDefaults;
pub use output::{
    OutputEvent, OutputParser, ParsedOutput, PythonLiteralError, ToolCall, parse_output,
    parse_python_literal,
};
pub use stop::{StopMatcher, StopStep};
pub use template::{ChatTemplate, RenderRequest};
pub use tokenizer::Tokenizer;
