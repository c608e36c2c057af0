//! Mechanisms of plans turned off by name: what changes, and that nothing else does.

mod common;

use common::{class, model};
use lily_plan::switches::{self, ALL, PlanSwitch};
use lily_plan::{
    Assumptions, ElementType, Operation, Phase, Plan, PlanOutput, Precision, Resource, ScratchId,
};
use std::collections::{BTreeSet, HashSet};

/// The product's plans: one session's token, and a chunk.
fn plans() -> [Plan; 2] {
    let model = model();
    [
        (Phase::Decode, 1, PlanOutput::Token),
        (Phase::Prefill, 512, PlanOutput::LastLogits),
    ]
    .map(|(phase, rows, output)| Plan::record(&model, class(phase, Precision::Bf16, rows, output)))
}

fn names(plan: &Plan) -> BTreeSet<&'static str> {
    plan.steps
        .iter()
        .map(|step| step.operation.name())
        .collect()
}

#[test]
fn each_switch_takes_away_what_it_names() {
    // Dispatches of a token and of a chunk, 303 and 593 with everything on; what is gone from the one or the other. 30
    // layers of Gated DeltaNet have 5 matrices before their experts, 10 of attention 4, and the experts of all 8.
    let expected = [
        ("fused-projections", [694, 904], "project-add"),
        ("fused-delta-step", [303 + 30 * 3, 593], "delta-step"),
        (
            "fused-query-key",
            [303 + 10 * 4, 593 + 10 * 4],
            "query-key-prepare",
        ),
        (
            "fused-attention-merge",
            [303 + 10, 593],
            "attention-merge-gate",
        ),
        (
            "fused-expert-input",
            [303 + 40 * 3, 593 + 40 * 2],
            "expert-input",
        ),
        ("fused-expert-output", [303 + 40 * 3, 593], "expert-output"),
        ("fused-combine", [303, 593 + 40], "combine-add"),
        ("blocked-attention", [303, 593], "attention-partial"),
        (
            "fused-dequantisation",
            [303, 593 + 30 * 5 + 10 * 4 + 40 * 8],
            "project-add",
        ),
    ];
    assert_eq!(ALL.len(), expected.len());
    let before = plans();
    for (switch, (name, dispatches, gone)) in ALL.iter().zip(expected) {
        assert_eq!(switch.name, name);
        assert_eq!(switches::find(name).expect("by its name").what, switch.what);
        let after = [0, 1].map(|index| (switch.without)(&before[index]));
        let count = |plan: &Plan| plan.steps.len();
        assert_eq!([count(&after[0]), count(&after[1])], dispatches, "{name}");
        assert!(before.iter().any(|plan| names(plan).contains(gone)));
        let changed: Vec<&Plan> = after
            .iter()
            .zip(&before)
            .filter(|(after, before)| after.steps != before.steps)
            .map(|(after, _)| after)
            .collect();
        assert!(!changed.is_empty(), "{name}");
        assert!(!changed.iter().any(|plan| names(plan).contains(gone)));
        // A second time there is nothing left to take away.
        for plan in &after {
            assert_eq!((switch.without)(plan).steps, plan.steps, "{name}");
        }
    }
    assert!(switches::find("fused-everything").is_none());
}

/// Every scratch value is written once, before it is read, and the same state is written.
#[track_caller]
fn check_sound(plan: &Plan, before: &Plan) {
    let mut written: HashSet<ScratchId> = HashSet::new();
    let scratch = |resources: &[Resource]| -> Vec<ScratchId> {
        let each = resources.iter().filter_map(|resource| match resource {
            Resource::Scratch(id) => Some(*id),
            Resource::State(_) => None,
        });
        each.collect()
    };
    for step in &plan.steps {
        let access = step.operation.access();
        for id in scratch(&access.reads) {
            assert!(written.contains(&id), "{}", step.label());
        }
        for id in scratch(&access.writes) {
            assert!(written.insert(id), "{}", step.label());
        }
        for weight in access.weights {
            assert_eq!(weight.layer, step.layer, "{}", step.label());
        }
    }
    let state = |plan: &Plan| -> BTreeSet<Resource> {
        let writes = plan
            .steps
            .iter()
            .flat_map(|step| step.operation.access().writes);
        writes
            .filter(|resource| matches!(resource, Resource::State(_)))
            .collect()
    };
    assert_eq!(state(plan), state(before));
    assert_eq!(plan.logits, before.logits);
}

