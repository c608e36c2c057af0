//! `POST /v1/chat/completions`.

use crate::deltas::{Assembler, Delta, End, message};
use crate::error::ApiError;
use crate::fields::Fields;
use crate::worker::{Answer, Event, Refused};
use crate::{Shared, seconds_since_1970};
use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{FromRequest, Request, State};
use axum::http::{StatusCode, header};
use axum::response::sse::{self, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use lily_engine::{Conversation, GenerationRequest, SamplingParameters};
use serde_json::{Map, Value, json};
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio_stream::wrappers::UnboundedReceiverStream;

/// Fields that are known and mean what they say.
const KNOWN: &[&str] = &[
    "messages",
    "model",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "seed",
    "stop",
    "stream",
    "stream_options",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "n",
    "logprobs",
    "top_logprobs",
    "response_format",
    "reasoning_effort",
    "chat_template_kwargs",
    "functions",
    "function_call",
    "modalities",
    "audio",
    // Of the client's own business.
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
];

/// A request, understood.
struct Asked {
    conversation: Conversation,
    generation: GenerationRequest,
    streams: bool,
    wants_usage: bool,
    /// Fields that nobody here knows.
    ignored: Vec<String>,
}

/// Answers a conversation.
pub(crate) async fn complete(State(shared): State<Arc<Shared>>, request: Request) -> Response {
    match begin(&shared, request).await {
        Ok((asked, answer, assembler, frame)) => {
            if asked.streams {
                stream(answer, assembler, frame, asked.wants_usage).into_response()
            } else {
                whole(answer, assembler, &frame).await.into_response()
            }
        }
        Err(error) => error.into_response(),
    }
}

async fn begin(
    shared: &Arc<Shared>,
    request: Request,
) -> Result<(Asked, Answer, Assembler, Frame), ApiError> {
    let body = body(request).await?;
    let parsed: Value = serde_json::from_slice(&body)
        .map_err(|error| ApiError::invalid(format!("the body is not JSON: {error}")))?;
    let mut asked = asked(&parsed, shared.text.default_sampling())?;
    if !asked.ignored.is_empty() {
        // Quoted, so that what a client calls a field is nothing to the terminal.
        eprintln!(
            "lily: fields that are not known were ignored: {:?}",
            asked.ignored
        );
    }
    let frame = Frame::new(&shared.options.model);
    let text = shared.text.clone();
    let (context, id) = (shared.context, frame.number.clone());
    // Rendering and cutting into tokens take milliseconds for long conversations: not on the threads that serve.
    let prepared = tokio::task::spawn_blocking(move || {
        let prompt = text.render(&asked.conversation)?;
        asked.generation.prompt = text.encode(&prompt, context)?;
        let assembler = Assembler::new(&id, &prompt, &asked.conversation.tools);
        Ok::<_, ApiError>((asked, assembler))
    });
    let (mut asked, assembler) = prepared.await.map_err(|_| ApiError::stopping())??;
    let generation = std::mem::take(&mut asked.generation);
    let mut answer = shared
        .worker
        .submit(generation)
        .map_err(|refused| match refused {
            Refused::Overloaded => ApiError::overloaded(),
            Refused::Stopping => ApiError::stopping(),
        })?;
    // What is refused only now has its status too.
    match answer.next().await {
        Some(Event::Failed(error)) => return Err(error.into()),
        Some(_) => {}
        None => return Err(ApiError::stopping()),
    }
    Ok((asked, answer, assembler, frame))
}

/// The body, which must be said to be JSON: a page's form cannot say so without asking first.
async fn body(request: Request) -> Result<Bytes, ApiError> {
    let kind = request.headers().get(header::CONTENT_TYPE);
    let kind = kind.and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    let essence = kind.split(';').next().unwrap_or_default().trim();
    if !essence.eq_ignore_ascii_case("application/json") {
        let message = "the content type must be application/json";
        return Err(ApiError::with_status(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            message,
        ));
    }
    Bytes::from_request(request, &())
        .await
        .map_err(|error| match error {
            BytesRejection::FailedToBufferBody(error) => {
                ApiError::with_status(error.status(), error.body_text())
            }
            error => ApiError::with_status(StatusCode::BAD_REQUEST, error.body_text()),
        })
}

fn asked(body: &Value, defaults: SamplingParameters) -> Result<Asked, ApiError> {
    let fields = Fields::of(body)?;
    refuse_unsupported(&fields)?;
    let stream_options = fields.object("stream_options", "stream_options.")?;
    let wants_usage =
        stream_options.map_or(Ok(None), |options| options.boolean("include_usage"))?;
    let ignored = fields.names().filter(|name| !KNOWN.contains(name));
    Ok(Asked {
        conversation: conversation(&fields)?,
        generation: GenerationRequest {
            sampling: sampling(&fields, defaults)?,
            max_tokens: most_tokens(&fields)?,
            stop: stops(&fields)?,
            ..GenerationRequest::default()
        },
        streams: fields.boolean("stream")?.unwrap_or(false),
        wants_usage: wants_usage.unwrap_or(false),
        ignored: ignored
            .take(8)
            .map(|name| name.chars().take(40).collect())
            .collect(),
    })
}

/// What would change the answer's meaning and is not there is refused by name.
fn refuse_unsupported(fields: &Fields<'_>) -> Result<(), ApiError> {
    if fields.count("n", 1)?.is_some_and(|n| n > 1) {
        return Err(fields.unsupported("n", "one answer a request"));
    }
    if fields.boolean("logprobs")? == Some(true) || fields.value("top_logprobs").is_some() {
        return Err(fields.unsupported("logprobs", "leave it out"));
    }
    if let Some(format) = fields.object("response_format", "response_format.")?
        && format.text("type")? != Some("text")
    {
        return Err(fields.unsupported("response_format", "answers are text"));
    }
    if fields.boolean("parallel_tool_calls")? == Some(false) {
        return Err(fields.unsupported("parallel_tool_calls", "a model may make several calls"));
    }
    for (name, instead) in [
        ("functions", "give tools"),
        ("function_call", "give tool_choice"),
        ("audio", "answers are text"),
    ] {
        if fields.value(name).is_some() {
            return Err(fields.unsupported(name, instead));
        }
    }
    let is_text = |value: &Value| value.as_str() == Some("text");
    if fields
        .array("modalities")?
        .is_some_and(|all| !all.iter().all(is_text))
    {
        return Err(fields.unsupported("modalities", "answers are text"));
    }
    Ok(())
}

fn conversation(fields: &Fields<'_>) -> Result<Conversation, ApiError> {
    let messages = fields.array("messages")?.unwrap_or_default();
    if messages.is_empty() {
        return Err(fields.wrong("messages", "an array of at least one message"));
    }
    let mut tools = fields.array("tools")?.unwrap_or_default().to_vec();
    match fields.value("tool_choice") {
        None => {}
        Some(choice) if choice == "auto" => {}
        Some(choice) if choice == "none" => tools.clear(),
        Some(_) => return Err(fields.unsupported("tool_choice", "auto or none")),
    }
    let mut variables = match fields.value("chat_template_kwargs") {
        None => Map::new(),
        Some(Value::Object(variables)) => variables.clone(),
        Some(_) => return Err(fields.wrong("chat_template_kwargs", "an object")),
    };
    if fields.text("reasoning_effort")? == Some("none") {
        variables.insert("enable_thinking".into(), Value::Bool(false));
    }
    Ok(Conversation {
        messages: messages.iter().map(as_system).collect(),
        tools,
        variables,
    })
}

/// Templates know the developer's role by its older name.
fn as_system(message: &Value) -> Value {
    let mut message = message.clone();
    if message["role"] == "developer" {
        message["role"] = "system".into();
    }
    message
}

fn sampling(
    fields: &Fields<'_>,
    defaults: SamplingParameters,
) -> Result<SamplingParameters, ApiError> {
    let mut bias = Vec::new();
    if let Some(object) = fields.object("logit_bias", "logit_bias.")? {
        for name in object.names() {
            let token = name
                .parse()
                .map_err(|_| object.wrong(name, "named by a token's id"))?;
            bias.push((token, object.number(name)?.unwrap_or(0.0)));
        }
    }
    let top_k = fields
        .count("top_k", 0)?
        .map(|k| u32::try_from(k).unwrap_or(u32::MAX));
    Ok(SamplingParameters {
        temperature: fields
            .number("temperature")?
            .unwrap_or(defaults.temperature),
        top_k: top_k.map_or(defaults.top_k, |k| (k > 0).then_some(k)),
        top_p: fields.number("top_p")?.unwrap_or(defaults.top_p),
        min_p: fields.number("min_p")?.unwrap_or(defaults.min_p),
        repetition_penalty: fields
            .number("repetition_penalty")?
            .unwrap_or(defaults.repetition_penalty),
        presence_penalty: fields
            .number("presence_penalty")?
            .unwrap_or(defaults.presence_penalty),
        frequency_penalty: fields
            .number("frequency_penalty")?
            .unwrap_or(defaults.frequency_penalty),
        logit_bias: bias,
        seed: seed(fields)?.unwrap_or_else(next_seed),
        logprobs: None,
    })
}

/// Any whole number of 64 bits, with a sign or without.
fn seed(fields: &Fields<'_>) -> Result<Option<u64>, ApiError> {
    let Some(value) = fields.value("seed") else {
        return Ok(None);
    };
    let signed = || value.as_i64().map(i64::cast_unsigned);
    let seed = value.as_u64().or_else(signed);
    seed.map(Some)
        .ok_or_else(|| fields.wrong("seed", "a whole number"))
}

fn most_tokens(fields: &Fields<'_>) -> Result<Option<usize>, ApiError> {
    let newer = fields.count("max_completion_tokens", 1)?;
    let most = match newer {
        Some(most) => Some(most),
        None => fields.count("max_tokens", 1)?,
    };
    Ok(most.map(|most| usize::try_from(most).unwrap_or(usize::MAX)))
}

fn stops(fields: &Fields<'_>) -> Result<Vec<String>, ApiError> {
    let wrong = || {
        fields.wrong(
            "stop",
            "a string, or an array of one to four of them, none of them empty",
        )
    };
    let texts: Vec<&Value> = match fields.value("stop") {
        None => return Ok(Vec::new()),
        Some(Value::Array(all)) if (1..=4).contains(&all.len()) => all.iter().collect(),
        Some(one @ Value::String(_)) => vec![one],
        Some(_) => return Err(wrong()),
    };
    let text = |value: &Value| {
        value
            .as_str()
            .filter(|text| !text.is_empty())
            .map(String::from)
    };
    texts
        .into_iter()
        .map(|value| text(value).ok_or_else(wrong))
        .collect()
}

/// A number that no request had before, nor one of another start: a request without a seed draws anew.
fn next_seed() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let started = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let nanoseconds = started.map_or(0, |since| since.as_nanos() as u64);
    nanoseconds.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed))
}

