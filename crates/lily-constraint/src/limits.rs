//! What a schema may ask of the server: it comes from outside, and so does its size.

use serde_json::Value;

/// Deepest nesting of a schema.
pub(crate) const MOST_DEPTH: usize = 32;
/// Most values of a schema: keys, and what stands behind them.
pub(crate) const MOST_VALUES: usize = 20_000;
/// Longest repetition that a schema can count to (`maxLength`, `maxItems` and the like). Beyond it a grammar takes seconds.
const MOST_REPEATS: u64 = 10_000;

/// Most properties of an object: each that may be left out makes the grammar's states more.
const MOST_PROPERTIES: usize = 1_000;

/// What is too much about a schema.
pub(crate) fn excess(schema: &Value) -> Option<String> {
    let mut values = 0;
    walk(schema, 0, &mut values)
}

fn walk(value: &Value, depth: usize, values: &mut usize) -> Option<String> {
    *values += 1;
    if depth > MOST_DEPTH {
        return Some(format!("it is nested over {MOST_DEPTH} deep"));
    }
    if *values > MOST_VALUES {
        return Some(format!("it has over {MOST_VALUES} values"));
    }
    match value {
        Value::Array(items) => items.iter().find_map(|item| walk(item, depth + 1, values)),
        Value::Object(entries) if entries.len() > MOST_PROPERTIES => {
            Some(format!("an object of it has over {MOST_PROPERTIES} keys"))
        }
        Value::Object(entries) => entries.iter().find_map(|(key, item)| {
            let counts = [
                "minLength",
                "maxLength",
                "minItems",
                "maxItems",
                "minProperties",
                "maxProperties",
            ];
            match item.as_u64() {
                Some(count) if count > MOST_REPEATS && counts.contains(&key.as_str()) => {
                    Some(format!("{key} is over {MOST_REPEATS}"))
                }
                _ => walk(item, depth + 1, values),
            }
        }),
        _ => None,
    }
}
