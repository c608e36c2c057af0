//! `lily run`, end to end with the embedded model.

mod support;

use serde_json::{Value, json};
use std::io::Read;
use std::process::Stdio;
use support::{command, expected, file, lily, lily_with_input, repository};

const NORWAY: &str = "What is the capital of Norway?";
const OSLO: &str = "The capital of Norway is Oslo.";
const STORY: &str = "Tell me a story about a fox and a lantern.";

#[test]
fn the_first_command_of_a_newcomer_is_answered_whatever_the_seed() {
    let ran = lily(&["run", NORWAY]).worked();
    // Standard output has the answer and a newline, and whoever is no terminal sees nothing else.
    assert_eq!(
        (ran.output.as_str(), ran.errors.as_str()),
        (&*format!("{OSLO}\n"), "")
    );
    for seed in 0..10 {
        let seed = seed.to_string();
        let thinking = lily(&["run", "--seed", &seed, NORWAY]).worked();
        let at_once = lily(&["run", "--seed", &seed, "--no-thinking", NORWAY]).worked();
        assert_eq!(
            (thinking.output, at_once.output),
            (format!("{OSLO}\n"), format!("{OSLO}\n"))
        );
    }
}

#[test]
fn the_prompt_may_come_in_words_or_from_standard_input() {
    for (arguments, input) in [
        (&["run", "What", "is the capital", "of Norway?"][..], ""),
        (&["run"], "What is the capital of Norway?\n"),
        (&["run", "-"], "What is the capital of Norway?\r\n"),
    ] {
        let ran = lily_with_input(arguments, input.as_bytes()).worked();
        assert_eq!(ran.output, format!("{OSLO}\n"), "{arguments:?}");
    }
}

#[test]
fn json_tells_everything_in_one_object() {
    let report = lily(&["run", "--json", "--ids", "--greedy", NORWAY]).json();
    assert_eq!(report["content"], OSLO);
    assert_eq!(
        report["reasoning"],
        "I know that the capital of Norway is Oslo."
    );
    assert_eq!(report["tool_calls"], json!([]));
    assert_eq!(report["finish_reason"], "stop");
    assert_eq!(report["model"]["name"], "lily-tiny");
    assert_eq!(report["model"]["source"], "embedded");
    assert_eq!(report["device"]["device"], "cpu");
    assert!(
        report["device"]["kernels"]
            .as_str()
            .unwrap()
            .starts_with("native")
    );
    assert_eq!(report["precision"], "bf16");
    assert_eq!(report["sampling"]["temperature"], 0.0);
    assert!(report["seed"].is_u64());
    assert_eq!(report["cached_tokens"], 0);
    let count = |key: &str| report[key].as_array().unwrap().len();
    assert_eq!(report["prompt_tokens"], count("prompt_ids"));
    assert_eq!(report["completion_tokens"], count("completion_ids"));
    // The token that ends the answer is one of its tokens.
    assert_eq!(
        report["completion_ids"].as_array().unwrap().last(),
        Some(&json!(4057))
    );
    let timings = &report["timings"];
    assert_eq!(timings["prefill_tokens"], report["prompt_tokens"]);
    for key in ["prefill_tokens_per_second", "decode_tokens_per_second"] {
        assert!(timings[key].as_f64().unwrap() > 0.0, "{key}");
    }
    assert!(report.get("logprobs").is_none());
}

#[test]
fn a_seed_repeats_an_answer_and_another_changes_it() {
    let story = |seed: &str| {
        let arguments = [
            "run",
            "--json",
            "--no-thinking",
            "--max-tokens",
            "40",
            "--seed",
            seed,
            STORY,
        ];
        lily(&arguments).json()["content"]
            .as_str()
            .unwrap()
            .to_string()
    };
    assert_eq!(story("1"), story("1"));
    let stories: std::collections::HashSet<String> = ["1", "2", "3", "4"].map(story).into();
    assert!(stories.len() > 1, "{stories:?}");
    // What was drawn without a seed can be drawn again with the one that the report tells.
    let drawn = lily(&[
        "run",
        "--json",
        "--no-thinking",
        "--max-tokens",
        "40",
        STORY,
    ])
    .json();
    assert_eq!(
        story(&drawn["seed"].to_string()),
        drawn["content"].as_str().unwrap()
    );
}

