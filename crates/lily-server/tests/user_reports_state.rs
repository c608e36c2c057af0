//! Reports of users of other engines, as `user_reports.rs` has them: what is kept of a conversation, and what becomes of the
//! state behind it.

mod support;

use lily_server::ServerOptions;
use serde_json::{Value, json};
use support::scripted::Script;
use support::{Server, asked, cached, call, endless, every_type, message, question, server};

/// Qwen3.8#131: empty blocks of earlier reasoning change the prefix.
#[test]
fn a_second_turn_computes_the_first_again() {
    let server = Server::start(ServerOptions::default());
    let long = format!("{} What is 38 + 47?", "Please be exact. ".repeat(30));
    for thinks in [false, true] {
        let mut messages = vec![json!({"role": "user", "content": format!("{long} {thinks}")})];
        let ask = |messages: &[Value]| {
            let request = json!({"messages": messages, "temperature": 0, "max_tokens": 60, "chat_template_kwargs": {"enable_thinking": thinks}});
            server.post(&request).json()
        };
        let first = ask(&messages);
        messages.push(message(&first).clone());
        messages.push(json!({"role": "user", "content": "And 12 + 13?"}));
        let second = ask(&messages);
        let had = first["usage"]["prompt_tokens"].as_u64().unwrap();
        assert!(
            cached(&second) + 64 + 8 >= had,
            "{thinks}: {} of {had}",
            cached(&second)
        );
    }
}

/// An agent's conversation.
#[derive(Clone)]
struct Agent {
    messages: Vec<Value>,
    /// The tokens of the prompt before.
    sent: Vec<Value>,
}

impl Agent {
    fn new() -> Self {
        let system = "You are a careful assistant who uses tools. ".repeat(8);
        Agent {
            messages: vec![json!({"role": "system", "content": system})],
            sent: Vec::new(),
        }
    }

    fn says(&mut self, text: &str) {
        self.messages.push(json!({"role": "user", "content": text}));
    }

    /// The results of the last answer's calls.
    fn returns(&mut self, result: &str) {
        let calls = self.messages.last().unwrap()["tool_calls"].clone();
        for call in calls.as_array().unwrap() {
            let result = json!({"role": "tool", "tool_call_id": call["id"], "content": result});
            self.messages.push(result);
        }
    }

    /// Asks, and checks that what the model reads is what is new and a chunk at most.
    fn asks(&mut self, (script, server): &(Script, Server), answer: &str, thinks: bool) -> Value {
        script.say(answer);
        let request = json!({
            "messages": self.messages,
            "tools": every_type(),
            "temperature": 0,
            "max_tokens": 200,
            "chat_template_kwargs": {"enable_thinking": thinks},
        });
        let prompt = server.post_to("/tokenize", &request).json()["tokens"].clone();
        let prompt = prompt.as_array().unwrap().clone();
        let both = self.sent.iter().zip(&prompt);
        let known = both.take_while(|(before, now)| before == now).count();
        let had_read = script.read();
        let body = server.post(&request).json();
        let read = script.read() - had_read;
        let told = body["usage"]["prompt_tokens"].as_u64().unwrap() - cached(&body);
        assert_eq!(told, read as u64, "{body}");
        assert!(
            read <= prompt.len() - known + 64,
            "{read} tokens of {} were read, {known} of them known: {:?}",
            prompt.len(),
            self.messages.last()
        );
        self.sent = prompt;
        body
    }

    /// The same, and the answer belongs to the conversation.
    fn goes_on(&mut self, with: &(Script, Server), answer: &str, thinks: bool) {
        let body = self.asks(with, answer, thinks);
        self.messages.push(message(&body).clone());
    }
}

/// llama.cpp#20225, #20153, #21831, #24714: a model whose state cannot be cut back reads its whole prompt each turn, for
/// agents above all: with tools and their results, reasoning that comes back and is dropped later, answers asked for
/// again, messages edited, and conversations that begin alike and take turns.
#[test]
fn an_agents_prompt_is_read_whole_each_turn() {
    let with = Script::server();
    let mut first = Agent::new();
    first.says("Set the count, tell me when it is done, and then wait.");
    first.asks(&with, "Gladly.", false);
    // Where the second parts from the first.
    let mut second = first.clone();
    let look = format!(
        "I look first.\n</think>\n\nNow.\n\n{}",
        call(&[("count", "3")])
    );
    let act = format!(
        "{}\n{}",
        call(&[("text", "one")]),
        call(&[("is_on", "true")])
    );
    let result = "It was set, and nothing else has changed since the last time. ".repeat(3);
    for turn in 0..4 {
        for (which, agent) in [&mut first, &mut second].into_iter().enumerate() {
            if turn > 0 || which > 0 {
                agent.says(&format!("And now set it to {}, please.", 10 * turn + which));
            }
            agent.goes_on(&with, &look, true);
            agent.returns(&result);
            if turn % 2 == 1 {
                agent.goes_on(&with, &look, true);
                agent.returns("Done.");
                agent.goes_on(&with, &act, false);
                agent.returns(&result);
            }
            // Asked for again.
            agent.asks(&with, "All is set.", false);
            agent.goes_on(&with, "It is all set.", false);
        }
    }
    for agent in [&mut first, &mut second] {
        agent.says("What is the count?");
        agent.asks(&with, "It is 3.", false);
        agent.messages.last_mut().unwrap()["content"] = json!("What was it before?");
        agent.goes_on(&with, "It was 2.", false);
        assert!(agent.sent.len() > 1_200, "{}", agent.sent.len());
    }
}

