//! For CUDA: an element of a vector whose number is known only at run time. Registers have no numbers, so that it would put
//! the vector into local memory, which is device memory. An element that is read, `v[i]`, becomes `msl_at(v, i)`,
//! which chooses among all elements if `v` is a vector. What is written stays as it is.

use crate::lexer::{Kind, Token};

use super::tokens::significant;

/// Writes the bracket that closes an index, and makes a reading of an element a call.
pub(super) fn close_index(out: &mut Vec<Token>, close: &Token, after: &[Token]) {
    let read = matching_back(out, out.len(), "[", "]").and_then(|open| {
        let index = significant(&out[open + 1..]);
        let is_literal = matches!(&index[..], [number] if number.kind == Kind::Number);
        let start = operand_start(out, open)?;
        (!index.is_empty() && !is_literal && is_read(after) && !is_declared(out, start))
            .then_some((start, open))
    });
    let Some((start, open)) = read else {
        out.push(close.clone());
        return;
    };
    let operator = |text: &str| {
        let mut token = close.clone();
        token.text = text.to_owned();
        token
    };
    let mut name = operator("msl_at");
    name.kind = Kind::Word;
    out[open] = operator(",");
    out.push(operator(")"));
    out.splice(start..start, [name, operator("(")]);
}

/// Position of the last unclosed `open` before `end`.
fn matching_back(out: &[Token], end: usize, open: &str, close: &str) -> Option<usize> {
    let mut depth = 0;
    for at in (0..end).rev() {
        if out[at].text == close {
            depth += 1;
        } else if out[at].text == open {
            if depth == 0 {
                return Some(at);
            }
            depth -= 1;
        }
    }
    None
}

fn last_significant(out: &[Token], end: usize) -> Option<usize> {
    (0..end).rev().find(|at| out[*at].is_significant())
}

/// Where the expression that ends before `end` begins: names, calls and elements, joined by dots and arrows.
fn operand_start(out: &[Token], mut end: usize) -> Option<usize> {
    loop {
        let last = last_significant(out, end)?;
        let mut start = match out[last].text.as_str() {
            ")" => parentheses_start(out, last)?,
            "]" => {
                end = matching_back(out, last, "[", "]")?;
                continue;
            }
            _ if is_name(&out[last]) => last,
            _ => return None,
        };
        loop {
            let Some(joint) = last_significant(out, start) else {
                return Some(start);
            };
            match out[joint].text.as_str() {
                "." | "->" => {
                    end = joint;
                    break;
                }
                "::" => start = last_significant(out, joint)?,
                _ => return Some(start),
            }
        }
    }
}

/// Where a call or an expression in parentheses begins.
fn parentheses_start(out: &[Token], close: usize) -> Option<usize> {
    let open = matching_back(out, close, "(", ")")?;
    let inside = out[open + 1..close]
        .iter()
        .find(|token| token.is_significant())?;
    // `T (&name)[n]` declares.
    if matches!(inside.text.as_str(), "&" | "*") {
        return None;
    }
    match last_significant(out, open) {
        // After template arguments; where they begin is hard to say.
        Some(before) if out[before].text == ">" => None,
        Some(before) if is_name(&out[before]) => Some(before),
        _ => Some(open),
    }
}

fn is_name(token: &Token) -> bool {
    token.kind == Kind::Word && !is_keyword(&token.text)
}

fn is_keyword(word: &str) -> bool {
    matches!(
        word,
        "return" | "else" | "case" | "do" | "if" | "while" | "for" | "switch" | "sizeof"
    )
}

/// Whether what follows an element leaves it as it is.
fn is_read(after: &[Token]) -> bool {
    let Some(next) = after.iter().find(|token| token.is_significant()) else {
        return false;
    };
    match next.text.as_str() {
        "==" | "!=" | "<=" | ">=" => true,
        "." | "->" | "[" | "(" | "{" | "++" | "--" => false,
        other => !other.ends_with('='),
    }
}

/// Whether what begins at `start` is being declared, has its address taken, or is counted up or down.
fn is_declared(out: &[Token], start: usize) -> bool {
    let Some(before) = last_significant(out, start) else {
        return true;
    };
    match out[before].text.as_str() {
        "++" | "--" => true,
        "&" | "*" | ">" | "," => {
            let operand = last_significant(out, before).map(|at| &out[at]);
            let binary = operand.is_some_and(|token| {
                is_name(token)
                    || token.kind == Kind::Number
                    || matches!(token.text.as_str(), ")" | "]")
            });
            out[before].text == "&" && !binary || is_declaration(out, start)
        }
        _ => is_name(&out[before]),
    }
}

/// Whether a statement that has come to `end` can be a declaration: it is in no parentheses, and nothing has been
/// assigned or computed, except for earlier variables.
fn is_declaration(out: &[Token], end: usize) -> bool {
    let mut before = out[..end]
        .iter()
        .rev()
        .filter(|token| token.is_significant());
    let is_later_variable = before.clone().next().is_some_and(|token| token.text == ",");
    let mut depth = 0;
    before
        .find_map(|token| match token.text.as_str() {
            ")" | "]" => {
                depth += 1;
                None
            }
            "(" | "[" if depth == 0 => Some(false),
            "(" | "[" => {
                depth -= 1;
                None
            }
            _ if depth > 0 => None,
            ";" | "{" | "}" => Some(true),
            "," | "::" | "<" | ">" | "*" | "&" => None,
            _ if is_later_variable || is_name(token) || token.kind == Kind::Number => None,
            _ => Some(false),
        })
        .unwrap_or(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lexer::lex;

    fn rewritten(text: &str) -> String {
        let tokens = lex(text, true).tokens;
        let mut out = Vec::new();
        for (at, token) in tokens.iter().enumerate() {
            if token.text == "]" {
                close_index(&mut out, token, &tokens[at + 1..]);
            } else {
                out.push(token.clone());
            }
        }
        super::super::tokens::concat(&out)
    }

    #[test]
    fn elements_that_are_read_are_chosen() {
        for (written, expected) in [
            ("x = v[i];", "x = msl_at(v,i);"),
            (
                "return a.b->c[i + 1] * w[j];",
                "return msl_at(a.b->c,i + 1) * msl_at(w,j);",
            ),
            (
                "f(x * v[i], v[v[i]]);",
                "f(x * msl_at(v,i), msl_at(v,msl_at(v,i)));",
            ),
            (
                "x = rows[r][c] > m::t(a)[n & 3];",
                "x = msl_at(rows[r],c) > msl_at(m::t(a),n & 3);",
            ),
            (
                "if (a < b && v[i] == 0) {",
                "if (a < b && msl_at(v,i) == 0) {",
            ),
            (
                "float y = x & v[i], z = (a + b)[i];",
                "float y = x & msl_at(v,i), z = msl_at((a + b),i);",
            ),
        ] {
            assert_eq!(rewritten(written), expected);
        }
    }

    #[test]
    fn other_brackets_stay() {
        for text in [
            "float a[N], b[N];",
            "float a = 1, b[N];",
            "float4* rows[N];",
            "vec<float, 4> rows[N];",
            "v[i] = v[0] + v[3];",
            "v[i] += 1; ++v[i]; v[i]++;",
            "p = &v[i]; q = f(&v[i]);",
            "rows[i].x = rows[j].y;",
            "f(float (&squares)[M], int n[M]);",
            "auto f = [&] { return 1; };",
            "struct { float4 of[M]; const uchar* at[M]; };",
        ] {
            assert_eq!(rewritten(text), text);
        }
    }
}
