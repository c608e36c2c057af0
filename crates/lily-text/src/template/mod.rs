//! Chat templates: Jinja, as Hugging Face renders it.

mod json;
mod time;

use std::fmt;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Serde, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, UndefinedBehavior, Value};
use minijinja_contrib::pycompat::unknown_method_callback;
use serde_json::{Map, Value as Json};

use crate::TemplateError;

/// Work that any rendering may do; see [`FUEL_PER_BYTE`].
const BASE_FUEL: u64 = 4_000_000;

/// Further work for every byte of the request. Templates do some hundred steps
/// a message and read its text a few times, so a real one stays far below
/// this, and one that never ends is stopped within seconds.
const FUEL_PER_BYTE: u64 = 16;

/// How Qwen's templates refuse a system message that is not the first.
const REFUSES_LATE_SYSTEM: &str = "raise_exception('System message must be at the beginning.')";
/// What the message's text may be called there.
const MESSAGE_TEXT: [&str; 2] = ["content", "body"];

/// Special tokens that templates may print, named in `tokenizer_config.json`.
const TOKEN_VARIABLES: [&str; 4] = ["bos_token", "eos_token", "pad_token", "unk_token"];

/// A compiled chat template.
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    /// Variables that every rendering sees unless the request sets them.
    defaults: Map<String, Json>,
}

/// What a chat template is rendered with.
#[derive(Debug, Clone, Copy)]
pub struct RenderRequest<'a> {
    /// The conversation, in OpenAI's form.
    pub messages: &'a [Json],
    /// The tools, in OpenAI's form.
    pub tools: Option<&'a [Json]>,
    /// Whether to end with the beginning of an answer.
    pub add_generation_prompt: bool,
    /// Further variables, such as `enable_thinking`.
    pub variables: &'a Map<String, Json>,
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("ChatTemplate")
            .field("bytes", &self.source.len())
            .field("defaults", &self.defaults)
            .finish_non_exhaustive()
    }
}

impl ChatTemplate {
    /// Compiles a template.
    ///
    /// # Errors
    ///
    /// If it is not valid Jinja.
    pub fn new(source: impl Into<String>) -> Result<Self, TemplateError> {
        let source = source.into();
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build()
            .map_err(TemplateError::Invalid)?;
        environment.set_syntax(syntax);
        // Jinja2's default: printing nothing is fine, looking into it is not.
        environment.set_undefined_behavior(UndefinedBehavior::Lenient);
        environment.set_unknown_method_callback(unknown_method_callback);
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        environment.set_formatter(|output, state, value| match float_text(value) {
            Some(text) => output.write_str(&text).map_err(Error::from),
            None => minijinja::escape_formatter(output, state, value),
        });
        environment.add_filter("tojson", json::tojson);
        environment.add_filter("string", string);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", |format: &str| {
            time::format(format, time::Moment::now())
        });
        environment
            .add_template_owned("chat_template", source.clone())
            .map_err(TemplateError::Invalid)?;
        Ok(Self {
            environment,
            source,
            defaults: Map::new(),
        })
    }

    /// Compiles the template of a checkpoint, given the contents of its
    /// `chat_template.jinja` and of its `tokenizer_config.json`. The former
    /// takes precedence; the latter may hold a template under `chat_template`
    /// (one, or a list of named ones of which `default` is used), and gives
    /// templates the variables `bos_token`, `eos_token` and so on.
    ///
    /// # Errors
    ///
    /// If neither file has a template, the configuration is not a JSON object,
    /// or the template is not valid.
    pub fn from_files(
        chat_template_jinja: Option<&str>,
        tokenizer_config: Option<&str>,
    ) -> Result<Self, TemplateError> {
        let config: Map<String, Json> = match tokenizer_config {
            Some(text) => serde_json::from_str(text)?,
            None => Map::new(),
        };
        let source = chat_template_jinja
            .or_else(|| template_of(config.get("chat_template")?))
            .ok_or(TemplateError::Missing)?;
        let mut template = Self::new(source)?;
        for name in TOKEN_VARIABLES {
            let token = config.get(name);
            // Older files write a token as an object.
            let text = token.and_then(|token| token.get("content").unwrap_or(token).as_str());
            if let Some(text) = text {
                template.defaults.insert(name.into(), text.into());
            }
        }
        Ok(template)
    }

    /// The same template with system messages wherever they stand: those behind the first are rendered in their place.
    /// The vendor's template refuses them, by a line that is known here; a template without it, and one that does not
    /// render such a conversation without it, stays as it is.
    #[must_use]
    pub fn with_late_system_messages(self) -> Self {
        let message =
            |role: &str, content: &str| serde_json::json!({"role": role, "content": content});
        let late = "late";
        let probe = [
            message("user", "first"),
            message("system", late),
            message("user", "last"),
        ];
        let request = RenderRequest {
            messages: &probe,
            tools: None,
            add_generation_prompt: true,
            variables: &Map::new(),
        };
        if !self.source.contains(REFUSES_LATE_SYSTEM) || self.render(&request).is_ok() {
            return self;
        }
        let expected = format!("<|im_start|>system\n{late}<|im_end|>\n");
        let changed = MESSAGE_TEXT.iter().find_map(|name| {
            let place = format!(r"'<|im_start|>system\n' + {name} + '<|im_end|>\n'");
            let mut changed = Self::new(self.source.replace(REFUSES_LATE_SYSTEM, &place)).ok()?;
            changed.defaults.clone_from(&self.defaults);
            let text = changed.render(&request).ok()?;
            (text.matches(&expected).count() == 1).then_some(changed)
        });
        changed.unwrap_or(self)
    }

    /// The template's text.
    #[must_use]
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Renders a conversation.
    ///
    /// Arguments of tool calls may be JSON in a string, as in OpenAI's form;
    /// templates see the object.
    ///
    /// # Errors
    ///
    /// [`TemplateError::Refused`] with the template's own message if it
    /// refuses the conversation; others if a message is malformed or the
    /// template fails.
    pub fn render(&self, request: &RenderRequest<'_>) -> Result<String, TemplateError> {
        let messages = request
            .messages
            .iter()
            .enumerate()
            .map(|(index, message)| prepare_message(index, message))
            .collect::<Result<Vec<Json>, TemplateError>>()?;
        let mut variables = self.defaults.clone();
        variables.extend(request.variables.clone());
        variables.insert("messages".into(), Json::Array(messages));
        variables.insert(
            "tools".into(),
            request
                .tools
                .map_or(Json::Null, |tools| Json::Array(tools.to_vec())),
        );
        variables.insert(
            "add_generation_prompt".into(),
            request.add_generation_prompt.into(),
        );
        variables
            .entry("documents".to_owned())
            .or_insert(Json::Null);
        // Fuel belongs to the environment; a clone shares all that is large.
        let mut environment = self.environment.clone();
        let size = variables.values().map(size_of_json).sum::<u64>();
        environment.set_fuel(Some(
            BASE_FUEL.saturating_add(size.saturating_mul(FUEL_PER_BYTE)),
        ));
        environment
            .get_template("chat_template")
            .and_then(|template| template.render(Value::from(Serde(variables))))
            .map_err(classify)
    }
}

