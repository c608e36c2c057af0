//! Answers of the embedded model on the emulated device: sampled there, and by the host from the same device's logits.

mod common;

use common::device;
use lily_checkpoint::Checkpoint;
use lily_emulated::EmulatedOptions;
use lily_engine::{
    CancelFlag, Engine, EngineOptions, GenerationRequest, SamplingParameters, TextModel,
    TokenChoice,
};
use lily_testing::repository;
use std::sync::Arc;

#[test]
fn the_device_samples_the_tokens_of_the_host() {
    let checkpoint = Arc::new(Checkpoint::open(&repository("models/lily-tiny")).unwrap());
    let device = device(&checkpoint, EmulatedOptions::default());
    let model = device.model().clone();
    let text = Arc::new(TextModel::load(&checkpoint).unwrap());
    let options = EngineOptions {
        context: Some(256),
        ..EngineOptions::default()
    };
    let mut engine = Engine::new(Box::new(device), model, text.clone(), options).unwrap();
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
                prompt: text.encode("Once upon a time", 256).unwrap(),
                sampling: sampling.clone(),
                max_tokens: Some(24),
                host_sampling,
                ..GenerationRequest::default()
            };
            let generation = engine.start(None, request, CancelFlag::default()).unwrap();
            engine.run(generation, |_| {}).unwrap()
        });
        assert_eq!(found.choice(), TokenChoice::DeviceSampling);
        assert_eq!(expected.choice(), TokenChoice::Host("as asked for"));
        assert_eq!(found.tokens(), expected.tokens(), "{sampling:?}");
        assert!(found.tokens().len() > 4, "{:?}", found.tokens());
    }
}
