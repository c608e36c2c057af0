//! Layers of the real model's dimensions, each step against the reference.

mod common;

use common::real;
use lily_cpu::{CpuDevice, CpuOptions, Kernels, compare_device};
use lily_emulated::EmulatedOptions;
use lily_plan::{Device, Phase, Plan, PlanClass, PlanOutput, Precision, SessionState};
use std::sync::Arc;
use std::time::Instant;

/// Runs of so many rows (one: decode) one after the other, each step against the reference.
fn check(precision: Precision, runs: &[usize]) {
    let checkpoint = real::layers();
    let options = CpuOptions {
        kernels: Kernels::Reference,
        ..CpuOptions::default()
    };
    let mut reference = CpuDevice::new(checkpoint.clone(), &options).unwrap();
    let mut device = common::device(&checkpoint, EmulatedOptions::default());
    let new = |device: &dyn Device| -> Vec<Box<dyn SessionState>> {
        vec![device.new_session(precision, 512).unwrap()]
    };
    let (mut right, mut sessions) = (new(&reference), new(&device));
    for &rows in runs {
        let started = Instant::now();
        let (phase, output) = match rows {
            1 => (Phase::Decode, PlanOutput::Token),
            _ => (Phase::Prefill, PlanOutput::LastLogits),
        };
        let class = PlanClass {
            phase,
            precision,
            rows,
            context: 4_096,
            output,
        };
        let plan = Arc::new(Plan::record(device.model(), class));
        let first = sessions[0].position() as u32;
        let tokens: Vec<u32> = (0..rows as u32)
            .map(|i| (first + i).wrapping_mul(2_654_435_761) % real::VOCABULARY as u32)
            .collect();
        let differences = compare_device(
            &mut reference,
            &mut right,
            &mut device,
            &mut sessions,
            &plan,
            (&tokens, real::VOCABULARY as u32),
        )
        .unwrap();
        assert_eq!(differences.len(), plan.steps.len());
        for difference in &differences {
            assert!(difference.excess <= 1.0, "{class}: {difference:?}");
        }
        let most = differences.iter().map(|difference| difference.excess);
        let most = most.fold(0.0, f64::max);
        println!(
            "{class}: at most {most:.3} of a bound, {:.1?}",
            started.elapsed()
        );
    }
}

#[test]
fn decode_of_real_layers_agrees_in_bf16() {
    check(Precision::Bf16, &[1, 1]);
}

#[test]
fn decode_of_real_layers_agrees_in_f32() {
    check(Precision::F32, &[1, 1]);
}

/// Tiles are as large as for 16 rows; what takes long is the reference, row by row.
#[test]
fn a_short_prompt_of_real_layers_agrees_in_bf16() {
    check(Precision::Bf16, &[2]);
}

/// `cargo test -p lily-emulated --test real -- --ignored`: a minute or two.
#[test]
#[ignore = "a minute or two"]
fn a_prompt_of_real_layers_agrees_in_bf16() {
    check(Precision::Bf16, &[17, 1]);
}
