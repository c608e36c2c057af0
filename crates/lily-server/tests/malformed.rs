//! Requests that are not what they should be: each is answered as the client's mistake, in time, and nobody else loses
//! anything.

mod support;

use lily_engine::EngineOptions;
use lily_server::ServerOptions;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use serde_json::{Map, Value, json};
use std::io::Read;
use std::time::{Duration, Instant};
use support::{Reply, Server, endless, engine_options};

/// Any JSON, small.
fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        (-10_i64..300).prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        "\\PC{0,12}".prop_map(Value::from),
        prop::sample::select(vec![
            "user",
            "assistant",
            "system",
            "tool",
            "developer",
            "auto",
            "required",
            "function",
            "object",
            "string",
            "json_schema",
            "json_object",
            "text",
            "<think>",
            "</think>",
            "<tool_call>",
            "<|im_end|>",
            "#/$defs/x",
        ])
        .prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 24, 5, |inner| {
        let key = prop_oneof![
            "[a-z]{1,8}",
            prop::sample::select(vec![
                "type",
                "role",
                "content",
                "function",
                "name",
                "parameters",
                "properties",
                "schema",
                "json_schema",
                "tool_calls",
                "arguments",
                "required",
                "text",
                "$ref",
                "anyOf",
                "pattern",
                "enum",
            ])
            .prop_map(String::from),
        ];
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
            prop::collection::vec((key, inner), 0..5)
                .prop_map(|all| Value::Object(all.into_iter().collect::<Map<_, _>>())),
        ]
    })
}

/// A sound request with some of its fields replaced.
fn request() -> impl Strategy<Value = Value> {
    let field = prop::sample::select(vec![
        "messages",
        "model",
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "seed",
        "stop",
        "stream",
        "stream_options",
        "n",
        "logprobs",
        "top_logprobs",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "response_format",
        "reasoning_effort",
        "thinking_budget",
        "enable_thinking",
        "chat_template_kwargs",
        "modalities",
        "user",
        "prompt",
        "echo",
        "best_of",
        "tokens",
        "content",
    ]);
    prop::collection::vec((field, any_json()), 1..4).prop_map(|changes| {
        let mut request = json!({
            "messages": [{"role": "user", "content": "Hello"}],
            "prompt": "Hello",
            "tokens": [1, 2],
            "max_tokens": 2,
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}],
        });
        for (name, value) in changes {
            request[name] = value;
        }
        request
    })
}

#[test]
fn a_mistake_is_the_clients_and_costs_nobody_else() {
    let server = Server::start_with(
        ServerOptions::default(),
        EngineOptions {
            // Whatever is asked for, answers stay short.
            context: Some(320),
            ..engine_options()
        },
    );
    let mut neighbour = endless();
    neighbour["stream"] = true.into();
    neighbour["max_tokens"] = json!(200);
    let alone = server.post(&neighbour).events();
    let beside = server.send(&server.chat_head(), &neighbour.to_string());

    let mut runner = TestRunner::new(Config {
        cases: 300,
        failure_persistence: None,
        ..Config::default()
    });
    let paths = prop::sample::select(vec![
        "/v1/chat/completions",
        "/v1/chat/completions",
        "/v1/chat/completions",
        "/v1/completions",
        "/tokenize",
        "/detokenize",
        "/apply-template",
    ]);
    let cut = prop_oneof![3 => Just(1.0), 1 => 0.0..1.0_f64];
    let outcome = runner.run(&(paths, request(), cut), |(path, request, part)| {
        let text = request.to_string();
        let end = (text.len() as f64 * part) as usize;
        let end = (0..=end)
            .rev()
            .find(|&end| text.is_char_boundary(end))
            .unwrap_or(0);
        let began = Instant::now();
        let reply = server.ask(&server.head(path), &text[..end]);
        prop_assert!(
            matches!(reply.status, 200 | 400),
            "{path} {}: {}",
            reply.status,
            reply.body
        );
        prop_assert!(
            began.elapsed() < Duration::from_secs(20),
            "{path} {:?}",
            began.elapsed()
        );
        if reply.status == 400 {
            let message = &reply.json()["error"]["message"];
            prop_assert!(
                message.as_str().is_some_and(|text| text.len() > 5),
                "{}",
                reply.body
            );
        } else {
            // A stream that has begun may fail within, by the client's fault alone.
            prop_assert!(!reply.body.contains("server_error"), "{}", reply.body);
        }
        Ok(())
    });
    outcome.unwrap_or_else(|error| panic!("{error}"));

    let mut all = Vec::new();
    let mut beside = beside;
    beside.read_to_end(&mut all).unwrap();
    let reply = Reply::parse(&String::from_utf8(all).unwrap());
    assert_eq!(
        support::together(&reply.events()),
        support::together(&alone)
    );
}