/// What is the same in all that is said of an answer.
struct Frame {
    number: String,
    model: String,
    created: u64,
}

impl Frame {
    fn new(model: &str) -> Self {
        Frame {
            number: format!("{:016x}", next_seed()),
            model: model.to_string(),
            created: seconds_since_1970(),
        }
    }

    fn with(&self, object: &str, choices: Value) -> Value {
        json!({
            "id": format!("chatcmpl-{}", self.number),
            "object": object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        })
    }

    fn chunk(&self, delta: Value, finish_reason: Option<&str>) -> Value {
        let choice =
            json!({"index": 0, "delta": delta, "logprobs": null, "finish_reason": finish_reason});
        self.with("chat.completion.chunk", json!([choice]))
    }
}

/// Hands over each piece of an answer as it comes; its end is the result.
async fn each_piece(
    mut answer: Answer,
    mut assembler: Assembler,
    mut hand_over: impl FnMut(Delta),
) -> Result<End, ApiError> {
    loop {
        let event = answer.next().await.ok_or_else(ApiError::stopping)?;
        let (deltas, end) = assembler.take(event)?;
        deltas.into_iter().for_each(&mut hand_over);
        if let Some(end) = end {
            return Ok(end);
        }
    }
}

/// The answer in one piece.
async fn whole(
    answer: Answer,
    assembler: Assembler,
    frame: &Frame,
) -> Result<Json<Value>, ApiError> {
    let mut all = Vec::new();
    let end = each_piece(answer, assembler, |delta| all.push(delta)).await?;
    let choice =
        json!({"index": 0, "message": message(all), "logprobs": null, "finish_reason": end.reason});
    let mut body = frame.with("chat.completion", json!([choice]));
    body["usage"] = end.usage_json();
    Ok(Json(body))
}

