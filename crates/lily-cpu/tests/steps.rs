//! Every step of real plans, native against reference at the same precision and on the same inputs, to
//! bounds made from operand magnitudes.

mod common;

use common::{native, on};
use lily_checkpoint::Checkpoint;
use lily_cpu::{CpuDevice, CpuOptions, InstructionSet};
use lily_plan::{Device, Launch, Phase, Plan, PlanClass, PlanOutput, Precision};
use lily_testing::{Runner, Synthetic, fixture, repository};
use serde_json::json;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Runs a plan step by step in both; panics if a step differs by more than it may. Returns the names of
/// the operations seen.
fn check(
    runner: &mut Runner<CpuDevice>,
    plan: &Arc<Plan>,
    tokens: &[u32],
) -> BTreeSet<&'static str> {
    let launch = Launch {
        tokens,
        sessions: &mut [runner.session.as_mut()],
        preset: &[],
        token_limit: u32::MAX,
        sampling: &[],
        observer: None,
    };
    let (_, differences) = runner.device.compare_steps(plan, launch).unwrap();
    assert_eq!(differences.len(), plan.steps.len());
    for difference in differences {
        assert!(difference.excess <= 1.0, "{}: {difference:?}", plan.class);
    }
    plan.steps
        .iter()
        .map(|step| step.operation.name())
        .collect()
}

fn check_model(checkpoint: &Arc<Checkpoint>, rows: &[usize]) -> BTreeSet<&'static str> {
    check_model_with(checkpoint, rows, &native())
}

fn check_model_with(
    checkpoint: &Arc<Checkpoint>,
    rows: &[usize],
    options: &CpuOptions,
) -> BTreeSet<&'static str> {
    let mut seen = BTreeSet::new();
    for precision in [Precision::F32, Precision::Bf16] {
        for expanded in [false, true] {
            let mut runner = on(checkpoint.clone(), precision, options);
            runner.expanded = expanded;
            let vocabulary = runner.model.config.vocab_size as u32;
            let tokens = |count: usize| -> Vec<u32> {
                (0..count as u32)
                    .map(|i| i.wrapping_mul(2_654_435_761) % vocabulary)
                    .collect()
            };
            for (index, &rows) in rows.iter().enumerate() {
                let outputs = [
                    PlanOutput::LastLogits,
                    PlanOutput::AllLogits,
                    PlanOutput::State,
                ];
                let plan = runner.plan(Phase::Prefill, rows, outputs[index % 3]);
                seen.extend(check(&mut runner, &plan, &tokens(rows)));
                let output = [PlanOutput::Token, PlanOutput::Sampled][index % 2];
                let plan = runner.plan(Phase::Decode, 1, output);
                seen.extend(check(&mut runner, &plan, &tokens(1)));
            }
        }
    }
    seen
}

#[test]
fn each_step_of_the_small_oracles_agrees_with_the_reference() {
    let mut seen = BTreeSet::new();
    for name in ["oracle-small-b", "oracle-small-c"] {
        let checkpoint = Arc::new(Checkpoint::open(&fixture(name).unwrap()).unwrap());
        seen.extend(check_model(&checkpoint, &[17, 1, 33]));
    }
    // Every operation there is.
    let all = [
        "arg-max",
        "attention",
        "attention-merge",
        "attention-merge-gate",
        "attention-partial",
        "cache-write",
        "combine",
        "combine-add",
        "convolve",
        "delta-prepare",
        "delta-scan",
        "delta-step",
        "embed",
        "expert-input",
        "expert-output",
        "expert-project",
        "gated-activation",
        "gated-norm",
        "group-experts",
        "head-norm",
        "norm-projections",
        "output-gate",
        "project",
        "project-add",
        "projections",
        "query-key-prepare",
        "residual-add",
        "rms-norm",
        "rotate",
        "route",
        "sample",
        "select-last-row",
    ];
    assert_eq!(seen, all.into_iter().collect());
}

#[test]
fn each_step_of_the_embedded_model_agrees_with_the_reference() {
    let directory = repository("models/lily-tiny");
    let checkpoint = Arc::new(Checkpoint::open(&directory).unwrap());
    check_model(&checkpoint, &[65]);
}

