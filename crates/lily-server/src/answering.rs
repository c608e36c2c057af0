//! Answers on their way to the client: in pieces, or all at once. Both are made of the same pieces, so that the two cannot
//! differ.

use crate::error::ApiError;
use crate::request::next_number;
use crate::worker::{Answer, Event, Reading};
use crate::{Shared, seconds_since_1970};
use axum::Json;
use axum::http::HeaderName;
use axum::response::sse::{self, Sse};
use axum::response::{IntoResponse, Response};
use lily_engine::{Finished, TokenEvent};
use serde_json::{Value, json};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio_stream::wrappers::UnboundedReceiverStream;

/// Longest that a stream is silent while its prompt is read or waits: then it says how far that is. Clients give up on
/// what says nothing, and comments of the protocol do not count for some.
const LONGEST_SILENCE: Duration = Duration::from_secs(1);

/// What one kind of completion makes of the events of one of its choices.
pub(crate) trait Shape: Send + 'static {
    /// A piece of a choice.
    type Piece: Send;
    /// What a whole answer, and a chunk of a stream, call themselves, and what their ids begin with.
    const NAMES: Names;

    /// What a choice begins with in a stream, if anything.
    fn opening(&self) -> Option<Value>;
    /// The pieces that a token makes certain.
    fn token(&mut self, token: &TokenEvent) -> Vec<Self::Piece>;
    /// The pieces that the end makes certain, and how it is called.
    fn end(&mut self, finished: &Finished) -> (Vec<Self::Piece>, &'static str);
    /// A piece as a choice of a chunk has it; nothing where `None`: at the end, or to say that there is life.
    fn chunk(&self, piece: Option<&Self::Piece>) -> Value;
    /// All pieces as a choice of the answer has them.
    fn whole(&self, pieces: Vec<Self::Piece>) -> Value;
    /// Tokens of the answer that belonged to the reasoning.
    fn reasoning_tokens(&self) -> usize;
}

/// What answers call themselves.
pub(crate) struct Names {
    pub whole: &'static str,
    pub chunk: &'static str,
    pub id: &'static str,
}

/// A request that is being answered.
pub(crate) struct Answering<S> {
    pub shared: Arc<Shared>,
    pub answer: Answer,
    pub choices: Vec<S>,
    /// The choices that are the first to their prompts.
    pub firsts: Vec<usize>,
    pub frame: Frame,
    pub asked: Instant,
    /// Whether it comes in pieces, and whether its usage comes with them.
    pub streams: bool,
    pub wants_usage: bool,
}

/// What is the same in all that is said of an answer.
pub(crate) struct Frame {
    /// A number of its own, as text.
    pub number: String,
    model: String,
    created: u64,
}

impl Frame {
    pub fn new(model: &str) -> Self {
        Frame {
            number: format!("{:016x}", next_number()),
            model: model.to_string(),
            created: seconds_since_1970(),
        }
    }

    fn with(&self, id: &str, object: &str, choices: Value) -> Value {
        json!({
            "id": format!("{id}-{}", self.number),
            "object": object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        })
    }
}

/// What is told of an answer as it comes.
enum Told<P> {
    Piece(usize, P),
    End(usize, &'static str),
    /// Nothing for a while of this choice, which has not ended.
    Silence(usize, Reading),
}

/// What all choices took.
#[derive(Default)]
struct Total {
    prompt: usize,
    cached: usize,
    completion: usize,
    reasoning: usize,
}

impl Total {
    /// As OpenAI's usage object.
    fn to_json(&self) -> Value {
        json!({
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning},
        })
    }
}

impl<S: Shape> Answering<S> {
    /// The answer, in one piece or as it comes.
    pub async fn respond(self) -> Response {
        if self.streams {
            self.stream().into_response()
        } else {
            self.whole().await.into_response()
        }
    }

