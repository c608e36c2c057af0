//! What the user types: in an editor where the terminal is up to it, else line by line.

use super::history;
use super::interrupts::{HINT, Interrupts};
use crate::args::ChatArguments;
use crate::console::{Console, harmless, takes_escapes};
use crate::failure::Failure;
use reedline::{
    FileBackedHistory, Prompt, PromptEditMode, PromptHistorySearch, Reedline, Signal,
    ValidationResult, Validator,
};
use std::borrow::Cow;
use std::io::{BufRead, IsTerminal};
use std::path::PathBuf;

/// Most messages that are remembered.
const MOST_REMEMBERED: usize = 1_000;
/// What stands before and behind a message of many lines.
const FENCE: &str = "\"\"\"";

/// What came of asking for a line.
#[derive(Debug, PartialEq, Eq)]
pub enum Line {
    /// A text, of several lines perhaps.
    Text(String),
    /// Ctrl-C.
    Interrupted,
    /// Nothing comes any more.
    End,
}

/// Where lines come from.
pub struct Input {
    /// `None` where lines come as they are.
    editors: Option<Editors>,
    /// Whether a person types.
    somebody_types: bool,
    interrupts: Interrupts,
}

struct Editors {
    messages: Reedline,
    /// What tools return is not remembered.
    results: Reedline,
}

impl Input {
    /// Finds out what there is.
    pub fn new(
        arguments: &ChatArguments,
        interrupts: &Interrupts,
        console: &mut Console,
    ) -> Result<Self, Failure> {
        let somebody_types = std::io::stdin().is_terminal();
        // It writes to standard error, and asks on standard output where the cursor is.
        let edits = somebody_types
            && console.is_watched()
            && console.output_is_terminal()
            && takes_escapes();
        let editors = match edits {
            true => Some(Editors {
                messages: remembering(editor(), arguments, console)?,
                results: editor(),
            }),
            false => None,
        };
        Ok(Input {
            editors,
            somebody_types,
            interrupts: interrupts.clone(),
        })
    }

    /// Whether a person types, rather than a program.
    pub fn somebody_types(&self) -> bool {
        self.somebody_types
    }

    /// The next message or command.
    pub fn message(&mut self, console: &mut Console) -> Result<Line, Failure> {
        self.read("> ", true, console)
    }

    /// What a tool returned.
    pub fn result(&mut self, tool: &str, console: &mut Console) -> Result<Line, Failure> {
        // The name is the model's.
        let name = harmless(tool).replace(['\n', '\t'], " ");
        self.read(&format!("{name}> "), false, console)
    }

    fn read(
        &mut self,
        prompt: &str,
        is_message: bool,
        console: &mut Console,
    ) -> Result<Line, Failure> {
        if let Some(editors) = &mut self.editors {
            let editor = if is_message {
                &mut editors.messages
            } else {
                &mut editors.results
            };
            match editor.read_line(&Sign(prompt)) {
                Ok(Signal::Success(text)) => {
                    if is_message && let Err(error) = editor.sync_history() {
                        console.note(&format!("lily: the history cannot be written: {error}"));
                    }
                    return Ok(Line::Text(Fenced::new(&text).into_text()));
                }
                Ok(Signal::CtrlD) => return Ok(Line::End),
                Ok(_) => {
                    console.aside(&format!("{HINT}\n"));
                    return Ok(Line::Interrupted);
                }
                // A terminal that does not say where its cursor is.
                Err(error) => {
                    self.editors = None;
                    console.note(&format!("\nlily: lines are not edited: {error}"));
                }
            }
        }
        self.read_lines(prompt)
    }

    fn read_lines(&mut self, prompt: &str) -> Result<Line, Failure> {
        let shown = self.somebody_types && std::io::stderr().is_terminal();
        let show = |prompt: &str| {
            self.interrupts.typing(shown.then_some(prompt));
            if shown {
                eprint!("{prompt}");
            }
        };
        show(prompt);
        let mut text = String::new();
        loop {
            let mut line = String::new();
            let read = std::io::stdin().lock().read_line(&mut line);
            let interrupted = self.interrupts.typing(None);
            let count = read.map_err(|error| {
                Failure::usage("standard input cannot be read as text").because(&error)
            })?;
            if interrupted {
                text.clear();
            }
            text += line.trim_end_matches(['\n', '\r']);
            if count == 0 && text.is_empty() {
                if shown {
                    eprintln!();
                }
                return Ok(Line::End);
            }
            match Fenced::new(&text) {
                Fenced::Open(_) if count > 0 => {
                    text.push('\n');
                    show(". ");
                }
                fenced => return Ok(Line::Text(fenced.into_text())),
            }
        }
    }
}

