//! Small helpers over runs of tokens.

use crate::lexer::{Kind, Token};

/// The four address-space keywords.
pub(super) fn is_address_space(token: &Token) -> bool {
    token.kind == Kind::Word
        && matches!(
            token.text.as_str(),
            "device" | "constant" | "thread" | "threadgroup"
        )
}

/// The tokens that carry meaning.
pub(super) fn significant(tokens: &[Token]) -> Vec<Token> {
    tokens
        .iter()
        .filter(|token| token.is_significant())
        .cloned()
        .collect()
}

/// The newlines and line markers of a run: written out in place of text that goes, so that lines stay put.
pub(super) fn line_structure(tokens: &[Token]) -> Vec<Token> {
    tokens
        .iter()
        .filter(|token| matches!(token.kind, Kind::Newline | Kind::Directive))
        .cloned()
        .collect()
}

/// The first significant token at or after `at`.
pub(super) fn skip(tokens: &[Token], mut at: usize) -> usize {
    while at < tokens.len() && !tokens[at].is_significant() {
        at += 1;
    }
    at
}

/// Position of the bracket that closes the first `open` at or after `at`.
pub(super) fn matching(tokens: &[Token], at: usize, open: &str, close: &str) -> Option<usize> {
    let mut depth = 0;
    for (position, token) in tokens.iter().enumerate().skip(at) {
        if token.text == open {
            depth += 1;
        } else if token.text == close {
            depth -= 1;
            if depth == 0 {
                return Some(position);
            }
        } else if open == "<" && matches!(token.text.as_str(), ";" | "{") {
            return None;
        }
    }
    None
}

/// Splits at commas outside of brackets.
pub(super) fn split_commas(tokens: &[Token]) -> Vec<Vec<Token>> {
    let mut parts = Vec::new();
    let mut part = Vec::new();
    let mut depth = 0;
    for token in tokens {
        match token.text.as_str() {
            "(" | "[" | "{" | "<" | "[[" => depth += 1,
            ")" | "]" | "}" | ">" | "]]" => depth -= 1,
            _ => {}
        }
        if token.text == "," && depth == 0 {
            parts.push(std::mem::take(&mut part));
        } else {
            part.push(token.clone());
        }
    }
    if part.iter().any(Token::is_significant) {
        parts.push(part);
    }
    parts
}

/// All tokens, one after the other, as they were written.
pub(super) fn concat(tokens: &[Token]) -> String {
    tokens.iter().map(|token| token.text.as_str()).collect()
}

/// The significant tokens with a space between each two.
pub(super) fn spaced(tokens: &[Token]) -> String {
    let words: Vec<_> = tokens
        .iter()
        .filter(|token| token.is_significant())
        .map(|token| token.text.as_str())
        .collect();
    words.join(" ")
}

/// A type as text: without address spaces, and with spaces only between words.
pub(super) fn type_text(tokens: &[Token]) -> String {
    let mut text = String::new();
    for token in tokens {
        if !token.is_significant() || is_address_space(token) {
            continue;
        }
        let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
        if text.ends_with(word) && token.text.starts_with(word) {
            text.push(' ');
        }
        text.push_str(&token.text);
    }
    text
}

/// Replaces whole words.
pub(super) fn replace_words(text: &str, replacements: &[(String, String)]) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let length = if word(first) {
            rest.find(|c| !word(c)).unwrap_or(rest.len())
        } else {
            first.len_utf8()
        };
        let (part, after) = rest.split_at(length);
        let new = replacements.iter().find(|(name, _)| name == part);
        out.push_str(new.map_or(part, |(_, value)| value));
        rest = after;
    }
    out
}

/// The tokens outside of `[[ ]]`.
pub(super) fn without_attributes(tokens: &[Token]) -> Vec<Token> {
    let mut depth = 0;
    let mut out = Vec::new();
    for token in tokens {
        match token.text.as_str() {
            "[[" => depth += 1,
            "]]" => depth -= 1,
            _ if depth == 0 => out.push(token.clone()),
            _ => {}
        }
    }
    out
}
