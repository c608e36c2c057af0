//! Each switch of the GPU devices off, one at a time: the same logits to the last bit, and the same tokens.

mod common;

use common::device_with;
use lily_checkpoint::Checkpoint;
use lily_emulated::{Emulated, EmulatedOptions};
use lily_gpu::{GpuDevice, GpuOptions, MatrixUnits, Switches};
use lily_plan::{Device, Phase, Plan, PlanClass, PlanOutput, Precision};
use lily_testing::{Runner, Synthetic};
use serde_json::json;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Logits of a prompt of 70 tokens in chunks, and what follows greedily.
fn answer(
    checkpoint: &Arc<Checkpoint>,
    precision: Precision,
    switches: Switches,
) -> (Vec<f32>, Vec<u32>) {
    let gpu = Emulated::new(EmulatedOptions::default());
    let options = GpuOptions { switches };
    let device = GpuDevice::new(gpu, checkpoint, options, &mut |_, _| {}).unwrap();
    let model = device.model().clone();
    let mut runner = Runner::new(device, model, precision);
    let tokens: Vec<u32> = (0..70).map(|i| i * 37 % 320).collect();
    let logits = runner.prefill(&tokens, 40);
    let (chosen, _) = runner.greedy(tokens[69], 3);
    (logits, chosen)
}

#[test]
fn each_switch_leaves_results_equal() {
    let checkpoint = Synthetic::small(json!({})).open();
    for precision in [Precision::F32, Precision::Bf16] {
        let designed = answer(&checkpoint, precision, Switches::default());
        for switch in Switches::ALL {
            let mut switches = Switches::default();
            assert!(switches.turn_off(switch.name));
            assert_ne!(switches, Switches::default(), "{}", switch.name);
            let found = answer(&checkpoint, precision, switches);
            assert!(found == designed, "{} off, {precision}", switch.name);
        }
    }
}

/// What multiplies matrices is the best that the machine has and no switch turns off; plans follow it, and so does what
/// is told.
#[test]
fn matrix_units_are_those_that_are_left() {
    let checkpoint = Synthetic::small(json!({})).open();
    for (units, off, tile, told) in [
        (
            MatrixUnits::PackedTensorOperations,
            "",
            "packed",
            "tensor operations of Metal 4 on codes of four bits, emulated",
        ),
        (
            MatrixUnits::PackedTensorOperations,
            "packed-codes",
            "tensor",
            "tensor operations of Metal 4",
        ),
        (
            MatrixUnits::PackedTensorOperations,
            "tensor-operations",
            "tile",
            "simdgroup matrices",
        ),
        (
            MatrixUnits::TensorOperations,
            "tensor-operations",
            "tile",
            "simdgroup matrices",
        ),
        (
            MatrixUnits::TensorOperations,
            "packed-codes",
            "tensor",
            "tensor operations of Metal 4, emulated",
        ),
        (
            MatrixUnits::SimdgroupMatrices,
            "tensor-operations",
            "tile",
            "simdgroup matrices, emulated",
        ),
    ] {
        let mut switches = Switches::default();
        assert!(switches.turn_off(off) || off.is_empty());
        let options = EmulatedOptions {
            matrix_units: units,
            ..EmulatedOptions::default()
        };
        let mut device = device_with(&checkpoint, options, switches);
        assert_eq!(device.describe().kernels, told);
        let class = PlanClass {
            phase: Phase::Prefill,
            precision: Precision::Bf16,
            rows: 40,
            context: 4_096,
            output: PlanOutput::State,
        };
        let plan = Arc::new(device.suit(Plan::record(device.model(), class)));
        let recording = device.recording(&plan).unwrap();
        let names = recording
            .stages
            .iter()
            .flatten()
            .map(|kept| kept.bound.name);
        let found: BTreeSet<&str> = names
            .filter_map(|name| name.split_once("_project_"))
            .map(|(tiles, _)| tiles)
            .collect();
        assert_eq!(found, BTreeSet::from([tile]), "{units:?} without {off:?}");
    }
}

#[test]
fn there_is_no_switch_of_another_name() {
    assert!(!Switches::default().turn_off("gravity"));
}
