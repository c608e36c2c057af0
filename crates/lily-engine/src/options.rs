//! How an engine is set up.

use lily_plan::{Plan, Precision, route};
use std::sync::Arc;

/// Changes every plan before it is run: switches and ablations.
pub type PlanTransform = Arc<dyn Fn(Plan) -> Plan + Send + Sync>;

/// How to set up an [`Engine`](crate::Engine).
#[derive(Clone)]
pub struct EngineOptions {
    /// Arithmetic of every plan.
    pub precision: Precision,
    /// Tokens of a prefill chunk, at least 1; chunks lie on multiples of it. With snapshots, messages end chunks too.
    pub prefill_chunk: usize,
    /// Longest sequence, in tokens; what the model was made for, if not given, and never more.
    pub context: Option<usize>,
    /// Bytes that sessions and working memory may take; most of what is free, if not given.
    pub memory_limit: Option<u64>,
    /// Whether sessions keep states behind chunks, from which later prompts go on. Answers then do not depend on what was
    /// kept; without it, a prompt that begins with all that a session holds goes on from there.
    pub snapshots: bool,
    /// Applied to every plan.
    pub plan_transform: Option<PlanTransform>,
}

impl Default for EngineOptions {
    fn default() -> Self {
        EngineOptions {
            precision: Precision::Bf16,
            prefill_chunk: route::PREFILL_CHUNK,
            context: None,
            memory_limit: None,
            snapshots: false,
            plan_transform: None,
        }
    }
}
