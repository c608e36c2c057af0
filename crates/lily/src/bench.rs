//! `lily bench`: prefill and decode against the clock.

use crate::args::{BenchArguments, switches};
use crate::console::Console;
use crate::failure::Failure;
use crate::format::{counted, grouped, pairs, rate, table};
use crate::model::{ModelName, Opened, Opening, on, open};
use crate::status::Status;
use lily_engine::{Decode, DeviceDescription, Engine, PlanOutput, Session};
use lily_gpu::timing::Timings;
use lily_plan::{Assumptions, NO_TOKEN, Outcome, SamplingRow, StageTiming};
use serde::Serialize;
use std::path::Path;
use std::time::Instant;

/// Something to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Case {
    kind: Kind,
    tokens: usize,
    /// Tokens in the cache when the clock starts.
    context: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Kind {
    Prefill,
    Decode,
}

impl Case {
    fn positions(self) -> usize {
        self.context.saturating_add(self.tokens)
    }
}

#[derive(Serialize)]
struct Report {
    model: ModelName,
    device: DeviceDescription,
    precision: String,
    prefill_chunk: usize,
    repetitions: usize,
    /// How decode steps were sent off.
    decode: String,
    /// What is not measured, and how cases are ordered.
    method: String,
    cases: Vec<CaseReport>,
}

/// How cases are measured, in lines.
const METHOD: [&str; 3] = [
    "one warm-up of each case, then repetitions in alternating order;",
    "synthetic prompts; no text, no sampling:",
    "decode goes on with the token that the device chooses",
];

const LEGEND: &str = "
  dispatches: of one decoded token, or of the first prefill chunk
  memory moved, counted: the bytes that a decoded token's plan counts, at the median speed
";

#[derive(Serialize)]
struct CaseReport {
    kind: Kind,
    tokens: usize,
    context: usize,
    /// Dispatches of one run of the plan: of a token, or of the first chunk.
    dispatches: usize,
    tokens_per_second: Spread,
    /// Bytes that one token's plan counts, over the median time of a token; decode only.
    #[serde(skip_serializing_if = "Option::is_none")]
    counted_bytes_per_second: Option<f64>,
    seconds: Vec<f64>,
    /// What the GPU's own clock says of each kind of stage, all repetitions together.
    #[serde(skip_serializing_if = "Option::is_none")]
    stages: Option<Vec<StageTiming>>,
}

/// Median, least and most.
#[derive(Debug, PartialEq, Serialize)]
struct Spread {
    median: f64,
    min: f64,
    max: f64,
}

impl Spread {
    /// Of at least one value.
    fn of(values: &[f64]) -> Self {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let middle = sorted.len() / 2;
        let median = if sorted.len().is_multiple_of(2) {
            (sorted[middle - 1] + sorted[middle]) / 2.0
        } else {
            sorted[middle]
        };
        Spread {
            median,
            min: sorted[0],
            max: sorted[sorted.len() - 1],
        }
    }
}

/// Runs the subcommand.
pub fn bench(model: Option<&Path>, arguments: &BenchArguments) -> Result<(), Failure> {
    if arguments.list_switches {
        let names: String = switches().map(|(name, _)| format!("{name}\n")).collect();
        return Console::new(false).print(&names);
    }
    let mut cases = Vec::new();
    for &context in &arguments.context {
        let of = |kind, tokens: &[usize]| -> Vec<Case> {
            let case = |&tokens| Case {
                kind,
                tokens,
                context,
            };
            tokens.iter().map(case).collect()
        };
        cases.extend(of(Kind::Prefill, &arguments.prefill));
        cases.extend(of(Kind::Decode, &arguments.decode));
    }
    let longest = cases.iter().map(|case| case.positions()).max().unwrap_or(1);
    let mut console = Console::new(false);
    let opening = Opening {
        context: Some(longest),
        watch: arguments.watch.clone(),
        ..Opening::default()
    };
    let mut opened = open(model, &arguments.device, opening, console.status())?;
    let device = opened.engine.device();
    if let Some(wanted) = &arguments.require_kernels
        && !device.kernels.contains(wanted.as_str())
    {
        return Err(Failure::request(format!(
            "the kernels that run here are {:?}, not {wanted:?}",
            device.kernels
        ))
        .help("nothing was measured; choose another --device or another --require-kernels"));
    }
    let measured = measure(&mut opened.engine, &cases, arguments, &console)?;
    let report = report(&mut opened, device, &cases, measured, arguments);
    if arguments.json {
        console.print_json(&report)
    } else {
        console.print(&report.to_text())
    }
}

/// What a case's repetitions took, by the clock on the wall and by the device's own.
#[derive(Clone, Default)]
struct Measured {
    seconds: Vec<f64>,
    stages: Timings,
}

