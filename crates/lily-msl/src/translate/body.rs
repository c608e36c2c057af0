//! Rewriting inside a declaration.

use crate::lexer::{Kind, Token};

use super::elements::close_index;
use super::tokens::{
    concat, is_address_space, line_structure, matching, significant, skip, spaced, split_commas,
};
use super::{Target, Translator};

/// What C++ for OpenCL calls the address spaces. Constant memory is constant there by address, not by type.
const OPENCL_SPACES: [(&str, &str); 4] = [
    ("device", "__global"),
    ("threadgroup", "__local"),
    ("thread", "__private"),
    ("constant", "const __constant"),
];

/// Names of a kernel's that are keywords of OpenCL.
const OPENCL_KEYWORDS: [&str; 7] = [
    "global",
    "local",
    "generic",
    "pipe",
    "read_only",
    "write_only",
    "read_write",
];

impl Translator {
    /// Rewrites a run of tokens. `in_kernel` is for a kernel's body, where threadgroup variables are
    /// declared.
    pub(super) fn body(&mut self, all: &[Token], in_kernel: bool) -> Vec<Token> {
        let strict = self.target == Target::Strict;
        let mut out: Vec<Token> = Vec::new();
        let mut at = 0;
        let mut statement_start = true;
        while at < all.len() {
            let token = &all[at];
            if !token.is_significant() {
                out.push(token.clone());
                at += 1;
                continue;
            }
            if in_kernel
                && statement_start
                && token.text == "threadgroup"
                && let Some((declared, end)) = self.threadgroup_variable(all, at)
            {
                out.extend(declared);
                at = end;
                continue;
            }
            statement_start = matches!(token.text.as_str(), ";" | "{" | "}");
            if token.kind == Kind::Number {
                let mut token = token.clone();
                token.text = number(&token.text);
                out.push(token);
                at += 1;
                continue;
            }
            if token.kind == Kind::Word {
                if let Some((words, end)) = self.special_word(all, at, &out) {
                    out.extend(words);
                    at = end;
                    continue;
                }
                if is_address_space(token) {
                    if strict {
                        out.push(opencl_space(token));
                    }
                    at += 1;
                    continue;
                }
            }
            if self.target == Target::Cuda && token.text == "]" {
                close_index(&mut out, token, &all[at + 1..]);
                at += 1;
                continue;
            }
            let mut token = token.clone();
            token.text = self.name(&token.text);
            out.push(token);
            at += 1;
        }
        out
    }

    /// A word, or another one where it is a keyword of the target's.
    fn name(&self, word: &str) -> String {
        if self.target == Target::Strict && OPENCL_KEYWORDS.contains(&word) {
            return format!("{word}_");
        }
        word.to_owned()
    }

    /// Words that C++ would read otherwise, with what follows them; and where reading goes on.
    fn special_word(
        &mut self,
        all: &[Token],
        at: usize,
        before: &[Token],
    ) -> Option<(Vec<Token>, usize)> {
        let word = all[at].text.as_str();
        let next = skip(all, at + 1);
        let next_text = all.get(next).map_or("", |token| token.text.as_str());
        if word == "is_function_constant_defined" && next_text == "(" {
            let name = skip(all, next + 1);
            let defined = format!("({}_fc_defined", all.get(name)?.text);
            return Some((vec![Token::raw(defined)], name + 1));
        }
        if word == "matmul2d" && next_text == "<" {
            // A class as a template argument needs C++20; the descriptor is packed into a number instead.
            let mut out = vec![all[at].clone(), Token::raw("<msl_pack(")];
            let mut depth = 0;
            let mut end = next + 1;
            while let Some(token) = all.get(end) {
                match token.text.as_str() {
                    "," if depth == 0 => break,
                    "(" | "<" | "{" => depth += 1,
                    ")" | ">" | "}" => depth -= 1,
                    _ => {}
                }
                out.push(token.clone());
                end += 1;
            }
            out.push(Token::raw(")"));
            return Some((out, end));
        }
        if self.target != Target::Strict {
            return None;
        }
        let before = before.iter().rev().find(|token| token.is_significant());
        let before = before.map_or("", |token| token.text.as_str());
        // `operator T(`; `thread T (&name)[4]` and `device T (*name)[4]`, which declare something.
        let first = all.get(skip(all, next + 1));
        let first = first.map_or("", |token| token.text.as_str());
        let qualified = before.starts_with("__") || before.ends_with("const");
        if before == "operator" || first == "&" || first == "*" && qualified {
            return None;
        }
        // C++ for OpenCL builds vectors with casts: each constructor call becomes a function call.
        if (is_vector_name(word) || self.type_names.contains(word)) && next_text == "(" {
            return Some((vec![Token::raw(format!("msl_mk<{word}>"))], at + 1));
        }
        if word == "vec" && next_text == "<" {
            let end = matching(all, next, "<", ">")?;
            if all.get(skip(all, end + 1))?.text == "(" {
                // Without the leading word, which would come back here.
                let inner = self.body(&all[at + 1..=end], false);
                let text = format!("msl_mk<vec{}>", concat(&inner).trim());
                return Some((vec![Token::raw(text)], end + 1));
            }
        }
        None
    }

