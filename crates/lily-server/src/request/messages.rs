//! Messages and tools, as clients send them and as templates want them.

use crate::error::ApiError;
use crate::fields::Fields;
use crate::log;
use serde_json::{Map, Value, json};

/// Most messages of a conversation.
const MOST_MESSAGES: usize = 16_384;
/// Most tools of a conversation.
const MOST_TOOLS: usize = 1_024;

/// How a coding agent's header for its own billing begins. It is other in each request, and would make every prompt a
/// new one from its first line on.
const BILLING_HEADER: &str = "x-anthropic-billing-header:";

/// The messages of a body.
pub(super) fn messages(fields: &Fields<'_>) -> Result<Vec<Value>, ApiError> {
    let messages = fields.array("messages")?.unwrap_or_default();
    if messages.is_empty() {
        return Err(fields.wrong("messages", "an array of at least one message"));
    }
    if messages.len() > MOST_MESSAGES {
        return Err(fields.wrong("messages", &format!("at most {MOST_MESSAGES} messages")));
    }
    let messages = messages.iter().enumerate();
    let mut messages = messages
        .map(|(index, message)| prepared(&format!("messages[{index}]"), message))
        .collect::<Result<Vec<Value>, _>>()?;
    order_results(&mut messages);
    Ok(messages)
}

fn wrong(name: String, what: &str) -> ApiError {
    ApiError::invalid(format!("{name} must be {what}")).of(name)
}

/// The message at `place` as templates want it.
fn prepared(place: &str, message: &Value) -> Result<Value, ApiError> {
    let mut message = message.clone();
    let Some(entries) = message.as_object_mut() else {
        return Err(wrong(place.to_string(), "an object"));
    };
    match entries.get("role") {
        // The newer name of the same.
        Some(Value::String(role)) if role == "developer" => {
            entries.insert("role".into(), "system".into());
        }
        Some(Value::String(role)) if role == "function" => {
            return Err(wrong(
                format!("{place}.role"),
                "tool, where a function answers",
            ));
        }
        Some(Value::String(_)) => {}
        _ => return Err(wrong(format!("{place}.role"), "a string")),
    }
    for (name, instead) in [("function_call", "tool_calls"), ("audio", "text")] {
        if entries.get(name).is_some_and(|value| !value.is_null()) {
            let name = format!("{place}.{name}");
            let message = format!("{name} is not supported: give {instead}");
            return Err(ApiError::invalid(message)
                .of(name)
                .with_code("unsupported_parameter"));
        }
    }
    // Under this name it comes back from other servers' clients.
    if !entries.contains_key("reasoning_content")
        && let Some(reasoning) = entries.get("reasoning").filter(|value| value.is_string())
    {
        let reasoning = reasoning.clone();
        entries.insert("reasoning_content".into(), reasoning);
    }
    if let Some(content) = entries.get_mut("content") {
        check_parts(place, content)?;
    }
    if entries.get("role").is_some_and(|role| role == "system")
        && let Some(content) = entries.get_mut("content")
    {
        drop_billing_header(content);
    }
    let calls = entries.get_mut("tool_calls").and_then(Value::as_array_mut);
    for (index, call) in calls.into_iter().flatten().enumerate() {
        check_call(&format!("{place}.tool_calls[{index}]"), call)?;
    }
    Ok(message)
}

/// Refuses parts of a content that are no text.
fn check_parts(place: &str, content: &mut Value) -> Result<(), ApiError> {
    let parts = match content {
        Value::Null | Value::String(_) => return Ok(()),
        Value::Array(parts) => parts,
        _ => {
            let what = "a string, or an array of parts";
            return Err(wrong(format!("{place}.content"), what));
        }
    };
    for (index, part) in parts.iter_mut().enumerate() {
        let name = format!("{place}.content[{index}]");
        let kind = part.get("type").and_then(Value::as_str).map(String::from);
        let text = match kind.as_deref() {
            Some("text") => part.get("text"),
            Some("refusal") => part.get("refusal"),
            Some(other) => {
                let other: String = other.chars().take(40).collect();
                let what = if other.contains("image") {
                    "images are".into()
                } else {
                    format!("parts of type {other:?} are")
                };
                let message = format!("{name}: {what} not supported, only text is read");
                return Err(ApiError::invalid(message)
                    .of(name)
                    .with_code("unsupported_content"));
            }
            None => return Err(wrong(name, "an object with a type")),
        };
        let Some(text) = text.and_then(Value::as_str) else {
            return Err(wrong(name, "a part with a text"));
        };
        *part = json!({"type": "text", "text": text});
    }
    Ok(())
}

