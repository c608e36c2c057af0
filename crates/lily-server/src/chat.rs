//! `POST /v1/chat/completions`.

use crate::answering::{Answering, Frame, Names, Shape};
use crate::deltas::{Assembler, Delta, message};
use crate::error::ApiError;
use crate::logprobs::{Logprobs, TokenLogprob};
use crate::request::ChatRequest;
use crate::{Shared, body};
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use lily_constraint::Constraint;
use lily_engine::{Finished, GenerationRequest, Guide, TokenEvent};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Instant;

/// Answers a conversation.
pub(crate) async fn complete(State(shared): State<Arc<Shared>>, request: Request) -> Response {
    match begin(shared, request).await {
        Ok((answering, streams, wants_usage)) => answering.respond(streams, wants_usage).await,
        Err(error) => error.into_response(),
    }
}

async fn begin(
    shared: Arc<Shared>,
    request: Request,
) -> Result<(Answering<Chat>, bool, bool), ApiError> {
    let asked = Instant::now();
    let body = body::json(request).await?;
    let request = ChatRequest::read(&body, shared.text.default_sampling())?;
    shared.log_ignored(&request.common.ignored);
    let (streams, wants_usage) = (request.common.streams, request.common.wants_usage);
    let frame = Frame::new(&shared.options.model);
    let seeds = request.common.seeds();
    let number = frame.number.clone();
    let for_prompt = shared.clone();
    // Rendering, cutting into tokens and making grammars take milliseconds, and more for long ones: not on the threads
    // that serve.
    let prepared = tokio::task::spawn_blocking(move || prepare(&for_prompt, request, &number));
    let (generation, choice) = prepared.await.map_err(|_| ApiError::stopping())??;
    let choices = vec![choice; seeds.len()];
    let choices = choices.into_iter().enumerate();
    let choices = choices
        .map(|(index, choice)| choice.numbered(index))
        .collect();
    let answer = shared.submit(vec![(generation, seeds)])?;
    let answering = Answering {
        shared,
        answer,
        choices,
        firsts: vec![0],
        frame,
        asked,
    };
    Ok((answering, streams, wants_usage))
}

/// What the engine is asked for, and what takes its answer apart.
fn prepare(
    shared: &Shared,
    request: ChatRequest,
    number: &str,
) -> Result<(GenerationRequest, Chat), ApiError> {
    let ChatRequest {
        conversation,
        common,
        demand,
        reasoning_budget,
    } = request;
    let text = &shared.text;
    let prompt = text.render(&conversation)?;
    let ids = text.encode(&prompt, shared.limits.context)?;
    let max_tokens = shared.check(&ids, &common)?;
    let tools = &conversation.tools;
    let demanded = demand.is_any(!tools.is_empty());
    let guide = if demanded || reasoning_budget.is_some() {
        let stops = text.stop_ids();
        let mut constraint = Constraint::new(text.tokenizer(), stops, &prompt)
            .map_err(|error| ApiError::of_constraint(&error))?;
        if demanded {
            let grammars = shared.grammars()?;
            constraint = demand
                .hold(constraint, grammars, tools)
                .map_err(|error| ApiError::of_constraint(&error))?;
        }
        if let Some(budget) = reasoning_budget {
            constraint = constraint.with_reasoning_budget(budget);
        }
        Some(Box::new(constraint) as Box<dyn Guide>)
    } else {
        None
    };
    let wants_logprobs = common.sampling.logprobs.is_some();
    let choice = Chat {
        assembler: Assembler::new(number, &prompt, tools),
        logprobs: wants_logprobs.then(|| Logprobs::new(text.tokenizer().clone())),
    };
    shared.log_text("prompt", &prompt);
    let generation = GenerationRequest {
        prompt: ids,
        sampling: common.sampling,
        max_tokens: Some(max_tokens),
        stop: common.stop,
        guide,
        ..GenerationRequest::default()
    };
    Ok((generation, choice))
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
