//! Answers decoded together are those that each request gets alone.

mod support;

use lily_checkpoint::Checkpoint;
use lily_cpu::{CpuDevice, CpuOptions};
use lily_engine::{
    CancelFlag, Engine, EngineError, EngineOptions, FinishReason, Generation, GenerationRequest,
    Precision, SamplingError, SamplingParameters, TextModel,
};
use lily_plan::{Device, DeviceError, Phase, Plan, PlanClass, PlanOutput};
use lily_testing::{Seen, Watched};
use std::sync::{Arc, Mutex};
use std::time::Instant;
use support::{question, tiny};

fn engine(
    precision: Precision,
    interfere: impl FnOnce(&mut Watched<CpuDevice>),
) -> (Engine, Arc<Mutex<Seen>>) {
    let checkpoint = Arc::new(Checkpoint::open(&tiny()).unwrap());
    let text = Arc::new(TextModel::load(&checkpoint).unwrap());
    let device = CpuDevice::new(checkpoint, &CpuOptions::default()).unwrap();
    let model = device.model().clone();
    let mut watched = Watched::new(device);
    interfere(&mut watched);
    let seen = watched.seen.clone();
    let options = EngineOptions {
        precision,
        prefill_chunk: 16,
        ..EngineOptions::default()
    };
    (
        Engine::new(Box::new(watched), model, text, options).unwrap(),
        seen,
    )
}

fn start(engine: &mut Engine, request: &GenerationRequest) -> Generation {
    engine
        .start(None, request.clone(), CancelFlag::default())
        .unwrap()
}

/// A turn of those that are not at their end.
fn turn(engine: &mut Engine, all: &mut [Generation]) {
    let mut left: Vec<&mut Generation> = all
        .iter_mut()
        .filter(|generation| generation.finish_reason().is_none())
        .collect();
    for progress in engine.advance_all(&mut left) {
        progress.unwrap();
    }
}

fn is_over(all: &[Generation]) -> bool {
    all.iter()
        .all(|generation| generation.finish_reason().is_some())
}

/// Greedy, sampled with penalties, host-chosen with log-probabilities; short and long prompts; ends by a token, by a text
/// and by length.
fn requests(engine: &Engine) -> Vec<GenerationRequest> {
    let warm = |seed| SamplingParameters {
        temperature: 1.0,
        seed,
        ..SamplingParameters::default()
    };
    let samplings = [
        SamplingParameters::default(),
        warm(1),
        SamplingParameters {
            frequency_penalty: 0.5,
            top_p: 0.95,
            ..warm(2)
        },
        SamplingParameters {
            logprobs: Some(2),
            ..warm(3)
        },
        SamplingParameters {
            repetition_penalty: 1.2,
            top_k: Some(20),
            ..warm(4)
        },
    ];
    let questions = [
        "What is the capital of Norway?",
        "Tell me a story about a fox and a lantern.",
        "Hello",
        "Tell me a long story about a fox, a lantern, a king and the sea, and how they came to be friends.",
    ];
    (0..11)
        .map(|index| GenerationRequest {
            prompt: question(engine, questions[index % questions.len()]),
            sampling: samplings[index % samplings.len()].clone(),
            max_tokens: Some(8 + 5 * index),
            stop: if index == 6 {
                vec![" the".into()]
            } else {
                Vec::new()
            },
            ..GenerationRequest::default()
        })
        .collect()
}

