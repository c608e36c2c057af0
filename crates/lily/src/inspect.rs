//! `lily inspect`: what a checkpoint is, and what it would take to run it here.

use crate::args::{InspectArguments, WatchArguments};
use crate::console::Console;
use crate::failure::Failure;
use crate::format::{bytes, counted, grouped, pairs, rate, table};
use crate::machine::this_processor;
use crate::model::{ModelName, OpenedDevice, chunk_of, on, open_checkpoint, open_device};
use lily_checkpoint::{Checkpoint, Summary, TensorCount};
use lily_engine::{EngineOptions, MemoryUse};
use lily_plan::{
    DeviceDescription, Machine, ModelDescription, PlanReport, Precision, Price, SessionBytes,
};
use lily_text::GenerationDefaults;
use serde::Serialize;
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;

/// Runs the subcommand.
pub fn inspect(model: Option<&Path>, arguments: &InspectArguments) -> Result<(), Failure> {
    let mut console = Console::new(false);
    console.status().begin("inspecting");
    let path = arguments.path.as_deref().or(model);
    let checkpoint = Arc::new(open_checkpoint(path)?);
    let summary = checkpoint.summary();
    let config = &summary.config;
    let longest = config.max_positions;
    if arguments.context >= longest {
        return Err(Failure::usage(format!(
            "--context {}: the model was made for {longest} tokens",
            arguments.context
        )));
    }
    let chunk = chunk_of(&arguments.device).min(longest - arguments.context);
    let precision: Precision = arguments.device.precision.into();
    let description = Arc::new(ModelDescription::of(&checkpoint)?);
    let machine = this_processor(arguments.device.threads);
    let plans = PlanReport::new(
        &description,
        precision,
        arguments.context,
        chunk,
        std::slice::from_ref(&machine),
    );
    // A checkpoint that cannot run here can still be looked at.
    let running = match open_device(
        checkpoint.clone(),
        &arguments.device,
        &WatchArguments::default(),
        console.status(),
    ) {
        Ok(opened) => Ok(Running::new(&opened, precision, arguments, longest)),
        Err(failure @ Failure::Usage(_)) => return Err(failure),
        Err(failure) => Err(failure.to_text().trim().to_string()),
    };
    let report = Report {
        name: ModelName::new(path, &checkpoint),
        text_files: text_files(&checkpoint),
        sampling: sampling(&checkpoint),
        speed: Speed {
            context: arguments.context,
            chunk,
            decode: plans.decode.fused.price.0[0].1,
            prefill: plans.prefill.fused.price.0[0].1,
            machine,
        },
        precision,
        summary,
        running,
    };
    console.status().end();
    if arguments.json {
        console.print_json(&report.to_json())
    } else {
        console.print(&report.to_text())
    }
}

