//! The engine at its edges: limits met exactly, sessions used to their end, parameters one by one.

mod support;

use lily_checkpoint::Checkpoint;
use lily_cpu::{CpuDevice, CpuOptions};
use lily_engine::{
    CancelFlag, Engine, EngineError, EngineOptions, FinishReason, GenerationRequest, PlanOutput,
    Progress, SamplingError, SamplingParameters, TextModel,
};
use lily_plan::{
    Device, DeviceDescription, DeviceError, Launch, NO_TOKEN, Outcome, Phase, Plan, Precision,
    RunAhead, SessionBytes, SessionState,
};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use support::{answer, engine, engine_with, question, tiny};

const STORY: &str = "Tell me a story about a fox and a lantern.";
const NORWAY: &str = "What is the capital of Norway?";

// ---- requests.rs ----

/// More tokens than the context has room for are asked for: the context ends the answer.
#[test]
fn an_answer_does_not_outgrow_the_context() {
    let mut engine = engine_with(|options| options.context = Some(40));
    let prompt = question(&engine, STORY);
    let request = GenerationRequest {
        prompt: prompt.clone(),
        max_tokens: Some(1_000),
        ..GenerationRequest::default()
    };
    let done = answer(&mut engine, request).unwrap().generation;
    assert_eq!(done.tokens().len(), 40 - prompt.len());
    assert_eq!(done.finish_reason(), Some(&FinishReason::Length));
    assert_eq!(done.into_session().capacity(), 40);
}

#[test]
fn a_prompt_must_leave_room_for_one_token() {
    let prompt = question(&engine(), STORY);
    let length = prompt.len();
    let request = GenerationRequest {
        prompt,
        ..GenerationRequest::default()
    };
    let mut full = engine_with(|options| options.context = Some(length));
    let error = answer(&mut full, request.clone()).err().unwrap();
    assert!(
        matches!(error, EngineError::ContextExceeded { .. }),
        "{error}"
    );
    let mut one = engine_with(|options| options.context = Some(length + 1));
    let done = answer(&mut one, request).unwrap().generation;
    assert_eq!(done.tokens().len(), 1);
}

/// A session with exactly the positions that a request needs is used, to its last position but one (the
/// last token of an answer is not computed).
#[test]
fn a_session_is_used_to_its_end() {
    let mut engine = engine();
    let prompt = question(&engine, STORY);
    let session = engine.open_session(prompt.len() + 5).unwrap();
    let request = |prompt: &[u32], max_tokens| GenerationRequest {
        prompt: prompt.to_vec(),
        max_tokens: Some(max_tokens),
        ..GenerationRequest::default()
    };
    let first = engine
        .start(Some(session), request(&prompt, 2), CancelFlag::default())
        .unwrap();
    let first = engine.run(first, |_| {}).unwrap();
    let longer = [&prompt[..], first.tokens()].concat();
    let second = engine
        .start(
            Some(first.into_session()),
            request(&longer, 3),
            CancelFlag::default(),
        )
        .unwrap();
    assert_eq!(second.timings().cached_tokens, prompt.len() + 1);
    let second = engine.run(second, |_| {}).unwrap();
    assert_eq!(second.timings().decoded_tokens, 2);
    assert_eq!(second.tokens().len(), 3);
}

/// The last token of the prompt is always computed: a session that holds the whole prompt, or more than
/// that, begins anew and answers the same.
#[test]
fn the_same_prompt_again_is_answered_again() {
    let mut engine = engine();
    let prompt = question(&engine, NORWAY);
    for max_tokens in [1, 4] {
        let request = GenerationRequest {
            prompt: prompt.clone(),
            max_tokens: Some(max_tokens),
            ..GenerationRequest::default()
        };
        let session = engine.open_session(prompt.len() + 4).unwrap();
        let first = engine
            .start(Some(session), request.clone(), CancelFlag::default())
            .unwrap();
        let first = engine.run(first, |_| {}).unwrap();
        let chosen = first.tokens().to_vec();
        let session = first.into_session();
        assert_eq!(session.tokens().len(), prompt.len() + max_tokens - 1);
        let again = engine
            .start(Some(session), request, CancelFlag::default())
            .unwrap();
        assert_eq!(again.timings().cached_tokens, 0);
        let again = engine.run(again, |_| {}).unwrap();
        assert_eq!(again.tokens(), chosen);
    }
}

