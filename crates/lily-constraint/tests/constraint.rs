//! Constraints, followed with the embedded model's tokens and no model.

use lily_constraint::{Constraint, ConstraintError, Grammars};
use lily_engine::{Allowed, Guide, Tokenizer, parse_output};
use lily_testing::repository;
use serde_json::{Value, json};
use std::sync::{Arc, OnceLock};

/// A prompt behind which the answer begins at once.
const DIRECT: &str = "<|im_start|>assistant\n<think>\n\n</think>\n\n";
/// A prompt behind which the reasoning begins.
const THINKING: &str = "<|im_start|>assistant\n<think>\n";

struct Setting {
    tokenizer: Arc<Tokenizer>,
    stop: u32,
    grammars: Grammars,
}

fn setting() -> &'static Setting {
    static SETTING: OnceLock<Setting> = OnceLock::new();
    SETTING.get_or_init(|| {
        let json = std::fs::read(repository("models/lily-tiny/tokenizer.json")).unwrap();
        let tokenizer = Arc::new(Tokenizer::from_bytes(&json).unwrap());
        let stop = tokenizer.id_of("<|im_end|>").unwrap();
        let grammars = Grammars::new(tokenizer.clone(), &[stop]).unwrap();
        Setting {
            tokenizer,
            stop,
            grammars,
        }
    })
}

fn constraint(prompt: &str) -> Constraint {
    let setting = setting();
    setting
        .grammars
        .constraint(&[setting.stop], prompt)
        .unwrap()
}

/// Offers the tokens of a text one by one; the text that comes out, and whether it may end there. Stops where a token is
/// not allowed.
fn follow(guide: &mut Constraint, text: &str) -> (String, bool) {
    let Setting {
        tokenizer, stop, ..
    } = setting();
    let mut out = Vec::new();
    let mut offered = tokenizer.encode(text).unwrap().into_iter().peekable();
    loop {
        let next = match guide.allowed().unwrap() {
            Allowed::Token(token) => {
                if offered.peek() == Some(&token) {
                    offered.next();
                }
                Some(token)
            }
            Allowed::Any => Some(offered.next().unwrap_or(*stop)),
            Allowed::Only(set) => {
                let may = |token: u32| set[token as usize / 32] >> (token % 32) & 1 == 1;
                match offered.peek() {
                    Some(&token) if may(token) => offered.next(),
                    Some(_) => None,
                    None => may(*stop).then_some(*stop),
                }
            }
        };
        match next {
            Some(token) if token == *stop => {
                let taken = guide.take(token).unwrap();
                if taken == *stop {
                    return (tokenizer.decode(&out), true);
                }
                out.push(taken);
            }
            Some(token) => out.push(guide.take(token).unwrap()),
            None => return (tokenizer.decode(&out), false),
        }
    }
}

fn schema() -> Value {
    json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
        },
        "required": ["name", "age"],
        "additionalProperties": false,
    })
}

