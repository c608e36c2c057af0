//! The fields that every kind of completion has.

use crate::error::ApiError;
use crate::fields::Fields;
use lily_engine::SamplingParameters;
use serde_json::Value;
use std::sync::atomic::{AtomicU64, Ordering};

/// Most answers of a request.
const MOST_CHOICES: u64 = 16;
/// Most texts that end an answer.
const MOST_STOPS: usize = 4;

/// Fields that are known and mean what they say.
const COMMON_FIELDS: &[&str] = &[
    "model",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    // The names of other servers for the same.
    "repeat_penalty",
    "n_predict",
    "num_predict",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "seed",
    "stop",
    "stream",
    "stream_options",
    "n",
    // Of the client's own business.
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    // What an answer may be expected to be like: it changes when it comes, not what it is.
    "prediction",
];

/// Fields of other APIs that would change the answer, and what there is in their place.
pub(super) const UNSUPPORTED: &[(&str, &str)] = &[
    (
        "ignore_eos",
        "forbid the tokens that end an answer by logit_bias",
    ),
    ("min_tokens", "leave it out"),
    ("stop_token_ids", "give stop"),
    ("include_stop_str_in_output", "leave it out"),
    ("bad_words", "give logit_bias"),
    ("allowed_token_ids", "give logit_bias"),
    ("guided_json", "give response_format"),
    ("guided_regex", "give response_format"),
    ("guided_choice", "give response_format"),
    ("guided_grammar", "give response_format"),
    ("structured_outputs", "give response_format"),
    ("response_schema", "give response_format"),
    ("json_schema", "give response_format"),
    ("format", "give response_format"),
    ("grammar", "give response_format"),
    ("regex", "give response_format"),
    ("ebnf", "give response_format"),
    ("typical_p", "give top_p or min_p"),
    ("top_n_sigma", "give top_p or min_p"),
    ("mirostat", "give temperature"),
    ("dry_multiplier", "give frequency_penalty"),
    ("xtc_probability", "give temperature"),
    ("length_penalty", "leave it out"),
    ("logits_processors", "leave it out"),
    ("use_beam_search", "leave it out"),
    ("best_of", "give n"),
    ("prompt_logprobs", "leave it out"),
    ("truncate_prompt_tokens", "shorten the prompt"),
    ("continue_final_message", "leave it out"),
    ("add_generation_prompt", "leave it out"),
    ("chat_template", "the model's own is used"),
    ("documents", "put them into a message"),
    ("web_search_options", "give a tool"),
    ("verbosity", "say it in a message"),
];

/// Values by which fields say what they would by being left out, beside those that say nothing of any.
const NEUTRAL: &[(&str, f64)] = &[
    ("typical_p", 1.0),
    ("length_penalty", 1.0),
    ("top_n_sigma", -1.0),
];

fn is_neutral(name: &str, value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Bool(true) => name == "add_generation_prompt",
        Value::Number(number) => {
            let number = number.as_f64();
            number == Some(0.0)
                || NEUTRAL
                    .iter()
                    .any(|(known, neutral)| *known == name && number == Some(*neutral))
        }
        Value::String(text) => text.is_empty() || (name == "verbosity" && text == "medium"),
        Value::Array(all) => all.is_empty(),
        Value::Object(entries) => entries.is_empty(),
    }
}

/// What every completion has.
#[derive(Debug)]
pub(crate) struct Common {
    pub sampling: SamplingParameters,
    pub max_tokens: Option<usize>,
    pub stop: Vec<String>,
    /// Answers to each prompt.
    pub choices: u64,
    pub streams: bool,
    pub wants_usage: bool,
    /// Fields that nobody here knows.
    pub ignored: Vec<String>,
}