#[test]
fn sampling_flags_reach_the_sampler_and_defaults_are_the_checkpoints() {
    let report = lily(&["run", "--json", NORWAY]).json();
    assert_eq!(report["sampling"]["temperature"], 1.0);
    assert_eq!(report["sampling"]["top_k"], 20);
    let report = lily(&[
        "run",
        "--json",
        "--temperature",
        "0.5",
        "--top-k",
        "all",
        "--top-p",
        "1",
        "--min-p",
        "0.1",
        "--repetition-penalty",
        "1.1",
        "--presence-penalty",
        "-0.5",
        "--frequency-penalty",
        "0.25",
        "--logit-bias",
        "4090=-100",
        "--seed",
        "9",
        NORWAY,
    ])
    .json();
    assert_eq!(
        report["sampling"],
        json!({
            "temperature": 0.5, "top_k": null, "top_p": 1.0, "min_p": 0.1, "repetition_penalty": 1.1,
            "presence_penalty": -0.5, "frequency_penalty": 0.25, "logit_bias": [[4090, -100.0]],
            "chosen": "on the device, by sampling",
        })
    );
    assert_eq!(report["seed"], 9);
    let on_the_host = lily(&["run", "--json", "--host-sampling", "--seed", "9", NORWAY]).json();
    let on_the_device = lily(&["run", "--json", "--seed", "9", NORWAY]).json();
    assert_eq!(
        on_the_host["sampling"]["chosen"],
        "on the host: as asked for"
    );
    assert_eq!(on_the_host["content"], on_the_device["content"]);
}

#[test]
fn a_stop_text_ends_the_answer_and_is_no_part_of_it() {
    let arguments = [
        "run",
        "--json",
        "--no-thinking",
        "--greedy",
        "--stop",
        " is",
        NORWAY,
    ];
    let report = lily(&arguments).json();
    assert_eq!(report["content"], "The capital of Norway");
    assert_eq!(report["finish_reason"], "stop");
    assert_eq!(report["stop"], " is");
}

#[test]
fn a_limit_ends_the_answer_with_length() {
    let arguments = [
        "run",
        "--json",
        "--no-thinking",
        "--max-tokens",
        "3",
        "Count from 1 to 60.",
    ];
    let report = lily(&arguments).json();
    assert_eq!(report["finish_reason"], "length");
    assert_eq!(report["completion_tokens"], 3);
    // A limit beyond the context is the context.
    let report = lily(&["run", "--json", "--max-tokens", "9999999999", NORWAY]).json();
    assert_eq!(report["finish_reason"], "stop");
}

#[test]
fn an_answer_cut_off_while_reasoning_says_so() {
    let ran = lily(&["run", "--greedy", "--max-tokens", "4", NORWAY]).worked();
    assert_eq!(ran.output, "");
    assert!(ran.errors.contains("--no-thinking"), "{}", ran.errors);
    assert_eq!(
        lily(&["run", "-q", "--greedy", "--max-tokens", "4", NORWAY]).errors,
        ""
    );
}

