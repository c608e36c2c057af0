//! Where tokens are chosen: the device and the host give the same answers.

mod support;

use lily_engine::{Engine, GenerationRequest, SamplingParameters, TokenChoice};
use support::{answer, engine, question};

fn request(engine: &Engine, sampling: SamplingParameters) -> GenerationRequest {
    GenerationRequest {
        prompt: question(engine, "Tell me a short story about a lantern."),
        sampling,
        max_tokens: Some(40),
        ..GenerationRequest::default()
    }
}

fn mixtures() -> Vec<SamplingParameters> {
    let warm = SamplingParameters {
        temperature: 1.0,
        ..SamplingParameters::default()
    };
    vec![
        warm.clone(),
        SamplingParameters {
            top_p: 0.95,
            top_k: Some(20),
            ..warm.clone()
        },
        SamplingParameters {
            temperature: 2.0,
            min_p: 0.02,
            ..warm.clone()
        },
        SamplingParameters {
            top_p: 0.9,
            repetition_penalty: 1.3,
            presence_penalty: 0.5,
            frequency_penalty: 0.25,
            ..warm.clone()
        },
        SamplingParameters {
            repetition_penalty: 1.5,
            logit_bias: vec![(100, 2.0), (200, -5.0)],
            ..SamplingParameters::default()
        },
    ]
}

#[test]
fn the_device_samples_the_tokens_of_the_host() {
    let mut engine = engine();
    for sampling in mixtures() {
        for seed in 0..3 {
            let sampling = SamplingParameters {
                seed,
                ..sampling.clone()
            };
            let on_device = request(&engine, sampling.clone());
            let on_host = GenerationRequest {
                host_sampling: true,
                ..on_device.clone()
            };
            let found = answer(&mut engine, on_device).unwrap();
            let expected = answer(&mut engine, on_host).unwrap();
            assert_eq!(found.generation.choice(), TokenChoice::DeviceSampling);
            assert_eq!(
                expected.generation.choice(),
                TokenChoice::Host("as asked for")
            );
            assert_eq!(
                found.generation.tokens(),
                expected.generation.tokens(),
                "{sampling:?}"
            );
            assert_eq!(found.text, expected.text);
        }
    }
}

#[test]
fn where_tokens_are_chosen_is_told() {
    let mut engine = engine();
    let greedy = SamplingParameters::default();
    let logprobs = SamplingParameters {
        logprobs: Some(1),
        temperature: 1.0,
        ..greedy.clone()
    };
    for (sampling, expected) in [
        (greedy, "on the device, by arg-max"),
        (logprobs, "on the host: log-probabilities need all logits"),
        (mixtures()[1].clone(), "on the device, by sampling"),
    ] {
        let request = request(&engine, sampling);
        let generation = engine
            .start(None, request, lily_engine::CancelFlag::default())
            .unwrap();
        assert_eq!(generation.choice().to_string(), expected);
    }
}
