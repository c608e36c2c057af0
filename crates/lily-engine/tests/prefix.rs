//! Prompts that go on from what an earlier one had computed.

mod support;

use lily_engine::{
    CancelFlag, Engine, EngineError, Generation, GenerationRequest, PlanOutput, PrefixCache,
    Session,
};
use support::engine_with;

const CHUNK: usize = 16;
/// `<|im_end|>`.
const END: u32 = 4_057;
/// What stands behind the last message, and not there any more in the next turn.
const OPENING: [u32; 3] = [5, 6, 7];

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
    let generation = engine
        .start(session, request(prompt), CancelFlag::default())
        .unwrap();
    engine.run(generation, |_| {}).unwrap()
}

fn request(prompt: &[u32]) -> GenerationRequest {
    GenerationRequest {
        prompt: prompt.to_vec(),
        max_tokens: Some(6),
        stop_ids: Some(Vec::new()),
        ..GenerationRequest::default()
    }
}

/// A message of so many tokens, its end included.
fn message(length: usize, salt: u32) -> Vec<u32> {
    [prompt(length - 1, salt), vec![END]].concat()
}

/// Messages, as a prompt for the next.
fn opened(messages: &[u32]) -> Vec<u32> {
    [messages, &OPENING].concat()
}

/// Answers with what the cache has of the prompt, as from the beginning in tokens and in every bit of the logits behind
/// them. Returns how many tokens of the prompt were computed, and the answer.
fn turn(engine: &mut Engine, cache: &mut PrefixCache, prompt: &[u32]) -> (usize, Vec<u32>) {
    let cancel = CancelFlag::default();
    let generation = cache.start(engine, &request(prompt), &cancel).unwrap();
    let found = engine.run(generation, |_| {}).unwrap();
    // By an engine of its own, which takes no memory of this one's.
    let mut other = self::engine();
    let expected = answer(&mut other, None, prompt);
    assert_eq!(found.tokens(), expected.tokens());
    let (computed, tokens) = (found.timings().prefilled_tokens, found.tokens().to_vec());
    let logits = |engine: &mut Engine, session: &mut Session| {
        let outcome = engine.decode(session, 8, PlanOutput::AllLogits).unwrap();
        let logits = outcome.logits.iter().map(|logit| logit.to_bits());
        logits.collect::<Vec<_>>()
    };
    let mut session = found.into_session();
    let expected = logits(&mut other, &mut expected.into_session());
    assert!(logits(engine, &mut session) == expected);
    cache.park(engine, session);
    (computed, tokens)
}

