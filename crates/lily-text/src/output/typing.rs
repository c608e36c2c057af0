//! The value of a parameter, from the text the model wrote.

use serde_json::{Number, Value};

use super::python_literal::parse_python_literal;
use super::schema::Expected;

/// Types a value. What does not fit any type the schema allows stays the text
/// it is: the receiver can say more about it than a failed parse can.
pub(super) fn typed_value(text: &str, expected: &Expected) -> Value {
    let as_text = || Value::String(text.to_owned());
    if expected.is_unknown() {
        return as_text();
    }
    let trimmed = text.trim();
    if let Some(choice) = choice(text, trimmed, expected) {
        return choice;
    }
    if expected.null && trimmed.eq_ignore_ascii_case("null") {
        return Value::Null;
    }
    // A parameter that can only be something else than text may still be left
    // out by writing `null`.
    if !expected.string && expected.choices.is_empty() && trimmed == "null" {
        return Value::Null;
    }
    if expected.integer
        && let Some(number) = integer(trimmed, expected.string)
    {
        return number;
    }
    if expected.number
        && let Some(number) = number(trimmed, expected.string)
    {
        return number;
    }
    if expected.boolean {
        if trimmed.eq_ignore_ascii_case("true") {
            return Value::Bool(true);
        }
        if trimmed.eq_ignore_ascii_case("false") {
            return Value::Bool(false);
        }
    }
    if (expected.object || expected.array)
        && let Some(value) = container(trimmed, expected)
    {
        return value;
    }
    as_text()
}

/// One of the values that an `enum` or `const` lists.
fn choice(text: &str, trimmed: &str, expected: &Expected) -> Option<Value> {
    let listed = |value: &Value| expected.choices.contains(value);
    let exact = Value::String(text.to_owned());
    if listed(&exact) {
        return Some(exact);
    }
    if let Ok(value) = serde_json::from_str::<Value>(trimmed)
        && listed(&value)
    {
        return Some(value);
    }
    parse_python_literal(trimmed).ok().filter(listed)
}

/// A whole number, which models also write as `3.0`. If text is allowed, too,
/// only the plain spelling is a number, so that `007` stays what it is.
fn integer(text: &str, plain_only: bool) -> Option<Value> {
    let number = text
        .parse::<i64>()
        .map(Number::from)
        .or_else(|_| text.parse::<u64>().map(Number::from));
    if let Ok(number) = number {
        return (!plain_only || number.to_string() == text).then_some(Value::Number(number));
    }
    if plain_only || !is_number(text) {
        return None;
    }
    let float: f64 = text.parse().ok()?;
    // Larger ones are not exact, and then the text is the better value.
    (float.fract() == 0.0 && float.abs() <= 9_007_199_254_740_992.0)
        .then(|| Value::from(float as i64))
}

fn number(text: &str, plain_only: bool) -> Option<Value> {
    if let Some(whole) = text.parse::<i64>().ok().filter(|_| !text.starts_with("-0")) {
        return (!plain_only || whole.to_string() == text).then(|| Value::from(whole));
    }
    if plain_only {
        return serde_json::from_str::<Number>(text).ok().map(Value::Number);
    }
    if !is_number(text) {
        return None;
    }
    Number::from_f64(text.parse().ok()?).map(Value::Number)
}

/// Rust also parses `inf`, `nan` and the like, which JSON does not have.
fn is_number(text: &str) -> bool {
    text.bytes().any(|byte| byte.is_ascii_digit())
        && text
            .bytes()
            .all(|byte| byte.is_ascii_digit() || matches!(byte, b'+' | b'-' | b'.' | b'e' | b'E'))
}

fn container(text: &str, expected: &Expected) -> Option<Value> {
    // With text allowed, only what the schema names is taken for structure.
    let fits = |value: &Value| {
        if expected.string {
            (expected.object && value.is_object()) || (expected.array && value.is_array())
        } else {
            value.is_object() || value.is_array()
        }
    };
    let parse = |text: &str| -> Option<Value> {
        serde_json::from_str(text)
            .ok()
            .or_else(|| parse_python_literal(text).ok())
            .filter(|value| !is_too_deep(value))
    };
    let value = parse(text)?;
    if fits(&value) {
        return Some(value);
    }
    // Models sometimes put the JSON into a string once more.
    let inner = parse(value.as_str().filter(|_| !expected.string)?)?;
    fits(&inner).then_some(inner)
}

/// Receivers bound the depth of JSON; `serde_json` at 127. A deeper value, once
/// it is inside an object of arguments, would make the whole call unreadable.
pub(super) fn is_too_deep(value: &Value) -> bool {
    fn exceeds(value: &Value, depth: usize) -> bool {
        if depth == 0 {
            return true;
        }
        match value {
            Value::Array(items) => items.iter().any(|item| exceeds(item, depth - 1)),
            Value::Object(entries) => entries.values().any(|item| exceeds(item, depth - 1)),
            _ => false,
        }
    }
    exceeds(value, 100)
}

#[cfg(test)]
mod tests {
    use super::super::schema::Tools;
    use super::*;
    use serde_json::json;

