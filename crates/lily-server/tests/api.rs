//! What the API offers beside plain answers: several choices, log-probabilities, forms and calls that are held to,
//! budgets, older completions, tokens, keys, figures.

mod support;

use lily_server::ServerOptions;
use serde_json::{Value, json};
use support::{Server, question, server, together, tools, without_ids};

fn content(body: &Value, choice: usize) -> String {
    let content = &body["choices"][choice]["message"]["content"];
    content
        .as_str()
        .unwrap_or_else(|| panic!("{body}"))
        .to_string()
}

#[test]
fn choices_are_what_each_would_be_alone_and_share_their_prompt() {
    let mut request = question("Tell me a short story.");
    request["temperature"] = json!(1.2);
    request["seed"] = json!(11);
    request["max_tokens"] = json!(40);
    request["n"] = json!(3);
    let body = server().post(&request).json();
    let choices = body["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 3);
    assert_ne!(content(&body, 0), content(&body, 1));
    let mut completion_tokens = 0;
    for (index, seed) in (11..14).enumerate() {
        let mut alone = request.clone();
        alone["n"] = json!(1);
        alone["seed"] = seed.into();
        let alone = server().post(&alone).json();
        assert_eq!(choices[index]["index"], index);
        assert_eq!(content(&body, index), content(&alone, 0), "{index}");
        completion_tokens += alone["usage"]["completion_tokens"].as_u64().unwrap();
        assert_eq!(
            body["usage"]["prompt_tokens"],
            alone["usage"]["prompt_tokens"]
        );
    }
    assert_eq!(body["usage"]["completion_tokens"], completion_tokens);
    request["stream"] = true.into();
    let events = server().post(&request).events();
    for (index, choice) in choices.iter().enumerate() {
        let of_choice = |event: &&Value| event["choices"][0]["index"] == index;
        let events: Vec<Value> = events.iter().filter(of_choice).cloned().collect();
        assert_eq!(together(&events)["content"], choice["message"]["content"]);
    }
}

#[test]
fn log_probabilities_belong_to_the_content() {
    let mut request = question("What is 38 + 47?");
    request["chat_template_kwargs"] = json!({"enable_thinking": true});
    request["logprobs"] = true.into();
    request["top_logprobs"] = json!(3);
    let body = server().post(&request).json();
    let choice = &body["choices"][0];
    let tokens = choice["logprobs"]["content"].as_array().unwrap();
    let bytes = |token: &Value| -> Vec<u8> {
        token["bytes"]
            .as_array()
            .unwrap()
            .iter()
            .map(|byte| byte.as_u64().unwrap() as u8)
            .collect()
    };
    let all: Vec<u8> = tokens.iter().flat_map(bytes).collect();
    assert_eq!(String::from_utf8(all).unwrap(), content(&body, 0));
    assert!(
        choice["message"]["reasoning_content"]
            .as_str()
            .unwrap()
            .len()
            > 3
    );
    for token in tokens {
        let logprob = token["logprob"].as_f64().unwrap();
        let top = token["top_logprobs"].as_array().unwrap();
        assert!(logprob <= 0.0 && top.len() == 3);
        // Greedy: the likeliest was chosen.
        assert_eq!(top[0]["logprob"], token["logprob"]);
        assert_eq!(top[0]["bytes"], token["bytes"]);
    }
    request["stream"] = true.into();
    let events = server().post(&request).events();
    let streamed: Vec<Value> = events
        .iter()
        .filter_map(|event| event["choices"][0]["logprobs"]["content"].as_array())
        .flatten()
        .cloned()
        .collect();
    assert_eq!(&streamed, tokens);
}

fn person() -> Value {
    json!({
        "type": "json_schema",
        "json_schema": {"name": "person", "strict": true, "schema": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 12},
                "age": {"type": "integer", "minimum": 0, "maximum": 150},
                "city": {"enum": ["Minsk", "Oslo"]},
            },
            "required": ["name", "age", "city"],
            "additionalProperties": false,
        }},
    })
}

