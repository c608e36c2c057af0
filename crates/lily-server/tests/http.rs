//! The server as clients meet it: over sockets, with the embedded model on the CPU.

mod support;

use lily_server::ServerOptions;
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};
use support::scripted::Script;
use support::{
    Reply, Server, cached, endless, question, server, together, tools, wait_until, without_ids,
};

#[test]
fn it_answers_and_says_what_it_took() {
    let reply = server().post(&question("What is 38 + 47?"));
    assert_eq!(reply.status, 200);
    assert!(reply.head.contains("content-type: application/json"));
    let body = reply.json();
    assert_eq!(body["object"], "chat.completion");
    let choice = &body["choices"][0];
    assert_eq!(
        choice["message"],
        json!({"role": "assistant", "content": "38 + 47 = 85", "refusal": null})
    );
    assert_eq!(choice["finish_reason"], "stop");
    let usage = &body["usage"];
    let count = |name: &str| usage[name].as_u64().unwrap();
    assert_eq!(
        count("total_tokens"),
        count("prompt_tokens") + count("completion_tokens")
    );
    assert!(count("prompt_tokens") > 10 && count("completion_tokens") > 5);
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 0);
}

/// Reasoning, content and tool calls: a stream's pieces make the message that does not stream.
#[test]
fn a_stream_makes_the_message_of_a_plain_answer() {
    let calling = json!({
        "messages": [{"role": "user", "content": "Set a timer for 5 minutes."}],
        "tools": tools(),
        "temperature": 0,
        "max_tokens": 200,
    });
    let thinking = json!({
        "messages": [{"role": "user", "content": "What is 38 + 47?"}],
        "temperature": 0,
        "max_tokens": 200,
    });
    let mut seen = Vec::new();
    for request in [question("Tell me a short story."), thinking, calling] {
        let plain = server().post(&request).json();
        let mut streamed = request.clone();
        streamed["stream"] = true.into();
        streamed["stream_options"] = json!({"include_usage": true});
        let reply = server().post(&streamed);
        assert!(reply.head.contains("content-type: text/event-stream"));
        let events = reply.events();
        assert_eq!(events[0]["choices"][0]["delta"]["role"], "assistant");
        assert!(
            events
                .iter()
                .all(|event| event["object"] == "chat.completion.chunk")
        );
        assert!(events.iter().all(|event| event["id"] == events[0]["id"]));
        let (last, chunks) = events.split_last().unwrap();
        assert_eq!(last["choices"], json!([]));
        let mut usage = last["usage"].clone();
        // The second goes on from what the first has computed.
        assert!(cached(last) >= cached(&plain));
        usage["prompt_tokens_details"] = plain["usage"]["prompt_tokens_details"].clone();
        assert_eq!(usage, plain["usage"]);
        let reasons: Vec<&Value> = chunks
            .iter()
            .map(|event| &event["choices"][0]["finish_reason"])
            .collect();
        let (reason, before) = reasons.split_last().unwrap();
        assert_eq!(*reason, &plain["choices"][0]["finish_reason"]);
        assert!(before.iter().all(|reason| reason.is_null()));
        let message = without_ids(plain["choices"][0]["message"].clone());
        assert_eq!(without_ids(together(chunks)), message);
        seen.push((plain["choices"][0]["finish_reason"].clone(), message));
    }
    assert!(
        seen[1].1["reasoning_content"].as_str().unwrap().len() > 3,
        "{seen:?}"
    );
    assert_eq!(seen[2].0, "tool_calls", "{seen:?}");
    let call = &seen[2].1["tool_calls"][0]["function"];
    let arguments: Value = serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
    assert_eq!(
        (&call["name"], arguments),
        (&json!("start_timer"), json!({"minutes": 5}))
    );
}