/// Each penalty by itself acts on every token, not only on the first: what the device chooses is taken
/// only where nothing else is asked for.
#[test]
fn each_penalty_acts_without_the_others() {
    let mut engine = engine();
    let prompt = question(&engine, STORY);
    let mut run = |sampling| {
        let request = GenerationRequest {
            prompt: prompt.clone(),
            sampling,
            max_tokens: Some(40),
            ..GenerationRequest::default()
        };
        let done = answer(&mut engine, request).unwrap();
        done.generation.tokens().to_vec()
    };
    let plain = SamplingParameters::default;
    let without = run(plain());
    for penalised in [
        SamplingParameters {
            repetition_penalty: 3.0,
            ..plain()
        },
        SamplingParameters {
            presence_penalty: 2.0,
            ..plain()
        },
        SamplingParameters {
            frequency_penalty: 2.0,
            ..plain()
        },
    ] {
        let found = run(penalised.clone());
        assert_ne!(found, without, "{penalised:?}");
        // With log-probabilities the device never chooses.
        let on_host = SamplingParameters {
            logprobs: Some(0),
            ..penalised
        };
        assert_eq!(found, run(on_host));
    }
}

/// What a session held leaves no trace when it begins anew.
#[test]
fn a_session_that_begins_anew_answers_as_a_new_one() {
    let mut engine = engine();
    let request = |prompt| GenerationRequest {
        prompt,
        sampling: SamplingParameters {
            logprobs: Some(0),
            ..SamplingParameters::default()
        },
        max_tokens: Some(4),
        ..GenerationRequest::default()
    };
    let (story, norway) = (question(&engine, STORY), question(&engine, NORWAY));
    let expected = answer(&mut engine, request(norway.clone())).unwrap().tokens;
    let session = engine.open_session(400).unwrap();
    let first = engine
        .start(Some(session), request(story), CancelFlag::default())
        .unwrap();
    let first = engine.run(first, |_| {}).unwrap();
    let session = first.into_session();
    let other = engine
        .start(Some(session), request(norway), CancelFlag::default())
        .unwrap();
    assert_eq!(other.timings().cached_tokens, 0);
    let mut tokens = Vec::new();
    engine
        .run(other, |progress| {
            if let Progress::Token(event) = progress {
                tokens.push(event.clone());
            }
        })
        .unwrap();
    // Log-probabilities too, to the bit.
    assert_eq!(tokens, expected);
}

#[test]
fn an_answer_that_has_ended_cannot_be_cancelled() {
    let mut engine = engine();
    let cancel = CancelFlag::default();
    let request = GenerationRequest {
        prompt: question(&engine, NORWAY),
        max_tokens: Some(2),
        ..GenerationRequest::default()
    };
    let mut generation = engine.start(None, request, cancel.clone()).unwrap();
    while generation.finish_reason().is_none() {
        engine.advance(&mut generation).unwrap();
    }
    cancel.cancel();
    let Progress::Finished(finished) = engine.advance(&mut generation).unwrap() else {
        panic!("it has ended")
    };
    assert_eq!(finished.reason, FinishReason::Length);
}

