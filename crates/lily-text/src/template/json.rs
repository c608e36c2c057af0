//! The `tojson` filter of Hugging Face: Python's `json.dumps` with
//! `ensure_ascii=False`, not Jinja2's own HTML-safe filter.

use std::borrow::Cow;

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};

/// Deeper values are refused rather than risking the stack.
const MAXIMUM_DEPTH: usize = 200;

/// Indentation comes from the template, so it must not be able to fill memory.
const MAXIMUM_INDENT: usize = 64;

struct Layout {
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
    ensure_ascii: bool,
    sort_keys: bool,
}

/// `value|tojson(ensure_ascii=false, indent=none, separators=none, sort_keys=false)`.
pub(super) fn tojson(
    state: &State,
    value: &Value,
    ensure_ascii: Option<bool>,
    options: Kwargs,
) -> Result<Value, Error> {
    let ensure_ascii = match ensure_ascii {
        Some(set) => set,
        None => options
            .get::<Option<bool>>("ensure_ascii")?
            .unwrap_or(false),
    };
    let indent = options
        .get::<Option<Value>>("indent")?
        .filter(|indent| !indent.is_none() && !indent.is_undefined())
        .map(indent_text)
        .transpose()?;
    let separators = options.get::<Option<Vec<String>>>("separators")?;
    let sort_keys = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    options.assert_all_used()?;
    let (item_separator, key_separator) = match separators.as_deref() {
        None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
        None => (", ".to_owned(), ": ".to_owned()),
        Some([item, key]) => (item.clone(), key.clone()),
        Some(_) => return Err(invalid("separators must be a pair")),
    };
    let layout = Layout {
        indent,
        item_separator,
        key_separator,
        ensure_ascii,
        sort_keys,
    };
    let mut writer = Writer {
        state,
        layout,
        output: String::new(),
        charged: 0,
    };
    writer.value(value, 0)?;
    Ok(writer.output.into())
}

fn indent_text(indent: Value) -> Result<String, Error> {
    if let Some(text) = indent.as_str() {
        if text.len() > MAXIMUM_INDENT {
            return Err(invalid("indent is too large"));
        }
        return Ok(text.to_owned());
    }
    // Python takes True as 1, and a negative number as none.
    let width = match indent.kind() {
        ValueKind::Bool => i64::from(indent.is_true()),
        _ => i64::try_from(indent)?,
    };
    match usize::try_from(width.max(0)) {
        Ok(width) if width <= MAXIMUM_INDENT => Ok(" ".repeat(width)),
        _ => Err(invalid("indent is too large")),
    }
}

fn invalid(reason: impl Into<Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, reason)
}

struct Writer<'a, 'env, 'template> {
    state: &'a State<'template, 'env>,
    layout: Layout,
    output: String,
    charged: usize,
}

impl Writer<'_, '_, '_> {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAXIMUM_DEPTH {
            return Err(invalid("the value is nested too deeply for JSON"));
        }
        // Paid for while writing, so that a huge value is never built.
        let bytes = self.output.len() - self.charged;
        self.state.consume_fuel(1 + (bytes / 64) as u64)?;
        self.charged = self.output.len();
        match value.kind() {
            ValueKind::None => self.output.push_str("null"),
            ValueKind::Bool => {
                let text = if value.is_true() { "true" } else { "false" };
                self.output.push_str(text);
            }
            ValueKind::Number => self.output.push_str(&number(value)?),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Map => self.map(value, depth)?,
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.list(items, ('[', ']'), depth, |writer, item| {
                    writer.value(&item, depth + 1)
                })?;
            }
            kind => return Err(invalid(format!("{kind} is not JSON serializable"))),
        }
        Ok(())
    }

    fn map(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        let mut entries = Vec::new();
        for key in value.try_iter()? {
            entries.push((key_text(&key)?, value.get_item(&key)?));
        }
        if self.layout.sort_keys {
            entries.sort_by(|left, right| left.0.cmp(&right.0));
        }
        self.list(entries, ('{', '}'), depth, |writer, (key, item)| {
            writer.string(&key);
            let separator = std::mem::take(&mut writer.layout.key_separator);
            writer.output.push_str(&separator);
            writer.layout.key_separator = separator;
            writer.value(&item, depth + 1)
        })
    }

    fn list<T>(
        &mut self,
        items: Vec<T>,
        (open, close): (char, char),
        depth: usize,
        mut write: impl FnMut(&mut Self, T) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.output.push(open);
        let is_empty = items.is_empty();
        for (index, item) in items.into_iter().enumerate() {
            if index > 0 {
                self.output.push_str(&self.layout.item_separator);
            }
            self.new_line(depth + 1);
            write(self, item)?;
        }
        if !is_empty {
            self.new_line(depth);
        }
        self.output.push(close);
        Ok(())
    }

    fn new_line(&mut self, depth: usize) {
        if let Some(indent) = &self.layout.indent {
            self.output.push('\n');
            for _ in 0..depth {
                self.output.push_str(indent);
            }
        }
    }

    fn string(&mut self, text: &str) {
        self.output.push('"');
        for character in text.chars() {
            match character {
                '"' => self.output.push_str("\\\""),
                '\\' => self.output.push_str("\\\\"),
                '\n' => self.output.push_str("\\n"),
                '\r' => self.output.push_str("\\r"),
                '\t' => self.output.push_str("\\t"),
                '\u{8}' => self.output.push_str("\\b"),
                '\u{c}' => self.output.push_str("\\f"),
                '\0'..='\u{1f}' => self.escape(character),
                '\u{7f}'.. if self.layout.ensure_ascii && character != '\u{7f}' => {
                    self.escape(character);
                }
                _ => self.output.push(character),
            }
        }
        self.output.push('"');
    }

    fn escape(&mut self, character: char) {
        for unit in character.encode_utf16(&mut [0; 2]) {
            self.output.push_str(&format!("\\u{unit:04x}"));
        }
    }
}

fn key_text(key: &Value) -> Result<String, Error> {
    Ok(match key.kind() {
        ValueKind::String => key.as_str().unwrap_or_default().to_owned(),
        ValueKind::None => "null".to_owned(),
        ValueKind::Bool if key.is_true() => "true".to_owned(),
        ValueKind::Bool => "false".to_owned(),
        ValueKind::Number => number(key)?,
        kind => return Err(invalid(format!("{kind} cannot be a key of a JSON object"))),
    })
}

fn number(value: &Value) -> Result<String, Error> {
    if value.is_integer() {
        return Ok(value.to_string());
    }
    Ok(float_repr(f64::try_from(value.clone())?, "Infinity", "NaN"))
}

/// Python's `repr` of a float: the shortest digits that give the same number,
/// with an exponent below 1e-4 and from 1e16 on.
pub(super) fn float_repr(value: f64, infinity: &str, not_a_number: &str) -> String {
    if value.is_nan() {
        return not_a_number.to_owned();
    }
    let sign = if value.is_sign_negative() { "-" } else { "" };
    if value.is_infinite() {
        return format!("{sign}{infinity}");
    }
    let scientific = format!("{:e}", value.abs());
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        return format!("{value:?}");
    }
    let exponent_sign = if exponent < 0 { '-' } else { '+' };
    format!("{sign}{digits}e{exponent_sign}{:02}", exponent.abs())
}