#[test]
fn limits_stops_and_seeds_are_kept() {
    let mut request = question("Tell me a short story.");
    request["max_completion_tokens"] = 5.into();
    let body = server().post(&request).json();
    assert_eq!(body["choices"][0]["finish_reason"], "length");
    assert_eq!(body["usage"]["completion_tokens"], 5);

    let whole = server().post(&question("Tell me a short story.")).json();
    let whole = whole["choices"][0]["message"]["content"]
        .as_str()
        .unwrap()
        .to_string();
    let stop: String = whole.chars().skip(20).take(7).collect();
    let mut request = question("Tell me a short story.");
    request["stop"] = json!([stop, "never"]);
    let body = server().post(&request).json();
    let cut = body["choices"][0]["message"]["content"].as_str().unwrap();
    assert_eq!(body["choices"][0]["finish_reason"], "stop");
    assert_eq!(cut, &whole[..whole.find(&stop).unwrap()]);

    let drawn = |seed: i64| {
        let mut request = question("Tell me a short story.");
        request["temperature"] = json!(1.5);
        request["seed"] = seed.into();
        server().post(&request).json()["choices"][0]["message"]["content"].clone()
    };
    assert_eq!(drawn(3), drawn(3));
    assert_ne!(drawn(3), drawn(4));
    assert_eq!(drawn(-3), drawn(-3));
}

