//! Answers of the embedded model on the emulated device: sampled there, and by the host from the same device's logits;
//! with steps sent off ahead, and without.

mod common;

use common::device_with;
use lily_checkpoint::Checkpoint;
use lily_emulated::EmulatedOptions;
use lily_engine::{
    CancelFlag, Decode, Engine, EngineOptions, FinishReason, Generation, GenerationRequest, Pace,
    PlanOutput, Progress, SamplingParameters, Session, TextModel, TokenChoice,
};
use lily_gpu::Switches;
use lily_plan::SamplingRow;
use lily_testing::repository;
use std::sync::Arc;

fn engine(switches: Switches) -> Engine {
    let checkpoint = Arc::new(Checkpoint::open(&repository("models/lily-tiny")).unwrap());
    let device = device_with(&checkpoint, EmulatedOptions::default(), switches);
    let model = device.model().clone();
    let text = Arc::new(TextModel::load(&checkpoint).unwrap());
    let options = EngineOptions {
        context: Some(256),
        ..EngineOptions::default()
    };
    Engine::new(Box::new(device), model, text, options).unwrap()
}

fn request(engine: &Engine, max_tokens: usize) -> GenerationRequest {
    GenerationRequest {
        prompt: engine.text().encode("Once upon a time", 256).unwrap(),
        max_tokens: Some(max_tokens),
        // Greedily it says the same again and again.
        sampling: SamplingParameters {
            temperature: 1.0,
            frequency_penalty: 0.5,
            seed: 3,
            ..SamplingParameters::default()
        },
        ..GenerationRequest::default()
    }
}

fn answer(engine: &mut Engine, request: GenerationRequest) -> Generation {
    let generation = engine.start(None, request, CancelFlag::default()).unwrap();
    engine.run(generation, |_| {}).unwrap()
}

#[test]
fn the_device_samples_the_tokens_of_the_host() {
    let mut engine = engine(Switches::default());
    let warm = SamplingParameters {
        temperature: 1.0,
        seed: 11,
        ..SamplingParameters::default()
    };
    for sampling in [
        SamplingParameters {
            top_p: 0.95,
            top_k: Some(20),
            ..warm.clone()
        },
        SamplingParameters {
            temperature: 1.5,
            min_p: 0.01,
            top_p: 0.98,
            ..warm.clone()
        },
        SamplingParameters {
            repetition_penalty: 1.2,
            presence_penalty: 0.5,
            frequency_penalty: 0.25,
            logit_bias: vec![(300, 1.0)],
            ..warm.clone()
        },
    ] {
        let [found, expected] = [false, true].map(|host_sampling| {
            let request = GenerationRequest {
                sampling: sampling.clone(),
                host_sampling,
                ..request(&engine, 24)
            };
            answer(&mut engine, request)
        });
        assert_eq!(found.pace(), Pace::Ahead);
        assert_eq!(expected.pace(), Pace::TokenByToken("the host chooses"));
        assert_eq!(found.choice(), TokenChoice::DeviceSampling);
        assert_eq!(expected.choice(), TokenChoice::Host("as asked for"));
        assert_eq!(found.tokens(), expected.tokens(), "{sampling:?}");
        assert!(found.tokens().len() > 4, "{:?}", found.tokens());
    }
}

