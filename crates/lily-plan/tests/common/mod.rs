//! The model that tests record plans of: Qwen3.6-35B-A3B in MLX's 4-bit format, from its `config.json`.

#![allow(dead_code)] // Each test file is a crate of its own and uses what it needs.

use lily_checkpoint::DeclaredModel;
use lily_plan::{ModelDescription, Phase, Plan, PlanClass, PlanOutput, Precision};
use std::path::Path;
use std::sync::Arc;

pub fn declared() -> DeclaredModel {
    let path = "../../fixtures/qwen3.6-35b-a3b/config.json";
    DeclaredModel::read(&Path::new(env!("CARGO_MANIFEST_DIR")).join(path))
        .expect("the real model's configuration")
}

pub fn model() -> Arc<ModelDescription> {
    let DeclaredModel {
        config,
        quantization,
    } = declared();
    Arc::new(ModelDescription::new(config, |spec| {
        quantization.format_of(spec)
    }))
}

pub fn class(phase: Phase, precision: Precision, rows: usize, output: PlanOutput) -> PlanClass {
    let context = match phase {
        Phase::Prefill => 262_144,
        Phase::Decode => 4_096,
    };
    PlanClass {
        phase,
        precision,
        rows,
        context,
        output,
    }
}

/// The product's decode plan for one session.
pub fn decode(model: &Arc<ModelDescription>) -> Plan {
    let class = class(Phase::Decode, Precision::Bf16, 1, PlanOutput::Token);
    Plan::record(model, class)
}

/// The product's plan for the last chunk of a prompt.
pub fn prefill(model: &Arc<ModelDescription>, rows: usize) -> Plan {
    let class = class(
        Phase::Prefill,
        Precision::Bf16,
        rows,
        PlanOutput::LastLogits,
    );
    Plan::record(model, class)
}

/// Plans of every shape, fused and expanded: decode of 1 to 8 sessions and chunks of 1 to 512 tokens, at
/// both precisions, with and without logits.
pub fn grid(model: &Arc<ModelDescription>) -> Vec<Plan> {
    let mut plans = Vec::new();
    for precision in [Precision::F32, Precision::Bf16] {
        let mut record = |phase, rows, output| {
            let plan = Plan::record(model, class(phase, precision, rows, output));
            let expanded = plan.expanded();
            plans.extend([plan, expanded]);
        };
        for rows in [1, 2, 4, 8] {
            record(Phase::Decode, rows, PlanOutput::Token);
        }
        for rows in [1, 7, 64, 512] {
            record(Phase::Prefill, rows, PlanOutput::LastLogits);
            record(Phase::Prefill, rows, PlanOutput::State);
        }
        record(Phase::Prefill, 7, PlanOutput::AllLogits);
    }
    plans
}
