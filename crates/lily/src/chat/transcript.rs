//! The conversation so far, and what it is written as.

use crate::failure::Failure;
use crate::model::{named, read_text};
use crate::prompt::{self, Prompt};
use lily_engine::{Conversation, FinishReason, ParsedOutput, TextModel};
use serde_json::{Map, Value, json};
use std::fs::OpenOptions;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

/// A conversation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Transcript {
    /// The system message, if there is one.
    pub system: Option<String>,
    /// The tools that the model may call, in OpenAI's form.
    pub tools: Vec<Value>,
    /// Whether the model reasons before it answers.
    pub thinking: bool,
    /// The other messages, in OpenAI's form.
    pub messages: Vec<Value>,
}

impl Transcript {
    /// The prompt of the next answer.
    pub fn prompt(&self, text: &TextModel) -> Result<Prompt, Failure> {
        let system = self.system.iter();
        let system = system.map(|content| json!({"role": "system", "content": content}));
        let mut conversation = Conversation {
            messages: system.chain(self.messages.iter().cloned()).collect(),
            tools: self.tools.clone(),
            ..Conversation::default()
        };
        if !self.thinking {
            prompt::without_reasoning(&mut conversation);
        }
        prompt::render(text, conversation)
    }

    /// Adds what the user says.
    pub fn ask(&mut self, content: &str) {
        self.messages
            .push(json!({"role": "user", "content": content}));
    }

    /// Adds what the model says, as far as it came. Returns the ids of its tool calls.
    pub fn answer(&mut self, parsed: &ParsedOutput, reason: Option<&FinishReason>) -> Vec<String> {
        let mut message = json!({"role": "assistant", "content": parsed.content});
        if !parsed.reasoning.is_empty() {
            message["reasoning_content"] = parsed.reasoning.as_str().into();
        }
        let turn = self.messages.len();
        let ids: Vec<String> = (0..parsed.tool_calls.len())
            .map(|index| format!("call_{turn}_{index}"))
            .collect();
        if !ids.is_empty() {
            let calls = parsed.tool_calls.iter().zip(&ids).map(|(call, id)| {
                let arguments = Value::Object(call.arguments.clone()).to_string();
                json!({"id": id, "type": "function",
                       "function": {"name": call.name, "arguments": arguments}})
            });
            message["tool_calls"] = calls.collect();
        }
        // Templates do not look at it: it is for who reads the file.
        match reason {
            Some(FinishReason::Cancelled) => message["finish_reason"] = "cancelled".into(),
            Some(FinishReason::Length) => message["finish_reason"] = "length".into(),
            _ => {}
        }
        self.messages.push(message);
        ids
    }

    /// Adds what a tool returned.
    pub fn tool_result(&mut self, id: &str, content: &str) {
        self.messages
            .push(json!({"role": "tool", "tool_call_id": id, "content": content}));
    }

    /// Forgets what came behind the user's last message; false where there is none.
    pub fn take_answer_back(&mut self) -> bool {
        let last = self.messages.iter().rposition(|m| m["role"] == "user");
        if let Some(last) = last {
            self.messages.truncate(last + 1);
        }
        last.is_some()
    }

    /// Writes it to a new file. `model` is told to who reads it.
    pub fn save(&self, path: &Path, model: &str) -> Result<(), Failure> {
        let value = json!({
            "messages": self.messages,
            "system": self.system,
            "tools": self.tools,
            "settings": {"model": model, "thinking": self.thinking},
        });
        let failed = |error: &std::io::Error| {
            Failure::request(format!("{} cannot be written", path.display())).because(error)
        };
        let mut options = OpenOptions::new();
        options.write(true).create_new(true);
        // A conversation is its owner's.
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        let file = options.open(path);
        let mut file = file.map_err(|error| match error.kind() {
            ErrorKind::AlreadyExists => Failure::usage(format!("{} exists", path.display()))
                .help("name another file, or remove that one: nothing is overwritten"),
            _ => failed(&error),
        })?;
        file.write_all(format!("{value:#}\n").as_bytes())
            .map_err(|error| {
                // Half a conversation is worth nothing, and would stand in the way of a second try.
                let _ = std::fs::remove_file(path);
                failed(&error)
            })
    }

    /// The conversation of a file, which the model's template takes. What the file does not say is as it is here.
    pub fn load(&self, path: &Path, text: &TextModel) -> Result<Self, Failure> {
        // A pipe or a terminal might never end.
        if std::fs::metadata(path).is_ok_and(|metadata| !metadata.is_file()) {
            return Err(Failure::usage(format!("{} is not a file", path.display())));
        }
        let name = named(path, "the conversation");
        let json = read_text(path, "the conversation")?;
        let value: Value = serde_json::from_str(&json)
            .map_err(|error| Failure::usage(format!("{name} is not JSON")).because(&error))?;
        let loaded = self.with(value).map_err(|reason| {
            Failure::usage(format!("{name}: {reason}"))
                .help("/save writes such files; a JSON array of messages in OpenAI's form does too")
        })?;
        // As with the next question: what cannot be gone on with is told now.
        let mut next = loaded.clone();
        next.ask("Hello");
        next.prompt(text)?;
        Ok(loaded)
    }

    fn with(&self, value: Value) -> Result<Self, String> {
        let mut fields = match value {
            Value::Object(fields) => fields,
            messages @ Value::Array(_) => Map::from_iter([("messages".to_string(), messages)]),
            _ => return Err("an object with messages is needed".into()),
        };
        let mut take = |name: &str| fields.remove(name).filter(|value| !value.is_null());
        let Some(Value::Array(mut messages)) = take("messages") else {
            return Err("messages must be an array".into());
        };
        let mut system = match take("system") {
            None => None,
            Some(Value::String(system)) => Some(system),
            Some(_) => return Err("system must be a text".into()),
        };
        let tools = match take("tools") {
            None => Vec::new(),
            Some(Value::Array(tools)) => tools,
            Some(_) => return Err("tools must be an array".into()),
        };
        let is_nameless = |tool: &Value| prompt::tool_name(tool).is_empty();
        if let Some(index) = tools.iter().position(is_nameless) {
            return Err(format!("tools[{index}] has no name"));
        }
        let settings = take("settings").unwrap_or_else(|| json!({}));
        let thinking = match settings.get("thinking") {
            None => self.thinking,
            Some(Value::Bool(thinking)) => *thinking,
            Some(_) => return Err("settings.thinking must be true or false".into()),
        };
        if system.is_none()
            && let Some(first) = messages.first()
            && first["role"] == "system"
            && let Some(content) = first["content"].as_str()
        {
            system = Some(content.to_string());
            messages.remove(0);
        }
        for (index, message) in messages.iter().enumerate() {
            let role = &message["role"];
            if !["user", "assistant", "tool"]
                .iter()
                .any(|known| role == known)
            {
                return Err(format!(
                    "messages[{index}] needs a role: user, assistant or tool (a system message comes first)"
                ));
            }
            let content = &message["content"];
            let may_be_missing = role == "assistant" && content.is_null();
            if !(content.is_string() || content.is_array() || may_be_missing) {
                return Err(format!("messages[{index}] needs a content"));
            }
        }
        Ok(Transcript {
            system,
            tools,
            thinking,
            messages,
        })
    }
}

/// A path as it is typed where no shell sees it: `~` is the home directory, and `-` a file.
pub fn typed_path(text: &str) -> PathBuf {
    if text == "-" {
        return Path::new(".").join(text);
    }
    match (text.strip_prefix("~/"), std::env::home_dir()) {
        (Some(rest), Some(home)) => home.join(rest),
        _ => PathBuf::from(text),
    }
}
