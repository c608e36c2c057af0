//! Lily over HTTP: an API as OpenAI documents it, for the agents and apps of the same machine.
//!
//! A thread of its own owns the engine (`worker.rs`) and takes turns between requests; each request is parsed and
//! answered by its own task. What streams and what does not is put together from the same pieces (`deltas.rs`), so that
//! the two cannot differ.

#![forbid(unsafe_code)]

mod answering;
mod body;
mod chat;
mod completions;
mod deltas;
mod error;
mod fields;
pub mod fuzzing;
mod guard;
mod listener;
mod log;
mod logprobs;
mod metrics;
mod models;
mod page;
mod prefix_metrics;
mod request;
mod tokens;
mod turns;
mod worker;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::middleware::from_fn_with_state;
use axum::routing::{get, post};
use body::Reading;
use error::ApiError;
use lily_constraint::Grammars;
use lily_engine::{DiskOptions, Engine, EngineError, GenerationRequest, RequestLimits, TextModel};
use metrics::Metrics;
use request::Common;
use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::net::TcpListener;
use worker::{Answer, Refused, Worker};

/// Most tokens of an answer that names no limit itself: what the makers of the model recommend to leave room for, and no
/// more memory than that.
const DEFAULT_MAX_TOKENS: usize = 32_768;

/// How the server runs.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// The model's name, as clients ask for it. A request may name another: there is one.
    pub model: String,
    /// Most requests that are answered or wait; one more is told to come back later.
    pub most_requests: usize,
    /// Most bytes of a request's body.
    pub most_bytes: usize,
    /// Longest that a request's body may take to arrive.
    pub longest_body: Duration,
    /// Where prefixes of conversations outlast the server, if they do.
    pub cache: Option<DiskOptions>,
    /// Keys of which a request has to bring one; none has to, where there are none.
    pub api_keys: Vec<String>,
    /// Names of this machine, beside its addresses and `localhost`.
    pub hosts: Vec<String>,
    /// Sites whose pages may ask, such as `https://app.example`; `*` is any.
    pub origins: Vec<String>,
    /// Whether each request is told of on standard error: its route, status and time.
    pub logs_requests: bool,
    /// Whether prompts are written to standard error.
    pub logs_text: bool,
}

impl Default for ServerOptions {
    fn default() -> Self {
        ServerOptions {
            model: "lily".into(),
            most_requests: 64,
            most_bytes: 8 << 20,
            longest_body: Duration::from_secs(60),
            cache: None,
            api_keys: Vec::new(),
            hosts: Vec::new(),
            origins: Vec::new(),
            logs_requests: false,
            logs_text: false,
        }
    }
}

/// What every request sees.
struct Shared {
    worker: Worker,
    text: Arc<TextModel>,
    limits: RequestLimits,
    /// Made when they are first asked for: a large vocabulary takes a while.
    grammars: OnceLock<Result<Grammars, ApiError>>,
    metrics: Metrics,
    /// What keeps memory and processors from requests that are only being read.
    reading: Reading,
    /// Seconds since 1970.
    started: u64,
    options: ServerOptions,
}

impl Shared {
    /// What makes grammars for the model's vocabulary.
    fn grammars(&self) -> Result<&Grammars, ApiError> {
        let made = self.grammars.get_or_init(|| {
            let tokenizer = self.text.tokenizer().clone();
            Grammars::new(tokenizer, self.text.stop_ids())
                .map_err(|error| ApiError::of_constraint(&error))
        });
        made.as_ref().map_err(Clone::clone)
    }

    /// Refuses what could never be answered; most tokens of the answer.
    fn check(&self, prompt: &[u32], common: &Common) -> Result<usize, ApiError> {
        self.limits.check(prompt)?;
        common
            .sampling
            .validate(self.limits.vocabulary as u32)
            .map_err(EngineError::from)?;
        // No later time has more memory than there ever is.
        let most = self.limits.most_tokens(prompt.len());
        let most = most.map_err(|error| {
            ApiError::invalid(error.to_string())
                .of("messages")
                .with_code("out_of_memory")
        })?;
        Ok(common.max_tokens.unwrap_or(DEFAULT_MAX_TOKENS).min(most))
    }

