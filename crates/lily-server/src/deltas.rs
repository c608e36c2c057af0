//! An answer in pieces, as they stream; and all pieces together, as an answer that does not.

use lily_engine::{FinishReason, Finished, OutputEvent, OutputParser};
use serde_json::{Value, json};

/// Whether something else than the model ended an answer.
fn is_cut(reason: &FinishReason) -> bool {
    !matches!(
        reason,
        FinishReason::StopToken(_) | FinishReason::StopText(_)
    )
}

/// Why an answer ended, as the API calls it.
pub(crate) fn finish_reason(reason: &FinishReason) -> &'static str {
    if is_cut(reason) { "length" } else { "stop" }
}

/// A piece of an answer.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Delta {
    Reasoning(String),
    Content(String),
    /// A tool call begins.
    Call {
        index: usize,
        id: String,
        name: String,
    },
    /// More of a tool call's arguments.
    Arguments {
        index: usize,
        json: String,
    },
}

impl Delta {
    /// What changes in the message, as a chunk of a stream has it.
    pub fn to_json(&self) -> Value {
        match self {
            Delta::Reasoning(text) => json!({"reasoning_content": text}),
            Delta::Content(text) => json!({"content": text}),
            Delta::Call { index, id, name } => json!({"tool_calls": [{
                "index": index,
                "id": id,
                "type": "function",
                "function": {"name": name, "arguments": ""},
            }]}),
            Delta::Arguments { index, json: part } => json!({"tool_calls": [{
                "index": index,
                "function": {"arguments": part},
            }]}),
        }
    }
}

/// Takes an answer's text apart as it comes.
#[derive(Clone)]
pub(crate) struct Assembler {
    parser: OutputParser,
    /// What the ids of tool calls begin with.
    answer: String,
    reasoning_tokens: usize,
    calls: usize,
}

impl Assembler {
    /// For the answer of this id to a prompt, with the tools that the model was told of.
    pub fn new(answer: &str, prompt: &str, tools: &[Value]) -> Self {
        Assembler {
            // Without tools, their markup is text like any other.
            parser: OutputParser::new(prompt, tools).with_tool_calls(!tools.is_empty()),
            answer: answer.to_string(),
            reasoning_tokens: 0,
            calls: 0,
        }
    }

    /// Gives the calls of another choice ids of their own.
    pub fn rename(&mut self, choice: usize) {
        self.answer = format!("{}_{choice}", self.answer);
    }

    /// Tokens that belonged to the reasoning so far.
    pub fn reasoning_tokens(&self) -> usize {
        self.reasoning_tokens
    }

    /// The pieces that a token's text makes certain.
    pub fn token(&mut self, text: &str) -> Vec<Delta> {
        self.reasoning_tokens += usize::from(self.parser.is_reasoning());
        let events = self.parser.push(text);
        self.deltas(events)
    }

    /// The pieces that the end makes certain, and how it is called.
    pub fn end(&mut self, finished: &Finished) -> (Vec<Delta>, &'static str) {
        let is_cut = is_cut(&finished.reason);
        let mut events = self.parser.push(&finished.text);
        events.extend(self.parser.finish(is_cut));
        let deltas = self.deltas(events);
        let reason = match finish_reason(&finished.reason) {
            "stop" if self.calls > 0 => "tool_calls",
            reason => reason,
        };
        (deltas, reason)
    }

    fn deltas(&mut self, events: Vec<OutputEvent>) -> Vec<Delta> {
        let mut deltas = Vec::new();
        for event in events {
            deltas.push(match event {
                OutputEvent::Reasoning(text) => Delta::Reasoning(text),
                OutputEvent::Content(text) => Delta::Content(text),
                OutputEvent::ToolCallStarted { index, name } => Delta::Call {
                    index,
                    id: format!("call_{}_{index}", self.answer),
                    name,
                },
                OutputEvent::ToolCallArguments {
                    index,
                    json_fragment,
                } => Delta::Arguments {
                    index,
                    json: json_fragment,
                },
                OutputEvent::ToolCallFinished { .. } => {
                    self.calls += 1;
                    continue;
                }
                _ => continue,
            });
        }
        deltas
    }
}

/// All pieces of an answer as one message.
pub(crate) fn message(deltas: impl IntoIterator<Item = Delta>) -> Value {
    let (mut reasoning, mut content) = (String::new(), String::new());
    let mut calls: Vec<(String, String, String)> = Vec::new();
    for delta in deltas {
        match delta {
            Delta::Reasoning(text) => reasoning.push_str(&text),
            Delta::Content(text) => content.push_str(&text),
            Delta::Call { id, name, .. } => calls.push((id, name, String::new())),
            Delta::Arguments { json, .. } => {
                if let Some((_, _, arguments)) = calls.last_mut() {
                    arguments.push_str(&json);
                }
            }
        }
    }
    let mut message = json!({"role": "assistant", "content": content, "refusal": null});
    if !reasoning.is_empty() {
        message["reasoning_content"] = reasoning.into();
    }
    if !calls.is_empty() {
        if content.is_empty() {
            message["content"] = Value::Null;
        }
        message["tool_calls"] = calls
            .into_iter()
            .map(|(id, name, arguments)| {
                json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
            })
            .collect();
    }
    message
}