type Events = UnboundedSender<Result<sse::Event, Infallible>>;

/// The answer as it comes. A task of its own writes it down, so that a reader may be as slow as it likes; when the
/// reader goes, so does the task, and the request with it.
fn stream(
    answer: Answer,
    assembler: Assembler,
    frame: Frame,
    wants_usage: bool,
) -> impl IntoResponse {
    let (events, received) = unbounded_channel();
    tokio::spawn(async move {
        let closed = events.clone();
        tokio::select! {
            () = tell(answer, assembler, &frame, wants_usage, &events) => {}
            () = closed.closed() => {}
        }
    });
    Sse::new(UnboundedReceiverStream::new(received)).keep_alive(KeepAlive::default())
}

async fn tell(
    answer: Answer,
    assembler: Assembler,
    frame: &Frame,
    wants_usage: bool,
    events: &Events,
) {
    let say = |value: &Value| {
        // A reader that has gone ends this task elsewhere.
        let _ = events.send(Ok(sse::Event::default().data(value.to_string())));
    };
    say(&frame.chunk(json!({"role": "assistant", "content": ""}), None));
    let piece = |delta: Delta| say(&frame.chunk(delta.to_json(), None));
    let end = each_piece(answer, assembler, piece).await;
    match end {
        Ok(end) => {
            say(&frame.chunk(json!({}), Some(end.reason)));
            if wants_usage {
                let mut last = frame.with("chat.completion.chunk", json!([]));
                last["usage"] = end.usage_json();
                say(&last);
            }
        }
        Err(error) => say(&error.to_json()),
    }
    let _ = events.send(Ok(sse::Event::default().data("[DONE]")));
}
