//! Every class of failure has its status, and its message names the thing.

mod support;

use support::{file, lily, lily_with_input, repository};

/// Failures of usage, with the part of the message that names what is wrong.
#[test]
fn wrong_usage_ends_with_2() {
    for (arguments, named) in [
        (&["run", "--bogus", "x"][..], "--bogus"),
        (&["bogus"], "bogus"),
        (&["run", ""], "the prompt is empty"),
        (&["run"], "the prompt is empty"),
        (&["run", "--raw", ""], "the prompt is empty"),
        (&["run", "--top-k", "0", "x"], "--top-k"),
        (&["run", "--top-p", "0", "x"], "top_p"),
        (&["run", "--min-p", "1", "x"], "min_p"),
        (&["run", "--temperature", "-1", "x"], "temperature"),
        (&["run", "--temperature", "NaN", "x"], "temperature"),
        (
            &["run", "--repetition-penalty", "0", "x"],
            "repetition_penalty",
        ),
        (&["run", "--presence-penalty", "3", "x"], "presence_penalty"),
        (&["run", "--logit-bias", "5", "x"], "--logit-bias"),
        (&["run", "--logit-bias", "9999=1", "x"], "9999"),
        (
            &["run", "--logit-bias", "5=1", "--logit-bias", "5=2", "x"],
            "more than once",
        ),
        (&["run", "--json", "--logprobs", "21", "x"], "logprobs"),
        (&["run", "--logprobs", "1", "x"], "--json"),
        (
            &["run", "--greedy", "--temperature", "1", "x"],
            "--temperature",
        ),
        (&["run", "--stop", "", "x"], "--stop"),
        (&["run", "--max-tokens", "0", "x"], "--max-tokens"),
        (
            &["run", "--max-tokens", "99999999999999999999999", "x"],
            "it is too large: a whole number from 1 to 18446744073709551615",
        ),
        (
            &["run", "-q", "--reasoning", "show", "x"],
            "--quiet and --reasoning show",
        ),
        (&["run", "--seed", "-1", "x"], "--seed"),
        (&["run", "--context", "32769", "x"], "32769"),
        (&["run", "--memory", "4XB", "x"], "XB"),
        (&["run", "--threads", "100000", "x"], "--threads"),
        (&["run", "--chunk", "0", "x"], "--chunk"),
        #[cfg(not(target_os = "macos"))]
        (
            &["run", "--device", "metal", "x"],
            "metal is for macOS alone",
        ),
        (
            &[
                "run",
                "--switch-off",
                "packed-heads",
                "--device",
                "cpu",
                "x",
            ],
            "--switch-off packed-heads is for GPU devices",
        ),
        (&["run", "--switch-off", "gravity", "x"], "packed-heads"),
        (
            &["bench", "--device", "cpu", "--stage-times"],
            "--stage-times is for GPUs",
        ),
        (
            &["bench", "--device", "emulated", "--stage-times"],
            "give --device metal or cuda",
        ),
        (
            &["bench", "--device", "cuda", "--gpu-trace", "x.gputrace"],
            "--gpu-trace is for --device metal",
        ),
        (&["run", "--device", "abacus", "x"], "abacus"),
        (&["run", "--precision", "f8", "x"], "f8"),
        (&["run", "--model", "/no/such/model", "x"], "/no/such/model"),
        (
            &["run", "--tools", "/no/such/tools.json", "x"],
            "/no/such/tools.json",
        ),
        (
            &["run", "--messages", "/no/such/messages.json"],
            "/no/such/messages.json",
        ),
        (
            &["run", "--system", "s", "--messages", "m.json"],
            "--messages",
        ),
        (
            &["plan", "/no/such/config.json"],
            "/no/such/config.json cannot be read\n  because: ",
        ),
        (&["plan", "--context", "32768"], "32768"),
        (
            &["plan", "--context", "32767", "--chunk", "2"],
            "--context 32767 and --chunk 2 make 32769 tokens: the model was made for 32768",
        ),
        (&["plan", "--chunk", "32769"], "32769"),
        (&["plan", "--machine", "abacus"], "abacus"),
        (&["inspect", "/no/such/model"], "/no/such/model"),
        (&["bench", "--prefill", "0"], "--prefill"),
        (&["bench", "--prefill", "32769", "--decode", "1"], "32769"),
        (&["bench", "--repetitions", "99999999999"], "--repetitions"),
        (&["bench", "--require-kernels", ""], "--require-kernels"),
        (&["bench", "--require-kernels", " "], "--require-kernels"),
        (
            &["verify", "--reference", "/no/such/reference.json"],
            "/no/such/reference.json",
        ),
        (&["verify", "--record", "float7"], "mlx_bf16, float32"),
    ] {
        lily(arguments).failed(2, named);
    }
}

