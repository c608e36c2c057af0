//! The chat templates of Qwen3.5 and 3.6 and of the embedded model, compared
//! byte for byte with what transformers renders.

mod common;

use std::sync::Arc;

use common::{fixture, json_lines};
use lily_text::{ChatTemplate, RenderRequest, TemplateError, Tokenizer};
use serde_json::{Map, Value, json};

fn render(template: &ChatTemplate, case: &Value) -> Result<String, TemplateError> {
    let mut variables = case["kwargs"].as_object().cloned().unwrap_or_default();
    let add_generation_prompt = variables
        .remove("add_generation_prompt")
        .is_some_and(|value| value == true);
    template.render(&RenderRequest {
        messages: case["messages"].as_array().unwrap(),
        tools: case["tools"].as_array().map(Vec::as_slice),
        add_generation_prompt,
        variables: &variables,
    })
}

#[test]
fn every_case_renders_as_in_transformers() {
    let cases: Vec<Value> =
        serde_json::from_str(&fixture("fixtures/templates/renders.json")).unwrap();
    assert_eq!(cases.len(), 42);
    for case in &cases {
        let file = case["template"].as_str().unwrap();
        let template = ChatTemplate::new(fixture(&format!("fixtures/templates/{file}"))).unwrap();
        let name = format!("{file}: {}", case["name"]);
        match (render(&template, case), case["error"].as_str()) {
            (Ok(text), None) => assert_eq!(text, case["text"].as_str().unwrap(), "{name}"),
            (Err(TemplateError::Refused(message)), Some(error)) => {
                assert_eq!(message, error, "{name}");
            }
            (result, _) => panic!("{name}: {result:?}"),
        }
    }
}

/// OpenAI clients send the arguments of earlier calls as a string of JSON.
#[test]
fn arguments_as_a_string_render_like_the_object() {
    let cases: Vec<Value> =
        serde_json::from_str(&fixture("fixtures/templates/renders.json")).unwrap();
    let mut compared = 0;
    for mut case in cases {
        let Some(expected) = case["text"].as_str().map(str::to_owned) else {
            continue;
        };
        let mut changed = false;
        for message in case["messages"].as_array_mut().unwrap() {
            let calls = message.get_mut("tool_calls").and_then(Value::as_array_mut);
            for call in calls.into_iter().flatten() {
                let arguments = &mut call["function"]["arguments"];
                *arguments = Value::String(arguments.to_string());
                changed = true;
            }
        }
        if changed {
            let file = format!("fixtures/templates/{}", case["template"].as_str().unwrap());
            let template = ChatTemplate::new(fixture(&file)).unwrap();
            assert_eq!(render(&template, &case).unwrap(), expected);
            compared += 1;
        }
    }
    assert!(compared >= 4);
}

#[test]
fn the_unsloth_template_renders_the_basic_cases() {
    let template =
        ChatTemplate::new(fixture("fixtures/templates/Qwen3.6-35B-A3B.unsloth.jinja")).unwrap();
    let cases: Vec<Value> =
        serde_json::from_str(&fixture("fixtures/templates/renders.json")).unwrap();
    let same = [
        "user",
        "user_nothink",
        "user_think_true",
        "system",
        "two_turns",
        "tools",
        "tools_no_system",
        "content_parts",
        "tool_round",
    ];
    let mut compared = 0;
    for case in &cases {
        if case["template"] == "Qwen3.6-35B-A3B.jinja"
            && same.contains(&case["name"].as_str().unwrap())
        {
            assert_eq!(
                render(&template, case).unwrap(),
                case["text"].as_str().unwrap(),
                "{}",
                case["name"]
            );
            compared += 1;
        }
    }
    assert_eq!(compared, same.len());
    // Its own addition: developer messages join the system text.
    let case = json!({
        "messages": [
            {"role": "system", "content": "a"},
            {"role": "developer", "content": "b"},
            {"role": "user", "content": "c"},
        ],
        "kwargs": {"add_generation_prompt": true},
    });
    assert_eq!(
        render(&template, &case).unwrap(),
        "<|im_start|>system\na\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n<think>\n"
    );
}

/// The embedded model's own template must give what Qwen3.6's gives.
#[test]
fn the_embedded_template_agrees_with_qwens() {
    let template = ChatTemplate::new(fixture("models/lily-tiny/chat_template.jinja")).unwrap();
    let cases: Vec<Value> =
        serde_json::from_str(&fixture("fixtures/templates/renders.json")).unwrap();
    for case in cases {
        if case["template"] != "Qwen3.6-35B-A3B.jinja" {
            continue;
        }
        match (render(&template, &case), case["text"].as_str()) {
            (Ok(text), Some(expected)) => assert_eq!(text, expected, "{}", case["name"]),
            (Err(TemplateError::Refused(message)), None) => {
                assert_eq!(message, case["error"].as_str().unwrap());
            }
            (result, _) => panic!("{}: {result:?}", case["name"]),
        }
    }
}

#[test]
fn prompts_of_the_embedded_model_match_in_text_and_tokens() {
    let template = ChatTemplate::from_files(
        Some(&fixture("models/lily-tiny/chat_template.jinja")),
        Some(&fixture("models/lily-tiny/tokenizer_config.json")),
    )
    .unwrap();
    let tokenizer =
        Tokenizer::from_bytes(fixture("models/lily-tiny/tokenizer.json").as_bytes()).unwrap();
    let tokenizer = Arc::new(tokenizer);
    let cases = json_lines("models/lily-tiny/expected.jsonl");
    assert_eq!(cases.len(), 67);
    for case in &cases {
        let variables = Map::from_iter([(
            "enable_thinking".to_owned(),
            case["enable_thinking"].clone(),
        )]);
        let prompt = template
            .render(&RenderRequest {
                messages: case["messages"].as_array().unwrap(),
                tools: case["tools"].as_array().map(Vec::as_slice),
                add_generation_prompt: true,
                variables: &variables,
            })
            .unwrap();
        // The recorded text is that of the recorded tokens: no prompt has anything that is normalised away.
        let ids: Vec<u32> = serde_json::from_value(case["prompt_ids"].clone()).unwrap();
        assert_eq!(prompt, tokenizer.decode(&ids), "{}", case["id"]);
        assert_eq!(tokenizer.encode(&prompt).unwrap(), ids, "{}", case["id"]);
        let completion: Vec<u32> = serde_json::from_value(case["completion_ids"].clone()).unwrap();
        assert_eq!(
            tokenizer.decode(&completion),
            case["text"].as_str().unwrap(),
            "{}",
            case["id"]
        );
    }
}
