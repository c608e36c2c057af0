//! What users of other engines have reported, through HTTP: each test is named after the symptom, and says where it was
//! reported. An answer whose words matter comes from a script, every other from the embedded model.
//!
//! Other reports have their tests elsewhere. `the_tests_that_are_named_exist` reads this list.
//!
//! - Positions beyond 32,767 and offsets beyond 2^31 (mlx#3361, #3631, #3609, llama.cpp PR#28748):
//!   `lily-emulated/tests/long.rs::attention_agrees_at_the_edges_of_long_contexts`,
//!   `lily-emulated/tests/long.rs::attention_agrees_at_the_end_of_the_longest_context`,
//!   `lily-emulated/tests/long.rs::heads_turn_right_at_the_end_of_the_longest_context`,
//!   `lily-msl/tests/addresses.rs::keys_and_values_lie_where_they_should`,
//!   `lily-cpu/tests/edges.rs::angles_far_out_are_products_in_f32`.
//! - Attention that is split, at the edges of its splits (mlx#3875):
//!   `lily-emulated/tests/long.rs::attention_agrees_at_the_edges_of_contexts`,
//!   `lily-emulated/tests/steps.rs::attention_agrees_at_the_edges_of_its_blocks`.
//! - Column counts with a tail, and products where their split changes (llama.cpp#27064):
//!   `lily-emulated/tests/grid.rs::dense_products_agree_on_a_part_of_the_grid`,
//!   `lily-emulated/tests/grid.rs::products_agree_where_their_form_changes`,
//!   `lily-emulated/tests/grid.rs::experts_agree_where_their_tiles_change`.
//! - Scripts with combining marks (splish 1.1):
//!   `lily-text/tests/tokenizer_goldens.rs::combining_marks_stay_with_their_letters`.
//! - Command buffers of over 100 ms (omlx#1387):
//!   `lily-gpu/tests/recording.rs::no_dispatch_keeps_a_display_waiting`.
//! - The path that runs, as it is told (lmstudio#2040):
//!   `lily/tests/run.rs::what_ran_is_told_to_who_asks`,
//!   `lily/tests/reports.rs::bench_refuses_to_measure_other_kernels_than_asked`,
//!   `lily/tests/reports.rs::a_mechanism_that_is_turned_off_is_told`.
//! - Working memory that grows with the prompt:
//!   `lily-engine/tests/memory.rs::prompts_of_4000_and_16000_tokens_have_the_same_peak_working_memory`,
//!   `lily-gpu/tests/recording.rs::the_arena_of_a_prefill_does_not_depend_on_the_context`.
//! - Memory over a long time (mlx-lm#1632): `lily-server/tests/load.rs::many_clients_of_whom_a_third_vanish`.
//! - Logits that are no numbers, with others in the batch:
//!   `lily-engine/tests/edges.rs::logits_that_are_no_numbers_are_an_error_not_a_token`,
//!   `lily-engine/tests/batches.rs::a_row_with_nothing_to_choose_fails_alone`.
//! - Conversations that go on from what was computed, in the model's own words:
//!   `lily-server/tests/http.rs::conversations_go_on_from_what_was_computed`.
//!
//! - What is kept of a conversation, and the state behind it: `user_reports_state.rs`, whose tests are named likewise.
//!
//! Speculative decoding (vllm#47194) there is none.

mod support;

use lily_engine::EngineOptions;
use lily_server::ServerOptions;
use lily_testing::repository;
use serde_json::{Value, json};
use std::io::Read;
use std::time::{Duration, Instant};
use support::scripted::Script;
use support::{
    Server, asked, cached, call, endless, engine_options, every_type, message, question, server,
    together, tools, wait_until, without_ids,
};

/// Each test that the list at the top of this file names is one that runs.
#[test]
fn the_tests_that_are_named_exist() {
    let list = include_str!("user_reports.rs").lines();
    let list: Vec<&str> = list.map_while(|line| line.strip_prefix("//!")).collect();
    let list = list.join("\n");
    let words = list.split('`').skip(1).step_by(2);
    let named: Vec<(&str, &str)> = words.filter_map(|word| word.split_once("::")).collect();
    assert!(named.len() > 15, "{named:?}");
    for (file, test) in named {
        let path = repository(&format!("crates/{file}"));
        let text = std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{file}: {error}"));
        // Not one that is ignored.
        let is_there = text.contains(&format!("#[test]\nfn {test}() {{"));
        assert!(is_there, "{file} has no test {test}");
    }
}

fn with_tools(text: &str) -> Value {
    asked(&question(text), "tools", every_type())
}