/// A turn that shares `shared` tokens with an earlier prompt, up to an end of a message: it computes the others, and less
/// than a quarter of a chunk again.
fn check_turn(
    engine: &mut Engine,
    cache: &mut PrefixCache,
    prompt: &[u32],
    shared: usize,
) -> Vec<u32> {
    let (computed, tokens) = turn(engine, cache, prompt);
    let new = prompt.len() - shared;
    assert!(
        (new..new + CHUNK / 4).contains(&computed),
        "{computed} for {new}"
    );
    tokens
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

/// The lengths of an agent's messages: short and long ones, over several chunks and less than a quarter of one.
const LENGTHS: [usize; 10] = [21, 3, 40, 17, 2, 66, 16, 9, 35, 5];

#[test]
fn a_turn_computes_what_is_new() {
    let (mut engine, mut cache) = (engine(), PrefixCache::default());
    let mut messages = message(75, 1);
    let mut shared = 0;
    let mut computed_in_all = 0;
    for (index, length) in LENGTHS.into_iter().enumerate() {
        messages.extend(message(length, 10 + index as u32));
        let prompt = opened(&messages);
        let before = shared;
        shared = messages.len();
        if index == 0 {
            assert_eq!(turn(&mut engine, &mut cache, &prompt).0, prompt.len());
        }
        // Asked once more, nothing is new but what stands behind the last message.
        let from = if index == 0 { shared } else { before };
        let answer = check_turn(&mut engine, &mut cache, &prompt, from);
        if index % 3 == 2 {
            check_turn(&mut engine, &mut cache, &prompt, shared);
        }
        computed_in_all += prompt.len() - from;
        messages.extend([&OPENING[..1], &answer, &[END]].concat());
    }
    let figures = cache.figures();
    assert_eq!((figures.requests, figures.hits), (14, 13));
    let computed = (figures.prompt_tokens - figures.cached_tokens) as usize;
    assert!(computed < 100 + computed_in_all + 14 * CHUNK / 4);
    // Another conversation begins as this one did, long before its end.
    let other = opened(&[message(75, 1), message(30, 77)].concat());
    check_turn(&mut engine, &mut cache, &other, 75);
}

#[test]
fn the_last_message_may_be_another_and_conversations_may_part() {
    let (mut engine, mut cache) = (engine(), PrefixCache::default());
    let system = message(90, 1);
    let mut both = [3, 4].map(|salt| [system.clone(), message(25, salt)].concat());
    turn(&mut engine, &mut cache, &opened(&both[0]));
    let mut shared = [both[0].len(), system.len()];
    for round in 0..3 {
        for (index, messages) in both.iter_mut().enumerate() {
            let prompt = opened(messages);
            let answer = check_turn(&mut engine, &mut cache, &prompt, shared[index]);
            shared[index] = messages.len();
            messages.extend([&OPENING[..1], &answer, &[END]].concat());
            let answered = messages.len();
            // The next is asked in two ways, the second of which goes on.
            for salt in [20, 30] {
                messages.truncate(answered);
                messages.extend(message(10 + 20 * round, salt + round as u32));
                check_turn(&mut engine, &mut cache, &opened(messages), shared[index]);
                shared[index] = answered;
            }
            shared[index] = messages.len();
        }
    }
    // Long after, a conversation begins as those did.
    let other = opened(&[system.clone(), message(30, 50)].concat());
    check_turn(&mut engine, &mut cache, &other, system.len());
}

/// What is parked takes its part of the budget, goes for what needs it, the one that was used longest ago first, and does
/// not go for what cannot be had.
#[test]
fn parked_sessions_live_in_the_memory_budget() {
    let bytes_of = |engine: &Engine| engine.memory().limit - engine.memory().working;
    let mut engine = engine_with(|options| {
        options.prefill_chunk = CHUNK;
        options.snapshots = true;
        options.context = Some(1_024);
        options.memory_limit = Some(64 << 20);
    });
    let mut cache = PrefixCache::default();
    let prompts: Vec<Vec<u32>> = (0..12).map(|salt| prompt(60, 100 * salt)).collect();
    let mut most = 0;
    for prompt in &prompts {
        turn(&mut engine, &mut cache, prompt);
        let figures = cache.figures();
        assert!(engine.memory().sessions <= bytes_of(&engine));
        assert!(figures.parked_bytes + figures.snapshot_bytes <= engine.memory().sessions);
        most = most.max(figures.parked);
    }
    let figures = cache.figures();
    assert!((2..12).contains(&most), "{most}");
    assert_eq!(figures.evictions as usize + figures.parked, 12);
    // The latest are there, and one that is used stays.
    let kept = &prompts[12 - figures.parked];
    assert!(turn(&mut engine, &mut cache, kept).0 < CHUNK);
    turn(&mut engine, &mut cache, &prompt(60, 7_777));
    assert!(turn(&mut engine, &mut cache, kept).0 < CHUNK);
    assert_eq!(turn(&mut engine, &mut cache, &prompts[0]).0, 60);
    // A request that no memory is enough for is refused, and costs nobody's session.
    let before = cache.figures();
    let mut too_large = request(&prompt(50, 4));
    too_large.max_tokens = None;
    let mut small = engine_with(|options| {
        options.prefill_chunk = CHUNK;
        options.snapshots = true;
        options.memory_limit = Some(64 << 20);
    });
    let mut others = PrefixCache::default();
    turn(&mut small, &mut others, &prompts[0]);
    let cancel = CancelFlag::default();
    let refused = others.start(&mut small, &too_large, &cancel);
    assert!(matches!(refused, Err(EngineError::MemoryExceeded { .. })));
    too_large.prompt.push(1_000_000);
    assert!(others.start(&mut small, &too_large, &cancel).is_err());
    assert_eq!(others.figures().parked, 1);
    assert_eq!(cache.figures(), before);
    drop(cache);
    assert_eq!(engine.memory().sessions, 0);
}

/// A request that has to wait for others' memory finds its session where it was.
#[test]
fn who_waits_for_memory_loses_nothing() {
    let mut engine = engine_with(|options| {
        options.prefill_chunk = CHUNK;
        options.snapshots = true;
        options.context = Some(4_096);
        options.memory_limit = Some(64 << 20);
    });
    let mut cache = PrefixCache::default();
    let first = prompt(60, 1);
    turn(&mut engine, &mut cache, &first);
    let others: Vec<Session> = std::iter::from_fn(|| engine.open_session(64).ok()).collect();
    assert!(!others.is_empty());
    let before = cache.figures();
    let mut long = request(&[first.clone(), prompt(20, 2)].concat());
    long.max_tokens = Some(2_000);
    let cancel = CancelFlag::default();
    for _ in 0..2 {
        let waits = cache.start(&mut engine, &long, &cancel);
        assert!(matches!(waits, Err(EngineError::MemoryExceeded { .. })));
        assert_eq!(cache.figures(), before);
    }
    drop(others);
    let generation = cache.start(&mut engine, &long, &cancel).unwrap();
    assert_eq!(generation.timings().cached_tokens, 48);
    // Parked, it takes what it holds, and not what it might have become.
    cancel.cancel();
    let session = engine.run(generation, |_| {}).unwrap().into_session();
    let active = engine.memory().sessions;
    cache.park(&mut engine, session);
    assert_eq!(cache.figures().parked_bytes, before.parked_bytes);
    assert!(engine.memory().sessions < active);
}
