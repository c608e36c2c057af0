//! Sampling as a step of a plan on the CPU: what the sampler chooses, and what it refuses, row by row.

mod common;

use common::{native, on, reference};
use lily_cpu::{CpuDevice, CpuOptions};
use lily_plan::{
    Device, DeviceError, ElementType, Launch, NO_TOKEN, Operation, Phase, Plan, PlanBuilder,
    PlanClass, PlanOutput, Precision, SamplingRow, SessionState,
};
use lily_sampling::{Sampler, SamplingParameters, uniform};
use lily_testing::{Runner, Synthetic};
use serde_json::json;
use std::sync::Arc;

fn runner(options: &CpuOptions) -> Runner<CpuDevice> {
    on(Synthetic::small(json!({})).open(), Precision::F32, options)
}

/// The tokens that a plan of nothing but sampling chooses from rows of logits.
fn sample(
    runner: &mut Runner<CpuDevice>,
    rows: &[Vec<f32>],
    limit: u32,
    sampling: &[SamplingRow<'_>],
) -> Result<Vec<u32>, DeviceError> {
    let class = PlanClass {
        phase: Phase::Decode,
        precision: Precision::F32,
        rows: rows.len(),
        context: 4_096,
        output: PlanOutput::Sampled,
    };
    let mut builder = PlanBuilder::new(&runner.model, class);
    let columns = rows[0].len();
    let logits = builder.scratch("logits", rows.len(), columns, ElementType::F32);
    let adjusted = builder.scratch("adjusted", rows.len(), columns, ElementType::F32);
    builder.push(Operation::Sample { logits, adjusted });
    let plan = Arc::new(builder.finish(None, Vec::new()));
    let mut sessions: Vec<Box<dyn SessionState>> = rows
        .iter()
        .map(|_| runner.device.new_session(Precision::F32, 64).unwrap())
        .collect();
    let mut borrowed: Vec<&mut dyn SessionState> = Vec::new();
    for session in &mut sessions {
        borrowed.push(session.as_mut());
    }
    let launch = Launch {
        tokens: &vec![0; rows.len()],
        sessions: &mut borrowed,
        preset: &[(logits, rows.concat())],
        token_limit: limit,
        sampling,
        observer: None,
    };
    let outcome = runner.device.execute(&plan, launch)?;
    assert!(outcome.logits.is_empty());
    Ok(outcome.tokens)
}

fn warm() -> SamplingParameters {
    SamplingParameters {
        temperature: 1.0,
        ..SamplingParameters::default()
    }
}

fn row(parameters: &SamplingParameters) -> SamplingRow<'_> {
    SamplingRow {
        parameters,
        ..SamplingRow::default()
    }
}

#[track_caller]
fn expect(logits: Vec<f32>, limit: u32, row: SamplingRow<'_>, expected: u32) {
    for options in [native(), reference()] {
        let chosen = sample(
            &mut runner(&options),
            std::slice::from_ref(&logits),
            limit,
            &[row],
        )
        .unwrap();
        assert_eq!(chosen, [expected]);
    }
}

#[test]
fn without_parameters_and_at_temperature_0_the_lowest_of_the_best_is_chosen() {
    let logits = vec![1.0, 3.0, 2.0, 3.0, 4.0, 5.0, 4.0, 5.0];
    for (limit, expected) in [(u32::MAX, 5), (6, 5), (5, 4), (4, 1), (1, 0)] {
        expect(logits.clone(), limit, SamplingRow::default(), expected);
    }
    let mut runner = runner(&native());
    let rows = [logits.clone(), vec![0.0; 8]];
    // Rows beyond the end of the parameters are greedy.
    let chosen = sample(&mut runner, &rows, u32::MAX, &[]).unwrap();
    assert_eq!(chosen, [5, 0]);
}

#[test]
fn narrow_filters_leave_the_lowest_of_the_best() {
    let logits = vec![1.0, 3.0, 2.0, 3.0];
    for step in 0..20 {
        for parameters in [
            SamplingParameters {
                top_k: Some(1),
                ..warm()
            },
            SamplingParameters {
                top_p: f32::MIN_POSITIVE,
                ..warm()
            },
            SamplingParameters {
                top_k: Some(2),
                top_p: 0.5,
                ..warm()
            },
            SamplingParameters {
                min_p: 0.999,
                top_k: Some(1),
                temperature: 100.0,
                ..warm()
            },
        ] {
            let row = SamplingRow {
                step,
                ..row(&parameters)
            };
            expect(logits.clone(), u32::MAX, row, 1);
        }
    }
}

