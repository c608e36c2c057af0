//! What a `<` in reasoning or content is: markup or just text.

use super::emitter::Part;
use super::machine::{End, OutputParser};
use super::markup::{self, Known};
use super::markup::{CALL_CLOSE, CALL_OPEN, FUNCTION_OPEN, THINK_CLOSE, THINK_OPEN};

/// What a `<` in text turns out to be.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Tag {
    Unknown,
    Literal,
    /// Markup without meaning, of this length.
    Nothing(usize),
    OpenReasoning(usize),
    CloseReasoning(usize),
    Function {
        name: String,
        length: usize,
    },
    Json(usize),
    Malformed(usize),
    /// A call of which only the beginning came before the end.
    CutCall,
}

impl OutputParser {
    /// Decides about the `<` at which the rest of the text begins.
    pub(super) fn tag(&self, part: Part, end: End) -> Tag {
        let rest = self.rest();
        let line_start = self.emitter.is_line_start();
        let mut candidates = vec![THINK_CLOSE];
        match part {
            Part::Reasoning => {
                if !self.emitter.has_reasoning() {
                    candidates.push(THINK_OPEN);
                }
            }
            Part::Content => {
                if self.emitter.is_before_content() {
                    candidates.push(THINK_OPEN);
                }
                // In the middle of a line, the answer talks about the tag.
                if !line_start {
                    candidates.clear();
                }
                if self.parse_calls && line_start {
                    candidates.push(CALL_CLOSE);
                    if !self.tools.is_empty() {
                        candidates.push(FUNCTION_OPEN);
                    }
                }
            }
        }
        // Without tools, reasoning only talks about calls.
        let is_call_possible = part == Part::Content || !self.tools.is_empty();
        if self.parse_calls && is_call_possible {
            candidates.push(CALL_OPEN);
        }
        let mut undecided = false;
        for candidate in candidates {
            match markup::begins(rest, candidate) {
                Known::No => {}
                Known::Open => undecided = true,
                Known::Yes(()) => {
                    let length = candidate.len();
                    return match (candidate, part) {
                        (THINK_OPEN, Part::Reasoning) => Tag::Nothing(length),
                        (THINK_OPEN, Part::Content) => Tag::OpenReasoning(length),
                        (THINK_CLOSE, Part::Reasoning) => Tag::CloseReasoning(length),
                        (CALL_OPEN, _) => self.call_tag(part, end),
                        (FUNCTION_OPEN, _) => self.bare_function_tag(end),
                        _ => Tag::Nothing(length),
                    };
                }
            }
        }
        if !undecided {
            return Tag::Literal;
        }
        let is_call = self.parse_calls && is_call_possible && CALL_OPEN.starts_with(rest);
        match end {
            End::NotYet => Tag::Unknown,
            _ if !markup::is_cut_tag(rest.len(), end == End::Truncated) => Tag::Literal,
            _ if is_call => Tag::CutCall,
            _ => Tag::Nothing(rest.len()),
        }
    }

    /// `<tool_call>` is one if what follows says so: models also talk about
    /// the tag.
    fn call_tag(&self, part: Part, end: End) -> Tag {
        let rest = self.rest();
        let after = &rest[CALL_OPEN.len()..];
        let body = after.trim_start();
        let skipped = rest.len() - body.len();
        // In reasoning, only a call of a tool that exists is taken seriously.
        let is_known = |name: &str| part == Part::Content || self.tools.has(name);
        if body.starts_with('{') && part == Part::Content {
            return Tag::Json(skipped);
        }
        if body.starts_with(FUNCTION_OPEN) {
            return match markup::name_in_tag(body, FUNCTION_OPEN) {
                Known::Yes((name, length)) if is_known(name) => Tag::Function {
                    name: name.to_owned(),
                    length: skipped + length,
                },
                Known::Open if end == End::NotYet => Tag::Unknown,
                Known::Open if part == Part::Content => Tag::CutCall,
                Known::No if part == Part::Content => Tag::Malformed(skipped),
                _ => Tag::Literal,
            };
        }
        if FUNCTION_OPEN.starts_with(body) {
            return match end {
                End::NotYet => Tag::Unknown,
                End::Truncated => Tag::CutCall,
                // The model ended its answer with the name of the tag.
                End::Complete if self.emitter.is_line_start() => Tag::CutCall,
                End::Complete => Tag::Literal,
            };
        }
        // On a line of its own it is a call, however malformed.
        let alone = self.emitter.is_line_start() && after.starts_with(['\n', '\r', '<']);
        if alone && part == Part::Content {
            Tag::Malformed(CALL_OPEN.len())
        } else {
            Tag::Literal
        }
    }

    /// Models forget `<tool_call>`; a function that exists is called anyway.
    fn bare_function_tag(&self, end: End) -> Tag {
        match markup::name_in_tag(self.rest(), FUNCTION_OPEN) {
            Known::Yes((name, length)) if self.tools.has(name) => Tag::Function {
                name: name.to_owned(),
                length,
            },
            Known::Open if end == End::NotYet => Tag::Unknown,
            Known::Open if end == End::Truncated => Tag::CutCall,
            _ => Tag::Literal,
        }
    }
}