/// One is given up half way and one joins late.
#[test]
fn answers_given_together_are_those_given_alone() {
    const GIVEN_UP: usize = 5;
    for precision in [Precision::Bf16, Precision::F32] {
        let (mut engine, seen) = engine(precision, |_| {});
        let requests = requests(&engine);
        let alone: Vec<Generation> = requests
            .iter()
            .map(|request| {
                let generation = start(&mut engine, request);
                engine.run(generation, |_| {}).unwrap()
            })
            .collect();
        let steps_alone = std::mem::take(&mut seen.lock().unwrap().executed);
        assert!(steps_alone.iter().all(|rows| *rows == 1));

        let (last, first) = requests.split_last().unwrap();
        let mut together: Vec<Generation> = Vec::new();
        let cancel = CancelFlag::default();
        for (index, request) in first.iter().enumerate() {
            let cancel = if index == GIVEN_UP {
                cancel.clone()
            } else {
                CancelFlag::default()
            };
            together.push(engine.start(None, request.clone(), cancel).unwrap());
        }
        for round in 0.. {
            match round {
                12 => cancel.cancel(),
                15 => together.push(start(&mut engine, last)),
                _ => {}
            }
            turn(&mut engine, &mut together);
            if round > 15 && is_over(&together) {
                break;
            }
        }
        for (index, (found, expected)) in together.iter().zip(&alone).enumerate() {
            let (mut tokens, mut reason) = (expected.tokens(), expected.finish_reason());
            if index == GIVEN_UP {
                assert!(found.tokens().len() > 2 && found.tokens().len() < tokens.len());
                tokens = &tokens[..found.tokens().len()];
                reason = Some(&FinishReason::Cancelled);
            }
            assert_eq!(found.tokens(), tokens, "{precision}: answer {index}");
            assert_eq!(found.finish_reason(), reason, "{precision}: answer {index}");
            let decoded = found.timings().decoded_tokens;
            assert_eq!(decoded, tokens.len() - 1, "{precision}: answer {index}");
        }
        let steps = std::mem::take(&mut seen.lock().unwrap().executed);
        for rows in [1, 2, 4, 8] {
            assert!(steps.contains(&rows), "steps of {rows}: {steps:?}");
        }
        let rows: usize = steps.iter().sum();
        let missing = alone[GIVEN_UP].tokens().len() - together[GIVEN_UP].tokens().len();
        assert_eq!(rows, steps_alone.len() - missing, "each token once");
        let is_shared = steps.len() * 3 < rows * 2;
        assert!(is_shared, "{} steps of {rows} rows", steps.len());
    }
}

/// Answers that come to token 77 again and again, and one that does not.
fn pair(engine: &Engine) -> [GenerationRequest; 3] {
    [Some(77), None, None].map(|token| GenerationRequest {
        prompt: question(engine, "Tell me a story."),
        sampling: SamplingParameters {
            logit_bias: token.map(|token| (token, 100.0)).into_iter().collect(),
            ..SamplingParameters::default()
        },
        max_tokens: Some(6),
        ..GenerationRequest::default()
    })
}

#[test]
fn a_row_with_nothing_to_choose_fails_alone() {
    for logprobs in [None, Some(1)] {
        let (mut engine, seen) = engine(Precision::Bf16, |watched| watched.poison = Some(77));
        let [poisoned, mut sound, _] = pair(&engine);
        sound.sampling.logprobs = logprobs;
        let expected = start(&mut engine, &sound);
        let expected = engine.run(expected, |_| {}).unwrap();
        seen.lock().unwrap().executed.clear();
        let mut all = [&poisoned, &sound].map(|request| {
            let mut request = request.clone();
            request.sampling.logprobs = logprobs;
            start(&mut engine, &request)
        });
        let mut errors = Vec::new();
        while !is_over(&all) {
            let mut left: Vec<&mut Generation> = all.iter_mut().collect();
            let progress = engine.advance_all(&mut left);
            let indices = 0..progress.len();
            let failed = indices.zip(progress);
            errors.extend(failed.filter_map(|(index, progress)| Some((index, progress.err()?))));
        }
        assert!(
            matches!(
                &errors[..],
                [(0, EngineError::Sampling(SamplingError::NotFinite { .. }))]
            ),
            "{errors:?}"
        );
        assert!(seen.lock().unwrap().executed.contains(&2));
        assert_eq!(all[0].finish_reason(), Some(&FinishReason::Failed));
        let [failed, sound] = all;
        assert_eq!(sound.tokens(), expected.tokens());
        // The step was taken back before it was made again.
        let held = [&poisoned.prompt[..], &[77]].concat();
        assert_eq!(failed.into_session().tokens(), held);
    }
}

