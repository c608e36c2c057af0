//! `lily chat` as people use it: in a terminal, in one that can do little, and in a pipe.
#![cfg(unix)]

mod support;
mod terminal;

use lily_checkpoint::Checkpoint;
use lily_engine::TextModel;
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use support::{command, expected, file, lily, lily_with_input, repository};
use terminal::{CTRL_C, CTRL_D, DIM, ENTER, Terminal, UP, status_of};

const QUESTION: &str = "What is 38 + 47?";
const ANSWER: &str = "38 + 47 = 85";
/// What is told behind an answer.
const COUNTS: &str = " written at ";

/// The repeatable model, with chunks that short conversations have several of.
const GREEDY: [&str; 4] = ["chat", "--greedy", "--chunk", "8"];

fn with<'a>(arguments: &[&'a str]) -> Vec<&'a str> {
    GREEDY.iter().chain(arguments).copied().collect()
}

/// Arguments that let no answer end by itself.
fn endless() -> Vec<String> {
    let checkpoint = Checkpoint::open(&repository("models/lily-tiny")).unwrap();
    let text = TextModel::load(&checkpoint).unwrap();
    let bias = |id: &u32| ["--logit-bias".to_string(), format!("{id}=-100")];
    let mut arguments: Vec<String> = text.stop_ids().iter().flat_map(bias).collect();
    arguments.extend(["--max-tokens", "3000", "--no-thinking"].map(String::from));
    arguments
}

fn tools() -> String {
    repository("models/lily-tiny/tools.json")
        .display()
        .to_string()
}