fn editor() -> Reedline {
    // The default keys: Alt-Enter begins a line, and Ctrl-J is Enter. As such comes the Enter of a line that was typed
    // while the model answered.
    Reedline::create()
        .with_validator(Box::new(Fences))
        // Nothing is coloured: what is typed stands behind a sign.
        .with_ansi_colors(false)
        .use_bracketed_paste(true)
}

/// The editor with what was typed at earlier times, where that is wanted and can be had.
fn remembering(
    editor: Reedline,
    arguments: &ChatArguments,
    console: &mut Console,
) -> Result<Reedline, Failure> {
    let opened = history::file(arguments).and_then(|file| file.map(open_history).transpose());
    match opened {
        Ok(Some(history)) => Ok(editor
            .with_history(Box::new(history))
            // As shells have it, for what is not to be remembered.
            .with_history_exclusion_prefix(Some(" ".into()))),
        Ok(None) => Ok(editor),
        Err(failure) if arguments.history.is_some() => Err(failure),
        // Nobody asked for it: no reason not to talk.
        Err(failure) => {
            console.note(failure.to_text().trim_end());
            Ok(editor)
        }
    }
}

fn open_history(path: PathBuf) -> Result<FileBackedHistory, Failure> {
    FileBackedHistory::with_file(MOST_REMEMBERED, path.clone()).map_err(|error| {
        Failure::usage(format!("the history {} cannot be read", path.display()))
            .because(&error)
            .help("name another file with --history, or give --no-history")
    })
}

/// A text, and whether it goes on: one that begins with a fence does, until there is another.
enum Fenced<'a> {
    Plain(&'a str),
    Open(&'a str),
    Closed(&'a str),
}

impl<'a> Fenced<'a> {
    fn new(text: &'a str) -> Self {
        let Some(inner) = text.trim_start().strip_prefix(FENCE) else {
            return Fenced::Plain(text);
        };
        match inner.trim_end().strip_suffix(FENCE) {
            Some(inner) => Fenced::Closed(inner),
            None => Fenced::Open(inner),
        }
    }

    /// What is meant, without fences and the line ends next to them.
    fn into_text(self) -> String {
        let text = match self {
            Fenced::Plain(text) => return text.to_string(),
            Fenced::Open(text) | Fenced::Closed(text) => text,
        };
        let text = text.strip_prefix('\n').unwrap_or(text);
        text.strip_suffix('\n').unwrap_or(text).to_string()
    }
}

/// Whether Enter ends the text or begins a line of it.
struct Fences;

impl Validator for Fences {
    fn validate(&self, text: &str) -> ValidationResult {
        match Fenced::new(text) {
            Fenced::Open(_) => ValidationResult::Incomplete,
            _ => ValidationResult::Complete,
        }
    }
}

/// The sign before what is typed.
struct Sign<'a>(&'a str);

impl Prompt for Sign<'_> {
    fn render_prompt_left(&self) -> Cow<'_, str> {
        Cow::Borrowed("")
    }

    fn render_prompt_right(&self) -> Cow<'_, str> {
        Cow::Borrowed("")
    }

    fn render_prompt_indicator(&self, _: PromptEditMode) -> Cow<'_, str> {
        Cow::Borrowed(self.0)
    }

    fn render_prompt_multiline_indicator(&self) -> Cow<'_, str> {
        Cow::Borrowed(". ")
    }

    fn render_prompt_history_search_indicator(&self, search: PromptHistorySearch) -> Cow<'_, str> {
        Cow::Owned(format!("(search: {}) ", search.term))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fences_hold_many_lines() {
        for (text, meant, goes_on) in [
            ("one", "one", false),
            ("two\nlines", "two\nlines", false),
            ("\"\"\"", "", true),
            ("\"\"\"\"\"\"", "", false),
            ("\"\"\"a", "a", true),
            ("\"\"\"\na\n b\n", "a\n b", true),
            ("\"\"\"\na\n\n b\n\"\"\"", "a\n\n b", false),
            ("  \"\"\"a\"\"\" ", "a", false),
            ("say \"\"\"", "say \"\"\"", false),
        ] {
            let fenced = Fenced::new(text);
            assert_eq!(matches!(fenced, Fenced::Open(_)), goes_on, "{text:?}");
            assert_eq!(fenced.into_text(), meant, "{text:?}");
        }
    }
}