#[test]
fn what_fails_on_the_device_fails_its_batch_alone() {
    let (mut engine, _) = engine(Precision::Bf16, |watched| watched.failing = Some(2));
    let mut all = pair(&engine).map(|request| start(&mut engine, &request));
    let mut failed = [false; 3];
    while !is_over(&all) {
        let mut left: Vec<&mut Generation> = all.iter_mut().collect();
        for (failed, progress) in failed.iter_mut().zip(engine.advance_all(&mut left)) {
            *failed |= matches!(progress, Err(EngineError::Device(DeviceError::Failed(_))));
        }
    }
    assert_eq!(failed, [true, true, false]);
    assert_eq!(all[2].finish_reason(), Some(&FinishReason::Length));
    assert_eq!(all[2].tokens().len(), 6);
}

/// Working memory is there for the largest batch, also where it takes more than a chunk of a prompt.
#[test]
fn batches_fit_in_the_working_memory() {
    let checkpoint = Arc::new(Checkpoint::open(&tiny()).unwrap());
    let text = Arc::new(TextModel::load(&checkpoint).unwrap());
    let device = || CpuDevice::new(checkpoint.clone(), &CpuOptions::default()).unwrap();
    let model = device().model().clone();
    let options = EngineOptions {
        prefill_chunk: 1,
        context: Some(4_096),
        ..EngineOptions::default()
    };
    let engine = Engine::new(Box::new(device()), model.clone(), text, options).unwrap();
    for output in [
        PlanOutput::Token,
        PlanOutput::Sampled,
        PlanOutput::AllLogits,
    ] {
        let class = PlanClass {
            phase: Phase::Decode,
            precision: Precision::Bf16,
            rows: 8,
            context: 4_096,
            output,
        };
        let bytes = device().working_bytes(&Plan::record(&model, class));
        assert!(bytes <= engine.memory().working, "{output:?}: {bytes}");
    }
}

/// Tokens a second of sessions that are decoded together, by those of the same sessions one after the other:
/// `cargo test --release -p lily-engine --test batches -- --ignored --nocapture`.
#[test]
#[ignore = "a measurement"]
fn how_much_faster_batches_are() {
    const TOKENS: usize = 100;
    let (mut engine, _) = engine(Precision::Bf16, |_| {});
    let mut seconds = |count: usize, is_together: bool| {
        // Each says something else, by experts of its own.
        let mut all: Vec<Generation> = (0..count)
            .map(|index| {
                let mut request = GenerationRequest {
                    prompt: question(&engine, "Tell me a story."),
                    max_tokens: Some(TOKENS),
                    stop_ids: Some(Vec::new()),
                    ..GenerationRequest::default()
                };
                request.sampling.temperature = 1.0;
                request.sampling.seed = index as u64;
                start(&mut engine, &request)
            })
            .collect();
        while all.iter().any(|generation| generation.tokens().is_empty()) {
            turn(&mut engine, &mut all);
        }
        let start = Instant::now();
        while !is_over(&all) {
            match is_together {
                true => turn(&mut engine, &mut all),
                false => all
                    .iter_mut()
                    .for_each(|one| turn(&mut engine, std::slice::from_mut(one))),
            }
        }
        start.elapsed().as_secs_f64()
    };
    for count in [1, 2, 4, 8] {
        let mut ratios: Vec<f64> = (0..5)
            .map(|_| seconds(count, false) / seconds(count, true))
            .collect();
        ratios.sort_by(f64::total_cmp);
        let rate = (count * (TOKENS - 1)) as f64 / seconds(count, true);
        println!("{count}: {:.2} times, {rate:.0} tokens/s", ratios[2]);
    }
}
