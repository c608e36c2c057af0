//! Every step of real plans on the emulated device against the reference at the same precision and on the same inputs,
//! to bounds made from operand magnitudes.

mod common;

use common::device;
use lily_checkpoint::Checkpoint;
use lily_cpu::{CpuDevice, CpuOptions, Kernels, compare_device};
use lily_emulated::{Emulated, EmulatedOptions};
use lily_gpu::GpuDevice;
use lily_plan::{Device, Phase, Plan, PlanClass, PlanOutput, Precision, SessionState, route};
use lily_testing::{Synthetic, fixture};
use serde_json::json;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Both sides of a comparison.
struct Sides {
    reference: CpuDevice,
    device: GpuDevice<Emulated>,
    right: Vec<Box<dyn SessionState>>,
    sessions: Vec<Box<dyn SessionState>>,
    precision: Precision,
    expanded: bool,
    seen: BTreeSet<&'static str>,
}

impl Sides {
    fn new(
        checkpoint: &Arc<Checkpoint>,
        precision: Precision,
        sessions: usize,
        capacity: usize,
    ) -> Self {
        let options = CpuOptions {
            kernels: Kernels::Reference,
            ..CpuOptions::default()
        };
        let reference = CpuDevice::new(checkpoint.clone(), &options).unwrap();
        let device = device(checkpoint, EmulatedOptions::default());
        let new = |device: &dyn Device| -> Vec<Box<dyn SessionState>> {
            (0..sessions)
                .map(|_| device.new_session(precision, capacity).unwrap())
                .collect()
        };
        Sides {
            right: new(&reference),
            sessions: new(&device),
            reference,
            device,
            precision,
            expanded: false,
            seen: BTreeSet::new(),
        }
    }

    /// Runs a plan for these tokens on the first session (prefill) or one token on each (decode).
    #[track_caller]
    fn check(&mut self, phase: Phase, rows: usize, output: PlanOutput) {
        let config = &self.device.model().config;
        let vocabulary = config.vocab_size as u32;
        let count = if phase == Phase::Prefill { 1 } else { rows };
        let longest = self.sessions[..count]
            .iter()
            .map(|session| session.position() + 1)
            .max()
            .unwrap();
        let class = PlanClass {
            phase,
            precision: self.precision,
            rows,
            context: match phase {
                Phase::Prefill => config.max_positions,
                Phase::Decode => route::context_band(longest),
            },
            output,
        };
        let plan = Plan::record(self.device.model(), class);
        let plan = Arc::new(if self.expanded { plan.expanded() } else { plan });
        let first = self.sessions[0].position() as u32;
        let tokens: Vec<u32> = (0..rows as u32)
            .map(|i| (first + i).wrapping_mul(2_654_435_761) % vocabulary)
            .collect();
        let differences = compare_device(
            &mut self.reference,
            &mut self.right[..count],
            &mut self.device,
            &mut self.sessions[..count],
            &plan,
            (&tokens, vocabulary - 3),
        )
        .unwrap();
        assert_eq!(differences.len(), plan.steps.len());
        for difference in &differences {
            assert!(difference.excess <= 1.0, "{class}: {difference:?}");
        }
        self.seen
            .extend(plan.steps.iter().map(|step| step.operation.name()));
    }
}

/// Prompts and tokens in turn, fused and expanded.
fn check_model(
    checkpoint: &Arc<Checkpoint>,
    precision: Precision,
    rows: &[usize],
) -> BTreeSet<&'static str> {
    let mut seen = BTreeSet::new();
    // Expanded, what differs is small: a few rows do.
    for (expanded, rows) in [(false, rows), (true, &[3][..])] {
        let mut sides = Sides::new(checkpoint, precision, 1, 512);
        sides.expanded = expanded;
        let outputs = [
            PlanOutput::LastLogits,
            PlanOutput::AllLogits,
            PlanOutput::State,
        ];
        for (index, &rows) in rows.iter().enumerate() {
            sides.check(Phase::Prefill, rows, outputs[index % 3]);
            let output = [PlanOutput::Token, PlanOutput::Sampled][index % 2];
            sides.check(Phase::Decode, 1, output);
        }
        seen.extend(sides.seen);
    }
    seen
}

/// Decodes several sessions at different positions together.
fn check_together(checkpoint: &Arc<Checkpoint>, precision: Precision, sessions: usize) {
    let mut sides = Sides::new(checkpoint, precision, sessions, 512);
    // Different positions: each a few tokens further than the one before, by decode alone.
    for count in (1..=sessions).rev().filter(|count| count.is_power_of_two()) {
        sides.check(Phase::Decode, count, PlanOutput::Token);
    }
    sides.check(Phase::Decode, sessions, PlanOutput::Token);
}

#[test]
fn in_f32_each_step_of_the_oracle_agrees() {
    let checkpoint = Arc::new(Checkpoint::open(&fixture("oracle-small-b").unwrap()).unwrap());
    let seen = check_model(&checkpoint, Precision::F32, &[17, 1]);
    // Every operation there is.
    assert_eq!(seen.len(), 32, "{seen:?}");
}

#[test]
fn in_bf16_each_step_of_the_oracle_agrees() {
    let checkpoint = Arc::new(Checkpoint::open(&fixture("oracle-small-b").unwrap()).unwrap());
    check_model(&checkpoint, Precision::Bf16, &[33, 1]);
}

#[test]
fn sessions_decoded_together_agree() {
    let checkpoint = Synthetic::small(json!({})).open();
    for precision in [Precision::F32, Precision::Bf16] {
        for sessions in [2, 4, 8] {
            check_together(&checkpoint, precision, sessions);
        }
    }
}

/// Head counts, widths, tap counts and column counts that the stored models do not have.
#[test]
fn each_step_of_odd_shapes_agrees() {
    for changes in [
        json!({"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}),
        json!({"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 96}),
        json!({"linear_num_value_heads": 4, "linear_value_head_dim": 48, "linear_key_head_dim": 16,
               "linear_conv_kernel_dim": 2, "linear_num_key_heads": 2}),
        json!({"num_experts": 5, "num_experts_per_tok": 5, "moe_intermediate_size": 192,
               "shared_expert_intermediate_size": 320}),
        json!({"tie_word_embeddings": true, "hidden_size": 192, "vocab_size": 77}),
    ] {
        let checkpoint = Synthetic::small(changes).open();
        check_model(&checkpoint, Precision::F32, &[5]);
        check_model(&checkpoint, Precision::Bf16, &[23]);
    }
}

/// Contexts on both sides of a page, of a block and of a turn of simdgroups.
#[test]
fn attention_agrees_at_the_edges_of_its_blocks() {
    let checkpoint = Synthetic::small(json!({})).open();
    for length in [1, 7, 8, 9, 31, 127, 128, 129, 255, 256, 257] {
        let mut sides = Sides::new(&checkpoint, Precision::F32, 1, 512);
        sides.check(Phase::Prefill, length, PlanOutput::State);
        sides.check(Phase::Decode, 1, PlanOutput::Token);
        sides.check(Phase::Prefill, 3, PlanOutput::AllLogits);
    }
}
