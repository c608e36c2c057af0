//! Recognising tags in text that is not complete yet.

pub(super) const THINK_OPEN: &str = "<think>";
pub(super) const THINK_CLOSE: &str = "</think>";
pub(super) const CALL_OPEN: &str = "<tool_call>";
pub(super) const CALL_CLOSE: &str = "</tool_call>";
pub(super) const FUNCTION_OPEN: &str = "<function=";
pub(super) const FUNCTION_CLOSE: &str = "</function>";
pub(super) const PARAMETER_OPEN: &str = "<parameter=";
pub(super) const PARAMETER_CLOSE: &str = "</parameter>";

/// No name of a function or parameter is longer; a tag that does not end is
/// given up after this many bytes.
const MAXIMUM_NAME: usize = 512;

/// An answer about text of which only the beginning is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Known<T> {
    Yes(T),
    No,
    /// It depends on what follows.
    Open,
}

/// Whether the text begins with the tag.
pub(super) fn begins(text: &str, tag: &str) -> Known<()> {
    if text.starts_with(tag) {
        Known::Yes(())
    } else if tag.starts_with(text) {
        Known::Open
    } else {
        Known::No
    }
}

/// Whether, after whitespace, the text continues with one of the tags. At the
/// end of the output, a tag that has only begun counts, and so does nothing at
/// all if `end_counts`.
pub(super) fn continues(text: &str, tags: &[&str], at_end: bool, end_counts: bool) -> Known<()> {
    let rest = text.trim_start();
    if rest.is_empty() {
        return match (at_end, end_counts) {
            (false, _) => Known::Open,
            (true, true) => Known::Yes(()),
            (true, false) => Known::No,
        };
    }
    let mut open = false;
    for tag in tags {
        match begins(rest, tag) {
            Known::Yes(()) => return Known::Yes(()),
            Known::Open => open = true,
            Known::No => {}
        }
    }
    match (open, at_end) {
        (true, true) => Known::Yes(()),
        (true, false) => Known::Open,
        (false, _) => Known::No,
    }
}

/// The name in `<function=NAME>` or `<parameter=NAME>`, and where the tag
/// ends. A line break ends a tag whose `>` is missing.
pub(super) fn name_in_tag<'a>(text: &'a str, opening: &str) -> Known<(&'a str, usize)> {
    let Some(rest) = text.strip_prefix(opening) else {
        return Known::No;
    };
    match rest.find(['>', '\n', '<']) {
        Some(end) if end <= MAXIMUM_NAME && !rest[end..].starts_with('<') => {
            let name = rest[..end].trim().trim_matches(['"', '\'']);
            if name.is_empty() {
                return Known::No;
            }
            // The line break stays: it belongs to what follows.
            let closing = usize::from(rest[end..].starts_with('>'));
            Known::Yes((name, opening.len() + end + closing))
        }
        None if rest.len() <= MAXIMUM_NAME => Known::Open,
        _ => Known::No,
    }
}

/// Whether the beginning of a tag at the very end of the output is markup to
/// be dropped. One `<` may be anything; `<tool_` is no prose; in between it
/// depends on whether the output was cut off.
pub(super) fn is_cut_tag(length: usize, truncated: bool) -> bool {
    length >= if truncated { 2 } else { 6 }
}

/// Whether a prompt leaves the model inside its reasoning.
pub(super) fn prompt_opens_reasoning(prompt: &str) -> bool {
    // Only the turn that the model continues counts: users may write tags, too.
    let turn = ["<|im_start|>", "<|im_end|>"]
        .into_iter()
        .fold(prompt, |text, marker| match text.rfind(marker) {
            Some(at) => &text[at + marker.len()..],
            None => text,
        });
    match (turn.rfind(THINK_OPEN), turn.rfind(THINK_CLOSE)) {
        (Some(open), Some(close)) => open > close,
        (Some(_), None) => true,
        (None, _) => false,
    }
}
