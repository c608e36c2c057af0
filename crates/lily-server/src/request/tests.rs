use super::*;
use serde_json::json;

fn read(body: Value) -> Result<ChatRequest, ApiError> {
    ChatRequest::read(&body, SamplingParameters::default())
}

fn with(name: &str, value: Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "x"}]});
    body[name] = value;
    body
}

#[test]
fn efforts_and_budgets_bound_the_reasoning() {
    let budget = |name: &str, value: Value| {
        let request = read(with(name, value)).unwrap();
        let thinks = request.conversation.variables.get("enable_thinking");
        (thinks.and_then(Value::as_bool), request.reasoning_budget)
    };
    assert_eq!(
        budget("reasoning_effort", json!("none")),
        (Some(false), None)
    );
    assert_eq!(
        budget("reasoning_effort", json!("minimal")),
        (Some(false), None)
    );
    assert_eq!(
        budget("reasoning_effort", json!("low")),
        (None, Some(1_024))
    );
    assert_eq!(budget("reasoning_effort", json!("high")), (None, None));
    assert_eq!(budget("reasoning_effort", json!(null)), (None, None));
    assert_eq!(budget("thinking_budget", json!(0)), (None, Some(0)));
    assert_eq!(budget("reasoning_budget", json!(7)), (None, Some(7)));
    assert_eq!(budget("enable_thinking", json!(false)), (Some(false), None));
    assert!(read(with("reasoning_effort", json!("much"))).is_err());
}

#[test]
fn what_would_change_the_answer_is_refused_and_the_rest_ignored() {
    for name in [
        "ignore_eos",
        "guided_json",
        "functions",
        "audio",
        "min_tokens",
    ] {
        let error = read(with(name, json!({"a": 1}))).unwrap_err().to_json();
        assert_eq!(error["error"]["param"], name);
    }
    for (name, value) in [
        ("ignore_eos", json!(false)),
        ("typical_p", json!(1.0)),
        ("stop_token_ids", json!([])),
        ("verbosity", json!("medium")),
        ("add_generation_prompt", json!(true)),
    ] {
        let request = read(with(name, value)).unwrap();
        assert!(request.common.ignored.is_empty(), "{name}");
    }
    let request = read(with("shoe_size", json!(43))).unwrap();
    assert_eq!(request.common.ignored, ["shoe_size"]);
}

#[test]
fn other_servers_names_mean_the_same() {
    let thinks = |name: &str, value: Value| {
        let request = read(with(name, value)).unwrap();
        let thinks = request
            .conversation
            .variables
            .get("enable_thinking")
            .cloned();
        (
            thinks.and_then(|thinks| thinks.as_bool()),
            request.reasoning_budget,
        )
    };
    assert_eq!(thinks("think", json!(false)), (Some(false), None));
    assert_eq!(
        thinks("thinking", json!({"type": "disabled"})),
        (Some(false), None)
    );
    assert_eq!(
        thinks("thinking", json!({"type": "enabled", "budget_tokens": 9})),
        (None, Some(9))
    );
    assert_eq!(
        thinks("reasoning", json!({"effort": "none"})),
        (Some(false), None)
    );
    assert_eq!(
        thinks("reasoning", json!({"effort": "low", "max_tokens": 5})),
        (None, Some(5))
    );
    let common = |name: &str, value: Value| read(with(name, value)).unwrap().common;
    assert_eq!(common("n_predict", json!(7)).max_tokens, Some(7));
    assert_eq!(
        common("repeat_penalty", json!(1.5))
            .sampling
            .repetition_penalty,
        1.5
    );
    assert_eq!(common("top_k", json!(-1)).sampling.top_k, None);
}

