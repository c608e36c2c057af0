//! Calls of tools, as the model writes them, as a grammar:
//!
//! ```text
//! <tool_call>
//! <function=NAME>
//! <parameter=KEY>
//! VALUE
//! </parameter>
//! </function>
//! </tool_call>
//! ```
//!
//! Text stands there as it is, every other value as JSON. Parameters come in the order in which the schema has them, those
//! that are required and any of the others.

use crate::ConstraintError;
use crate::grammars::sparing;
use lily_engine::Tokenizer;
use serde_json::{Map, Value, json};
use std::fmt::Write as _;

/// Text that no value may have in it, as it would be the end of what the value stands in.
const MARKUP: &str = r"~/(?s:.*)<\/(parameter|function|tool_call)>(?s:.*)/ & ~/(?s:.*)<(parameter|function)=(?s:.*)/";

/// A tool, as far as its calls go.
pub(crate) struct Tool {
    pub name: String,
    pub parameters: Value,
    pub is_strict: bool,
}

impl Tool {
    pub fn wrong(&self, reason: impl Into<String>) -> ConstraintError {
        ConstraintError::Schema {
            of: Some(self.name.clone()),
            reason: reason.into(),
        }
    }

    /// The parameters and their schemas.
    fn properties(&self) -> Result<Map<String, Value>, ConstraintError> {
        match self.parameters.get("properties") {
            None | Some(Value::Null) => Ok(Map::new()),
            Some(Value::Object(properties)) => Ok(properties.clone()),
            Some(_) => Err(self.wrong("properties must be an object")),
        }
    }

    fn requires(&self, name: &str) -> bool {
        let required = self.parameters.get("required").and_then(Value::as_array);
        required.is_some_and(|all| all.iter().any(|one| one == name))
    }

    /// The schema of a parameter by itself, with what it may refer to.
    fn with_definitions(&self, schema: &Value) -> Value {
        let mut schema = schema.clone();
        if let Value::Object(entries) = &mut schema {
            for name in ["$defs", "definitions"] {
                if let Some(definitions) = self.parameters.get(name) {
                    entries.entry(name).or_insert_with(|| definitions.clone());
                }
            }
        }
        schema
    }
}

/// The tools that may be called: all functions, or the one of this name.
pub(crate) fn chosen(tools: &[Value], named: Option<&str>) -> Result<Vec<Tool>, ConstraintError> {
    let tool = |tool: &Value| {
        let function = tool.get("function").unwrap_or(tool);
        Some(Tool {
            name: function.get("name")?.as_str()?.to_string(),
            parameters: function.get("parameters").cloned().unwrap_or(Value::Null),
            is_strict: function.get("strict") == Some(&Value::Bool(true)),
        })
    };
    let mut chosen: Vec<Tool> = tools.iter().filter_map(tool).collect();
    if let Some(named) = named {
        chosen.retain(|tool| tool.name == named);
        chosen.truncate(1);
        if chosen.is_empty() {
            return Err(ConstraintError::UnknownTool(named.to_string()));
        }
    }
    if chosen.is_empty() {
        return Err(ConstraintError::NoTools);
    }
    Ok(chosen)
}

/// The grammar of an answer that calls tools, or, where `or_json` is given, has that form.
pub(crate) fn grammar(
    tools: &[Tool],
    several: bool,
    or_json: Option<&Value>,
    tokenizer: &Tokenizer,
) -> Result<String, ConstraintError> {
    let calls = if several {
        "call (\"\\n\" call)*"
    } else {
        "call"
    };
    let mut text = match or_json {
        None => format!("start: {calls}\n"),
        Some(schema) => {
            let schema = sparing(schema.clone());
            format!("start: answer | {calls}\nanswer: %json {schema}\n")
        }
    };
    let (open, close) = (
        tag("<tool_call>", tokenizer),
        tag("</tool_call>", tokenizer),
    );
    let _ = writeln!(text, "call: {open} \"\\n\" function \"\\n\" {close}");
    functions(&mut text, tools, |_| true)?;
    Ok(text)
}

/// The grammar of what follows `<tool_call>`; whatever comes behind the call is free.
pub(crate) fn rest_of_call(
    tools: &[Tool],
    tokenizer: &Tokenizer,
) -> Result<String, ConstraintError> {
    let close = tag("</tool_call>", tokenizer);
    let mut text = format!("start: \"\\n\" function \"\\n\" {close}\n");
    functions(&mut text, tools, |tool| tool.is_strict)?;
    Ok(text)
}

/// A tag: a token of its own, if the vocabulary has it.
fn tag(name: &str, tokenizer: &Tokenizer) -> String {
    match tokenizer.id_of(name) {
        Some(id) if tokenizer.is_added(id) => name.to_string(),
        _ => quoted(name),
    }
}