#[test]
fn any_of_the_stop_tokens_ends_an_answer() {
    let mut engine = engine();
    let prompt = question(&engine, NORWAY);
    let run = |engine: &mut Engine, stop_ids| {
        let request = GenerationRequest {
            prompt: prompt.clone(),
            max_tokens: Some(6),
            stop_ids: Some(stop_ids),
            ..GenerationRequest::default()
        };
        answer(engine, request).unwrap()
    };
    let whole = run(&mut engine, vec![]);
    let stop = whole.tokens[3].token;
    let stopped = run(&mut engine, vec![4_000, stop]);
    assert_eq!(stopped.generation.tokens().len(), 4);
    assert_eq!(
        stopped.generation.finish_reason(),
        Some(&FinishReason::StopToken(stop))
    );
    // The token belongs to the answer, its text does not.
    let text: String = whole.tokens[..3]
        .iter()
        .map(|event| event.text.as_str())
        .collect();
    assert_eq!(stopped.text, text);
}

/// Half a character at the end of an answer becomes a replacement character, and that may be a stop text.
#[test]
fn a_stop_text_may_be_complete_only_at_the_end() {
    let mut engine = engine();
    // The first byte of a character of two.
    let half = engine.text().tokenizer().id_of("\u{c3}").unwrap();
    let mut run = |stop: &[&str]| {
        let request = GenerationRequest {
            prompt: vec![100],
            sampling: SamplingParameters {
                logit_bias: vec![(half, 100.0)],
                ..SamplingParameters::default()
            },
            max_tokens: Some(1),
            stop: stop.iter().map(ToString::to_string).collect(),
            ..GenerationRequest::default()
        };
        let answer = answer(&mut engine, request).unwrap();
        (answer.text, answer.generation.finish_reason().cloned())
    };
    assert_eq!(run(&[]), ("\u{fffd}".into(), Some(FinishReason::Length)));
    let stop = FinishReason::StopText("\u{fffd}".into());
    assert_eq!(run(&["\u{fffd}"]), (String::new(), Some(stop)));
}

/// Chunks end on multiples of the chunk length, counted from the beginning of the sequence.
#[test]
fn chunks_lie_on_an_absolute_grid() {
    let mut engine = engine_with(|options| options.prefill_chunk = 16);
    let tokens: Vec<u32> = (100..140).collect();
    let mut session = engine.open_session(40).unwrap();
    let (mut done, mut ends) = (0, Vec::new());
    // Five tokens alone first, as another request would leave them.
    for end in [5, 40, 40, 40] {
        let rest = &tokens[done..end];
        let (rows, outcome) = engine
            .prefill_chunk(&mut session, rest, PlanOutput::LastLogits)
            .unwrap();
        done += rows;
        ends.push(done);
        // Only the last chunk computes logits.
        assert_eq!(outcome.logits.is_empty(), done < end);
    }
    assert_eq!(ends, [5, 16, 32, 40]);
    assert_eq!(session.tokens(), tokens);

    let request = GenerationRequest {
        prompt: tokens,
        max_tokens: Some(1),
        ..GenerationRequest::default()
    };
    let timings = answer(&mut engine, request).unwrap().generation.timings();
    assert_eq!((timings.cached_tokens, timings.prefilled_tokens), (0, 40));
}

#[test]
fn the_repetition_penalty_counts_the_prompt() {
    let mut engine = engine();
    let mut first = |prompt| {
        let request = GenerationRequest {
            prompt,
            sampling: SamplingParameters {
                logit_bias: vec![(77, 91.0), (78, 80.0)],
                repetition_penalty: 2.0,
                ..SamplingParameters::default()
            },
            max_tokens: Some(1),
            ..GenerationRequest::default()
        };
        answer(&mut engine, request).unwrap().generation.tokens()[0]
    };
    assert_eq!(first(vec![100, 101]), 77);
    assert_eq!(first(vec![77, 101]), 78);
}

#[test]
fn a_text_as_long_as_the_context_is_scored() {
    let mut engine = engine_with(|options| options.context = Some(8));
    let text: Vec<u32> = (100..110).collect();
    assert_eq!(
        engine.score(&text[..8], &text[1..9], |_| {}).unwrap().len(),
        8
    );
    let error = engine.score(&text[..9], &text[1..], |_| {}).err().unwrap();
    assert!(
        matches!(error, EngineError::ContextExceeded { .. }),
        "{error}"
    );
}