/// A conversation's past comes back as it was told, cut off or not, and each mistake in it has its place.
#[test]
fn calls_and_results_of_the_past_are_put_in_order() {
    let past = |calls: Value, results: &[&str]| {
        let mut messages = vec![
            json!({"role": "user", "content": "x"}),
            json!({"role": "assistant", "tool_calls": calls}),
        ];
        let results = results.iter();
        messages
            .extend(results.map(|id| json!({"role": "tool", "tool_call_id": id, "content": id})));
        read(json!({"messages": messages})).map(|request| request.conversation.messages)
    };
    let call = |id: &str, arguments: &str| json!({"id": id, "type": "function", "function": {"name": "f", "arguments": arguments}});
    let ids = |messages: &[Value]| -> Vec<String> {
        messages[2..]
            .iter()
            .map(|message| message["content"].as_str().unwrap().into())
            .collect()
    };
    let calls = json!([call("a", "{}"), call("b", "{}"), call("c", "{}")]);
    assert_eq!(
        ids(&past(calls.clone(), &["c", "a", "b"]).unwrap()),
        ["a", "b", "c"]
    );
    assert_eq!(
        ids(&past(calls, &["c", "unknown", "b"]).unwrap()),
        ["c", "unknown", "b"]
    );
    for (cut, mended) in [
        ("{\"a\": 5", json!({"a": 5})),
        ("{\"a\": \"b", json!({"a": "b"})),
        ("{\"a\": [1", json!({"a": [1]})),
        ("{\"a\": {\"b\": 1}", json!({"a": {"b": 1}})),
        ("{\"a\":", json!({"a": null})),
        ("{\"a\": [{", json!({})),
        ("", json!(null)),
    ] {
        let messages = past(json!([call("a", cut)]), &[]).unwrap();
        let arguments = messages[1]["tool_calls"][0]["function"]["arguments"]
            .as_str()
            .unwrap();
        assert_eq!(
            serde_json::from_str::<Value>(arguments).unwrap_or_default(),
            mended,
            "{cut}"
        );
    }
    for (call, place) in [
        (
            json!({"id": "1", "type": "function", "function": {}}),
            "function.name",
        ),
        (
            json!({"id": "1", "type": "custom", "custom": {"name": "f"}}),
            "type",
        ),
        (
            json!({"function": {"name": "f", "arguments": 7}}),
            "function.arguments",
        ),
        (json!("f"), "function"),
    ] {
        let error = past(json!([call]), &[]).unwrap_err().to_json();
        assert_eq!(
            error["error"]["param"],
            format!("messages[1].tool_calls[0].{place}")
        );
    }
}

#[test]
fn what_is_no_text_is_refused_by_its_place() {
    let part = |part: Value| {
        read(
            json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, part]}]}),
        )
    };
    for wrong in [
        json!({"type": "image_url", "image_url": {"url": "x"}}),
        json!({"type": "input_audio", "input_audio": {}}),
        json!({"type": "text"}),
        json!("text"),
    ] {
        let error = part(wrong).unwrap_err().to_json();
        assert_eq!(error["error"]["param"], "messages[0].content[1]", "{error}");
    }
    assert!(part(json!({"type": "refusal", "refusal": "No."})).is_ok());
    for (name, value) in [
        ("function_call", json!({"name": "f"})),
        ("audio", json!({"id": "x"})),
    ] {
        let mut message = json!({"role": "assistant", "content": "x"});
        message[name] = value;
        let error = read(json!({"messages": [message]})).unwrap_err().to_json();
        assert_eq!(error["error"]["param"], format!("messages[0].{name}"));
    }
}

#[test]
fn a_coding_agents_billing_header_is_not_part_of_the_prompt() {
    let system = |content: Value| {
        let body = json!({"messages": [{"role": "developer", "content": content}, {"role": "user", "content": "x"}]});
        read(body).unwrap().conversation.messages[0].clone()
    };
    let header = "x-anthropic-billing-header: cc_version=2.1; cch=00ff7;";
    assert_eq!(
        system(json!(format!("{header}\nBe brief."))),
        json!({"role": "system", "content": "Be brief."})
    );
    let parts = json!([{"type": "text", "text": header}, {"type": "text", "text": "Be brief."}]);
    assert_eq!(
        system(parts)["content"],
        json!([{"type": "text", "text": "Be brief."}])
    );
}

#[test]
fn tools_are_chosen() {
    let tool = |name: &str| json!({"type": "function", "function": {"name": name}});
    let chosen = |choice: Value| {
        let mut body = with(
            "tools",
            json!([tool("a"), {"type": "web_search"}, tool("b")]),
        );
        body["tool_choice"] = choice;
        let request = read(body)?;
        let names = request.conversation.tools.iter();
        let names: Vec<String> = names
            .map(|tool| tool["function"]["name"].as_str().unwrap().into())
            .collect();
        Ok::<_, ApiError>((names.join(" "), request.demand.is_any(true)))
    };
    assert_eq!(chosen(json!("auto")).unwrap(), ("a b".into(), false));
    assert_eq!(chosen(json!("none")).unwrap(), (String::new(), false));
    assert_eq!(chosen(json!("required")).unwrap(), ("a b".into(), true));
    assert_eq!(chosen(tool("b")).unwrap(), ("a b".into(), true));
    let some =
        json!({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [tool("b")]}});
    assert_eq!(chosen(some).unwrap(), ("b".into(), false));
    for wrong in [
        json!("sometimes"),
        tool("c"),
        json!({"type": "wizard"}),
        json!(1),
    ] {
        let error = chosen(wrong).unwrap_err().to_json();
        assert_eq!(error["error"]["param"], "tool_choice");
    }
    assert!(read(with("tool_choice", json!("required"))).is_err());
}