#[test]
fn files_that_are_not_what_they_should_be_end_with_2() {
    let directory = tempfile::tempdir().unwrap();
    let text = file(&directory, "text.json", "Once upon a time");
    let table = file(&directory, "table.json", "{}");
    let numbers = file(&directory, "numbers.json", "[1, 2]");
    lily(&["run", "--tools", &text, "x"]).failed(2, "text.json is not JSON");
    lily(&["run", "--tools", &table, "x"]).failed(2, "table.json is not a JSON array");
    lily(&["run", "--messages", &numbers]).failed(2, "numbers.json is not a JSON array");
    lily(&["run", "--model", &text, "x"]).failed(2, "is not a directory");
    lily(&["verify", "--reference", &text]).failed(2, "text.json: it is not JSON");
    lily(&["verify", "--reference", &table]).failed(2, "it has no input_ids");
    lily(&["plan", &table]).failed(2, "table.json");
    lily_with_input(&["run"], b"\xff\xfe").failed(2, "the prompt in standard input is not UTF-8");
    lily_with_input(&["run", "--messages", "-"], b"{}")
        .failed(2, "the conversation in standard input is not a JSON array");
    // A prompt that is a line end is none.
    lily_with_input(&["run"], b"\n").failed(2, "the prompt is empty");
}

#[test]
fn unsound_checkpoints_end_with_2() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_str().unwrap();
    lily(&["run", "--model", path, "x"]).failed(2, "config.json");
    let tiny = repository("models/lily-tiny");
    std::fs::copy(
        tiny.join("config.json"),
        directory.path().join("config.json"),
    )
    .unwrap();
    lily(&["run", "--model", path, "x"]).failed(2, "model.safetensors");
    lily(&["inspect", path]).failed(2, &format!("help: lily plan {path}"));
    let weights = std::fs::read(tiny.join("model.safetensors")).unwrap();
    std::fs::write(
        directory.path().join("model.safetensors"),
        &weights[..weights.len() - 1],
    )
    .unwrap();
    lily(&["inspect", path]).failed(2, "model.safetensors");
    std::fs::write(directory.path().join("model.safetensors"), &weights).unwrap();
    lily(&["run", "--model", path, "x"]).failed(2, "tokenizer.json");
    // What can be looked at is, though it cannot be run.
    let looked = lily(&["inspect", "--json", path]).json();
    assert_eq!(
        looked["text_files"]["tokenizer.json"],
        serde_json::Value::Null
    );
    for name in ["tokenizer.json", "generation_config.json"] {
        std::fs::copy(tiny.join(name), directory.path().join(name)).unwrap();
    }
    lily(&["run", "--model", path, "x"]).failed(2, "no chat template");
    lily(&["run", "--raw", "--max-tokens", "2", "--model", path, "x"]).worked();
}

