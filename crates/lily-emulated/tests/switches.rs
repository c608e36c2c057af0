//! Each switch of the GPU devices off, one at a time: the same logits to the last bit, and the same tokens.

mod common;

use lily_checkpoint::Checkpoint;
use lily_emulated::{Emulated, EmulatedOptions};
use lily_gpu::{GpuDevice, GpuOptions, Switches};
use lily_plan::Precision;
use lily_testing::{Runner, Synthetic};
use serde_json::json;
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

#[test]
fn there_is_no_switch_of_another_name() {
    assert!(!Switches::default().turn_off("gravity"));
}
