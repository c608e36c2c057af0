//! Tokens of preprocessed source. White space and line markers are tokens too, so that what is written out
//! again keeps every line where it was.

/// What a token is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Space,
    Newline,
    /// A `#line` marker or a `#pragma` that stays.
    Directive,
    Text,
    Number,
    Word,
    Operator,
    /// Text of the translator's own.
    Raw,
}

/// One token and where it was written.
#[derive(Debug, Clone)]
pub(crate) struct Token {
    pub kind: Kind,
    pub text: String,
    pub line: u32,
    /// Index into [`Lexed::files`].
    pub file: usize,
}

impl Token {
    /// Text of the translator's own.
    pub fn raw(text: impl Into<String>) -> Self {
        Self {
            kind: Kind::Raw,
            text: text.into(),
            line: 0,
            file: 0,
        }
    }

    /// Whether the token carries meaning for the compiler's grammar.
    pub fn is_significant(&self) -> bool {
        !matches!(self.kind, Kind::Space | Kind::Newline | Kind::Directive)
    }
}

/// The tokens of a source and the names of the files that they come from.
#[derive(Debug)]
pub(crate) struct Lexed {
    pub tokens: Vec<Token>,
    pub files: Vec<String>,
}

const LONG_OPERATORS: [&str; 18] = [
    "<<=", ">>=", "::", "->", "-=", "+=", "*=", "/=", "%=", "&=", "|=", "^=", "==", "<=", ">=",
    "!=", "&&", "||",
];
const DOUBLED_OPERATORS: [&str; 3] = ["++", "--", "<<"];

/// Splits preprocessed text into tokens. `keep_unroll` keeps `#pragma unroll` for a compiler that obeys it;
/// all other pragmas are meant for Apple's compiler and go.
pub(crate) fn lex(source: &str, keep_unroll: bool) -> Lexed {
    let mut lexer = Lexer {
        source,
        at: 0,
        line: 1,
        file: 0,
        tokens: Vec::new(),
        files: vec![String::new()],
        brackets: Vec::new(),
    };
    while lexer.at < source.len() {
        lexer.next(keep_unroll);
    }
    Lexed {
        tokens: lexer.tokens,
        files: lexer.files,
    }
}

struct Lexer<'a> {
    source: &'a str,
    at: usize,
    line: u32,
    file: usize,
    tokens: Vec<Token>,
    files: Vec<String>,
    /// Open square brackets; true for `[[`. Tells `a[b[0]]` from the end of an attribute.
    brackets: Vec<bool>,
}

impl Lexer<'_> {
    fn next(&mut self, keep_unroll: bool) {
        let rest = &self.source[self.at..];
        let first = rest.chars().next().expect("not at the end");
        let at_line_start = self
            .tokens
            .iter()
            .rev()
            .find(|token| token.kind != Kind::Space)
            .is_none_or(|token| token.kind == Kind::Newline);
        match first {
            '\n' => {
                self.push(Kind::Newline, 1);
                self.line += 1;
            }
            ' ' | '\t' | '\r' | '\x0c' => {
                let length = span(rest, |c| matches!(c, ' ' | '\t' | '\r' | '\x0c'));
                self.push(Kind::Space, length);
            }
            '#' if at_line_start => self.directive(span(rest, |c| c != '\n'), keep_unroll),
            '"' | '\'' => self.push(Kind::Text, quoted(rest, first)),
            _ if first.is_ascii_digit()
                || (first == '.' && rest[1..].starts_with(|c: char| c.is_ascii_digit())) =>
            {
                self.push(Kind::Number, number(rest));
            }
            _ if first.is_ascii_alphabetic() || first == '_' => {
                let length = span(rest, |c| c.is_ascii_alphanumeric() || c == '_');
                self.push(Kind::Word, length);
            }
            _ => self.operator(rest, first),
        }
    }

    fn push(&mut self, kind: Kind, length: usize) {
        let text = self.source[self.at..self.at + length].to_owned();
        self.at += length;
        self.tokens.push(Token {
            kind,
            text,
            line: self.line,
            file: self.file,
        });
    }

    fn directive(&mut self, length: usize, keep_unroll: bool) {
        let text = &self.source[self.at..self.at + length];
        self.at += length;
        let words = text[1..].trim_start();
        let kept = if let Some(pragma) = words.strip_prefix("pragma") {
            let unroll = keep_unroll && pragma.trim_start().starts_with("unroll");
            unroll.then(|| text.to_owned())
        } else {
            self.marker(words)
        };
        if let Some(text) = kept {
            self.tokens.push(Token {
                kind: Kind::Directive,
                text,
                line: self.line,
                file: self.file,
            });
        }
    }

    /// Follows a line marker (`# 12 "file" flags`) and gives it in the form that every compiler takes.
    fn marker(&mut self, words: &str) -> Option<String> {
        let words = words.strip_prefix("line").unwrap_or(words).trim_start();
        let digits = span(words, |c| c.is_ascii_digit());
        let line: u32 = words[..digits].parse().ok()?;
        // The marker speaks of the line after it, and the newline between adds one.
        self.line = line.saturating_sub(1);
        let quoted = words[digits..].trim_start();
        if !quoted.starts_with('"') {
            return Some(format!("#line {line}"));
        }
        let name = &quoted[1..quoted[1..].find('"')? + 1];
        // Markers of the preprocessor's own ("<built-in>", line 0) say nothing about a source.
        if name.starts_with('<') || line == 0 {
            return None;
        }
        self.file = match self.files.iter().position(|file| file == name) {
            Some(known) => known,
            None => {
                self.files.push(name.to_owned());
                self.files.len() - 1
            }
        };
        Some(format!("#line {line} \"{name}\""))
    }

    fn operator(&mut self, rest: &str, first: char) {
        if rest.starts_with("[[") {
            self.brackets.push(true);
            return self.push(Kind::Operator, 2);
        }
        if first == '[' {
            self.brackets.push(false);
        } else if first == ']' {
            let attribute = self.brackets.pop().unwrap_or(false);
            let length = if attribute && rest.starts_with("]]") {
                2
            } else {
                1
            };
            return self.push(Kind::Operator, length);
        }
        let long = LONG_OPERATORS
            .iter()
            .chain(&DOUBLED_OPERATORS)
            .find(|operator| rest.starts_with(**operator));
        self.push(
            Kind::Operator,
            long.map_or(first.len_utf8(), |text| text.len()),
        );
    }
}

