//! Whole models on the Mac's GPU: against the recorded numbers of MLX-LM, and every step against the reference. These
//! tests run on a Mac; so far they have been type-checked and linked, and never run.
#![cfg(target_os = "macos")]

use lily_checkpoint::Checkpoint;
use lily_cpu::{CpuDevice, CpuOptions, Kernels, compare_device};
use lily_gpu::{GpuDevice, GpuOptions, Switches};
use lily_metal::{Metal, MetalOptions, open};
use lily_plan::{
    Device, Phase, Plan, PlanClass, PlanOutput, Precision, StateCopy, StateSlot, route,
};
use lily_testing::{Runner, arg_max, distance, fixture, golden_prompts, read_tensors, repository};
use std::path::Path;
use std::sync::Arc;

fn device_with(
    checkpoint: &Arc<Checkpoint>,
    options: MetalOptions,
    switches: Switches,
) -> GpuDevice<Metal> {
    let gpu = open(options).expect("a Mac with Apple Silicon and macOS 15 or later");
    GpuDevice::new(gpu, checkpoint, GpuOptions { switches }, &mut |_, _| {}).expect("a device")
}

fn checkpoint(directory: &Path) -> Arc<Checkpoint> {
    Arc::new(Checkpoint::open(directory).expect("a sound checkpoint"))
}

fn runner(
    directory: &Path,
    precision: Precision,
    options: MetalOptions,
) -> Runner<GpuDevice<Metal>> {
    runner_of(
        device_with(&checkpoint(directory), options, Switches::default()),
        precision,
    )
}

fn runner_of(device: GpuDevice<Metal>, precision: Precision) -> Runner<GpuDevice<Metal>> {
    let model = device.model().clone();
    Runner::new(device, model, precision)
}

/// Prefill whole and in chunks, decode, and mixed, to the bounds of fixtures/README.md.
#[test]
fn in_f32_the_recorded_numbers_are_matched() {
    let directory = fixture("oracle-small-b").expect("in the repository");
    let goldens = read_tensors(&directory.join("golden.safetensors"));
    for prompt in golden_prompts(&directory) {
        let expected = &goldens[&format!("{}.logits", prompt.name)].1;
        let length = prompt.tokens.len();
        for (way, prefilled, chunk) in [
            ("chunks of 64", length, 64),
            ("decoded", 0, 64),
            ("mixed", length / 2, 7),
        ] {
            let what = format!("{}, {way}", prompt.name);
            let mut runner = runner(&directory, Precision::F32, MetalOptions::default());
            let mut logits = runner.prefill(&prompt.tokens[..prefilled], chunk);
            logits.extend(runner.feed(&prompt.tokens[prefilled..]));
            let rows: Vec<&[f32]> = logits.chunks(runner.model.config.vocab_size).collect();
            let chosen: Vec<u32> = rows.iter().map(|row| arg_max(row)).collect();
            assert_eq!(chosen, prompt.argmax_all, "{what}: argmax");
            let wanted: Vec<f32> = prompt
                .logit_positions
                .iter()
                .flat_map(|&at| rows[at].to_vec())
                .collect();
            let (relative, largest) = distance(&wanted, expected);
            assert!(
                relative <= 2e-5 && largest <= 5e-4,
                "{what}: rel. RMS {relative:.1e}, max {largest:.1e}"
            );
            let (greedy, _) = runner.greedy(chosen[length - 1], prompt.greedy.len());
            assert_eq!(greedy, prompt.greedy, "{what}: greedy");
        }
    }
}

/// Runs sent off before the tokens of the ones before were seen, while those run: the tokens and the state that runs
/// leave which wait for one another. Over a page of the cache, and twice, because what goes wrong here does so by
/// chance.
#[test]
fn runs_ahead_leave_what_single_runs_leave() {
    let directory = repository("models/lily-tiny");
    let prompt: Vec<u32> = (0..200).map(|i| i * 37 % 4_000).collect();
    let mut runner = runner(&directory, Precision::Bf16, MetalOptions::default());
    let mut answer = |ahead: bool| {
        runner.session.reset();
        runner.prefill(&prompt, 64);
        let tokens = if ahead {
            runner.greedy_ahead(7, 120)
        } else {
            runner.greedy(7, 120).0
        };
        let state = runner
            .session
            .read(StateSlot::RecurrentState(0, StateCopy::Live));
        (tokens, runner.session.position(), state)
    };
    let expected = answer(false);
    for _ in 0..2 {
        assert!(answer(true) == expected);
    }
}