    fn submit(&self, jobs: Vec<(GenerationRequest, Vec<u64>)>) -> Result<Answer, ApiError> {
        self.worker.submit(jobs).map_err(|refused| match refused {
            Refused::Overloaded => ApiError::overloaded(),
            Refused::Stopping => ApiError::stopping(),
        })
    }

    /// Says which of a client's fields mean nothing here. They are quoted, so that what a client calls a field is nothing
    /// to the terminal.
    fn log_ignored(&self, fields: &[String]) {
        if !fields.is_empty() {
            log::say(&format!(
                "fields that are not known were ignored: {fields:?}"
            ));
        }
    }

    fn log_text(&self, what: &str, text: &str) {
        if self.options.logs_text {
            log::say(&format!("{what} {text:?}"));
        }
    }
}

/// Answers requests at `listener` until the process is asked to end (Ctrl-C, SIGTERM).
///
/// # Errors
/// Where the listener fails, the system has no threads, or the cache's directory cannot be made or read.
pub fn run(
    listener: std::net::TcpListener,
    engine: Engine,
    options: ServerOptions,
) -> std::io::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    listener.set_nonblocking(true)?;
    runtime.block_on(async {
        let ended = asked_to_end()?;
        serve(TcpListener::from_std(listener)?, engine, options, ended).await
    })
}

/// Done when the process is asked to end.
fn asked_to_end() -> std::io::Result<impl Future<Output = ()> + Send + 'static> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut interrupted = signal(SignalKind::interrupt())?;
    let mut terminated = signal(SignalKind::terminate())?;
    let mut asked = async move || {
        tokio::select! {
            _ = interrupted.recv() => 130,
            _ = terminated.recv() => 143,
        }
    };
    Ok(async move {
        asked().await;
        // Whoever asks twice does not wait for what is being ended.
        tokio::spawn(async move { std::process::exit(asked().await) });
    })
}

/// Answers requests at `listener` with `engine`, until `shutdown` is done: what is being answered then is cut short and
/// ended as answers end.
///
/// # Errors
/// As [`run`].
pub async fn serve(
    listener: TcpListener,
    engine: Engine,
    options: ServerOptions,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> std::io::Result<()> {
    let text = engine.text().clone();
    let limits = engine.limits();
    let shared = Arc::new(Shared {
        worker: Worker::start(engine, options.most_requests, options.cache.as_ref())?,
        text,
        limits,
        grammars: OnceLock::new(),
        metrics: Metrics::new(),
        reading: Reading::default(),
        started: seconds_since_1970(),
        options,
    });
    let ending = shared.clone();
    let ended = shared.worker.ended();
    let failed = Arc::new(AtomicBool::new(false));
    let fails = failed.clone();
    let shutdown = async move {
        tokio::select! {
            () = shutdown => {}
            // Nothing would be answered any more.
            () = ended => fails.store(true, Ordering::Release),
        }
        ending.worker.stop();
    };
    let served = listener::serve(listener, router(shared.clone()), shutdown).await;
    shared.worker.end();
    if failed.load(Ordering::Acquire) {
        return Err(std::io::Error::other("the engine's thread has failed"));
    }
    served
}

fn router(shared: Arc<Shared>) -> Router {
    // Behind the key, if there is one.
    let api = Router::new()
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*model}", get(models::one))
        .route("/v1/chat/completions", post(chat::complete))
        .route("/v1/completions", post(completions::complete))
        .route("/tokenize", post(tokens::tokenize))
        .route("/detokenize", post(tokens::detokenize))
        .route("/apply-template", post(tokens::apply_template))
        .route("/metrics", get(metrics::metrics))
        .route_layer(from_fn_with_state(shared.clone(), guard::require_key));
    Router::new()
        .route("/health", get(models::health))
        .merge(page::routes())
        .merge(api)
        .fallback(async || ApiError::not_found("there is nothing at this address"))
        .method_not_allowed_fallback(async || ApiError::method_not_allowed())
        .layer(DefaultBodyLimit::max(shared.options.most_bytes))
        .layer(from_fn_with_state(shared.clone(), metrics::count))
        .layer(guard::cors(&shared.options.origins))
        .layer(from_fn_with_state(
            shared.clone(),
            guard::refuse_foreign_hosts,
        ))
        .with_state(shared)
}

fn seconds_since_1970() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}