/// ik_llama#1295, vllm-mlx#145: the second finds all of its prompt known; mlx-lm#980, #1162, #1254, Rapid-MLX#163, #214:
/// what was kept is never used.
#[test]
fn the_same_prompt_again_crashes_or_goes_on_from_a_stale_state() {
    let server = Server::start(ServerOptions::default());
    let request = question(&format!(
        "{} What is 38 + 47?",
        "Please be exact. ".repeat(40)
    ));
    let first = server.post(&request).json();
    for _ in 0..3 {
        let again = server.post(&request).json();
        assert_eq!(message(&again), message(&first));
        assert!(cached(&again) > 100, "{again}");
    }
}

/// mlx-swift-lm: a conversation that goes on counts its positions from another place, and its numbers drift from those of
/// one that is read at once.
#[test]
fn positions_drift_in_a_conversation_that_goes_on() {
    let server = Server::start(ServerOptions::default());
    let mut messages = Vec::new();
    let mut last = Value::Null;
    let ask = |server: &Server, messages: &[Value]| {
        let request = json!({
            "messages": messages,
            "temperature": 0,
            "max_tokens": 24,
            "logprobs": true,
            "top_logprobs": 5,
            "chat_template_kwargs": {"enable_thinking": false},
        });
        server.post(&request).json()
    };
    for turn in 0..6 {
        let text = format!("{} What is {turn} + 47?", "Please be exact. ".repeat(25));
        messages.push(json!({"role": "user", "content": text}));
        last = ask(&server, &messages);
        messages.push(message(&last).clone());
    }
    messages.pop();
    let fresh = ask(&Server::start(ServerOptions::default()), &messages);
    assert!(cached(&last) > 500 && cached(&fresh) == 0, "{last}");
    // To the last bit of each probability.
    assert_eq!(last["choices"], fresh["choices"]);
}

/// llama.cpp#29092, ollama#18528, Rapid-MLX#1025, #1058, #1075, #1103.
#[test]
fn recurrent_state_leaks_from_one_request_into_the_next() {
    let server = Server::start(ServerOptions::default());
    let (a, b) = (
        question("Tell me a short story."),
        question("What is the capital of Norway?"),
    );
    let first = server.post(&a).json();
    server.post(&b);
    assert_eq!(message(&server.post(&a).json()), message(&first));
}

/// vllm-mlx PR#277, vllm#36829, llama.cpp PR#20623.
#[test]
fn a_changing_billing_header_voids_the_cache() {
    let server = Server::start(ServerOptions::default());
    let ask = |hash: &str| {
        let header = format!("x-anthropic-billing-header: cc_version=2.1.3; cch={hash};");
        let system = "You are a careful assistant. ".repeat(30);
        let request = json!({"messages": [
            {"role": "system", "content": [{"type": "text", "text": header}, {"type": "text", "text": system}]},
            {"role": "user", "content": "Hello!"},
        ], "max_tokens": 3, "temperature": 0});
        cached(&server.post(&request).json())
    };
    assert_eq!(ask("00000"), 0);
    assert!(ask("ab123") > 100);
}

/// The most tokens in a row that are the same, by their bytes, and how many there are.
fn longest_run(body: &Value) -> (usize, usize) {
    let tokens = body["choices"][0]["logprobs"]["content"].as_array();
    let tokens = tokens.unwrap_or_else(|| panic!("{body}"));
    let runs = tokens.chunk_by(|a, b| a["bytes"] == b["bytes"]);
    (runs.map(<[Value]>::len).max().unwrap_or(0), tokens.len())
}

/// The same, sooner or later: thousands of tokens of "!" or of anything else.
#[test]
fn a_long_answer_becomes_one_token_over_and_over() {
    let request = asked(&endless(), "logprobs", json!(true));
    let body = server().post(&request).json();
    assert_eq!(body["choices"][0]["finish_reason"], "length");
    let (run, tokens) = longest_run(&body);
    assert!(
        run <= 40 && tokens > 2_900,
        "{run} in a row of {tokens} tokens"
    );
    // A model that does so is found out: behind its script, this one says its first token again and again.
    let (script, server) = Script::server();
    script.say_on("Once upon a time");
    let (run, _) = longest_run(
        &server
            .post(&asked(&request, "max_tokens", json!(60)))
            .json(),
    );
    assert!(run > 40, "{run}");
}