#[test]
fn a_mask_of_one_token_leaves_that_one() {
    let mut logits = vec![0.0; 70];
    logits[3] = 50.0;
    let mut allowed = [0_u32; 3];
    allowed[2] = 1 << 1;
    for parameters in [SamplingParameters::default(), warm()] {
        let row = SamplingRow {
            allowed: Some(&allowed),
            ..row(&parameters)
        };
        expect(logits.clone(), 70, row, 65);
        expect(logits.clone(), 65, row, NO_TOKEN);
        let mut none = logits.clone();
        none[65] = f32::NEG_INFINITY;
        expect(none, 70, row, NO_TOKEN);
    }
}

#[test]
fn what_the_sampler_refuses_has_no_token() {
    for parameters in [SamplingParameters::default(), warm()] {
        for broken in [f32::NAN, f32::INFINITY] {
            let logits = vec![0.0, 1.0, broken, 2.0];
            expect(logits.clone(), u32::MAX, row(&parameters), NO_TOKEN);
            // Behind the limit it is nobody's.
            let first = SamplingParameters {
                top_k: Some(1),
                ..parameters.clone()
            };
            expect(logits, 2, row(&first), 1);
        }
        expect(
            vec![f32::NEG_INFINITY; 4],
            u32::MAX,
            row(&parameters),
            NO_TOKEN,
        );
        let mut one = vec![f32::NEG_INFINITY; 4];
        one[2] = -3e38;
        expect(one, u32::MAX, row(&parameters), 2);
    }
}

#[test]
fn rows_are_sampled_each_by_its_own_parameters_as_the_sampler_does() {
    let rows: Vec<Vec<f32>> = (0..8)
        .map(|seed| {
            (0..100)
                .map(|at| (uniform(seed, at) * 40.0).floor() as f32 / 4.0 - 5.0)
                .collect()
        })
        .collect();
    let mut samplers: Vec<Sampler> = (0..8)
        .map(|index| {
            let parameters = SamplingParameters {
                temperature: 0.25 * index as f32,
                top_k: (index % 2 == 0).then_some(20),
                top_p: 0.95,
                min_p: 0.01 * index as f32,
                repetition_penalty: 1.0 + 0.1 * index as f32,
                presence_penalty: 0.5,
                frequency_penalty: 0.25,
                logit_bias: vec![(index, 1.5), (50, -2.0)],
                seed: u64::from(index),
                ..SamplingParameters::default()
            };
            Sampler::new(parameters, 100, 97, &[1, 2, 3]).unwrap()
        })
        .collect();
    for options in [native(), reference()] {
        let mut runner = runner(&options);
        for _ in 0..20 {
            let expected: Vec<u32> = samplers
                .iter_mut()
                .zip(&rows)
                .map(|(sampler, logits)| sampler.sample(logits, None).unwrap().token)
                .collect();
            let sampling: Vec<SamplingRow<'_>> =
                samplers.iter().map(|sampler| sampler.row(None)).collect();
            let chosen = sample(&mut runner, &rows, 97, &sampling).unwrap();
            assert_eq!(chosen, expected);
            for (sampler, token) in samplers.iter_mut().zip(chosen) {
                sampler.accept(token);
            }
        }
    }
}

#[test]
fn a_launch_refuses_what_a_sampler_would() {
    let mut runner = runner(&native());
    let logits = [vec![0.0; 64]];
    let wrong = SamplingParameters {
        top_p: 0.0,
        ..warm()
    };
    let short = SamplingRow {
        allowed: Some(&[1]),
        ..SamplingRow::default()
    };
    for (row, expected) in [(row(&wrong), "top_p"), (short, "a mask of 1 words")] {
        match sample(&mut runner, &logits, 64, &[row]) {
            Err(DeviceError::Launch(reason)) => {
                assert!(
                    reason.starts_with("row 0: ") && reason.contains(expected),
                    "{reason}"
                );
            }
            other => panic!("{other:?}"),
        }
    }
}

/// A recorded plan ends with the choice, in one dispatch more than the plan of logits, and keeps its logits.
#[test]
fn a_decode_plan_samples_in_its_last_step() {
    let mut runner = runner(&native());
    let plan = |output| {
        let class = PlanClass {
            phase: Phase::Decode,
            precision: Precision::F32,
            rows: 1,
            context: 4_096,
            output,
        };
        Arc::new(Plan::record(&runner.model, class))
    };
    let (sampled, logits) = (plan(PlanOutput::Sampled), plan(PlanOutput::AllLogits));
    assert_eq!(sampled.steps.len(), logits.steps.len() + 1);
    assert!(sampled.chooses_token() && sampled.logits.is_none());
    assert_eq!(sampled.steps.last().unwrap().label(), "sample");
    let expected = runner.run(&plan(PlanOutput::Token), &[5]);
    assert!(runner.session.step_back());
    let found = runner.run(&sampled, &[5]);
    assert_eq!(found.tokens, expected.tokens);
    assert!(found.logits.is_empty());
}