/// However an answer ends, the session then holds what it holds without steps ahead, and goes on from there.
#[test]
fn steps_ahead_change_nothing_that_can_be_seen() {
    let mut off = Switches::default();
    assert!(off.turn_off("run-ahead"));
    let mut seen = Vec::new();
    for switches in [Switches::default(), off] {
        let mut engine = engine(switches);
        let plain = request(&engine, 12);
        let plain = answer(&mut engine, plain);
        let paces = [Pace::Ahead, Pace::TokenByToken("it is switched off")];
        assert_eq!(plain.pace(), paces[usize::from(switches == off)]);
        let tokens = plain.tokens().to_vec();
        assert_eq!(plain.finish_reason(), Some(&FinishReason::Length));
        let is_new = |&at: &usize| !tokens[..at].contains(&tokens[at]);
        let stop = tokens[(4..11).find(is_new).unwrap()];
        let text = engine.text().tokenizer().decode(&tokens[..8]);
        let text: String = text.chars().skip(text.chars().count() - 4).collect();
        let requests = [
            request(&engine, 12),
            GenerationRequest {
                stop_ids: Some(vec![stop]),
                ..request(&engine, 12)
            },
            GenerationRequest {
                stop: vec![text],
                ..request(&engine, 12)
            },
        ];
        for request in requests {
            let session = engine.open_session(128).unwrap();
            let first = engine
                .start(Some(session), request.clone(), CancelFlag::default())
                .unwrap();
            let first = engine.run(first, |_| {}).unwrap();
            let reason = first.finish_reason().cloned();
            let tokens = first.tokens().to_vec();
            let session = first.into_session();
            // The next turn of a conversation: what the session holds, and more.
            let further = GenerationRequest {
                prompt: [session.tokens(), &[300, 301, 302]].concat(),
                ..request
            };
            let held = session.tokens().to_vec();
            let next = engine
                .start(Some(session), further, CancelFlag::default())
                .unwrap();
            let next = engine.run(next, |_| {}).unwrap();
            assert_eq!(next.timings().cached_tokens, held.len());
            seen.push((reason, tokens, held, next.tokens().to_vec()));
        }
        // Two answers in turns; one of them is given up half way, and its session begins anew.
        let cancel = CancelFlag::default();
        let mut pair = [cancel.clone(), CancelFlag::default()].map(|cancel| {
            let request = request(&engine, 8);
            engine.start(None, request, cancel).unwrap()
        });
        for round in 0..8 {
            for generation in &mut pair {
                engine.advance(generation).unwrap();
            }
            if round == 3 {
                cancel.cancel();
            }
        }
        let [given_up, mut whole] = pair;
        assert_eq!(given_up.finish_reason(), Some(&FinishReason::Cancelled));
        while !matches!(engine.advance(&mut whole).unwrap(), Progress::Finished(_)) {}
        assert_eq!(whole.tokens(), &tokens[..8]);
        let session = given_up.into_session();
        let held = session.tokens().to_vec();
        let again = engine
            .start(Some(session), request(&engine, 3), CancelFlag::default())
            .unwrap();
        let again = engine.run(again, |_| {}).unwrap();
        assert_eq!(again.tokens(), &tokens[..3]);
        seen.push((None, Vec::new(), held, Vec::new()));
    }
    let (ahead, one_by_one) = seen.split_at(4);
    assert_eq!(ahead, one_by_one);
    assert!(matches!(ahead[1].0, Some(FinishReason::StopToken(_))));
    assert!(matches!(ahead[2].0, Some(FinishReason::StopText(_))));
}

/// Whatever a caller decodes next, it gets what it would get of steps that are not sent off ahead.
#[test]
fn a_step_that_was_not_foreseen_is_computed_anew() {
    let mut off = Switches::default();
    assert!(off.turn_off("run-ahead"));
    let mut last = Vec::new();
    let found = [off, Switches::default()].map(|switches| {
        let mut engine = engine(switches);
        let mut session = engine.open_session(64).unwrap();
        let parameters = SamplingParameters {
            temperature: 1.0,
            seed: 8,
            ..SamplingParameters::default()
        };
        let mut step = 0;
        let mut decode =
            |session: &mut Session, token, draw, allowed: Option<&[u32]>, stops: &[u32]| {
                let decode = Decode {
                    output: PlanOutput::Sampled,
                    sampling: SamplingRow {
                        parameters: &parameters,
                        step: draw,
                        history: &[],
                        allowed,
                    },
                    stops,
                    goes_on: true,
                };
                step += 1;
                let outcome = engine.decode_next(session, token, &decode).unwrap();
                assert_eq!(session.tokens().len(), step);
                outcome.tokens[0]
            };
        let first = decode(&mut session, 100, 0, None, &[]);
        // The foreseen token with a mask that nobody foresaw.
        let mut mask = vec![0; 128];
        mask[10] = 1 << 5;
        let masked = decode(&mut session, first, 1, Some(&mask), &[]);
        assert_eq!(masked, 325);
        let third = decode(&mut session, masked, 2, None, &[]);
        // Another draw; another token; the token that was to end the text.
        let fourth = decode(&mut session, third, 7, None, &[]);
        let fifth = decode(&mut session, fourth ^ 1, 8, None, &[]);
        // The second time it is known which that is.
        let sixth = decode(&mut session, fifth, 20, None, &last);
        last = vec![sixth];
        let seventh = decode(&mut session, sixth, 21, None, &[]);
        [first, masked, third, fourth, fifth, sixth, seventh]
    });
    assert_eq!(found[0], found[1]);
}
