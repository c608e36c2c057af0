//! Standard output and standard error: who reads them decides what they get.

use crate::failure::Failure;
use std::io::{ErrorKind, IsTerminal, StderrLock, StdoutLock, Write};
use std::time::{Duration, Instant};

/// The two streams of a command.
pub struct Console {
    output: StdoutLock<'static>,
    errors: StderrLock<'static>,
    output_is_terminal: bool,
    errors_are_terminal: bool,
    quiet: bool,
    color: bool,
}

impl Console {
    /// Takes both streams. A quiet console prints neither notes nor progress.
    pub fn new(quiet: bool) -> Self {
        let errors_are_terminal = std::io::stderr().is_terminal();
        Console {
            output: std::io::stdout().lock(),
            errors: std::io::stderr().lock(),
            output_is_terminal: std::io::stdout().is_terminal(),
            errors_are_terminal,
            quiet,
            color: errors_are_terminal && std::env::var_os("NO_COLOR").is_none(),
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

    /// Writes to standard output, at once. What a model says must not steer a terminal.
    pub fn print(&mut self, text: &str) -> Result<(), Failure> {
        let result = if self.output_is_terminal {
            self.output.write_all(harmless(text).as_bytes())
        } else {
            self.output.write_all(text.as_bytes())
        };
        result
            .and_then(|()| self.output.flush())
            .map_err(|error| match error.kind() {
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
            let line = harmless(line);
            let _ = writeln!(self.errors, "{line}");
        }
    }

    /// Writes to standard error what is beside the answer: dimmed, where there is a terminal.
    pub fn aside(&mut self, text: &str) {
        let text = harmless(text);
        let _ = if self.color {
            write!(self.errors, "\x1b[2m{text}\x1b[0m")
        } else {
            write!(self.errors, "{text}")
        };
        let _ = self.errors.flush();
    }

    /// Shows `text` in a line of its own that the next one replaces.
    fn show_status(&mut self, text: &str) {
        let _ = write!(self.errors, "\r\x1b[K{text}");
        let _ = self.errors.flush();
    }

    fn clear_status(&mut self) {
        let _ = write!(self.errors, "\r\x1b[K");
        let _ = self.errors.flush();
    }
}

/// The text with control characters spelled out, but for line ends and tabs.
fn harmless(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for character in text.chars() {
        if character.is_control() && !matches!(character, '\n' | '\t') {
            shown.extend(character.escape_default());
        } else {
            shown.push(character);
        }
    }
    shown
}

/// How far something is that takes time: shown to who watches, once a second has passed.
pub struct ProgressLine {
    label: &'static str,
    unit: &'static str,
    started: Instant,
    shown: Option<Instant>,
}

impl ProgressLine {
    const PATIENCE: Duration = Duration::from_secs(1);
    const INTERVAL: Duration = Duration::from_millis(100);

    /// Begins now.
    pub fn new(label: &'static str, unit: &'static str) -> Self {
        ProgressLine {
            label,
            unit,
            started: Instant::now(),
            shown: None,
        }
    }

    /// Tells how far it is.
    pub fn update(&mut self, console: &mut Console, done: usize, total: usize) {
        let elapsed = self.started.elapsed();
        let fresh = self
            .shown
            .is_some_and(|shown| shown.elapsed() < Self::INTERVAL);
        if !console.is_watched() || elapsed < Self::PATIENCE || fresh || done == 0 {
            return;
        }
        let rate = done as f64 / elapsed.as_secs_f64();
        let left = total.saturating_sub(done) as f64 / rate;
        console.show_status(&format!(
            "{}: {done} of {total} {} ({:.0}%), {left:.0} s left",
            self.label,
            self.unit,
            100.0 * done as f64 / total.max(1) as f64,
        ));
        self.shown = Some(Instant::now());
    }

    /// Takes the line away.
    pub fn finish(&mut self, console: &mut Console) {
        if self.shown.take().is_some() {
            console.clear_status();
        }
    }
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