impl Measured {
    fn add(&mut self, seconds: f64, stages: Vec<StageTiming>) {
        self.seconds.push(seconds);
        for StageTiming {
            label,
            runs,
            microseconds,
        } in stages
        {
            self.stages.add_all(&label, runs, microseconds);
        }
    }
}

/// Each repetition of each case.
fn measure(
    engine: &mut Engine,
    cases: &[Case],
    arguments: &BenchArguments,
    console: &Console,
) -> Result<Vec<Measured>, Failure> {
    let rounds = arguments.repetitions + 1;
    let mut progress = TokenProgress {
        status: console.status(),
        done: 0,
        total: rounds * cases.iter().map(|case| case.positions()).sum::<usize>(),
    };
    progress.status.begin("measuring");
    progress.add(0);
    let mut measured = vec![Measured::default(); cases.len()];
    for round in 0..=arguments.repetitions {
        for index in 0..cases.len() {
            // There and back, so that a machine that warms up or slows down does so for all cases alike.
            let index = if round % 2 == 0 {
                index
            } else {
                cases.len() - 1 - index
            };
            let (duration, stages) = run_once(engine, cases[index], &mut progress)?;
            // The first round warms up.
            if round > 0 {
                measured[index].add(duration, stages);
            }
        }
    }
    progress.status.end();
    Ok(measured)
}

/// How many tokens have been through the model, warm-ups and filled caches included.
struct TokenProgress<'a> {
    status: &'a Status,
    done: usize,
    total: usize,
}

impl TokenProgress<'_> {
    fn add(&mut self, tokens: usize) {
        self.done += tokens;
        self.status.advance(self.done, Some(self.total));
    }
}

/// Seconds of a run, and what the device's own clock tells of it. While the clock runs, only the status line goes on, if somebody watches: a few
/// microseconds each second.
fn run_once(
    engine: &mut Engine,
    case: Case,
    progress: &mut TokenProgress<'_>,
) -> Result<(f64, Vec<StageTiming>), Failure> {
    let mut session = engine.open_session(case.positions())?;
    // A tokenizer may be empty; a prompt is not.
    let vocabulary = engine.token_limit().max(1);
    let tokens: Vec<u32> = (0..case.positions())
        .map(|at| synthetic(at, vocabulary))
        .collect();
    prefill(
        engine,
        &mut session,
        &tokens[..case.context],
        PlanOutput::State,
        |rows| progress.add(rows),
    )?;
    // What fills the cache is not asked for.
    engine.take_timings();
    let start = Instant::now();
    match case.kind {
        Kind::Prefill => {
            prefill(
                engine,
                &mut session,
                &tokens[case.context..],
                PlanOutput::LastLogits,
                |_| {},
            )?;
        }
        Kind::Decode => {
            let mut token = tokens[case.context];
            for step in 1..=case.tokens {
                let decode = Decode {
                    output: PlanOutput::Token,
                    sampling: SamplingRow::default(),
                    stops: &[],
                    goes_on: step < case.tokens,
                };
                let outcome = engine.decode_next(&mut session, token, &decode)?;
                token = chosen(&outcome)?;
            }
        }
    }
    let duration = start.elapsed().as_secs_f64();
    progress.add(case.tokens);
    Ok((duration, engine.take_timings()))
}

/// Weights that make no finite logits have no speed to be told.
fn chosen(outcome: &Outcome) -> Result<u32, Failure> {
    let token = outcome.tokens.first().copied();
    token
        .filter(|&token| token != NO_TOKEN)
        .ok_or_else(|| Failure::request("the device found no token to go on with: the logits are no numbers, or no row of the head has a token"))
}

fn prefill(
    engine: &mut Engine,
    session: &mut Session,
    mut tokens: &[u32],
    output: PlanOutput,
    mut advanced: impl FnMut(usize),
) -> Result<(), Failure> {
    while !tokens.is_empty() {
        let (rows, _) = engine.prefill_chunk(session, tokens, output)?;
        tokens = &tokens[rows..];
        advanced(rows);
    }
    Ok(())
}

/// Token `at` of a synthetic prompt: Knuth's multiplicative hash spreads them over the vocabulary, so that
/// the router sees all kinds.
fn synthetic(at: usize, vocabulary: u32) -> u32 {
    (at as u32).wrapping_mul(2_654_435_761) % vocabulary
}

