//! The state machine that reads the output.
//!
//! Every decision is taken as soon as no continuation of the text could change
//! it, and not before. That is why the pieces in which the text arrives do not
//! matter.

use serde_json::{Map, Value};

use super::OutputEvent;
use super::emitter::{Emitter, Part};
use super::markup::{self, Known};
use super::markup::{
    CALL_CLOSE, CALL_OPEN, FUNCTION_CLOSE, FUNCTION_OPEN, PARAMETER_CLOSE, PARAMETER_OPEN,
};
use super::python_literal::parse_python_literal;
use super::schema::Tools;
use super::tags::Tag;
use super::typing::{is_too_deep, typed_value};

/// Reads the output of the model as it streams.
#[derive(Debug, Clone)]
pub struct OutputParser {
    pub(super) tools: Tools,
    pub(super) parse_calls: bool,
    state: State,
    /// Text that is not dealt with, from `position` on.
    buffer: String,
    position: usize,
    /// Up to where a value has been searched for its end.
    searched: usize,
    pub(super) emitter: Emitter,
    calls: usize,
    call: Call,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum State {
    Text(Part),
    /// Between the parameters of a call.
    Call,
    /// In the value of a parameter.
    Value {
        key: String,
    },
    /// After a function, where only closing tags are expected.
    AfterCall,
    /// In a call written as JSON.
    JsonCall,
    /// In a call that makes no sense.
    Malformed,
}

/// The call being read.
#[derive(Debug, Clone, Default)]
struct Call {
    name: String,
    keys: Vec<String>,
}

/// Whether the machine can go on with the text it has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Flow {
    Continue,
    Wait,
}

/// How the output ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// It does not yet.
    NotYet,
    /// The model ended it.
    Complete,
    /// It was cut off.
    Truncated,
}

impl OutputParser {
    /// A parser for the output that follows a prompt. `prompt_tail` is the
    /// rendered prompt, or its end (at least the beginning of the last turn):
    /// it decides whether the output begins inside the reasoning. `tools` are
    /// those of the request, in OpenAI's form; their schemas give the
    /// arguments their types.
    #[must_use]
    pub fn new(prompt_tail: &str, tools: &[Value]) -> Self {
        let part = if markup::prompt_opens_reasoning(prompt_tail) {
            Part::Reasoning
        } else {
            Part::Content
        };
        Self {
            tools: Tools::new(tools),
            parse_calls: true,
            state: State::Text(part),
            buffer: String::new(),
            position: 0,
            searched: 0,
            emitter: Emitter::default(),
            calls: 0,
            call: Call::default(),
        }
    }

    /// Whether tool calls are looked for (they are, unless this is called). A
    /// request without tools may want their markup as plain text.
    #[must_use]
    pub fn with_tool_calls(mut self, parse: bool) -> Self {
        self.parse_calls = parse;
        self
    }

    /// Whether the text that comes next belongs to the reasoning, as far as is
    /// known.
    #[must_use]
    pub fn is_reasoning(&self) -> bool {
        self.state == State::Text(Part::Reasoning)
    }

    /// Takes the next piece of the output.
    #[must_use = "the events are not returned again"]
    pub fn push(&mut self, text: &str) -> Vec<OutputEvent> {
        self.buffer.push_str(text);
        self.run(End::NotYet);
        self.buffer.drain(..self.position);
        self.searched -= self.position;
        self.position = 0;
        self.emitter.take()
    }

    /// Ends the output; `truncated` if it was cut off rather than ended by the
    /// model.
    #[must_use = "the events are not returned again"]
    pub fn finish(&mut self, truncated: bool) -> Vec<OutputEvent> {
        self.run(if truncated {
            End::Truncated
        } else {
            End::Complete
        });
        let part = match self.state {
            State::Text(part) => part,
            _ => Part::Content,
        };
        self.emitter.finish(part);
        self.buffer.clear();
        self.position = 0;
        self.searched = 0;
        self.state = State::Text(Part::Content);
        self.emitter.take()
    }

    fn run(&mut self, end: End) {
        loop {
            let flow = match self.state {
                State::Text(part) => self.step_text(part, end),
                State::Call => self.step_call(end),
                State::Value { .. } => self.step_value(end),
                State::AfterCall => self.step_after_call(end),
                State::JsonCall => self.step_json_call(end),
                State::Malformed => self.step_malformed(end),
            };
            if flow == Flow::Wait {
                return;
            }
        }
    }

    pub(super) fn rest(&self) -> &str {
        &self.buffer[self.position..]
    }

    fn advance(&mut self, length: usize) {
        self.position += length;
        self.searched = self.position;
    }