/// Checks a call of the conversation's past, and mends what it was cut off in: it comes as it was told to the client.
fn check_call(place: &str, call: &mut Value) -> Result<(), ApiError> {
    match call.get("type").and_then(Value::as_str) {
        None | Some("function") => {}
        Some(_) => return Err(wrong(format!("{place}.type"), "function")),
    }
    let function = call.get_mut("function").filter(|value| value.is_object());
    let Some(function) = function else {
        return Err(wrong(format!("{place}.function"), "an object"));
    };
    if !function.get("name").is_some_and(Value::is_string) {
        return Err(wrong(format!("{place}.function.name"), "a string"));
    }
    match function.get_mut("arguments") {
        None | Some(Value::Null | Value::Object(_)) => Ok(()),
        Some(Value::String(text)) => {
            *text = mended(text);
            Ok(())
        }
        Some(_) => Err(wrong(
            format!("{place}.function.arguments"),
            "a string with JSON",
        )),
    }
}

/// Arguments as a JSON object: as they are, or with the end that they were cut off before, or none.
fn mended(text: &str) -> String {
    let is_object = |text: &String| {
        text.trim().is_empty() || serde_json::from_str::<Map<String, Value>>(text).is_ok()
    };
    let ends = ["", "}", "\"}", "null}", "]}", "\"]}", "}}", "\"}}"];
    let all = ends.iter().map(|end| format!("{text}{end}"));
    all.into_iter()
        .find(is_object)
        .unwrap_or_else(|| "{}".into())
}

/// Puts results of tools that stand one behind another into the order of the calls that they answer: templates know them
/// by their order alone. Where one names no call, they stay as they are.
fn order_results(messages: &mut [Value]) {
    let is_result = |message: &Value| message["role"] == "tool";
    let mut index = 0;
    while index < messages.len() {
        let results = messages[index..].iter().take_while(|one| is_result(one));
        let count = results.count();
        if count > 1 && index > 0 {
            let (before, rest) = messages.split_at_mut(index);
            let calls = before.last().and_then(|last| last["tool_calls"].as_array());
            let place = |result: &Value| {
                let id = result["tool_call_id"].as_str()?;
                calls?.iter().position(|call| call["id"] == id)
            };
            let results = &mut rest[..count];
            if results.iter().all(|result| place(result).is_some()) {
                results.sort_by_key(place);
            }
        }
        index += count.max(1);
    }
}

fn drop_billing_header(content: &mut Value) {
    match content {
        Value::String(text) if text.starts_with(BILLING_HEADER) => {
            let rest = text.split_once('\n').map_or("", |(_, rest)| rest);
            *text = rest.to_string();
        }
        Value::Array(parts) => parts.retain(|part| {
            let text = part.get("text").and_then(Value::as_str);
            !text.is_some_and(|text| text.starts_with(BILLING_HEADER))
        }),
        _ => {}
    }
}

/// The functions among the tools of a body. Tools of other types are nothing that a model here could call: they are
/// skipped, and that is said.
pub(super) fn tools(fields: &Fields<'_>) -> Result<Vec<Value>, ApiError> {
    let tools = fields.array("tools")?.unwrap_or_default();
    if tools.len() > MOST_TOOLS {
        return Err(fields.wrong("tools", &format!("at most {MOST_TOOLS} tools")));
    }
    let mut functions = Vec::new();
    for (index, tool) in tools.iter().enumerate() {
        let wrong = |field: &str, what: &str| wrong(format!("tools[{index}]{field}"), what);
        if !tool.is_object() {
            return Err(wrong("", "an object"));
        }
        match tool.get("type").and_then(Value::as_str) {
            None | Some("function") => {}
            Some(other) => {
                let other: String = other.chars().take(40).collect();
                log::say(&format!(
                    "a tool of type {other:?} is skipped: only functions can be called"
                ));
                continue;
            }
        }
        let Some(function) = tool.get("function").filter(|value| value.is_object()) else {
            return Err(wrong(".function", "an object"));
        };
        let name = function.get("name").and_then(Value::as_str);
        match name {
            // The model's markup has no way to write others.
            Some(name)
                if !name.is_empty()
                    && name.trim() == name
                    && !name.contains(['<', '>'])
                    && !name.contains(char::is_control) => {}
            _ => return Err(wrong(".function.name", "the name of a function")),
        }
        match function.get("parameters") {
            None | Some(Value::Object(_) | Value::Null) => {}
            Some(_) => return Err(wrong(".function.parameters", "a JSON schema")),
        }
        match function.get("strict") {
            None | Some(Value::Bool(_) | Value::Null) => {}
            Some(_) => return Err(wrong(".function.strict", "true or false")),
        }
        functions.push(tool.clone());
    }
    Ok(functions)
}