    fn check(schema: &Value, cases: &[(&str, Value)]) {
        let tools = Tools::new(&[
            json!({"type": "function", "function": {"name": "f", "parameters": {
                "type": "object",
                "properties": {"p": schema},
                "$defs": {
                    "count": {"type": "integer"},
                    "loop": {"$ref": "#/$defs/loop"},
                    "tree": {"type": "object", "properties": {"child": {"$ref": "#/$defs/tree"}}},
                },
            }}}),
        ]);
        let expected = tools.expected("f", "p");
        for (text, value) in cases {
            assert_eq!(&typed_value(text, &expected), value, "{schema}: {text:?}");
        }
    }

    /// Reports: `3.0` for an integer was dropped; values that are not JSON
    /// broke the call.
    #[test]
    fn schema_coercion_table() {
        check(
            &json!({"type": "string"}),
            &[
                ("42", json!("42")),
                ("null", json!("null")),
                ("true", json!("true")),
                (" {\"a\": 1} ", json!(" {\"a\": 1} ")),
                ("", json!("")),
            ],
        );
        check(
            &json!({"type": "integer"}),
            &[
                ("3", json!(3)),
                (" -3 ", json!(-3)),
                ("3.0", json!(3)),
                ("1e3", json!(1000)),
                ("3.5", json!("3.5")),
                ("three", json!("three")),
                ("", json!("")),
                ("null", json!(null)),
                ("inf", json!("inf")),
                ("18446744073709551615", json!(u64::MAX)),
                (
                    "123456789012345678901234567890",
                    json!("123456789012345678901234567890"),
                ),
            ],
        );
        check(
            &json!({"type": "number"}),
            &[
                ("3", json!(3)),
                ("3.0", json!(3.0)),
                ("-2.5e-3", json!(-0.0025)),
                ("0.1", json!(0.1)),
                ("NaN", json!("NaN")),
                ("1e999", json!("1e999")),
                ("1,5", json!("1,5")),
            ],
        );
        check(
            &json!({"type": "boolean"}),
            &[
                ("true", json!(true)),
                ("False", json!(false)),
                (" TRUE ", json!(true)),
                ("yes", json!("yes")),
            ],
        );
        check(
            &json!({"type": "object"}),
            &[
                ("{\"a\": [1]}", json!({"a": [1]})),
                ("{'a': True, 'b': None}", json!({"a": true, "b": null})),
                ("\"{\\\"a\\\": 1}\"", json!({"a": 1})),
                ("{a: 1}", json!("{a: 1}")),
                ("null", json!(null)),
            ],
        );
        check(
            &json!({"type": "array", "items": {"type": "string"}}),
            &[
                ("[\"a\", \"b\"]", json!(["a", "b"])),
                ("['a', 'b']", json!(["a", "b"])),
                ("a, b", json!("a, b")),
            ],
        );
        check(
            &json!({"type": "null"}),
            &[("null", json!(null)), ("x", json!("x"))],
        );
    }

    #[test]
    fn several_types() {
        for schema in [
            json!({"type": ["string", "null"]}),
            json!({"anyOf": [{"type": "string"}, {"type": "null"}]}),
            json!({"type": "string", "nullable": true}),
        ] {
            check(
                &schema,
                &[("null", json!(null)), ("x", json!("x")), ("5", json!("5"))],
            );
        }
        check(
            &json!({"type": ["integer", "string"]}),
            &[
                ("5", json!(5)),
                ("007", json!("007")),
                ("5.0", json!("5.0")),
            ],
        );
        check(
            &json!({"oneOf": [{"type": "object"}, {"type": "string"}]}),
            &[
                ("{\"a\": 1}", json!({"a": 1})),
                ("[1]", json!("[1]")),
                ("text", json!("text")),
            ],
        );
        check(
            &json!({"anyOf": [{"type": "boolean"}, {"type": "number"}]}),
            &[("true", json!(true)), ("1.5", json!(1.5))],
        );
    }

    #[test]
    fn references_enums_and_constants() {
        check(&json!({"$ref": "#/$defs/count"}), &[("3.0", json!(3))]);
        check(
            &json!({"allOf": [{"$ref": "#/$defs/count"}]}),
            &[("3", json!(3))],
        );
        check(&json!({"$ref": "#/$defs/loop"}), &[("3", json!("3"))]);
        check(&json!({"$ref": "#/$defs/missing"}), &[("3", json!("3"))]);
        check(&json!({"$ref": "#/$defs/tree"}), &[("{}", json!({}))]);
        check(
            &json!({"enum": ["a", 1, null, true]}),
            &[
                ("a", json!("a")),
                ("1", json!(1)),
                ("null", json!(null)),
                ("True", json!(true)),
                ("b", json!("b")),
            ],
        );
        check(
            &json!({"type": "string", "enum": ["1", "2"]}),
            &[("1", json!("1"))],
        );
        check(&json!({"const": 7}), &[("7", json!(7))]);
        check(
            &json!({"description": "anything"}),
            &[("7", json!("7")), ("null", json!("null"))],
        );
        check(&json!(true), &[("7", json!("7"))]);
    }

    #[test]
    fn schemas_that_branch_without_end_are_given_up() {
        let mut schema = json!({"type": "integer"});
        for _ in 0..12 {
            schema = json!({"anyOf": [schema, schema, schema]});
        }
        let begin = std::time::Instant::now();
        check(&schema, &[("x", json!("x"))]);
        assert!(begin.elapsed().as_secs() < 20);
    }
}