impl Common {
    /// Reads the common fields; `further` are those that the request may have beside them.
    pub fn read(
        fields: &Fields<'_>,
        defaults: SamplingParameters,
        further: &[&str],
    ) -> Result<Self, ApiError> {
        fields.text("model")?;
        for (name, instead) in UNSUPPORTED {
            let is_asked = |value: &Value| !further.contains(name) && !is_neutral(name, value);
            if fields.value(name).is_some_and(is_asked) {
                return Err(fields.unsupported(name, instead));
            }
        }
        let choices = fields.count("n", 1)?.unwrap_or(1);
        if choices > MOST_CHOICES {
            return Err(fields.wrong("n", &format!("at most {MOST_CHOICES}")));
        }
        let streams = fields.boolean("stream")?.unwrap_or(false);
        let stream_options = fields.object("stream_options", "stream_options.")?;
        if stream_options.is_some() && !streams {
            return Err(fields.wrong("stream_options", "left out, unless stream is true"));
        }
        let wants_usage = match stream_options {
            Some(options) => options.boolean("include_usage")?.unwrap_or(false),
            None => false,
        };
        let mut max_tokens = fields.count("max_tokens", 1)?;
        for alias in ["n_predict", "num_predict"] {
            max_tokens = max_tokens.or(fields.count(alias, 1)?);
        }
        let is_ignored = |name: &&str| {
            let known = [COMMON_FIELDS, further];
            let unsupported = || UNSUPPORTED.iter().any(|(known, _)| known == name);
            !known.iter().any(|known| known.contains(name)) && !unsupported()
        };
        Ok(Common {
            sampling: sampling(fields, defaults)?,
            max_tokens: max_tokens.map(|most| usize::try_from(most).unwrap_or(usize::MAX)),
            stop: stops(fields)?,
            choices,
            streams,
            wants_usage,
            ignored: fields
                .names()
                .filter(is_ignored)
                .take(8)
                .map(|name| name.chars().take(40).collect())
                .collect(),
        })
    }

    /// The seeds of the choices: that of the request, and those after it.
    pub fn seeds(&self) -> Vec<u64> {
        let seed = self.sampling.seed;
        (0..self.choices)
            .map(|choice| seed.wrapping_add(choice))
            .collect()
    }
}

fn sampling(
    fields: &Fields<'_>,
    defaults: SamplingParameters,
) -> Result<SamplingParameters, ApiError> {
    // Zero, and with some servers -1, is all.
    let top_k = match fields.value("top_k") {
        Some(value) if value == -1 => Some(0),
        _ => fields.count("top_k", 0)?,
    };
    let top_k = top_k.map(|k| u32::try_from(k).unwrap_or(u32::MAX));
    let number = |name: &str, default: f32| -> Result<f32, ApiError> {
        Ok(fields.number(name)?.unwrap_or(default))
    };
    Ok(SamplingParameters {
        temperature: number("temperature", defaults.temperature)?,
        top_k: top_k.map_or(defaults.top_k, |k| (k > 0).then_some(k)),
        top_p: number("top_p", defaults.top_p)?,
        min_p: number("min_p", defaults.min_p)?,
        repetition_penalty: number(
            "repetition_penalty",
            number("repeat_penalty", defaults.repetition_penalty)?,
        )?,
        presence_penalty: number("presence_penalty", defaults.presence_penalty)?,
        frequency_penalty: number("frequency_penalty", defaults.frequency_penalty)?,
        logit_bias: logit_bias(fields)?,
        seed: seed(fields)?.unwrap_or_else(next_number),
        logprobs: None,
    })
}

fn logit_bias(fields: &Fields<'_>) -> Result<Vec<(u32, f32)>, ApiError> {
    let Some(object) = fields.object("logit_bias", "logit_bias.")? else {
        return Ok(Vec::new());
    };
    let mut bias = Vec::new();
    for name in object.names() {
        let token = name
            .parse()
            .map_err(|_| object.wrong(name, "named by a token's id"))?;
        bias.push((token, object.number(name)?.unwrap_or(0.0)));
    }
    Ok(bias)
}

/// Any whole number of 64 bits, with a sign or without.
fn seed(fields: &Fields<'_>) -> Result<Option<u64>, ApiError> {
    let Some(value) = fields.value("seed") else {
        return Ok(None);
    };
    let signed = || value.as_i64().map(i64::cast_unsigned);
    let seed = value.as_u64().or_else(signed);
    seed.map(Some)
        .ok_or_else(|| fields.wrong("seed", "a whole number"))
}

fn stops(fields: &Fields<'_>) -> Result<Vec<String>, ApiError> {
    let wrong = || {
        let what =
            format!("a string, or an array of up to {MOST_STOPS} of them, none of them empty");
        fields.wrong("stop", &what)
    };
    let texts: Vec<&Value> = match fields.value("stop") {
        None => return Ok(Vec::new()),
        Some(Value::Array(all)) if all.len() <= MOST_STOPS => all.iter().collect(),
        Some(one @ Value::String(_)) => vec![one],
        Some(_) => return Err(wrong()),
    };
    let text = |value: &Value| {
        value
            .as_str()
            .filter(|text| !text.is_empty())
            .map(String::from)
    };
    texts
        .into_iter()
        .map(|value| text(value).ok_or_else(wrong))
        .collect()
}

/// A number that nothing had before, in this process or one before it: a request without a seed draws anew.
pub(crate) fn next_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let started = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let nanoseconds = started.map_or(0, |since| since.as_nanos() as u64);
    nanoseconds.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed))
}
