//! Mechanisms of plans turned off by name, on the CPU device: every step against the reference, and whole runs against
//! those with everything on.

mod common;

use common::{native, on};
use lily_checkpoint::Checkpoint;
use lily_plan::switches::{ALL, PlanSwitch};
use lily_plan::{Device, Launch, Phase, PlanOutput, Precision};
use lily_testing::{Synthetic, distance};
use serde_json::json;
use std::sync::Arc;

fn tokens(count: usize) -> Vec<u32> {
    (0..count as u32)
        .map(|i| i.wrapping_mul(2_654_435_761) % 320)
        .collect()
}

/// A chunk, then tokens one by one, without some mechanisms: all logits. `check`: each step also against the reference.
fn run(
    checkpoint: &Arc<Checkpoint>,
    precision: Precision,
    without: &[&PlanSwitch],
    check: bool,
) -> Vec<f32> {
    let mut runner = on(checkpoint.clone(), precision, &native());
    let mut logits = Vec::new();
    for (phase, rows, output) in [
        (Phase::Prefill, 19, PlanOutput::AllLogits),
        (Phase::Decode, 1, PlanOutput::Token),
        (Phase::Decode, 1, PlanOutput::AllLogits),
    ] {
        let plan = runner.plan(phase, rows, output);
        let plan = without
            .iter()
            .fold((*plan).clone(), |plan, switch| (switch.without)(&plan));
        let plan = Arc::new(plan);
        let tokens = tokens(rows);
        let launch = Launch {
            tokens: &tokens,
            sessions: &mut [runner.session.as_mut()],
            preset: &[],
            token_limit: u32::MAX,
            sampling: &[],
            observer: None,
        };
        let outcome = if check {
            let (outcome, differences) = runner.device.compare_steps(&plan, launch).unwrap();
            for difference in differences {
                assert!(difference.excess <= 1.0, "{}: {difference:?}", plan.class);
            }
            outcome
        } else {
            runner.device.execute(&plan, launch).unwrap()
        };
        logits.extend(outcome.logits);
    }
    logits
}

#[test]
fn without_any_one_mechanism_results_are_the_same() {
    // Weights of 8 bits among those of 4, and experts that no row has chosen.
    let mut model = Synthetic::small(json!({"num_experts": 128}));
    model.config["quantization"]["language_model.model.layers.0.mlp.gate"] =
        json!({"group_size": 64, "bits": 8});
    let checkpoint = model.open();
    for precision in [Precision::F32, Precision::Bf16] {
        let expected = run(&checkpoint, precision, &[], false);
        for switch in ALL {
            let found = run(&checkpoint, precision, &[switch], true);
            let name = switch.name;
            if name == "blocked-attention" {
                // Another order of sums, which bf16 may round to another side.
                let bound = if precision == Precision::F32 {
                    1e-5
                } else {
                    2e-2
                };
                let (off, _) = distance(&found, &expected);
                println!("{name} at {precision}: {off:e}");
                assert!(off <= bound, "{name} at {precision}: {off}");
            } else {
                assert!(found == expected, "{name} at {precision}");
            }
        }
    }
}

#[test]
fn without_all_mechanisms_steps_agree_with_the_reference() {
    let checkpoint = Synthetic::small(json!({})).open();
    let all: Vec<&PlanSwitch> = ALL.iter().collect();
    let reversed: Vec<&PlanSwitch> = ALL.iter().rev().collect();
    for precision in [Precision::F32, Precision::Bf16] {
        let [one, other] = [&all, &reversed].map(|order| run(&checkpoint, precision, order, true));
        assert!(one == other, "at {precision}");
    }
}

/// The dequantised weights are what is multiplied: were they others, so would be the logits.
#[test]
fn products_read_what_was_dequantised() {
    let checkpoint = Synthetic::small(json!({})).open();
    let switch = lily_plan::switches::find("fused-dequantisation").unwrap();
    let mut runner = on(checkpoint, Precision::Bf16, &native());
    let plan = runner.plan(Phase::Prefill, 5, PlanOutput::AllLogits);
    let plan = (switch.without)(&plan);
    let whole = runner.run(&Arc::new(plan.clone()), &tokens(5)).logits;
    let mut left_out = 0;
    for step in 0..plan.steps.len() {
        if plan.steps[step].operation.name() == "dequantise" {
            assert!(runner.session.step_back());
            let without = Arc::new(plan.without_step(step));
            let found = runner.run(&without, &tokens(5)).logits;
            assert!(found != whole, "{step} does not matter");
            left_out += 1;
        }
    }
    assert_eq!(left_out, 5 + 4 + 2 * 8);
}
