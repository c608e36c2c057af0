//! `lily plan`, `inspect`, `bench` and `verify`.

mod support;

use serde_json::Value;
use support::{file, lily, repository};

fn real_config() -> String {
    let path = repository("fixtures/qwen3.6-35b-a3b/config.json");
    path.to_str().unwrap().to_string()
}

#[test]
fn the_real_model_is_planned_from_its_config_alone() {
    let report = lily(&["plan", "--json", &real_config()]).json();
    let decode = &report["decode"];
    let dispatches = |plan: &Value| plan["dispatches"].as_u64().unwrap();
    assert!(
        dispatches(&decode["fused"]) <= 340,
        "{}",
        dispatches(&decode["fused"])
    );
    assert!(dispatches(&decode["expanded"]) > 2 * dispatches(&decode["fused"]));
    for phase in ["decode", "prefill"] {
        for plan in ["fused", "expanded"] {
            let figures = &report[phase][plan];
            assert!(figures["stages"].as_u64() <= figures["dispatches"].as_u64());
            assert!(figures["bytes"]["weights"].as_u64() > Some(1_000_000_000));
            assert!(figures["flops"].as_u64() > Some(1_000_000_000));
            assert_eq!(
                figures["steps"].as_array().unwrap().len() as u64,
                dispatches(figures)
            );
            for machine in ["M5 Max", "H200", "CPU"] {
                let price = &figures["price"][machine];
                assert!(price["seconds"].as_f64() > Some(0.0), "{machine}");
                assert!(
                    price["basis"]
                        .as_str()
                        .unwrap()
                        .contains("not a measurement")
                );
            }
        }
    }
    assert_eq!(report["prefill"]["rows"], 512);
    let machines = report["machines"].as_array().unwrap();
    assert_eq!(machines.len(), 3);
    for machine in machines {
        assert!(
            machine["assumptions"].as_array().unwrap().len() >= 4,
            "{machine}"
        );
    }
}

#[test]
fn plans_depend_on_what_is_asked() {
    let config = real_config();
    let plan = |more: &[&str]| {
        lily(&[&["plan", "--json", "--machine", "h200", &config], more].concat()).json()
    };
    let short = plan(&[]);
    assert_eq!(short["machines"].as_array().unwrap().len(), 1);
    let long = plan(&["--context", "32768", "--rows", "64"]);
    let state = |report: &Value| report["decode"]["fused"]["bytes"]["state"].as_u64();
    assert!(state(&long) > state(&short));
    assert_eq!(long["prefill"]["rows"], 64);
    assert_eq!(plan(&["--precision", "f32"])["precision"], "f32");
    // Without --chunk, the chunk is what is left of what the model was made for.
    assert_eq!(plan(&["--context", "262141"])["prefill"]["rows"], 3);
    // The directory of a config is as good, and a directory may be the --model.
    let directory = repository("fixtures/qwen3.6-35b-a3b");
    let directory = directory.to_str().unwrap();
    assert_eq!(
        lily(&["plan", "--json", "--machine", "h200", directory]).json(),
        short
    );
    assert_eq!(
        lily(&["plan", "--json", "--machine", "h200", "--model", directory]).json(),
        short
    );
}

#[test]
fn plans_for_people_print_every_assumption_and_boundary() {
    let config = real_config();
    let text = lily(&["plan", &config]).worked().output;
    for part in [
        "DECODE",
        "PREFILL",
        "measured just now",
        "not a measurement",
    ] {
        assert!(text.contains(part), "{part}");
    }
    assert!(
        text.lines().count() < 140 && !text.contains("Steps"),
        "{text}"
    );
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let report = lily(&["plan", "--json", &config]).json();
    let machines = ["M5 Max", "H200"].map(|name| {
        let mut machines = report["machines"].as_array().unwrap().iter();
        machines.find(|machine| machine["name"] == name).unwrap()
    });
    for machine in machines {
        for assumption in machine["assumptions"].as_array().unwrap() {
            let assumption = assumption.as_str().unwrap();
            assert!(words(&text).contains(assumption), "{assumption}");
        }
    }
    for phase in ["decode", "prefill"] {
        for boundary in report[phase]["fused"]["boundaries"].as_array().unwrap() {
            let (count, name) = (&boundary["count"], boundary["name"].as_str().unwrap());
            let line = text
                .lines()
                .map(words)
                .find(|line| line.starts_with(&format!("{count} ")) && line.ends_with(name));
            let prices = line.expect(name).matches('s').count();
            assert!(prices >= 3, "{name} has a price for each machine");
        }
    }
    let details = lily(&["plan", "--details", &config]).worked().output;
    for text in [&text, &details] {
        assert!(text.contains("without that last step"));
    }
    assert!(details.contains("Steps, fused") && details.contains("By operation, fused"));
    assert!(details.contains("each output sums over the whole input row"));
    let steps = lily(&["plan", "--steps", "--machine", "m5-max"])
        .worked()
        .output;
    assert!(
        steps.contains("model.layers.7."),
        "the embedded model's last layer"
    );
    assert!(!steps.contains("H200"));
}