#[test]
fn mistakes_are_named_and_never_the_servers() {
    let with = |name: &str, value: Value| {
        let mut request = question("Hello");
        request[name] = value;
        request
    };
    for (request, status, param, said) in [
        (json!([]), 400, None, "JSON object"),
        (json!({}), 400, Some("messages"), "at least one message"),
        (
            with("messages", json!("Hello")),
            400,
            Some("messages"),
            "an array",
        ),
        (
            with(
                "messages",
                json!([{"role": "user", "content": "x"}, {"role": "wizard", "content": "x"}]),
            ),
            400,
            Some("messages"),
            "role",
        ),
        (
            with(
                "messages",
                json!([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
            ),
            400,
            Some("messages[0].content[0]"),
            "images are not supported",
        ),
        (
            with("temperature", json!("hot")),
            400,
            Some("temperature"),
            "a number",
        ),
        (
            with("temperature", json!(-1)),
            400,
            Some("temperature"),
            "temperature",
        ),
        (with("top_p", json!(7)), 400, Some("top_p"), "top_p"),
        (
            with("max_tokens", json!(0)),
            400,
            Some("max_tokens"),
            "at least 1",
        ),
        (with("stop", json!(["a", ""])), 400, Some("stop"), "up to 4"),
        (
            with("stop", json!(["a", "b", "c", "d", "e"])),
            400,
            Some("stop"),
            "up to 4",
        ),
        (
            with("logit_bias", json!({"x": 1})),
            400,
            Some("logit_bias.x"),
            "token's id",
        ),
        (with("n", json!(17)), 400, Some("n"), "at most 16"),
        (
            with("response_format", json!({"type": "yaml"})),
            400,
            Some("response_format.type"),
            "json_schema",
        ),
        (
            with(
                "response_format",
                json!({"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "wizard"}}}),
            ),
            400,
            Some("response_format"),
            "wizard",
        ),
        (
            with("tool_choice", json!("required")),
            400,
            Some("tool_choice"),
            "no tools",
        ),
        (
            with("top_logprobs", json!(3)),
            400,
            Some("top_logprobs"),
            "logprobs is true",
        ),
        (
            with("stream_options", json!({"include_usage": true})),
            400,
            Some("stream_options"),
            "stream is true",
        ),
        (
            with("ignore_eos", json!(true)),
            400,
            Some("ignore_eos"),
            "not supported",
        ),
        (
            with("stream", json!("yes")),
            400,
            Some("stream"),
            "true or false",
        ),
        (
            with(
                "messages",
                json!([{"role": "user", "content": "word ".repeat(5_000)}]),
            ),
            400,
            Some("messages"),
            "context",
        ),
    ] {
        let reply = server().post(&request);
        let body = reply.json();
        let error = &body["error"];
        assert_eq!(reply.status, status, "{body}");
        assert_eq!(
            error["param"],
            param.map_or(Value::Null, Value::from),
            "{body}"
        );
        assert!(
            error["message"].as_str().unwrap().contains(said),
            "{said}: {body}"
        );
        assert_eq!(error["type"], "invalid_request_error");
    }
    let head = server().chat_head();
    for body in ["", "{", "\u{0}", "{\"messages\": [}"] {
        let reply = server().ask(&head, body);
        assert_eq!(reply.status, 400, "{body:?}");
        assert!(
            reply.json()["error"]["message"]
                .as_str()
                .unwrap()
                .contains("not JSON")
        );
    }
    let deep = "[".repeat(100_000);
    assert_eq!(server().ask(&head, &deep).status, 400);
    // What nobody knows is no mistake.
    assert_eq!(server().post(&with("max_tokens", json!(1))).status, 200);
    let unknown = json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "frobnicate": {"x": 1}});
    assert_eq!(server().post(&unknown).status, 200);
}

#[test]
fn addresses_methods_and_types_have_their_status() {
    let at = |head: &str| server().ask(&format!("{head}\r\nHost: {}", server().address), "{}");
    for (head, status) in [
        ("GET /v1/nothing HTTP/1.1", 404),
        ("GET /v1/chat/completions HTTP/1.1", 405),
        ("POST /v1/models HTTP/1.1", 405),
        ("POST /v1/chat/completions HTTP/1.1", 415),
        (
            "POST /v1/chat/completions HTTP/1.1\r\nContent-Type: text/plain",
            415,
        ),
    ] {
        let reply = at(head);
        assert_eq!(reply.status, status, "{head}");
        assert!(reply.json()["error"]["message"].is_string());
    }
    let small = Server::start(ServerOptions {
        most_bytes: 1_000,
        ..ServerOptions::default()
    });
    let reply = small.post(&question(&"x".repeat(2_000)));
    assert_eq!(reply.status, 413);
    assert!(reply.json()["error"]["message"].is_string());
    let models = server().get("/v1/models").json();
    assert_eq!(models["data"][0]["id"], "lily-tiny");
    assert!(models["data"][0]["context_length"].as_u64() == Some(4_096));
    assert_eq!(
        server().get("/v1/models/lily-tiny").json(),
        models["data"][0]
    );
    let reply = server().get("/v1/models/other/model");
    assert_eq!(reply.status, 404);
    assert_eq!(reply.json()["error"]["code"], "model_not_found");
}

/// What is too much, or does not come, has its status as well.
#[test]
fn headers_and_bodies_have_limits() {
    let server = Server::start(ServerOptions {
        longest_body: Duration::from_millis(300),
        ..ServerOptions::default()
    });
    let head = server.chat_head();
    let many: String = (0..300).map(|index| format!("\r\nX-{index}: x")).collect();
    let long = format!("\r\nX-Long: {}", "x".repeat(100_000));
    for more in [many, long] {
        let reply = server.ask(&format!("{head}{more}"), "{}");
        assert_eq!(reply.status, 431, "{} {}", more.len(), reply.body);
    }
    let mut stream = TcpStream::connect(server.address).unwrap();
    let begun = format!("{head}\r\nContent-Length: 100\r\nConnection: close\r\n\r\n{{");
    stream.write_all(begun.as_bytes()).unwrap();
    let mut all = String::new();
    stream.read_to_string(&mut all).unwrap();
    let reply = Reply::parse(&all);
    assert_eq!(reply.status, 408);
    assert!(
        reply.json()["error"]["message"]
            .as_str()
            .unwrap()
            .contains("did not arrive")
    );
}

/// A connection on which the system holds a few kilobytes for a client that does not read.
fn narrow(address: std::net::SocketAddr) -> TcpStream {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let stream = runtime.block_on(async {
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.set_recv_buffer_size(4_096).unwrap();
        socket.connect(address).await.unwrap()
    });
    let stream = stream.into_std().unwrap();
    stream.set_nonblocking(false).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(120)))
        .unwrap();
    stream
}

