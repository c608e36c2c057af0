//! From arguments and messages to the text of a prompt.

use crate::args::RunArguments;
use crate::failure::Failure;
use crate::model::{named, read_text};
use lily_engine::{Conversation, TemplateError, TextModel};
use serde_json::{Value, json};
use std::io::IsTerminal;
use std::path::Path;

/// A prompt, and what the answer is read by.
pub struct Prompt {
    /// The whole text, up to where the answer begins.
    pub text: String,
    /// The tools that the model was told of.
    pub tools: Vec<Value>,
    /// Whether the answer is plain text, without reasoning or tool calls.
    pub raw: bool,
}

/// Builds the prompt, reading standard input if the arguments say so.
pub fn build(arguments: &RunArguments, text: &TextModel) -> Result<Prompt, Failure> {
    if arguments.raw {
        let text = given_or_read(arguments)?;
        let text = refuse_empty(text)?;
        return Ok(Prompt {
            text,
            tools: Vec::new(),
            raw: true,
        });
    }
    let tools = match &arguments.tools {
        Some(path) => tools(path)?,
        None => Vec::new(),
    };
    let mut conversation = Conversation {
        messages: messages(arguments)?,
        tools,
        ..Conversation::default()
    };
    if arguments.no_thinking {
        without_reasoning(&mut conversation);
    }
    render(text, conversation)
}

/// The prompt of a conversation.
pub fn render(text: &TextModel, conversation: Conversation) -> Result<Prompt, Failure> {
    let rendered = text.render(&conversation).map_err(|error| match error {
        TemplateError::Missing => {
            Failure::usage_of(&error).help("lily run --raw goes on with plain text without one")
        }
        TemplateError::Refused(_) => {
            Failure::request("the model's chat template refuses these messages").because(&error)
        }
        TemplateError::Message { .. } => Failure::usage_of(&error),
        _ => Failure::request_of(&error),
    })?;
    Ok(Prompt {
        text: rendered,
        tools: conversation.tools,
        raw: false,
    })
}

/// Tells the template that the answer is to come at once.
pub fn without_reasoning(conversation: &mut Conversation) {
    let variables = &mut conversation.variables;
    variables.insert("enable_thinking".into(), Value::Bool(false));
}

/// The tools that a file declares.
pub fn tools(path: &Path) -> Result<Vec<Value>, Failure> {
    objects(path, "the tools", "tools")
}

/// What a tool is called; empty where its declaration does not say.
pub fn tool_name(tool: &Value) -> &str {
    let declared = tool.get("function").unwrap_or(tool);
    declared["name"].as_str().unwrap_or_default()
}

fn messages(arguments: &RunArguments) -> Result<Vec<Value>, Failure> {
    if let Some(path) = &arguments.messages {
        return objects(path, "the conversation", "messages");
    }
    let mut prompt = given_or_read(arguments)?;
    if arguments.prompt.is_empty() || is_standard_input(&arguments.prompt) {
        // What `echo` and editors put at the end is no part of the question.
        let trimmed = prompt.trim_end_matches(['\r', '\n']).len();
        prompt.truncate(trimmed);
    }
    let prompt = refuse_empty(prompt)?;
    let mut messages = Vec::new();
    if let Some(system) = &arguments.system {
        messages.push(json!({"role": "system", "content": system}));
    }
    messages.push(json!({"role": "user", "content": prompt}));
    Ok(messages)
}

fn is_standard_input(prompt: &[String]) -> bool {
    matches!(prompt, [only] if only == "-")
}

fn given_or_read(arguments: &RunArguments) -> Result<String, Failure> {
    if !arguments.prompt.is_empty() && !is_standard_input(&arguments.prompt) {
        return Ok(arguments.prompt.join(" "));
    }
    if std::io::stdin().is_terminal() && !arguments.output.quiet {
        eprintln!("Type the prompt; Ctrl-D on a line of its own ends it.");
    }
    read_text(Path::new("-"), "the prompt")
}

fn refuse_empty(prompt: String) -> Result<String, Failure> {
    if prompt.is_empty() {
        return Err(Failure::usage("the prompt is empty")
            .help("give it as an argument or in standard input, e.g. lily run \"Hello!\""));
    }
    Ok(prompt)
}

/// A file with a JSON array of objects.
fn objects(path: &Path, what: &str, plural: &str) -> Result<Vec<Value>, Failure> {
    let text = read_text(path, what)?;
    let name = named(path, what);
    let value: Value = serde_json::from_str(&text)
        .map_err(|error| Failure::usage(format!("{name} is not JSON")).because(&error))?;
    match value {
        Value::Array(items) if items.iter().all(Value::is_object) => Ok(items),
        _ => Err(
            Failure::usage(format!("{name} is not a JSON array of objects")).help(format!(
                "a JSON array of {plural} in OpenAI's form is needed"
            )),
        ),
    }
}