struct Report {
    name: ModelName,
    summary: Summary,
    text_files: Vec<(&'static str, Option<u64>)>,
    sampling: Result<GenerationDefaults, String>,
    precision: Precision,
    /// How it runs here, or why it does not.
    running: Result<Running, String>,
    speed: Speed,
}

/// What running takes on the device.
struct Running {
    device: DeviceDescription,
    session: SessionBytes,
    working: u64,
    /// What the engine may take; unknown where the system does not tell.
    limit: Option<u64>,
    largest_context: Option<usize>,
    /// The same where the weights are to stay in memory too.
    largest_context_beside_weights: Option<usize>,
}

/// Prices on this processor.
#[derive(Serialize)]
struct Speed {
    context: usize,
    chunk: usize,
    decode: Price,
    prefill: Price,
    machine: Machine,
}

impl Running {
    fn new(
        OpenedDevice { device, model }: &OpenedDevice,
        precision: Precision,
        arguments: &InspectArguments,
        longest: usize,
    ) -> Self {
        let session = device.session_bytes(precision);
        let options = EngineOptions {
            precision,
            prefill_chunk: chunk_of(&arguments.device),
            memory_limit: arguments.device.memory,
            ..EngineOptions::default()
        };
        let MemoryUse { limit, working, .. } = MemoryUse::plan(device.as_ref(), model, &options);
        let known = arguments.device.memory.is_some() || device.available_memory().is_some();
        let limit = known.then_some(limit);
        let largest = |taken: u64| {
            let left = limit?.saturating_sub(taken);
            Some(session.positions_within(left).min(longest))
        };
        Running {
            device: device.describe(),
            session,
            working,
            limit,
            largest_context: largest(working),
            largest_context_beside_weights: largest(working + model.total_bytes()),
        }
    }
}

/// The small files that the text side needs, with their lengths where they are there.
fn text_files(checkpoint: &Checkpoint) -> Vec<(&'static str, Option<u64>)> {
    [
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
    ]
    .into_iter()
    .map(|name| {
        let content = checkpoint.small_file(name).and_then(Result::ok);
        (name, content.map(|content| content.len() as u64))
    })
    .collect()
}

/// What the checkpoint says of sampling, or why that cannot be read.
fn sampling(checkpoint: &Checkpoint) -> Result<GenerationDefaults, String> {
    match checkpoint.small_text("generation_config.json") {
        None => Ok(GenerationDefaults::default()),
        Some(Err(error)) => Err(error.to_string()),
        Some(Ok(json)) => GenerationDefaults::parse(&json)
            .map_err(|error| format!("generation_config.json: {error}")),
    }
}

fn sampling_text(sampling: &Result<GenerationDefaults, String>) -> String {
    let defaults = match sampling {
        Ok(defaults) => defaults,
        Err(reason) => return reason.clone(),
    };
    if defaults.do_sample == Some(false) {
        return "greedy".into();
    }
    let parts: Vec<String> = [
        ("temperature", defaults.temperature),
        ("top-k", defaults.top_k.map(|k| k as f32)),
        ("top-p", defaults.top_p),
        ("min-p", defaults.min_p),
        ("repetition penalty", defaults.repetition_penalty),
        ("presence penalty", defaults.presence_penalty),
        ("frequency penalty", defaults.frequency_penalty),
    ]
    .into_iter()
    .filter_map(|(name, value)| Some(format!("{name} {}", value?)))
    .collect();
    if parts.is_empty() {
        "the checkpoint says nothing: temperature 1".into()
    } else {
        parts.join(", ")
    }
}

impl Report {
    fn kinds(&self) -> [(&'static str, TensorCount); 4] {
        [
            ("text model", self.summary.text),
            ("vision tower, skipped", self.summary.vision),
            ("multi-token prediction, skipped", self.summary.multi_token),
            ("unknown, skipped", self.summary.unknown),
        ]
    }

    fn to_text(&self) -> String {
        let summary = &self.summary;
        let mut text = pairs(&[
            ("model", self.name.to_text()),
            ("identity", self.name.identity.clone()),
            (
                "size",
                format!(
                    "{} parameters in {}, {:.2} bits each",
                    grouped(summary.parameters),
                    bytes(summary.text.bytes),
                    summary.text.bytes as f64 * 8.0 / summary.parameters.max(1) as f64
                ),
            ),
            ("sampling", sampling_text(&self.sampling)),
        ]);
        text.push_str("\nFiles\n");
        text.push_str(&self.files());
        text.push_str("\nTensors\n");
        text.push_str(&self.tensors());
        text.push_str("\nFormats of the text model\n");
        text.push_str(&self.formats());
        text.push_str("\nConfiguration\n");
        text.push_str(&self.configuration());
        text.push_str("\nMemory\n");
        text.push_str(&self.memory());
        text.push_str("\nExpected speed here, at most\n");
        text.push_str(&self.speed());
        text
    }

    fn files(&self) -> String {
        let mut rows = vec![row(["file", "bytes", "header", "tensors"])];
        for file in &self.summary.files {
            rows.push(row([
                &file.name,
                &grouped(file.bytes),
                &grouped(file.header_bytes),
                &file.tensors.to_string(),
            ]));
        }
        for (name, length) in &self.text_files {
            let length = length.map_or("missing".into(), grouped);
            rows.push(row([name, &length, "", ""]));
        }
        table(&rows)
    }

    fn tensors(&self) -> String {
        let mut rows = vec![row(["kind", "tensors", "bytes"])];
        for (kind, count) in self.kinds() {
            rows.push(row([kind, &count.tensors.to_string(), &bytes(count.bytes)]));
        }
        table(&rows)
    }

    fn formats(&self) -> String {
        let mut rows = vec![row(["format", "weights", "parameters", "bytes"])];
        for format in &self.summary.formats {
            rows.push(row([
                &format.format.to_string(),
                &format.weights.to_string(),
                &grouped(format.parameters),
                &bytes(format.bytes),
            ]));
        }
        table(&rows)
    }

    fn configuration(&self) -> String {
        let config = &self.summary.config;
        let attention = self.summary.config.attention_layers();
        pairs(&[
            (
                "layers",
                format!(
                    "{}: {} Gated DeltaNet, {attention} attention",
                    config.layers,
                    config.layers - attention
                ),
            ),
            ("width", config.hidden_size.to_string()),
            (
                "attention",
                format!(
                    "{} query heads, {} KV heads of {}, {} rotating",
                    config.attention_heads,
                    config.key_value_heads,
                    config.head_dim,
                    config.rotary_dim
                ),
            ),
            (
                "Gated DeltaNet",
                format!(
                    "{} key heads of {}, {} value heads of {}, convolution of {}",
                    config.linear_key_heads,
                    config.linear_key_dim,
                    config.linear_value_heads,
                    config.linear_value_dim,
                    config.conv_kernel
                ),
            ),
            (
                "experts",
                format!(
                    "{} of width {}, {} a token; shared expert of width {}",
                    config.experts,
                    config.expert_intermediate,
                    config.experts_per_token,
                    config.shared_intermediate
                ),
            ),
            (
                "vocabulary",
                format!("{} rows", grouped(config.vocab_size as u64)),
            ),
            ("context", counted(config.max_positions, "token")),
        ])
    }

    fn memory(&self) -> String {
        let weights = (
            "weights",
            format!(
                "{}, mapped: read where they lie, and dropped when memory is short",
                bytes(self.summary.text.bytes)
            ),
        );
        match &self.running {
            Err(reason) => pairs(&[weights, ("device", reason.clone())]),
            Ok(running) => pairs(&[
                weights,
                (
                    "session",
                    format!(
                        "{} and {} a token of the KV cache, at {}",
                        bytes(running.session.fixed),
                        bytes(running.session.each_position),
                        self.precision
                    ),
                ),
                (
                    "working",
                    format!(
                        "{} at chunks of {}",
                        bytes(running.working),
                        self.speed.chunk
                    ),
                ),
                (
                    "longest context",
                    running.longest_context(self.summary.config.max_positions),
                ),
                ("device", on(&running.device)),
            ]),
        }
    }

    fn speed(&self) -> String {
        let speed = &self.speed;
        let price = |price: &Price| format!("{} tok/s", rate(price.tokens_per_second_at_most));
        let mut rows = vec![
            (
                "decode",
                format!(
                    "{}, {} in the cache",
                    price(&speed.decode),
                    counted(speed.context, "token")
                ),
            ),
            (
                "prefill",
                format!("{}, a chunk of {}", price(&speed.prefill), speed.chunk),
            ),
            ("these are", format!("an {}", speed.decode.basis)),
        ];
        for (index, assumption) in speed.machine.assumptions.iter().enumerate() {
            rows.push((if index == 0 { "assumed" } else { "" }, assumption.clone()));
        }
        pairs(&rows)
    }

    fn to_json(&self) -> Value {
        let summary = &self.summary;
        let config = &summary.config;
        let count = |count: TensorCount| json!({"tensors": count.tensors, "bytes": count.bytes});
        let files: Vec<Value> = summary
            .files
            .iter()
            .map(|file| {
                json!({
                    "name": file.name,
                    "bytes": file.bytes,
                    "header_bytes": file.header_bytes,
                    "tensors": file.tensors,
                })
            })
            .collect();
        let formats: Vec<Value> = summary
            .formats
            .iter()
            .map(|format| {
                json!({
                    "format": format.format.to_string(),
                    "weights": format.weights,
                    "parameters": format.parameters,
                    "bytes": format.bytes,
                })
            })
            .collect();
        let text_files: serde_json::Map<String, Value> = self
            .text_files
            .iter()
            .map(|(name, length)| (name.to_string(), json!(length)))
            .collect();
        let memory = match &self.running {
            Ok(running) => json!({
                "weight_bytes": summary.text.bytes,
                "session_fixed_bytes": running.session.fixed,
                "cache_bytes_per_token": running.session.each_position,
                "working_bytes": running.working,
                "limit_bytes": running.limit,
                "largest_context": running.largest_context,
                "largest_context_beside_weights": running.largest_context_beside_weights,
            }),
            Err(_) => json!({"weight_bytes": summary.text.bytes}),
        };
        json!({
            "model": self.name,
            "parameters": summary.parameters,
            "files": files,
            "text_files": text_files,
            "tensors": {
                "text": count(summary.text),
                "vision": count(summary.vision),
                "multi_token": count(summary.multi_token),
                "unknown": count(summary.unknown),
            },
            "formats": formats,
            "config": {
                "layers": config.layers,
                "attention_layers": self.summary.config.attention_layers(),
                "hidden_size": config.hidden_size,
                "attention_heads": config.attention_heads,
                "key_value_heads": config.key_value_heads,
                "head_dim": config.head_dim,
                "rotary_dim": config.rotary_dim,
                "linear_key_heads": config.linear_key_heads,
                "linear_value_heads": config.linear_value_heads,
                "linear_key_dim": config.linear_key_dim,
                "linear_value_dim": config.linear_value_dim,
                "conv_kernel": config.conv_kernel,
                "experts": config.experts,
                "experts_per_token": config.experts_per_token,
                "expert_intermediate": config.expert_intermediate,
                "shared_intermediate": config.shared_intermediate,
                "vocab_size": config.vocab_size,
                "max_positions": config.max_positions,
                "tie_word_embeddings": config.tie_word_embeddings,
            },
            "precision": self.precision.to_string(),
            "device": self.running.as_ref().map(|running| &running.device).ok(),
            "device_error": self.running.as_ref().err(),
            "memory": memory,
            "expected_speed": self.speed,
        })
    }
}

impl Running {
    fn longest_context(&self, longest: usize) -> String {
        let (Some(largest), Some(beside), Some(limit)) = (
            self.largest_context,
            self.largest_context_beside_weights,
            self.limit,
        ) else {
            return "unknown: the system does not tell how much memory is free".into();
        };
        let limit = bytes(limit);
        let mut text = counted(largest, "token");
        text.push_str(&if largest == longest {
            let session = bytes(self.session.for_positions(longest));
            format!(
                ", all that the model was made for: needs {session} of the {limit} that may be taken"
            )
        } else {
            format!(", what fits the {limit} that may be taken")
        });
        if beside < largest {
            text.push_str(&format!(
                "; {} if the weights are to stay in memory too",
                counted(beside, "token")
            ));
        }
        text
    }
}

fn row<const N: usize>(cells: [&str; N]) -> Vec<String> {
    cells.map(String::from).to_vec()
}