/// A reader that takes its time is not gone, and holds up nobody: neither other requests nor, in the end, the server.
#[test]
fn a_slow_reader_gets_all_of_it_and_stalls_nobody() {
    let mut server = Server::start(ServerOptions::default());
    let mut request = endless();
    // More than the system keeps of what was written and not read: the server cannot go on writing.
    request["max_tokens"] = json!(900);
    request["n"] = json!(4);
    request["logprobs"] = true.into();
    request["top_logprobs"] = json!(20);
    request["stream"] = true.into();
    let body = request.to_string();
    let asked = format!(
        "{}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
        server.chat_head(),
        body.len()
    );
    // Another never reads.
    let [mut slow, never] = [(); 2].map(|()| {
        let mut stream = narrow(server.address);
        stream.write_all(asked.as_bytes()).unwrap();
        stream
    });
    wait_until(|| server.requests() == 2);
    let reply = server.post(&question("What is 38 + 47?")).json();
    assert_eq!(reply["choices"][0]["message"]["content"], "38 + 47 = 85");
    let began = Instant::now();
    while server.requests() > 0 {
        assert!(began.elapsed() < Duration::from_secs(180), "it is held up");
        std::thread::sleep(Duration::from_millis(20));
    }
    let mut all = Vec::new();
    slow.read_to_end(&mut all).unwrap();
    assert!(all.len() > 4 << 20, "{} bytes", all.len());
    let events = Reply::parse(&String::from_utf8(all).unwrap()).events();
    let choices = [0, 1, 2, 3].map(|index| {
        let of_choice = |event: &&Value| event["choices"][0]["index"] == index;
        let events: Vec<Value> = events.iter().filter(of_choice).cloned().collect();
        let tokens = events
            .iter()
            .filter_map(|event| event["choices"][0]["logprobs"]["content"].as_array());
        assert_eq!(tokens.flatten().count(), 900);
        together(&events)["content"].clone()
    });
    assert!(choices.iter().all(|choice| *choice == choices[0]));
    // The server ends all the same.
    drop(server.stop.take());
    let (sender, ending) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        drop(server);
        sender.send(()).unwrap();
    });
    let longest = Duration::from_secs(20);
    assert!(ending.recv_timeout(longest).is_ok(), "it never ends");
    drop(never);
}

/// What goes wrong within a stream is said there, and the stream ends as streams end.
#[test]
fn a_stream_that_fails_says_so_and_ends() {
    let (script, server) = support::scripted::Script::server();
    let mut request = question("Hello!");
    request["stream"] = true.into();
    request["stream_options"] = json!({"include_usage": true});
    for tokens in [0, 4] {
        script.say("Once upon a time there was a fox.");
        script.break_behind(tokens);
        let reply = server.post(&request);
        // Its head was sent before.
        assert_eq!(reply.status, 200);
        let mut events = reply.events();
        let error = events.pop().unwrap()["error"].clone();
        assert_eq!(error["type"], "server_error");
        let said = error["message"].as_str().unwrap();
        assert!(said.contains("not finite"), "{said}");
        let content = together(&events)["content"].clone();
        assert_eq!(content.as_str().unwrap().is_empty(), tokens == 0);
        // Nothing claims that the answer is whole.
        for event in &events {
            assert_eq!(event["choices"][0]["finish_reason"], Value::Null, "{event}");
        }
        assert_eq!(server.requests(), 0);
    }
    let content = together(&server.post(&request).events())["content"].clone();
    assert_eq!(content, "Once upon a time there was a fox.");
}

