//! The built command in a terminal of its own: what is typed into it, and what it shows.

use pty_process::Size;
use pty_process::blocking::{Command, Pty, open};
use std::io::{Read, Write};
use std::path::Path;
use std::process::Child;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

pub const ENTER: &str = "\r";
pub const CTRL_C: &str = "\x03";
pub const CTRL_D: &str = "\x04";
pub const UP: &str = "\x1b[A";
/// What dims the text behind it.
pub const DIM: &str = "\x1b[2m";
/// Where is the cursor? Terminals answer with a row and a column.
const CURSOR: &str = "\x1b[6n";
/// The editor is ready: it asks for pasted text to be marked.
const EDITING: &str = "\x1b[?2004h";

/// A terminal in which the command runs.
pub struct Terminal {
    pty: Arc<Pty>,
    child: Child,
    shown: Arc<Shown>,
    /// How much of what it shows has been looked at.
    seen: usize,
}

#[derive(Default)]
struct Shown {
    text: Mutex<(String, bool)>,
    changed: Condvar,
}

impl Shown {
    fn lock(&self) -> MutexGuard<'_, (String, bool)> {
        // A test that fails holds it.
        self.text.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Terminal {
    /// Starts the command with a home directory of its own.
    pub fn new(home: &Path, arguments: &[&str], environment: &[(&str, &str)]) -> Self {
        let (pty, pts) = open().unwrap();
        pty.resize(Size::new(24, 100)).unwrap();
        let child = Command::new(env!("CARGO_BIN_EXE_lily"))
            .args(arguments)
            .env("HOME", home)
            .env("TERM", "xterm-256color")
            .env_remove("XDG_STATE_HOME")
            .env_remove("NO_COLOR")
            .envs(environment.iter().copied())
            .spawn(pts)
            .unwrap();
        let pty = Arc::new(pty);
        let shown = Arc::new(Shown::default());
        let (reader, sink) = (pty.clone(), shown.clone());
        std::thread::spawn(move || read(&reader, &sink));
        Terminal {
            pty,
            child,
            shown,
            seen: 0,
        }
    }

    /// Types.
    pub fn send(&self, keys: &str) {
        (&*self.pty).write_all(keys.as_bytes()).unwrap();
    }

    /// Waits until `text` is shown, behind what was seen before.
    #[track_caller]
    pub fn sees(&mut self, text: &str) {
        let begun = Instant::now();
        let mut shown = self.shown.lock();
        loop {
            if let Some(at) = shown.0[self.seen..].find(text) {
                self.seen += at + text.len();
                return;
            }
            let left = Duration::from_secs(60).saturating_sub(begun.elapsed());
            if left.is_zero() || shown.1 {
                let rest = &shown.0[self.seen..];
                panic!("{text:?} is not shown; since the last that was: {rest:?}");
            }
            shown = self.shown.changed.wait_timeout(shown, left).unwrap().0;
        }
    }

    /// Waits until a line can be typed, in the editor.
    #[track_caller]
    pub fn ready(&mut self) {
        self.sees(EDITING);
    }

    /// All that was shown.
    pub fn transcript(&self) -> String {
        self.shown.lock().0.clone()
    }

    /// The status of the command, which must come to its end.
    #[track_caller]
    pub fn status(&mut self) -> Option<i32> {
        status_of(&mut self.child)
    }
}

/// The status of a command, which must come to its end.
#[track_caller]
pub fn status_of(child: &mut Child) -> Option<i32> {
    let begun = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status.code();
        }
        if begun.elapsed() > Duration::from_secs(20) {
            child.kill().unwrap();
            panic!("it does not end");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Takes what is shown, and answers as terminals do.
fn read(mut pty: &Pty, shown: &Shown) {
    let mut bytes = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        let count = pty.read(&mut buffer).unwrap_or(0);
        bytes.extend_from_slice(&buffer[..count]);
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let asked = |text: &str| text.matches(CURSOR).count();
        let mut state = shown.lock();
        for _ in asked(&state.0)..asked(&text) {
            let _ = pty.write_all(b"\x1b[1;1R");
        }
        *state = (text, count == 0);
        shown.changed.notify_all();
        if count == 0 {
            return;
        }
    }
}
