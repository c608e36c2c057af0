//! Python literals, which models write where JSON is expected.

use serde_json::{Map, Number, Value};

/// As deep as `serde_json` goes, so that the result can be read back.
const MAXIMUM_DEPTH: usize = 100;

/// Why text is not a Python literal.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not a Python literal: {reason} at byte {position}")]
pub struct PythonLiteralError {
    /// Where in the text.
    pub position: usize,
    /// What is wrong.
    pub reason: &'static str,
}

/// Reads a Python literal (`None`, `True`, numbers, strings in single or
/// double quotes, lists, tuples, dictionaries) as JSON. JSON's own `null`,
/// `true` and `false` are accepted, too. Nothing is evaluated.
///
/// # Errors
///
/// If the text is not such a literal, or is one that JSON cannot express.
pub fn parse_python_literal(text: &str) -> Result<Value, PythonLiteralError> {
    let mut parser = Parser { text, position: 0 };
    let value = parser.value(0)?;
    parser.skip_whitespace();
    if parser.position < text.len() {
        return Err(parser.error("something follows the value"));
    }
    Ok(value)
}

struct Parser<'a> {
    text: &'a str,
    position: usize,
}

impl Parser<'_> {
    fn error(&self, reason: &'static str) -> PythonLiteralError {
        PythonLiteralError {
            position: self.position,
            reason,
        }
    }

    fn rest(&self) -> &str {
        self.text.get(self.position..).unwrap_or_default()
    }

    fn peek(&self) -> Option<char> {
        self.rest().chars().next()
    }

    fn next(&mut self) -> Option<char> {
        let character = self.peek()?;
        self.position += character.len_utf8();
        Some(character)
    }

    fn take(&mut self, expected: char) -> bool {
        let found = self.peek() == Some(expected);
        if found {
            self.position += expected.len_utf8();
        }
        found
    }

    fn skip_whitespace(&mut self) {
        let rest = self.rest();
        self.position += rest.len() - rest.trim_start().len();
    }

    fn value(&mut self, depth: usize) -> Result<Value, PythonLiteralError> {
        if depth > MAXIMUM_DEPTH {
            return Err(self.error("nested too deeply"));
        }
        self.skip_whitespace();
        match self.peek() {
            Some('{') => self.dictionary(depth),
            Some('[') => self.list('[', ']', depth),
            Some('(') => self.list('(', ')', depth),
            Some('\'' | '"') => self.strings(),
            Some('-' | '+' | '.' | '0'..='9') => self.number(),
            Some(_) => self.name(),
            None => Err(self.error("a value is missing")),
        }
    }

    fn name(&mut self) -> Result<Value, PythonLiteralError> {
        let rest = self.rest();
        let end = rest
            .find(|character: char| !character.is_alphanumeric() && character != '_')
            .unwrap_or(rest.len());
        let value = match &rest[..end] {
            "None" | "null" => Value::Null,
            "True" | "true" => Value::Bool(true),
            "False" | "false" => Value::Bool(false),
            _ => return Err(self.error("an unknown name")),
        };
        self.position += end;
        Ok(value)
    }

    fn number(&mut self) -> Result<Value, PythonLiteralError> {
        let rest = self.rest();
        let end = rest
            .find(|character: char| {
                !character.is_ascii_alphanumeric() && !matches!(character, '+' | '-' | '.' | '_')
            })
            .unwrap_or(rest.len());
        let digits = rest[..end].replace('_', "");
        let number = if let Ok(integer) = digits.parse::<i64>() {
            Some(Number::from(integer))
        } else if let Ok(integer) = digits.parse::<u64>() {
            Some(Number::from(integer))
        } else if digits.contains(['.', 'e', 'E']) {
            digits.parse().ok().and_then(Number::from_f64)
        } else {
            None
        };
        let number = number.ok_or_else(|| self.error("not a number that JSON can express"))?;
        self.position += end;
        Ok(Value::Number(number))
    }

    fn list(&mut self, open: char, close: char, depth: usize) -> Result<Value, PythonLiteralError> {
        self.take(open);
        let mut items = Vec::new();
        let mut has_comma = false;
        loop {
            self.skip_whitespace();
            if self.take(close) {
                break;
            }
            if !items.is_empty() && !has_comma {
                return Err(self.error("a comma is missing"));
            }
            items.push(self.value(depth + 1)?);
            self.skip_whitespace();
            has_comma = self.take(',');
        }
        // Parentheses around one value without a comma are no tuple.
        if close == ')' && items.len() == 1 && !has_comma {
            return items.pop().ok_or_else(|| self.error("a value is missing"));
        }
        Ok(Value::Array(items))
    }

    fn dictionary(&mut self, depth: usize) -> Result<Value, PythonLiteralError> {
        self.take('{');
        let mut entries = Map::new();
        let mut has_comma = true;
        loop {
            self.skip_whitespace();
            if self.take('}') {
                return Ok(Value::Object(entries));
            }
            if !has_comma {
                return Err(self.error("a comma is missing"));
            }
            let key = match self.value(depth + 1)? {
                Value::String(key) => key,
                Value::Array(_) | Value::Object(_) => {
                    return Err(self.error("not a key that JSON can express"));
                }
                scalar => scalar.to_string(),
            };
            self.skip_whitespace();
            if !self.take(':') {
                return Err(self.error("a colon is missing"));
            }
            let value = self.value(depth + 1)?;
            entries.insert(key, value);
            self.skip_whitespace();
            has_comma = self.take(',');
        }
    }

    /// Strings that follow each other are one.
    fn strings(&mut self) -> Result<Value, PythonLiteralError> {
        let mut text = String::new();
        while let Some(quote @ ('\'' | '"')) = self.peek() {
            self.string(quote, &mut text)?;
            self.skip_whitespace();
        }
        Ok(Value::String(text))
    }

    fn string(&mut self, quote: char, text: &mut String) -> Result<(), PythonLiteralError> {
        let triple = [quote; 3].iter().collect::<String>();
        let is_triple = self.rest().starts_with(&triple);
        let end = if is_triple { triple } else { quote.to_string() };
        self.position += end.len();
        loop {
            if self.rest().starts_with(&end) {
                self.position += end.len();
                return Ok(());
            }
            match self.next() {
                None => return Err(self.error("a string does not end")),
                Some('\n') if !is_triple => return Err(self.error("a line break in a string")),
                Some('\\') => self.escape(text)?,
                Some(character) => text.push(character),
            }
        }
    }

    fn escape(&mut self, text: &mut String) -> Result<(), PythonLiteralError> {
        let character = self
            .next()
            .ok_or_else(|| self.error("a string does not end"))?;
        match character {
            '\n' => {}
            '\\' | '\'' | '"' | '/' => text.push(character),
            'n' => text.push('\n'),
            't' => text.push('\t'),
            'r' => text.push('\r'),
            'b' => text.push('\u{8}'),
            'f' => text.push('\u{c}'),
            'a' => text.push('\u{7}'),
            'v' => text.push('\u{b}'),
            '0' => text.push('\0'),
            'x' => text.push(self.hexadecimal(2)?),
            'u' => text.push(self.hexadecimal(4)?),
            'U' => text.push(self.hexadecimal(8)?),
            // Python keeps the backslash of escapes it does not know.
            _ => text.extend(['\\', character]),
        }
        Ok(())
    }

    fn hexadecimal(&mut self, length: usize) -> Result<char, PythonLiteralError> {
        let code = self.code(length)?;
        // JSON's way of writing characters above U+FFFF.
        if length == 4 && (0xD800..0xDC00).contains(&code) && self.rest().starts_with("\\u") {
            self.position += 2;
            let low = self.code(4)?;
            if (0xDC00..0xE000).contains(&low) {
                let code = 0x1_0000 + ((code - 0xD800) << 10) + (low - 0xDC00);
                return char::from_u32(code).ok_or_else(|| self.error("not a character"));
            }
        }
        char::from_u32(code).ok_or_else(|| self.error("not a character"))
    }

    fn code(&mut self, length: usize) -> Result<u32, PythonLiteralError> {
        let code = self
            .rest()
            .get(..length)
            .filter(|digits| digits.bytes().all(|byte| byte.is_ascii_hexdigit()))
            .and_then(|digits| u32::from_str_radix(digits, 16).ok())
            .ok_or_else(|| self.error("not a hexadecimal escape"))?;
        self.position += length;
        Ok(code)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    #[test]
    fn reads_what_python_prints() {
        for (text, expected) in [
            ("None", json!(null)),
            (" [True, False, None,] ", json!([true, false, null])),
            (
                "{'a': 1, \"b\": 'it\\'s', 3: 2.5}",
                json!({"a": 1, "b": "it's", "3": 2.5}),
            ),
            ("(1, 2)", json!([1, 2])),
            ("(1,)", json!([1])),
            ("(1)", json!(1)),
            ("()", json!([])),
            ("{}", json!({})),
            ("'\\x41\\u00e9\\U0001F642\\q\\n'", json!("Aé🙂\\q\n")),
            ("'\\ud83d\\ude42'", json!("🙂")),
            ("'''a\nb''' 'c'", json!("a\nbc")),
            ("-1_000", json!(-1000)),
            ("18446744073709551615", json!(u64::MAX)),
            ("1e3", json!(1000.0)),
            ("{'k': [{'n': (None,)}]}", json!({"k": [{"n": [null]}]})),
        ] {
            assert_eq!(parse_python_literal(text).unwrap(), expected, "{text}");
        }
    }

    #[test]
    fn refuses_everything_else() {
        for text in [
            "",
            "'",
            "[1 2]",
            "{1}",
            "{'a' 1}",
            "{[1]: 2}",
            "x",
            "__import__('os')",
            "1+1",
            "inf",
            "[1",
            "'\\ud800'",
            "'\\x4'",
            "1e999",
            "'a\nb'",
            "1 2",
            "{'a': 1 'b': 2}",
            "[,]",
            "123456789012345678901234567890",
            "(1",
            "'\\",
        ] {
            assert!(parse_python_literal(text).is_err(), "{text}");
        }
        assert!(parse_python_literal(&"[".repeat(100_000)).is_err());
    }

    proptest! {
        #[test]
        fn never_panics(text in "[\\[\\](){},:'\"\\\\a-fxuU0-9é \n.TrueNone_-]{0,40}") {
            let _ = parse_python_literal(&text);
        }

        #[test]
        fn reads_strings_as_json_does(text in "\\PC{0,20}") {
            let json = Value::String(text).to_string();
            prop_assert_eq!(parse_python_literal(&json).unwrap(), serde_json::from_str::<Value>(&json).unwrap());
        }
    }
}
