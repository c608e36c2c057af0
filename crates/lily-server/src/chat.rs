//! `POST /v1/chat/completions`.

use crate::answering::{Answering, Frame, Names, Shape};
use crate::deltas::{Assembler, Delta, message};
use crate::error::ApiError;
use crate::logprobs::{Logprobs, TokenLogprob};
use crate::request::ChatRequest;
use crate::{Shared, body};
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use lily_constraint::{Constraint, Grammars};
use lily_engine::{Finished, GenerationRequest, Guide, OutputParser, TextModel, TokenEvent};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Instant;

/// Answers a conversation.
pub(crate) async fn complete(State(shared): State<Arc<Shared>>, request: Request) -> Response {
    match begin(shared, request).await {
        Ok(answering) => answering.respond().await,
        Err(error) => error.into_response(),
    }
}

async fn begin(shared: Arc<Shared>, request: Request) -> Result<Answering<Chat>, ApiError> {
    let asked = Instant::now();
    let frame = Frame::new(&shared.options.model);
    let number = frame.number.clone();
    let understood = body::understand(&shared, request, move |shared, body| {
        let request = ChatRequest::read(body, shared.text.default_sampling())?;
        let common = &request.common;
        shared.log_ignored(&common.ignored);
        let (streams, wants_usage, seeds) = (common.streams, common.wants_usage, common.seeds());
        let (generation, choice) = prepare(shared, request, &number)?;
        Ok((streams, wants_usage, seeds, generation, choice))
    });
    let (streams, wants_usage, seeds, generation, choice) = understood.await?;
    let choices = vec![choice; seeds.len()];
    let choices = choices.into_iter().enumerate();
    let choices = choices
        .map(|(index, choice)| choice.numbered(index))
        .collect();
    let answer = shared.submit(vec![(generation, seeds)])?;
    Ok(Answering {
        shared,
        answer,
        choices,
        firsts: vec![0],
        frame,
        asked,
        streams,
        wants_usage,
    })
}

/// What the engine is asked for, and what takes its answer apart.
fn prepare(
    shared: &Shared,
    request: ChatRequest,
    number: &str,
) -> Result<(GenerationRequest, Chat), ApiError> {
    let text = &shared.text;
    let prompt = text.render(&request.conversation)?;
    let ids = text.encode(&prompt, shared.limits.context)?;
    let max_tokens = shared.check(&ids, &request.common)?;
    let guide = guide(text, || shared.grammars(), &prompt, &request)?;
    // Reasoning that answered the last question is dropped with the next one: there the next prompt parts.
    let landmark = end_of_last_question(text, &prompt, &ids);
    let common = request.common;
    let wants_logprobs = common.sampling.logprobs.is_some();
    let choice = Chat {
        assembler: Assembler::new(number, &prompt, &request.conversation.tools),
        logprobs: wants_logprobs.then(|| Logprobs::new(text.tokenizer().clone())),
    };
    shared.log_text("prompt", &prompt);
    let generation = GenerationRequest {
        prompt: ids,
        landmark,
        sampling: common.sampling,
        max_tokens: Some(max_tokens),
        stop: common.stop,
        // What a client is to be stopped at stands in the answer, not in the reasoning before it.
        stops_behind: stops_behind(text, &prompt),
        guide,
        ..GenerationRequest::default()
    };
    Ok((generation, choice))
}

/// How many tokens of a prompt there are up to the end of its last message that a person wrote; results of tools are the
/// user's too, and are not meant. None where the template writes messages in another way.
fn end_of_last_question(text: &TextModel, prompt: &str, ids: &[u32]) -> Option<usize> {
    const BEGIN: &str = "<|im_start|>user\n";
    const END: &str = "<|im_end|>";
    let end = text.tokenizer().id_of(END)?;
    let questions = prompt.rmatch_indices(BEGIN).map(|(at, _)| at);
    let is_question = |at: &usize| !prompt[at + BEGIN.len()..].starts_with("<tool_response>");
    let last = questions.into_iter().find(is_question)?;
    let before = prompt[..last].matches(END).count();
    let ends = ids.iter().enumerate().filter(|(_, id)| **id == end);
    ends.map(|(at, _)| at + 1).nth(before)
}

