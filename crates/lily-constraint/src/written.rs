//! How the values of parameters are written: text as it is, everything else as JSON.

use serde_json::Value;

/// References are followed so far; schemas may refer to themselves.
const MOST_REFERENCES: usize = 16;

/// How a value is written.
pub(crate) enum Written {
    /// As JSON.
    Json,
    /// As any text.
    Text,
    /// As one of these texts.
    OneOf(Vec<String>),
    /// As a text of this terminal, which has no tags in it.
    Like(String),
}

/// A schema with its reference followed; a combination of one schema is that schema.
pub(crate) fn resolved<'a>(root: &'a Value, schema: &'a Value) -> &'a Value {
    let mut schema = schema;
    for _ in 0..MOST_REFERENCES {
        let reference = schema.get("$ref").and_then(Value::as_str);
        let all = schema.get("allOf").and_then(Value::as_array);
        let next = match (reference, all.map(Vec::as_slice)) {
            (Some("#"), _) => Some(root),
            (Some(reference), _) => {
                let pointer = reference.strip_prefix('#');
                pointer.and_then(|pointer| root.pointer(pointer))
            }
            (None, Some([only])) if schema.get("type").is_none() => Some(only),
            _ => None,
        };
        match next {
            Some(next) => schema = next,
            None => break,
        }
    }
    schema
}

/// How a value of `schema` is written, which stands in `root`.
///
/// # Errors
/// Why a text cannot be held to what is said of it, where that matters (`is_strict`).
pub(crate) fn written(root: &Value, schema: &Value, is_strict: bool) -> Result<Written, String> {
    let schema = resolved(root, schema);
    if let Some(choices) = schema.get("enum").and_then(Value::as_array) {
        return Ok(one_of(choices));
    }
    if let Some(only) = schema.get("const") {
        return Ok(one_of(std::slice::from_ref(only)));
    }
    let is_string = |kind: &Value| kind == "string";
    match schema.get("type") {
        Some(kind) if is_string(kind) => return like(schema, is_strict),
        // What is a text among others is one that is not told from them.
        Some(Value::Array(kinds)) if kinds.iter().any(is_string) => return Ok(Written::Text),
        Some(_) => return Ok(Written::Json),
        None => {}
    }
    let alternatives = ["anyOf", "oneOf"].iter().find_map(|key| schema.get(key));
    if let Some(alternatives) = alternatives.and_then(Value::as_array) {
        let mut choices = Some(Vec::new());
        let mut has_text = false;
        for alternative in alternatives {
            match written(root, alternative, is_strict)? {
                Written::OneOf(more) => {
                    has_text = true;
                    choices
                        .iter_mut()
                        .for_each(|all| all.extend_from_slice(&more));
                }
                Written::Json => choices = None,
                Written::Text | Written::Like(_) => {
                    has_text = true;
                    choices = None;
                }
            }
        }
        return Ok(match choices.filter(|all| !all.is_empty()) {
            Some(choices) => Written::OneOf(choices),
            None if has_text => Written::Text,
            None => Written::Json,
        });
    }
    // Keywords of other types say what it is, where nothing else does.
    let of_others = [
        "allOf",
        "$ref",
        "properties",
        "items",
        "prefixItems",
        "minimum",
        "maximum",
        "multipleOf",
    ];
    let is_other = of_others.iter().any(|key| schema.get(key).is_some());
    Ok(if is_other {
        Written::Json
    } else {
        Written::Text
    })
}

fn one_of(choices: &[Value]) -> Written {
    let texts = choices
        .iter()
        .map(|choice| choice.as_str().map(String::from));
    match texts.collect::<Option<Vec<String>>>() {
        Some(texts) if !texts.is_empty() => Written::OneOf(texts),
        _ => Written::Json,
    }
}

/// Strings of some lengths, or of a pattern. They have no `<`: to leave out the tags alone takes a lexer of their product.
fn like(schema: &Value, is_strict: bool) -> Result<Written, String> {
    let count = |name: &str| schema.get(name).and_then(Value::as_u64);
    let mut terminals = Vec::new();
    if let (least, most @ Some(_)) | (least @ Some(_), most) =
        (count("minLength"), count("maxLength"))
    {
        let most = most.map_or(String::new(), |most| most.to_string());
        terminals.push(format!("/[^<]{{{},{most}}}/", least.unwrap_or(0)));
    }
    if let Some(pattern) = schema.get("pattern").and_then(Value::as_str) {
        match anchored(pattern) {
            Some(pattern) => terminals.extend([format!("/{pattern}/"), "/[^<]*/".into()]),
            None if is_strict => return Err(format!("its pattern {pattern:?} cannot be enforced")),
            None => {}
        }
    }
    if terminals.is_empty() {
        return Ok(Written::Text);
    }
    Ok(Written::Like(terminals.join(" & ")))
}

/// A pattern that is looked for in a text, as one of the whole text, for between two slashes. None where anchors stand
/// among alternatives or within.
fn anchored(pattern: &str) -> Option<String> {
    let begins = pattern.starts_with('^');
    let before = pattern.strip_suffix('$');
    let slashes = |text: &str| text.len() - text.trim_end_matches('\\').len();
    let ends = before.is_some_and(|before| slashes(before).is_multiple_of(2));
    let inner = &pattern[usize::from(begins)..pattern.len() - usize::from(ends)];
    let mut escaped = String::new();
    let mut characters = inner.chars();
    let (mut depth, mut in_class) = (0_i32, false);
    while let Some(character) = characters.next() {
        match character {
            '\\' => {
                escaped.push('\\');
                escaped.push(characters.next()?);
                continue;
            }
            '[' => in_class = true,
            ']' => in_class = false,
            '(' if !in_class => depth += 1,
            ')' if !in_class => depth -= 1,
            '|' if !in_class && depth == 0 && (begins || ends) => return None,
            '^' | '$' if !in_class => return None,
            '/' => escaped.push('\\'),
            '\n' | '\r' => return None,
            _ => {}
        }
        escaped.push(character);
    }
    let any = |is_anchored: bool| if is_anchored { "" } else { "(?s:.*)" };
    Some(format!("{}({escaped}){}", any(begins), any(ends)))
}

#[cfg(test)]
mod tests {
    use super::anchored;

    #[test]
    fn patterns_are_of_the_whole_text() {
        for (pattern, whole) in [
            ("^[0-9]{3}$", Some("([0-9]{3})")),
            ("a/b", Some("(?s:.*)(a\\/b)(?s:.*)")),
            ("^a", Some("(a)(?s:.*)")),
            ("a\\\\$", Some("(?s:.*)(a\\\\)")),
            ("^(a|b)$", Some("((a|b))")),
            ("^a|b$", None),
            ("a^b", None),
            ("[^a$]", Some("(?s:.*)([^a$])(?s:.*)")),
        ] {
            assert_eq!(anchored(pattern).as_deref(), whole, "{pattern}");
        }
    }
}