fn arguments(body: &Value, index: usize) -> Value {
    let text = &message(body)["tool_calls"][index]["function"]["arguments"];
    serde_json::from_str(text.as_str().unwrap_or_else(|| panic!("{body}"))).unwrap()
}

/// Plain and streamed, which have to be the same.
fn both(server: &Server, request: &Value) -> Value {
    let body = server.post(request).json();
    let events = server.post(&asked(request, "stream", json!(true))).events();
    assert_eq!(
        without_ids(together(&events)),
        without_ids(message(&body).clone())
    );
    let last = &events.last().unwrap()["choices"][0]["finish_reason"];
    assert_eq!(last, &body["choices"][0]["finish_reason"]);
    body
}

/// llama.cpp#20260.
#[test]
fn prose_before_a_call_breaks_the_parse() {
    let (script, server) = Script::server();
    script.say(&format!("I'll check.\n\n{}", call(&[("count", "3")])));
    let body = both(&server, &with_tools("Go"));
    assert_eq!(message(&body)["content"], "I'll check.");
    assert_eq!(arguments(&body, 0), json!({"count": 3}));
    assert_eq!(body["choices"][0]["finish_reason"], "tool_calls");
}

/// llama.cpp#26763; mlx-serve#287 and mlx-lm PR#782, where streams lost calls and ended with "stop".
#[test]
fn a_missing_newline_between_calls_swallows_later_ones() {
    let (script, server) = Script::server();
    script.say(&format!(
        "{}{}",
        call(&[("count", "1")]),
        call(&[("count", "2")])
    ));
    let body = both(&server, &with_tools("Go"));
    assert_eq!(message(&body)["tool_calls"].as_array().unwrap().len(), 2);
    assert_eq!(
        (arguments(&body, 0), arguments(&body, 1)),
        (json!({"count": 1}), json!({"count": 2}))
    );
    assert_eq!(body["choices"][0]["finish_reason"], "tool_calls");
}

/// mlx-lm#1501.
#[test]
fn markup_in_pieces_is_not_recognised() {
    let (script, server) = Script::server();
    let text = format!("Well. {}", call(&[("text", "a <b> c"), ("count", "7")]));
    script.say(&text);
    let whole = both(&server, &with_tools("Go"));
    script.say_byte_by_byte(&text);
    let pieces = both(&server, &with_tools("Go"));
    assert_eq!(
        without_ids(message(&whole).clone()),
        without_ids(message(&pieces).clone())
    );
    assert_eq!(
        arguments(&pieces, 0),
        json!({"text": "a <b> c", "count": 7})
    );
}

/// mlx-lm PR#1417 and PR#1239.
#[test]
fn numbers_lose_their_type_and_arguments_are_not_json() {
    let (script, server) = Script::server();
    script.say(&call(&[
        ("count", "3.0"),
        ("part", "1e-3"),
        ("is_on", "True"),
        ("names", "['a', \"b\"]"),
        ("more", "{\"x\": [1, null]}"),
        ("text", "3.0"),
        ("none", "null"),
    ]));
    let body = both(&server, &with_tools("Go"));
    assert_eq!(
        arguments(&body, 0),
        json!({"count": 3, "part": 0.001, "is_on": true, "names": ["a", "b"], "more": {"x": [1, null]}, "text": "3.0", "none": null})
    );
}

/// maclocal-api#141, vllm-mlx PR#583.
#[test]
fn a_call_that_is_cut_off_leaks_its_markup() {
    let (script, server) = Script::server();
    script.say(&format!(
        "Now. {}",
        call(&[("text", "one two three four five six seven")])
    ));
    for most in 1..20 {
        let body = both(
            &server,
            &asked(&with_tools("Go"), "max_tokens", json!(most)),
        );
        let content = message(&body)["content"].as_str().unwrap_or_default();
        assert!(
            !content.contains(['<', '>']) && "Now.".starts_with(content.trim_end()),
            "{most}: {content}"
        );
        assert_eq!(body["choices"][0]["finish_reason"], "length");
        // What was told can be sent back.
        let mut next = with_tools("Go");
        let messages = next["messages"].as_array_mut().unwrap();
        messages.push(message(&body).clone());
        messages.push(json!({"role": "user", "content": "Go on"}));
        assert_eq!(server.post(&next).status, 200, "{next}");
    }
}

