//! `lily verify`: the model's predictions beside recorded ones.

use crate::args::VerifyArguments;
use crate::console::Console;
use crate::failure::Failure;
use crate::format::pairs;
use crate::model::{EMBEDDED_REFERENCE, ModelName, Opening, on, open, read_text};
use lily_engine::{DeviceDescription, Score};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::Path;
use std::time::Instant;

/// What the embedded model must keep to: two engines at other precisions differ by 0.015 in perplexity
/// and agree on 183 of the 192 positions; the others are near-ties.
const EMBEDDED_PERPLEXITY_DIFFERENCE: f64 = 0.015;
const EMBEDDED_TOP1: usize = 183;

/// A recording of a model's predictions.
#[derive(Debug)]
struct Reference {
    inputs: Vec<u32>,
    targets: Vec<u32>,
    record: Record,
}

impl Reference {
    /// Checks that a model with a vocabulary of that many rows can have been the one recorded.
    fn check_ids(&self, vocabulary: usize, source: &str, name: &str) -> Result<(), Failure> {
        for (field, ids) in [
            ("input_ids".to_string(), &self.inputs),
            ("target_ids".to_string(), &self.targets),
            (format!("{name}.top1"), &self.record.top1),
        ] {
            if let Some(at) = ids.iter().position(|&id| id as usize >= vocabulary) {
                return Err(Failure::usage(format!(
                    "the reference {source}: {field}[{at}] is {}: the model's vocabulary has {vocabulary} rows",
                    ids[at]
                ))
                .help("the recording must be of the same model"));
            }
        }
        Ok(())
    }
}

/// What one engine predicted.
#[derive(Debug, Deserialize)]
struct Record {
    top1: Vec<u32>,
    target_logprobs: Vec<f64>,
    perplexity: Option<f64>,
}

impl Reference {
    fn parse(json: &str, source: &str, name: &str) -> Result<Self, Failure> {
        let wrong = |reason: String| {
            Failure::usage(format!("the reference {source}: {reason}"))
                .help("lily verify --help shows the format")
        };
        let mut value: Value = serde_json::from_str(json)
            .map_err(|error| wrong("it is not JSON".into()).because(&error))?;
        let mut ids = |key: &str| -> Result<Vec<u32>, Failure> {
            let list = value.get_mut(key).map(Value::take);
            let list = list.ok_or_else(|| wrong(format!("it has no {key}")))?;
            serde_json::from_value(list)
                .map_err(|error| wrong(format!("{key} is no list of token ids")).because(&error))
        };
        let (inputs, targets) = (ids("input_ids")?, ids("target_ids")?);
        let record = value.get_mut(name).map(Value::take).ok_or_else(|| {
            let records: Vec<&str> = value
                .as_object()
                .into_iter()
                .flatten()
                .filter(|(_, value)| value.get("top1").is_some())
                .map(|(name, _)| name.as_str())
                .collect();
            wrong(format!(
                "it has no record {name}; its records are: {}",
                records.join(", ")
            ))
        })?;
        let record: Record = serde_json::from_value(record).map_err(|error| {
            wrong(format!(
                "the record {name} has no proper top1 and target_logprobs"
            ))
            .because(&error)
        })?;
        let count = inputs.len();
        for (what, length) in [
            ("target_ids", targets.len()),
            ("top1", record.top1.len()),
            ("target_logprobs", record.target_logprobs.len()),
        ] {
            if length != count || count == 0 {
                return Err(wrong(format!(
                    "input_ids has {count} entries and {what} {length}: as many are needed, and at least 1"
                )));
            }
        }
        for (at, &value) in record.target_logprobs.iter().enumerate() {
            if !(value.is_finite() && value <= 0.0) {
                return Err(wrong(format!(
                    "{name}.target_logprobs[{at}] is {value}: log-probabilities are finite and at most 0"
                )));
            }
        }
        if let Some(value) = record.perplexity
            && !(value.is_finite() && value > 0.0)
        {
            return Err(wrong(format!(
                "{name}.perplexity is {value}: perplexities are finite and over 0"
            )));
        }
        Ok(Reference {
            inputs,
            targets,
            record,
        })
    }
}

/// Everything about a comparison.
#[derive(Serialize)]
struct Report {
    model: ModelName,
    device: DeviceDescription,
    precision: String,
    reference: String,
    record: String,
    #[serde(flatten)]
    comparison: Comparison,
    thresholds: Thresholds,
    seconds: f64,
    passed: bool,
    missed: Vec<String>,
}

/// Ours beside the recorded.
#[derive(Debug, PartialEq, Serialize)]
struct Comparison {
    positions: usize,
    perplexity: f64,
    reference_perplexity: f64,
    perplexity_difference: f64,
    top1_agreement: usize,
    /// Absolute differences of the true token's log-probability.
    mean_logprob_difference: f64,
    largest_logprob_difference: f64,
}

