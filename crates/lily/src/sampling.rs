//! How tokens are chosen: from the arguments of a command, and for people.

use crate::args::SamplingArguments;
use crate::failure::Failure;
use lily_engine::{Engine, SamplingParameters, TextModel};
use std::hash::{BuildHasher, Hasher, RandomState};

/// The checkpoint's own parameters, changed where the user says so.
pub fn parameters(arguments: &SamplingArguments, text: &TextModel) -> SamplingParameters {
    let mut parameters = text.default_sampling();
    if arguments.greedy {
        parameters = SamplingParameters {
            temperature: 0.0,
            top_k: None,
            top_p: 1.0,
            min_p: 0.0,
            ..parameters
        };
    }
    let set = |value: &mut f32, given: Option<f32>| {
        if let Some(given) = given {
            *value = given;
        }
    };
    set(&mut parameters.temperature, arguments.temperature);
    set(&mut parameters.top_p, arguments.top_p);
    set(&mut parameters.min_p, arguments.min_p);
    set(
        &mut parameters.repetition_penalty,
        arguments.repetition_penalty,
    );
    set(&mut parameters.presence_penalty, arguments.presence_penalty);
    set(
        &mut parameters.frequency_penalty,
        arguments.frequency_penalty,
    );
    if let Some(top_k) = arguments.top_k {
        parameters.top_k = top_k.0;
    }
    parameters.logit_bias.clone_from(&arguments.logit_bias);
    parameters.seed = arguments.seed.unwrap_or_else(random_seed);
    parameters
}

/// Refuses parameters that the model cannot be sampled with.
pub fn validate(parameters: &SamplingParameters, engine: &Engine) -> Result<(), Failure> {
    parameters
        .validate(engine.model().config.vocab_size as u32)
        .map_err(|error| Failure::usage_of(&error))
}

/// Refuses a text to stop at that is everywhere.
pub fn refuse_empty_stops(stops: &[String]) -> Result<(), Failure> {
    if stops.iter().any(String::is_empty) {
        return Err(Failure::usage("--stop is empty").help("give a text to stop at"));
    }
    Ok(())
}

/// A seed from the system's randomness, short enough to be typed again.
fn random_seed() -> u64 {
    RandomState::new().build_hasher().finish() >> 32
}

/// What the parameters do, without those that do nothing.
pub fn describe(parameters: &SamplingParameters) -> Vec<String> {
    let mut parts = Vec::new();
    if parameters.temperature == 0.0 {
        parts.push("greedy".to_string());
    } else {
        parts.push(format!("seed {}", parameters.seed));
        parts.push(format!("temperature {}", parameters.temperature));
        parts.extend(parameters.top_k.map(|k| format!("top-k {k}")));
    }
    let sampled = parameters.temperature != 0.0;
    for (name, value, neutral, shown) in [
        ("top-p", parameters.top_p, 1.0, sampled),
        ("min-p", parameters.min_p, 0.0, sampled),
        (
            "repetition penalty",
            parameters.repetition_penalty,
            1.0,
            true,
        ),
        ("presence penalty", parameters.presence_penalty, 0.0, true),
        ("frequency penalty", parameters.frequency_penalty, 0.0, true),
    ] {
        if shown && value != neutral {
            parts.push(format!("{name} {value}"));
        }
    }
    for (token, value) in &parameters.logit_bias {
        parts.push(format!("bias {token}={value}"));
    }
    parts
}
