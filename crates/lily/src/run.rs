//! `lily run`: a prompt's answer.

use crate::answer::{Answer, TokenLogprob};
use crate::args::{ReasoningChoice, RunArguments, SamplingArguments};
use crate::console::Console;
use crate::failure::Failure;
use crate::format::{counted, grouped, rate};
use crate::model::{ModelName, Opened, Opening, on, open, text_failure};
use crate::prompt;
use crate::status::Status;
use lily_engine::{
    CancelFlag, DeviceDescription, FinishReason, Generation, GenerationRequest, Progress,
    SamplingParameters, TextModel, Timings,
};
use serde::Serialize;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::path::Path;
use std::time::Duration;

/// Most tokens of an answer that names no limit itself: what the makers of the model recommend to leave
/// room for, and no more memory than that.
const DEFAULT_MAX_TOKENS: usize = 32_768;

/// Runs the subcommand.
pub fn run(model: Option<&Path>, arguments: &RunArguments) -> Result<(), Failure> {
    if arguments.stop.iter().any(String::is_empty) {
        return Err(Failure::usage("--stop is empty").help("give a text to stop at"));
    }
    // The grammar knows conflicts of flags, not of their values.
    if arguments.output.quiet && arguments.output.reasoning == ReasoningChoice::Show {
        return Err(
            Failure::usage("--quiet and --reasoning show cannot be used together").help(
                "reasoning is printed on standard error, where --quiet wants nothing but errors",
            ),
        );
    }
    let mut console = Console::new(arguments.output.quiet);
    let opening = Opening {
        context: arguments.context,
        ..Opening::default()
    };
    let mut opened = open(model, &arguments.device, opening, console.status())?;
    // The prompt may have to be typed.
    console.status().end();
    let text = opened.engine.text().clone();
    let sampling = sampling(&arguments.sampling, &text);
    // Before the prompt, which may have to be typed first.
    sampling
        .validate(opened.engine.model().config.vocab_size as u32)
        .map_err(|error| Failure::usage_of(&error))?;
    let prompt = prompt::build(arguments, &text)?;
    console.status().begin("cutting the prompt into tokens");
    let ids = text
        .encode(&prompt.text, opened.engine.context())
        .map_err(|error| text_failure(error, model))?;

    let request = GenerationRequest {
        max_tokens: Some(max_tokens(&opened, arguments, ids.len())),
        prompt: ids.clone(),
        sampling: sampling.clone(),
        stop: arguments.stop.clone(),
        stop_ids: None,
        host_sampling: arguments.sampling.host_sampling,
        guide: None,
    };
    let cancel = interruption(console.status())?;
    let mut generation = opened.engine.start(None, request, cancel)?;
    let shows_reasoning = match arguments.output.reasoning {
        ReasoningChoice::Auto => console.is_watched(),
        ReasoningChoice::Show => true,
        ReasoningChoice::Hide => false,
    };
    let mut answer = Answer::new(&prompt, !arguments.output.json, shows_reasoning);
    if arguments.output.verbose {
        introduce(&mut console, &opened, &sampling, &generation);
    }

    console.status().begin("reading the prompt");
    console.status().advance(0, Some(ids.len()));
    loop {
        match opened.engine.advance(&mut generation)? {
            Progress::Prefilled { done, total } => {
                console.status().advance(done, Some(total));
                if done == total {
                    console.status().begin("answering");
                    console.status().advance(0, None);
                }
            }
            Progress::Token(token) => {
                console.status().advance(generation.tokens().len(), None);
                answer.token(&mut console, text.tokenizer(), &token)?;
            }
            Progress::Finished(finished) => {
                console.status().end();
                answer.text(&mut console, &finished.text)?;
                let truncated = matches!(
                    finished.reason,
                    FinishReason::Length | FinishReason::Cancelled
                );
                answer.finish(&mut console, truncated)?;
                break;
            }
        }
    }

    let report = Report::new(&opened, arguments, &sampling, &generation, &ids, &answer);
    if arguments.output.json {
        console.print_json(&report)?;
    }
    if report.is_all_reasoning() && !arguments.output.json {
        console.note(&format!(
            "lily: the answer's {} went to reasoning and it has no content yet: raise --max-tokens, or \
             answer at once with --no-thinking",
            counted(report.completion_tokens, "token")
        ));
    }
    if arguments.output.verbose {
        for line in report.summary() {
            console.note(&format!("lily: {line}"));
        }
    } else if console.is_watched() && console.output_is_terminal() && !arguments.output.json {
        console.aside(&format!("\n{}\n", report.closing_line()));
    }
    match generation.finish_reason() {
        Some(FinishReason::Cancelled) => Err(Failure::Interrupted),
        _ => Ok(()),
    }
}