#[test]
fn logprobs_are_ordered_and_make_up_the_whole_at_most() {
    let report = lily(&["run", "--json", "--greedy", "--logprobs", "20", NORWAY]).json();
    let tokens = report["logprobs"].as_array().unwrap();
    assert_eq!(report["completion_tokens"], tokens.len());
    for token in tokens {
        let top: Vec<f64> = token["top"]
            .as_array()
            .unwrap()
            .iter()
            .map(|alternative| alternative["logprob"].as_f64().unwrap())
            .collect();
        assert_eq!(top.len(), 20);
        assert!(top.is_sorted_by(|a, b| a >= b), "{top:?}");
        let mass: f64 = top.iter().map(|logprob| logprob.exp()).sum();
        assert!(mass > 0.9 && mass < 1.0 + 1e-5, "{mass}");
        // Greedy: the likeliest is what was chosen.
        assert_eq!(token["id"], token["top"][0]["id"]);
        assert_eq!(token["logprob"], token["top"][0]["logprob"]);
    }
    let text: String = tokens
        .iter()
        .map(|token| token["token"].as_str().unwrap())
        .collect();
    assert!(text.ends_with(&format!("{OSLO}<|im_end|>")), "{text}");
}

#[test]
fn reasoning_is_kept_apart_from_the_answer() {
    let ran = lily(&["run", "--greedy", "--reasoning", "show", NORWAY]).worked();
    assert_eq!(ran.output, format!("{OSLO}\n"));
    assert_eq!(ran.errors, "I know that the capital of Norway is Oslo.\n\n");
}

#[test]
fn what_ran_is_told_to_who_asks() {
    let ran = lily(&[
        "run",
        "-v",
        "--device",
        "reference",
        "--seed",
        "5",
        "--max-tokens",
        "2",
        NORWAY,
    ]);
    let errors = ran.worked().errors;
    for part in [
        "lily-tiny (embedded)",
        "kernels reference",
        "bf16",
        "seed 5",
        "top-k 20",
        "prompt 18 tokens",
    ] {
        assert!(errors.contains(part), "{part} in {errors}");
    }
}

#[test]
fn plain_text_goes_on_without_the_chat_template() {
    let arguments = [
        "run",
        "--raw",
        "--json",
        "--ids",
        "--greedy",
        "--max-tokens",
        "6",
        "O",
    ];
    let report = lily(&arguments).json();
    assert_eq!(report["prompt_tokens"], 1);
    assert_eq!(report["completion_tokens"], 6);
    assert!(!report["content"].as_str().unwrap().is_empty());
    // Standard input is taken as it is: the newline is a token of the prompt.
    let report = lily_with_input(&["run", "--raw", "--json", "--max-tokens", "1"], b"O\n").json();
    assert_eq!(report["prompt_tokens"], 2);
}

#[test]
fn a_system_message_and_a_conversation_reach_the_template() {
    let with_system = lily(&["run", "--json", "--system", "Answer in upper case.", NORWAY]).json();
    let without = lily(&["run", "--json", NORWAY]).json();
    assert!(with_system["prompt_tokens"].as_u64() > without["prompt_tokens"].as_u64());

    let case = expected("expected-019");
    let directory = tempfile::tempdir().unwrap();
    let messages = file(&directory, "messages.json", &case["messages"].to_string());
    let arguments = ["run", "--greedy", "--no-thinking", "--messages", &messages];
    assert_eq!(lily(&arguments).worked().output, "Your name is Marco.\n");
    let arguments = ["run", "--greedy", "--no-thinking", "--messages", "-"];
    let ran = lily_with_input(&arguments, case["messages"].to_string().as_bytes()).worked();
    assert_eq!(ran.output, "Your name is Marco.\n");
}