/// Each field of sampling, apart from the others, on top of defaults of which none is what a missing field would leave.
#[test]
fn each_field_of_sampling_has_its_place() {
    let defaults = SamplingParameters {
        temperature: 0.7,
        top_k: Some(20),
        top_p: 0.95,
        min_p: 0.05,
        repetition_penalty: 1.1,
        presence_penalty: 1.5,
        frequency_penalty: 0.3,
        ..SamplingParameters::default()
    };
    let sampling = |name: &str, value: Value| {
        let body = with(name, value);
        let read = ChatRequest::read(&body, defaults.clone()).unwrap();
        let mut sampling = read.common.sampling;
        if name != "seed" {
            // Without one, each request has its own.
            sampling.seed = 0;
        }
        sampling
    };
    let changed = |change: fn(&mut SamplingParameters)| {
        let mut expected = defaults.clone();
        change(&mut expected);
        expected
    };
    type Case = (&'static str, Value, fn(&mut SamplingParameters));
    let cases: [Case; 15] = [
        ("temperature", json!(0), |it| it.temperature = 0.0),
        ("temperature", json!(1.25), |it| it.temperature = 1.25),
        ("top_k", json!(7), |it| it.top_k = Some(7)),
        // All of them.
        ("top_k", json!(0), |it| it.top_k = None),
        ("top_k", json!(u64::MAX), |it| it.top_k = Some(u32::MAX)),
        ("top_p", json!(0.5), |it| it.top_p = 0.5),
        ("top_p", json!(1), |it| it.top_p = 1.0),
        ("min_p", json!(0.25), |it| it.min_p = 0.25),
        ("repetition_penalty", json!(1.5), |it| {
            it.repetition_penalty = 1.5;
        }),
        ("presence_penalty", json!(-0.5), |it| {
            it.presence_penalty = -0.5;
        }),
        ("frequency_penalty", json!(-2), |it| {
            it.frequency_penalty = -2.0;
        }),
        ("logit_bias", json!({"5": -100}), |it| {
            it.logit_bias = vec![(5, -100.0)];
        }),
        ("logprobs", json!(true), |it| it.logprobs = Some(0)),
        ("seed", json!(11), |it| it.seed = 11),
        ("seed", json!(-1), |it| it.seed = u64::MAX),
    ];
    for (name, value, change) in cases {
        assert_eq!(
            sampling(name, value.clone()),
            changed(change),
            "{name} {value}"
        );
    }
    // A null is as good as none.
    for name in [
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "logprobs",
        "top_logprobs",
        "max_tokens",
        "max_completion_tokens",
        "n",
        "stop",
        "stream",
        "stream_options",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "response_format",
        "reasoning_effort",
        "chat_template_kwargs",
        "user",
    ] {
        assert_eq!(sampling(name, json!(null)), defaults, "{name}");
    }
    for (name, value) in [
        ("top_k", json!(-2)),
        ("top_k", json!(1.5)),
        ("min_p", json!("0.1")),
        ("presence_penalty", json!(true)),
        ("seed", json!(0.5)),
    ] {
        let error = read(with(name, value)).unwrap_err().to_json();
        assert_eq!(error["error"]["param"], name);
    }
    // The newer name of the limit is the one that counts.
    let mut both = with("max_tokens", json!(5));
    both["max_completion_tokens"] = json!(3);
    assert_eq!(read(both).unwrap().common.max_tokens, Some(3));
}

/// One more than there may be is refused, and says how many there may be.
#[test]
fn messages_and_tools_have_a_limit() {
    let message = json!({"role": "user", "content": "x"});
    let tool = json!({"type": "function", "function": {"name": "a"}});
    for (name, one, most) in [("messages", message, 16_384), ("tools", tool, 1_024)] {
        assert!(read(with(name, json!(vec![&one; most]))).is_ok(), "{name}");
        let refused = read(with(name, json!(vec![&one; most + 1])));
        // The request itself is long.
        let error = refused.err().unwrap();
        let error = &error.to_json()["error"];
        assert_eq!(error["type"], "invalid_request_error");
        assert_eq!(error["param"], name);
        assert_eq!(
            error["message"],
            format!("{name} must be at most {most} {name}")
        );
    }
}