    fn advance_to_end(&mut self) {
        self.advance(self.buffer.len() - self.position);
    }

    fn step_text(&mut self, part: Part, end: End) -> Flow {
        let plain = self.rest().find('<').unwrap_or(self.rest().len());
        if plain > 0 {
            let from = self.position;
            self.advance(plain);
            self.emitter.text(part, &self.buffer[from..from + plain]);
        }
        if self.rest().is_empty() {
            return Flow::Wait;
        }
        match self.tag(part, end) {
            Tag::Unknown => return Flow::Wait,
            Tag::Literal => {
                self.advance(1);
                self.emitter.text(part, "<");
            }
            Tag::Nothing(length) => self.advance(length),
            Tag::OpenReasoning(length) => {
                self.advance(length);
                self.emitter.begin_reasoning();
                self.state = State::Text(Part::Reasoning);
            }
            Tag::CloseReasoning(length) => {
                self.advance(length);
                self.emitter.end_reasoning();
                self.state = State::Text(Part::Content);
            }
            Tag::Function { name, length } => {
                self.leave_text(part);
                self.advance(length);
                self.begin_call(name);
            }
            Tag::Json(length) => {
                self.leave_text(part);
                self.advance(length);
                self.state = State::JsonCall;
            }
            Tag::Malformed(length) => {
                self.leave_text(part);
                self.advance(length);
                self.truncate(None);
                self.state = State::Malformed;
            }
            Tag::CutCall => {
                self.leave_text(part);
                self.advance_to_end();
                self.truncate(None);
            }
        }
        Flow::Continue
    }

    /// Content stays in its place around a call; reasoning ends with one.
    fn leave_text(&mut self, part: Part) {
        match part {
            Part::Reasoning => self.emitter.end_reasoning(),
            Part::Content => {}
        }
        self.state = State::Text(Part::Content);
        self.emitter.begin_call();
    }

    fn begin_call(&mut self, name: String) {
        self.emitter.event(OutputEvent::ToolCallStarted {
            index: self.calls,
            name: name.clone(),
        });
        self.call = Call {
            name,
            keys: Vec::new(),
        };
        self.state = State::Call;
    }

    fn argument(&mut self, key: String, value: &Value) {
        // The first value was sent already; JSON cannot take it back.
        if self.call.keys.contains(&key) {
            return;
        }
        let opening = if self.call.keys.is_empty() { '{' } else { ',' };
        let name = Value::String(key.clone());
        self.emitter.event(OutputEvent::ToolCallArguments {
            index: self.calls,
            json_fragment: format!("{opening}{name}:{value}"),
        });
        self.call.keys.push(key);
    }

    fn finish_call(&mut self) {
        let closing = if self.call.keys.is_empty() { "{}" } else { "}" };
        self.emitter.event(OutputEvent::ToolCallArguments {
            index: self.calls,
            json_fragment: closing.to_owned(),
        });
        self.emitter
            .event(OutputEvent::ToolCallFinished { index: self.calls });
        self.calls += 1;
        self.state = State::AfterCall;
    }

    fn truncate(&mut self, index: Option<usize>) {
        self.emitter.event(OutputEvent::ToolCallTruncated { index });
        self.state = State::AfterCall;
    }

    /// The output ended inside a call.
    fn end_inside_call(&mut self, end: End) -> Flow {
        self.advance_to_end();
        if end == End::Truncated {
            self.truncate(Some(self.calls));
        } else {
            // The model ended it: the closing tags were forgotten.
            self.finish_call();
        }
        Flow::Continue
    }

    fn step_call(&mut self, end: End) -> Flow {
        let Some(start) = self.rest().find('<') else {
            self.advance_to_end();
            return match end {
                End::NotYet => Flow::Wait,
                _ => self.end_inside_call(end),
            };
        };
        self.advance(start);
        let rest = self.rest();
        match markup::name_in_tag(rest, PARAMETER_OPEN) {
            Known::Yes((key, length)) => {
                let key = key.to_owned();
                self.advance(length);
                self.state = State::Value { key };
                return Flow::Continue;
            }
            Known::Open if end == End::NotYet => return Flow::Wait,
            _ => {}
        }
        let mut undecided = PARAMETER_OPEN.starts_with(rest);
        for tag in [FUNCTION_CLOSE, CALL_CLOSE, CALL_OPEN, FUNCTION_OPEN] {
            match markup::begins(rest, tag) {
                Known::No => {}
                Known::Open => undecided = true,
                Known::Yes(()) if tag == CALL_OPEN => {
                    // The next call: the closing tags of this one are missing.
                    self.finish_call();
                    self.state = State::Text(Part::Content);
                    return Flow::Continue;
                }
                Known::Yes(()) if tag == FUNCTION_OPEN => {
                    return match markup::name_in_tag(rest, FUNCTION_OPEN) {
                        Known::Open if end == End::NotYet => Flow::Wait,
                        Known::Yes((name, length)) => {
                            let name = name.to_owned();
                            self.finish_call();
                            self.advance(length);
                            self.begin_call(name);
                            Flow::Continue
                        }
                        _ => {
                            self.advance(1);
                            Flow::Continue
                        }
                    };
                }
                Known::Yes(()) => {
                    self.advance(tag.len());
                    self.finish_call();
                    return Flow::Continue;
                }
            }
        }
        match (undecided, end) {
            (true, End::NotYet) => Flow::Wait,
            (true, _) => self.end_inside_call(end),
            (false, _) => {
                self.advance(1);
                Flow::Continue
            }
        }
    }

