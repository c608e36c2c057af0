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
    let request = read(with("ignore_eos", json!(false))).unwrap();
    assert!(request.common.ignored.is_empty());
    let request = read(with("shoe_size", json!(43))).unwrap();
    assert_eq!(request.common.ignored, ["shoe_size"]);
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