/// With reasoning and without, streaming and not: the content is of the schema, whatever was asked.
#[test]
fn structured_output_is_of_its_schema() {
    for (text, thinks) in [
        (
            "Max is 45 years old and lives in Minsk. Return a JSON object with name, age and city.",
            false,
        ),
        ("Tell me a story about a fox and a lantern.", true),
    ] {
        let mut request = question(text);
        request["chat_template_kwargs"] = json!({"enable_thinking": thinks});
        request["response_format"] = person();
        let body = server().post(&request).json();
        assert_eq!(body["choices"][0]["finish_reason"], "stop", "{body}");
        let value: Value = serde_json::from_str(&content(&body, 0)).unwrap();
        assert!(value["name"].is_string() && (0..=150).contains(&value["age"].as_i64().unwrap()));
        assert!(
            value["city"] == "Minsk" || value["city"] == "Oslo",
            "{value}"
        );
        assert_eq!(value.as_object().unwrap().len(), 3);
        if thinks {
            assert!(
                body["choices"][0]["message"]["reasoning_content"].is_string(),
                "{body}"
            );
        } else {
            assert_eq!(value, json!({"name": "Max", "age": 45, "city": "Minsk"}));
        }
        request["stream"] = true.into();
        let streamed = together(&server().post(&request).events());
        assert_eq!(streamed, body["choices"][0]["message"]);
    }
    let mut request = question("Give me a JSON object with name George and city Bern.");
    request["response_format"] = json!({"type": "json_object"});
    let body = server().post(&request).json();
    let value: Value = serde_json::from_str(&content(&body, 0)).unwrap();
    assert!(value.is_object());
}

#[test]
fn calls_are_made_when_they_must_be() {
    let light = json!({"type": "function", "function": {"name": "set_light", "parameters": {
        "type": "object",
        "properties": {"level": {"type": "integer", "minimum": 0, "maximum": 100}, "room": {"enum": ["kitchen", "hall"]}},
        "required": ["level", "room"],
    }}});
    let timer = tools()[0].clone();
    // Nobody would call a tool for this.
    let mut request = question("Hello!");
    request["tools"] = json!([timer, light]);
    let free = server().post(&request).json();
    assert_eq!(free["choices"][0]["finish_reason"], "stop", "{free}");
    for (choice, name) in [
        (json!("required"), None),
        (
            json!({"type": "function", "function": {"name": "set_light"}}),
            Some("set_light"),
        ),
        (
            json!({"type": "function", "function": {"name": "start_timer"}}),
            Some("start_timer"),
        ),
    ] {
        for thinks in [false, true] {
            request["tool_choice"] = choice.clone();
            request["parallel_tool_calls"] = false.into();
            request["chat_template_kwargs"] = json!({"enable_thinking": thinks});
            request.as_object_mut().unwrap().remove("stream");
            let body = server().post(&request).json();
            assert_eq!(body["choices"][0]["finish_reason"], "tool_calls", "{body}");
            let message = &body["choices"][0]["message"];
            let calls = message["tool_calls"].as_array().unwrap();
            assert_eq!(calls.len(), 1);
            let function = &calls[0]["function"];
            assert!(
                name.is_none_or(|name| function["name"] == name),
                "{function}"
            );
            let arguments: Value =
                serde_json::from_str(function["arguments"].as_str().unwrap()).unwrap();
            if function["name"] == "set_light" {
                assert!(
                    (0..=100).contains(&arguments["level"].as_i64().unwrap()),
                    "{arguments}"
                );
                assert!(
                    arguments["room"] == "kitchen" || arguments["room"] == "hall",
                    "{arguments}"
                );
            } else {
                assert!(arguments["minutes"].is_i64(), "{arguments}");
            }
            request["stream"] = true.into();
            let streamed = together(&server().post(&request).events());
            assert_eq!(without_ids(streamed), without_ids(message.clone()));
        }
    }
    request["tool_choice"] = json!("none");
    request.as_object_mut().unwrap().remove("stream");
    let body = server().post(&request).json();
    assert!(body["choices"][0]["message"].get("tool_calls").is_none());
}