#[test]
fn sessions_go_back_to_snapshots_and_share_caches() {
    let directory = repository("models/lily-tiny");
    for precision in [Precision::F32, Precision::Bf16] {
        runner(&directory, precision, MetalOptions::default()).check_snapshots();
    }
}

/// Every step of prefill and decode, on the reference's inputs, to bounds made from operand magnitudes.
fn check_steps(checkpoint: &Arc<Checkpoint>, precision: Precision, switches: Switches) {
    let mut reference = CpuDevice::new(
        checkpoint.clone(),
        &CpuOptions {
            kernels: Kernels::Reference,
            ..CpuOptions::default()
        },
    )
    .expect("the reference");
    let mut device = device_with(checkpoint, MetalOptions::default(), switches);
    let model = device.model().clone();
    let mut right = [reference.new_session(precision, 512).expect("a session")];
    let mut sessions = [device.new_session(precision, 512).expect("a session")];
    for (phase, rows, output) in [
        (Phase::Prefill, 17, PlanOutput::AllLogits),
        (Phase::Decode, 1, PlanOutput::Token),
        (Phase::Prefill, 97, PlanOutput::LastLogits),
        (Phase::Decode, 1, PlanOutput::Token),
    ] {
        let position = sessions[0].position();
        let context = match phase {
            Phase::Prefill => model.config.max_positions,
            Phase::Decode => route::context_band(position + 1),
        };
        let class = PlanClass {
            phase,
            precision,
            rows,
            context,
            output,
        };
        let plan = Arc::new(device.suit(Plan::record(&model, class)));
        let vocabulary = model.config.vocab_size as u32;
        let tokens: Vec<u32> = (0..rows as u32)
            .map(|i| (position as u32 + i).wrapping_mul(2_654_435_761) % vocabulary)
            .collect();
        let differences = compare_device(
            &mut reference,
            &mut right,
            &mut device,
            &mut sessions,
            &plan,
            (&tokens, vocabulary),
        )
        .expect("both run");
        for difference in &differences {
            assert!(
                difference.excess <= 1.0,
                "{class}, {switches:?}: {difference:?}"
            );
        }
    }
}

#[test]
fn each_step_agrees_with_the_reference() {
    for directory in [
        fixture("oracle-small-b").expect("in the repository"),
        repository("models/lily-tiny"),
    ] {
        let checkpoint = checkpoint(&directory);
        check_steps(&checkpoint, Precision::F32, Switches::default());
        // On tensor operations, where there are any, and on simdgroup matrices.
        for off in ["", "packed-codes", "tensor-operations"] {
            let mut switches = Switches::default();
            assert!(switches.turn_off(off) || off.is_empty());
            check_steps(&checkpoint, Precision::Bf16, switches);
        }
    }
}

/// How work is encoded changes no number.
#[test]
fn encodings_give_the_same_bytes() {
    let directory = repository("models/lily-tiny");
    let mut first: Option<Vec<u32>> = None;
    for (serial_encoding, stage_timing) in [(false, false), (true, false), (false, true)] {
        let options = MetalOptions {
            stage_timing,
            ..MetalOptions::default()
        };
        let switches = Switches {
            serial_encoding,
            ..Switches::default()
        };
        let device = device_with(&checkpoint(&directory), options, switches);
        let mut runner = runner_of(device, Precision::Bf16);
        let tokens: Vec<u32> = (0..200).map(|i| i * 17 % 1000).collect();
        let mut logits = runner.prefill(&tokens, 128);
        logits.extend(runner.greedy(7, 20).1);
        let bits: Vec<u32> = logits.iter().map(|x| x.to_bits()).collect();
        let equal = first.as_ref().is_none_or(|first| *first == bits);
        assert!(equal, "serial {serial_encoding}, timed {stage_timing}");
        first.get_or_insert(bits);
    }
}
