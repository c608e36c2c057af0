//! How a command ends when it does not end well: what is printed, and with which status.

use lily_checkpoint::CheckpointError;
use lily_engine::{EngineError, SamplingError};
use std::error::Error;
use std::fmt::Write as _;
use std::process::ExitCode;

/// Why a command ended early.
#[derive(Debug)]
pub enum Failure {
    /// The request was understood and failed: refused, out of memory, a device at fault, a check missed.
    Request(Report),
    /// The request could not be understood, or names what is not there or not usable.
    Usage(Report),
    /// The user interrupted it. What there was has been printed.
    Interrupted,
    /// Whoever read standard output went away: nothing is wrong, and nobody is left to tell.
    OutputClosed,
}

/// What went wrong, why, and what to do about it.
#[derive(Debug)]
pub struct Report {
    message: String,
    causes: Vec<String>,
    remedy: Option<String>,
}

impl Report {
    fn new(message: impl Into<String>) -> Self {
        Report {
            message: message.into(),
            causes: Vec::new(),
            remedy: None,
        }
    }

    /// An error and its sources, without those that the error's own text already repeats.
    fn of(error: &dyn Error) -> Self {
        let mut report = Report::new(error.to_string());
        let mut seen = report.message.clone();
        let mut source = error.source();
        while let Some(cause) = source {
            let text = cause.to_string();
            if !seen.contains(&text) {
                seen = text.clone();
                report.causes.push(text);
            }
            source = cause.source();
        }
        report
    }

    fn to_text(&self) -> String {
        let mut text = format!("error: {}\n", printable(&self.message));
        for cause in &self.causes {
            let _ = writeln!(text, "  because: {}", printable(cause));
        }
        if let Some(remedy) = &self.remedy {
            let _ = writeln!(text, "  help: {remedy}");
        }
        text
    }
}

/// Messages may quote files and templates: whatever would speak to the terminal is spelled out.
fn printable(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for character in text.chars() {
        if character.is_control() && character != '\n' {
            shown.extend(character.escape_default());
        } else {
            shown.push(character);
        }
    }
    shown
}

impl Failure {
    /// A failed request.
    pub fn request(message: impl Into<String>) -> Self {
        Failure::Request(Report::new(message))
    }

    /// A usage error.
    pub fn usage(message: impl Into<String>) -> Self {
        Failure::Usage(Report::new(message))
    }

    /// A failed request, told by an error.
    pub fn request_of(error: &dyn Error) -> Self {
        Failure::Request(Report::of(error))
    }

    /// A usage error, told by an error.
    pub fn usage_of(error: &dyn Error) -> Self {
        Failure::Usage(Report::of(error))
    }

    /// The same with the error that led to it.
    #[must_use]
    pub fn because(mut self, error: &dyn Error) -> Self {
        if let Failure::Request(report) | Failure::Usage(report) = &mut self {
            let cause = Report::of(error);
            report.causes.push(cause.message);
            report.causes.extend(cause.causes);
        }
        self
    }

    /// The same with what to do about it.
    #[must_use]
    pub fn help(mut self, remedy: impl Into<String>) -> Self {
        if let Failure::Request(report) | Failure::Usage(report) = &mut self {
            report.remedy = Some(remedy.into());
        }
        self
    }

    /// What standard error gets; nothing where there is nothing to say.
    pub fn to_text(&self) -> String {
        match self {
            Failure::Request(report) | Failure::Usage(report) => report.to_text(),
            Failure::Interrupted | Failure::OutputClosed => String::new(),
        }
    }

    /// The process's status.
    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self {
            Failure::OutputClosed => 0,
            Failure::Request(_) => 1,
            Failure::Usage(_) => 2,
            Failure::Interrupted => 130,
        })
    }
}

impl From<CheckpointError> for Failure {
    fn from(error: CheckpointError) -> Self {
        match &error {
            CheckpointError::Io { file, source } => {
                Failure::usage(format!("{file} cannot be read")).because(source)
            }
            _ => Failure::usage_of(&error),
        }
    }
}

impl From<EngineError> for Failure {
    fn from(error: EngineError) -> Self {
        match &error {
            EngineError::EmptyPrompt
            | EngineError::UnknownToken { .. }
            | EngineError::TextFile { .. }
            | EngineError::Sampling(
                SamplingError::OutOfRange { .. }
                | SamplingError::BiasOutOfRange { .. }
                | SamplingError::BiasToken { .. }
                | SamplingError::BiasRepeated { .. },
            ) => Failure::usage_of(&error),
            EngineError::WorkingMemoryExceeded { .. } => {
                Failure::request_of(&error).help("see --memory and --chunk")
            }
            EngineError::Context { model, .. } => {
                Failure::usage_of(&error).help(format!("ask for a --context of at most {model}"))
            }
            EngineError::MemoryExceeded { .. } => {
                Failure::request_of(&error).help("see --max-tokens, --context and --memory")
            }
            _ => Failure::request_of(&error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_tells_message_causes_and_remedy() {
        let cause = std::io::Error::other("no such thing");
        let failure = Failure::usage("x.json cannot be read")
            .because(&cause)
            .help("name another");
        assert_eq!(
            failure.to_text(),
            "error: x.json cannot be read\n  because: no such thing\n  help: name another\n"
        );
    }

    #[test]
    fn messages_do_not_speak_to_the_terminal() {
        let text = Failure::request("a\x1b[2Jb\nc").to_text();
        assert_eq!(text, "error: a\\u{1b}[2Jb\nc\n");
    }

    #[test]
    fn refusals_and_mistakes_have_their_own_status() {
        let refused = EngineError::ContextExceeded {
            prompt: 9,
            context: 8,
            model: 8,
        };
        assert!(matches!(Failure::from(refused), Failure::Request(_)));
        let mistake = EngineError::Sampling(SamplingError::BiasRepeated { token: 1 });
        assert!(matches!(Failure::from(mistake), Failure::Usage(_)));
    }
}