impl Comparison {
    fn new(scores: &[Score], record: &Record) -> Self {
        let count = scores.len() as f64;
        let perplexity_of =
            |logprobs: &mut dyn Iterator<Item = f64>| (-logprobs.sum::<f64>() / count).exp();
        let perplexity = perplexity_of(&mut scores.iter().map(|score| score.logprob));
        let reference_perplexity = record
            .perplexity
            .unwrap_or_else(|| perplexity_of(&mut record.target_logprobs.iter().copied()));
        let differences = scores
            .iter()
            .zip(&record.target_logprobs)
            .map(|(score, recorded)| (score.logprob - recorded).abs());
        let (mut sum, mut largest) = (0.0, 0.0);
        for difference in differences {
            sum += difference;
            // What is not a number stays, for nothing is larger.
            if difference.is_nan() || difference > largest {
                largest = difference;
            }
        }
        Comparison {
            positions: scores.len(),
            perplexity,
            reference_perplexity,
            perplexity_difference: perplexity - reference_perplexity,
            top1_agreement: scores
                .iter()
                .zip(&record.top1)
                .filter(|(score, top)| score.top == **top)
                .count(),
            mean_logprob_difference: sum / count,
            largest_logprob_difference: largest,
        }
    }
}

#[derive(Serialize)]
struct Thresholds {
    max_perplexity_difference: Option<f64>,
    min_top1: Option<usize>,
}

impl Thresholds {
    /// What a comparison misses, in words.
    fn missed_by(&self, comparison: &Comparison) -> Vec<String> {
        let mut missed = Vec::new();
        if let Some(most) = self.max_perplexity_difference {
            let difference = comparison.perplexity_difference.abs();
            if difference.is_nan() || difference > most {
                missed.push(format!(
                    "the perplexities differ by {difference:.4}, allowed is {most}"
                ));
            }
        }
        if let Some(least) = self.min_top1 {
            let agree = comparison.top1_agreement;
            if agree < least {
                missed.push(format!(
                    "{agree} likeliest tokens agree, needed are {least}"
                ));
            }
        }
        missed
    }
}

/// Runs the subcommand.
pub fn verify(model: Option<&Path>, arguments: &VerifyArguments) -> Result<(), Failure> {
    let embedded = arguments.reference.is_none();
    let (source, json) = match (&arguments.reference, model) {
        (Some(path), _) => (
            path.display().to_string(),
            read_text(path, "the reference")?,
        ),
        (None, None) => ("embedded".into(), EMBEDDED_REFERENCE.to_string()),
        (None, Some(model)) => {
            return Err(Failure::usage(format!(
                "there is no recording for the model {}",
                model.display()
            ))
            .help("name one with --reference FILE"));
        }
    };
    let reference = Reference::parse(&json, &source, &arguments.record)?;
    let thresholds = Thresholds {
        max_perplexity_difference: arguments
            .max_perplexity_difference
            .or(embedded.then_some(EMBEDDED_PERPLEXITY_DIFFERENCE)),
        min_top1: arguments.min_top1.or(embedded.then_some(EMBEDDED_TOP1)),
    };
    let mut console = Console::new(false);
    let mut opened = open(
        model,
        &arguments.device,
        Opening::default(),
        console.status(),
    )?;
    let vocabulary = opened.engine.model().config.vocab_size;
    reference.check_ids(vocabulary, &source, &arguments.record)?;
    let start = Instant::now();
    let (inputs, targets) = (&reference.inputs, &reference.targets);
    console.status().begin("reading");
    console.status().advance(0, Some(inputs.len()));
    let scores = opened.engine.score(inputs, targets, |done| {
        console.status().advance(done, Some(inputs.len()));
    });
    console.status().end();
    let comparison = Comparison::new(&scores?, &reference.record);
    let missed = thresholds.missed_by(&comparison);
    let report = Report {
        model: opened.name,
        device: opened.engine.device(),
        precision: opened.engine.options().precision.to_string(),
        reference: source,
        record: arguments.record.clone(),
        comparison,
        thresholds,
        seconds: start.elapsed().as_secs_f64(),
        passed: missed.is_empty(),
        missed,
    };
    if arguments.json {
        console.print_json(&report)?;
    } else {
        console.print(&report.to_text())?;
    }
    if report.passed {
        Ok(())
    } else {
        let missed = report.missed.join("; ");
        Err(Failure::request(format!(
            "the model was not verified: {missed}"
        )))
    }
}

