//! Attention over contexts up to the longest, at the edges of blocks, bands of contexts and pages; and sessions that
//! stand where no run has brought them.

mod common;

use common::device;
use lily_checkpoint::Checkpoint;
use lily_cpu::{CpuDevice, CpuOptions, Kernels, compare_device};
use lily_emulated::{Emulated, EmulatedOptions};
use lily_gpu::GpuDevice;
use lily_plan::{
    Device, Phase, Plan, PlanClass, PlanOutput, Precision, SessionState, StateCopy, StateSlot,
    route,
};
use lily_testing::{Runner, Synthetic};
use serde_json::json;
use std::sync::Arc;
use std::time::Instant;

/// Positions of the longest context.
const LONGEST: usize = 262_144;

/// One attention layer, everything else as small as it may be.
fn attention(heads: usize, key_value_heads: usize, width: usize) -> Arc<Checkpoint> {
    Synthetic::small(json!({
        "num_hidden_layers": 1, "full_attention_interval": 1,
        "num_attention_heads": heads, "num_key_value_heads": key_value_heads, "head_dim": width,
        "hidden_size": 64, "num_experts": 2, "num_experts_per_tok": 1, "vocab_size": 64,
    }))
    .open()
}

/// Numbers from -1 to 1.
fn random(count: usize, seed: u64) -> Vec<f32> {
    let mut bits = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        bits ^= bits << 13;
        bits ^= bits >> 7;
        bits ^= bits << 17;
        (bits >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// A model on both sides, its sessions behind the same contexts.
struct Sides {
    reference: CpuDevice,
    device: GpuDevice<Emulated>,
    right: Vec<Box<dyn SessionState>>,
    sessions: Vec<Box<dyn SessionState>>,
    precision: Precision,
}

impl Sides {
    /// One session for each of `contexts`, that stands behind so many positions; their caches are zeros.
    fn new(checkpoint: &Arc<Checkpoint>, precision: Precision, contexts: &[usize]) -> Self {
        let options = CpuOptions {
            kernels: Kernels::Reference,
            ..CpuOptions::default()
        };
        let reference = CpuDevice::new(checkpoint.clone(), &options).unwrap();
        let device = device(checkpoint, EmulatedOptions::default());
        let new = |device: &dyn Device| -> Vec<Box<dyn SessionState>> {
            let new = |&context: &usize| {
                let mut session = device.new_session(precision, LONGEST).unwrap();
                session.seek(context).unwrap();
                session
            };
            contexts.iter().map(new).collect()
        };
        Sides {
            right: new(&reference),
            sessions: new(&device),
            reference,
            device,
            precision,
        }
    }

    /// Fills the caches. (Comparing copies the reference's to the device.)
    fn fill(mut self) -> Self {
        let width = self.device.model().config.key_value_width();
        for (session, seed) in self.right.iter_mut().zip(1..) {
            let count = session.position() * width;
            for (slot, seed) in [
                (StateSlot::KeyCache(0), seed),
                (StateSlot::ValueCache(0), seed + 100),
            ] {
                session.write(slot, &random(count, seed)).unwrap();
            }
        }
        self
    }

    /// Each step of a run against the reference; the largest difference of any attention, relative to its bound.
    #[track_caller]
    fn check(&mut self, phase: Phase, rows: usize, output: PlanOutput, expanded: bool) -> f64 {
        let longest = self.sessions.iter().map(|session| session.position() + 1);
        let class = PlanClass {
            phase,
            precision: self.precision,
            rows,
            context: match phase {
                Phase::Prefill => LONGEST,
                Phase::Decode => route::context_band(longest.max().unwrap()),
            },
            output,
        };
        let plan = Plan::record(self.device.model(), class);
        let plan = Arc::new(if expanded { plan.expanded() } else { plan });
        let tokens: Vec<u32> = (0..rows as u32).map(|i| i * 37 % 61).collect();
        let differences = compare_device(
            &mut self.reference,
            &mut self.right,
            &mut self.device,
            &mut self.sessions,
            &plan,
            (&tokens, 64),
        )
        .unwrap();
        for difference in &differences {
            assert!(difference.excess <= 1.0, "{class}: {difference:?}");
        }
        let attention = differences
            .iter()
            .filter(|difference| difference.label.contains("attention"));
        attention.fold(0.0, |most, difference| difference.excess.max(most))
    }
}

/// Decode of one session behind `context` positions, then a prompt's rows.
fn check(checkpoint: &Arc<Checkpoint>, precision: Precision, context: usize, rows: usize) {
    let mut sides = Sides::new(checkpoint, precision, &[context]).fill();
    let started = Instant::now();
    let decoded = sides.check(Phase::Decode, 1, PlanOutput::Token, false);
    let half = started.elapsed();
    let prefilled = sides.check(Phase::Prefill, rows, PlanOutput::LastLogits, false);
    println!(
        "{precision}, {context}: decoded {decoded:.3}, {half:.1?}; prefilled {prefilled:.3}, {:.1?}",
        started.elapsed() - half
    );
}

const BOTH: [Precision; 2] = [Precision::F32, Precision::Bf16];

/// Both sides of a page, of blocks of 128 and 256 positions, and of the bands of contexts that have them.
#[test]
fn attention_agrees_at_the_edges_of_contexts() {
    for precision in BOTH {
        for context in [1, 31, 128, 4_095, 4_096, 4_097] {
            check(&attention(4, 1, 64), precision, context, 3);
        }
    }
}

#[test]
fn attention_agrees_at_the_edges_of_long_contexts() {
    for precision in BOTH {
        for context in [32_767, 32_769] {
            check(&attention(2, 2, 32), precision, context, 2);
        }
    }
}

/// Up to the last position there is.
#[test]
fn attention_agrees_at_the_end_of_the_longest_context() {
    check(&attention(2, 1, 32), Precision::Bf16, 262_142, 1);
}

/// `cargo test -p lily-emulated --test long -- --ignored`: a minute.
#[test]
#[ignore = "a minute"]
fn attention_agrees_at_the_end_of_the_longest_context_in_f32() {
    check(&attention(4, 1, 32), Precision::F32, 262_141, 2);
}

/// A block of one session is far behind the last of another.
#[test]
fn sessions_far_apart_decode_together() {
    for precision in BOTH {
        let contexts = [33_000, 1, 4_096, 300];
        let mut sides = Sides::new(&attention(4, 1, 32), precision, &contexts).fill();
        sides.check(Phase::Decode, 4, PlanOutput::Token, false);
    }
}

/// Rotary angles up to 262,143 radians, fused and by itself.
#[test]
fn heads_turn_right_at_the_end_of_the_longest_context() {
    let checkpoint = Synthetic::small(json!({
        "num_hidden_layers": 1, "full_attention_interval": 1, "hidden_size": 64, "vocab_size": 64,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
        "num_experts": 2, "num_experts_per_tok": 1,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 1.0
        },
    }))
    .open();
    for precision in BOTH {
        for (position, expanded) in [(262_127, false), (262_127, true)] {
            let mut sides = Sides::new(&checkpoint, precision, &[position]);
            // The keys are all that is wanted: no attention runs.
            sides.check(Phase::Prefill, 17, PlanOutput::State, expanded);
        }
    }
}

#[test]
fn sessions_go_back_to_snapshots_and_share_caches() {
    let checkpoint = Synthetic::small(json!({})).open();
    for precision in BOTH {
        let device = device(&checkpoint, EmulatedOptions::default());
        let model = device.model().clone();
        Runner::new(device, model, precision).check_snapshots();
    }
}

/// Up to four rows of a small model, bit for bit. With eight, a norm's squares are summed in another order
/// (kernels/vector.h).
#[test]
fn rows_of_a_batch_are_what_they_are_alone() {
    let checkpoint = Synthetic::small(json!({ "hidden_size": 128 })).open();
    for precision in BOTH {
        let device = device(&checkpoint, EmulatedOptions::default());
        let model = device.model().clone();
        Runner::new(device, model, precision).check_rows(&[2, 4]);
    }
}

/// What a session holds makes another that goes on like it, wherever that one stood.
#[test]
fn a_session_made_of_what_another_holds_goes_on_like_it() {
    let checkpoint = Synthetic::small(json!({})).open();
    for precision in BOTH {
        let device = device(&checkpoint, EmulatedOptions::default());
        let model = device.model().clone();
        let mut runner = Runner::new(device, model, precision);
        let prompt: Vec<u32> = (0..260).map(|i| i * 37 % 300).collect();
        runner.prefill(&prompt, 512);
        let kept = [
            StateSlot::ConvolutionHistory(0, StateCopy::Live),
            StateSlot::RecurrentState(0, StateCopy::Live),
            StateSlot::KeyCache(1),
            StateSlot::ValueCache(1),
        ]
        .map(|slot| (slot, runner.session.read(slot)));
        let expected = runner.feed(&[11, 12]);

        runner.session = runner.device.new_session(precision, 600).unwrap();
        runner.prefill(&prompt[..7], 512);
        assert!(runner.session.seek(601).is_err());
        assert_eq!(runner.session.position(), 7, "as it was");
        runner.session.seek(260).unwrap();
        assert_eq!(runner.session.position(), 260);
        assert!(!runner.session.step_back(), "nothing before is known");
        for (slot, values) in &kept {
            runner.session.write(*slot, values).unwrap();
        }
        assert!(runner.feed(&[11, 12]) == expected, "{precision}");
        // Its pages are there at once: three for two.
        let bytes = runner.device.session_bytes(precision);
        let before = runner.session.resident_bytes();
        runner.session.seek(600).unwrap();
        let page = bytes.for_positions(600) - bytes.for_positions(260);
        assert_eq!(runner.session.resident_bytes(), before + page);
    }
}
