//! Text and tokens, for clients that count: `/tokenize`, `/detokenize`, `/apply-template`.

use crate::error::ApiError;
use crate::fields::Fields;
use crate::request::conversation_to_render;
use crate::{Shared, body};
use axum::Json;
use axum::extract::{Request, State};
use serde_json::{Value, json};
use std::sync::Arc;

/// `POST /tokenize`: the tokens of `content` (or `prompt`), or of a conversation.
pub(crate) async fn tokenize(
    State(shared): State<Arc<Shared>>,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    body::understand(&shared, request, |shared, body| {
        let fields = Fields::of(body)?;
        let text = match (fields.text("content")?, fields.text("prompt")?) {
            (Some(text), _) | (None, Some(text)) => text.to_string(),
            (None, None) if fields.value("messages").is_some() => rendered(shared, &fields)?,
            (None, None) => {
                return Err(fields.wrong("content", "a string, or there must be messages"));
            }
        };
        let ids = shared.text.encode(&text, usize::MAX)?;
        let count = ids.len();
        Ok(Json(json!({
            "tokens": ids,
            "count": count,
            "max_model_len": shared.limits.context,
        })))
    })
    .await
}

/// `POST /detokenize`: the text of `tokens`.
pub(crate) async fn detokenize(
    State(shared): State<Arc<Shared>>,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    body::understand(&shared, request, |shared, body| {
        let fields = Fields::of(body)?;
        let wrong = || fields.wrong("tokens", "an array of the vocabulary's tokens");
        let tokens = fields.array("tokens")?.ok_or_else(wrong)?;
        let vocabulary = shared.limits.vocabulary as u64;
        let id = |value: &Value| {
            let id = value.as_u64().filter(|id| *id < vocabulary);
            id.map(|id| id as u32).ok_or_else(wrong)
        };
        let ids = tokens.iter().map(id).collect::<Result<Vec<u32>, _>>()?;
        let text = shared.text.tokenizer().decode(&ids);
        Ok(Json(json!({"content": text, "prompt": text})))
    })
    .await
}

/// `POST /apply-template`: the prompt that a conversation makes.
pub(crate) async fn apply_template(
    State(shared): State<Arc<Shared>>,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    body::understand(&shared, request, |shared, body| {
        let fields = Fields::of(body)?;
        Ok(Json(json!({"prompt": rendered(shared, &fields)?})))
    })
    .await
}

fn rendered(shared: &Shared, fields: &Fields<'_>) -> Result<String, ApiError> {
    let conversation = conversation_to_render(fields)?;
    let begins = fields.boolean("add_generation_prompt")?.unwrap_or(true);
    Ok(shared.text.render_up_to(&conversation, begins)?)
}