    fn step_value(&mut self, end: End) -> Flow {
        let at_end = end != End::NotYet;
        while let Some(found) = self.buffer[self.searched..].find('<') {
            self.searched += found;
            match self.value_ends(at_end) {
                Known::Open => return Flow::Wait,
                Known::No => self.searched += 1,
                Known::Yes(closing) => {
                    let value = self.searched - self.position;
                    // A parameter that is complete only because the output
                    // ends is no more reliable than the end is.
                    self.take_value(value);
                    self.advance(value + closing);
                    self.state = State::Call;
                    return Flow::Continue;
                }
            }
        }
        self.searched = self.buffer.len();
        match end {
            End::NotYet => Flow::Wait,
            End::Truncated => self.end_inside_call(end),
            End::Complete => {
                let rest = self.rest();
                let cut = rest.rfind('<').filter(|&at| {
                    let tail = &rest[at..];
                    [PARAMETER_CLOSE, FUNCTION_CLOSE, CALL_CLOSE]
                        .iter()
                        .any(|tag| markup::is_cut_tag(tail.len(), true) && tag.starts_with(tail))
                });
                self.take_value(cut.unwrap_or(rest.len()));
                self.end_inside_call(end)
            }
        }
    }

    /// Whether the value ends at the `<` reached, and how long the closing tag
    /// is. Values may contain any text, tags included, so a closing tag counts
    /// only if what follows it fits.
    fn value_ends(&self, at_end: bool) -> Known<usize> {
        let rest = &self.buffer[self.searched..];
        let length_if = |known: Known<()>, length: usize| match known {
            Known::Yes(()) => Known::Yes(length),
            Known::No => Known::No,
            Known::Open => Known::Open,
        };
        if let Some(after) = rest.strip_prefix(PARAMETER_CLOSE) {
            let next = [PARAMETER_OPEN, FUNCTION_CLOSE, CALL_CLOSE, CALL_OPEN];
            let known = markup::continues(after, &next, at_end, true);
            return length_if(known, PARAMETER_CLOSE.len());
        }
        // From here on, `</parameter>` is missing.
        if let Some(after) = rest.strip_prefix(FUNCTION_CLOSE) {
            let known = markup::continues(after, &[CALL_CLOSE, CALL_OPEN], at_end, true);
            return length_if(known, 0);
        }
        if let Some(after) = rest.strip_prefix(CALL_CLOSE) {
            let known = markup::continues(after, &[CALL_OPEN], at_end, true);
            return length_if(known, 0);
        }
        let before = &self.buffer[self.position..self.searched];
        let line_start = before.is_empty() || before.ends_with('\n');
        if line_start && rest.starts_with(PARAMETER_OPEN) {
            return match markup::name_in_tag(rest, PARAMETER_OPEN) {
                Known::Yes((key, _)) if self.is_further_parameter(key) => Known::Yes(0),
                Known::Open if !at_end => Known::Open,
                _ => Known::No,
            };
        }
        let may_begin = |tag: &str| tag.starts_with(rest);
        let open = may_begin(PARAMETER_CLOSE)
            || may_begin(FUNCTION_CLOSE)
            || may_begin(CALL_CLOSE)
            || (line_start && may_begin(PARAMETER_OPEN));
        if open && !at_end {
            Known::Open
        } else {
            Known::No
        }
    }

    fn is_further_parameter(&self, key: &str) -> bool {
        let is_current = matches!(&self.state, State::Value { key: current } if current == key);
        let is_given = self.call.keys.iter().any(|given| given == key);
        let is_declared = self
            .tools
            .has_parameter(&self.call.name, key)
            .unwrap_or_else(|| {
                key.chars()
                    .all(|character| character.is_alphanumeric() || matches!(character, '_' | '-'))
            });
        !is_current && !is_given && is_declared
    }