// ---- score.rs: a file of its own ----

/// Scores are the log-probabilities that the same tokens had when they were generated.
#[test]
fn scores_are_those_of_the_generation() {
    let mut engine = engine_with(|options| {
        options.precision = Precision::F32;
        options.prefill_chunk = 16;
    });
    let prompt = question(&engine, NORWAY);
    let request = GenerationRequest {
        prompt: prompt.clone(),
        sampling: SamplingParameters {
            temperature: 1.0,
            seed: 3,
            logprobs: Some(1),
            ..SamplingParameters::default()
        },
        max_tokens: Some(20),
        stop_ids: Some(Vec::new()),
        ..GenerationRequest::default()
    };
    let generated = answer(&mut engine, request).unwrap().tokens;
    assert_eq!(generated.len(), 20);
    let mut text = prompt.clone();
    text.extend(generated.iter().map(|event| event.token));
    let mut heard = Vec::new();
    let scores = engine
        .score(&text[..text.len() - 1], &text[1..], |done| heard.push(done))
        .unwrap();
    assert_eq!(scores.len(), text.len() - 1);
    assert_eq!(
        heard,
        [16, 32, text.len() - 1].map(|end| end.min(text.len() - 1))
    );
    for (score, event) in scores[prompt.len() - 1..].iter().zip(&generated) {
        let logprob = f64::from(event.logprob.unwrap());
        assert!(
            (score.logprob - logprob).abs() < 1e-3,
            "{score:?}, {event:?}"
        );
        assert_eq!(score.top, event.alternatives[0].0);
    }
    assert_eq!(engine.memory().sessions, 0);
}

// ---- plans.rs ----

/// The band of a decode plan holds the token that is decoded.
#[test]
fn decode_plans_hold_their_position() {
    let mut engine = engine();
    let mut context = |position| {
        engine
            .decode_plan(position, PlanOutput::Token)
            .class
            .context
    };
    assert_eq!(
        [0, 4_095, 4_096, 32_767].map(&mut context),
        [4_096, 4_096, 32_768, 32_768]
    );
}

/// Every plan that runs fits in the working memory that was planned for.
#[test]
fn plans_fit_in_the_working_memory() {
    let seen: Arc<Mutex<Vec<Plan>>> = Arc::default();
    let recorder = seen.clone();
    let mut engine = engine_with(move |options| {
        options.prefill_chunk = 32;
        options.plan_transform = Some(Arc::new(move |plan: Plan| {
            recorder.lock().unwrap().push(plan.clone());
            plan
        }));
    });
    let prompt = [question(&engine, STORY), question(&engine, STORY)].concat();
    assert!(prompt.len() > 32);
    let request = GenerationRequest {
        prompt,
        max_tokens: Some(3),
        ..GenerationRequest::default()
    };
    answer(&mut engine, request).unwrap();
    let seen = seen.lock().unwrap();
    assert!(seen.len() >= 3);
    for plan in seen.iter() {
        // Four bytes an element, on the CPU.
        let bytes = plan.place(|_| 4).arena_bytes as u64;
        assert!(bytes <= engine.memory().working, "{}: {bytes}", plan.class);
    }
}

// ---- device.rs: what the engine asks of a device ----

/// The CPU device, looked at and interfered with.
struct Spy {
    device: CpuDevice,
    available: Option<u64>,
    token_limit: Arc<AtomicU32>,
    /// What the logits of decoded tokens become. Sampling then finds no token, as of logits that are no numbers.
    logits: Option<f32>,
}

