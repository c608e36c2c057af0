//! `lily serve` as people start and end it.
#![cfg(unix)]

mod support;

use lily_checkpoint::Checkpoint;
use lily_engine::TextModel;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Lines, Read, Write};
use std::net::TcpStream;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::time::{Duration, Instant};
use support::{command, lily, repository};

/// A server as its own process.
struct Serving {
    child: Child,
    said: Lines<BufReader<ChildStderr>>,
    /// What it said before it listened, and the line that says so.
    before: Vec<String>,
    address: String,
}

impl Serving {
    fn start(arguments: &[&str], key: Option<&str>) -> Self {
        let mut command = command(&[&["serve", "--port", "0"], arguments].concat());
        if let Some(key) = key {
            command.env("LILY_API_KEY", key);
        }
        let command = command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut said = BufReader::new(child.stderr.take().unwrap()).lines();
        let mut before = Vec::new();
        let address = loop {
            let line = said.next().expect("it listens").unwrap();
            before.push(line.clone());
            if let Some(rest) = line.strip_prefix("lily: listening at http://") {
                break rest.split('/').next().unwrap().to_string();
            }
        };
        Serving {
            child,
            said,
            before,
            address,
        }
    }

    fn post(&self, body: &str, header: &str) -> String {
        let mut reply = String::new();
        self.send(body, header).read_to_string(&mut reply).unwrap();
        reply
    }

    fn send(&self, body: &str, header: &str) -> TcpStream {
        let address = &self.address;
        let mut stream = TcpStream::connect(address).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(120)))
            .unwrap();
        let request = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n{header}\
             Content-Length: {}\r\nConnection: close\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(request.as_bytes()).unwrap();
        stream
    }

    /// Asks it to end, as systems do.
    fn ask_to_end(&self) {
        let ended = Command::new("kill")
            .args(["-TERM", &self.child.id().to_string()])
            .status();
        assert!(ended.unwrap().success());
    }

    /// Ends it; what it said meanwhile.
    fn end(self) -> String {
        self.ask_to_end();
        self.end_of_asked()
    }

    /// The same for one that was asked to end.
    fn end_of_asked(mut self) -> String {
        assert_eq!(self.child.wait().unwrap().code(), Some(0));
        self.said
            .map_while(Result::ok)
            .collect::<Vec<_>>()
            .join("\n")
    }
}

/// The tokens that end an answer.
fn stop_ids() -> Vec<u32> {
    let checkpoint = Checkpoint::open(&repository("models/lily-tiny")).unwrap();
    TextModel::load(&checkpoint).unwrap().stop_ids().to_vec()
}

const QUESTION: &str = "{\"messages\": [{\"role\": \"user\", \"content\": \"What is 38 + 47?\"}], \"max_tokens\": 3, \"shoe\": 1}";

#[test]
fn it_says_where_it_listens_answers_and_ends_when_asked() {
    let mut serving = Serving::start(&["--name", "mine"], None);
    let before = serving.before.join("\n");
    for told in ["model lily-tiny", "device ", "decode ", "memory "] {
        assert!(before.contains(&format!("lily: {told}")), "{before}");
    }
    let page = format!("a page to chat at http://{}/", serving.address);
    assert!(
        before.contains("/v1, as model mine;") && before.ends_with(&page),
        "{before}"
    );
    // The line it says to try: its body, and its address.
    let said = &mut serving.said;
    let curl = [said.next().unwrap().unwrap(), said.next().unwrap().unwrap()].join("");
    assert!(
        curl.contains(&format!("http://{}/v1/chat/completions", serving.address)),
        "{curl}"
    );
    let body = curl.split("-d '").nth(1).unwrap().trim_end_matches('\'');
    let reply = serving.post(body, "");
    assert!(reply.starts_with("HTTP/1.1 200"), "{reply}");
    assert!(
        reply.contains("\"model\":\"mine\"") && reply.contains("85"),
        "{reply}"
    );
    serving.post(QUESTION, "");
    let said = serving.end();
    // The field is told of, the prompt is not.
    assert!(said.contains("shoe") && !said.contains("38"), "{said}");
}

/// Streams under way are ended as streams end, long before their answers would be.
#[test]
fn a_stream_ends_with_the_server() {
    let serving = Serving::start(&["--context", "32768"], None);
    let bias: serde_json::Map<String, Value> = stop_ids()
        .iter()
        .map(|id| (id.to_string(), json!(-100)))
        .collect();
    let request = json!({
        "messages": [{"role": "user", "content": "Tell me a story."}],
        "temperature": 0,
        "max_tokens": 30_000,
        "logit_bias": bias,
        "stream": true,
    });
    let mut stream = serving.send(&request.to_string(), "");
    let mut all = vec![0; 4_000];
    stream.read_exact(&mut all).unwrap();
    let asked = Instant::now();
    serving.ask_to_end();
    stream.read_to_end(&mut all).unwrap();
    // Its status is 0.
    let said = serving.end_of_asked();
    assert!(asked.elapsed() < Duration::from_secs(5), "{said}");
    assert!(!said.contains("panicked"), "{said}");
    let all = String::from_utf8(all).unwrap();
    let mut data = all.lines().filter_map(|line| line.strip_prefix("data: "));
    assert_eq!(data.next_back(), Some("[DONE]"));
    let last: Value = serde_json::from_str(data.next_back().unwrap()).unwrap();
    assert_eq!(last["choices"][0]["finish_reason"], "length", "{last}");
    // And the connection as connections end.
    assert!(all.ends_with("\r\n0\r\n\r\n"), "{}", &all[all.len() - 80..]);
}

