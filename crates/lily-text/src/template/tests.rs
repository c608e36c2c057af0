use super::*;
use serde_json::json;

fn render(source: &str, variables: Json) -> Result<String, TemplateError> {
    let Json::Object(variables) = variables else {
        panic!("variables must be an object");
    };
    ChatTemplate::new(source)?.render(&RenderRequest {
        messages: &[],
        tools: None,
        add_generation_prompt: false,
        variables: &variables,
    })
}

#[test]
fn tojson_is_pythons_json_dumps() {
    let value = json!({"b": [1, 1.0, 1e-5, 1e16, 1.5e300, -0.0, true, null], "a": "<é\u{1}\"\n>", "e": {}, "l": []});
    assert_eq!(
        render("{{ x|tojson }}", json!({"x": value})).unwrap(),
        "{\"b\": [1, 1.0, 1e-05, 1e+16, 1.5e+300, -0.0, true, null], \"a\": \"<é\\u0001\\\"\\n>\", \"e\": {}, \"l\": []}"
    );
    assert_eq!(
        render(
            "{{ x|tojson(indent=2) }}",
            json!({"x": {"a": [1, {"b": 2}], "c": []}})
        )
        .unwrap(),
        "{\n  \"a\": [\n    1,\n    {\n      \"b\": 2\n    }\n  ],\n  \"c\": []\n}"
    );
    assert_eq!(
        render(
            "{{ x|tojson(separators=(',', ':'), sort_keys=true, ensure_ascii=true) }}",
            json!({"x": {"b": "é🙂", "a": 1}})
        )
        .unwrap(),
        "{\"a\":1,\"b\":\"\\u00e9\\ud83d\\ude42\"}"
    );
    assert!(matches!(
        render("{{ nothing|tojson }}", json!({})),
        Err(TemplateError::Render(_))
    ));
    assert!(render("{{ x|tojson(indent=1000000) }}", json!({"x": [1]})).is_err());
}

#[test]
fn values_print_as_in_python() {
    assert_eq!(
        render(
            "{{ a }} {{ b }} {{ c }} {{ d|string }} {{ e }}{{ missing }}",
            json!({"a": 1e-5, "b": 2.0, "c": true, "d": 1e22, "e": null})
        )
        .unwrap(),
        "1e-05 2.0 True 1e+22 None"
    );
}

