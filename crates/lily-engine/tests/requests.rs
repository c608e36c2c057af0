//! What a request may ask for: sampling, stop texts, log-probabilities, limits, cancellation, and what is
//! refused.

mod support;

use lily_engine::{
    CancelFlag, Conversation, EngineError, FinishReason, GenerationRequest, Progress,
    SamplingParameters,
};
use serde_json::json;
use support::{answer, engine, engine_with, question, try_engine};

const STORY: &str = "Tell me a story about a fox and a lantern.";
const NORWAY: &str = "What is the capital of Norway?";

fn sampled(seed: u64) -> SamplingParameters {
    SamplingParameters {
        temperature: 1.0,
        top_p: 0.95,
        seed,
        ..SamplingParameters::default()
    }
}

#[test]
fn the_same_seed_gives_the_same_text_and_another_another() {
    let mut engine = engine();
    let prompt = question(&engine, STORY);
    let mut tell = |seed| {
        let request = GenerationRequest {
            prompt: prompt.clone(),
            sampling: sampled(seed),
            max_tokens: Some(40),
            ..GenerationRequest::default()
        };
        answer(&mut engine, request).unwrap().text
    };
    let first = tell(1);
    assert_eq!(tell(1), first);
    let others: Vec<String> = (2..6).map(&mut tell).collect();
    assert!(others.iter().any(|other| *other != first), "{first}");
}

#[test]
fn a_stop_text_ends_the_answer_and_is_not_part_of_it() {
    let mut engine = engine();
    let prompt = question(&engine, NORWAY);
    // "The capital of Norway is Oslo.": the stop text spans tokens.
    for (stop, expected) in [
        ("of Nor", "The capital "),
        ("Oslo", "The capital of Norway is "),
        ("T", ""),
    ] {
        let request = GenerationRequest {
            prompt: prompt.clone(),
            stop: vec!["never".into(), stop.into()],
            ..GenerationRequest::default()
        };
        let answer = answer(&mut engine, request).unwrap();
        assert_eq!(answer.text, expected);
        let reason = answer.generation.finish_reason();
        assert_eq!(reason, Some(&FinishReason::StopText(stop.to_string())));
    }
}

#[test]
fn text_held_back_for_a_stop_text_that_never_came_is_given_at_the_end() {
    let mut engine = engine();
    let prompt = question(&engine, NORWAY);
    let request = GenerationRequest {
        prompt,
        stop: vec!["Oslo.!".into()],
        ..GenerationRequest::default()
    };
    assert_eq!(
        answer(&mut engine, request).unwrap().text,
        "The capital of Norway is Oslo."
    );
}

#[test]
fn log_probabilities_come_with_alternatives() {
    let mut engine = engine();
    let prompt = question(&engine, NORWAY);
    let sampling = SamplingParameters {
        logprobs: Some(5),
        ..SamplingParameters::default()
    };
    let request = GenerationRequest {
        prompt,
        sampling,
        ..GenerationRequest::default()
    };
    let answer = answer(&mut engine, request).unwrap();
    assert_eq!(answer.text, "The capital of Norway is Oslo.");
    for event in &answer.tokens {
        let logprob = event.logprob.unwrap();
        assert!(
            logprob <= 0.0 && logprob > -0.7,
            "greedy, and sure of itself: {logprob}"
        );
        assert_eq!(event.alternatives.len(), 5);
        assert_eq!(event.alternatives[0], (event.token, logprob));
        assert!(
            event
                .alternatives
                .windows(2)
                .all(|pair| pair[0].1 >= pair[1].1)
        );
    }
}

#[test]
fn a_bias_and_penalties_change_the_choice() {
    let mut engine = engine();
    let prompt = question(&engine, NORWAY);
    let run = |engine: &mut _, sampling| {
        let request = GenerationRequest {
            prompt: prompt.clone(),
            sampling,
            max_tokens: Some(12),
            ..GenerationRequest::default()
        };
        answer(engine, request)
            .unwrap()
            .generation
            .tokens()
            .to_vec()
    };
    let plain = run(&mut engine, SamplingParameters::default());
    let banned = SamplingParameters {
        logit_bias: vec![(plain[0], -100.0)],
        ..SamplingParameters::default()
    };
    assert_ne!(run(&mut engine, banned)[0], plain[0]);
    let forced = SamplingParameters {
        logit_bias: vec![(77, 100.0)],
        ..SamplingParameters::default()
    };
    assert_eq!(run(&mut engine, forced)[..3], [77, 77, 77]);
    let penalised = SamplingParameters {
        logit_bias: vec![(77, 30.0), (78, 29.0)],
        presence_penalty: 2.0,
        ..SamplingParameters::default()
    };
    assert_eq!(run(&mut engine, penalised)[..2], [77, 78]);
}

