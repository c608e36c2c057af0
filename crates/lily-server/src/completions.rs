//! `POST /v1/completions`: text that goes on, without a conversation around it.

use crate::answering::{Answering, Frame, Names, Shape};
use crate::deltas::finish_reason;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::logprobs::{Logprobs, TokenLogprob};
use crate::request::Common;
use crate::{Shared, body};
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use lily_engine::{Finished, GenerationRequest, MAXIMUM_ALTERNATIVES, TokenEvent};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Instant;

/// Fields that are known here beside the common ones.
const FIELDS: &[&str] = &["prompt", "echo", "logprobs", "best_of", "suffix"];
/// Fields of conversations, which would change the answer there.
const OF_CHATS: &[&str] = &[
    "messages",
    "tools",
    "tool_choice",
    "response_format",
    "reasoning_effort",
    "reasoning_budget",
    "thinking_budget",
    "chat_template_kwargs",
    "enable_thinking",
    "think",
    "thinking",
    "reasoning",
    "parallel_tool_calls",
];
/// Most prompts of a request.
const MOST_PROMPTS: usize = 64;
/// Most answers of a request to all its prompts.
const MOST_CHOICES: u64 = 64;
/// Most tokens of an answer that names no limit: as OpenAI has it.
const DEFAULT_MAX_TOKENS: usize = 16;

/// Goes on with one or more prompts.
pub(crate) async fn complete(State(shared): State<Arc<Shared>>, request: Request) -> Response {
    match begin(shared, request).await {
        Ok(answering) => answering.respond().await,
        Err(error) => error.into_response(),
    }
}

async fn begin(shared: Arc<Shared>, request: Request) -> Result<Answering<Text>, ApiError> {
    let asked = Instant::now();
    let frame = Frame::new(&shared.options.model);
    let understood = body::understand(&shared, request, |shared, body| {
        let request = Asked::read(body, shared)?;
        let common = &request.common;
        shared.log_ignored(&common.ignored);
        let (streams, wants_usage, each) = (common.streams, common.wants_usage, common.choices);
        let (jobs, choices) = prepare(shared, request)?;
        Ok((streams, wants_usage, each as usize, jobs, choices))
    });
    let (streams, wants_usage, each, jobs, choices) = understood.await?;
    let firsts = (0..choices.len()).step_by(each).collect();
    let answer = shared.submit(jobs)?;
    Ok(Answering {
        shared,
        answer,
        choices,
        firsts,
        frame,
        asked,
        streams,
        wants_usage,
    })
}

/// A completion, understood.
struct Asked {
    prompts: Vec<Prompt>,
    common: Common,
    echo: bool,
}

enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
}

impl Asked {
    fn read(body: &Value, shared: &Shared) -> Result<Self, ApiError> {
        let fields = Fields::of(body)?;
        let mut common = Common::read(&fields, shared.text.default_sampling(), FIELDS)?;
        common.max_tokens.get_or_insert(DEFAULT_MAX_TOKENS);
        if let Some(name) = OF_CHATS.iter().find(|name| fields.value(name).is_some()) {
            return Err(fields.unsupported(name, "ask /v1/chat/completions"));
        }
        let top = fields.count("logprobs", 0)?;
        if top.is_some_and(|top| top > u64::from(MAXIMUM_ALTERNATIVES)) {
            return Err(fields.wrong("logprobs", &format!("at most {MAXIMUM_ALTERNATIVES}")));
        }
        common.sampling.logprobs = top.map(|top| top as u32);
        if fields
            .text("suffix")?
            .is_some_and(|suffix| !suffix.is_empty())
        {
            return Err(fields.unsupported("suffix", "texts only go on"));
        }
        if fields
            .count("best_of", 1)?
            .is_some_and(|best| best != common.choices)
        {
            return Err(fields.unsupported("best_of", "give n"));
        }
        let echo = fields.boolean("echo")?.unwrap_or(false);
        if echo && top.is_some() {
            return Err(fields.unsupported("echo", "leave it out where logprobs are asked for"));
        }
        let prompts = prompts(&fields)?;
        if prompts.len() as u64 * common.choices > MOST_CHOICES {
            let what =
                format!("so few that all prompts together have at most {MOST_CHOICES} answers");
            return Err(fields.wrong("n", &what));
        }
        Ok(Asked {
            prompts,
            common,
            echo,
        })
    }
}

/// A text, tokens, or an array of either.
fn prompts(fields: &Fields<'_>) -> Result<Vec<Prompt>, ApiError> {
    let wrong = || {
        fields.wrong(
            "prompt",
            "a string, an array of tokens, or an array of those",
        )
    };
    let tokens = |values: &[Value]| -> Option<Vec<u32>> {
        let token = |value: &Value| value.as_u64().and_then(|token| u32::try_from(token).ok());
        values.iter().map(token).collect()
    };
    match fields.value("prompt") {
        Some(Value::String(text)) => Ok(vec![Prompt::Text(text.clone())]),
        Some(Value::Array(all)) if all.first().is_some_and(Value::is_u64) => {
            Ok(vec![Prompt::Tokens(tokens(all).ok_or_else(wrong)?)])
        }
        Some(Value::Array(all)) if (1..=MOST_PROMPTS).contains(&all.len()) => all
            .iter()
            .map(|one| match one {
                Value::String(text) => Ok(Prompt::Text(text.clone())),
                Value::Array(one) => tokens(one).map(Prompt::Tokens).ok_or_else(wrong),
                _ => Err(wrong()),
            })
            .collect(),
        Some(Value::Array(all)) if !all.is_empty() => {
            Err(fields.wrong("prompt", &format!("at most {MOST_PROMPTS} prompts")))
        }
        _ => Err(wrong()),
    }
}