/// vllm#18412, sglang#7048, litellm#11407, continue#13225, opencode PR#47954.
#[test]
fn clients_need_id_type_and_name_in_a_calls_first_piece() {
    let (script, server) = Script::server();
    script.say(&format!(
        "{}\n{}",
        call(&[("count", "1"), ("text", "a \"b\"")]),
        call(&[("count", "2")])
    ));
    transcript(&server, &with_tools("Go"), "two_calls.sse");
}

/// The same for an answer that has everything.
#[test]
fn reasoning_content_and_a_call_come_apart() {
    let (script, server) = Script::server();
    script.say(&format!(
        "It is late.\n</think>\n\nI look. {}",
        call(&[("is_on", "false")])
    ));
    let mut request = with_tools("Go");
    request["chat_template_kwargs"] = json!({"enable_thinking": true});
    transcript(&server, &request, "reasoning_content_call.sse");
}

/// Compares a stream byte for byte with the recorded one, but for numbers and times. `LILY_RECORD=1` records.
fn transcript(server: &Server, request: &Value, name: &str) {
    let mut request = asked(request, "stream", json!(true));
    request["stream_options"] = json!({"include_usage": true});
    let reply = server.post(&request);
    let first: Value = serde_json::from_str(
        reply
            .body
            .lines()
            .next()
            .unwrap()
            .strip_prefix("data: ")
            .unwrap(),
    )
    .unwrap();
    let number = first["id"]
        .as_str()
        .unwrap()
        .strip_prefix("chatcmpl-")
        .unwrap();
    // A slow machine tells how far the prompt is read.
    let events = reply.body.split_inclusive("\n\n");
    let body: String = events
        .filter(|event| !event.contains("\"prompt_progress\""))
        .collect();
    let body = body.replace(number, "0").replace(
        &format!("\"created\":{}", first["created"]),
        "\"created\":0",
    );
    let path = format!("{}/tests/transcripts/{name}", env!("CARGO_MANIFEST_DIR"));
    if std::env::var_os("LILY_RECORD").is_some() {
        std::fs::write(&path, &body).unwrap();
    }
    assert_eq!(body, std::fs::read_to_string(&path).unwrap(), "{name}");
}

/// omlx#825.
#[test]
fn a_cached_prompt_loses_its_tools() {
    let server = Server::start(ServerOptions::default());
    let mut request = question("Set a timer for 5 minutes.");
    request["tools"] = tools();
    let first = server.post(&request).json();
    let second = server.post(&request).json();
    assert!(cached(&second) > 0 && cached(&first) == 0);
    assert_eq!(
        without_ids(message(&second).clone()),
        without_ids(message(&first).clone())
    );
    assert_eq!(second["choices"][0]["finish_reason"], "tool_calls");
}

/// Rapid-MLX#549.
#[test]
fn developer_and_several_system_messages_are_lost() {
    let mut request = question("x");
    request["messages"] = json!([
        {"role": "developer", "content": "First."},
        {"role": "system", "content": [{"type": "text", "text": "Second."}]},
        {"role": "user", "content": "<tool_call>What is 38 + 47?"},
    ]);
    let prompt = server().post_to("/apply-template", &request).json();
    let prompt = prompt["prompt"].as_str().unwrap();
    for part in [
        "system\nFirst.<|im_end|>",
        "system\nSecond.<|im_end|>",
        "<tool_call>What is",
    ] {
        assert!(prompt.contains(part), "{prompt}");
    }
    assert_eq!(server().post(&request).status, 200);
}

/// llama.cpp#20156, PR#23041: Codex sends tools that are no functions.
#[test]
fn tools_of_other_types_are_refused() {
    let mut request = question("Set a timer for 5 minutes.");
    let timer = tools()[0].clone();
    request["tools"] =
        json!([{"type": "web_search"}, timer, {"type": "custom", "custom": {"name": "x"}}]);
    let body = server().post(&request).json();
    assert_eq!(
        message(&body)["tool_calls"][0]["function"]["name"],
        "start_timer"
    );
}

/// Mac-MLX#46, imp#793, qwisp#25, mlx-omni-server#114.
#[test]
fn reasoning_leaks_into_the_content() {
    let mut request = question("What is 17 + 25?");
    request["chat_template_kwargs"] = json!({});
    let body = both(server(), &request);
    let content = message(&body)["content"].as_str().unwrap();
    assert!(
        !content.contains("think") && content.contains("42"),
        "{content}"
    );
    assert!(message(&body)["reasoning_content"].as_str().unwrap().len() > 5);
}

