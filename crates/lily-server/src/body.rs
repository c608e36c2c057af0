//! A request's body: how it comes in, and how much of that at a time.

use crate::Shared;
use crate::error::ApiError;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{FromRequest, Request};
use axum::http::{StatusCode, header};
use serde_json::Value;
use std::sync::Arc;
use tokio::sync::Semaphore;

/// Bodies that are held at a time, before the engine has their requests.
const MOST_BODIES: usize = 64;
/// Bodies that are understood at a time: parsed, rendered, cut into tokens. It takes processors, and memory many times a
/// body's own.
const MOST_AT_WORK: usize = 4;

/// Keeps what is only being read within bounds.
pub(crate) struct Reading {
    bodies: Semaphore,
    at_work: Arc<Semaphore>,
}

impl Default for Reading {
    fn default() -> Self {
        Reading {
            bodies: Semaphore::new(MOST_BODIES),
            at_work: Arc::new(Semaphore::new(MOST_AT_WORK)),
        }
    }
}

/// Reads a request's JSON and does `work` with it, off the threads that serve: long ones take a while.
///
/// # Errors
/// 400 for what is not JSON, 408 where it does not arrive, 413 where it is too long, 415 for another content type, and
/// what `work` says.
pub(crate) async fn understand<T: Send + 'static>(
    shared: &Arc<Shared>,
    request: Request,
    work: impl FnOnce(&Shared, &Value) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let stopping = |_| ApiError::stopping();
    check_type(&request)?;
    let reading = &shared.reading;
    let _held = reading.bodies.acquire().await.map_err(stopping)?;
    let bytes = arrived(shared, request).await?;
    let permit = reading.at_work.clone().acquire_owned().await;
    let permit = permit.map_err(stopping)?;
    let shared = shared.clone();
    let done = tokio::task::spawn_blocking(move || {
        let _permit = permit;
        let body = serde_json::from_slice(&bytes)
            .map_err(|error| ApiError::invalid(format!("the body is not JSON: {error}")))?;
        drop(bytes);
        work(&shared, &body)
    });
    done.await.map_err(|_| ApiError::stopping())?
}

/// A page's form cannot say that it is JSON without asking first.
fn check_type(request: &Request) -> Result<(), ApiError> {
    let kind = request.headers().get(header::CONTENT_TYPE);
    let kind = kind.and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    let essence = kind.split(';').next().unwrap_or_default().trim();
    if essence.eq_ignore_ascii_case("application/json") {
        return Ok(());
    }
    let message = "the content type must be application/json";
    Err(ApiError::with_status(
        StatusCode::UNSUPPORTED_MEDIA_TYPE,
        message,
    ))
}

async fn arrived(shared: &Shared, request: Request) -> Result<Bytes, ApiError> {
    let longest = shared.options.longest_body;
    tokio::time::timeout(longest, Bytes::from_request(request, &()))
        .await
        .map_err(|_| {
            let seconds = longest.as_secs_f32();
            let message = format!("the body did not arrive within {seconds} s");
            ApiError::with_status(StatusCode::REQUEST_TIMEOUT, message)
        })?
        .map_err(|error| match error {
            BytesRejection::FailedToBufferBody(error)
                if error.status() == StatusCode::PAYLOAD_TOO_LARGE =>
            {
                let most = shared.options.most_bytes;
                let message =
                    format!("the body is longer than {most} bytes, the most there may be");
                ApiError::with_status(error.status(), message)
            }
            error => ApiError::with_status(error.status(), error.body_text()),
        })
}
