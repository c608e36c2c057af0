//! Messages and tools, as clients send them and as templates want them.

use crate::error::ApiError;
use crate::fields::Fields;
use serde_json::Value;

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
    messages
        .map(|(index, message)| prepared(index, message))
        .collect()
}

fn prepared(index: usize, message: &Value) -> Result<Value, ApiError> {
    let wrong = |field: &str, what: &str| {
        let name = format!("messages[{index}]{field}");
        ApiError::invalid(format!("{name} must be {what}")).of(name)
    };
    let mut message = message.clone();
    let Some(entries) = message.as_object_mut() else {
        return Err(wrong("", "an object"));
    };
    match entries.get("role") {
        // The newer name of the same.
        Some(Value::String(role)) if role == "developer" => {
            entries.insert("role".into(), "system".into());
        }
        Some(Value::String(role)) if role == "function" => {
            return Err(wrong(".role", "tool, where a function answers"));
        }
        Some(Value::String(_)) => {}
        _ => return Err(wrong(".role", "a string")),
    }
    // Under this name it comes back from other servers' clients.
    if !entries.contains_key("reasoning_content")
        && let Some(reasoning) = entries.get("reasoning").filter(|value| value.is_string())
    {
        let reasoning = reasoning.clone();
        entries.insert("reasoning_content".into(), reasoning);
    }
    if entries.get("role").is_some_and(|role| role == "system")
        && let Some(content) = entries.get_mut("content")
    {
        drop_billing_header(content);
    }
    Ok(message)
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
        let wrong = |field: &str, what: &str| {
            let name = format!("tools[{index}]{field}");
            ApiError::invalid(format!("{name} must be {what}")).of(name)
        };
        if !tool.is_object() {
            return Err(wrong("", "an object"));
        }
        match tool.get("type").and_then(Value::as_str) {
            None | Some("function") => {}
            Some(other) => {
                let other: String = other.chars().take(40).collect();
                eprintln!(
                    "lily: a tool of type {other:?} is skipped: only functions can be called"
                );
                continue;
            }
        }
        let Some(function) = tool.get("function").filter(|value| value.is_object()) else {
            return Err(wrong(".function", "an object"));
        };
        let name = function.get("name").and_then(Value::as_str);
        match name {
            Some(name) if !name.is_empty() && !name.contains(['<', '>', '\n']) => {}
            _ => return Err(wrong(".function.name", "the name of a function")),
        }
        match function.get("parameters") {
            None | Some(Value::Object(_) | Value::Null) => {}
            Some(_) => return Err(wrong(".function.parameters", "a JSON schema")),
        }
        functions.push(tool.clone());
    }
    Ok(functions)
}
