//! Runs the built command as a user does: arguments, streams, status.
#![allow(dead_code)]

use serde_json::Value;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// What a run left behind.
#[derive(Debug)]
pub struct Ran {
    pub status: Option<i32>,
    pub output: String,
    pub errors: String,
}

impl Ran {
    fn of(output: Output) -> Self {
        Ran {
            status: output.status.code(),
            output: String::from_utf8(output.stdout).unwrap(),
            errors: String::from_utf8(output.stderr).unwrap(),
        }
    }

    /// The run, which must have worked.
    #[track_caller]
    pub fn worked(self) -> Self {
        assert_eq!(self.status, Some(0), "{}", self.errors);
        self
    }

    /// The run's JSON; it must have worked.
    #[track_caller]
    pub fn json(self) -> Value {
        serde_json::from_str(&self.worked().output).unwrap()
    }

    /// Checks that the run failed as it must: with `status`, nothing in standard output, and an error
    /// that names `named`.
    #[track_caller]
    pub fn failed(&self, status: i32, named: &str) {
        assert_eq!(self.status, Some(status), "{self:?}");
        assert_eq!(self.output, "", "{self:?}");
        assert!(self.errors.starts_with("error: "), "{self:?}");
        assert!(self.errors.contains(named), "{named:?} in {}", self.errors);
        assert!(!self.errors.contains("panicked"), "{self:?}");
    }
}

/// The command, its standard input empty.
pub fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lily"));
    command.args(arguments).stdin(Stdio::null());
    command
}

/// Runs it with nothing in standard input.
pub fn lily(arguments: &[&str]) -> Ran {
    Ran::of(command(arguments).output().unwrap())
}

/// Runs it with `input` in standard input.
pub fn lily_with_input(arguments: &[&str], input: &[u8]) -> Ran {
    let mut child = command(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // A command that refuses its arguments does not wait for its input.
    let _ = child.stdin.take().unwrap().write_all(input);
    Ran::of(child.wait_with_output().unwrap())
}

/// A path in the repository.
pub fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .join(path)
}

/// A case of the embedded model's recorded answers.
pub fn expected(id: &str) -> Value {
    let text = std::fs::read_to_string(repository("models/lily-tiny/expected.jsonl")).unwrap();
    text.lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap())
        .find(|case| case["id"] == id)
        .unwrap()
}

/// Writes `content` to a file in `directory` and returns its path.
pub fn file(directory: &tempfile::TempDir, name: &str, content: &str) -> String {
    let path = directory.path().join(name);
    std::fs::write(&path, content).unwrap();
    path.to_str().unwrap().to_string()
}