/// A page of another site, by way of a name that its owner points here, or from its own origin.
#[test]
fn other_sites_may_not_ask() {
    for (head, status) in [
        ("GET /v1/models HTTP/1.1\r\nHost: evil.example", 403),
        (
            "GET /v1/models HTTP/1.1\r\nHost: localhost:1\r\nOrigin: https://evil.example",
            403,
        ),
        (
            "GET /v1/models HTTP/1.1\r\nHost: localhost:1\r\nOrigin: null",
            403,
        ),
        (
            "GET /v1/models HTTP/1.1\r\nHost: localhost:1\r\nOrigin: http://localhost:3000",
            200,
        ),
        ("GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1:1", 200),
    ] {
        assert_eq!(server().ask(head, "").status, status, "{head}");
    }
}

/// Each turn of a conversation computes what is new and a chunk at most; so does a turn that is asked again, one whose
/// last message is edited, and one of two conversations that begin alike and take turns. Answers are those of a server
/// that has kept nothing.
#[test]
fn conversations_go_on_from_what_was_computed() {
    let options = || ServerOptions::default();
    let server = Server::start(options());
    let ask = |server: &Server, messages: &[Value]| {
        let request = json!({
            "messages": messages,
            "temperature": 0,
            "max_tokens": 40,
            "chat_template_kwargs": {"enable_thinking": false},
        });
        server.post(&request).json()
    };
    let said = |role: &str, text: &str| json!({"role": role, "content": text});
    let prompt = |body: &Value| body["usage"]["prompt_tokens"].as_u64().unwrap();
    let system = said(
        "system",
        &"You are a helpful assistant who answers briefly. ".repeat(12),
    );
    let mut both = [vec![system.clone()], vec![system]];
    let mut last = [0, 0];
    let mut asked = Vec::new();
    for turn in 0..10 {
        for (which, messages) in both.iter_mut().enumerate() {
            let text = format!(
                "What is {} + {}? Say it in a sentence, please.",
                10 + turn,
                20 + which
            );
            messages.push(said("user", &text));
            let body = ask(&server, messages);
            let (tokens, cached) = (prompt(&body), cached(&body));
            if turn > 0 {
                // What the turn before had, but for its last few tokens, which open the answer.
                assert!(
                    cached + 64 + 8 >= last[which],
                    "turn {turn}: {cached} of {}",
                    last[which]
                );
            }
            last[which] = tokens;
            let content = body["choices"][0]["message"]["content"].clone();
            asked.push((messages.clone(), content.clone()));
            messages.push(json!({"role": "assistant", "content": content}));
        }
    }
    // Asked again, and with the last message edited.
    let (messages, content) = asked.last().unwrap().clone();
    for _ in 0..3 {
        let body = ask(&server, &messages);
        assert_eq!(body["choices"][0]["message"]["content"], content);
        assert!(cached(&body) + 64 >= prompt(&body), "{body}");
    }
    let mut edited = messages;
    *edited.last_mut().unwrap() = said("user", "What is the capital of Norway?");
    let body = ask(&server, &edited);
    assert!(cached(&body) + 64 + 64 >= prompt(&body), "{body}");
    asked.push((edited, body["choices"][0]["message"]["content"].clone()));
    for (messages, content) in asked.iter().rev().step_by(4) {
        let fresh = Server::start(options());
        let body = ask(&fresh, messages);
        assert_eq!(cached(&body), 0);
        assert_eq!(&body["choices"][0]["message"]["content"], content);
    }
}

/// Several at once are each answered as alone, in turns: a short one is done before a long one.
#[test]
fn requests_take_turns() {
    let long = question("Tell me a short story about a lantern.");
    let short = question("What is 38 + 47?");
    let alone = [&long, &short]
        .map(|request| server().post(request).json()["choices"][0]["message"].clone());
    let (first, second) = std::thread::scope(|scope| {
        let ask = |request| {
            move || {
                let message = server().post(request).json()["choices"][0]["message"].clone();
                (message, Instant::now())
            }
        };
        let first = scope.spawn(ask(&long));
        std::thread::sleep(Duration::from_millis(60));
        let second = scope.spawn(ask(&short));
        (first.join().unwrap(), second.join().unwrap())
    });
    assert_eq!([first.0, second.0], alone);
    assert!(second.1 < first.1, "the short one waited for the long one");
}

