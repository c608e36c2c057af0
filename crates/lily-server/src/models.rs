//! What there is.

use crate::Shared;
use crate::error::ApiError;
use axum::Json;
use axum::extract::{Path, State};
use serde_json::{Value, json};
use std::sync::Arc;

/// `GET /health`.
pub(crate) async fn health(State(shared): State<Arc<Shared>>) -> Json<Value> {
    Json(json!({"status": "ok", "requests": shared.worker.requests()}))
}

/// `GET /v1/models`.
pub(crate) async fn list(State(shared): State<Arc<Shared>>) -> Json<Value> {
    Json(json!({"object": "list", "data": [model(&shared)]}))
}

/// `GET /v1/models/{model}`.
pub(crate) async fn one(
    State(shared): State<Arc<Shared>>,
    Path(name): Path<String>,
) -> Result<Json<Value>, ApiError> {
    if name == shared.options.model {
        return Ok(Json(model(&shared)));
    }
    Err(
        ApiError::not_found("there is no such model: GET /v1/models names the one there is")
            .with_code("model_not_found"),
    )
}

fn model(shared: &Shared) -> Value {
    let context = shared.limits.context;
    json!({
        "id": shared.options.model,
        "object": "model",
        "created": shared.started,
        "owned_by": "lily",
        "context_length": context,
        // The same under another server's name.
        "max_model_len": context,
    })
}