impl Report {
    fn to_text(&self) -> String {
        let comparison = &self.comparison;
        let threshold = |value: Option<String>| {
            value.map_or_else(String::new, |value| format!(" (allowed: {value})"))
        };
        let allowed = self.thresholds.max_perplexity_difference;
        let allowed = threshold(allowed.map(|most| format!("{most} apart")));
        let needed = self.thresholds.min_top1;
        let needed = threshold(needed.map(|least| format!("at least {least}")));
        let verdict = match (self.passed, &self.thresholds) {
            (false, _) => "missed",
            (
                true,
                Thresholds {
                    max_perplexity_difference: None,
                    min_top1: None,
                },
            ) => "no threshold was set",
            (true, _) => "passed",
        };
        pairs(&[
            ("model", self.model.to_text()),
            ("device", on(&self.device)),
            ("precision", self.precision.clone()),
            (
                "reference",
                format!("{}, record {}", self.reference, self.record),
            ),
            (
                "perplexity",
                format!(
                    "{:.4}, recorded {:.4}, difference {:+.4}{allowed}",
                    comparison.perplexity,
                    comparison.reference_perplexity,
                    comparison.perplexity_difference,
                ),
            ),
            (
                "likeliest token",
                format!(
                    "{} of {} agree{needed}",
                    comparison.top1_agreement, comparison.positions
                ),
            ),
            (
                "log-probability",
                format!(
                    "differs by {:.4} on average, {:.4} at most",
                    comparison.mean_logprob_difference, comparison.largest_logprob_difference
                ),
            ),
            ("result", verdict.into()),
        ])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(perplexity: Option<f64>) -> Record {
        Record {
            top1: vec![1, 2],
            target_logprobs: vec![-1.0, -2.0],
            perplexity,
        }
    }

    fn score(top: u32, logprob: f64) -> Score {
        Score { top, logprob }
    }

    #[test]
    fn comparisons_are_computed_by_hand() {
        let ours = [score(1, -1.5), score(3, -2.0)];
        let comparison = Comparison::new(&ours, &record(None));
        assert_eq!(comparison.top1_agreement, 1);
        assert!((comparison.perplexity - 1.75f64.exp()).abs() < 1e-12);
        assert!((comparison.reference_perplexity - 1.5f64.exp()).abs() < 1e-12);
        assert_eq!(comparison.mean_logprob_difference, 0.25);
        assert_eq!(comparison.largest_logprob_difference, 0.5);
        let stated = Comparison::new(&ours, &record(Some(4.0)));
        assert_eq!(stated.reference_perplexity, 4.0);
    }

    #[test]
    fn what_is_not_a_number_does_not_pass() {
        let comparison = Comparison::new(&[score(1, f64::NAN), score(2, -2.0)], &record(None));
        assert!(comparison.largest_logprob_difference.is_nan());
        let thresholds = Thresholds {
            max_perplexity_difference: Some(1e9),
            min_top1: None,
        };
        assert_eq!(thresholds.missed_by(&comparison).len(), 1);
    }

    #[test]
    fn ids_beyond_the_vocabulary_are_named() {
        let reference = |inputs: u32, targets: u32, top: u32| Reference {
            inputs: vec![0, inputs],
            targets: vec![targets, 0],
            record: Record {
                top1: vec![0, top],
                target_logprobs: vec![-1.0, -1.0],
                perplexity: None,
            },
        };
        let check = |reference: Reference| reference.check_ids(10, "r.json", "ours");
        assert!(check(reference(9, 9, 9)).is_ok());
        for (reference, named) in [
            (reference(10, 9, 9), "r.json: input_ids[1] is 10"),
            (reference(9, 11, 9), "r.json: target_ids[0] is 11"),
            (reference(9, 9, 12), "r.json: ours.top1[1] is 12"),
        ] {
            let text = check(reference).unwrap_err().to_text();
            assert!(text.contains(named), "{named} in {text}");
        }
    }

    #[test]
    fn references_are_checked() {
        let refused = |json: &str| {
            Reference::parse(json, "r.json", "float32")
                .unwrap_err()
                .to_text()
        };
        assert!(refused("[").contains("r.json: it is not JSON"));
        assert!(refused("[]").contains("no input_ids"));
        let ids = r#""input_ids":[1],"target_ids":[2]"#;
        assert!(refused(&format!("{{{ids}}}")).contains("no record float32"));
        let short = format!(r#"{{{ids},"float32":{{"top1":[],"target_logprobs":[-1]}}}}"#);
        assert!(refused(&short).contains("top1 0"));
        for (record, named) in [
            (
                r#"{"top1":[1],"target_logprobs":[0.5]}"#,
                "r.json: float32.target_logprobs[0] is 0.5",
            ),
            (
                r#"{"top1":[1],"target_logprobs":[-1],"perplexity":0}"#,
                "r.json: float32.perplexity is 0",
            ),
            (
                r#"{"top1":[1],"target_logprobs":[-1],"perplexity":-2.5}"#,
                "r.json: float32.perplexity is -2.5",
            ),
            // JSON has no numbers beyond f64.
            (
                r#"{"top1":[1],"target_logprobs":[-1e999]}"#,
                "r.json: it is not JSON",
            ),
        ] {
            let text = refused(&format!(r#"{{{ids},"float32":{record}}}"#));
            assert!(text.contains(named), "{named} in {text}");
        }
        let negative = r#"{"input_ids":[-1],"target_ids":[2],"float32":{}}"#;
        assert!(refused(negative).contains("input_ids is no list"));
    }
}