impl Device for Spy {
    fn describe(&self) -> DeviceDescription {
        self.device.describe()
    }
    fn available_memory(&self) -> Option<u64> {
        self.available
    }
    fn session_bytes(&self, precision: Precision) -> SessionBytes {
        self.device.session_bytes(precision)
    }
    fn working_bytes(&self, plan: &Plan) -> u64 {
        self.device.working_bytes(plan)
    }
    fn can_sample(&self) -> bool {
        self.device.can_sample()
    }
    fn new_session(
        &self,
        precision: Precision,
        capacity: usize,
    ) -> Result<Box<dyn SessionState>, DeviceError> {
        self.device.new_session(precision, capacity)
    }
    fn execute(&mut self, plan: &Arc<Plan>, launch: Launch<'_>) -> Result<Outcome, DeviceError> {
        self.token_limit
            .store(launch.token_limit, Ordering::Relaxed);
        let mut outcome = self.device.execute(plan, launch)?;
        if let Some(value) = self.logits
            && plan.class.phase == Phase::Decode
        {
            outcome.logits.fill(value);
            outcome.tokens.fill(NO_TOKEN);
        }
        Ok(outcome)
    }
    fn run_ahead(&mut self) -> Result<&mut dyn RunAhead, &'static str> {
        self.device.run_ahead()
    }
}

fn spied(available: Option<u64>, logits: Option<f32>) -> (Engine, Arc<AtomicU32>) {
    let checkpoint = Arc::new(Checkpoint::open(&tiny()).unwrap());
    let text = Arc::new(TextModel::load(&checkpoint).unwrap());
    let device = CpuDevice::new(checkpoint, &CpuOptions::default()).unwrap();
    let model = device.model().clone();
    let token_limit = Arc::new(AtomicU32::new(0));
    let spy = Spy {
        device,
        available,
        token_limit: token_limit.clone(),
        logits,
    };
    let engine = Engine::new(Box::new(spy), model, text, EngineOptions::default()).unwrap();
    (engine, token_limit)
}

#[test]
fn nine_tenths_of_the_free_memory_are_taken() {
    let (engine, _) = spied(Some(1 << 30), None);
    assert_eq!(engine.memory().limit, (1 << 30) / 10 * 9);
    // A device that cannot tell refuses nothing.
    let (engine, _) = spied(None, None);
    assert!(engine.open_session(engine.context()).is_ok());
}

/// The vocabulary has 4,096 rows, the tokenizer 4,088 tokens.
#[test]
fn rows_without_a_token_are_never_chosen() {
    let (mut engine, token_limit) = spied(None, None);
    let mut session = engine.open_session(8).unwrap();
    engine.decode(&mut session, 5, PlanOutput::Token).unwrap();
    assert_eq!(token_limit.load(Ordering::Relaxed), 4_088);
}

#[test]
fn logits_that_are_no_numbers_are_an_error_not_a_token() {
    let (mut engine, _) = spied(None, Some(f32::NAN));
    for temperature in [0.0, 1.0] {
        let request = GenerationRequest {
            prompt: vec![100],
            max_tokens: Some(2),
            sampling: SamplingParameters {
                temperature,
                ..SamplingParameters::default()
            },
            ..GenerationRequest::default()
        };
        // Where the device samples and finds no token, the logits are computed anew for the sampler to look at.
        let error = answer(&mut engine, request).err().unwrap();
        assert!(
            matches!(
                error,
                EngineError::Sampling(SamplingError::NotFinite { count: 4_088, .. })
            ),
            "{error}"
        );
    }
    // And the generation is at its end.
    let request = GenerationRequest {
        prompt: vec![100],
        ..GenerationRequest::default()
    };
    let mut generation = engine.start(None, request, CancelFlag::default()).unwrap();
    while engine.advance(&mut generation).is_ok() {}
    let after = engine.advance(&mut generation).unwrap();
    assert!(
        matches!(&after, Progress::Finished(end) if end.reason == FinishReason::Failed),
        "{after:?}"
    );
}