    /// Hands over each piece as it comes, until all choices have ended; their usage is the result.
    async fn each(&mut self, mut tell: impl FnMut(&S, Told<S::Piece>)) -> Result<Total, ApiError> {
        let mut total = Total::default();
        let mut reading = Reading::default();
        let mut open = vec![true; self.choices.len()];
        let mut last_tokens: Vec<Option<Instant>> = vec![None; self.choices.len()];
        while let Some(first_open) = open.iter().position(|open| *open) {
            let event = tokio::time::timeout(LONGEST_SILENCE, self.answer.next()).await;
            let Ok(event) = event else {
                tell(
                    &self.choices[first_open],
                    Told::Silence(first_open, reading),
                );
                continue;
            };
            let (index, event) = event.ok_or_else(ApiError::stopping)?;
            let choice = &mut self.choices[index];
            match event {
                Event::Prefilled(now) => {
                    // A chunk may take as long as a silence may last.
                    reading = now;
                    tell(choice, Told::Silence(index, reading));
                }
                Event::Token(token) => {
                    let now = Instant::now();
                    match last_tokens[index].replace(now) {
                        None => self.shared.metrics.first_token(now - self.asked),
                        Some(last) => self.shared.metrics.next_token(now - last),
                    }
                    for piece in choice.token(&token) {
                        tell(choice, Told::Piece(index, piece));
                    }
                }
                Event::Finished(finished, usage) => {
                    let (pieces, reason) = choice.end(&finished);
                    for piece in pieces {
                        tell(choice, Told::Piece(index, piece));
                    }
                    tell(choice, Told::End(index, reason));
                    open[index] = false;
                    total.completion += usage.completion_tokens;
                    total.reasoning += choice.reasoning_tokens();
                    let is_first = self.firsts.contains(&index);
                    if is_first {
                        total.prompt += usage.prompt_tokens;
                        total.cached += usage.timings.cached_tokens;
                    }
                    self.shared.metrics.answered(reason, &usage, is_first);
                }
                Event::Failed(error) => return Err(error.into()),
            }
        }
        Ok(total)
    }

    async fn whole(mut self) -> Result<Json<Value>, ApiError> {
        let mut pieces: Vec<Vec<S::Piece>> = Vec::new();
        pieces.resize_with(self.choices.len(), Vec::new);
        let mut reasons = vec![""; self.choices.len()];
        let told = self.each(|_, told| match told {
            Told::Piece(index, piece) => pieces[index].push(piece),
            Told::End(index, reason) => reasons[index] = reason,
            Told::Silence(..) => {}
        });
        let total = told.await?;
        let choices: Vec<Value> = pieces
            .into_iter()
            .zip(&self.choices)
            .enumerate()
            .map(|(index, (pieces, choice))| {
                finished(choice.whole(pieces), index, Some(reasons[index]))
            })
            .collect();
        let mut body = self.frame.with(S::NAMES.id, S::NAMES.whole, choices.into());
        body["usage"] = total.to_json();
        Ok(Json(body))
    }

    /// A task of its own writes the stream down, so that a reader may be as slow as it likes; when the reader goes, so
    /// does the task, and the request with it.
    fn stream(self) -> impl IntoResponse {
        let (events, received) = unbounded_channel();
        let gone = events.clone();
        tokio::spawn(async move {
            tokio::select! {
                () = self.write(&events) => {}
                () = gone.closed() => {}
            }
        });
        // Proxies that hold back what they pass on are asked not to.
        let headers = [(HeaderName::from_static("x-accel-buffering"), "no")];
        (headers, Sse::new(UnboundedReceiverStream::new(received)))
    }

    async fn write(mut self, events: &UnboundedSender<Result<sse::Event, Infallible>>) {
        let wants_usage = self.wants_usage;
        let say = |value: &Value| {
            // A reader that has gone ends this task elsewhere.
            let _ = events.send(Ok(sse::Event::default().data(value.to_string())));
        };
        let frame = std::mem::replace(&mut self.frame, Frame::new(""));
        let chunk = |choices: Value| {
            let mut chunk = frame.with(S::NAMES.id, S::NAMES.chunk, choices);
            if wants_usage {
                chunk["usage"] = Value::Null;
            }
            chunk
        };
        for (index, choice) in self.choices.iter().enumerate() {
            if let Some(opening) = choice.opening() {
                say(&chunk(json!([finished(opening, index, None)])));
            }
        }
        let mut last = Instant::now();
        let told = self.each(|choice, told| {
            let value = match told {
                Told::Piece(index, piece) => {
                    chunk(json!([finished(choice.chunk(Some(&piece)), index, None)]))
                }
                Told::End(index, reason) => {
                    chunk(json!([finished(choice.chunk(None), index, Some(reason))]))
                }
                Told::Silence(..) if last.elapsed() < LONGEST_SILENCE => return,
                Told::Silence(
                    index,
                    Reading {
                        total,
                        cached,
                        done,
                    },
                ) => {
                    let mut value = chunk(json!([finished(choice.chunk(None), index, None)]));
                    value["prompt_progress"] =
                        json!({"total": total, "cached": cached, "processed": done});
                    value
                }
            };
            last = Instant::now();
            say(&value);
        });
        match told.await {
            Ok(total) if wants_usage => {
                let mut last = chunk(json!([]));
                last["usage"] = total.to_json();
                say(&last);
            }
            Ok(_) => {}
            Err(error) => say(&error.to_json()),
        }
        let _ = events.send(Ok(sse::Event::default().data("[DONE]")));
    }
}

/// A choice with what every choice has.
fn finished(choice: Value, index: usize, reason: Option<&str>) -> Value {
    let mut all = json!({"index": index});
    if let (Some(all), Value::Object(choice)) = (all.as_object_mut(), choice) {
        all.extend(choice);
    }
    all["finish_reason"] = reason.into();
    all
}