#[test]
fn reasoning_keeps_to_its_budget() {
    let mut request = question("What is 17 + 25?");
    request["chat_template_kwargs"] = json!({"enable_thinking": true});
    let free = server().post(&request).json();
    let reasoning = |body: &Value| {
        body["usage"]["completion_tokens_details"]["reasoning_tokens"]
            .as_u64()
            .unwrap()
    };
    assert!(reasoning(&free) > 12, "{free}");
    for budget in [0, 6] {
        request["thinking_budget"] = budget.into();
        let body = server().post(&request).json();
        // The tag that ends it, and what leads to it.
        assert!(reasoning(&body) <= budget + 3, "{body}");
        assert!(
            !content(&body, 0).is_empty() && !content(&body, 0).contains("think"),
            "{body}"
        );
    }
    request["thinking_budget"] = json!(1_000);
    assert_eq!(server().post(&request).json()["choices"], free["choices"]);
}

#[test]
fn older_completions_go_on_with_a_text() {
    let at = |request: &Value| server().post_to("/v1/completions", request);
    let prompt = "<|im_start|>user\nWhat is 38 + 47?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n";
    let request = json!({"prompt": prompt, "temperature": 0, "max_tokens": 30});
    let body = at(&request).json();
    assert_eq!(body["object"], "text_completion");
    assert_eq!(body["choices"][0]["text"], "38 + 47 = 85");
    assert_eq!(body["choices"][0]["finish_reason"], "stop");
    let tokens = server()
        .post_to("/tokenize", &json!({"content": prompt}))
        .json();
    assert_eq!(tokens["count"], body["usage"]["prompt_tokens"]);
    let mut by_tokens = request.clone();
    by_tokens["prompt"] = tokens["tokens"].clone();
    assert_eq!(at(&by_tokens).json()["choices"], body["choices"]);
    let mut streamed = request.clone();
    streamed["stream"] = true.into();
    streamed["stream_options"] = json!({"include_usage": true});
    let events = at(&streamed).events();
    let text: String = events
        .iter()
        .filter_map(|event| event["choices"][0]["text"].as_str())
        .collect();
    assert_eq!(text, "38 + 47 = 85");
    assert_eq!(
        events.last().unwrap()["usage"]["completion_tokens"],
        body["usage"]["completion_tokens"]
    );
    let several = json!({"prompt": ["Once upon a time", prompt], "n": 2, "temperature": 0, "max_tokens": 8, "logprobs": 2, "seed": 1});
    let body = at(&several).json();
    let choices = body["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 4);
    assert_eq!(choices[0]["text"], choices[1]["text"]);
    assert_ne!(choices[1]["text"], choices[2]["text"]);
    for choice in choices {
        let logprobs = &choice["logprobs"];
        let tokens = logprobs["tokens"].as_array().unwrap();
        let text: String = tokens.iter().map(|token| token.as_str().unwrap()).collect();
        assert_eq!(choice["text"], text);
        assert_eq!(
            logprobs["text_offset"].as_array().unwrap().len(),
            tokens.len()
        );
    }
    let echoed = json!({"prompt": "Once", "echo": true, "max_tokens": 3, "temperature": 0});
    assert!(
        at(&echoed).json()["choices"][0]["text"]
            .as_str()
            .unwrap()
            .starts_with("Once")
    );
    for (name, value) in [
        ("prompt", json!(7)),
        ("prompt", json!([])),
        ("best_of", json!(3)),
        ("suffix", json!("x")),
        ("n", json!(65)),
        ("response_format", json!({"type": "json_object"})),
        ("logprobs", json!(99)),
        ("prompt", json!([[999_999]])),
    ] {
        let mut wrong = request.clone();
        wrong[name] = value;
        let reply = at(&wrong);
        assert_eq!(
            (reply.status, &reply.json()["error"]["param"]),
            (400, &json!(name))
        );
    }
}

#[test]
fn text_and_tokens_are_counted() {
    let text = "Grüße, 🦊!";
    let post = |path: &str, body: Value| server().post_to(path, &body);
    let tokens = post("/tokenize", json!({"content": text})).json();
    assert_eq!(
        tokens["tokens"].as_array().unwrap().len() as u64,
        tokens["count"].as_u64().unwrap()
    );
    assert_eq!(tokens["max_model_len"], 4_096);
    let back = post("/detokenize", json!({"tokens": tokens["tokens"]})).json();
    assert_eq!(back["content"], text);
    let conversation = json!({"messages": [{"role": "user", "content": "Hello!"}], "chat_template_kwargs": {"enable_thinking": false}});
    let prompt = post("/apply-template", conversation.clone()).json();
    let expected =
        "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n";
    assert_eq!(prompt["prompt"], expected);
    let counted = post("/tokenize", conversation).json();
    assert_eq!(
        counted["count"],
        post("/tokenize", json!({"content": expected})).json()["count"]
    );
    for (path, body, param) in [
        ("/tokenize", json!({}), "content"),
        ("/detokenize", json!({"tokens": "x"}), "tokens"),
        ("/detokenize", json!({"tokens": [1_000_000_000]}), "tokens"),
        ("/apply-template", json!({}), "messages"),
    ] {
        let reply = post(path, body);
        assert_eq!(
            (reply.status, &reply.json()["error"]["param"]),
            (400, &json!(param))
        );
    }
}

/// Earlier reasoning is in the prompt where the template is asked to keep it, and what a client may tell templates
/// reaches them.
#[test]
fn earlier_reasoning_is_kept_on_demand() {
    let mut conversation = json!({"messages": [
        {"role": "user", "content": "What is 38 + 47?"},
        {"role": "assistant", "reasoning_content": "I add the tens first.", "content": "85"},
        {"role": "user", "content": "And 12 + 13?"},
        {"role": "assistant", "reasoning": "Under another name.", "content": "25"},
        {"role": "user", "content": "And 1 + 1?"},
    ]});
    let rendered = |conversation: &Value| {
        let reply = server().post_to("/apply-template", conversation);
        assert_eq!(reply.status, 200, "{}", reply.body);
        reply.json()["prompt"].as_str().unwrap().to_string()
    };
    let dropped = rendered(&conversation);
    assert!(!dropped.contains("tens first") && !dropped.contains("another name"));
    conversation["chat_template_kwargs"] = json!({"preserve_thinking": true});
    let kept = rendered(&conversation);
    for thought in [
        "assistant\n<think>\nI add the tens first.\n</think>\n\n85<|im_end|>",
        "assistant\n<think>\nUnder another name.\n</think>\n\n25<|im_end|>",
    ] {
        assert!(kept.contains(thought), "{kept}");
    }
    // Completions have the same prompt.
    let tokens = server()
        .post_to("/tokenize", &json!({"content": kept}))
        .json();
    conversation["max_tokens"] = json!(1);
    let body = server().post(&conversation).json();
    assert_eq!(body["usage"]["prompt_tokens"], tokens["count"]);
    for wrong in [json!("preserve_thinking"), json!([true]), json!(1)] {
        conversation["chat_template_kwargs"] = wrong;
        let reply = server().post_to("/apply-template", &conversation);
        let param = reply.json()["error"]["param"].clone();
        assert_eq!((reply.status, param), (400, json!("chat_template_kwargs")));
    }
}

/// What exceeds a limit is told with the limit, over HTTP as well.
#[test]
fn limits_are_told_in_numbers() {
    let message = json!({"role": "user", "content": "x"});
    let tool = json!({"type": "function", "function": {"name": "a"}});
    for (name, value, said) in [
        (
            "messages",
            json!(vec![message; 16_385]),
            "at most 16384 messages",
        ),
        ("tools", json!(vec![tool; 1_025]), "at most 1024 tools"),
        ("n", json!(17), "at most 16"),
        ("top_logprobs", json!(21), "at most 20"),
        ("stop", json!(["a", "b", "c", "d", "e"]), "up to 4"),
        ("max_completion_tokens", json!(0), "at least 1"),
        ("thinking_budget", json!(-1), "at least 0"),
        ("frequency_penalty", json!(2.5), "frequency_penalty"),
        ("presence_penalty", json!(-2.5), "presence_penalty"),
        ("repetition_penalty", json!(0), "repetition_penalty"),
        ("min_p", json!(1), "min_p"),
        ("top_p", json!(0), "top_p"),
    ] {
        let mut request = question("x");
        request["logprobs"] = true.into();
        request[name] = value;
        let reply = server().post(&request);
        let error = reply.json()["error"].clone();
        assert_eq!(
            (reply.status, &error["param"]),
            (400, &json!(name)),
            "{error}"
        );
        assert!(error["message"].as_str().unwrap().contains(said), "{error}");
    }
}

#[test]
fn keys_hosts_and_origins_let_in_who_is_named() {
    let server = Server::start(ServerOptions {
        api_keys: vec!["first-key".into(), "second-key".into()],
        hosts: vec!["mac.local".into()],
        origins: vec!["https://app.example".into()],
        ..ServerOptions::default()
    });
    let at = |head: &str| server.ask(head, "");
    let models = "GET /v1/models HTTP/1.1\r\nHost: mac.local:80";
    let refused = at(models);
    assert_eq!(refused.status, 401);
    assert!(refused.head.contains("www-authenticate: bearer"));
    assert_eq!(refused.json()["error"]["code"], "invalid_api_key");
    for (key, status) in [("second-key", 200), ("second", 401), ("", 401)] {
        assert_eq!(
            at(&format!("{models}\r\nAuthorization: Bearer {key}")).status,
            status,
            "{key}"
        );
    }
    // Whether it lives is no secret; what it does is.
    assert_eq!(at("GET /health HTTP/1.1\r\nHost: localhost").status, 200);
    assert_eq!(at("GET /metrics HTTP/1.1\r\nHost: localhost").status, 401);
    let before = at(
        "OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nOrigin: https://app.example\r\nAccess-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: authorization,content-type",
    );
    assert_eq!(before.status, 200);
    assert!(
        before
            .head
            .contains("access-control-allow-origin: https://app.example"),
        "{}",
        before.head
    );
    assert!(
        before
            .head
            .contains("access-control-allow-headers: authorization,content-type"),
        "{}",
        before.head
    );
    let other = at(
        "OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nOrigin: https://evil.example\r\nAccess-Control-Request-Method: POST",
    );
    assert_eq!(other.status, 403);
    // Where nobody was named, no page but the server's own may read.
    let plain = support::server().ask(
        "GET /v1/models HTTP/1.1\r\nHost: localhost\r\nOrigin: http://localhost:1",
        "",
    );
    assert!(!plain.head.contains("access-control"), "{}", plain.head);
}

#[test]
fn figures_count_what_was_done() {
    let server = Server::start(ServerOptions::default());
    let figure = |name: &str| -> f64 {
        let text = server.get("/metrics").body;
        let line = text
            .lines()
            .find(|line| line.starts_with(name))
            .unwrap_or_else(|| panic!("{name}: {text}"));
        line.rsplit(' ').next().unwrap().parse().unwrap()
    };
    let body = server.post(&question("What is 38 + 47?")).json();
    assert_eq!(
        figure("lily_prompt_tokens_total"),
        body["usage"]["prompt_tokens"].as_f64().unwrap()
    );
    assert_eq!(
        figure("lily_generated_tokens_total"),
        body["usage"]["completion_tokens"].as_f64().unwrap()
    );
    assert_eq!(figure("lily_time_to_first_token_seconds_count"), 1.0);
    assert_eq!(figure("lily_answers_total{reason=\"stop\"}"), 1.0);
    assert_eq!(
        figure("lily_requests_total{path=\"/v1/chat/completions\",status=\"200\"}"),
        1.0
    );
    assert!(figure("lily_memory_limit_bytes") > 0.0);
    server.get("/v1/nothing");
    assert_eq!(
        figure("lily_requests_total{path=\"none\",status=\"404\"}"),
        1.0
    );
    assert!(server.get("/metrics").body.ends_with("# EOF\n"));
}
