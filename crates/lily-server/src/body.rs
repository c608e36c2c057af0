//! A request's body.

use crate::error::ApiError;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{FromRequest, Request};
use axum::http::{StatusCode, header};
use serde_json::Value;
use std::time::Duration;

/// The body as JSON, which has to arrive within `longest`, and which it must be said to be: a page's form cannot say so without asking first.
///
/// # Errors
/// 400 for what is not JSON, 408 where it does not arrive, 413 where it is too long, 415 for another content type.
pub(crate) async fn json(request: Request, longest: Duration) -> Result<Value, ApiError> {
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
    let bytes = tokio::time::timeout(longest, Bytes::from_request(request, &()))
        .await
        .map_err(|_| {
            let message = format!("the body did not arrive within {} s", longest.as_secs_f32());
            ApiError::with_status(StatusCode::REQUEST_TIMEOUT, message)
        })?
        .map_err(|error| match error {
            BytesRejection::FailedToBufferBody(error) => {
                let status = error.status();
                if status == StatusCode::PAYLOAD_TOO_LARGE {
                    return ApiError::with_status(
                        status,
                        "the body is longer than this server takes",
                    );
                }
                ApiError::with_status(status, error.body_text())
            }
            error => ApiError::with_status(StatusCode::BAD_REQUEST, error.body_text()),
        })?;
    serde_json::from_slice(&bytes)
        .map_err(|error| ApiError::invalid(format!("the body is not JSON: {error}")))
}