/// The checkpoint's own parameters, changed where the user says so.
fn sampling(arguments: &SamplingArguments, text: &TextModel) -> SamplingParameters {
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
    parameters.logprobs = arguments.logprobs;
    parameters.seed = arguments.seed.unwrap_or_else(random_seed);
    parameters
}

/// A seed from the system's randomness, short enough to be typed again.
fn random_seed() -> u64 {
    RandomState::new().build_hasher().finish() >> 32
}

fn max_tokens(opened: &Opened, arguments: &RunArguments, prompt: usize) -> usize {
    arguments.max_tokens.unwrap_or_else(|| {
        let room = opened.engine.largest_session().saturating_sub(prompt);
        // Where not even one token fits, the engine says so with its numbers.
        room.clamp(1, DEFAULT_MAX_TOKENS)
    })
}

/// A flag that Ctrl-C raises. A second Ctrl-C does not wait for the end of the token.
fn interruption(status: &Status) -> Result<CancelFlag, Failure> {
    let cancel = CancelFlag::default();
    let flag = cancel.clone();
    let erase = status.eraser();
    ctrlc::set_handler(move || {
        if flag.is_cancelled() {
            erase();
            std::process::exit(130);
        }
        flag.cancel();
    })
    .map_err(|error| Failure::request("Ctrl-C cannot be caught").because(&error))?;
    Ok(cancel)
}

fn introduce(
    console: &mut Console,
    opened: &Opened,
    sampling: &SamplingParameters,
    generation: &Generation,
) {
    let device = opened.engine.device();
    let precision = opened.engine.options().precision;
    console.note(&format!("lily: model {}", opened.name.to_text()));
    console.note(&format!("lily: device {}, {precision}", on(&device)));
    console.note(&format!(
        "lily: sampling {}",
        describe_sampling(sampling).join(", ")
    ));
    console.note(&format!("lily: tokens chosen {}", generation.choice()));
    console.note(&format!("lily: decode {}", generation.pace()));
}

/// What the parameters do, without those that do nothing.
fn describe_sampling(parameters: &SamplingParameters) -> Vec<String> {
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

/// Everything about an answer.
#[derive(Serialize)]
struct Report<'a> {
    model: &'a ModelName,
    device: DeviceDescription,
    precision: String,
    sampling: SamplingReport,
    /// How decode steps were sent off.
    decode: String,
    seed: u64,
    prompt_tokens: usize,
    cached_tokens: usize,
    /// The token that ended the answer included, if one did.
    completion_tokens: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_ids: Option<&'a [u32]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    completion_ids: Option<&'a [u32]>,
    reasoning: String,
    content: String,
    tool_calls: Vec<ToolCallReport>,
    finish_reason: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    stop: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<&'a [TokenLogprob]>,
    timings: TimingReport,
}

#[derive(Serialize)]
struct SamplingReport {
    temperature: f32,
    top_k: Option<u32>,
    top_p: f32,
    min_p: f32,
    repetition_penalty: f32,
    presence_penalty: f32,
    frequency_penalty: f32,
    logit_bias: Vec<(u32, f32)>,
    /// Where tokens were chosen.
    chosen: String,
}

#[derive(Serialize)]
struct ToolCallReport {
    name: String,
    arguments: serde_json::Map<String, serde_json::Value>,
}

#[derive(Serialize)]
struct TimingReport {
    prefill_tokens: usize,
    prefill_seconds: f64,
    prefill_tokens_per_second: Option<f64>,
    decode_tokens: usize,
    decode_seconds: f64,
    decode_tokens_per_second: Option<f64>,
}

impl From<Timings> for TimingReport {
    fn from(timings: Timings) -> Self {
        let rate = |tokens: usize, time: Duration| {
            let seconds = time.as_secs_f64();
            (tokens > 0 && seconds > 0.0).then(|| tokens as f64 / seconds)
        };
        TimingReport {
            prefill_tokens: timings.prefilled_tokens,
            prefill_seconds: timings.prefill.as_secs_f64(),
            prefill_tokens_per_second: rate(timings.prefilled_tokens, timings.prefill),
            decode_tokens: timings.decoded_tokens,
            decode_seconds: timings.decode.as_secs_f64(),
            decode_tokens_per_second: rate(timings.decoded_tokens, timings.decode),
        }
    }
}

