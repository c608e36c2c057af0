//! The system's C++ compiler.

use std::ffi::{OsStr, OsString};
use std::io::Write;
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;

/// The command of a C++ compiler that answers, or a message that says what to install.
pub(crate) fn command() -> Result<&'static OsStr, String> {
    static FOUND: OnceLock<Result<OsString, String>> = OnceLock::new();
    let found =
        FOUND.get_or_init(
            || match std::env::var_os("CXX").filter(|name| !name.is_empty()) {
                Some(name) => first_that_answers(&[name]),
                None => first_that_answers(&["c++", "g++", "clang++"].map(OsString::from)),
            },
        );
    found.as_deref().map_err(Clone::clone)
}

fn first_that_answers(names: &[OsString]) -> Result<OsString, String> {
    let answers = |name: &&OsString| {
        let status = Command::new(name)
            .arg("--version")
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status();
        status.is_ok_and(|status| status.success())
    };
    names.iter().find(answers).cloned().ok_or_else(|| {
        format!(
            "no C++ compiler: tried {names:?}. Running kernels without a GPU needs one with C++17 (g++ or \
             clang++); install it or name it in CXX"
        )
    })
}

/// Runs the compiler with text on its standard input; its output, or its messages if it fails.
pub(crate) fn run<I, S>(arguments: I, input: &str) -> Result<String, String>
where
    I: IntoIterator<Item = S>,
    S: AsRef<OsStr>,
{
    let output = run_command(command()?, arguments, input)?;
    if output.status.success() {
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    } else {
        Err(String::from_utf8_lossy(&output.stderr).into_owned())
    }
}

/// Runs a command with text on its standard input.
pub(crate) fn run_command<I, S>(name: &OsStr, arguments: I, input: &str) -> Result<Output, String>
where
    I: IntoIterator<Item = S>,
    S: AsRef<OsStr>,
{
    let failed = |error: std::io::Error| format!("{}: {error}", name.display());
    let mut child = Command::new(name)
        .args(arguments)
        .env("LC_ALL", "C")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(failed)?;
    let mut pipe = child.stdin.take().expect("a pipe was asked for");
    let text = input.to_owned();
    // In a thread of its own: the compiler may fill its output pipe before it has read everything.
    let writer = std::thread::spawn(move || {
        // A compiler that stops early closes the pipe; its messages tell more than that.
        let _ = pipe.write_all(text.as_bytes());
    });
    let output = child.wait_with_output().map_err(failed)?;
    let _ = writer.join();
    Ok(output)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_compiler_is_named() {
        let message = first_that_answers(&["no-such-compiler".into()]).unwrap_err();
        assert!(message.starts_with("no C++ compiler: tried [\"no-such-compiler\"]"));
    }
}