fn json_of(path: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

#[test]
fn a_conversation_in_a_terminal() {
    let home = tempfile::tempdir().unwrap();
    let mut terminal = Terminal::new(home.path(), &with(&["--no-thinking"]), &[]);
    terminal.ready();
    terminal.send(&format!("{QUESTION}{ENTER}"));
    terminal.sees(ANSWER);
    terminal.sees("22 tokens read at ");
    terminal.sees(COUNTS);
    terminal.ready();
    // The same text again, and the prompt is not read again up to the end of the message.
    terminal.send(&format!("/retry{ENTER}"));
    terminal.sees(ANSWER);
    terminal.sees("22 tokens read (14 cached) at ");
    terminal.ready();
    terminal.send(&format!("/leave{ENTER}"));
    terminal.sees("error: /leave is not a command");
    terminal.sees("/help lists the commands");
    terminal.ready();
    terminal.send(&format!("/help{ENTER}"));
    terminal.sees("/retry");
    terminal.ready();
    // Ctrl-C empties the line: what was typed is not part of the next one.
    terminal.send("Spell lan");
    terminal.sees("Spell lan");
    terminal.send(CTRL_C);
    terminal.sees("(Ctrl-D leaves)");
    terminal.ready();
    terminal.send(&format!("Hello!{ENTER}"));
    terminal.sees("How can I help you today?");
    terminal.sees(COUNTS);
    terminal.ready();
    terminal.send(CTRL_D);
    assert_eq!(terminal.status(), Some(0), "{}", terminal.transcript());
}

#[test]
fn ctrl_c_stops_the_answer_and_the_conversation_goes_on() {
    let home = tempfile::tempdir().unwrap();
    let saved = home.path().join("cut.json");
    let endless = endless();
    let endless: Vec<&str> = endless.iter().map(String::as_str).collect();
    let mut terminal = Terminal::new(home.path(), &with(&endless), &[]);
    terminal.ready();
    terminal.send(&format!("Tell me a story.{ENTER}"));
    terminal.sees("Once upon a time");
    terminal.send(CTRL_C);
    terminal.sees(" · interrupted");
    terminal.ready();
    terminal.send(&format!("{QUESTION}{ENTER}"));
    terminal.sees(ANSWER);
    terminal.send(CTRL_C);
    terminal.sees(" cached) at ");
    terminal.sees(" · interrupted");
    terminal.ready();
    terminal.send(&format!("/save {}{ENTER}", saved.display()));
    terminal.sees("4 messages saved");
    let permissions = std::fs::metadata(&saved).unwrap().permissions();
    assert_eq!(permissions.mode() & 0o777, 0o600);
    // The story stays as far as it came, and can be gone on with elsewhere.
    let messages = json_of(&saved)["messages"].clone();
    let cut = messages[1]["content"].as_str().unwrap();
    assert!(cut.starts_with("Once upon a time"), "{cut}");
    assert_eq!(messages[1]["finish_reason"], "cancelled");
    assert_eq!(messages[2], json!({"role": "user", "content": QUESTION}));
    assert!(messages[3]["content"].as_str().unwrap().starts_with(ANSWER));
    terminal.ready();
    terminal.send(CTRL_D);
    assert_eq!(terminal.status(), Some(0), "{}", terminal.transcript());

    let lines = format!("/load {}\n/retry\n", saved.display());
    let again = lily_with_input(&with(&["--no-thinking"]), lines.as_bytes()).worked();
    assert_eq!(again.output, format!("{ANSWER}\n"));
}

#[test]
fn ctrl_c_stops_the_reading_of_a_long_prompt_too() {
    let home = tempfile::tempdir().unwrap();
    let saved = home.path().join("unread.json");
    let mut terminal = Terminal::new(home.path(), &with(&["--no-thinking"]), &[]);
    terminal.ready();
    let long = "The colour of the lantern is blue. ".repeat(1_000);
    terminal.send(&format!("\x1b[200~{long}\x1b[201~{ENTER}"));
    terminal.sees("reading the prompt: ");
    terminal.send(CTRL_C);
    terminal.sees(" 0 written · interrupted");
    terminal.ready();
    terminal.send(&format!("/save {}{ENTER}", saved.display()));
    terminal.sees("1 message saved");
    // Nothing was said: there is a question, and no answer to it.
    assert_eq!(json_of(&saved)["messages"][0]["role"], "user");
    terminal.ready();
    terminal.send(&format!("/clear{ENTER}"));
    terminal.ready();
    terminal.send(&format!("{QUESTION}{ENTER}"));
    terminal.sees(ANSWER);
}

#[test]
fn ctrl_c_ends_it_where_nobody_types() {
    let endless = endless();
    let endless: Vec<&str> = endless.iter().map(String::as_str).collect();
    for (line, answers) in [("Tell me a story.\n", true), ("/help\n", false)] {
        let mut child = command(&with(&endless))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut input = child.stdin.take().unwrap();
        input.write_all(line.as_bytes()).unwrap();
        // The first word of an answer to come, or of the help: then it waits for the next line.
        let mut word = [0; 4];
        if answers {
            child.stdout.as_mut().unwrap().read_exact(&mut word)
        } else {
            child.stderr.as_mut().unwrap().read_exact(&mut word)
        }
        .unwrap();
        let id = child.id().to_string();
        let sent = Command::new("kill").args(["-INT", &id]).status();
        assert!(sent.unwrap().success());
        assert_eq!(status_of(&mut child), Some(130), "{line:?}");
    }
}

#[test]
fn a_seed_makes_a_conversation_repeatable_and_its_answers_differ() {
    let arguments = ["chat", "--no-thinking", "--seed", "7", "--max-tokens", "30"];
    let question = "Tell me a story about a fox and a lantern.\n";
    let once = lily_with_input(&arguments, question.as_bytes());
    let once = once.worked().output;
    let twice = lily_with_input(&arguments, format!("{question}/retry\n").as_bytes());
    let twice = twice.worked().output;
    let other = twice.strip_prefix(&once).expect("the same answer");
    assert_ne!(other, once);
}

#[test]
fn a_result_that_is_skipped_leaves_no_gap_between_others() {
    let directory = tempfile::tempdir().unwrap();
    let case = expected("expected-063");
    let tools = file(&directory, "tools.json", &case["tools"].to_string());
    let saved = directory.path().join("talk.json");
    let question = case["messages"][0]["content"].as_str().unwrap();
    let lines = format!("{question}\n\n7 crowns\n/save {}\n", saved.display());
    let arguments = with(&["--no-thinking", "--tools", &tools]);
    lily_with_input(&arguments, lines.as_bytes()).worked();
    let messages = json_of(&saved)["messages"].clone();
    let results: Vec<&Value> = [2, 3].map(|at| &messages[at]["content"]).to_vec();
    assert_eq!(results, ["(skipped by the user)", "7 crowns"]);
    for (index, at) in [2, 3].into_iter().enumerate() {
        let call = &messages[1]["tool_calls"][index];
        assert_eq!(messages[at]["tool_call_id"], call["id"]);
    }
    assert_ne!(messages[2]["tool_call_id"], messages[3]["tool_call_id"]);
    assert_eq!(messages[4]["role"], "assistant");
}

#[test]
fn answers_do_not_depend_on_what_was_cached() {
    let directory = tempfile::tempdir().unwrap();
    let saved = directory.path().join("talk.json");
    let saved = saved.to_str().unwrap();
    let lines = format!(
        "Tell me a story about a fox and a lantern.\nHello!\n/retry\n{QUESTION}\n/save {saved}\n"
    );
    let arguments = with(&["--no-thinking", "--max-tokens", "40"]);
    let talk = lily_with_input(&arguments, lines.as_bytes()).worked();
    assert!(talk.errors.contains(" cached) at "), "{}", talk.errors);
    assert!(talk.errors.contains("stopped at --max-tokens"));
    let messages = json_of(Path::new(saved))["messages"].clone();
    for answered in [1, 3, 5] {
        let before = &messages.as_array().unwrap()[..answered];
        let path = file(&directory, "before.json", &json!(before).to_string());
        let mut afresh = vec!["run", "--greedy", "--chunk", "8", "--messages", &path];
        afresh.extend(&arguments[4..]);
        let afresh = lily(&afresh).worked().output;
        let kept = messages[answered]["content"].as_str().unwrap();
        assert_eq!(afresh.trim_end_matches('\n'), kept);
    }
}

#[test]
fn a_saved_conversation_goes_on_in_another_process() {
    let home = tempfile::tempdir().unwrap();
    let saved = home.path().join("talk.json");
    let arguments = with(&["--no-thinking", "--system", "Answer in one word."]);
    let mut first = Terminal::new(home.path(), &arguments, &[]);
    first.ready();
    first.send(&format!("What is the capital of Norway?{ENTER}"));
    first.sees("Oslo");
    first.sees(COUNTS);
    first.ready();
    first.send(&format!("/save ~/talk.json{ENTER}"));
    first.sees("2 messages saved");
    first.ready();
    first.send(&format!("/save ~/talk.json{ENTER}"));
    first.sees("talk.json exists");
    let value = json_of(&saved);
    assert_eq!(value["system"], "Answer in one word.");
    assert_eq!(value["settings"]["thinking"], false);
    let answer = value["messages"][1]["content"].as_str().unwrap();

    let mut second = Terminal::new(home.path(), &with(&[]), &[]);
    second.ready();
    second.send(&format!("/load ~/talk.json{ENTER}"));
    second.sees("2 messages loaded");
    second.sees("system message: Answer in one word.");
    second.sees("answers at once");
    second.ready();
    second.send(&format!("/retry{ENTER}"));
    second.sees(answer);
    second.sees(COUNTS);
}

/// What is set on the way is in the file, and in what the model is told.
#[test]
fn settings_are_saved_as_they_were_set() {
    let home = tempfile::tempdir().unwrap();
    let arguments = with(&["--no-thinking"]);
    let mut terminal = Terminal::new(home.path(), &arguments, &[]);
    let mut saved = |lines: &[(&str, &str)], name: &str| {
        for (line, seen) in lines {
            terminal.ready();
            terminal.send(&format!("{line}{ENTER}"));
            terminal.sees(seen);
        }
        terminal.ready();
        terminal.send(&format!("/save ~/{name}{ENTER}"));
        terminal.sees(" saved");
        json_of(&home.path().join(name))
    };
    let asks = (QUESTION, COUNTS);
    let before = saved(&[asks], "before.json");
    assert_eq!(before["system"], Value::Null);
    assert_eq!(before["settings"]["thinking"], false);
    assert_eq!(before["messages"][1].get("reasoning_content"), None);
    let set = [
        ("/system  Answer in one word, always.", "system message"),
        ("/think on", "reasons"),
        ("/retry", COUNTS),
    ];
    let after = saved(&set, "after.json");
    assert_eq!(after["system"], "Answer in one word, always.");
    assert_eq!(after["settings"]["thinking"], true);
    let reasoning = after["messages"][1]["reasoning_content"].as_str();
    assert!(
        reasoning.is_some_and(|reasoning| reasoning.len() > 3),
        "{after}"
    );
    let cleared = [
        ("/system off", "system message"),
        ("/think off", "answers at once"),
    ];
    let cleared = saved(&cleared, "cleared.json");
    assert_eq!(cleared["system"], Value::Null);
    assert_eq!(cleared["settings"]["thinking"], false);
    assert_eq!(cleared["messages"], after["messages"]);
}

#[test]
fn a_bad_file_is_refused_and_nothing_is_lost() {
    let directory = tempfile::tempdir().unwrap();
    let arguments = with(&["--no-thinking"]);
    for (index, (content, named)) in [
        ("[", "is not JSON"),
        ("7", "an object with messages"),
        ("{}", "messages must be an array"),
        (
            r#"{"messages": [{"content": "x"}]}"#,
            "messages[0] needs a role",
        ),
        (
            r#"[{"role": "user", "content": "x"}, {"role": "system", "content": "x"}]"#,
            "messages[1] needs a role",
        ),
        (r#"[{"role": "user"}]"#, "messages[0] needs a content"),
        (r#"{"messages": [], "system": 1}"#, "system must be a text"),
        (r#"{"messages": [], "tools": {}}"#, "tools must be an array"),
        (r#"{"messages": [], "tools": [{}]}"#, "tools[0] has no name"),
        (
            r#"{"messages": [], "settings": {"thinking": "no"}}"#,
            "settings.thinking",
        ),
        (
            r#"[{"role": "user", "content": [{"type": "image_url"}]}]"#,
            "only text is read",
        ),
    ]
    .iter()
    .enumerate()
    {
        let path = file(&directory, &format!("{index}.json"), content);
        let ran = lily_with_input(&arguments, format!("/load {path}\n").as_bytes());
        ran.failed(2, named);
    }
    let nowhere = format!("/load {}\n", directory.path().display());
    lily_with_input(&arguments, nowhere.as_bytes()).failed(2, "is not a file");
    lily_with_input(&arguments, b"/load nowhere.json\n").failed(2, "nowhere.json cannot be read");

    let home = tempfile::tempdir().unwrap();
    let bad = file(&home, "bad.json", r#"{"messages": 1}"#);
    let mut terminal = Terminal::new(home.path(), &arguments, &[]);
    terminal.ready();
    terminal.send(&format!("{QUESTION}{ENTER}"));
    terminal.sees(COUNTS);
    terminal.ready();
    terminal.send(&format!("/load {bad}{ENTER}"));
    terminal.sees("messages must be an array");
    terminal.ready();
    terminal.send(&format!("/retry{ENTER}"));
    terminal.sees(ANSWER);
}

#[test]
fn reasoning_is_dimmed_where_colours_are_wanted() {
    let home = tempfile::tempdir().unwrap();
    for (environment, dims) in [(&[][..], true), (&[("NO_COLOR", "1")][..], false)] {
        let mut terminal = Terminal::new(home.path(), &with(&[]), environment);
        terminal.ready();
        terminal.send(&format!("{QUESTION}{ENTER}"));
        terminal.sees(ANSWER);
        terminal.sees(COUNTS);
        terminal.ready();
        let all = terminal.transcript();
        let answer = all.rfind(ANSWER).unwrap();
        assert_eq!(all[..answer].contains(DIM), dims, "{all}");
        // The answer itself is not.
        let before = all[..answer].rfind("\x1b[0m").unwrap_or(0);
        assert!(!all[before..answer].contains(DIM), "{all}");
        // With /think off there is nothing to dim before the counts.
        terminal.send(&format!("/think off{ENTER}"));
        terminal.sees("answers at once");
        terminal.ready();
        let begin = terminal.transcript().len();
        terminal.send(&format!("/retry{ENTER}"));
        terminal.sees(ANSWER);
        terminal.sees(COUNTS);
        let all = terminal.transcript();
        let answer = begin + all[begin..].find(ANSWER).unwrap();
        assert!(!all[begin..answer].contains(DIM), "{all}");
    }
}

#[test]
fn a_terminal_that_can_do_little_gets_plain_text() {
    let home = tempfile::tempdir().unwrap();
    let endless = endless();
    let endless: Vec<&str> = endless.iter().map(String::as_str).collect();
    let mut terminal = Terminal::new(home.path(), &with(&endless), &[("TERM", "dumb")]);
    terminal.sees("> ");
    terminal.send("What is");
    terminal.send(CTRL_C);
    terminal.sees("(Ctrl-D leaves)");
    terminal.send(&format!("{QUESTION}{ENTER}"));
    terminal.sees(ANSWER);
    terminal.send(CTRL_C);
    terminal.sees(" · interrupted");
    terminal.send(&format!("/retry{ENTER}"));
    terminal.sees(ANSWER);
    terminal.send(CTRL_C);
    terminal.sees("(14 cached)");
    terminal.sees("> ");
    terminal.send(CTRL_D);
    assert_eq!(terminal.status(), Some(0));
    let all = terminal.transcript();
    assert!(!all.contains('\x1b'), "{all:?}");
}

#[test]
fn pasted_text_keeps_its_lines() {
    let home = tempfile::tempdir().unwrap();
    let saved = home.path().join("pasted.json");
    let mut terminal = Terminal::new(home.path(), &with(&["--max-tokens", "4"]), &[]);
    terminal.ready();
    terminal.send(&format!("\x1b[200~one\rtwo\n three\x1b[201~{ENTER}"));
    terminal.sees(COUNTS);
    terminal.ready();
    terminal.send(&format!("\"\"\"{ENTER}four{ENTER}five{ENTER}\"\"\"{ENTER}"));
    terminal.sees(COUNTS);
    terminal.ready();
    terminal.send(&format!("six\x1b\rseven{ENTER}"));
    terminal.sees(COUNTS);
    terminal.ready();
    terminal.send(&format!("/save {}{ENTER}", saved.display()));
    terminal.sees("6 messages saved");
    let messages = json_of(&saved)["messages"].clone();
    assert_eq!(messages[0]["content"], "one\ntwo\n three");
    assert_eq!(messages[2]["content"], "four\nfive");
    assert_eq!(messages[4]["content"], "six\nseven");
}

#[test]
fn the_history_is_private_and_can_be_elsewhere_or_nowhere() {
    let home = tempfile::tempdir().unwrap();
    let state = home.path().join("state");
    let environment = [("XDG_STATE_HOME", state.to_str().unwrap())];
    let say = |arguments: &[&str], text: &str| {
        let mut terminal = Terminal::new(home.path(), &with(arguments), &environment);
        terminal.ready();
        terminal.send(&format!("{text}{ENTER}"));
        terminal.sees("the model");
        terminal.ready();
        terminal.send(CTRL_D);
        assert_eq!(terminal.status(), Some(0));
    };
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    say(&["--no-history"], "/think on");
    assert!(!state.exists());
    say(&[], "/think on");
    let directory = if cfg!(target_os = "macos") {
        home.path().join("Library/Application Support/lily")
    } else {
        state.join("lily")
    };
    let path = directory.join("history");
    assert_eq!(mode(&path), 0o600);
    assert_eq!(mode(&directory), 0o700);
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "/think on\n");
    // The arrow finds it in another process.
    say(&[], UP);
    // One that was open to others is not any more.
    let elsewhere = home.path().join("mine");
    std::fs::write(&elsewhere, "").unwrap();
    std::fs::set_permissions(&elsewhere, std::fs::Permissions::from_mode(0o644)).unwrap();
    say(&["--history", elsewhere.to_str().unwrap()], "/think off");
    assert_eq!(mode(&elsewhere), 0o600);
    assert_eq!(std::fs::read_to_string(&elsewhere).unwrap(), "/think off\n");
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "/think on\n");
}

#[test]
fn tools_are_called_and_their_results_go_back() {
    let home = tempfile::tempdir().unwrap();
    let saved = home.path().join("tools.json");
    let mut terminal = Terminal::new(home.path(), &with(&["--no-thinking"]), &[]);
    terminal.ready();
    terminal.send(&format!("/tools {}{ENTER}", tools()));
    terminal.sees("tools: start_timer");
    terminal.ready();
    terminal.send(&format!("Set a timer for 5 minutes.{ENTER}"));
    terminal.sees(r#"{"name":"start_timer","arguments":{"minutes":5"#);
    terminal.sees("the model calls start_timer");
    terminal.ready();
    terminal.send(&format!("{{\"ok\": true}}{ENTER}"));
    terminal.sees(COUNTS);
    terminal.ready();
    // Skipped, the model does not go on.
    terminal.send(&format!("/retry{ENTER}"));
    terminal.sees("the model calls start_timer");
    terminal.ready();
    terminal.send(&format!("{{\"ok\": true}}{ENTER}"));
    terminal.sees(COUNTS);
    terminal.ready();
    terminal.send(&format!("Set a timer for 9 minutes.{ENTER}"));
    terminal.sees("the model calls start_timer");
    terminal.ready();
    terminal.send(ENTER);
    terminal.ready();
    terminal.send(&format!("/save {}{ENTER}", saved.display()));
    terminal.sees("6 messages saved");
    terminal.ready();
    terminal.send(&format!("/tools off{ENTER}"));
    terminal.sees("no tools");
    let value = json_of(&saved);
    let messages = &value["messages"];
    let call = &messages[1]["tool_calls"][0];
    assert_eq!(call["function"]["name"], "start_timer");
    assert!(call["function"]["arguments"].is_string());
    assert_eq!(
        messages[2],
        json!({"role": "tool", "tool_call_id": call["id"], "content": "{\"ok\": true}"})
    );
    assert!(messages[3]["content"].as_str().unwrap().contains("timer"));
    assert!(messages[5]["tool_calls"].is_array());
    assert_eq!(value["tools"][0]["function"]["name"], "start_timer");
}

#[test]
fn lines_of_a_pipe_are_answered_one_by_one() {
    let arguments = with(&["--no-thinking"]);
    let lines = format!("{QUESTION}\n\n\"\"\"\nHello!\n\"\"\"\n/system Be brief.\n/system");
    let ran = lily_with_input(&arguments, lines.as_bytes()).worked();
    assert_eq!(
        ran.output,
        format!("{ANSWER}\nHello! How can I help you today?\n")
    );
    assert_eq!(ran.errors.matches(COUNTS).count(), 2, "{}", ran.errors);
    assert_eq!(ran.errors.matches("system message: Be brief.").count(), 2);
    assert!(!ran.errors.contains('\x1b') && !ran.errors.contains("> "));
    // Nobody is there to do something about it.
    let ran = lily_with_input(&arguments, b"/nothing\nHello!\n");
    ran.failed(2, "/nothing is not a command");
    // A turn that fails leaves no trace: the question can be answered without it.
    let ran = lily_with_input(&with(&["--context", "16"]), b"Hello there, how are you?\n");
    ran.failed(1, "the context 16");
}