    /// `threadgroup T a[..], b[..];` becomes storage of the emulator, `__shared__`, or a reference. `None`
    /// if this is something else, such as a pointer into threadgroup memory.
    fn threadgroup_variable(&mut self, all: &[Token], at: usize) -> Option<(Vec<Token>, usize)> {
        let end = (at + 1..all.len()).find(|&i| all[i].text == ";")?;
        let declared = split_commas(&significant(&all[at + 1..end]));
        let first = declared.first()?;
        let bracket = |declarator: &[Token]| {
            declarator
                .iter()
                .position(|token| token.text == "[")
                .unwrap_or(declarator.len())
        };
        let before = &first[..bracket(first)];
        let (name, type_tokens) = before.split_last()?;
        let not_a_variable = |token: &Token| matches!(token.text.as_str(), "*" | "&" | "=" | "(");
        if type_tokens.is_empty() || name.kind != Kind::Word || before.iter().any(not_a_variable) {
            return None;
        }
        let type_name = spaced(&self.body(type_tokens, false));
        let mut text = String::new();
        for (position, declarator) in declared.iter().enumerate() {
            let declarator = if position == 0 {
                &declarator[type_tokens.len()..]
            } else {
                &declarator[..]
            };
            let split = bracket(declarator);
            let name = self.name(&declarator[split.checked_sub(1)?].text);
            let dimensions = concat(&self.body(&declarator[split..], false));
            self.next_slot += 1;
            let slot = self.next_slot;
            let scalar = dimensions.is_empty();
            text += &match self.target {
                Target::Emulated if scalar => format!(
                    "{type_name}& {name} = *({type_name}*)msl::tg_static({slot}, sizeof({type_name})); "
                ),
                Target::Emulated => format!(
                    "{type_name} (&{name}){dimensions} = *({type_name} (*){dimensions})msl::tg_static({slot}, sizeof({type_name}{dimensions})); "
                ),
                // As aligned as the emulator has it: kernels read arrays of scalars as vectors.
                Target::Cuda => {
                    format!("__shared__ __align__(16) {type_name} {name}{dimensions}; ")
                }
                Target::Strict if scalar => {
                    format!(
                        "__local {type_name}& {name} = *(__local {type_name}*)msl_threadgroup; "
                    )
                }
                Target::Strict => format!(
                    "__local {type_name} (&{name}){dimensions} = *(__local {type_name} (*){dimensions})msl_threadgroup; "
                ),
            };
        }
        let mut out = vec![Token::raw(text)];
        out.extend(line_structure(&all[at..end]));
        Some((out, end + 1))
    }
}

/// The word that C++ for OpenCL has for an address space.
fn opencl_space(token: &Token) -> Token {
    let known = OPENCL_SPACES.iter().find(|(msl, _)| *msl == token.text);
    let mut token = token.clone();
    if let Some((_, opencl)) = known {
        token.text = (*opencl).to_owned();
    }
    token
}

/// A number as C++ reads it: floating-point literals are `float` unless they say otherwise.
fn number(text: &str) -> String {
    let lower = text.to_ascii_lowercase();
    if lower.starts_with("0x") {
        return text.to_owned();
    }
    let exponent = lower.trim_start_matches(|c: char| c.is_ascii_digit());
    if !text.contains('.') && !exponent.starts_with('e') {
        return text.to_owned();
    }
    if lower.ends_with("bf") {
        return format!("bfloat({}f)", &text[..text.len() - 2]);
    }
    match lower.as_bytes().last() {
        Some(b'h') => format!("half({}f)", &text[..text.len() - 1]),
        Some(b'f') => text.to_owned(),
        _ => format!("{text}f"),
    }
}

/// `float4`, `uchar2` and so on.
fn is_vector_name(word: &str) -> bool {
    const ELEMENTS: [&str; 12] = [
        "float", "half", "bfloat", "int", "uint", "short", "ushort", "char", "uchar", "long",
        "ulong", "bool",
    ];
    word.strip_suffix(['2', '3', '4'])
        .is_some_and(|element| ELEMENTS.contains(&element))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn literals_are_single_precision() {
        for (written, expected) in [
            ("1", "1"),
            ("0x1e3", "0x1e3"),
            ("7u", "7u"),
            ("1.5", "1.5f"),
            ("1e3", "1e3f"),
            ("2.0h", "half(2.0f)"),
            ("0.5bf", "bfloat(0.5f)"),
            ("3.0F", "3.0F"),
        ] {
            assert_eq!(number(written), expected);
        }
    }
}