/// A long prompt is not read again by the next server in the same directory, and its answer is the same.
#[test]
fn what_was_read_outlasts_the_server() {
    let place = tempfile::tempdir().unwrap();
    let directory = place.path().join("prefixes");
    let arguments = ["--cache-dir", directory.to_str().unwrap()];
    let text = "The colour of the lantern is blue. ".repeat(1_025);
    let request = json!({
        "messages": [{"role": "user", "content": format!("{text}What is 38 + 47?")}],
        "temperature": 0,
        "max_tokens": 8,
        "logprobs": true,
        "chat_template_kwargs": {"enable_thinking": false},
    });
    let ask = |serving: &Serving| -> Value {
        let reply = serving.post(&request.to_string(), "");
        let (_, body) = reply.split_once("\r\n\r\n").unwrap();
        serde_json::from_str(body).unwrap_or_else(|error| panic!("{error}: {reply}"))
    };
    let counts = |body: &Value| {
        let usage = &body["usage"];
        let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64();
        (usage["prompt_tokens"].as_u64().unwrap(), cached.unwrap())
    };
    let first = Serving::start(&arguments, None);
    let told = format!("beginnings of conversations in {}", directory.display());
    assert!(first.before.join("\n").contains(&told));
    let expected = ask(&first);
    let (tokens, cached) = counts(&expected);
    assert!(tokens >= 8_192 && cached == 0, "{expected}");
    first.end();

    let second = Serving::start(&arguments, None);
    let found = ask(&second);
    let (_, cached) = counts(&found);
    // All but the last chunk of 512 tokens at most.
    assert!(cached + 512 >= tokens && cached < tokens, "{found}");
    assert_eq!(found["choices"], expected["choices"]);
    second.end();
}

#[test]
fn what_is_logged_is_asked_for() {
    let serving = Serving::start(&["--verbose", "--log-prompts"], None);
    serving.post(QUESTION, "");
    let said = serving.end();
    assert!(said.contains("POST /v1/chat/completions 200"), "{said}");
    assert!(said.contains("What is 38 + 47?<|im_end|>"), "{said}");
}

/// Nobody may be there to read what it says.
#[test]
fn it_goes_on_without_a_standard_error() {
    let Serving {
        mut child,
        said,
        address,
        before,
    } = Serving::start(&["--verbose"], None);
    drop(said);
    let serving = |child, said| Serving {
        child,
        said,
        address: address.clone(),
        before: before.clone(),
    };
    let mut nothing = Command::new("true").stderr(Stdio::piped()).spawn().unwrap();
    nothing.wait().unwrap();
    let said = BufReader::new(nothing.stderr.take().unwrap()).lines();
    assert!(child.try_wait().unwrap().is_none());
    let serving = serving(child, said);
    for _ in 0..2 {
        assert!(serving.post(QUESTION, "").starts_with("HTTP/1.1 200"));
    }
    serving.end();
}

#[test]
fn others_may_ask_with_a_key() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "\nfrom-the-file\n").unwrap();
    let path = file.path().to_str().unwrap();
    let serving = Serving::start(
        &["--host", "0.0.0.0", "--api-key-file", path],
        Some("from-outside"),
    );
    assert!(serving.post(QUESTION, "").starts_with("HTTP/1.1 401"));
    for key in ["from-the-file", "from-outside"] {
        let reply = serving.post(QUESTION, &format!("Authorization: Bearer {key}\r\n"));
        assert!(reply.starts_with("HTTP/1.1 200"), "{reply}");
    }
    assert!(!serving.before.join("\n").contains("from-"));
    serving.end();
    lily(&["serve", "--api-key-file", "/nowhere/at/all"])
        .failed(2, "--api-key-file /nowhere/at/all");
    std::fs::write(file.path(), "two words\n").unwrap();
    lily(&["serve", "--api-key-file", path]).failed(2, "a header cannot carry");
    std::fs::write(file.path(), "\n").unwrap();
    lily(&["serve", "--api-key-file", path]).failed(2, "has no key");
}

#[test]
fn an_address_that_is_taken_or_open_to_others_is_refused() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    lily(&["serve", "--port", &port]).failed(1, "cannot serve at 127.0.0.1:");
    lily(&["serve", "--host", "0.0.0.0"]).failed(2, "no key is set");
    lily(&["serve", "--host", "nowhere"]).failed(2, "--host");
}
