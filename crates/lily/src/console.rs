//! Standard output and standard error: who reads them decides what they get.

use crate::failure::Failure;
use crate::status::Status;
use std::io::{ErrorKind, IsTerminal, StdoutLock, Write};

/// The two streams of a command.
pub struct Console {
    output: StdoutLock<'static>,
    output_is_terminal: bool,
    /// Whether what goes to standard output may appear where standard error does: on the same terminal,
    /// or through a pipe into a program that writes there.
    output_is_near: bool,
    errors_are_terminal: bool,
    quiet: bool,
    color: bool,
    status: Status,
}

impl Console {
    /// Takes standard output. A quiet console prints neither notes nor progress.
    pub fn new(quiet: bool) -> Self {
        let errors_are_terminal = std::io::stderr().is_terminal();
        let output_is_terminal = std::io::stdout().is_terminal();
        let is_lively = errors_are_terminal && takes_escapes();
        Console {
            output: std::io::stdout().lock(),
            output_is_terminal,
            output_is_near: output_is_terminal || !output_is_stored(),
            errors_are_terminal,
            quiet,
            color: is_lively && std::env::var_os("NO_COLOR").is_none(),
            status: Status::new(is_lively && !quiet),
        }
    }

    /// Whether somebody watches standard output.
    pub fn output_is_terminal(&self) -> bool {
        self.output_is_terminal
    }

    /// Whether somebody watches standard error, and wants to see more than errors there.
    pub fn is_watched(&self) -> bool {
        self.errors_are_terminal && !self.quiet
    }

    /// What is done, and for how long, for who watches; see [`Status`].
    pub fn status(&self) -> &Status {
        &self.status
    }

    /// Writes to standard output, at once. What a model says must not steer a terminal.
    pub fn print(&mut self, text: &str) -> Result<(), Failure> {
        let output = &mut self.output;
        let mut write = || {
            if self.output_is_terminal {
                output.write_all(harmless(text).as_bytes())?;
            } else {
                output.write_all(text.as_bytes())?;
            }
            output.flush()
        };
        let result = if self.output_is_near {
            self.status.aside_of(text, write)
        } else {
            write()
        };
        result.map_err(|error| match error.kind() {
            ErrorKind::BrokenPipe => Failure::OutputClosed,
            _ => Failure::request("standard output cannot be written").because(&error),
        })
    }

    /// Writes a value to standard output as JSON.
    pub fn print_json(&mut self, value: &impl serde::Serialize) -> Result<(), Failure> {
        let text = serde_json::to_string_pretty(value)
            .map_err(|error| Failure::request("the report cannot be written").because(&error))?;
        self.print(&(text + "\n"))
    }

    /// Writes a line to standard error. That nobody reads it is no reason to stop.
    pub fn note(&mut self, line: &str) {
        if !self.quiet {
            self.write_errors(&(harmless(line) + "\n"), false);
        }
    }

    /// Writes to standard error what is beside the answer: dimmed, where there is a terminal.
    pub fn aside(&mut self, text: &str) {
        self.write_errors(&harmless(text), self.color);
    }

    fn write_errors(&mut self, text: &str, dimmed: bool) {
        self.status.aside_of(text, || {
            let mut errors = std::io::stderr().lock();
            let _ = if dimmed {
                write!(errors, "\x1b[2m{text}\x1b[0m")
            } else {
                write!(errors, "{text}")
            };
            let _ = errors.flush();
        });
    }
}

/// Whether the terminal, where there is one, does more than to print what it is sent.
pub fn takes_escapes() -> bool {
    std::env::var_os("TERM").is_some_and(|name| name != "dumb" && !name.is_empty())
}

/// Whether standard output goes to a file or to nobody, rather than to a program.
#[cfg(unix)]
fn output_is_stored() -> bool {
    use std::os::fd::AsFd;
    use std::os::unix::fs::FileTypeExt;
    let duplicate = std::io::stdout().as_fd().try_clone_to_owned();
    duplicate
        .and_then(|output| std::fs::File::from(output).metadata())
        .is_ok_and(|metadata| metadata.is_file() || metadata.file_type().is_char_device())
}

#[cfg(not(unix))]
fn output_is_stored() -> bool {
    false
}

/// The text with control characters spelled out, but for line ends and tabs.
pub fn harmless(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for character in text.chars() {
        // What turns the direction of writing can make a text look another.
        let turns = matches!(character, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
        if turns || (character.is_control() && !matches!(character, '\n' | '\t')) {
            shown.extend(character.escape_default());
        } else {
            shown.push(character);
        }
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::harmless;

    #[test]
    fn a_model_cannot_steer_the_terminal() {
        assert_eq!(
            harmless("a\x1b]0;x\x07\r\n\tb"),
            "a\\u{1b}]0;x\\u{7}\\r\n\tb"
        );
        assert_eq!(harmless("größe 👨‍👩‍👧"), "größe 👨‍👩‍👧");
    }
}
