//! The status line: what is being done and for how long, on a terminal, once it takes over a second.

use crate::format::{bytes, counted, grouped};
use std::io::Write;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Nothing is shown before something has taken this long without printing anything.
const PATIENCE: Duration = Duration::from_secs(1);
/// How often the line is looked at.
const TICK: Duration = Duration::from_millis(250);

/// The last line of the terminal that standard error is, while it has no text in it.
///
/// A thread of its own keeps the line current, whatever the command is busy with. All that is written goes
/// through [`Status::aside_of`], so that the line is gone before and the two never mix.
pub struct Status {
    shared: Arc<Shared>,
    /// Whether anybody watches; without that, there is neither line nor thread.
    watched: bool,
    ticker: Option<JoinHandle<()>>,
}

/// What the command and the thread share.
struct Shared {
    screen: Mutex<Screen>,
    changed: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Screen> {
        self.screen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Status {
    /// A line that is shown if it is `watched`.
    pub fn new(watched: bool) -> Self {
        let shared = Arc::new(Shared {
            screen: Mutex::new(Screen::default()),
            changed: Condvar::new(),
        });
        let of_thread = shared.clone();
        // Where no thread can be had, there is no line: nothing else depends on it.
        let ticker = watched
            .then(|| std::thread::Builder::new().name("status".into()))
            .and_then(|builder| builder.spawn(move || tick(&of_thread)).ok());
        Status {
            shared,
            watched,
            ticker,
        }
    }

    /// Something begins: `reading the prompt`.
    pub fn begin(&self, label: &'static str) {
        self.change(|screen, now| screen.begin(label, now));
    }

    /// How many tokens are done, of how many if that is known.
    pub fn advance(&self, done: usize, total: Option<usize>) {
        self.come_to(|now| Come::tokens(done, total, now));
    }

    /// How many bytes are done, of how many.
    pub fn advance_bytes(&self, done: u64, total: u64) {
        self.come_to(|now| Come::bytes(done, total, now));
    }

    fn come_to(&self, come: impl FnOnce(Instant) -> Come) {
        self.change(|screen, now| {
            if let Some(activity) = &mut screen.activity {
                activity.come = Some(come(now));
            }
        });
    }

    /// It is over; the line goes away.
    pub fn end(&self) {
        self.change(|screen, _| {
            screen.activity = None;
            screen.busy = None;
            screen.erase(&mut std::io::stderr());
        });
    }

    /// Writes something by `write`, the line erased before. `text` is what is written, to know whether it
    /// ends its line.
    pub fn aside_of<T>(&self, text: &str, write: impl FnOnce() -> T) -> T {
        if !self.watched {
            return write();
        }
        let mut screen = self.shared.lock();
        screen.erase(&mut std::io::stderr());
        let written = write();
        screen.wrote(text, Instant::now());
        written
    }

    /// What takes the line away from another thread, before the process ends there.
    pub fn eraser(&self) -> impl Fn() + Send + use<> {
        let shared = self.shared.clone();
        move || {
            // Whoever holds the line may be stuck in writing: the process is to end all the same.
            if let Ok(mut screen) = shared.screen.try_lock() {
                screen.activity = None;
                screen.erase(&mut std::io::stderr());
            }
        }
    }

    fn change(&self, change: impl FnOnce(&mut Screen, Instant)) {
        if self.watched {
            change(&mut self.shared.lock(), Instant::now());
            self.shared.changed.notify_one();
        }
    }
}

impl Drop for Status {
    fn drop(&mut self) {
        self.change(|screen, _| screen.closed = true);
        self.end();
        if let Some(ticker) = self.ticker.take() {
            let _ = ticker.join();
        }
    }
}

/// Draws while there is something to draw; sleeps while nothing is going on.
fn tick(shared: &Shared) {
    let mut screen = shared.lock();
    while !screen.closed {
        let wait = if screen.activity.is_some() {
            screen.draw(Instant::now(), &mut std::io::stderr());
            TICK
        } else {
            Duration::from_secs(3600)
        };
        // A change wakes the thread only where it slept for want of anything to show.
        let idle = screen.activity.is_none();
        screen = shared
            .changed
            .wait_timeout_while(screen, wait, |screen| {
                !screen.closed && (!idle || screen.activity.is_none())
            })
            .unwrap_or_else(PoisonError::into_inner)
            .0;
    }
}

/// What stands on the terminal's last line, and what could.
#[derive(Default)]
struct Screen {
    activity: Option<Activity>,
    /// Since when one activity has followed the other.
    busy: Option<Instant>,
    /// The line as it is shown.
    shown: Option<String>,
    /// When something was last written, and whether that left text in the line.
    wrote: Option<Instant>,
    in_line: bool,
    closed: bool,
}

impl Screen {
    fn begin(&mut self, label: &'static str, now: Instant) {
        self.activity = Some(Activity::new(label, now));
        self.busy.get_or_insert(now);
    }

    /// Shows the line, if it is time for one and there is room.
    fn draw(&mut self, now: Instant, terminal: &mut impl Write) {
        let Some(activity) = &self.activity else {
            return;
        };
        let busy = self.busy.unwrap_or(activity.began);
        let since = self.wrote.map_or(busy, |at| at.max(busy));
        // A line that is shown stays, from one activity to the next.
        let early = self.shown.is_none() && now.saturating_duration_since(since) < PATIENCE;
        if early || self.in_line {
            return;
        }
        let text = activity.to_text(now);
        if self.shown.as_ref() != Some(&text) {
            let _ = write!(terminal, "\r\x1b[K{text}");
            let _ = terminal.flush();
            self.shown = Some(text);
        }
    }

    fn erase(&mut self, terminal: &mut impl Write) {
        if self.shown.take().is_some() {
            let _ = write!(terminal, "\r\x1b[K");
            let _ = terminal.flush();
        }
    }

    fn wrote(&mut self, text: &str, now: Instant) {
        if !text.is_empty() {
            self.in_line = !text.ends_with('\n');
            self.wrote = Some(now);
        }
    }
}

/// Something that takes time.
struct Activity {
    label: &'static str,
    began: Instant,
    come: Option<Come>,
}

/// How far it was at some time.
struct Come {
    /// As people read it.
    told: String,
    done: f64,
    total: Option<f64>,
    at: Instant,
}

impl Come {
    fn tokens(done: usize, total: Option<usize>, at: Instant) -> Self {
        let told = total.map_or_else(
            || counted(done, "token"),
            |total| format!("{} of {}", grouped(done as u64), counted(total, "token")),
        );
        Come {
            told,
            done: done as f64,
            total: total.map(|total| total as f64),
            at,
        }
    }

    fn bytes(done: u64, total: u64, at: Instant) -> Self {
        Come {
            told: format!("{} of {}", bytes(done), bytes(total)),
            done: done as f64,
            total: Some(total as f64),
            at,
        }
    }
}

impl Activity {
    fn new(label: &'static str, began: Instant) -> Self {
        Activity {
            label,
            began,
            come: None,
        }
    }

    fn to_text(&self, now: Instant) -> String {
        let label = self.label;
        let seconds = now.saturating_duration_since(self.began).as_secs();
        let Some(Come {
            told,
            done,
            total,
            at,
        }) = &self.come
        else {
            return format!("{label}: {seconds} s");
        };
        // What is left is reckoned from when the count was last right.
        let spent = at.saturating_duration_since(self.began).as_secs_f64();
        let left = total.map_or(0.0, |total| {
            (total - done).max(0.0) * spent / done
                - now.saturating_duration_since(*at).as_secs_f64()
        });
        if *done > 0.0 && left > 0.5 {
            format!("{label}: {told}, {seconds} s, about {left:.0} s left")
        } else {
            format!("{label}: {told}, {seconds} s")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(start: Instant, seconds: f64) -> Instant {
        start + Duration::from_secs_f64(seconds)
    }

    /// What is drawn at a time.
    fn drawn(screen: &mut Screen, now: Instant) -> String {
        let mut terminal = Vec::new();
        screen.draw(now, &mut terminal);
        String::from_utf8(terminal).unwrap()
    }

    #[test]
    fn the_line_tells_what_is_done_and_for_how_long() {
        let start = Instant::now();
        let mut activity = Activity::new("reading the prompt", start);
        let at = |seconds| after(start, seconds);
        assert_eq!(activity.to_text(at(4.2)), "reading the prompt: 4 s");
        let tokens = |done, total, seconds| Some(Come::tokens(done, total, after(start, seconds)));
        activity.come = tokens(0, Some(3_000), 0.0);
        assert_eq!(
            activity.to_text(at(4.0)),
            "reading the prompt: 0 of 3,000 tokens, 4 s"
        );
        activity.come = tokens(1_000, Some(3_000), 4.0);
        assert_eq!(
            activity.to_text(at(5.0)),
            "reading the prompt: 1,000 of 3,000 tokens, 5 s, about 7 s left"
        );
        // A guess that was too short is not told.
        assert_eq!(
            activity.to_text(at(99.0)),
            "reading the prompt: 1,000 of 3,000 tokens, 99 s"
        );
        let mut activity = Activity::new("answering", start);
        activity.come = tokens(120, None, 9.0);
        assert_eq!(activity.to_text(at(9.0)), "answering: 120 tokens, 9 s");
        activity.come = Some(Come::bytes(
            5_000_000_000,
            19_500_000_000,
            after(start, 4.0),
        ));
        assert_eq!(
            activity.to_text(after(start, 4.0)),
            "answering: 5.00 GB of 19.5 GB, 4 s, about 12 s left"
        );
    }

    #[test]
    fn the_line_waits_a_second_and_ticks() {
        let start = Instant::now();
        let mut screen = Screen::default();
        assert_eq!(drawn(&mut screen, start), "");
        // Many short things are one long wait.
        screen.begin("reading the prompt", start);
        screen.begin("answering", after(start, 0.9));
        assert_eq!(
            drawn(&mut screen, after(start, 1.0)),
            "\r\x1b[Kanswering: 0 s"
        );
        let mut screen = Screen::default();
        screen.begin("answering", start);
        assert_eq!(drawn(&mut screen, after(start, 0.9)), "");
        assert_eq!(
            drawn(&mut screen, after(start, 1.0)),
            "\r\x1b[Kanswering: 1 s"
        );
        // Nothing is written again while nothing has changed.
        assert_eq!(drawn(&mut screen, after(start, 1.5)), "");
        assert_eq!(
            drawn(&mut screen, after(start, 2.0)),
            "\r\x1b[Kanswering: 2 s"
        );
    }

    #[test]
    fn the_line_goes_before_other_output_and_stays_out_of_it() {
        let start = Instant::now();
        let mut screen = Screen {
            activity: Some(Activity::new("answering", start)),
            ..Screen::default()
        };
        assert_ne!(drawn(&mut screen, after(start, 3.0)), "");
        let mut terminal = Vec::new();
        screen.erase(&mut terminal);
        screen.erase(&mut terminal);
        assert_eq!(terminal, b"\r\x1b[K", "erased once");
        screen.wrote("Once upon", after(start, 3.0));
        assert_eq!(
            drawn(&mut screen, after(start, 9.0)),
            "",
            "text is in the line"
        );
        screen.wrote(" a time\n", after(start, 9.0));
        assert_eq!(drawn(&mut screen, after(start, 9.9)), "");
        assert_eq!(
            drawn(&mut screen, after(start, 10.0)),
            "\r\x1b[Kanswering: 10 s"
        );
    }

    #[test]
    fn what_is_not_watched_has_no_thread() {
        let status = Status::new(false);
        assert!(status.ticker.is_none());
        status.begin("answering");
        assert_eq!(status.aside_of("text", || 7), 7);
        assert!(status.shared.lock().activity.is_none());
    }

    #[test]
    fn the_thread_ends_with_its_status() {
        let status = Status::new(true);
        status.begin("answering");
        status.end();
        drop(status);
    }
}