type Jobs = Vec<(GenerationRequest, Vec<u64>)>;

fn prepare(shared: &Shared, request: Asked) -> Result<(Jobs, Vec<Text>), ApiError> {
    let Asked {
        prompts,
        common,
        echo,
    } = request;
    let text = &shared.text;
    let (mut jobs, mut choices) = (Vec::new(), Vec::new());
    for prompt in prompts {
        let ids = match &prompt {
            Prompt::Text(prompt) => text.encode(prompt, shared.limits.context)?,
            Prompt::Tokens(ids) => ids.clone(),
        };
        let max_tokens = shared
            .check(&ids, &common)
            .map_err(|error| error.of("prompt"))?;
        let prompt = match prompt {
            Prompt::Text(prompt) => prompt,
            Prompt::Tokens(ids) => text.tokenizer().decode(&ids),
        };
        shared.log_text("prompt", &prompt);
        let wants_logprobs = common.sampling.logprobs.is_some();
        for _ in 0..common.choices {
            choices.push(Text {
                logprobs: wants_logprobs.then(|| Logprobs::new(text.tokenizer().clone())),
                echo: echo.then(|| prompt.clone()),
                offset: 0,
            });
        }
        let generation = GenerationRequest {
            prompt: ids,
            sampling: common.sampling.clone(),
            max_tokens: Some(max_tokens),
            stop: common.stop.clone(),
            ..GenerationRequest::default()
        };
        jobs.push((generation, common.seeds()));
    }
    Ok((jobs, choices))
}

/// A choice of a completion.
struct Text {
    logprobs: Option<Logprobs>,
    /// What comes before it.
    echo: Option<String>,
    /// Characters of text so far.
    offset: usize,
}

/// A piece of an answer.
struct Piece {
    text: String,
    logprobs: Option<(usize, Vec<TokenLogprob>)>,
}

impl Text {
    fn pieces(&mut self, text: &str) -> Vec<Piece> {
        if text.is_empty() {
            return Vec::new();
        }
        let offset = self.offset;
        self.offset += text.chars().count();
        let logprobs = self.logprobs.as_mut();
        vec![Piece {
            text: text.to_string(),
            logprobs: logprobs.map(|logprobs| (offset, logprobs.of(text))),
        }]
    }
}

impl Shape for Text {
    type Piece = Piece;
    const NAMES: Names = Names {
        whole: "text_completion",
        chunk: "text_completion",
        id: "cmpl",
    };

    fn opening(&self) -> Option<Value> {
        let echo = self.echo.as_ref()?;
        Some(json!({"text": echo, "logprobs": null}))
    }

    fn token(&mut self, token: &TokenEvent) -> Vec<Piece> {
        if let Some(logprobs) = &mut self.logprobs {
            logprobs.push(token);
        }
        self.pieces(&token.text)
    }

    fn end(&mut self, finished: &Finished) -> (Vec<Piece>, &'static str) {
        (self.pieces(&finished.text), finish_reason(&finished.reason))
    }

    fn chunk(&self, piece: Option<&Piece>) -> Value {
        let Some(Piece { text, logprobs }) = piece else {
            return json!({"text": "", "logprobs": null});
        };
        let logprobs = logprobs.as_ref();
        json!({"text": text, "logprobs": logprobs.map(|(offset, tokens)| logprobs_json(*offset, tokens))})
    }

    fn whole(&self, pieces: Vec<Piece>) -> Value {
        let mut text = self.echo.clone().unwrap_or_default();
        let mut tokens = Vec::new();
        for piece in pieces {
            text.push_str(&piece.text);
            tokens.extend(piece.logprobs.into_iter().flat_map(|(_, tokens)| tokens));
        }
        let logprobs = self.logprobs.as_ref().map(|_| logprobs_json(0, &tokens));
        json!({"text": text, "logprobs": logprobs})
    }

    fn reasoning_tokens(&self) -> usize {
        0
    }
}

/// As the older API has it: lists side by side, the offsets in characters.
fn logprobs_json(offset: usize, tokens: &[TokenLogprob]) -> Value {
    let texts: Vec<String> = tokens.iter().map(TokenLogprob::text).collect();
    let mut at = offset;
    let mut offsets = Vec::with_capacity(texts.len());
    for text in &texts {
        offsets.push(at);
        at += text.chars().count();
    }
    let logprobs: Vec<f32> = tokens.iter().map(TokenLogprob::logprob).collect();
    let top: Vec<Value> = tokens.iter().map(TokenLogprob::top).collect();
    json!({"tokens": texts, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": offsets})
}
