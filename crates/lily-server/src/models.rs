//! What there is.

use crate::Shared;
use axum::Json;
use axum::extract::State;
use serde_json::{Value, json};
use std::sync::Arc;

/// `GET /health`.
pub(crate) async fn health(State(shared): State<Arc<Shared>>) -> Json<Value> {
    Json(json!({"status": "ok", "requests": shared.worker.requests()}))
}

/// `GET /v1/models`.
pub(crate) async fn list(State(shared): State<Arc<Shared>>) -> Json<Value> {
    Json(json!({"object": "list", "data": [{
        "id": shared.options.model,
        "object": "model",
        "created": shared.started,
        "owned_by": "lily",
        "context_length": shared.context,
    }]}))
}