#[test]
fn refusals_carry_the_templates_message() {
    let nested = "{% macro m() %}{{ raise_exception('No: ' ~ why) }}{% endmacro %}{{ m() }}";
    match render(nested, json!({"why": "bad {role}"})) {
        Err(TemplateError::Refused(message)) => assert_eq!(message, "No: bad {role}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_template_that_never_ends_is_stopped() {
    let begin = std::time::Instant::now();
    let loops = "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}x{% endfor %}{% endfor %}{% endfor %}";
    assert!(matches!(
        render(loops, json!({})),
        Err(TemplateError::OutOfFuel)
    ));
    let grows = "{% set ns = namespace(s='x') %}{% for a in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}";
    assert!(matches!(
        render(grows, json!({})),
        Err(TemplateError::OutOfFuel)
    ));
    let dumps = "{% set ns = namespace(s=['x']) %}{% for a in range(60) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s|tojson }}";
    assert!(matches!(
        render(dumps, json!({})),
        Err(TemplateError::OutOfFuel)
    ));
    let recurses = "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}";
    assert!(render(recurses, json!({})).is_err());
    let deep = format!(
        "{}1{}",
        "{{ ".to_owned() + &"(".repeat(5000),
        ")".repeat(5000) + " }}"
    );
    assert!(matches!(
        ChatTemplate::new(deep),
        Err(TemplateError::Invalid(_))
    ));
    assert!(begin.elapsed().as_secs() < 60, "stopped, but too late");
}

#[test]
fn loop_controls_and_python_methods_work() {
    assert_eq!(
        render(
            "{% for x in l %}{% if x == 2 %}{% continue %}{% endif %}{% if x == 4 %}{% break %}{% endif %}{{ x }}{% endfor %}{{ ' a '.strip() }}{{ d.get('k') }}{{ d.items()|list|length }}",
            json!({"l": [1, 2, 3, 4, 5], "d": {"k": "v"}}),
        )
        .unwrap(),
        "13av1"
    );
}

#[test]
fn arguments_in_a_string_are_parsed() {
    let template = ChatTemplate::new(
        "{% for m in messages %}{% for c in m.tool_calls %}{% for k, v in c.function.arguments|items %}{{ k }}={{ v|tojson }};{% endfor %}{% endfor %}{% endfor %}",
    )
    .unwrap();
    let render = |arguments: Json| {
        template.render(&RenderRequest {
            messages: &[json!({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]})],
            tools: None,
            add_generation_prompt: false,
            variables: &Map::new(),
        })
    };
    assert_eq!(
        render(json!("{\"b\": [1], \"a\": \"x\"}")).unwrap(),
        "b=[1];a=\"x\";"
    );
    assert_eq!(render(json!({"b": 1})).unwrap(), "b=1;");
    for empty in [json!(""), json!("null"), json!(null), json!({})] {
        assert_eq!(render(empty).unwrap(), "");
    }
    for bad in ["[1]", "{", "3"] {
        assert!(
            matches!(
                render(json!(bad)),
                Err(TemplateError::Message { index: 0, .. })
            ),
            "{bad}"
        );
    }
}

#[test]
fn templates_come_from_either_file() {
    let config = r#"{"chat_template": "{{ bos_token }}c", "bos_token": {"content": "<s>"}, "eos_token": null}"#;
    let text = |template: ChatTemplate| {
        template
            .render(&RenderRequest {
                messages: &[],
                tools: None,
                add_generation_prompt: false,
                variables: &Map::new(),
            })
            .unwrap()
    };
    assert_eq!(
        text(ChatTemplate::from_files(None, Some(config)).unwrap()),
        "<s>c"
    );
    assert_eq!(
        text(ChatTemplate::from_files(Some("j{{ bos_token }}"), Some(config)).unwrap()),
        "j<s>"
    );
    let named = r#"{"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]}"#;
    assert_eq!(
        text(ChatTemplate::from_files(None, Some(named)).unwrap()),
        "d"
    );
    assert!(matches!(
        ChatTemplate::from_files(None, None),
        Err(TemplateError::Missing)
    ));
    assert!(matches!(
        ChatTemplate::from_files(None, Some("{}")),
        Err(TemplateError::Missing)
    ));
    assert!(matches!(
        ChatTemplate::from_files(None, Some("[")),
        Err(TemplateError::Config(_))
    ));
    assert!(matches!(
        ChatTemplate::from_files(Some("{% if"), None),
        Err(TemplateError::Invalid(_))
    ));
}

/// In their place, and nothing else of the rendering changes.
#[test]
fn system_messages_may_come_late() {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    for file in [
        "fixtures/templates/Qwen3.6-35B-A3B.jinja",
        "fixtures/templates/Qwen3.5-35B-A3B.jinja",
        "models/lily-tiny/chat_template.jinja",
    ] {
        let source = std::fs::read_to_string(format!("{root}/{file}")).unwrap();
        let strict = ChatTemplate::new(&source).unwrap();
        let lenient = ChatTemplate::new(&source)
            .unwrap()
            .with_late_system_messages();
        let render = |template: &ChatTemplate, messages: Json| {
            template.render(&RenderRequest {
                messages: messages.as_array().unwrap(),
                tools: None,
                add_generation_prompt: true,
                variables: &Map::new(),
            })
        };
        let with_late = json!([
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hello"},
            {"role": "system", "content": [{"type": "text", "text": " Be rude. "}]},
            {"role": "user", "content": "Hello?"},
        ]);
        assert!(render(&strict, with_late.clone()).is_err());
        let text = render(&lenient, with_late).unwrap();
        let late = "<|im_start|>system\nBe rude.<|im_end|>\n";
        let without = json!([
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hello"},
            {"role": "user", "content": "Hello?"},
        ]);
        assert_eq!(
            text.replace(late, ""),
            render(&strict, without.clone()).unwrap(),
            "{file}"
        );
        assert!(text.contains(&format!("Hello<|im_end|>\n{late}<|im_start|>user\nHello?")));
        assert_eq!(
            render(&lenient, without.clone()).unwrap(),
            render(&strict, without).unwrap()
        );
    }
    let other =
        ChatTemplate::new("{{ raise_exception('System message must be at the beginning.') }}");
    let source = other
        .unwrap()
        .with_late_system_messages()
        .source()
        .to_string();
    assert!(source.contains("raise_exception"));
}
