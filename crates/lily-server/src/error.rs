//! Errors as OpenAI's API tells them.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use lily_constraint::ConstraintError;
use lily_engine::{EngineError, SamplingError, TemplateError};
use serde_json::{Value, json};

/// An error of a request.
#[derive(Clone, Debug)]
pub(crate) struct ApiError {
    status: StatusCode,
    kind: &'static str,
    message: String,
    /// The field at fault.
    param: Option<String>,
    code: Option<&'static str>,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        ApiError {
            status,
            kind,
            message: message.into(),
            param: None,
            code: None,
        }
    }

    /// What was asked for is not sound, or not to be had.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", message)
    }

    /// The field at fault, such as `messages[2].role`.
    pub fn of(mut self, param: impl Into<String>) -> Self {
        self.param = Some(param.into());
        self
    }

    /// A word for programs.
    pub fn with_code(mut self, code: &'static str) -> Self {
        self.code = Some(code);
        self
    }

    pub fn not_found(message: &str) -> Self {
        Self::new(StatusCode::NOT_FOUND, "invalid_request_error", message)
    }

    pub fn method_not_allowed() -> Self {
        let message = "this address takes another method";
        Self::new(
            StatusCode::METHOD_NOT_ALLOWED,
            "invalid_request_error",
            message,
        )
    }

    pub fn forbidden(message: &str) -> Self {
        Self::new(StatusCode::FORBIDDEN, "invalid_request_error", message)
    }

    pub fn with_status(status: StatusCode, message: impl Into<String>) -> Self {
        Self::new(status, "invalid_request_error", message)
    }

    /// As many requests as there may be are there.
    pub fn overloaded() -> Self {
        let message = "too many requests wait already: come back later";
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", message).with_code("overloaded")
    }

    /// The server is at its end.
    pub fn stopping() -> Self {
        Self::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "server_error",
            "the server is stopping",
        )
    }

    /// No key, or one that is not known.
    pub fn unauthorized() -> Self {
        let message =
            "this server wants its API key, as a bearer token in the Authorization header";
        Self::with_status(StatusCode::UNAUTHORIZED, message).with_code("invalid_api_key")
    }

    /// A grammar's or a schema's fault, in a field.
    pub fn of_constraint(error: &ConstraintError) -> Self {
        let param = match error {
            ConstraintError::Schema { of: None, .. } => "response_format",
            ConstraintError::Schema { of: Some(_), .. } => "tools",
            ConstraintError::UnknownTool(_) | ConstraintError::NoTools => "tool_choice",
            ConstraintError::Vocabulary(_) => "response_format",
        };
        Self::invalid(error.to_string()).of(param)
    }

    /// As the object that OpenAI's clients read.
    pub fn to_json(&self) -> Value {
        json!({"error": {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }})
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let body = self.to_json().to_string();
        let mut response = (
            self.status,
            [(header::CONTENT_TYPE, "application/json")],
            body,
        )
            .into_response();
        if self.status == StatusCode::SERVICE_UNAVAILABLE {
            response
                .headers_mut()
                .insert(header::RETRY_AFTER, HeaderValue::from_static("2"));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            response
                .headers_mut()
                .insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

impl From<TemplateError> for ApiError {
    fn from(error: TemplateError) -> Self {
        ApiError::invalid(error.to_string()).of("messages")
    }
}

impl From<EngineError> for ApiError {
    fn from(error: EngineError) -> Self {
        let message = error.to_string();
        match error {
            EngineError::ContextExceeded { .. } | EngineError::PromptTooLong { .. } => {
                ApiError::invalid(message)
                    .of("messages")
                    .with_code("context_length_exceeded")
            }
            EngineError::EmptyPrompt => ApiError::invalid(message).of("messages"),
            EngineError::Sampling(error) => {
                let invalid = ApiError::invalid(message);
                match error {
                    SamplingError::OutOfRange { parameter, .. } => invalid.of(parameter),
                    SamplingError::Sampleable { .. } => invalid,
                    _ => invalid.of("logit_bias"),
                }
            }
            EngineError::UnknownToken { .. } | EngineError::Guide(_) => ApiError::invalid(message),
            EngineError::MemoryExceeded { .. } => {
                Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", message)
                    .with_code("out_of_memory")
            }
            _ => Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message),
        }
    }
}