/// The message, its file's path left out, for a checkpoint with one text file replaced.
fn told_of(name: &str, content: &str) -> String {
    let directory = tempfile::tempdir().unwrap();
    let tiny = repository("models/lily-tiny");
    for file in [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
    ] {
        std::fs::copy(tiny.join(file), directory.path().join(file)).unwrap();
    }
    std::fs::write(directory.path().join(name), content).unwrap();
    let path = directory.path().to_str().unwrap();
    let ran = lily(&["run", "--model", path, "x"]);
    ran.failed(2, path);
    ran.errors.replace(path, "DIRECTORY")
}

#[test]
fn a_text_file_at_fault_is_named_once_and_in_full() {
    let told = told_of("tokenizer.json", "{");
    let expected = "error: DIRECTORY/tokenizer.json: not the JSON of a tokenizer: ";
    assert!(told.starts_with(expected), "{told}");
    assert_eq!(told.matches("tokenizer.json").count(), 1, "{told}");
    assert_eq!(
        told_of("generation_config.json", r#"{"temperature": -1}"#),
        "error: DIRECTORY/generation_config.json: temperature must be a number 0 or more, not -1\n"
    );
    let told = told_of("generation_config.json", "[]");
    let expected = "error: DIRECTORY/generation_config.json: not a JSON object: ";
    assert!(told.starts_with(expected), "{told}");
    let told = told_of("chat_template.jinja", "{% if %}");
    let expected = "error: DIRECTORY: chat template: not a valid template: ";
    assert!(told.starts_with(expected), "{told}");
}

#[test]
fn refused_requests_end_with_1() {
    let long = "word ".repeat(600);
    let directory = tempfile::tempdir().unwrap();
    let assistant = r#"[{"role": "assistant", "content": "Hello!"}]"#;
    let messages = file(&directory, "messages.json", assistant);
    for (arguments, named) in [
        (
            &["run", "--context", "10", "What is the capital of Norway?"][..],
            "the context 10",
        ),
        (&["run", "--context", "500", &long], "the context 500"),
        (&["run", "--memory", "1MiB", "x"], "the limit is 1.05 MB"),
        (
            &["run", "--memory", "25MB", "--max-tokens", "30000", "x"],
            "--memory",
        ),
        (
            &["run", "--messages", &messages],
            "No user query found in messages.",
        ),
        (
            &["bench", "--require-kernels", "abacus", "--prefill", "8"],
            "abacus",
        ),
    ] {
        lily(arguments).failed(1, named);
    }
}

#[test]
fn memory_that_is_short_shortens_the_answer_and_not_the_prompt() {
    // The default limit of the answer is what fits; nothing has to be known of it to get one.
    let ran = lily(&["run", "--memory", "25MB", "Hello!"]).worked();
    assert_eq!(ran.output, "Hello! How can I help you today?\n");
}

#[test]
fn help_tells_examples_and_exit_codes() {
    for (command, sentence) in [
        (
            "run",
            "The answer's content goes to standard output as it is made, and nothing else does",
        ),
        (
            "serve",
            "The server listens to this machine alone, unless it is given a key and another address.",
        ),
        ("plan", "Works from a config.json alone."),
        (
            "inspect",
            "On the processor it reads headers only, whatever the size",
        ),
        ("bench", "Prompts are synthetic and nothing is sampled"),
        ("verify", "Fails if a threshold is missed."),
        ("chat", "Ctrl-C stops the answer, Ctrl-D leaves."),
        ("completions", "Print what a shell needs"),
        ("man", "write one for each command"),
    ] {
        for arguments in [[command, "--help"], ["help", command]] {
            let help = lily(&arguments).worked().output;
            let words: Vec<&str> = help.split_whitespace().collect();
            for part in [
                sentence,
                &format!("lily {command}"),
                "Examples",
                "Exit codes:",
            ] {
                assert!(words.join(" ").contains(part), "{part} in {help}");
            }
        }
    }
    assert!(lily(&["--version"]).worked().output.starts_with("lily 0."));
    let nothing = lily(&[]);
    assert_eq!(nothing.status, Some(2));
    assert!(nothing.errors.contains("Exit codes:"));
}