#[test]
fn json_is_held_to_its_schema() {
    let grammar = setting().grammars.json(&schema()).unwrap();
    let held = |text: &str| follow(&mut constraint(DIRECT).with_answer(grammar.clone()), text);
    let good = r#"{"name": "Max", "age": 45}"#;
    assert_eq!(held(good), (good.into(), true));
    for (text, kept) in [
        // Where each leaves the schema.
        (r#"{"name": "Max", "age": -1}"#, r#"{"name": "Max", "age":"#),
        (r#"{"age": 4}"#, "{"),
        ("Sure! {}", ""),
        (r#"{"name": "Max", "age": 45} And more."#, good),
    ] {
        let (out, _) = held(text);
        assert!(
            out.trim_end().starts_with(kept.trim_end()) && out.len() < text.len(),
            "{text}: {out}"
        );
    }
}

/// A model that cannot say what it would must not go on with blanks: greedy, it would never come back.
#[test]
fn white_space_is_for_people_and_ends() {
    let grammar = setting().grammars.json(&schema()).unwrap();
    let held = |text: &str| follow(&mut constraint(DIRECT).with_answer(grammar.clone()), text);
    let pretty = "{\n  \"name\": \"Max\",\n  \"age\": 45\n}";
    assert_eq!(held(pretty), (pretty.into(), true));
    for blanks in [" ", "\n", "\n\n", "\t"] {
        let (out, ended) = held(&format!("{{\"name\":{}", blanks.repeat(100)));
        assert!(!ended && out.len() < 30, "{blanks:?}: {out:?}");
    }
}

/// Whatever is allowed at random makes JSON of the schema.
#[test]
fn whatever_is_chosen_fits_the_schema() {
    let Setting {
        tokenizer,
        stop,
        grammars,
    } = setting();
    let schema = json!({
        "type": "object",
        "properties": {
            "kind": {"enum": ["fox", "owl"]},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 5}, "minItems": 1, "maxItems": 3},
            "weight": {"$ref": "#/$defs/weight"},
        },
        "required": ["kind", "tags", "weight"],
        "additionalProperties": false,
        "$defs": {"weight": {"type": "integer", "minimum": 1, "maximum": 99}},
    });
    let grammar = grammars.json(&schema).unwrap();
    let mut state = 7_u64;
    for _ in 0..20 {
        let mut guide = constraint(DIRECT).with_answer(grammar.clone());
        let mut out = Vec::new();
        loop {
            let token = match guide.allowed().unwrap() {
                Allowed::Token(token) => token,
                Allowed::Any => panic!("nothing is free here"),
                Allowed::Only(set) => {
                    let allowed: Vec<u32> = (0..tokenizer.id_bound() as u32)
                        .filter(|token| set[*token as usize / 32] >> (token % 32) & 1 == 1)
                        .collect();
                    state = state
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1);
                    allowed[(state >> 33) as usize % allowed.len()]
                }
            };
            if guide.take(token).unwrap() == *stop {
                break;
            }
            out.push(token);
            assert!(out.len() < 2_000);
        }
        let text = tokenizer.decode(&out);
        let value: Value =
            serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
        assert!(value["kind"] == "fox" || value["kind"] == "owl", "{text}");
        assert!(
            (1..=3).contains(&value["tags"].as_array().unwrap().len()),
            "{text}"
        );
        assert!(
            (1..=99).contains(&value["weight"].as_i64().unwrap()),
            "{text}"
        );
    }
}

#[test]
fn the_grammar_begins_behind_the_reasoning() {
    let grammar = setting().grammars.json(&schema()).unwrap();
    let begun = || constraint(THINKING).with_answer(grammar.clone());
    let json = r#"{"name": "Max", "age": 45}"#;
    let whole = format!("Anything {{ at all.\n</think>\n\n{json}");
    assert_eq!(follow(&mut begun(), &whole), (whole.clone(), true));
    // The gap is made where the model does not.
    assert_eq!(
        follow(&mut begun(), &format!("Hm.\n</think>{json}")),
        (format!("Hm.\n</think>\n\n{json}"), true)
    );
    // An end within the reasoning ends the reasoning alone.
    let (out, ended) = follow(&mut begun(), "Hm.<|im_end|>");
    assert_eq!((out.as_str(), ended), ("Hm.\n</think>\n\n", false));
    let (out, ended) = follow(&mut begun(), "Hm.\n</think>\n\nWell,");
    assert_eq!((out.as_str(), ended), ("Hm.\n</think>\n\n", false));
}

#[test]
fn reasoning_ends_with_its_budget() {
    let text = "One, two, three, four, five, six, seven, eight.";
    let tokens = setting().tokenizer.encode(text).unwrap();
    for budget in [0, 1, 5] {
        let mut guide = constraint(THINKING).with_reasoning_budget(budget);
        let (out, _) = follow(&mut guide, text);
        let reasoning = setting().tokenizer.decode(&tokens[..budget]);
        assert!(
            out.starts_with(&format!("{reasoning}\n</think>\n\n")),
            "{budget}: {out}"
        );
    }
    // An answer without reasoning has nothing to be cut.
    let mut guide = constraint(DIRECT).with_reasoning_budget(1);
    assert_eq!(follow(&mut guide, text).0, text);
}

