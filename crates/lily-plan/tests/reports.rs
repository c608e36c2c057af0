//! The report: its JSON keys, which other programs read, and the lines that people look for.

mod common;

use common::model;
use lily_plan::{Machine, PlanReport, Precision};
use serde_json::Value;

fn report() -> PlanReport {
    PlanReport::new(
        &model(),
        Precision::Bf16,
        0,
        512,
        &[
            Machine::m5_max(),
            Machine::h200(),
            Machine::cpu(20e9, 2, 90e9),
        ],
    )
}

fn keys(value: &Value) -> Vec<&str> {
    value
        .as_object()
        .expect("a table")
        .keys()
        .map(String::as_str)
        .collect()
}

#[test]
fn json_has_the_keys_that_others_read() {
    let json = serde_json::to_value(report()).expect("serialisable");
    assert_eq!(
        keys(&json),
        [
            "model",
            "precision",
            "assumptions",
            "machines",
            "memory",
            "decode",
            "prefill"
        ]
    );
    for phase in ["decode", "prefill"] {
        assert_eq!(keys(&json[phase]), ["class", "rows", "fused", "expanded"]);
        for form in ["fused", "expanded"] {
            let plan = &json[phase][form];
            assert_eq!(
                keys(plan),
                [
                    "dispatches",
                    "stages",
                    "bytes",
                    "flops",
                    "arena_bytes",
                    "price",
                    "boundaries",
                    "operations",
                    "steps"
                ]
            );
            assert_eq!(
                keys(&plan["bytes"]),
                ["weights", "state", "scratch", "total"]
            );
            assert_eq!(keys(&plan["price"]), ["M5 Max", "H200", "CPU"]);
            for price in plan["price"].as_object().expect("a table").values() {
                assert!(price["seconds"].as_f64().expect("a number") > 0.0);
                assert!(
                    price["basis"]
                        .as_str()
                        .expect("words")
                        .contains("not a measurement")
                );
            }
            let boundary = &plan["boundaries"][0];
            assert_eq!(
                keys(boundary),
                [
                    "name",
                    "producers",
                    "consumers",
                    "resources",
                    "count",
                    "reason",
                    "seconds_each",
                    "seconds"
                ]
            );
            assert_eq!(
                keys(&plan["steps"][0]),
                [
                    "index",
                    "stage",
                    "layer",
                    "operation",
                    "reads",
                    "writes",
                    "weights",
                    "bytes",
                    "flops",
                    "work_items_hint"
                ]
            );
        }
    }
    assert_eq!(json["decode"]["fused"]["dispatches"], 303);
    assert_eq!(json["decode"]["fused"]["stages"], 303);
    assert_eq!(json["decode"]["expanded"]["dispatches"], 1_074);
    assert_eq!(json["decode"]["expanded"]["stages"], 664);
    assert_eq!(json["prefill"]["fused"]["dispatches"], 593);
    assert_eq!(
        json["decode"]["fused"]["bytes"]["weights"],
        1_669_561_728 + 40 * 4096
    );
    assert_eq!(json["memory"]["weight_bytes"], 19_508_787_456_u64);
    assert!(
        json["machines"][0]["assumptions"][0]
            .as_str()
            .expect("words")
            .contains("Apple")
    );
}

#[test]
fn json_names_operands_and_weights_of_a_step() {
    let json = serde_json::to_value(report()).expect("serialisable");
    let steps = json["decode"]["fused"]["steps"].as_array().expect("a list");
    let step = &steps[2];
    assert_eq!(step["operation"], "delta-step");
    assert_eq!((&step["layer"], &step["stage"]), (&0.into(), &2.into()));
    assert_eq!(step["reads"][0]["name"], "qkv");
    assert_eq!(step["reads"][0]["shape"], serde_json::json!([1, 8192]));
    assert_eq!(step["reads"][0]["element"], "bf16");
    assert_eq!(step["reads"][0]["state"], false);
    assert_eq!(step["writes"][1]["state"], true);
    let state = step["reads"].as_array().expect("a list").last();
    assert_eq!(
        state.expect("operands")["shape"],
        serde_json::json!([32, 128, 128])
    );
    let experts = steps
        .iter()
        .find(|step| step["operation"] == "expert-input")
        .expect("a step");
    assert_eq!(
        experts["weights"][0],
        serde_json::json!({
            "name": "model.layers.0.mlp.switch_mlp.gate_proj",
            "shape": [256, 512, 2048],
            "format": "affine 4-bit, groups of 64",
        })
    );
}

