//! The race build over all kernels: clean as they are, and every barrier that is taken away is missed.

mod common;

use lily_checkpoint::Checkpoint;
use lily_emulated::{Emulated, EmulatedOptions};
use lily_gpu::kernels::{Constant, ConstantValue, SOURCES};
use lily_gpu::{GpuDevice, GpuOptions};
use lily_msl::{BuildKind, Schedule, Sources, removable_barriers};
use lily_plan::{
    Device, DeviceError, Launch, Phase, Plan, PlanClass, PlanOutput, Precision, SessionState,
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
) -> Result<BTreeSet<&'static str>, DeviceError> {
    let mut device = GpuDevice::new(gpu, checkpoint, GpuOptions::default(), &mut |_, _| {})?;
    let mut ran = BTreeSet::new();
    for (precision, expanded) in [
        (Precision::F32, false),
        (Precision::F32, true),
        (Precision::Bf16, false),
        (Precision::Bf16, true),
    ] {
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

fn options(schedule: Schedule) -> EmulatedOptions {
    EmulatedOptions {
        build: BuildKind::Race,
        schedule,
        keep_reports: true,
        further_constant: None,
    }
}

#[test]
fn no_kernel_has_a_race_or_leaves_its_buffers() {
    let checkpoint = checkpoint();
    let ran = run_everything(Emulated::new(options(Schedule::ProgramOrder)), &checkpoint).unwrap();
    run_everything(Emulated::new(options(Schedule::Shuffled(5))), &checkpoint).unwrap();
    println!("{} kernels: {ran:?}", ran.len());
    assert!(ran.len() >= 30, "{ran:?}");
}

/// Barriers that no run of the workload above needs, with the reason.
const UNNEEDED: [(&str, u32); 0] = [];

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
            if run_everything(gpu, &checkpoint).is_ok() && !UNNEEDED.contains(&(name, barrier)) {
                unnoticed.push(format!("{name}: barrier {barrier}"));
            }
        }
    }
    assert!(unnoticed.is_empty(), "of {mutants}: {unnoticed:?}");
    println!("{mutants} barriers taken away one by one, each missed");
}