    /// The parameter has the next `length` bytes as its value.
    fn take_value(&mut self, length: usize) {
        let State::Value { key } = &mut self.state else {
            return;
        };
        let key = std::mem::take(key);
        let text = &self.buffer[self.position..self.position + length];
        let text = text
            .strip_prefix("\r\n")
            .or_else(|| text.strip_prefix('\n'))
            .unwrap_or(text);
        let text = text
            .strip_suffix("\r\n")
            .or_else(|| text.strip_suffix('\n'))
            .unwrap_or(text);
        let expected = self.tools.expected(&self.call.name, &key);
        let value = typed_value(text, &expected);
        self.argument(key, &value);
    }

    fn step_after_call(&mut self, end: End) -> Flow {
        let blank = self.rest().len() - self.rest().trim_start().len();
        self.advance(blank);
        let rest = self.rest();
        if rest.is_empty() {
            return Flow::Wait;
        }
        let mut undecided = false;
        for tag in [CALL_CLOSE, FUNCTION_CLOSE, PARAMETER_CLOSE] {
            match markup::begins(rest, tag) {
                Known::No => {}
                Known::Open => undecided = true,
                Known::Yes(()) => {
                    self.advance(tag.len());
                    return Flow::Continue;
                }
            }
        }
        match (undecided, end) {
            (true, End::NotYet) => return Flow::Wait,
            // Nothing but markup begins like this here, were it only a `<`.
            (true, _) => self.advance_to_end(),
            _ => self.state = State::Text(Part::Content),
        }
        Flow::Continue
    }

    fn step_json_call(&mut self, end: End) -> Flow {
        let (length, closing) = match self.buffer[self.searched..].find(CALL_CLOSE) {
            Some(at) => (self.searched + at - self.position, CALL_CLOSE.len()),
            None if end == End::Complete => (self.rest().len(), 0),
            None if end == End::Truncated => {
                self.advance_to_end();
                self.truncate(None);
                return Flow::Continue;
            }
            None => {
                // The tag may lie across the end.
                let from = self.buffer.len().saturating_sub(CALL_CLOSE.len());
                let from = (from..=self.buffer.len()).find(|&at| self.buffer.is_char_boundary(at));
                self.searched = from.unwrap_or(self.buffer.len()).max(self.position);
                return Flow::Wait;
            }
        };
        let call = json_call(&self.rest()[..length]);
        self.advance(length + closing);
        match call {
            Some((name, arguments)) => {
                self.begin_call(name);
                for (key, value) in arguments {
                    self.argument(key, &value);
                }
                self.finish_call();
            }
            None => self.truncate(None),
        }
        Flow::Continue
    }

    fn step_malformed(&mut self, end: End) -> Flow {
        let rest = self.rest();
        let close = rest.find(CALL_CLOSE).map(|at| at + CALL_CLOSE.len());
        let next = rest.find(CALL_OPEN);
        if let Some(length) = close.into_iter().chain(next).min() {
            self.advance(length);
            self.state = State::AfterCall;
            return Flow::Continue;
        }
        if end == End::NotYet {
            // Only what may be the beginning of a tag is kept.
            let from = self.buffer.len().saturating_sub(CALL_CLOSE.len() - 1);
            let from = (from.max(self.position)..=self.buffer.len())
                .find(|&at| self.buffer.is_char_boundary(at));
            self.advance(from.unwrap_or(self.buffer.len()) - self.position);
        } else {
            self.advance_to_end();
        }
        Flow::Wait
    }
}

/// A call in the older form `{"name": …, "arguments": {…}}`.
fn json_call(text: &str) -> Option<(String, Map<String, Value>)> {
    let text = text.trim();
    let value: Value = serde_json::from_str(text)
        .ok()
        .or_else(|| parse_python_literal(text).ok())?;
    if is_too_deep(&value) {
        return None;
    }
    let name = value.get("name")?.as_str()?.trim().to_owned();
    if name.is_empty() {
        return None;
    }
    let arguments = match value.get("arguments").or_else(|| value.get("parameters")) {
        None | Some(Value::Null) => Map::new(),
        Some(Value::Object(arguments)) => arguments.clone(),
        Some(Value::String(text)) => match serde_json::from_str(text).ok()? {
            Value::Object(arguments) => arguments,
            _ => return None,
        },
        Some(_) => return None,
    };
    Some((name, arguments))
}