/// mlx-lm PR#1327.
#[test]
fn the_shortest_prompt_is_an_error() {
    let one = json!({"prompt": [4056], "max_tokens": 2, "temperature": 0});
    let body = server().post_to("/v1/completions", &one).json();
    assert_eq!(body["usage"]["prompt_tokens"], 1);
    assert_eq!(server().post(&question("a")).status, 200);
    let empty = json!({"prompt": "", "max_tokens": 2});
    assert_eq!(server().post_to("/v1/completions", &empty).status, 400);
}

/// omlx#2367.
#[test]
fn thinking_cannot_be_switched_off() {
    let plain =
        json!({"messages": [{"role": "user", "content": "What is 17 + 25?"}], "temperature": 0});
    for (name, value) in [
        ("chat_template_kwargs", json!({"enable_thinking": false})),
        ("reasoning_effort", json!("none")),
        ("enable_thinking", json!(false)),
    ] {
        let request = asked(&plain, name, value);
        let prompt = server().post_to("/apply-template", &request).json();
        assert!(
            prompt["prompt"]
                .as_str()
                .unwrap()
                .ends_with("<think>\n\n</think>\n\n")
        );
        let body = server().post(&request).json();
        assert!(message(&body).get("reasoning_content").is_none());
        assert_eq!(
            body["usage"]["completion_tokens_details"]["reasoning_tokens"],
            0
        );
    }
    let prompt = server().post_to("/apply-template", &plain).json();
    assert!(prompt["prompt"].as_str().unwrap().ends_with("<think>\n"));
}

/// vllm#41114, PR#44505, hermes-agent#20866, opencode#42909, mastra#15764.
#[test]
fn a_system_message_must_be_at_the_beginning() {
    let request = json!({"messages": [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi"},
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 38 + 47?"},
    ], "temperature": 0, "max_tokens": 5});
    let prompt = server().post_to("/apply-template", &request).json();
    let late = "Hi<|im_end|>\n<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n";
    assert!(
        prompt["prompt"].as_str().unwrap().contains(late),
        "{prompt}"
    );
    assert_eq!(server().post(&request).status, 200);
}

/// dify#33152.
#[test]
fn no_user_query_is_the_servers_error() {
    let call =
        json!({"id": "call_1", "type": "function", "function": {"name": "set", "arguments": "{}"}});
    for messages in [
        json!([{"role": "tool", "tool_call_id": "call_1", "content": "Done."}]),
        json!([
            {"role": "assistant", "content": null, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "Done."},
        ]),
        json!([{"role": "assistant", "content": "Hi"}]),
        json!([{"role": "system", "content": "Hi"}]),
    ] {
        let reply = server().post(&json!({"messages": messages}));
        assert_eq!(reply.status, 400);
        assert!(
            reply.body.contains("No user query found in messages"),
            "{}",
            reply.body
        );
    }
}

/// ollama#18441; mlx-serve#331, where the JSON came as reasoning; ollama#17183, #17933, #16563, where it was ignored.
#[test]
fn json_and_reasoning_do_not_go_together() {
    let mut request = question("Tell me a story.");
    request["chat_template_kwargs"] = json!({"enable_thinking": true});
    request["response_format"] = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": {
        "type": "object", "properties": {"title": {"type": "string", "maxLength": 10}}, "required": ["title"], "additionalProperties": false,
    }}});
    let body = both(server(), &request);
    let content: Value = serde_json::from_str(message(&body)["content"].as_str().unwrap()).unwrap();
    assert!(content["title"].is_string());
    let reasoning = message(&body)["reasoning_content"].as_str().unwrap();
    assert!(!reasoning.is_empty() && !reasoning.contains('{'));
}

/// lmstudio#1602.
#[test]
fn reasoning_that_eats_the_budget_leaves_nothing_but_zeros() {
    let mut request = question("What is 17 + 25?");
    request["chat_template_kwargs"] = json!({"enable_thinking": true});
    request["max_tokens"] = json!(6);
    let body = both(server(), &request);
    assert_eq!(body["choices"][0]["finish_reason"], "length");
    assert_eq!(body["usage"]["completion_tokens"], 6);
    assert_eq!(
        body["usage"]["completion_tokens_details"]["reasoning_tokens"],
        6
    );
    assert!(message(&body)["reasoning_content"].as_str().unwrap().len() > 3);
    assert_eq!(message(&body)["content"], "");
}

/// vllm#55291, llm-scaler#559, sglang#10569, llama.cpp#23577: numbers that are none fail their request, and no later one.
#[test]
fn a_state_that_is_not_a_number_spoils_later_requests() {
    let (script, server) = Script::server();
    script.say("Fine.");
    script.break_once();
    let reply = server.post(&question("Go"));
    assert_eq!(reply.status, 500);
    assert!(reply.body.contains("not finite"), "{}", reply.body);
    assert_eq!(
        message(&server.post(&question("Go")).json())["content"],
        "Fine."
    );
}

