//! Lily over HTTP: an API as OpenAI documents it, for the agents and apps of the same machine.
//!
//! A thread of its own owns the engine (`worker.rs`) and takes turns between requests; each request is parsed and
//! answered by its own task. What streams and what does not is put together from the same pieces (`deltas.rs`), so that
//! the two cannot differ.

#![forbid(unsafe_code)]

mod chat;
mod deltas;
mod error;
mod fields;
mod guard;
mod models;
mod worker;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::middleware;
use axum::routing::{get, post};
use error::ApiError;
use lily_engine::{DiskOptions, Engine, TextModel};
use std::future::Future;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::net::TcpListener;
use worker::Worker;

/// How the server runs.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// The model's name, as clients ask for it. A request may name another: there is one.
    pub model: String,
    /// Most requests that are answered or wait; one more is told to come back later.
    pub most_requests: usize,
    /// Most bytes of a request's body.
    pub most_bytes: usize,
    /// Where prefixes of conversations outlast the server, if they do.
    pub cache: Option<DiskOptions>,
}

impl Default for ServerOptions {
    fn default() -> Self {
        ServerOptions {
            model: "lily".into(),
            most_requests: 64,
            most_bytes: 8 << 20,
            cache: None,
        }
    }
}

/// What every request sees.
struct Shared {
    worker: Worker,
    text: Arc<TextModel>,
    context: usize,
    /// Seconds since 1970.
    started: u64,
    options: ServerOptions,
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
    Ok(async move {
        tokio::select! {
            _ = interrupted.recv() => {}
            _ = terminated.recv() => {}
        }
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
    let context = engine.context();
    let shared = Arc::new(Shared {
        worker: Worker::start(engine, options.most_requests, options.cache.as_ref())?,
        text,
        context,
        started: seconds_since_1970(),
        options,
    });
    let ending = shared.clone();
    let shutdown = async move {
        shutdown.await;
        ending.worker.stop();
    };
    let served = axum::serve(listener, router(shared.clone()))
        .with_graceful_shutdown(shutdown)
        .await;
    shared.worker.end();
    served
}

fn router(shared: Arc<Shared>) -> Router {
    let most_bytes = shared.options.most_bytes;
    Router::new()
        .route("/health", get(models::health))
        .route("/v1/models", get(models::list))
        .route("/v1/chat/completions", post(chat::complete))
        .fallback(async || ApiError::not_found("there is nothing at this address"))
        .method_not_allowed_fallback(async || ApiError::method_not_allowed())
        .layer(DefaultBodyLimit::max(most_bytes))
        .layer(middleware::from_fn(guard::refuse_foreign_hosts))
        .with_state(shared)
}

fn seconds_since_1970() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}
