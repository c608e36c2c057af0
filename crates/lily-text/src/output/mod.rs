//! The model's output, taken apart into reasoning, content and tool calls.
//!
//! The format is that of Qwen3.5 and 3.6:
//!
//! ```text
//! reasoning
//! </think>
//!
//! content
//!
//! <tool_call>
//! <function=NAME>
//! <parameter=KEY>
//! VALUE
//! </parameter>
//! </function>
//! </tool_call>
//! ```
//!
//! The opening `<think>` is part of the prompt. One machine reads the output
//! as it streams; the result for the whole text is that of the stream, so the
//! two cannot differ.

mod emitter;
mod machine;
mod markup;
mod python_literal;
mod schema;
mod tags;
mod typing;

use serde_json::{Map, Value};

pub use machine::OutputParser;
pub use python_literal::{PythonLiteralError, parse_python_literal};

/// A step of the output.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum OutputEvent {
    /// More of the reasoning.
    Reasoning(String),
    /// More of the answer.
    Content(String),
    /// A tool call begins.
    ToolCallStarted {
        /// Position among the tool calls of this output.
        index: usize,
        /// Name of the function.
        name: String,
    },
    /// More of the arguments of a tool call; all pieces together are one JSON
    /// object.
    ToolCallArguments {
        /// Position among the tool calls of this output.
        index: usize,
        /// A piece of JSON.
        json_fragment: String,
    },
    /// A tool call is complete.
    ToolCallFinished {
        /// Position among the tool calls of this output.
        index: usize,
    },
    /// A tool call was cut off or is malformed; nothing more of it follows.
    ToolCallTruncated {
        /// Position among the tool calls, if the call had begun.
        index: Option<usize>,
    },
}

/// A complete tool call.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolCall {
    /// Name of the function.
    pub name: String,
    /// Arguments, in the order in which the model gave them.
    pub arguments: Map<String, Value>,
}

/// The parts of a whole output.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ParsedOutput {
    /// The reasoning, without its markup and the whitespace around it.
    pub reasoning: String,
    /// The answer, without tool calls and the whitespace around them.
    pub content: String,
    /// The complete tool calls.
    pub tool_calls: Vec<ToolCall>,
    /// Whether a further tool call was cut off or malformed.
    pub truncated_call: bool,
}

impl ParsedOutput {
    /// Puts the events of a whole stream together.
    #[must_use]
    pub fn from_events(events: impl IntoIterator<Item = OutputEvent>) -> Self {
        let mut output = Self::default();
        let mut open: Option<(String, String)> = None;
        for event in events {
            match event {
                OutputEvent::Reasoning(text) => output.reasoning.push_str(&text),
                OutputEvent::Content(text) => output.content.push_str(&text),
                OutputEvent::ToolCallStarted { name, .. } => open = Some((name, String::new())),
                OutputEvent::ToolCallArguments { json_fragment, .. } => {
                    if let Some((_, json)) = &mut open {
                        json.push_str(&json_fragment);
                    }
                }
                OutputEvent::ToolCallFinished { .. } => {
                    if let Some((name, json)) = open.take() {
                        // The machine writes valid JSON of bounded depth.
                        let arguments = serde_json::from_str(&json).unwrap_or_default();
                        output.tool_calls.push(ToolCall { name, arguments });
                    }
                }
                OutputEvent::ToolCallTruncated { .. } => {
                    open = None;
                    output.truncated_call = true;
                }
            }
        }
        output
    }
}

/// Parses a whole output. `prompt_tail` is the rendered prompt, or its end;
/// `truncated` says that the output was cut off (by a limit on tokens, for
/// example) rather than ended by the model.
#[must_use]
pub fn parse_output(
    prompt_tail: &str,
    text: &str,
    tools: &[Value],
    truncated: bool,
) -> ParsedOutput {
    let mut parser = OutputParser::new(prompt_tail, tools);
    let mut events = parser.push(text);
    events.extend(parser.finish(truncated));
    ParsedOutput::from_events(events)
}
