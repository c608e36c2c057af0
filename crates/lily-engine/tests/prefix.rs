//! Prompts that go on from what an earlier one had computed.

mod support;

use lily_engine::{CancelFlag, Engine, EngineError, Generation, GenerationRequest, Session};
use support::engine_with;

const CHUNK: usize = 16;

fn engine() -> Engine {
    engine_with(|options| {
        options.prefill_chunk = CHUNK;
        options.snapshots = true;
    })
}

fn prompt(length: usize, salt: u32) -> Vec<u32> {
    (0..length as u32)
        .map(|at| (at * 37 + salt) % 4_000)
        .collect()
}

fn answer(engine: &mut Engine, session: Option<Session>, prompt: &[u32]) -> Generation {
    let request = GenerationRequest {
        prompt: prompt.to_vec(),
        max_tokens: Some(6),
        stop_ids: Some(Vec::new()),
        ..GenerationRequest::default()
    };
    let generation = engine
        .start(session, request, CancelFlag::default())
        .unwrap();
    engine.run(generation, |_| {}).unwrap()
}

/// Where a session can go back to: what of a prompt it makes use of that parts from its own at each position.
fn positions(session: &Session, prompt: &[u32]) -> Vec<usize> {
    let mut found: Vec<usize> = (1..=prompt.len())
        .map(|length| {
            let mut other = prompt[..length].to_vec();
            other.push(4_001);
            session.usable(&other)
        })
        .collect();
    found.dedup();
    found
}

#[test]
fn snapshots_lie_before_the_end_and_here_and_there() {
    let mut engine = engine();
    let long = prompt(20 * CHUNK + 5, 1);
    let before = engine.memory().sessions;
    let session = answer(&mut engine, None, &long).into_session();
    let expected: Vec<usize> = [0, 8, 16, 18, 19, 20].map(|chunk| chunk * CHUNK).to_vec();
    assert_eq!(positions(&session, &long), expected);
    assert_eq!(session.reusable(), 20 * CHUNK);
    // What is asked again goes on before its last token, and a prompt that is a part from before that.
    assert_eq!(session.usable(&long), 20 * CHUNK);
    assert_eq!(session.usable(&long[..20 * CHUNK]), 19 * CHUNK);
    assert_eq!(session.usable(&long[..3]), 0);
    assert_eq!(session.usable(&[]), 0);
    // Their memory is counted, and comes back.
    assert!(engine.memory().sessions > before);
    drop(session);
    assert_eq!(engine.memory().sessions, before);
}

/// Longer, shorter, parted, asked again: as from the beginning, in tokens and in what was computed.
#[test]
fn answers_do_not_depend_on_what_was_kept() {
    let mut engine = engine();
    let first = prompt(10 * CHUNK + 3, 1);
    let longer = [first.clone(), prompt(40, 7)].concat();
    let parted = [first[..9 * CHUNK + 2].to_vec(), prompt(30, 9)].concat();
    let shorter = first[..8 * CHUNK + 1].to_vec();
    let mut session = Some(answer(&mut engine, None, &first).into_session());
    for (prompt, cached) in [
        (&longer, 10),
        // The ninth is no longer one of the last three.
        (&parted, 8),
        (&first, 9),
        (&first, 10),
        (&shorter, 8),
        (&prompt(50, 3), 0),
    ] {
        let found = answer(&mut engine, session.take(), prompt);
        let expected = answer(&mut engine, None, prompt);
        assert_eq!(found.timings().cached_tokens, cached * CHUNK);
        assert_eq!(
            found.timings().prefilled_tokens,
            prompt.len() - cached * CHUNK
        );
        assert_eq!(found.tokens(), expected.tokens());
        session = Some(found.into_session());
    }
}

/// What decode made of an answer is computed anew when it comes back as part of a prompt.
#[test]
fn an_answer_is_prefilled_when_it_comes_back() {
    let mut engine = engine();
    let first = prompt(4 * CHUNK - 2, 1);
    let generation = answer(&mut engine, None, &first);
    let next = [&first[..], generation.tokens(), &prompt(20, 5)].concat();
    let session = generation.into_session();
    assert!(
        session.tokens().len() > 4 * CHUNK,
        "decode has passed a chunk's end"
    );
    let found = answer(&mut engine, Some(session), &next);
    assert_eq!(found.timings().cached_tokens, 3 * CHUNK);
    assert_eq!(found.tokens(), answer(&mut engine, None, &next).tokens());
}

#[test]
fn a_session_is_copied_and_grows() {
    let mut engine = engine();
    let first = prompt(5 * CHUNK + 3, 1);
    let mut session = answer(&mut engine, None, &first).into_session();
    let other = [first[..4 * CHUNK + 1].to_vec(), prompt(30, 9)].concat();
    assert!(matches!(
        engine.fork(&mut session, 4 * CHUNK + 1, 200),
        Err(EngineError::NoSnapshot { position }) if position == 4 * CHUNK + 1
    ));
    let copy = engine.fork(&mut session, 4 * CHUNK, 200).unwrap();
    let found = answer(&mut engine, Some(copy), &other);
    assert_eq!(found.timings().cached_tokens, 4 * CHUNK);
    assert_eq!(found.tokens(), answer(&mut engine, None, &other).tokens());
    // The first is as it was, and has room for no more than its own answer.
    let longer = [first.clone(), prompt(100, 4)].concat();
    assert!(session.capacity() < longer.len());
    let found = answer(&mut engine, Some(session), &longer);
    assert_eq!(found.timings().cached_tokens, 5 * CHUNK);
    assert_eq!(found.tokens(), answer(&mut engine, None, &longer).tokens());
}
