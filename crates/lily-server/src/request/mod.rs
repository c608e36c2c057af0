//! What clients ask for, read from the body's fields and understood.

mod format;
mod messages;
mod sampling;

pub(crate) use format::Demand;
pub(crate) use sampling::{Common, next_number};

use crate::error::ApiError;
use crate::fields::Fields;
use lily_engine::{Conversation, MAXIMUM_ALTERNATIVES, SamplingParameters};
use serde_json::{Map, Value};

/// Fields of a chat completion that are known and mean what they say, beside the common ones.
const CHAT_FIELDS: &[&str] = &[
    "messages",
    "max_completion_tokens",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "logprobs",
    "top_logprobs",
    "response_format",
    "reasoning_effort",
    "reasoning_budget",
    "thinking_budget",
    "enable_thinking",
    // The names of other servers for the same.
    "think",
    "thinking",
    "reasoning",
    "chat_template_kwargs",
    "modalities",
];

/// Reasoning tokens of each effort that has a bound; any other has none.
const EFFORTS: [(&str, usize); 2] = [("low", 1_024), ("medium", 8_192)];

/// A chat completion, understood.
#[derive(Debug)]
pub(crate) struct ChatRequest {
    pub conversation: Conversation,
    pub common: Common,
    /// What the answer is held to.
    pub demand: Demand,
    /// Most tokens of reasoning.
    pub reasoning_budget: Option<usize>,
}

impl ChatRequest {
    /// Reads a body. `defaults` stands where it says nothing.
    ///
    /// # Errors
    /// 400 for what is not sound or not supported, naming the field.
    pub fn read(body: &Value, defaults: SamplingParameters) -> Result<Self, ApiError> {
        let fields = Fields::of(body)?;
        refuse_other_media(&fields)?;
        for (name, instead) in [
            ("functions", "give tools"),
            ("function_call", "give tool_choice"),
        ] {
            if fields.value(name).is_some() {
                return Err(fields.unsupported(name, instead));
            }
        }
        let mut common = Common::read(&fields, defaults, CHAT_FIELDS)?;
        if let Some(most) = fields.count("max_completion_tokens", 1)? {
            common.max_tokens = Some(usize::try_from(most).unwrap_or(usize::MAX));
        }
        common.sampling.logprobs = chat_logprobs(&fields)?;
        let (conversation, reasoning_budget) = conversation(&fields)?;
        let (demand, tools) = Demand::read(&fields, messages::tools(&fields)?)?;
        Ok(ChatRequest {
            conversation: Conversation {
                tools,
                ..conversation
            },
            common,
            demand,
            reasoning_budget,
        })
    }
}

/// The conversation of a body, without its tools, and how long its reasoning may be.
fn conversation(fields: &Fields<'_>) -> Result<(Conversation, Option<usize>), ApiError> {
    let (variables, budget) = reasoning(fields)?;
    Ok((
        Conversation {
            messages: messages::messages(fields)?,
            tools: Vec::new(),
            variables,
        },
        budget,
    ))
}

/// The conversation of a request that is only to be rendered.
///
/// # Errors
/// As [`ChatRequest::read`].
pub(crate) fn conversation_to_render(fields: &Fields<'_>) -> Result<Conversation, ApiError> {
    let (conversation, _) = conversation(fields)?;
    let tools = messages::tools(fields)?;
    Ok(Conversation {
        tools,
        ..conversation
    })
}

/// The template's variables, and most tokens of reasoning.
fn reasoning(fields: &Fields<'_>) -> Result<(Map<String, Value>, Option<usize>), ApiError> {
    let mut variables = match fields.value("chat_template_kwargs") {
        None => Map::new(),
        Some(Value::Object(variables)) => variables.clone(),
        Some(_) => return Err(fields.wrong("chat_template_kwargs", "an object")),
    };
    for name in ["think", "enable_thinking"] {
        if let Some(thinks) = fields.boolean(name)? {
            variables.insert("enable_thinking".into(), Value::Bool(thinks));
        }
    }
    let mut budget = None;
    if let Some(thinking) = fields.object("thinking", "thinking.")? {
        match thinking.text("type")? {
            None | Some("enabled" | "adaptive") => {}
            Some("disabled") => {
                variables.insert("enable_thinking".into(), Value::Bool(false));
            }
            Some(_) => return Err(thinking.wrong("type", "enabled or disabled")),
        }
        budget = tokens(&thinking, "budget_tokens")?.or(budget);
    }
    let mut effort = fields.text("reasoning_effort")?;
    if let Some(reasoning) = fields.object("reasoning", "reasoning.")? {
        effort = effort.or(reasoning.text("effort")?);
        budget = tokens(&reasoning, "max_tokens")?.or(budget);
        if reasoning.boolean("enabled")? == Some(false) {
            variables.insert("enable_thinking".into(), Value::Bool(false));
        }
    }
    match effort {
        None | Some("high" | "xhigh" | "max") => {}
        Some("none" | "minimal") => {
            variables.insert("enable_thinking".into(), Value::Bool(false));
        }
        Some(effort) => {
            let known = EFFORTS.iter().find(|(name, _)| *name == effort);
            let known = known.ok_or_else(|| {
                let efforts = "one of none, minimal, low, medium, high, xhigh, max";
                fields.wrong("reasoning_effort", efforts)
            })?;
            budget = budget.or(Some(known.1));
        }
    }
    for name in ["thinking_budget", "reasoning_budget"] {
        budget = tokens(fields, name)?.or(budget);
    }
    Ok((variables, budget))
}

fn tokens(fields: &Fields<'_>, name: &str) -> Result<Option<usize>, ApiError> {
    let count = fields.count(name, 0)?;
    Ok(count.map(|count| usize::try_from(count).unwrap_or(usize::MAX)))
}

fn chat_logprobs(fields: &Fields<'_>) -> Result<Option<u32>, ApiError> {
    let wanted = fields.boolean("logprobs")?.unwrap_or(false);
    let most = u64::from(MAXIMUM_ALTERNATIVES);
    let Some(top) = fields.count("top_logprobs", 0)? else {
        return Ok(wanted.then_some(0));
    };
    if !wanted {
        return Err(fields.wrong("top_logprobs", "left out, unless logprobs is true"));
    }
    if top > most {
        return Err(fields.wrong("top_logprobs", &format!("at most {most}")));
    }
    Ok(Some(top as u32))
}

fn refuse_other_media(fields: &Fields<'_>) -> Result<(), ApiError> {
    if fields.value("audio").is_some() {
        return Err(fields.unsupported("audio", "answers are text"));
    }
    let is_text = |value: &Value| value.as_str() == Some("text");
    match fields.array("modalities")? {
        Some(all) if !all.iter().all(is_text) => {
            Err(fields.unsupported("modalities", "answers are text"))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests;