#[test]
fn tool_calls_are_lines_of_json() {
    let case = expected("expected-027");
    let directory = tempfile::tempdir().unwrap();
    let tools = file(&directory, "tools.json", &case["tools"].to_string());
    let messages = file(&directory, "messages.json", &case["messages"].to_string());
    let base = [
        "run",
        "--greedy",
        "--tools",
        &tools,
        "--messages",
        &messages,
    ];
    let calls = [
        json!({"name": "start_timer", "arguments": {"time": 29, "label": "tomato"}}),
        json!({"name": "start_timer", "arguments": {"time": 19, "label": "waffle"}}),
    ];

    let lines: Vec<Value> = lily(&base)
        .worked()
        .output
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(lines, calls);

    let report = lily(&[&base[..], &["--json"]].concat()).json();
    assert_eq!(report["tool_calls"], json!(calls));
    assert_eq!(report["finish_reason"], "tool_calls");
    assert_eq!(report["content"], "");

    // Cut off within a call, no markup is left over as content.
    let report = lily(&[&base[..], &["--json", "--max-tokens", "25"]].concat()).json();
    assert_eq!(report["finish_reason"], "length");
    assert_eq!(
        (&report["content"], &report["tool_calls"]),
        (&json!(""), &json!([]))
    );
}

#[test]
fn the_example_with_tools_calls_one() {
    let help = lily(&["run", "--help"]).worked().output;
    let mut examples = help.lines().map(str::trim);
    let example = examples
        .find(|line| line.starts_with("lily run") && line.contains("--tools"))
        .unwrap();
    let (flags, prompt) = example.split_once(" \"").unwrap();
    let path = "models/lily-tiny/tools.json";
    let tools = repository(path);
    let mut arguments: Vec<&str> = flags.split(' ').skip(1).collect();
    let named = arguments.iter_mut().find(|argument| **argument == path);
    *named.unwrap() = tools.to_str().unwrap();
    arguments.push(prompt.trim_end_matches('"'));
    assert_eq!(
        lily(&arguments).worked().output,
        "{\"name\":\"start_timer\",\"arguments\":{\"minutes\":5}}\n"
    );
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    for arguments in [
        &["run", "--no-thinking", "Count from 1 to 60."][..],
        &["plan", "--steps"],
    ] {
        let mut child = command(arguments)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut output = child.stdout.take().unwrap();
        output.read_exact(&mut [0]).unwrap();
        drop(output);
        let ended = child.wait_with_output().unwrap();
        assert_eq!(ended.status.code(), Some(0), "{arguments:?}");
        assert_eq!(String::from_utf8_lossy(&ended.stderr), "");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn output_that_cannot_be_written_is_an_error() {
    let full = std::fs::File::options()
        .write(true)
        .open("/dev/full")
        .unwrap();
    let ended = command(&["run", NORWAY]).stdout(full).output().unwrap();
    assert_eq!(ended.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&ended.stderr).starts_with("error: standard output"));
}

#[cfg(unix)]
#[test]
fn an_interrupted_answer_is_cut_short_and_says_so_by_its_status() {
    // The reference takes many seconds for what comes after the first character.
    let arguments = [
        "run",
        "--device",
        "reference",
        "--no-thinking",
        "Count from 1 to 60.",
    ];
    let mut child = command(&arguments)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut output = child.stdout.take().unwrap();
    output.read_exact(&mut [0]).unwrap();
    let id = child.id().to_string();
    let sent = std::process::Command::new("kill")
        .args(["-INT", &id])
        .status()
        .unwrap();
    assert!(sent.success());
    let mut rest = String::new();
    output.read_to_string(&mut rest).unwrap();
    let ended = child.wait_with_output().unwrap();
    assert_eq!(ended.status.code(), Some(130));
    assert_eq!(String::from_utf8_lossy(&ended.stderr), "");
    assert!(rest.ends_with('\n') && !rest.contains("60"), "{rest}");
}

#[test]
fn the_same_checkpoint_in_a_directory_answers_the_same() {
    let directory = repository("models/lily-tiny");
    let report = lily(&[
        "run",
        "--json",
        "--greedy",
        "--model",
        directory.to_str().unwrap(),
        NORWAY,
    ])
    .json();
    let embedded = lily(&["run", "--json", "--greedy", NORWAY]).json();
    assert_eq!(report["content"], OSLO);
    assert_eq!(report["model"]["identity"], embedded["model"]["identity"]);
    assert_eq!(report["model"]["name"], "lily-tiny");
}