#[test]
fn the_embedded_model_is_inspected() {
    let report = lily(&["inspect", "--json"]).json();
    assert_eq!(report["model"]["name"], "lily-tiny");
    assert_eq!(report["parameters"], 21_737_520);
    assert_eq!(report["tensors"]["text"]["tensors"], 357);
    assert_eq!(report["tensors"]["vision"]["tensors"], 0);
    assert_eq!(report["config"]["experts"], 32);
    let sum: u64 = report["formats"]
        .as_array()
        .unwrap()
        .iter()
        .map(|format| format["bytes"].as_u64().unwrap())
        .sum();
    assert_eq!(report["tensors"]["text"]["bytes"], sum);
    assert_eq!(report["memory"]["cache_bytes_per_token"], 2_048);
    assert_eq!(report["device"]["device"], "cpu");
    for phase in ["decode", "prefill"] {
        assert!(report["expected_speed"][phase]["tokens_per_second_at_most"].as_f64() > Some(0.0));
    }
    // The limit decides what fits: nothing, all, and something between.
    let largest = |memory: &str| {
        let report = lily(&["inspect", "--json", "--memory", memory]).json();
        report["memory"]["largest_context"].as_u64().unwrap()
    };
    assert_eq!((largest("1MB"), largest("10GB")), (0, 32_768));
    let between = largest("40MB");
    assert!(between > 0 && between < 32_768, "{between}");
    let longest = |memory: &str| {
        let text = lily(&["inspect", "--memory", memory]).worked().output;
        let line = text.lines().find(|line| line.contains("longest context"));
        line.unwrap().to_string()
    };
    let all = longest("10GB");
    assert!(
        all.contains("needs 70.4 MB of the 10.0 GB that may be taken"),
        "{all}"
    );
    let some = longest("40MB");
    assert!(some.contains("fits the 40.0 MB"), "{some}");
}

#[test]
fn what_inspect_says_fits_is_what_run_accepts() {
    let report = lily(&["inspect", "--json", "--memory", "30MB"]).json();
    let largest = report["memory"]["largest_context"].as_u64().unwrap();
    let run = |tokens: u64| {
        let prompt_tokens = 12;
        let limit = (tokens - prompt_tokens).to_string();
        lily(&["run", "--memory", "30MB", "--max-tokens", &limit, "Hello!"])
    };
    run(largest).worked();
    run(largest + 1).failed(1, "--memory");
}

