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
use crate::written::{Written, resolved, written};
use lily_engine::Tokenizer;
use serde_json::{Map, Value};
use std::fmt::Write as _;

/// Text that no value may have in it, as it would be the end of what the value stands in.
const MARKUP: &str = r"~/(?s:.*)<\/(parameter|function|tool_call)>(?s:.*)/ & ~/(?s:.*)<(parameter|function)=(?s:.*)/";

/// Where schemas keep what they refer to.
const DEFINITIONS: [&str; 2] = ["$defs", "definitions"];
/// Most parameters of a tool whose calls are held to it.
const MOST_PARAMETERS: usize = 256;

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

    /// Refuses what calls could not be held to.
    fn check(&self) -> Result<(), ConstraintError> {
        let properties = self.properties()?;
        if properties.len() > MOST_PARAMETERS {
            return Err(self.wrong(format!("it has over {MOST_PARAMETERS} parameters")));
        }
        let required = self.parameters.get("required").and_then(Value::as_array);
        let mut required = required.into_iter().flatten().filter_map(Value::as_str);
        if let Some(name) = required.find(|name| !properties.contains_key(*name)) {
            return Err(self.wrong(format!("{name:?} is required and not described")));
        }
        let combines = ["anyOf", "oneOf", "allOf"].map(|key| self.parameters.get(key).is_some());
        if self.is_strict && properties.is_empty() && combines.contains(&true) {
            return Err(self.wrong("its parameters are described by a combination"));
        }
        Ok(())
    }

    fn requires(&self, name: &str) -> bool {
        let required = self.parameters.get("required").and_then(Value::as_array);
        required.is_some_and(|all| all.iter().any(|one| one == name))
    }

    /// The schema of a parameter by itself, with what it may refer to.
    fn with_definitions(&self, schema: &Value) -> Value {
        let mut schema = schema.clone();
        if let Value::Object(entries) = &mut schema {
            for name in DEFINITIONS {
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
            parameters: function.get("parameters").map_or(Value::Null, whole),
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

/// A schema whose root is a reference, with what that stands for in its place and its definitions.
fn whole(parameters: &Value) -> Value {
    let mut schema = resolved(parameters, parameters).clone();
    if let (Value::Object(schema), Value::Object(root)) = (&mut schema, parameters) {
        for name in DEFINITIONS {
            if let Some(definitions) = root.get(name) {
                schema.entry(name).or_insert_with(|| definitions.clone());
            }
        }
    }
    schema
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
            tool.check()?;
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
    // The model's markup has no way to write others.
    if name.contains(['<', '>']) || name.trim() != name || name.contains(char::is_control) {
        return Err(tool.wrong(format!("a parameter cannot be called {name:?}")));
    }
    let begin = quoted(&format!("<parameter={name}>\n"));
    let refused = |reason: String| tool.wrong(format!("parameter {name}: {reason}"));
    let written = written(&tool.parameters, schema, tool.is_strict).map_err(refused)?;
    let value = match written {
        Written::Json => {
            // A schema cannot be told what may not be in its strings; the tags are tokens of their own, and JSON has no
            // use for them.
            let schema = tool.with_definitions(resolved(&tool.parameters, schema));
            if schema.to_string().contains("\"$ref\":\"#\"") {
                return Err(refused("a reference to the schema as a whole".into()));
            }
            let schema = sparing(schema);
            let _ = writeln!(text, "{rule}: {begin} {rule}_v \"\\n</parameter>\\n\"");
            let _ = writeln!(text, "{rule}_v: %json {schema}");
            return Ok(());
        }
        Written::OneOf(choices) => {
            let choices: Vec<String> = choices.iter().map(|choice| quoted(choice)).collect();
            let _ = writeln!(
                text,
                "{rule}: {begin} ({}) \"\\n</parameter>\\n\"",
                choices.join(" | ")
            );
            return Ok(());
        }
        Written::Text => "FREE".to_string(),
        Written::Like(terminal) => terminal,
    };
    let terminal = rule.to_uppercase();
    let _ = writeln!(text, "{rule}: {begin} {rule}_v");
    let _ = writeln!(text, "{rule}_v[lazy]: {terminal} END");
    let _ = writeln!(text, "{terminal}: {value}");
    Ok(())
}

/// A literal of the grammar.
fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}
