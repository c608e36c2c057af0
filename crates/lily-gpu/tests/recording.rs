//! The real model's plans as they are encoded, from its `config.json` alone.

use lily_checkpoint::DeclaredModel;
use lily_gpu::batch::Limits;
use lily_gpu::kernels::{Memory, Operand};
use lily_gpu::record::{Recording, record};
use lily_gpu::{Cost, GpuDescription, MatrixUnits, StateLayout, Switches};
use lily_plan::{Assumptions, ModelDescription, Phase, Plan, PlanClass, PlanOutput, Precision};
use lily_testing::repository;
use std::collections::BTreeMap;
use std::sync::Arc;

fn model() -> Arc<ModelDescription> {
    let declared = DeclaredModel::read(&repository("fixtures/qwen3.6-35b-a3b")).unwrap();
    let formats = declared.quantization;
    Arc::new(ModelDescription::new(declared.config, |spec| {
        formats.format_of(spec)
    }))
}

fn gpu() -> GpuDescription {
    GpuDescription {
        device: "none",
        hardware: "none".into(),
        cores: 40,
        matrix_units: MatrixUnits::SimdgroupMatrices,
        matrices: "none".into(),
        reason: String::new(),
    }
}

fn recorded(phase: Phase, rows: usize, context: usize) -> (Plan, Recording) {
    let output = match phase {
        Phase::Prefill => PlanOutput::LastLogits,
        Phase::Decode => PlanOutput::Token,
    };
    let class = PlanClass {
        phase,
        precision: Precision::Bf16,
        rows,
        context,
        output,
    };
    let plan = Plan::record(&model(), class);
    let layout = StateLayout::new(&plan.model.config, class.precision);
    let recording = record(&plan, &layout, &Switches::default(), &gpu()).unwrap();
    (plan, recording)
}

#[test]
fn a_decoded_token_is_at_most_340_dispatches() {
    for context in [4_096, 32_768, 262_144] {
        let (plan, recording) = recorded(Phase::Decode, 1, context);
        // One dispatch a step, and barriers only where the plan's hazards have a stage begin.
        assert_eq!(recording.dispatches(), plan.steps.len());
        assert_eq!(recording.stages.len(), plan.stages.len());
        assert!(recording.dispatches() <= 340, "{}", recording.dispatches());
    }
}

/// What a Mac of 16 cores may take for a chunk of a prompt behind 262,144 positions, by estimate: no dispatch longer than
/// a tenth of a second that could not be cut into parts which are not.
#[test]
fn no_dispatch_keeps_a_display_waiting() {
    let (plan, recording) = recorded(Phase::Prefill, 512, 262_144);
    let limits = Limits {
        dispatches: 128,
        seconds: 0.1,
        operations_a_second: 16.0 * 0.1e12,
        bytes_a_second: 16.0 * 6e9,
    };
    let mut longest: f64 = 0.0;
    for kept in recording.stages.iter().flatten() {
        let [near, each] = kept.cost;
        let context = 262_144.0 - 512.0;
        let seconds = limits.seconds(Cost {
            operations: near.operations + context * each.operations,
            bytes: near.bytes + context * each.bytes,
        });
        let parts = kept.divisible.map_or(1, |cut| kept.grid[cut.axis]);
        assert!(
            seconds / f64::from(parts) < 0.1,
            "{} {seconds}",
            kept.bound.name
        );
        longest = longest.max(seconds);
    }
    assert!(longest > 0.5, "attention must be cut: {longest}");
    // All of it, by estimate, is all that the plan counts.
    let work = plan.totals(&Assumptions::at_context(0)).work;
    let near = |of: fn(&Cost) -> f64| -> f64 {
        let all = recording.stages.iter().flatten();
        all.map(|kept| of(&kept.cost[0])).sum()
    };
    assert!((near(|cost| cost.operations) / work.flops as f64 - 1.0).abs() < 1e-9);
    assert!((near(|cost| cost.bytes) / work.bytes() as f64 - 1.0).abs() < 1e-9);
}

/// It binds the run behind: nothing else may still read what this one was bound to.
#[test]
fn the_choice_of_the_token_comes_last_and_alone() {
    for context in [4_096, 262_144] {
        let (_, recording) = recorded(Phase::Decode, 1, context);
        let last: Vec<&str> = recording
            .stages
            .last()
            .unwrap()
            .iter()
            .map(|kept| kept.bound.name)
            .collect();
        assert_eq!(last, ["arg_max"]);
        let others = &recording.stages[..recording.stages.len() - 1];
        for kept in others.iter().flatten() {
            let writes = |operand: &Operand| matches!(operand, Operand::Output(output) if output.0.memory == Memory::Launch);
            assert!(
                !kept.bound.operands.iter().any(writes),
                "{}",
                kept.bound.name
            );
        }
    }
}

/// Kernels that fill fewer than two threadgroups a core on 40 cores, with how many they have and why.
const NARROW: [(&str, usize, &str); 6] = [
    ("embed", 8, "8 KB of output"),
    ("route", 1, "1 KB of logits: bound by its latency"),
    (
        "delta_step",
        32,
        "one a value head: its norm needs the whole head",
    ),
    ("query_key_prepare", 5, "18 heads"),
    ("merge_blocks", 16, "one a query head"),
    (
        "arg_max",
        1,
        "1 MB once a token; a second dispatch would cost more",
    ),
];

#[test]
fn decode_fills_forty_cores_but_for_named_exceptions() {
    let (_, recording) = recorded(Phase::Decode, 1, 4_096);
    let mut narrow = BTreeMap::new();
    for recorded in recording.stages.iter().flatten() {
        let threadgroups = recorded
            .grid
            .iter()
            .map(|&size| size as usize)
            .product::<usize>();
        if threadgroups < 80 {
            narrow.insert(recorded.bound.name, threadgroups);
        }
    }
    let expected: BTreeMap<&str, usize> = NARROW
        .iter()
        .map(|(name, count, _)| (*name, *count))
        .collect();
    assert_eq!(narrow, expected);
}

/// What a prefill keeps in memory beside weights and state depends on the chunk alone.
#[test]
fn the_arena_of_a_prefill_does_not_depend_on_the_context() {
    let bytes = |rows: usize| {
        recorded(Phase::Prefill, rows, 262_144)
            .1
            .placement
            .arena_bytes
    };
    let (half, whole) = (bytes(256), bytes(512));
    assert!(
        whole > half && whole < 2 * half + (4 << 20),
        "{half} {whole}"
    );
    println!("arena of a chunk of 512 tokens: {} MiB", whole >> 20);
}
