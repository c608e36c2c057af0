//! The bodies of the fuzz targets, so that tests run them, too.

use serde_json::{Value, json};

use crate::output::{OutputEvent, OutputParser, ParsedOutput, parse_output, parse_python_literal};

/// Tools with parameters of every type, for [`output_parser`].
#[must_use]
pub fn tools() -> Vec<Value> {
    vec![
        json!({"type": "function", "function": {"name": "get_weather", "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "share": {"type": "number"},
                "exact": {"type": "boolean"},
                "options": {"type": "object"},
                "list": {"type": "array"},
                "any": {"anyOf": [{"type": "integer"}, {"type": "null"}, {"$ref": "#/$defs/text"}]},
            },
            "$defs": {"text": {"type": "string"}},
        }}}),
        json!({"type": "function", "function": {"name": "write_file", "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}, "text": {"type": "string"}},
        }}}),
        json!({"type": "function", "function": {"name": "now"}}),
    ]
}

/// Prompts that leave the model in different states.
pub const PROMPTS: [&str; 4] = [
    "<|im_start|>assistant\n<think>\n",
    "<|im_start|>assistant\n<think>\n\n</think>\n\n",
    "<|im_start|>assistant\n",
    "",
];

/// Parses a text in pieces and as a whole and compares. The first byte chooses
/// the prompt and how the output ends, the second how it is cut into pieces.
///
/// # Panics
///
/// If the results differ or are not consistent.
pub fn output_parser(bytes: &[u8]) {
    let [mode, cut, text @ ..] = bytes else {
        return;
    };
    let text = String::from_utf8_lossy(text);
    let prompt = PROMPTS[usize::from(mode & 3)];
    let truncated = mode & 4 != 0;
    let tools = if mode & 8 != 0 { Vec::new() } else { tools() };
    let parse_calls = mode & 16 == 0;

    let mut parser = OutputParser::new(prompt, &tools).with_tool_calls(parse_calls);
    let mut whole = parser.push(&text);
    whole.extend(parser.finish(truncated));

    let mut parser = OutputParser::new(prompt, &tools).with_tool_calls(parse_calls);
    let mut streamed = Vec::new();
    let mut seed = u32::from(*cut);
    let mut rest = &*text;
    while !rest.is_empty() {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let wanted = 1 + if *cut == 0 {
            0
        } else {
            (seed >> 24) as usize % 12
        };
        let length = (wanted..rest.len())
            .find(|&length| rest.is_char_boundary(length))
            .unwrap_or(rest.len());
        streamed.extend(parser.push(&rest[..length]));
        rest = &rest[length..];
    }
    streamed.extend(parser.finish(truncated));

    check_events(&whole);
    check_events(&streamed);
    let whole_output = ParsedOutput::from_events(whole.clone());
    assert_eq!(ParsedOutput::from_events(streamed.clone()), whole_output);
    assert_eq!(joined(streamed), joined(whole));
    if parse_calls {
        assert_eq!(parse_output(prompt, &text, &tools, truncated), whole_output);
    }
}

/// Parses a Python literal; the result must be JSON that can be read back.
///
/// # Panics
///
/// If it cannot.
pub fn python_literal(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    if let Ok(value) = parse_python_literal(&text) {
        let json = value.to_string();
        let again: Result<Value, _> = serde_json::from_str(&json);
        assert_eq!(again.ok(), Some(value), "{json}");
    }
}

/// Joins neighbouring pieces of the same kind, which may be cut differently.
fn joined(events: Vec<OutputEvent>) -> Vec<OutputEvent> {
    let mut result: Vec<OutputEvent> = Vec::new();
    for event in events {
        match (result.last_mut(), event) {
            (Some(OutputEvent::Reasoning(all)), OutputEvent::Reasoning(text))
            | (Some(OutputEvent::Content(all)), OutputEvent::Content(text)) => all.push_str(&text),
            (
                Some(OutputEvent::ToolCallArguments {
                    json_fragment: all, ..
                }),
                OutputEvent::ToolCallArguments { json_fragment, .. },
            ) => all.push_str(&json_fragment),
            (_, event) => result.push(event),
        }
    }
    result
}

/// Calls must be numbered in order, not overlap, and have JSON objects as
/// arguments.
fn check_events(events: &[OutputEvent]) {
    let mut next = 0;
    let mut open: Option<String> = None;
    for event in events {
        match event {
            OutputEvent::Reasoning(text) | OutputEvent::Content(text) => {
                assert!(open.is_none() && !text.is_empty());
            }
            OutputEvent::ToolCallStarted { index, name } => {
                assert!(open.is_none() && *index == next && !name.is_empty());
                open = Some(String::new());
            }
            OutputEvent::ToolCallArguments {
                index,
                json_fragment,
            } => {
                assert!(*index == next && !json_fragment.is_empty());
                open.as_mut()
                    .expect("a call is open")
                    .push_str(json_fragment);
            }
            OutputEvent::ToolCallFinished { index } => {
                assert_eq!(*index, next);
                let json = open.take().expect("a call is open");
                let value: Result<Value, _> = serde_json::from_str(&json);
                assert!(value.is_ok_and(|value| value.is_object()), "{json}");
                next += 1;
            }
            OutputEvent::ToolCallTruncated { index } => {
                assert_eq!(index.is_some(), open.take().is_some());
                assert!(index.is_none_or(|index| index == next));
            }
        }
    }
    assert!(open.is_none(), "a call neither finished nor was cut off");
}