impl<'a> Report<'a> {
    fn new(
        opened: &'a Opened,
        arguments: &RunArguments,
        sampling: &SamplingParameters,
        generation: &'a Generation,
        prompt_ids: &'a [u32],
        answer: &'a Answer,
    ) -> Self {
        let parsed = answer.parsed();
        let reason = generation.finish_reason();
        let finish_reason = match reason {
            Some(FinishReason::Cancelled) => "cancelled",
            Some(FinishReason::Failed) => "failed",
            Some(FinishReason::StopToken(_)) if !parsed.tool_calls.is_empty() => "tool_calls",
            Some(FinishReason::StopToken(_) | FinishReason::StopText(_)) => "stop",
            Some(FinishReason::Length) | None => "length",
        };
        let timings = generation.timings();
        Report {
            model: &opened.name,
            device: opened.engine.device(),
            precision: opened.engine.options().precision.to_string(),
            sampling: SamplingReport {
                temperature: sampling.temperature,
                top_k: sampling.top_k,
                top_p: sampling.top_p,
                min_p: sampling.min_p,
                repetition_penalty: sampling.repetition_penalty,
                presence_penalty: sampling.presence_penalty,
                frequency_penalty: sampling.frequency_penalty,
                logit_bias: sampling.logit_bias.clone(),
                chosen: generation.choice().to_string(),
            },
            decode: generation.pace().to_string(),
            seed: sampling.seed,
            prompt_tokens: generation.prompt_tokens(),
            cached_tokens: timings.cached_tokens,
            completion_tokens: generation.tokens().len(),
            prompt_ids: arguments.output.ids.then_some(prompt_ids),
            completion_ids: arguments.output.ids.then(|| generation.tokens()),
            reasoning: parsed.reasoning,
            content: parsed.content,
            tool_calls: parsed
                .tool_calls
                .into_iter()
                .map(|call| ToolCallReport {
                    name: call.name,
                    arguments: call.arguments,
                })
                .collect(),
            finish_reason,
            stop: match reason {
                Some(FinishReason::StopText(text)) => Some(text.clone()),
                _ => None,
            },
            logprobs: sampling.logprobs.map(|_| answer.logprobs()),
            timings: timings.into(),
        }
    }

    /// Whether the limit came before the answer proper.
    fn is_all_reasoning(&self) -> bool {
        self.finish_reason == "length"
            && self.content.is_empty()
            && self.tool_calls.is_empty()
            && !self.reasoning.is_empty()
    }

    /// Counts and speed in a line that does not wrap.
    fn closing_line(&self) -> String {
        let part = |tokens: String, tokens_per_second: Option<f64>| match tokens_per_second {
            Some(value) => format!("{tokens} at {}/s", rate(value)),
            None => tokens,
        };
        let read = format!("{} read", counted(self.prompt_tokens, "token"));
        let written = format!("{} written", grouped(self.completion_tokens as u64));
        let kernels = &self.device.kernels;
        let kernels = kernels.strip_prefix("native, ").unwrap_or(kernels);
        let mut parts = vec![
            part(read, self.timings.prefill_tokens_per_second),
            part(written, self.timings.decode_tokens_per_second),
            format!("{}, {kernels}", self.device.device),
        ];
        if self.finish_reason == "length" {
            parts.push("stopped at --max-tokens".into());
        }
        parts.join(" · ")
    }

    /// Counts and speed, in two lines.
    fn summary(&self) -> [String; 2] {
        let line = |what: String, tokens_per_second: Option<f64>| match tokens_per_second {
            Some(value) => format!("{what}, {} tok/s", rate(value)),
            None => what,
        };
        [
            line(
                format!("prompt {}", counted(self.prompt_tokens, "token")),
                self.timings.prefill_tokens_per_second,
            ),
            line(
                format!(
                    "answer {} ({})",
                    counted(self.completion_tokens, "token"),
                    self.finish_reason
                ),
                self.timings.decode_tokens_per_second,
            ),
        ]
    }
}
