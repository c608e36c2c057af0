//! What an answer is held to: a form, calls that must be made or must not.

use crate::error::ApiError;
use crate::fields::Fields;
use lily_constraint::{Constraint, ConstraintError, Grammars};
use serde_json::{Value, json};

/// What an answer is held to.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Demand {
    /// The schema of the answer's content.
    json: Option<Value>,
    calls: Calls,
    /// At most one call an answer.
    one_call: bool,
    /// Some tool's arguments are to be as its schema says.
    strict: bool,
}

/// Whether tools are called.
#[derive(Clone, Debug, Default, PartialEq)]
enum Calls {
    /// As the model likes.
    #[default]
    Auto,
    /// At least one.
    Required,
    /// This one.
    Named(String),
}

impl Demand {
    /// Reads what a body demands of its answer, and which of its tools the model is told of.
    pub fn read(fields: &Fields<'_>, tools: Vec<Value>) -> Result<(Self, Vec<Value>), ApiError> {
        let mut tools = tools;
        let mut demand = Demand {
            json: response_schema(fields)?,
            one_call: fields.boolean("parallel_tool_calls")? == Some(false),
            ..Demand::default()
        };
        match fields.value("tool_choice") {
            None => {}
            Some(choice) if choice == "auto" => {}
            Some(choice) if choice == "none" => tools.clear(),
            Some(choice) if choice == "required" => demand.calls = Calls::Required,
            Some(choice) => demand.choose(fields, choice, &mut tools)?,
        }
        if tools.is_empty() && demand.calls != Calls::Auto {
            return Err(fields.wrong("tool_choice", "auto or none where there are no tools"));
        }
        demand.strict = tools
            .iter()
            .any(|tool| tool["function"]["strict"] == Value::Bool(true));
        Ok((demand, tools))
    }

    /// Reads a choice that is an object: a named function, or some of the tools.
    fn choose(
        &mut self,
        fields: &Fields<'_>,
        choice: &Value,
        tools: &mut Vec<Value>,
    ) -> Result<(), ApiError> {
        let wrong = || {
            let what =
                "auto, none, required or {\"type\": \"function\", \"function\": {\"name\": …}}";
            fields.wrong("tool_choice", what)
        };
        let name_of = |tool: &Value| tool["function"]["name"].as_str().map(String::from);
        match choice["type"].as_str() {
            Some("function") => {
                let name = name_of(choice).or_else(|| choice["name"].as_str().map(String::from));
                let name = name.ok_or_else(wrong)?;
                if !tools
                    .iter()
                    .any(|tool| name_of(tool).as_deref() == Some(&name))
                {
                    return Err(fields.wrong("tool_choice", "a function that is one of the tools"));
                }
                self.calls = Calls::Named(name);
            }
            Some("allowed_tools") => {
                let allowed = choice.get("allowed_tools").unwrap_or(choice);
                let listed = allowed["tools"].as_array().ok_or_else(wrong)?;
                let names: Vec<_> = listed.iter().filter_map(name_of).collect();
                tools.retain(|tool| name_of(tool).is_some_and(|name| names.contains(&name)));
                match allowed["mode"].as_str() {
                    Some("auto") => {}
                    Some("required") => self.calls = Calls::Required,
                    _ => return Err(wrong()),
                }
            }
            _ => return Err(wrong()),
        }
        Ok(())
    }

    /// Whether anything is demanded, of answers to a conversation with tools or without.
    pub fn is_any(&self, has_tools: bool) -> bool {
        let of_calls = self.one_call || self.strict || self.calls != Calls::Auto;
        self.json.is_some() || (has_tools && of_calls)
    }

    /// Adds the demands to a constraint.
    pub fn hold(
        &self,
        mut constraint: Constraint,
        grammars: &Grammars,
        tools: &[Value],
    ) -> Result<Constraint, ConstraintError> {
        let several = !self.one_call;
        let named = match &self.calls {
            Calls::Named(name) => Some(name.as_str()),
            Calls::Auto | Calls::Required => None,
        };
        if tools.is_empty() {
            if let Some(schema) = &self.json {
                constraint = constraint.with_answer(grammars.json(schema)?);
            }
            return Ok(constraint);
        }
        match (&self.calls, &self.json) {
            (Calls::Auto, None) => {
                if self.strict {
                    constraint = constraint.with_calls(grammars.rest_of_call(tools)?);
                }
                if self.one_call {
                    constraint = constraint.with_one_call();
                }
            }
            (Calls::Auto, Some(schema)) => {
                let either = grammars.calls(tools, None, several, Some(schema))?;
                constraint = constraint.with_answer(either);
            }
            // A call that must be made comes in place of an answer, whatever form that would have.
            (Calls::Required | Calls::Named(_), _) => {
                constraint = constraint.with_answer(grammars.calls(tools, named, several, None)?);
            }
        }
        Ok(constraint)
    }
}

fn response_schema(fields: &Fields<'_>) -> Result<Option<Value>, ApiError> {
    let Some(format) = fields.object("response_format", "response_format.")? else {
        return Ok(None);
    };
    match format.text("type")? {
        None | Some("text") => Ok(None),
        Some("json_object") => Ok(Some(json!({"type": "object"}))),
        Some("json_schema") => {
            let inner = format.object("json_schema", "response_format.json_schema.")?;
            let inner = inner.ok_or_else(|| format.wrong("json_schema", "an object"))?;
            // The schema is kept to either way.
            inner.boolean("strict")?;
            match inner.value("schema") {
                Some(schema @ Value::Object(_)) => Ok(Some(schema.clone())),
                // As OpenAI has it: any object.
                None => Ok(Some(json!({"type": "object"}))),
                Some(_) => Err(inner.wrong("schema", "a JSON schema")),
            }
        }
        Some(_) => Err(format.wrong("type", "text, json_object or json_schema")),
    }
}