/// mlx-lm#1480, lmstudio mlx-engine#314, exo#1048: out of memory on a long prompt; omlx#1488, #1797, #2321: refused
/// where it would have fitted.
#[test]
fn memory_is_guessed_wrongly_at_admission() {
    let unlimited = Server::start(ServerOptions::default());
    let figure = |name: &str| -> u64 {
        let text = unlimited.get("/metrics").body;
        let line = text.lines().find(|line| line.starts_with(name)).unwrap();
        line.rsplit(' ').next().unwrap().parse().unwrap()
    };
    let working = figure("lily_memory_working_bytes");
    // What a session has set aside while it is answered.
    let held = asked(
        &asked(&endless(), "max_tokens", json!(200)),
        "stream",
        json!(true),
    );
    let mut stream = unlimited.send(&unlimited.chat_head(), &held.to_string());
    stream.read_exact(&mut [0; 2_000]).unwrap();
    let one = figure("lily_memory_sessions_bytes");
    for (sessions, words, max_tokens, is_taken) in [
        // As large as the session that was, and larger.
        (1, 1, json!(200), true),
        (1, 1, json!(null), true),
        (1, 2_000, json!(1), false),
        (40, 2_000, json!(1), true),
    ] {
        let server = Server::start_with(
            ServerOptions::default(),
            EngineOptions {
                memory_limit: Some(working + sessions * one),
                ..engine_options()
            },
        );
        let request = asked(
            &question(&"word ".repeat(words)),
            "max_tokens",
            max_tokens.clone(),
        );
        let reply = server.post(&request);
        assert_eq!(
            reply.status,
            if is_taken { 200 } else { 400 },
            "{sessions} {words}: {}",
            reply.body
        );
        if !is_taken {
            assert_eq!(reply.json()["error"]["code"], "out_of_memory");
            assert!(
                reply.body.contains("needs") && reply.body.contains("free"),
                "{}",
                reply.body
            );
        }
    }
}

/// ds4#333: a client that has gone, and a prompt that is read to its end all the same; clients that give up on a stream
/// without events.
#[test]
fn a_vanished_client_keeps_the_server_reading() {
    let server = Server::start(ServerOptions::default());
    let long = asked(&question(&"word ".repeat(3_500)), "stream", json!(true));
    let mut stream = server.send(&server.chat_head(), &long.to_string());
    let mut some = [0; 256];
    // The stream begins before the prompt is read.
    stream.read_exact(&mut some).unwrap();
    assert_eq!(server.requests(), 1);
    drop(stream);
    let gone = Instant::now();
    wait_until(|| server.requests() == 0);
    // Far less than the prompt takes.
    assert!(
        gone.elapsed() < Duration::from_secs(2),
        "{:?}",
        gone.elapsed()
    );
}

/// The same: what is said while a prompt is read are events with data, and clients see how far it is.
#[test]
fn a_long_prompt_is_silence() {
    let server = Server::start(ServerOptions::default());
    let mut streams = Vec::new();
    for index in 0..2 {
        let text = format!("{index} {}", "word ".repeat(2_000));
        let request = asked(
            &asked(&question(&text), "max_tokens", json!(1)),
            "stream",
            json!(true),
        );
        streams.push(server.send(&server.chat_head(), &request.to_string()));
    }
    let mut told = 0;
    for mut stream in streams {
        let mut all = Vec::new();
        stream.read_to_end(&mut all).unwrap();
        let events = support::Reply::parse(&String::from_utf8(all).unwrap()).events();
        for event in &events {
            let progress = &event["prompt_progress"];
            if progress.is_object() {
                told += 1;
                assert_eq!(event["choices"][0]["delta"], json!({}));
                assert!(progress["processed"].as_u64() <= progress["total"].as_u64());
            }
        }
    }
    assert!(told > 0);
}

/// baseRT#31.
#[test]
fn a_second_client_waits_for_the_first_to_end() {
    let server = Server::start(ServerOptions::default());
    let long = asked(&endless(), "stream", json!(true));
    let mut first = server.send(&server.chat_head(), &long.to_string());
    let mut some = [0; 2_000];
    first.read_exact(&mut some).unwrap();
    let body = server.post(&question("What is 38 + 47?")).json();
    assert_eq!(message(&body)["content"], "38 + 47 = 85");
    // The first goes on all the while.
    first.read_exact(&mut some).unwrap();
    assert_eq!(server.requests(), 1);
}