#[test]
fn the_largest_session_fits_and_is_no_longer_than_the_context() {
    let engine = engine_with(|options| options.context = Some(40));
    assert_eq!(engine.largest_session(), 40);
    let engine = engine_with(|options| options.memory_limit = Some(32 << 20));
    let largest = engine.largest_session();
    assert!(largest < engine.context());
    assert!(engine.open_session(largest + 1).is_err());
    assert!(engine.open_session(largest).is_ok());
}

// ---- text.rs ----

/// The embedded model's text side with another generation_config.json, or none.
fn text_with(name: &str, generation_config: Option<&str>) -> TextModel {
    let folder = std::env::temp_dir().join(format!("lily-text-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    for entry in std::fs::read_dir(tiny()).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, folder.join(path.file_name().unwrap())).unwrap();
    }
    let file = folder.join("generation_config.json");
    match generation_config {
        Some(json) => std::fs::write(file, json).unwrap(),
        None => std::fs::remove_file(file).unwrap(),
    }
    let text = TextModel::load(&Checkpoint::open(&folder).unwrap()).unwrap();
    std::fs::remove_dir_all(folder).unwrap();
    text
}

#[test]
fn without_generation_defaults_config_json_says_where_to_stop() {
    assert_eq!(text_with("none", None).stop_ids(), [4_057, 4_055]);
    let other = text_with("other", Some(r#"{"eos_token_id": 7}"#));
    assert_eq!(other.stop_ids(), [7]);
}

#[test]
fn generation_defaults_become_sampling_parameters() {
    let sampling = |name: &str, json: &str| text_with(name, Some(json)).default_sampling();
    let given = sampling(
        "given",
        r#"{"do_sample": true, "temperature": 0.5, "top_k": 7, "top_p": 0.9}"#,
    );
    assert_eq!(
        (given.temperature, given.top_k, given.top_p),
        (0.5, Some(7), 0.9)
    );
    // As in transformers, 0 switches top-k off.
    let off = sampling("off", r#"{"top_k": 0}"#);
    assert_eq!((off.temperature, off.top_k), (1.0, None));
    assert!(off.validate(4_096).is_ok());
    let greedy = sampling("greedy", r#"{"do_sample": false, "temperature": 0.5}"#);
    assert_eq!(greedy, SamplingParameters::default());
}

/// A session too small for a request makes room for the one that takes its place.
#[test]
fn a_session_that_is_replaced_is_released_first() {
    let mut engine = engine_with(|options| options.memory_limit = Some(32 << 20));
    let largest = engine.largest_session();
    let prompt = question(&engine, NORWAY);
    let small = engine.open_session(largest / 2).unwrap();
    let request = GenerationRequest {
        max_tokens: Some(largest - prompt.len()),
        prompt,
        ..GenerationRequest::default()
    };
    let generation = engine
        .start(Some(small), request, CancelFlag::default())
        .unwrap();
    assert_eq!(generation.into_session().capacity(), largest);
}

/// Working memory is planned for the plans that run, not for those that were recorded.
#[test]
fn expanded_plans_fit_in_the_working_memory() {
    let seen: Arc<Mutex<Vec<Plan>>> = Arc::default();
    let recorder = seen.clone();
    let mut engine = engine_with(move |options| {
        options.prefill_chunk = 32;
        options.plan_transform = Some(Arc::new(move |plan: Plan| {
            let plan = plan.expanded();
            recorder.lock().unwrap().push(plan.clone());
            plan
        }));
    });
    let prompt = [question(&engine, STORY), question(&engine, STORY)].concat();
    let request = GenerationRequest {
        prompt,
        max_tokens: Some(3),
        ..GenerationRequest::default()
    };
    answer(&mut engine, request).unwrap();
    for plan in seen.lock().unwrap().iter() {
        // Four bytes an element, on the CPU.
        let bytes = plan.place(|_| 4).arena_bytes as u64;
        assert!(bytes <= engine.memory().working, "{}: {bytes}", plan.class);
    }
}
