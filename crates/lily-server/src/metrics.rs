//! `GET /metrics`: figures of the server, in Prometheus' text format.

use crate::Shared;
use crate::log;
use crate::prefix_metrics::PrefixMetrics;
use crate::worker::{Figures, Usage};
use axum::extract::{MatchedPath, Request, State};
use axum::http::header;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;
use std::sync::Arc;
use std::time::{Duration, Instant};

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Answered {
    /// The route, never what a client made up.
    path: String,
    status: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Ended {
    reason: &'static str,
}

/// Figures that count up, and the names of those that are read where they stand.
pub(crate) struct Metrics {
    registry: Registry,
    requests: Family<Answered, Counter>,
    answers: Family<Ended, Counter>,
    prompt_tokens: Counter,
    cached_tokens: Counter,
    generated_tokens: Counter,
    first_token: Histogram,
    next_token: Histogram,
    gauges: Gauges,
    prefixes: PrefixMetrics,
}

#[derive(Default)]
struct Gauges {
    active: Gauge,
    waiting: Gauge,
    memory_limit: Gauge,
    memory_working: Gauge,
    memory_sessions: Gauge,
}

impl Metrics {
    pub fn new() -> Self {
        let metrics = Metrics {
            registry: Registry::with_prefix("lily"),
            requests: Family::default(),
            answers: Family::default(),
            prompt_tokens: Counter::default(),
            cached_tokens: Counter::default(),
            generated_tokens: Counter::default(),
            // A millisecond to nine minutes.
            first_token: Histogram::new(exponential_buckets(0.001, 2.0, 20)),
            // A tenth of a millisecond to three seconds.
            next_token: Histogram::new(exponential_buckets(0.000_1, 2.0, 16)),
            gauges: Gauges::default(),
            prefixes: PrefixMetrics::default(),
        };
        metrics.registered()
    }

    fn registered(mut self) -> Self {
        let registry = &mut self.registry;
        registry.register(
            "requests",
            "Requests by route and status",
            self.requests.clone(),
        );
        registry.register("answers", "Answers by how they ended", self.answers.clone());
        registry.register(
            "prompt_tokens",
            "Tokens of prompts",
            self.prompt_tokens.clone(),
        );
        registry.register(
            "cached_prompt_tokens",
            "Tokens of prompts that were not computed again",
            self.cached_tokens.clone(),
        );
        registry.register(
            "generated_tokens",
            "Tokens of answers",
            self.generated_tokens.clone(),
        );
        registry.register(
            "time_to_first_token_seconds",
            "From the request to its first token",
            self.first_token.clone(),
        );
        registry.register(
            "time_between_tokens_seconds",
            "From one token of a request to its next",
            self.next_token.clone(),
        );
        let gauges = &self.gauges;
        for (name, help, gauge) in [
            (
                "requests_active",
                "Choices that are being answered",
                &gauges.active,
            ),
            (
                "requests_waiting",
                "Choices that wait for memory or their turn",
                &gauges.waiting,
            ),
            (
                "memory_limit_bytes",
                "Memory for work and sessions",
                &gauges.memory_limit,
            ),
            (
                "memory_working_bytes",
                "Memory set aside for work",
                &gauges.memory_working,
            ),
            (
                "memory_sessions_bytes",
                "Memory that sessions and snapshots hold",
                &gauges.memory_sessions,
            ),
        ] {
            registry.register(name, help, gauge.clone());
        }
        self.prefixes.register(registry);
        self
    }

    pub fn first_token(&self, after: Duration) {
        self.first_token.observe(after.as_secs_f64());
    }

    pub fn next_token(&self, after: Duration) {
        self.next_token.observe(after.as_secs_f64());
    }

    /// A choice has ended; the first to its prompt tells of the prompt.
    pub fn answered(&self, reason: &'static str, usage: &Usage, is_first: bool) {
        self.answers.get_or_create(&Ended { reason }).inc();
        self.generated_tokens.inc_by(usage.completion_tokens as u64);
        if is_first {
            self.prompt_tokens.inc_by(usage.prompt_tokens as u64);
            self.cached_tokens
                .inc_by(usage.timings.cached_tokens as u64);
        }
    }

    fn text(&self, figures: &Figures) -> String {
        let gauges = &self.gauges;
        let set = |gauge: &Gauge, value: u64| {
            gauge.set(i64::try_from(value).unwrap_or(i64::MAX));
        };
        set(&gauges.active, figures.active as u64);
        set(&gauges.waiting, figures.waiting as u64);
        set(&gauges.memory_limit, figures.memory.limit);
        set(&gauges.memory_working, figures.memory.working);
        set(&gauges.memory_sessions, figures.memory.sessions);
        self.prefixes.set(&figures.prefixes);
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = encode(&mut text, &self.registry);
        text
    }
}

/// `GET /metrics`.
pub(crate) async fn metrics(State(shared): State<Arc<Shared>>) -> impl IntoResponse {
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    let text = shared.metrics.text(&shared.worker.figures());
    ([(header::CONTENT_TYPE, kind)], text)
}

/// Counts requests, and tells of them where that is asked for.
pub(crate) async fn count(
    State(shared): State<Arc<Shared>>,
    request: Request,
    next: Next,
) -> Response {
    let began = Instant::now();
    let matched = request.extensions().get::<MatchedPath>();
    let path = matched.map_or("none", MatchedPath::as_str).to_string();
    let method = request.method().clone();
    let response = next.run(request).await;
    let status = response.status().as_u16();
    if shared.options.logs_requests {
        let took = began.elapsed().as_millis();
        log::say(&format!("{method} {path} {status} {took} ms"));
    }
    let labels = Answered { path, status };
    shared.metrics.requests.get_or_create(&labels).inc();
    response
}
