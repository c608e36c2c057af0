//! `lily run`: a prompt's answer.

use crate::answer::{Answer, TokenLogprob, counts, most_tokens, no_content_yet};
use crate::args::{ReasoningChoice, RunArguments};
use crate::console::Console;
use crate::failure::Failure;
use crate::format::{counted, per_second, rate};
use crate::interrupt::on_interrupt;
use crate::model::{ModelName, Opened, Opening, on, open, text_failure};
use crate::status::Status;
use crate::{prompt, sampling};
use lily_engine::{
    CancelFlag, DeviceDescription, FinishReason, Generation, GenerationRequest, SamplingParameters,
    Timings,
};
use serde::Serialize;
use std::path::Path;

/// Runs the subcommand.
pub fn run(model: Option<&Path>, arguments: &RunArguments) -> Result<(), Failure> {
    sampling::refuse_empty_stops(&arguments.stop)?;
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
    let mut sampling = sampling::parameters(&arguments.sampling, &text);
    sampling.logprobs = arguments.output.logprobs;
    // Before the prompt, which may have to be typed first.
    sampling::validate(&sampling, &opened.engine)?;
    let prompt = prompt::build(arguments, &text)?;
    console.status().begin("cutting the prompt into tokens");
    let ids = text
        .encode(&prompt.text, opened.engine.context())
        .map_err(|error| text_failure(error, model))?;

    let room = opened.engine.largest_session().saturating_sub(ids.len());
    let request = GenerationRequest {
        max_tokens: Some(most_tokens(arguments.max_tokens, room)),
        prompt: ids.clone(),
        sampling: sampling.clone(),
        stop: arguments.stop.clone(),
        host_sampling: arguments.sampling.host_sampling,
        ..GenerationRequest::default()
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

    answer.follow(&mut console, &mut opened.engine, &mut generation)?;

    let report = Report::new(&opened, arguments, &sampling, &generation, &ids, &answer);
    if arguments.output.json {
        console.print_json(&report)?;
    }
    if !arguments.output.json && answer.is_all_reasoning(&generation) {
        console.note(&format!(
            "lily: {}: raise --max-tokens, or answer at once with --no-thinking",
            no_content_yet(&generation)
        ));
    }
    if arguments.output.verbose {
        for line in report.summary() {
            console.note(&format!("lily: {line}"));
        }
    } else if console.is_watched() && console.output_is_terminal() && !arguments.output.json {
        console.aside(&format!("\n{}\n", report.closing_line(&generation)));
    }
    match generation.finish_reason() {
        Some(FinishReason::Cancelled) => Err(Failure::Interrupted),
        _ => Ok(()),
    }
}

/// A flag that Ctrl-C raises. A second Ctrl-C does not wait for the end of the token.
fn interruption(status: &Status) -> Result<CancelFlag, Failure> {
    let cancel = CancelFlag::default();
    let flag = cancel.clone();
    let erase = status.eraser();
    on_interrupt(move || {
        if flag.is_cancelled() {
            erase();
            std::process::exit(130);
        }
        flag.cancel();
    })?;
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
        sampling::describe(sampling).join(", ")
    ));
    console.note(&format!("lily: tokens chosen {}", generation.choice()));
    console.note(&format!("lily: decode {}", generation.pace()));
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
        TimingReport {
            prefill_tokens: timings.prefilled_tokens,
            prefill_seconds: timings.prefill.as_secs_f64(),
            prefill_tokens_per_second: per_second(timings.prefilled_tokens, timings.prefill),
            decode_tokens: timings.decoded_tokens,
            decode_seconds: timings.decode.as_secs_f64(),
            decode_tokens_per_second: per_second(timings.decoded_tokens, timings.decode),
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

    /// Counts and speed in a line that does not wrap.
    fn closing_line(&self, generation: &Generation) -> String {
        let kernels = &self.device.kernels;
        let kernels = kernels.strip_prefix("native, ").unwrap_or(kernels);
        let mut parts = counts(generation);
        parts.push(format!("{}, {kernels}", self.device.device));
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