/// About how many bytes a value has when written out.
fn size_of_json(value: &Json) -> u64 {
    match value {
        Json::Null | Json::Bool(_) | Json::Number(_) => 8,
        Json::String(text) => text.len() as u64 + 8,
        Json::Array(items) => 8 + items.iter().map(size_of_json).sum::<u64>(),
        Json::Object(entries) => entries
            .iter()
            .map(|(key, item)| key.len() as u64 + 8 + size_of_json(item))
            .sum(),
    }
}

fn template_of(value: &Json) -> Option<&str> {
    match value {
        Json::String(text) => Some(text),
        Json::Array(named) => named
            .iter()
            .find(|entry| entry.get("name").is_some_and(|name| name == "default"))
            .or(named.first())?
            .get("template")?
            .as_str(),
        _ => None,
    }
}

/// Templates need the arguments of a tool call as a mapping.
fn prepare_message(index: usize, message: &Json) -> Result<Json, TemplateError> {
    let refuse = |reason: &str| TemplateError::Message {
        index,
        reason: reason.to_owned(),
    };
    if !message.is_object() {
        return Err(refuse("a message must be an object"));
    }
    let mut message = message.clone();
    let calls = message.get_mut("tool_calls").and_then(Json::as_array_mut);
    for call in calls.into_iter().flatten() {
        let holder = if call.get("function").is_some() {
            call.get_mut("function")
        } else {
            Some(call)
        };
        let Some(arguments) = holder.and_then(|holder| holder.get_mut("arguments")) else {
            continue;
        };
        let parsed = match arguments {
            Json::Null => Json::Object(Map::new()),
            Json::String(text) if text.trim().is_empty() => Json::Object(Map::new()),
            Json::String(text) => match serde_json::from_str(text) {
                Ok(Json::Null) => Json::Object(Map::new()),
                Ok(object @ Json::Object(_)) => object,
                _ => return Err(refuse("the arguments of a tool call must be a JSON object")),
            },
            _ => continue,
        };
        *arguments = parsed;
    }
    Ok(message)
}

/// What `raise_exception` leaves in the chain of errors.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Refusal(String);

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(
        ErrorKind::InvalidOperation,
        "the template refused the messages",
    )
    .with_source(Refusal(message)))
}

fn classify(error: Error) -> TemplateError {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(&error);
    while let Some(current) = cause {
        if let Some(Refusal(message)) = current.downcast_ref() {
            return TemplateError::Refused(message.clone());
        }
        if current
            .downcast_ref::<Error>()
            .is_some_and(|inner| inner.kind() == ErrorKind::OutOfFuel)
        {
            return TemplateError::OutOfFuel;
        }
        cause = current.source();
    }
    TemplateError::Render(error)
}

fn string(state: &State, value: &Value) -> Result<Value, Error> {
    if value.kind() == ValueKind::String {
        return Ok(value.clone());
    }
    let text = float_text(value).unwrap_or_else(|| value.to_string());
    state.consume_fuel((text.len() / 64) as u64)?;
    Ok(text.into())
}

/// Floats print as in Python, which differs for very large and small ones.
fn float_text(value: &Value) -> Option<String> {
    if value.kind() != ValueKind::Number || value.is_integer() {
        return None;
    }
    Some(json::float_repr(
        f64::try_from(value.clone()).ok()?,
        "inf",
        "nan",
    ))
}

#[cfg(test)]
mod tests;
