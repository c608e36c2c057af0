//! Answers decoded together on the emulated device, by chains of runs that sessions share: each is what it is alone,
//! whoever comes, ends or is given up beside it.

mod common;

use common::device;
use lily_checkpoint::Checkpoint;
use lily_emulated::EmulatedOptions;
use lily_engine::{
    CancelFlag, Engine, EngineError, EngineOptions, FinishReason, Generation, GenerationRequest,
    SamplingError, SamplingParameters, TextModel,
};
use lily_testing::{Seen, Synthetic, Watched, repository};
use serde_json::json;
use std::sync::{Arc, Mutex};

/// A small model of random weights, with the words of the embedded one.
fn engine(poison: Option<u32>) -> (Engine, Arc<Mutex<Seen>>) {
    let words = Checkpoint::open(&repository("models/lily-tiny")).unwrap();
    let text = Arc::new(TextModel::load(&words).unwrap());
    let small = json!({ "hidden_size": 128, "vocab_size": words.config().vocab_size });
    let checkpoint = Synthetic::small(small).open();
    let device = device(&checkpoint, EmulatedOptions::default());
    let model = device.model().clone();
    let mut device = Watched::new(device);
    device.poison = poison;
    let seen = device.seen.clone();
    let options = EngineOptions {
        prefill_chunk: 16,
        context: Some(512),
        ..EngineOptions::default()
    };
    let engine = Engine::new(Box::new(device), model, text, options).unwrap();
    (engine, seen)
}

fn request(seed: u64, prompt: u32, max_tokens: usize) -> GenerationRequest {
    GenerationRequest {
        prompt: (0..prompt).map(|i| 100 + i * 37 % 1_000).collect(),
        sampling: SamplingParameters {
            temperature: 1.0,
            top_k: Some(40),
            seed,
            ..SamplingParameters::default()
        },
        max_tokens: Some(max_tokens),
        stop_ids: Some(Vec::new()),
        ..GenerationRequest::default()
    }
}

/// Begins an answer, in a session with room for another.
fn start(engine: &mut Engine, request: &GenerationRequest) -> Generation {
    start_with(engine, request, CancelFlag::default())
}

fn start_with(engine: &mut Engine, request: &GenerationRequest, cancel: CancelFlag) -> Generation {
    let session = engine.open_session(128).unwrap();
    let started = engine.start(Some(session), request.clone(), cancel);
    started.unwrap()
}

/// A turn of those that are not at their end; the errors, with whose they are.
fn turn(engine: &mut Engine, all: &mut [Generation]) -> Vec<(usize, EngineError)> {
    let left = all.iter_mut().enumerate();
    let left = left.filter(|(_, generation)| generation.finish_reason().is_none());
    let (indices, mut left): (Vec<usize>, Vec<&mut Generation>) = left.unzip();
    let progress = indices.into_iter().zip(engine.advance_all(&mut left));
    progress
        .filter_map(|(index, progress)| Some((index, progress.err()?)))
        .collect()
}

fn is_over(all: &[Generation]) -> bool {
    let mut all = all.iter();
    all.all(|generation| generation.finish_reason().is_some())
}

/// Four answers at a time, so that rows have the bits that they have alone: one is given up, one ends by a token that the
/// device knows, others by length, and another two join late. What the sessions hold afterwards is what they hold alone.
#[test]
fn chains_are_shared_and_nobody_can_tell() {
    let (mut engine, seen) = engine(None);
    let mut requests = [
        request(1, 3, 20),
        request(2, 20, 12),
        request(3, 20, 24),
        request(4, 5, 24),
        request(5, 18, 12),
        request(6, 7, 10),
    ];
    requests[0].sampling = SamplingParameters::default();
    requests[3].sampling.frequency_penalty = 0.5;
    let mut alone = Vec::new();
    for (index, request) in requests.iter_mut().enumerate() {
        if index == 2 {
            // The first token behind the ninth that was not there before.
            let whole = start(&mut engine, request);
            let whole = engine.run(whole, |_| {}).unwrap();
            let tokens = whole.tokens();
            let is_new = |at: &usize| !tokens[..*at].contains(&tokens[*at]);
            let stop = tokens[(9..20).find(is_new).unwrap()];
            request.stop_ids = Some(vec![stop]);
        }
        let generation = start(&mut engine, request);
        alone.push(engine.run(generation, |_| {}).unwrap());
    }
    *seen.lock().unwrap() = Seen::default();

    let cancel = CancelFlag::default();
    let mut together: Vec<Generation> = requests[..3]
        .iter()
        .map(|request| start(&mut engine, request))
        .collect();
    together.push(start_with(&mut engine, &requests[3], cancel.clone()));
    for round in 0.. {
        if round == 8 {
            cancel.cancel();
        }
        if round == 14 || round == 17 {
            together.push(start(&mut engine, &requests[together.len()]));
        }
        assert!(turn(&mut engine, &mut together).is_empty());
        if round > 17 && is_over(&together) {
            break;
        }
    }
    for (index, (found, expected)) in together.into_iter().zip(alone).enumerate() {
        let mut tokens = expected.tokens().to_vec();
        let mut reason = expected.finish_reason().cloned();
        if index == 3 {
            assert!(found.tokens().len() > 5 && found.tokens().len() < tokens.len());
            tokens.truncate(found.tokens().len());
            reason = Some(FinishReason::Cancelled);
        }
        assert_eq!(found.tokens(), tokens, "answer {index}");
        assert_eq!(found.finish_reason(), reason.as_ref(), "answer {index}");
        // The next turn of each conversation: what its session holds, and more.
        let next = [found, expected].map(|generation| {
            let session = generation.into_session();
            let more = GenerationRequest {
                prompt: [session.tokens(), &[300, 301]].concat(),
                ..request(9, 1, 4)
            };
            let cached = session.tokens().len();
            let next = engine.start(Some(session), more, CancelFlag::default());
            let next = engine.run(next.unwrap(), |_| {}).unwrap();
            assert_eq!(next.timings().cached_tokens, cached);
            next.tokens().to_vec()
        });
        if index != 3 {
            assert_eq!(next[0], next[1], "behind answer {index}");
        }
    }
    let seen = seen.lock().unwrap();
    // A chain of four, until the first of them goes.
    let of = |runs: &[usize], rows: usize| runs.iter().filter(|run| **run == rows).count();
    assert!(seen.executed.is_empty(), "{seen:?}");
    assert_eq!(of(&seen.begun, 4), 1, "{seen:?}");
    assert!(of(&seen.followed, 4) >= 4, "{seen:?}");
}

#[test]
fn a_row_with_nothing_to_choose_leaves_the_chain_alone() {
    let (mut engine, seen) = engine(Some(77));
    let mut poisoned = request(1, 3, 6);
    poisoned.sampling.logit_bias = vec![(77, 100.0)];
    let requests = [request(2, 9, 6), poisoned];
    let expected = start(&mut engine, &requests[0]);
    let expected = engine.run(expected, |_| {}).unwrap();
    let mut all = requests.map(|request| start(&mut engine, &request));
    let mut errors = Vec::new();
    while !is_over(&all) {
        errors.extend(turn(&mut engine, &mut all));
    }
    assert!(
        matches!(
            &errors[..],
            [(1, EngineError::Sampling(SamplingError::NotFinite { .. }))]
        ),
        "{errors:?}"
    );
    assert_eq!(all[0].tokens(), expected.tokens());
    let seen = seen.lock().unwrap();
    assert!(
        seen.begun.contains(&2) && seen.followed.contains(&2),
        "{seen:?}"
    );
    assert_eq!(seen.executed, [1], "its logits, for the sampler");
}
