//! Text events, with the whitespace around the parts of the output removed.

use super::OutputEvent;

/// Which part of the output text belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    Reasoning,
    Content,
}

/// Collects events. Whitespace is held back until it is known what follows.
#[derive(Debug, Clone, Default)]
pub(super) struct Emitter {
    events: Vec<OutputEvent>,
    /// Whitespace seen at the end of the current part.
    held: String,
    any_reasoning: bool,
    any_content: bool,
    any_call: bool,
}

impl Emitter {
    pub(super) fn take(&mut self) -> Vec<OutputEvent> {
        std::mem::take(&mut self.events)
    }

    pub(super) fn text(&mut self, part: Part, text: &str) {
        let body = text.trim_end();
        if body.is_empty() {
            self.held.push_str(text);
            return;
        }
        let whole = std::mem::take(&mut self.held) + body;
        self.held.push_str(&text[body.len()..]);
        match part {
            Part::Reasoning => {
                let piece = if self.any_reasoning {
                    &whole
                } else {
                    whole.trim_start()
                };
                self.any_reasoning = true;
                self.append(part, piece);
            }
            Part::Content => {
                let piece = if self.any_content {
                    &whole
                } else {
                    without_leading_lines(&whole)
                };
                self.any_content = true;
                self.append(part, piece);
            }
        }
    }

    fn append(&mut self, part: Part, piece: &str) {
        match (part, self.events.last_mut()) {
            (Part::Reasoning, Some(OutputEvent::Reasoning(text)))
            | (Part::Content, Some(OutputEvent::Content(text))) => text.push_str(piece),
            (Part::Reasoning, _) => self.events.push(OutputEvent::Reasoning(piece.to_owned())),
            (Part::Content, _) => self.events.push(OutputEvent::Content(piece.to_owned())),
        }
    }

    /// Reasoning begins (again, if there was some before).
    pub(super) fn begin_reasoning(&mut self) {
        self.held.clear();
        if self.any_reasoning {
            self.held.push_str("\n\n");
        }
    }

    pub(super) fn end_reasoning(&mut self) {
        self.held.clear();
    }

    /// A tool call begins. If more content should follow, it is set apart from
    /// that before the call as it would have been without the call.
    pub(super) fn begin_call(&mut self) {
        if self.any_content && self.held.is_empty() {
            self.held.push_str("\n\n");
        }
        self.any_call = true;
    }

    pub(super) fn event(&mut self, event: OutputEvent) {
        self.events.push(event);
    }

    /// The output ends. Whitespace at the end of an answer is the model's own,
    /// unless it belongs to markup.
    pub(super) fn finish(&mut self, part: Part) {
        let held = std::mem::take(&mut self.held);
        if part == Part::Content && self.any_content && !self.any_call && !held.is_empty() {
            self.append(Part::Content, &held);
        }
    }

    pub(super) fn has_reasoning(&self) -> bool {
        self.any_reasoning
    }

    /// Whether neither content nor a tool call has come yet.
    pub(super) fn is_before_content(&self) -> bool {
        !self.any_content && !self.any_call
    }

    /// Whether the next text of the content begins a line.
    pub(super) fn is_line_start(&self) -> bool {
        !self.any_content || self.held.contains('\n')
    }
}

/// Drops empty lines at the beginning, but not the indentation of the first
/// line that is not empty.
fn without_leading_lines(text: &str) -> &str {
    let blank = text.len() - text.trim_start().len();
    match text[..blank].rfind('\n') {
        Some(line_break) => &text[line_break + 1..],
        None => text,
    }
}