fn tools() -> Vec<Value> {
    let tool = |name: &str, parameters: Value, strict: bool| json!({"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}});
    vec![
        tool(
            "set_light",
            json!({
                "type": "object",
                "properties": {
                    "room": {"type": "string"},
                    "colour": {"type": "string", "enum": ["red", "grey"]},
                    "brightness": {"type": "integer", "minimum": 0, "maximum": 100},
                    "options": {"$ref": "#/$defs/options"},
                },
                "required": ["room", "brightness"],
                "$defs": {"options": {"type": "object", "properties": {"slow": {"type": "boolean"}}, "additionalProperties": false}},
            }),
            true,
        ),
        tool(
            "now",
            json!({"type": "object", "properties": {}, "additionalProperties": false}),
            false,
        ),
    ]
}

fn call(name: &str, parameters: &[(&str, &str)]) -> String {
    let parameters: String = parameters
        .iter()
        .map(|(name, value)| format!("<parameter={name}>\n{value}\n</parameter>\n"))
        .collect();
    format!("<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>")
}

#[test]
fn calls_are_held_to_their_tools() {
    let light = call(
        "set_light",
        &[
            ("room", "bed\nroom \"A\""),
            ("colour", "grey"),
            ("brightness", "70"),
            ("options", r#"{"slow": true}"#),
        ],
    );
    let now = call("now", &[]);
    let both = format!("{light}\n{now}");
    let any = |several| {
        setting()
            .grammars
            .calls(&tools(), None, several, None)
            .unwrap()
    };
    let held =
        |several, text: &str| follow(&mut constraint(DIRECT).with_answer(any(several)), text);
    assert_eq!(held(true, &both), (both.clone(), true));
    assert_eq!(held(false, &both), (light.clone(), true));
    let parsed = parse_output(DIRECT, &both, &tools(), false);
    assert_eq!(parsed.tool_calls.len(), 2, "{parsed:?}");
    assert_eq!(parsed.tool_calls[0].arguments["room"], "bed\nroom \"A\"");
    for text in [
        "I will call set_light.".to_string(),
        call("unknown", &[]),
        call(
            "set_light",
            &[("room", "x"), ("colour", "blue"), ("brightness", "7")],
        ),
        call("set_light", &[("room", "x"), ("brightness", "700")]),
        call("set_light", &[("brightness", "7")]),
        call(
            "set_light",
            &[
                ("room", "x"),
                ("brightness", "7"),
                ("options", r#"{"fast": true}"#),
            ],
        ),
        call("now", &[("zone", "x")]),
    ] {
        let (out, ended) = held(true, &text);
        assert!(!ended && out.len() < text.len(), "{text}: {out}");
    }
    let named = setting()
        .grammars
        .calls(&tools(), Some("now"), true, None)
        .unwrap();
    assert!(follow(&mut constraint(DIRECT).with_answer(named.clone()), &now).1);
    assert!(!follow(&mut constraint(DIRECT).with_answer(named), &light).1);
    let either = setting()
        .grammars
        .calls(&tools(), None, true, Some(&schema()))
        .unwrap();
    for text in [&now, r#"{"name": "Max", "age": 45}"#] {
        assert_eq!(
            follow(&mut constraint(DIRECT).with_answer(either.clone()), text),
            (text.to_string(), true)
        );
    }
}

#[test]
fn one_call_is_one_call_and_strict_tools_are_strict() {
    let now = call("now", &[]);
    let text = format!("I look. {now}\n{now}");
    assert_eq!(follow(&mut constraint(DIRECT), &text), (text.clone(), true));
    let (out, ended) = follow(&mut constraint(DIRECT).with_one_call(), &text);
    assert!(ended && text.starts_with(&out), "{out}");
    assert_eq!(
        parse_output(DIRECT, &out, &tools(), false).tool_calls.len(),
        1
    );
    let rest = setting().grammars.rest_of_call(&tools()).unwrap();
    let held = |text: &str| follow(&mut constraint(DIRECT).with_calls(rest.clone()), text);
    // Text around calls is free, and so are tools that are not strict.
    let free = format!(
        "{} Done. {}",
        call("set_light", &[("room", "x"), ("brightness", "7")]),
        call("now", &[("zone", "x")])
    );
    assert_eq!(held(&free), (free.clone(), true));
    let loose = call("set_light", &[("room", "x"), ("brightness", "bright")]);
    let (out, ended) = held(&loose);
    assert!(!ended && out.len() < loose.len(), "{out}");
}

#[test]
fn what_cannot_be_held_is_told() {
    let grammars = &setting().grammars;
    let reason = |schema: Value| match grammars.json(&schema) {
        Err(ConstraintError::Schema { of: None, reason }) => reason,
        other => panic!("{schema}: {other:?}"),
    };
    assert!(reason(json!({"type": "wizard"})).contains("wizard"));
    assert!(!reason(json!({"type": "string", "pattern": "("})).is_empty());
    assert!(!reason(json!({"$ref": "#/$defs/none"})).is_empty());
    assert!(reason(json!({"type": "string", "maxLength": 1_000_000})).contains("maxLength"));
    let mut deep = json!({"type": "string"});
    for _ in 0..100 {
        deep = json!({"type": "array", "items": deep});
    }
    assert!(reason(deep).contains("nested"));
    let many: Vec<Value> = (0..30_000).map(|index| json!(index)).collect();
    assert!(reason(json!({"enum": many})).contains("values"));
    let bad = vec![
        json!({"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "wizard"}}}}}),
    ];
    let error = grammars.calls(&bad, None, true, None).unwrap_err();
    assert!(error.to_string().contains("tool f"), "{error}");
    assert_eq!(
        grammars
            .calls(&tools(), Some("none"), true, None)
            .unwrap_err(),
        ConstraintError::UnknownTool("none".into())
    );
    assert_eq!(
        grammars.calls(&[], None, true, None).unwrap_err(),
        ConstraintError::NoTools
    );
}

/// Schemas as they come from Pydantic and Zod: references, combinations, lengths, patterns.
#[test]
fn what_schemas_say_of_texts_is_held_to() {
    let held = |schema: Value, value: &str| -> bool {
        let parameters = json!({"type": "object", "properties": {"a": schema}, "required": ["a"],
            "$defs": {"Name": {"type": "string"}, "Kind": {"enum": ["x", "y"]}, "Count": {"type": "integer"}}});
        let tool = json!({"type": "function", "function": {"name": "f", "strict": true, "parameters": parameters}});
        let grammar = setting()
            .grammars
            .calls(&[tool], None, false, None)
            .unwrap();
        let text = call("f", &[("a", value)]);
        follow(&mut constraint(DIRECT).with_answer(grammar), &text) == (text, true)
    };
    for (schema, good, bad) in [
        (json!({"$ref": "#/$defs/Name"}), "plain", None),
        (json!({"$ref": "#/$defs/Kind"}), "y", Some("z")),
        (
            json!({"allOf": [{"$ref": "#/$defs/Kind"}]}),
            "x",
            Some("high"),
        ),
        (
            json!({"allOf": [{"$ref": "#/$defs/Count"}]}),
            "12",
            Some("high"),
        ),
        (
            json!({"anyOf": [{"const": "on"}, {"const": "off"}]}),
            "off",
            Some("high"),
        ),
        (
            json!({"anyOf": [{"type": "integer"}, {"type": "null"}]}),
            "null",
            Some("high"),
        ),
        (
            json!({"type": "string", "pattern": "^[0-9]{3}$"}),
            "123",
            Some("12"),
        ),
        (
            json!({"type": "string", "pattern": "^a/"}),
            "a/b",
            Some("b"),
        ),
        (
            json!({"type": "string", "maxLength": 3}),
            "abc",
            Some("abcd"),
        ),
        (json!({"type": "string", "minLength": 2}), "ab", Some("a")),
        (json!({"minimum": 3, "maximum": 5}), "4", Some("6")),
    ] {
        assert!(held(schema.clone(), good), "{schema} {good}");
        assert!(
            bad.is_none_or(|bad| !held(schema.clone(), bad)),
            "{schema} {bad:?}"
        );
    }
    for most in [50, 1_000, 10_000] {
        let schema = json!({"type": "string", "maxLength": most});
        assert!(held(schema, &"long text, ".repeat(most / 11)), "{most}");
    }
}

#[test]
fn a_strict_tool_that_cannot_be_held_is_refused() {
    for parameters in [
        json!({"type": "object", "properties": {"a": {"type": "string", "pattern": "^a|b$"}}}),
        json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["b"]}),
        json!({"anyOf": [{"type": "object"}, {"type": "null"}]}),
        json!({"type": "object", "properties": {" a ": {"type": "integer"}}}),
        json!({"type": "object", "properties": {"a": {"type": "array", "items": {"$ref": "#"}}}}),
    ] {
        let tool = json!({"type": "function", "function": {"name": "f", "strict": true, "parameters": parameters}});
        let error = setting().grammars.rest_of_call(&[tool]).unwrap_err();
        assert!(error.to_string().contains("tool f"), "{error}");
    }
}
