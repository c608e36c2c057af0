//! Mechanisms of plans turned off, in the kernels: dequantisation as a step of its own, attention that is not cut into
//! blocks; and products whose weights are exact. Tiles of 16 rows where others are chosen.

mod common;

use common::device_with;
use lily_checkpoint::Checkpoint;
use lily_cpu::{CpuDevice, CpuOptions, Kernels, compare_device};
use lily_emulated::EmulatedOptions;
use lily_gpu::{MatrixUnits, Switches};
use lily_plan::{Device, Phase, Plan, PlanOutput, Precision, SessionState, switches};
use lily_testing::{Runner, Synthetic};
use serde_json::json;
use std::sync::Arc;

/// Experts of which a chunk chooses some and fills tiles of 16 and 32 rows with others; weights of 8 bits among those of
/// 4; outputs that end within a tile.
fn checkpoint() -> Arc<Checkpoint> {
    let mut model = Synthetic::small(json!({
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 192,
        "shared_expert_intermediate_size": 320,
    }));
    for module in ["gate", "switch_mlp.up_proj", "shared_expert.down_proj"] {
        let name = format!("language_model.model.layers.1.mlp.{module}");
        model.config["quantization"][name] = json!({"group_size": 64, "bits": 8});
    }
    model.open()
}

fn without(plan: &Plan, name: &str) -> Arc<Plan> {
    let switch = switches::find(name).expect("a switch");
    Arc::new((switch.without)(plan))
}

/// Logits of a chunk of `rows` rows.
fn prefill(
    checkpoint: &Arc<Checkpoint>,
    matrix_units: MatrixUnits,
    switches: Switches,
    rows: usize,
    change: impl Fn(Arc<Plan>) -> Arc<Plan>,
) -> Vec<f32> {
    let options = EmulatedOptions {
        matrix_units,
        ..EmulatedOptions::default()
    };
    let device = device_with(checkpoint, options, switches);
    let model = device.model().clone();
    let mut runner = Runner::new(device, model, Precision::Bf16);
    let plan = change(runner.plan(Phase::Prefill, rows, PlanOutput::AllLogits));
    let tokens: Vec<u32> = (0..rows as u32).map(|i| (i * 7919 + 3) % 320).collect();
    runner.run(&plan, &tokens).logits
}

#[test]
fn small_tiles_give_the_same_results() {
    let checkpoint = checkpoint();
    let units = MatrixUnits::SimdgroupMatrices;
    let small = Switches {
        small_tiles: true,
        ..Switches::default()
    };
    // 70 rows are two tiles of 64 or five of 16, and 35 pairs an expert.
    for rows in [33, 70] {
        let [normal, small] = [Switches::default(), small]
            .map(|switches| prefill(&checkpoint, units, switches, rows, |plan| plan));
        assert!(normal == small, "{rows} rows");
    }
}

#[test]
fn dequantised_weights_give_the_same_results() {
    let checkpoint = checkpoint();
    for units in [
        MatrixUnits::SimdgroupMatrices,
        MatrixUnits::TensorOperations,
    ] {
        for rows in [5, 40] {
            let run = |change: &dyn Fn(Arc<Plan>) -> Arc<Plan>| {
                prefill(&checkpoint, units, Switches::default(), rows, change)
            };
            let fused = run(&|plan| plan);
            let unfused = run(&|plan| {
                let unfused = without(&plan, "fused-dequantisation");
                assert!(unfused.steps.len() > plan.steps.len());
                unfused
            });
            assert!(fused == unfused, "{units:?}, {rows} rows");
        }
    }
}

/// Each step of plans without a mechanism, against the reference; and of plans whose weights are exact, on tensor
/// operations that take codes.
#[test]
fn steps_agree_with_the_reference() {
    let checkpoint = checkpoint();
    let options = CpuOptions {
        kernels: Kernels::Reference,
        ..CpuOptions::default()
    };
    let mut reference = CpuDevice::new(checkpoint.clone(), &options).unwrap();
    for (precision, name, rows) in [
        (Precision::F32, "blocked-attention", 127),
        (Precision::Bf16, "blocked-attention", 127),
        (Precision::Bf16, "fused-dequantisation", 18),
        (Precision::Bf16, "rounded weights", 18),
    ] {
        let options = EmulatedOptions {
            matrix_units: MatrixUnits::PackedTensorOperations,
            ..EmulatedOptions::default()
        };
        let device = device_with(&checkpoint, options, Switches::default());
        let model = device.model().clone();
        let mut runner = Runner::new(device, model, precision);
        let new = |device: &dyn Device| vec![device.new_session(precision, 512).unwrap()];
        let (mut right, mut sessions): (Vec<Box<dyn SessionState>>, _) =
            (new(&reference), new(&runner.device));
        // Behind 127 positions decode is the last of a block, and then the first of another.
        for (phase, rows) in [
            (Phase::Prefill, rows),
            (Phase::Decode, 1),
            (Phase::Decode, 1),
        ] {
            let plan = runner.plan(phase, rows, PlanOutput::AllLogits);
            let plan = match name {
                "rounded weights" => Arc::new(plan.with_exact_weights()),
                name => without(&plan, name),
            };
            let tokens: Vec<u32> = (0..rows as u32).map(|i| (i * 7919 + 3) % 320).collect();
            let differences = compare_device(
                &mut reference,
                &mut right,
                &mut runner.device,
                &mut sessions,
                &plan,
                (&tokens, 300),
            )
            .unwrap();
            for difference in &differences {
                assert!(difference.excess <= 1.0, "{name}: {difference:?}");
            }
        }
    }
}