#[test]
fn a_sharded_checkpoint_with_other_tensors_is_inspected() {
    let path = repository("fixtures/oracle-small-b");
    let path = path.to_str().unwrap();
    let report = lily(&["inspect", "--json", path]).json();
    assert_eq!(report["files"].as_array().unwrap().len(), 3);
    assert_eq!(report["tensors"]["vision"]["tensors"], 3);
    assert_eq!(report["tensors"]["multi_token"]["tensors"], 2);
    let text = lily(&["inspect", path]).worked().output;
    for part in [
        "model-00002-of-00003.safetensors",
        "vision tower, skipped",
        "Gated DeltaNet",
        "longest context",
        "not a measurement",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
}

#[test]
fn bench_measures_each_case_as_often_as_asked() {
    let report = lily(&[
        "bench",
        "--json",
        "--prefill",
        "8,24",
        "--decode",
        "4",
        "--context",
        "0,16",
        "--repetitions",
        "3",
        "--chunk",
        "16",
        "--require-kernels",
        "native",
    ])
    .json();
    assert_eq!(report["device"]["device"], "cpu");
    assert_eq!(report["prefill_chunk"], 16);
    let cases = report["cases"].as_array().unwrap();
    let of = |key: &str| {
        cases
            .iter()
            .map(|case| case[key].clone())
            .collect::<Vec<_>>()
    };
    assert_eq!(
        of("kind"),
        [
            "prefill", "prefill", "decode", "prefill", "prefill", "decode"
        ]
    );
    assert_eq!(of("tokens"), [8, 24, 4, 8, 24, 4]);
    assert_eq!(of("context"), [0, 0, 0, 16, 16, 16]);
    for case in cases {
        assert_eq!(case["seconds"].as_array().unwrap().len(), 3);
        let rate = |key: &str| case["tokens_per_second"][key].as_f64().unwrap();
        assert!(
            rate("min") > 0.0 && rate("min") <= rate("median") && rate("median") <= rate("max")
        );
        assert!(case["dispatches"].as_u64() > Some(0));
    }
    let text = lily(&[
        "bench",
        "--prefill",
        "8",
        "--decode",
        "2",
        "--repetitions",
        "1",
    ])
    .worked()
    .output;
    assert!(
        text.contains("kernels native")
            && text.contains("median tok/s")
            && text.contains("memory moved, counted"),
        "{text}"
    );
}

#[test]
fn bench_refuses_to_measure_other_kernels_than_asked() {
    let arguments = [
        "bench",
        "--device",
        "reference",
        "--require-kernels",
        "native",
        "--prefill",
        "8",
    ];
    lily(&arguments).failed(1, "reference (plain loops)");
}

#[test]
fn the_embedded_model_is_verified_in_both_precisions() {
    for precision in ["bf16", "f32"] {
        let report = lily(&["verify", "--json", "--precision", precision]).json();
        assert_eq!(report["passed"], true);
        assert_eq!(report["positions"], 192);
        assert_eq!(report["precision"], precision);
        assert!(report["top1_agreement"].as_u64() >= Some(183), "{report}");
        assert!(
            (report["perplexity"].as_f64().unwrap() - 1.909).abs() < 0.015,
            "{report}"
        );
        assert!(
            report["mean_logprob_difference"].as_f64() < Some(0.05),
            "{report}"
        );
    }
    let text = lily(&[
        "verify",
        "--record",
        "mlx_bf16",
        "--max-perplexity-difference",
        "0.03",
    ]);
    assert!(text.worked().output.contains("passed"));
}

#[test]
fn a_missed_threshold_fails_with_the_figures() {
    for (threshold, value, named) in [
        ("--min-top1", "193", "needed are 193"),
        ("--max-perplexity-difference", "0", "allowed is 0"),
    ] {
        let ran = lily(&["verify", "--json", threshold, value]);
        assert_eq!(ran.status, Some(1));
        assert!(ran.errors.contains(named), "{}", ran.errors);
        let report: Value = serde_json::from_str(&ran.output).unwrap();
        assert_eq!(report["passed"], false);
        assert!(report["missed"][0].as_str().unwrap().contains(named));
    }
}

#[test]
fn another_reference_sets_its_own_thresholds() {
    let directory = tempfile::tempdir().unwrap();
    let reference = r#"{"input_ids": [4056, 302], "target_ids": [302, 198],
        "ours": {"top1": [302, 198], "target_logprobs": [-0.5, -0.1]}}"#;
    let path = file(&directory, "reference.json", reference);
    let report = lily(&["verify", "--json", "--reference", &path, "--record", "ours"]).json();
    assert_eq!(report["positions"], 2);
    assert_eq!(report["thresholds"]["min_top1"], Value::Null);
    let text = lily(&["verify", "--reference", &path, "--record", "ours"])
        .worked()
        .output;
    assert!(text.contains("no threshold was set"));
    let unknown = reference.replace("[4056, 302]", "[4056, 999999]");
    let path = file(&directory, "unknown.json", &unknown);
    lily(&["verify", "--reference", &path, "--record", "ours"])
        .failed(2, "unknown.json: input_ids[1] is 999999");
    let positive = reference.replace("-0.1", "0.1");
    let path = file(&directory, "positive.json", &positive);
    lily(&["verify", "--reference", &path, "--record", "ours"])
        .failed(2, "positive.json: ours.target_logprobs[1] is 0.1");
    // Nothing is recorded of other models.
    let model = repository("fixtures/oracle-small-b");
    lily(&["verify", "--model", model.to_str().unwrap()]).failed(2, "--reference");
}

/// What the list has, the command line takes: `docs/on-a-mac.md` goes through it.
#[test]
fn each_switch_of_the_list_can_be_given() {
    let list = lily(&["bench", "--list-switches"]).worked().output;
    let names: Vec<&str> = list.lines().collect();
    for known in ["fused-delta-step", "packed-heads", "run-ahead"] {
        assert!(names.contains(&known), "{list}");
    }
    for name in names {
        assert_eq!(
            lily(&["bench", "--list-switches", "--switch-off", name])
                .worked()
                .output,
            list
        );
    }
}

/// A mechanism that is off is in every report of what ran, and changes what ran.
#[test]
fn a_mechanism_that_is_turned_off_is_told() {
    let bench = |more: &[&str]| {
        let arguments = [
            "bench",
            "--json",
            "--prefill",
            "8",
            "--decode",
            "2",
            "--repetitions",
            "1",
        ];
        lily(&[&arguments[..], more].concat()).json()
    };
    let (with, without) = (bench(&[]), bench(&["--switch-off", "fused-delta-step"]));
    let kernels = |report: &Value| report["device"]["kernels"].as_str().unwrap().to_string();
    assert!(kernels(&without).ends_with("; without fused-delta-step"));
    assert!(!kernels(&with).contains("without"));
}