/// Head counts, widths and tap counts that the stored models do not have.
#[test]
fn each_step_of_odd_shapes_agrees_with_the_reference() {
    for changes in [
        json!({"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}),
        json!({"linear_num_value_heads": 2, "linear_value_head_dim": 48, "linear_key_head_dim": 16,
               "linear_conv_kernel_dim": 2}),
        json!({"num_experts": 5, "num_experts_per_tok": 5, "moe_intermediate_size": 192}),
        json!({"tie_word_embeddings": true, "hidden_size": 192, "vocab_size": 77}),
    ] {
        check_model(&Synthetic::small(changes).open(), &[5, 70]);
    }
}

/// Contexts on both sides of a block of keys and of a block of partial attention.
#[test]
fn attention_agrees_at_the_edges_of_its_blocks() {
    let checkpoint = Synthetic::small(json!({})).open();
    for length in [31, 32, 63, 64, 65, 127, 128, 129, 255, 257] {
        let mut runner = on(checkpoint.clone(), Precision::F32, &native());
        let tokens: Vec<u32> = (0..length).map(|i| i * 7 % 320).collect();
        runner.prefill(&tokens, 100);
        let plan = runner.plan(Phase::Decode, 1, PlanOutput::Token);
        check(&mut runner, &plan, &[5]);
        let plan = runner.plan(Phase::Prefill, 3, PlanOutput::AllLogits);
        check(&mut runner, &plan, &[5, 6, 7]);
    }
}

/// The band with the longer blocks, which begins behind 4,096 positions.
#[test]
fn decode_agrees_beyond_the_first_context_band() {
    let checkpoint = Synthetic::small(json!({"hidden_size": 64})).open();
    let mut runner = on(checkpoint, Precision::Bf16, &native());
    runner.session = runner.device.new_session(Precision::Bf16, 4_200).unwrap();
    let tokens: Vec<u32> = (0..4_094).map(|i| i * 7 % 320).collect();
    runner.prefill(&tokens, 512);
    for _ in 0..5 {
        let plan = runner.plan(Phase::Decode, 1, PlanOutput::Token);
        check(&mut runner, &plan, &[5]);
    }
    assert_eq!(runner.session.position(), 4_099);
}

/// The kernels of every instruction set this processor has, not only the widest.
#[test]
fn each_step_agrees_on_every_instruction_set() {
    let checkpoint = Synthetic::small(json!({})).open();
    for set in InstructionSet::available() {
        let options = CpuOptions {
            instruction_set: Some(set),
            ..native()
        };
        check_model_with(&checkpoint, &[21], &options);
    }
}

/// The comparison itself must be able to fail: one weight changed between two computations of a step, by
/// far less than anyone would see in an answer, is found, and in that step alone.
#[test]
fn a_wrong_result_is_found() {
    let mut model = Synthetic::small(json!({"num_hidden_layers": 4}));
    let norm: Vec<f32> = (0..256).map(|i| 1.0 + (i % 7) as f32 / 50.0).collect();
    let path = "model.layers.2.input_layernorm";
    model.given.insert(path.into(), norm.clone());
    let right = CpuDevice::new(model.open(), &native()).unwrap();
    let mut wrong = norm;
    wrong[100] *= 1.0 + 1e-4;
    model.given.insert(path.into(), wrong);
    let mut device = CpuDevice::new(model.open(), &native()).unwrap();
    let mut session = device.new_session(Precision::F32, 64).unwrap();
    let class = PlanClass {
        phase: Phase::Prefill,
        precision: Precision::F32,
        rows: 4,
        context: 4_096,
        output: PlanOutput::AllLogits,
    };
    let plan = Arc::new(Plan::record(device.model(), class));
    let launch = Launch {
        tokens: &[1, 2, 3, 4],
        sessions: &mut [session.as_mut()],
        preset: &[],
        token_limit: u32::MAX,
        sampling: &[],
        observer: None,
    };
    let (_, differences) = device.compare_steps_with(&right, &plan, launch).unwrap();
    let wrong: Vec<&str> = differences
        .iter()
        .filter(|difference| difference.excess > 1.0)
        .map(|difference| difference.label.as_str())
        .collect();
    assert_eq!(wrong, ["layer 2: rms-norm"]);
}