fn report(
    opened: &mut Opened,
    device: DeviceDescription,
    cases: &[Case],
    measured: Vec<Measured>,
    arguments: &BenchArguments,
) -> Report {
    let chunk = opened.engine.options().prefill_chunk;
    let cases = cases
        .iter()
        .zip(measured)
        .map(
            |(
                case,
                Measured {
                    seconds,
                    mut stages,
                },
            )| {
                let rates: Vec<f64> = seconds
                    .iter()
                    .map(|time| case.tokens as f64 / time)
                    .collect();
                let tokens_per_second = Spread::of(&rates);
                let engine = &mut opened.engine;
                let plan = match case.kind {
                    Kind::Prefill => {
                        engine.prefill_plan(case.tokens.min(chunk), PlanOutput::LastLogits)
                    }
                    Kind::Decode => engine.decode_plan(case.context, PlanOutput::Token),
                };
                // The cache grows while decoding; its middle stands for the whole.
                let assumptions = Assumptions::at_context(case.context + case.tokens / 2);
                let totals = plan.totals(&assumptions);
                CaseReport {
                    kind: case.kind,
                    tokens: case.tokens,
                    context: case.context,
                    dispatches: totals.dispatches,
                    counted_bytes_per_second: (case.kind == Kind::Decode)
                        .then(|| totals.work.bytes() as f64 * tokens_per_second.median),
                    tokens_per_second,
                    seconds,
                    stages: arguments.watch.stage_times.then(|| stages.take()),
                }
            },
        )
        .collect();
    Report {
        model: opened.name.clone(),
        device,
        precision: opened.engine.options().precision.to_string(),
        prefill_chunk: chunk,
        repetitions: arguments.repetitions,
        decode: opened.engine.pace(PlanOutput::Token).to_string(),
        method: METHOD.join(" "),
        cases,
    }
}

impl Report {
    fn to_text(&self) -> String {
        let mut rows = vec![
            ("model", self.model.to_text()),
            ("device", on(&self.device)),
            ("precision", self.precision.clone()),
            ("chunk", counted(self.prefill_chunk, "token")),
            ("decode", self.decode.clone()),
            (
                "measured",
                format!("{} each:", counted(self.repetitions, "time")),
            ),
        ];
        rows.extend(METHOD.map(|line| ("", line.to_string())));
        if self.cases.iter().any(|case| case.stages.is_some()) {
            let note = "stages are timed one by one: everything takes longer than without";
            rows.push(("", note.into()));
        }
        let mut text = pairs(&rows);
        let header = [
            "",
            "tokens",
            "context",
            "median tok/s",
            "min",
            "max",
            "dispatches",
            "memory moved, counted",
        ];
        let mut rows = vec![header.map(String::from).to_vec()];
        for case in &self.cases {
            let kind = match case.kind {
                Kind::Prefill => "prefill",
                Kind::Decode => "decode",
            };
            let bytes = case
                .counted_bytes_per_second
                .map_or(String::new(), |bytes| format!("{} GB/s", rate(bytes / 1e9)));
            rows.push(vec![
                kind.into(),
                case.tokens.to_string(),
                case.context.to_string(),
                rate(case.tokens_per_second.median),
                rate(case.tokens_per_second.min),
                rate(case.tokens_per_second.max),
                case.dispatches.to_string(),
                bytes,
            ]);
        }
        text.push('\n');
        text.push_str(&table(&rows));
        text.push_str(LEGEND);
        for case in &self.cases {
            if let Some(stages) = &case.stages {
                text.push_str(&stage_table(case, stages));
            }
        }
        text
    }
}

/// What takes the GPU's time, the most first.
fn stage_table(case: &CaseReport, stages: &[StageTiming]) -> String {
    let CaseReport {
        kind,
        tokens,
        context,
        ..
    } = case;
    let kind = match kind {
        Kind::Prefill => "prefill",
        Kind::Decode => "decode",
    };
    let total: f64 = stages.iter().map(|stage| stage.microseconds).sum();
    let mut sorted: Vec<&StageTiming> = stages.iter().collect();
    sorted.sort_by(|a, b| b.microseconds.total_cmp(&a.microseconds));
    let header = ["", "times", "us each", "share", "kernels"];
    let mut rows = vec![header.map(String::from).to_vec()];
    rows.extend(sorted.into_iter().map(|stage| {
        vec![
            String::new(),
            grouped(stage.runs),
            rate(stage.microseconds / stage.runs as f64),
            format!("{} %", rate(100.0 * stage.microseconds / total)),
            stage.label.clone(),
        ]
    }));
    format!(
        "\nStages of {kind}, {} behind {}, each timed for itself: {} ms of the GPU\n\n{}",
        counted(*tokens, "token"),
        grouped(*context as u64),
        rate(total / 1e3),
        table(&rows)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_of_odd_and_even_counts() {
        assert_eq!(Spread::of(&[3.0, 1.0, 2.0]).median, 2.0);
        let even = Spread::of(&[4.0, 1.0, 2.0, 3.0]);
        assert_eq!((even.median, even.min, even.max), (2.5, 1.0, 4.0));
    }

    #[test]
    fn synthetic_tokens_are_of_the_vocabulary_and_spread() {
        let tokens: std::collections::HashSet<u32> =
            (0..1_000).map(|at| synthetic(at, 4_088)).collect();
        assert!(tokens.iter().all(|&token| token < 4_088));
        assert!(tokens.len() > 800, "{}", tokens.len());
    }
}