/// The token behind which the answer begins, where the prompt leads into reasoning.
fn stops_behind(text: &TextModel, prompt: &str) -> Option<u32> {
    let reasons = OutputParser::new(prompt, &[]).is_reasoning();
    reasons
        .then(|| text.tokenizer().id_of("</think>"))
        .flatten()
}

/// What holds the answer to what the request demands of it, if it demands anything.
pub(crate) fn guide<'a>(
    text: &TextModel,
    grammars: impl FnOnce() -> Result<&'a Grammars, ApiError>,
    prompt: &str,
    request: &ChatRequest,
) -> Result<Option<Box<dyn Guide>>, ApiError> {
    let tools = &request.conversation.tools;
    let demands = request.demand.is_any(!tools.is_empty());
    if !demands && request.reasoning_budget.is_none() {
        return Ok(None);
    }
    let refused = |error| ApiError::of_constraint(&error);
    let mut constraint =
        Constraint::new(text.tokenizer(), text.stop_ids(), prompt).map_err(refused)?;
    if demands {
        let held = request.demand.hold(constraint, grammars()?, tools);
        constraint = held.map_err(refused)?;
    }
    if let Some(budget) = request.reasoning_budget {
        constraint = constraint.with_reasoning_budget(budget);
    }
    Ok(Some(Box::new(constraint)))
}

/// A choice of a chat completion.
#[derive(Clone)]
struct Chat {
    assembler: Assembler,
    logprobs: Option<Logprobs>,
}

impl Chat {
    /// The same for the choice of this number, whose calls have ids of their own.
    fn numbered(mut self, index: usize) -> Self {
        if index > 0 {
            self.assembler.rename(index);
        }
        self
    }

    /// Pieces with the log-probabilities of the content's tokens.
    fn pieces(&mut self, deltas: Vec<Delta>) -> Vec<Piece> {
        let mut logprobs = self.logprobs.as_mut();
        let piece = |delta: Delta| Piece {
            logprobs: match (&delta, &mut logprobs) {
                (Delta::Content(text), Some(logprobs)) => Some(logprobs.of(text)),
                _ => None,
            },
            delta,
        };
        deltas.into_iter().map(piece).collect()
    }
}

/// A piece of an answer.
struct Piece {
    delta: Delta,
    logprobs: Option<Vec<TokenLogprob>>,
}

impl Shape for Chat {
    type Piece = Piece;
    const NAMES: Names = Names {
        whole: "chat.completion",
        chunk: "chat.completion.chunk",
        id: "chatcmpl",
    };

    fn opening(&self) -> Option<Value> {
        let delta = json!({"role": "assistant", "content": ""});
        Some(json!({"delta": delta, "logprobs": null}))
    }

    fn token(&mut self, token: &TokenEvent) -> Vec<Piece> {
        if let Some(logprobs) = &mut self.logprobs {
            logprobs.push(token);
        }
        let deltas = self.assembler.token(&token.text);
        self.pieces(deltas)
    }

    fn end(&mut self, finished: &Finished) -> (Vec<Piece>, &'static str) {
        let (deltas, reason) = self.assembler.end(finished);
        (self.pieces(deltas), reason)
    }

    fn chunk(&self, piece: Option<&Piece>) -> Value {
        let Some(Piece { delta, logprobs }) = piece else {
            return json!({"delta": {}, "logprobs": null});
        };
        json!({"delta": delta.to_json(), "logprobs": logprobs.as_deref().map(logprobs_json)})
    }

    fn whole(&self, pieces: Vec<Piece>) -> Value {
        let mut all = Vec::new();
        let deltas = pieces.into_iter().map(|piece| {
            all.extend(piece.logprobs.into_iter().flatten());
            piece.delta
        });
        let message = message(deltas);
        let logprobs = self.logprobs.as_ref().map(|_| logprobs_json(&all));
        json!({"message": message, "logprobs": logprobs})
    }

    fn reasoning_tokens(&self) -> usize {
        self.assembler.reasoning_tokens()
    }
}

fn logprobs_json(tokens: &[TokenLogprob]) -> Value {
    let content: Vec<Value> = tokens.iter().map(TokenLogprob::to_chat_json).collect();
    json!({"content": content, "refusal": null})
}