#[test]
fn the_most_tokens_and_the_end_of_the_context_end_an_answer() {
    let mut engine = engine_with(|options| options.context = Some(40));
    let prompt = question(&engine, STORY);
    let request = GenerationRequest {
        prompt: prompt.clone(),
        max_tokens: Some(3),
        ..GenerationRequest::default()
    };
    let done = answer(&mut engine, request).unwrap().generation;
    assert_eq!(
        (done.tokens().len(), done.finish_reason()),
        (3, Some(&FinishReason::Length))
    );

    let request = GenerationRequest {
        prompt: prompt.clone(),
        ..GenerationRequest::default()
    };
    let done = answer(&mut engine, request).unwrap().generation;
    assert_eq!(done.tokens().len(), 40 - prompt.len());
    assert_eq!(done.finish_reason(), Some(&FinishReason::Length));

    let none = GenerationRequest {
        prompt,
        max_tokens: Some(0),
        ..GenerationRequest::default()
    };
    let done = answer(&mut engine, none).unwrap().generation;
    assert_eq!(
        (done.tokens().len(), done.finish_reason()),
        (0, Some(&FinishReason::Length))
    );
}

#[test]
fn a_generation_can_be_cancelled_between_chunks_and_between_tokens() {
    let mut engine = engine_with(|options| options.prefill_chunk = 8);
    let prompt = question(&engine, STORY);
    for steps in [1, 2, 8] {
        let cancel = CancelFlag::default();
        let request = GenerationRequest {
            prompt: prompt.clone(),
            ..GenerationRequest::default()
        };
        let mut generation = engine.start(None, request, cancel.clone()).unwrap();
        for _ in 0..steps {
            assert!(!matches!(
                engine.advance(&mut generation).unwrap(),
                Progress::Finished(_)
            ));
        }
        let position = generation.tokens().len();
        cancel.cancel();
        let Progress::Finished(finished) = engine.advance(&mut generation).unwrap() else {
            panic!("cancelled, but still at work")
        };
        assert_eq!(finished.reason, FinishReason::Cancelled);
        assert_eq!(
            generation.tokens().len(),
            position,
            "nothing more was chosen"
        );
    }
    // What a cancelled generation held is free again.
    assert_eq!(engine.memory().sessions, 0);
}

#[test]
fn a_session_that_goes_on_computes_only_what_is_new() {
    let mut engine = engine();
    let first = question(&engine, "My name is Ingrid.");
    let request = GenerationRequest {
        prompt: first.clone(),
        ..GenerationRequest::default()
    };
    let session = engine.open_session(400).unwrap();
    let generation = engine
        .start(Some(session), request, CancelFlag::default())
        .unwrap();
    let generation = engine.run(generation, |_| {}).unwrap();
    let mut prompt = first;
    prompt.extend(generation.tokens());
    let more = "\n<|im_start|>user\nWhat is my name?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n";
    prompt.extend(engine.text().tokenizer().encode(more).unwrap());
    let request = GenerationRequest {
        prompt: prompt.clone(),
        ..GenerationRequest::default()
    };

    let held = generation.tokens().len() + generation.prompt_tokens() - 1;
    let session = generation.into_session();
    assert_eq!(
        session.tokens().len(),
        held,
        "the token that ended the answer is not computed"
    );
    let request = GenerationRequest {
        max_tokens: Some(20),
        ..request
    };
    let mut text = String::new();
    let continued = engine
        .start(Some(session), request.clone(), CancelFlag::default())
        .unwrap();
    let continued = engine
        .run(continued, |progress| {
            if let Progress::Token(token) = progress {
                text.push_str(&token.text);
            }
        })
        .unwrap();
    assert_eq!(continued.timings().cached_tokens, held);
    assert_eq!(continued.timings().prefilled_tokens, prompt.len() - held);
    assert!(text.contains("Ingrid"), "{text}");
    // As if it had been computed from the beginning.
    let anew = answer(&mut engine, request).unwrap();
    assert_eq!(anew.generation.timings().cached_tokens, 0);
    assert_eq!(anew.text, text);

    // A prompt that does not go on from what the session holds begins anew.
    let session = continued.into_session();
    let other = question(&engine, NORWAY);
    let request = GenerationRequest {
        prompt: other,
        max_tokens: Some(20),
        ..GenerationRequest::default()
    };
    let other = engine
        .start(Some(session), request, CancelFlag::default())
        .unwrap();
    assert_eq!(other.timings().cached_tokens, 0);
}

#[test]
fn a_prompt_beyond_the_context_is_refused_with_the_numbers() {
    let mut engine = engine_with(|options| options.context = Some(16));
    let prompt = question(&engine, STORY);
    let length = prompt.len();
    let request = GenerationRequest {
        prompt,
        ..GenerationRequest::default()
    };
    let error = answer(&mut engine, request).err().unwrap();
    let message = error.to_string();
    assert!(matches!(error, EngineError::ContextExceeded { .. }));
    for number in [length.to_string(), "16".into(), "32768".into()] {
        assert!(message.contains(&number), "{message}");
    }
}

