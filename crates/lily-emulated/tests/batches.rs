//! Runs that are cut into command buffers: which dispatches go where, and that it changes nothing.

mod common;

use common::device;
use lily_checkpoint::Checkpoint;
use lily_emulated::EmulatedOptions;
use lily_gpu::batch::{Batch, Limits, batches};
use lily_gpu::{Argument, Dispatch};
use lily_plan::{Launch, Phase, PlanOutput, Precision};
use lily_testing::{Runner, Synthetic};
use serde_json::json;
use std::sync::Arc;

const LIMITS: Limits = Limits {
    dispatches: 128,
    seconds: 1.0,
    operations_a_second: 1e9,
    bytes_a_second: 1e9,
};

fn checkpoint() -> Arc<Checkpoint> {
    Synthetic::small(json!({ "hidden_size": 128 })).open()
}

fn runner(
    precision: Precision,
    limits: Option<Limits>,
) -> Runner<lily_gpu::GpuDevice<lily_emulated::Emulated>> {
    let options = EmulatedOptions {
        limits,
        keep_reports: true,
        ..EmulatedOptions::default()
    };
    let device = device(&checkpoint(), options);
    let model = device.model().clone();
    Runner::new(device, model, precision)
}

/// Logits of a prompt behind 900 positions and of a token behind that, and how many dispatches ran.
fn answer(precision: Precision, limits: Option<Limits>) -> (Vec<u32>, usize) {
    let mut runner = runner(precision, limits);
    runner.session.seek(900).unwrap();
    let tokens: Vec<u32> = (0..75).collect();
    let plan = runner.plan(Phase::Prefill, tokens.len(), PlanOutput::AllLogits);
    let mut logits = runner.run(&plan, &tokens).logits;
    logits.extend(runner.feed(&[9]));
    let ran = runner.device.with_gpu(|gpu| gpu.take_reports().len());
    (logits.iter().map(|logit| logit.to_bits()).collect(), ran)
}

#[test]
fn cutting_changes_no_number() {
    for precision in [Precision::Bf16, Precision::F32] {
        let (expected, whole) = answer(precision, None);
        // So slow a machine that attention is cut as finely as its grid allows, and less finely.
        for operations_a_second in [1.0, 30e6] {
            let limits = Limits {
                operations_a_second,
                ..LIMITS
            };
            let (found, parts) = answer(precision, Some(limits));
            assert!(parts > whole, "{precision}: {parts} of {whole}");
            assert!(found == expected, "{precision}, {operations_a_second}");
        }
        let (found, same) = answer(precision, Some(LIMITS));
        assert!(found == expected && same == whole);
    }
}

/// The batches of a prompt of 75 tokens behind 900 positions.
fn cut<T>(
    limits: &Limits,
    look: impl FnOnce(
        &[Vec<Dispatch<'_, lily_emulated::Emulated>>],
        &[Batch<'_, lily_emulated::Emulated>],
    ) -> T,
) -> T {
    let mut runner = runner(Precision::Bf16, None);
    runner.session.seek(900).unwrap();
    let plan = runner.plan(Phase::Prefill, 75, PlanOutput::LastLogits);
    let launch = Launch {
        tokens: &[3; 75],
        sessions: &mut [runner.session.as_mut()],
        preset: &[],
        token_limit: u32::MAX,
        sampling: &[],
        observer: None,
    };
    let result = runner.device.with_stages(&plan, launch, |_, stages| {
        Ok(look(stages, &batches(stages, limits)))
    });
    result.unwrap()
}

#[test]
fn as_many_stages_go_together_as_fit() {
    // Nothing else counts but the number of dispatches; then nothing but the time.
    let endless = Limits {
        seconds: f64::INFINITY,
        ..LIMITS
    };
    let of_few = Limits {
        dispatches: 5,
        ..endless
    };
    let of_little = Limits {
        seconds: 0.02,
        ..LIMITS
    };
    for limits in [
        endless,
        of_few,
        of_little,
        Limits {
            dispatches: 0,
            ..endless
        },
    ] {
        cut(&limits, |stages, found| {
            let mut next = 0;
            for batch in found {
                let range = match batch {
                    Batch::Stages(range) => range.clone(),
                    Batch::Part(_) => continue,
                };
                assert!(range.start >= next && !range.is_empty());
                let count =
                    |stages: &[Vec<Dispatch<'_, _>>]| stages.iter().map(Vec::len).sum::<usize>();
                let seconds = |stages: &[Vec<Dispatch<'_, _>>]| {
                    let all = stages.iter().flatten();
                    all.map(|dispatch| limits.seconds(dispatch.cost))
                        .sum::<f64>()
                };
                let fits = |range: std::ops::Range<usize>| {
                    count(&stages[range.clone()]) <= limits.dispatches
                        && seconds(&stages[range]) <= limits.seconds * 1.000_001
                };
                assert!(range.len() == 1 || fits(range.clone()), "{range:?}");
                // One more would not have fitted, or is cut.
                if let Some(Batch::Stages(other)) = found
                    .iter()
                    .find(|other| matches!(other, Batch::Stages(other) if other.start == range.end))
                {
                    assert!(!fits(range.start..other.start + 1), "{range:?}");
                }
                next = range.end;
            }
            assert_eq!(next, stages.len());
        });
    }
    cut(&endless, |stages, found| {
        let fitting = stages.iter().map(Vec::len).sum::<usize>() <= 128;
        assert!(fitting && matches!(found, [Batch::Stages(_)]));
    });
}

/// The parts of a dispatch are its grid, each threadgroup once, in order.
#[test]
fn parts_make_up_the_whole() {
    // The attention of 75 rows and 2 heads of a group is 5 threadgroups along the first axis.
    let limits = Limits {
        seconds: 0.004,
        bytes_a_second: f64::INFINITY,
        ..LIMITS
    };
    cut(&limits, |stages, found| {
        let parts: Vec<_> = found
            .iter()
            .filter_map(|batch| match batch {
                Batch::Part(stage) => Some(&stage[0]),
                Batch::Stages(_) => None,
            })
            .collect();
        let whole = stages
            .iter()
            .flatten()
            .find(|dispatch| dispatch.divisible.is_some())
            .unwrap();
        let cut = whole.divisible.unwrap();
        assert!(parts.len() > 1, "{}", limits.seconds(whole.cost));
        let mut next = 0;
        for part in parts {
            let Argument::Word(first) = part.arguments[cut.first] else {
                panic!("a word says where a part begins");
            };
            assert_eq!(first, next);
            next += part.grid[cut.axis];
        }
        assert_eq!(next, whole.grid[cut.axis]);
    });
}