#[test]
fn switches_combine_in_any_order() {
    let everything = |plan: &Plan, order: &[&PlanSwitch]| {
        order
            .iter()
            .fold(plan.clone(), |plan, switch| (switch.without)(&plan))
    };
    let forwards: Vec<&PlanSwitch> = ALL.iter().collect();
    let backwards: Vec<&PlanSwitch> = ALL.iter().rev().collect();
    for before in plans() {
        for switch in ALL {
            check_sound(&(switch.without)(&before), &before);
        }
        let [one, other] = [&forwards, &backwards].map(|order| everything(&before, order));
        for plan in [&one, &other] {
            check_sound(plan, &before);
            assert!(!plan.steps.iter().any(|step| step.operation.is_fused()));
        }
        let of = |plan: &Plan, name: &str| {
            let steps = plan.steps.iter();
            steps.filter(|step| step.operation.name() == name).count()
        };
        for name in names(&one) {
            assert_eq!(of(&one, name), of(&other, name), "{name}");
        }
        assert_eq!(names(&one), names(&other));
    }
}

/// What the ablation of fused dequantisation costs in bytes, from the model's dimensions.
#[test]
fn dequantised_weights_pass_through_memory() {
    let [_, fused] = plans();
    let switch = switches::find("fused-dequantisation").expect("a switch");
    let unfused = (switch.without)(&fused);
    let assumptions = Assumptions::at_context(0);
    let [before, after] = [&fused, &unfused].map(|plan| plan.totals(&assumptions).work);
    assert_eq!(before.flops, after.flops);
    let (mut codes, mut written, mut read) = (0, 0, 0);
    for (index, step) in unfused.steps.iter().enumerate() {
        let work = unfused.work(index, &assumptions);
        match &step.operation {
            Operation::Dequantise { weight, output, .. } => {
                let (rows, columns) = fused.model.shape(*weight).rows_and_columns();
                assert_eq!(work.scratch_written as usize, rows * columns * 2);
                assert_eq!(work.scratch_written, unfused.spec(*output).bytes() as u64);
                // Half a byte a code and half a byte in eight for scale and bias; the router and the shared expert's
                // gate have a byte a code.
                let bits = work.weight_bytes as f64 * 8.0 / (rows * columns) as f64;
                assert!(bits == 4.5 || bits == 8.5, "{bits}");
                assert_eq!((work.scratch_read, work.flops), (0, 0));
                codes += work.weight_bytes;
                written += work.scratch_written;
            }
            Operation::WithDequantised { .. } => {
                assert_eq!(work.weight_bytes, 0, "{}", step.label());
                read += work.scratch_read;
            }
            _ => {}
        }
    }
    // With 512 rows of 8 choices each nearly all of 256 experts are read.
    assert!(read > written && after.weight_bytes >= before.weight_bytes);
    let most = codes as f64 * 16.0 / 4.5;
    assert!((0.99 * most..=most).contains(&(written as f64)));
    // Working memory: gate and up of a layer's experts, and beside them what is alive.
    let arena = |plan: &Plan| plan.place(ElementType::bytes).arena_bytes;
    let experts = 2 * 256 * 512 * 2_048 * 2;
    let (before, after) = (arena(&fused), arena(&unfused));
    assert!(after >= experts && after <= experts + before, "{after}");
}

/// Only products whose weights are rounded to bfloat16 read dequantised ones: nothing changes at f32, in decode, or in
/// the head.
#[test]
fn exact_products_are_left_as_they_are() {
    let model = model();
    let switch = switches::find("fused-dequantisation").expect("a switch");
    for (phase, precision, rows, output) in [
        (Phase::Decode, Precision::Bf16, 1, PlanOutput::Token),
        (Phase::Prefill, Precision::F32, 64, PlanOutput::AllLogits),
    ] {
        let plan = Plan::record(&model, class(phase, precision, rows, output));
        assert_eq!((switch.without)(&plan).steps, plan.steps);
    }
    let [_, prefill] = plans();
    let plan = (switch.without)(&prefill);
    assert_eq!(plan.steps.last(), prefill.steps.last());
}