/// Whoever goes frees what was theirs, streaming or not, and while others wait.
#[test]
fn a_client_that_goes_costs_nothing_more() {
    let server = Server::start(ServerOptions {
        most_requests: 2,
        ..ServerOptions::default()
    });
    let mut request = endless();
    for streams in [true, false] {
        request["stream"] = streams.into();
        let held: Vec<TcpStream> = (0..2)
            .map(|_| server.send(&server.chat_head(), &request.to_string()))
            .collect();
        wait_until(|| server.requests() == 2);
        let reply = server.post(&question("Hello"));
        assert_eq!(reply.status, 503);
        assert!(reply.head.contains("retry-after:"));
        assert_eq!(reply.json()["error"]["code"], "overloaded");
        drop(held);
        wait_until(|| server.requests() == 0);
    }
    assert_eq!(server.post(&question("What is 38 + 47?")).status, 200);
}

/// What streams when the server stops is ended as streams end.
#[test]
fn streams_end_cleanly_when_the_server_stops() {
    let mut server = Server::start(ServerOptions::default());
    let mut request = endless();
    request["stream"] = true.into();
    let mut stream = server.send(&server.chat_head(), &request.to_string());
    let mut all = vec![0; 2_000];
    stream.read_exact(&mut all).unwrap();
    drop(server.stop.take());
    stream.read_to_end(&mut all).unwrap();
    let events = Reply::parse(&String::from_utf8(all).unwrap()).events();
    assert_eq!(
        events.last().unwrap()["choices"][0]["finish_reason"],
        "length"
    );
}

/// A server whose engine is gone does not stay to say so: whoever keeps it running starts another.
#[test]
fn a_server_without_its_engine_ends() {
    let (script, server) = Script::server();
    script.say("Fine.");
    assert_eq!(server.post(&question("Go")).status, 200);
    script.fail();
    assert_eq!(server.post(&question("Go")).status, 503);
    assert!(server.failure().to_string().contains("engine"));
}

/// What ends an answer stands in what the client is told as the answer.
#[test]
fn stops_are_looked_for_behind_the_reasoning() {
    let mut request = question("What is 17 + 25?");
    request["chat_template_kwargs"] = json!({"enable_thinking": true});
    let whole = server().post(&request).json()["choices"][0]["message"].clone();
    let reasoning = whole["reasoning_content"].as_str().unwrap();
    assert!(reasoning.contains("30") && !whole["content"].as_str().unwrap().contains("30"));
    request["stop"] = json!(["30", "\n\n"]);
    assert_eq!(
        server().post(&request).json()["choices"][0]["message"],
        whole
    );
    request["stop"] = json!(" =");
    let cut = server().post(&request).json();
    assert_eq!(cut["choices"][0]["message"]["content"], "17 + 25");
    assert_eq!(cut["choices"][0]["message"]["reasoning_content"], reasoning);
    assert_eq!(cut["choices"][0]["finish_reason"], "stop");
}

/// One request with many answers does not keep others out.
#[test]
fn many_answers_of_one_request_leave_room_for_others() {
    let server = Server::start(ServerOptions::default());
    let prompts: Vec<String> = (0..32)
        .map(|index| format!("Once upon a time {index}"))
        .collect();
    let many =
        json!({"prompt": prompts, "n": 2, "max_tokens": 60, "temperature": 1, "stream": true});
    let mut stream = server.send(&server.head("/v1/completions"), &many.to_string());
    stream.read_exact(&mut [0; 4_000]).unwrap();
    let reply = server.post(&question("What is 38 + 47?")).json();
    assert_eq!(reply["choices"][0]["message"]["content"], "38 + 47 = 85");
    assert_eq!(server.requests(), 1, "the other is long under way");
}