#[test]
fn a_request_beyond_the_memory_is_refused_with_the_numbers_before_it_is_taken() {
    let mut engine = engine_with(|options| options.memory_limit = Some(32 << 20));
    let free = engine.memory().limit - engine.memory().working;
    let first = engine.open_session(1_000).unwrap();
    let used = engine.memory().sessions;
    assert!(used > 0 && used < free);
    let prompt = question(&engine, STORY);
    let request = GenerationRequest {
        prompt,
        ..GenerationRequest::default()
    };
    // To the end of the context: 32,768 positions of 2 KiB.
    let error = answer(&mut engine, request.clone()).err().unwrap();
    assert!(
        matches!(
            error,
            EngineError::MemoryExceeded {
                positions: 32_768,
                ..
            }
        ),
        "{error}"
    );
    assert!(error.to_string().contains("32768 tokens"), "{error}");
    assert_eq!(engine.memory().sessions, used, "nothing stays reserved");
    // Fewer tokens fit.
    let request = GenerationRequest {
        max_tokens: Some(10),
        ..request
    };
    assert!(answer(&mut engine, request).is_ok());
    drop(first);
    assert_eq!(engine.memory().sessions, 0);
}

#[test]
fn an_engine_that_cannot_work_does_not_start() {
    let error = try_engine(|options| options.memory_limit = Some(1 << 20))
        .err()
        .unwrap();
    assert!(
        matches!(error, EngineError::WorkingMemoryExceeded { .. }),
        "{error}"
    );
    for context in [0, 32_769] {
        let error = try_engine(|options| options.context = Some(context))
            .err()
            .unwrap();
        assert!(matches!(error, EngineError::Context { .. }), "{error}");
        assert!(error.to_string().contains("32768"), "{error}");
    }
}

#[test]
fn a_prompt_that_cannot_fit_is_refused_before_it_is_cut_up() {
    let engine = engine();
    let text = "word ".repeat(4_000_000);
    let started = std::time::Instant::now();
    let error = engine.text().encode(&text, engine.context()).err().unwrap();
    assert!(matches!(
        error,
        EngineError::PromptTooLong {
            bytes: 20_000_000,
            context: 32_768
        }
    ));
    assert!(started.elapsed().as_secs_f64() < 0.5);
    assert!(engine.text().encode("a short one", 32_768).unwrap().len() < 10);
}

#[test]
fn images_are_refused_by_name_and_not_answered_as_if_seen() {
    let engine = engine();
    for part in [
        json!({"type": "image_url", "image_url": {"url": "data:,"}}),
        json!({"image": "x"}),
        json!({"type": "video", "video": "x"}),
        json!({"type": "input_audio", "input_audio": {}}),
    ] {
        let parts = json!([{"type": "text", "text": "What is this?"}, part]);
        let conversation = Conversation {
            messages: vec![json!({"role": "user", "content": parts})],
            ..Conversation::default()
        };
        let message = engine.text().render(&conversation).unwrap_err().to_string();
        assert!(message.contains("only text is read"), "{message}");
    }
    let text = json!([{"type": "text", "text": "Hi"}, {"text": " there"}]);
    let conversation = Conversation {
        messages: vec![json!({"role": "user", "content": text})],
        ..Conversation::default()
    };
    assert!(
        engine
            .text()
            .render(&conversation)
            .unwrap()
            .contains("Hi there")
    );
}

#[test]
fn bad_requests_are_refused_by_name() {
    let mut engine = engine();
    let mut refused = |prompt: Vec<u32>, sampling: SamplingParameters| {
        let request = GenerationRequest {
            prompt,
            sampling,
            ..GenerationRequest::default()
        };
        answer(&mut engine, request).err().unwrap().to_string()
    };
    let plain = SamplingParameters::default;
    assert!(refused(vec![], plain()).contains("empty"));
    assert!(refused(vec![1, 4_096], plain()).contains("4096"));
    assert!(
        refused(
            vec![1],
            SamplingParameters {
                top_p: 0.0,
                ..plain()
            }
        )
        .contains("top_p")
    );
    let hot = SamplingParameters {
        temperature: f32::NAN,
        ..plain()
    };
    assert!(refused(vec![1], hot).contains("temperature"));
}

/// The shortest prompt there is.
#[test]
fn a_prompt_of_one_token_is_answered() {
    let mut engine = engine();
    let request = GenerationRequest {
        prompt: vec![100],
        max_tokens: Some(4),
        ..GenerationRequest::default()
    };
    assert_eq!(
        answer(&mut engine, request)
            .unwrap()
            .generation
            .tokens()
            .len(),
        4
    );
}
