//! What there is.

use crate::Shared;
use axum::Json;
use axum::extract::State;
use serde_json::{Value, json};
use std::sync::Arc;

/// `GET /health`.
pub(crate) async fn health(State(shared): State<Arc<Shared>>) -> Json<Value> {
    let prefixes = shared.worker.prefixes();
    Json(json!({
        "status": "ok",
        "requests": shared.worker.requests(),
        "prefixes": {
            "parked": prefixes.parked,
            "parked_bytes": prefixes.parked_bytes,
            "snapshots": prefixes.snapshots,
            "snapshot_bytes": prefixes.snapshot_bytes,
            "requests": prefixes.requests,
            "hits": prefixes.hits,
            "prompt_tokens": prefixes.prompt_tokens,
            "cached_tokens": prefixes.cached_tokens,
            "evictions": prefixes.evictions,
            "disk": {
                "files": prefixes.disk.files,
                "bytes": prefixes.disk.bytes,
                "reads": prefixes.disk.reads,
                "read_bytes": prefixes.disk.read_bytes,
                "writes": prefixes.disk.writes,
                "written_bytes": prefixes.disk.written_bytes,
                "removed": prefixes.disk.removed,
                "refused": prefixes.disk.refused,
            },
        },
    }))
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