fn span(text: &str, accept: impl Fn(char) -> bool) -> usize {
    text.find(|c| !accept(c)).unwrap_or(text.len())
}

/// Length of a string or character literal.
fn quoted(text: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            _ if c == quote => return at + 1,
            _ => {}
        }
    }
    text.len()
}

/// Length of a number with its suffix.
fn number(text: &str) -> usize {
    let bytes = text.as_bytes();
    let digits = |from: usize| from + span(&text[from..], |c| c.is_ascii_digit());
    if text.starts_with("0x") || text.starts_with("0X") {
        return 2 + span(&text[2..], |c| c.is_ascii_alphanumeric());
    }
    let mut end = digits(0);
    if bytes.get(end) == Some(&b'.') {
        end = digits(end + 1);
    }
    if matches!(bytes.get(end), Some(b'e' | b'E')) {
        let sign = usize::from(matches!(bytes.get(end + 1), Some(b'+' | b'-')));
        if bytes.get(end + 1 + sign).is_some_and(u8::is_ascii_digit) {
            end = digits(end + 1 + sign);
        }
    }
    end + span(&text[end..], |c| c.is_ascii_alphabetic())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(source: &str) -> Vec<String> {
        lex(source, false)
            .tokens
            .into_iter()
            .filter(Token::is_significant)
            .map(|token| token.text)
            .collect()
    }

    #[test]
    fn numbers_keep_their_suffixes() {
        let text = "1.0 2.0h .5e-3f 3e4 0xFu 7u 1.";
        assert_eq!(words(text), text.split(' ').collect::<Vec<_>>());
        assert_eq!(words("a.x+1"), ["a", ".", "x", "+", "1"]);
    }

    #[test]
    fn nested_indices_do_not_end_an_attribute() {
        assert_eq!(words("a[b[0]]"), ["a", "[", "b", "[", "0", "]", "]"]);
        assert_eq!(
            words("x [[buffer(0)]]"),
            ["x", "[[", "buffer", "(", "0", ")", "]]"]
        );
    }

    #[test]
    fn markers_set_line_and_file() {
        let lexed = lex(
            "# 0 \"<stdin>\"\n# 7 \"a.h\" 1\nx\ny\n#line 3 \"b.metal\"\nz\n",
            false,
        );
        let at: Vec<_> = lexed
            .tokens
            .iter()
            .filter(|token| token.is_significant())
            .map(|token| (lexed.files[token.file].as_str(), token.line))
            .collect();
        assert_eq!(at, [("a.h", 7), ("a.h", 8), ("b.metal", 3)]);
    }

    #[test]
    fn pragmas_go_unless_asked_for() {
        assert_eq!(words("#pragma unroll\nx"), ["x"]);
        let kept = lex("  #pragma unroll\nx\n#pragma METAL fp\n", true);
        let text: String = kept
            .tokens
            .iter()
            .map(|token| token.text.as_str())
            .collect();
        assert_eq!(text, "  #pragma unroll\nx\n\n");
    }
}