#[test]
fn steps_and_operations_add_up_to_the_totals() {
    let report = report();
    for phase in [&report.decode, &report.prefill] {
        for plan in [&phase.fused, &phase.expanded] {
            assert_eq!(plan.steps.len(), plan.dispatches);
            let last = plan.steps.iter().map(|step| step.stage).max();
            assert_eq!(last, Some(plan.stages - 1));
            let steps: u64 = plan.steps.iter().map(|step| step.bytes.total).sum();
            let operations: u64 = plan.operations.iter().map(|kind| kind.bytes.total).sum();
            assert_eq!(steps, plan.bytes.total);
            assert_eq!(operations, plan.bytes.total);
            let flops: u64 = plan.operations.iter().map(|kind| kind.flops).sum();
            assert_eq!(flops, plan.flops);
            let dispatches: usize = plan.operations.iter().map(|kind| kind.dispatches).sum();
            assert_eq!(dispatches, plan.dispatches);
            for boundary in &plan.boundaries {
                for ((_, each), (_, all)) in boundary.seconds_each.0.iter().zip(&boundary.seconds.0)
                {
                    assert_eq!(*all, boundary.kind.count as f64 * each);
                }
            }
        }
    }
}

/// Lines of a text with runs of spaces made one.
fn lines(text: &str) -> Vec<String> {
    text.lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
        .collect()
}

#[test]
fn the_text_shows_the_key_figures() {
    let text = report().to_text(false);
    let lines = lines(&text);
    for expected in [
        "memory weights 19.5 GB, KV cache 20.5 kB a token, session state 129 MB (both copies), \
         scratch 29.5 MB",
        "DECODE: decode, bf16, 1 row, context up to 4096, output Token",
        "dispatches 303 1,074",
        "stages 303 664",
        "weights read 1.67 GB 1.67 GB",
        "state moved 129 MB 129 MB",
        "M5 Max, at least 3.44 ms 3.98 ms",
        "M5 Max, at most 290 tok/s 252 tok/s",
        "Times and rates: upper bound by counting, under the machine's assumptions; not a measurement.",
        "Gated DeltaNet layer × 30",
        "attention layer × 10",
        "delta-step 65.9 kB 4.29 MB 33.0 kB 3.74 MFLOP 32 qkv, z, a, b → mixed; updates \
         convolution-history, recurrent-state",
        "norm-projections 14.2 MB – 33.0 kB 50.6 MFLOP 12,352 residual → qkv, z, b, a",
        "30 41.7 µs 26.4 µs 150 µs norm-projections → delta-step",
        "PREFILL: prefill, bf16, 512 rows, context up to 262144, output LastLogits",
        "dispatches 593 1,064",
        "- nothing was measured on Apple hardware: public and third-party figures only",
    ] {
        assert!(
            lines.iter().any(|line| line == expected),
            "no line {expected:?} in\n{text}"
        );
    }
    // Each kind of layer once: folding a plan of three hundred steps leaves a page.
    assert!(lines.len() < 320, "{} lines", lines.len());
    let longest = text.lines().max_by_key(|line| line.chars().count());
    assert!(
        longest.is_some_and(|line| line.chars().count() <= 165),
        "{longest:?}"
    );
    assert!(text.lines().all(|line| line == line.trim_end()));
}

#[test]
fn columns_are_aligned() {
    let text = report().to_text(false);
    let column = |line: &str, word: &str| {
        let byte = line
            .find(word)
            .unwrap_or_else(|| panic!("{word} in {line:?}"));
        line[..byte].chars().count()
    };
    let mut steps = text.lines().skip_while(|line| *line != "Steps, fused");
    let heading = steps.nth(2).expect("a heading");
    let embed = steps.nth(1).expect("the first step");
    assert_eq!(column(heading, "operands"), column(embed, "tokens →"));
    // Numbers end where their heading does.
    assert_eq!(
        column(heading, "weights") + "weights".len(),
        column(embed, "1.15 kB") + "1.15 kB".len()
    );
}

#[test]
fn the_verbose_text_lists_every_step() {
    let report = report();
    let text = report.to_text(true);
    let lines = lines(&text);
    for expected in [
        "0 0 – embed 1.15 kB 4 B 8.19 kB – 2,048 tokens [1] u32 → embedded [1, 2048] f32; weights \
         model.embed_tokens [248320, 2048] affine 4-bit, groups of 64",
        "302 302 – arg-max – 4 B 993 kB – 1 logits [1, 248320] f32 → next-token [1] u32",
    ] {
        assert!(
            lines.iter().any(|line| line == expected),
            "no line {expected:?}"
        );
    }
    let steps = |report: &PlanReport| {
        [&report.decode, &report.prefill]
            .map(|phase| phase.fused.dispatches + phase.expanded.dispatches)
            .iter()
            .sum::<usize>()
    };
    assert!(lines.len() > steps(&report));
}

#[test]
fn a_longer_context_takes_another_band() {
    let report = PlanReport::new(&model(), Precision::F32, 4_096, 7, &[Machine::h200()]);
    // The run's own position is the first that the smallest band does not hold.
    assert!(report.decode.class.contains("context up to 32768"));
    assert_eq!(report.decode.rows, 1);
    assert_eq!(report.prefill.rows, 7);
    assert_eq!(report.precision, "f32");
    assert!(
        report
            .to_text(false)
            .contains("4,096 positions in the cache")
    );
}