fn functions(
    text: &mut String,
    tools: &[Tool],
    is_held: impl Fn(&Tool) -> bool,
) -> Result<(), ConstraintError> {
    let names: Vec<String> = (0..tools.len()).map(|index| format!("f{index}")).collect();
    let _ = writeln!(text, "function: {}", names.join(" | "));
    let _ = writeln!(text, "FREE: /(?s:.*)/ & {MARKUP}");
    let _ = writeln!(text, "END: \"\\n</parameter>\\n\"");
    let _ = writeln!(text, "free[lazy]: FREE END");
    let _ = writeln!(text, "any: \"<parameter=\" /[^<>\\n]+/ \">\\n\" free");
    for (index, tool) in tools.iter().enumerate() {
        let begin = quoted(&format!("<function={}>\n", tool.name));
        let mut parts = Vec::new();
        if is_held(tool) {
            for (number, (name, schema)) in tool.properties()?.iter().enumerate() {
                let rule = format!("f{index}_p{number}");
                let optional = if tool.requires(name) { "" } else { "?" };
                parts.push(format!("{rule}{optional}"));
                parameter(text, tool, &rule, name, schema)?;
            }
        }
        let open_ended = tool.parameters.get("additionalProperties") != Some(&Value::Bool(false));
        if parts.is_empty() && (!is_held(tool) || (open_ended && !tool.parameters.is_null())) {
            parts.push("any*".into());
        }
        let _ = writeln!(
            text,
            "f{index}: {begin} {} \"</function>\"",
            parts.join(" ")
        );
    }
    Ok(())
}

fn parameter(
    text: &mut String,
    tool: &Tool,
    rule: &str,
    name: &str,
    schema: &Value,
) -> Result<(), ConstraintError> {
    if name.contains(['<', '>', '\n']) {
        return Err(tool.wrong(format!("a parameter cannot be called {name:?}")));
    }
    let begin = quoted(&format!("<parameter={name}>\n"));
    let value = match as_text(schema) {
        None => {
            // A schema cannot be told what may not be in its strings; the tags are tokens of their own, and JSON has no
            // use for them.
            let schema = sparing(self_contained(tool, schema));
            let _ = writeln!(text, "{rule}: {begin} {rule}_v \"\\n</parameter>\\n\"");
            let _ = writeln!(text, "{rule}_v: %json {schema}");
            return Ok(());
        }
        Some(Text::OneOf(choices)) => {
            let choices: Vec<String> = choices.iter().map(|choice| quoted(choice)).collect();
            let _ = writeln!(
                text,
                "{rule}: {begin} ({}) \"\\n</parameter>\\n\"",
                choices.join(" | ")
            );
            return Ok(());
        }
        Some(Text::Any) => "FREE".to_string(),
        Some(Text::Like(pattern)) => format!("{pattern} & FREE"),
    };
    let terminal = rule.to_uppercase();
    let _ = writeln!(text, "{rule}: {begin} {rule}_v");
    let _ = writeln!(text, "{rule}_v[lazy]: {terminal} END");
    let _ = writeln!(text, "{terminal}: {value}");
    Ok(())
}

fn self_contained(tool: &Tool, schema: &Value) -> Value {
    match schema {
        Value::Object(_) => tool.with_definitions(schema),
        // `true` and the like: any value.
        _ => json!({}),
    }
}

/// What a text may be.
enum Text {
    Any,
    OneOf(Vec<String>),
    /// A terminal of the grammar.
    Like(String),
}

/// What a parameter's text may be, where its values are, or may be, strings, which stand as they are.
fn as_text(schema: &Value) -> Option<Text> {
    let strings = |values: &[Value]| -> Option<Vec<String>> {
        values
            .iter()
            .map(|value| value.as_str().map(String::from))
            .collect()
    };
    if let Some(choices) = schema.get("enum").and_then(Value::as_array) {
        return strings(choices)
            .filter(|all| !all.is_empty())
            .map(Text::OneOf);
    }
    if let Some(only) = schema.get("const") {
        return only
            .as_str()
            .map(|only| Text::OneOf(vec![only.to_string()]));
    }
    let is_string = |kind: &Value| kind == "string";
    match schema.get("type") {
        Some(kind) if is_string(kind) => Some(length(schema)),
        Some(Value::Array(kinds)) if kinds.iter().any(is_string) => Some(Text::Any),
        Some(_) => None,
        None => {
            let alternatives = ["anyOf", "oneOf"]
                .iter()
                .find_map(|key| schema.get(key)?.as_array());
            match alternatives {
                Some(all) if all.iter().any(|one| as_text(one).is_some()) => Some(Text::Any),
                Some(_) => None,
                // Nothing is said of the type; a reference is followed where the schema is JSON.
                None => schema.get("$ref").is_none().then_some(Text::Any),
            }
        }
    }
}

/// Strings of a least and a greatest length.
fn length(schema: &Value) -> Text {
    let count = |name: &str| schema.get(name).and_then(Value::as_u64);
    match (count("minLength"), count("maxLength")) {
        (None, None) => Text::Any,
        (least, most) => {
            let most = most.map_or(String::new(), |most| most.to_string());
            Text::Like(format!("/(?s:.{{{},{most}}})/", least.unwrap_or(0)))
        }
    }
}

/// A literal of the grammar.
fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}
