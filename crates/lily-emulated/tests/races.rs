//! The race build over all kernels: clean as they are, and every barrier that is taken away is missed.

mod common;

use lily_checkpoint::Checkpoint;
use lily_emulated::{Emulated, EmulatedOptions};
use lily_gpu::kernels::{Constant, ConstantValue, SOURCES};
use lily_gpu::{GpuDevice, GpuOptions, MatrixUnits};
use lily_msl::{BuildKind, Schedule, Sources, removable_barriers};
use lily_plan::{
    Device, DeviceError, ElementType, Launch, Operation, Phase, Plan, PlanBuilder, PlanClass,
    PlanOutput, Precision, SessionState,
};
use lily_testing::Synthetic;
use serde_json::json;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Index of the function constant that says which barrier is gone.
const REMOVED: u32 = 63;

fn checkpoint() -> Arc<Checkpoint> {
    Synthetic::small(json!({
        "hidden_size": 128, "vocab_size": 96, "num_experts": 8, "num_experts_per_tok": 2,
    }))
    .open()
}

/// Everything that kernels are for, as small as it may be: a prompt and single tokens, alone and together, at both
/// precisions, fused and expanded. Stops at the first fault. Returns the kernels that ran.
fn run_everything(
    gpu: Emulated,
    checkpoint: &Arc<Checkpoint>,
    precisions: &[Precision],
) -> Result<BTreeSet<&'static str>, DeviceError> {
    let mut device = GpuDevice::new(gpu, checkpoint, GpuOptions::default(), &mut |_, _| {})?;
    let mut ran = BTreeSet::new();
    group_many_pairs(&mut device)?;
    for (&precision, expanded) in precisions.iter().flat_map(|p| [(p, false), (p, true)]) {
        let mut sessions: Vec<Box<dyn SessionState>> = (0..2)
            .map(|_| device.new_session(precision, 300))
            .collect::<Result<_, _>>()?;
        for (phase, rows) in [(Phase::Prefill, 18), (Phase::Decode, 1), (Phase::Decode, 2)] {
            let class = PlanClass {
                phase,
                precision,
                rows,
                context: 4_096,
                output: if phase == Phase::Decode {
                    PlanOutput::Token
                } else {
                    PlanOutput::LastLogits
                },
            };
            let plan = Plan::record(device.model(), class);
            let plan = Arc::new(if expanded { plan.expanded() } else { plan });
            let tokens: Vec<u32> = (0..rows as u32).map(|i| i * 37 % 96).collect();
            let count = if phase == Phase::Prefill { 1 } else { rows };
            let mut borrowed: Vec<&mut dyn SessionState> = Vec::new();
            for session in &mut sessions[..count] {
                borrowed.push(session.as_mut());
            }
            let launch = Launch {
                tokens: &tokens,
                sessions: &mut borrowed,
                preset: &[],
                token_limit: 96,
                sampling: &[],
                observer: None,
            };
            device.execute(&plan, launch)?;
            ran.extend(
                device
                    .with_gpu(Emulated::take_reports)
                    .iter()
                    .map(|ran| ran.kernel),
            );
        }
    }
    Ok(ran)
}

/// Groups enough choices that a simdgroup has more than one round of them.
fn group_many_pairs(device: &mut GpuDevice<Emulated>) -> Result<(), DeviceError> {
    let class = PlanClass {
        phase: Phase::Prefill,
        precision: Precision::F32,
        rows: 1_100,
        context: 4_096,
        output: PlanOutput::State,
    };
    let mut builder = PlanBuilder::new(device.model(), class);
    let ids = builder.scratch("ids", 1_100, 2, ElementType::U32);
    let grouping = builder.scratch("grouping", 1, 8 + 1 + 2_200, ElementType::U32);
    builder.push(Operation::GroupExperts { ids, grouping });
    let plan = Arc::new(builder.finish(None, vec![grouping]));
    let mut session = device.new_session(Precision::F32, 1_100)?;
    let chosen: Vec<f32> = (0..2_200).map(|i| (i * 5 % 8) as f32).collect();
    let launch = Launch {
        tokens: &[0; 1_100],
        sessions: &mut [session.as_mut()],
        preset: &[(ids, chosen)],
        token_limit: 96,
        sampling: &[],
        observer: None,
    };
    device.execute(&plan, launch)?;
    Ok(())
}

fn options(schedule: Schedule) -> EmulatedOptions {
    EmulatedOptions {
        build: BuildKind::Race,
        schedule,
        keep_reports: true,
        ..EmulatedOptions::default()
    }
}

#[test]
fn no_kernel_has_a_race_or_leaves_its_buffers() {
    let checkpoint = checkpoint();
    let both = [Precision::F32, Precision::Bf16];
    let mut ran = BTreeSet::new();
    for (schedule, matrix_units) in [
        (Schedule::ProgramOrder, MatrixUnits::SimdgroupMatrices),
        (Schedule::Shuffled(5), MatrixUnits::SixteenBitMatrices),
        (Schedule::Shuffled(6), MatrixUnits::TensorOperations),
    ] {
        let options = EmulatedOptions {
            matrix_units,
            ..options(schedule)
        };
        ran.extend(run_everything(Emulated::new(options), &checkpoint, &both).unwrap());
    }
    println!("{} kernels: {ran:?}", ran.len());
    assert!(ran.len() >= 30, "{ran:?}");
}

#[test]
fn a_barrier_taken_away_is_missed_in_every_file() {
    let checkpoint = checkpoint();
    let all = SOURCES
        .iter()
        .fold(Sources::new(), |sources, (name, text)| {
            sources.with(name, text)
        });
    let mut unnoticed = Vec::new();
    let mut mutants = 0;
    for (name, text) in SOURCES {
        // These have mutation tests of their own, with shapes that need each barrier.
        if ["tile", "tensor", "sampling", "delta_chunk"]
            .iter()
            .any(|other| name.starts_with(other))
        {
            continue;
        }
        let (removable, count) = removable_barriers(text, REMOVED);
        for barrier in 0..count {
            mutants += 1;
            let constant = Constant {
                index: REMOVED,
                value: ConstantValue::UInt(barrier),
            };
            let options = EmulatedOptions {
                further_constant: Some(constant),
                keep_reports: false,
                ..options(Schedule::ProgramOrder)
            };
            let gpu = Emulated::with_sources(all.clone().with(name, &removable), options);
            if run_everything(gpu, &checkpoint, &[Precision::F32]).is_ok() {
                unnoticed.push(format!("{name}: barrier {barrier}"));
            }
        }
    }
    assert!(unnoticed.is_empty(), "of {mutants}: {unnoticed:?}");
    println!("{mutants} barriers taken away one by one, each missed");
}
