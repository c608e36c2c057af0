//! The thread that writes files, so that nothing that is computed waits for a disk but for its queue.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, SyncSender, TryIter, channel, sync_channel};
use std::thread::JoinHandle;

/// So many parts may wait for the disk: they take memory beside the budget, a snapshot's the most.
const WAITING: usize = 1;

enum Message {
    /// Another file, to be written beside its place and moved there when it is whole.
    Begin { beside: PathBuf, path: PathBuf },
    /// More of it.
    Bytes(Vec<u8>),
    /// It is whole.
    End,
    /// It is not wanted any more.
    Abandon,
}

/// What became of a file.
pub struct Written {
    pub path: PathBuf,
    pub result: io::Result<()>,
}

/// The thread, from outside. Files are written one after the other.
pub struct Writer {
    messages: Option<SyncSender<Message>>,
    reports: Receiver<Written>,
    thread: Option<JoinHandle<()>>,
}

impl Writer {
    pub fn start() -> io::Result<Self> {
        let (messages, received) = sync_channel(WAITING);
        let (report, reports) = channel();
        let thread = std::thread::Builder::new()
            .name("prefixes".into())
            .spawn(move || write_files(&received, &report))?;
        Ok(Writer {
            messages: Some(messages),
            reports,
            thread: Some(thread),
        })
    }

    pub fn begin(&self, beside: PathBuf, path: PathBuf) {
        self.send(Message::Begin { beside, path });
    }

    pub fn bytes(&self, bytes: Vec<u8>) {
        self.send(Message::Bytes(bytes));
    }

    pub fn end(&self) {
        self.send(Message::End);
    }

    pub fn abandon(&self) {
        self.send(Message::Abandon);
    }

    fn send(&self, message: Message) {
        if let Some(messages) = &self.messages {
            // The thread ends behind its last message alone.
            let _ = messages.send(message);
        }
    }

    /// What was written, or failed, since this was last asked.
    pub fn reports(&self) -> TryIter<'_, Written> {
        self.reports.try_iter()
    }

    /// Waits for all that was sent.
    pub fn finish(&mut self) {
        self.messages = None;
        if let Some(thread) = self.thread.take() {
            // What it had to say, it has reported.
            let _ = thread.join();
        }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.finish();
    }
}

fn write_files(messages: &Receiver<Message>, report: &Sender<Written>) {
    while let Ok(message) = messages.recv() {
        if let Message::Begin { beside, path } = message {
            let result = write_file(messages, &beside, &path);
            if !matches!(result, Ok(true)) {
                // Nothing of it stays, if it can be helped.
                let _ = fs::remove_file(&beside);
            }
            let result = match result {
                Ok(false) => continue,
                other => other.map(|_| ()),
            };
            // Nobody may be there any more to hear it.
            let _ = report.send(Written { path, result });
        }
    }
}

/// Writes what follows, to the end of the file; false where that is not wanted any more.
fn write_file(messages: &Receiver<Message>, beside: &Path, path: &Path) -> io::Result<bool> {
    let mut file = create(beside);
    loop {
        match messages.recv() {
            Ok(Message::Bytes(bytes)) => {
                let written = file.as_mut().map(|file| file.write_all(&bytes));
                if let Ok(Err(error)) = written {
                    // What follows is passed over.
                    file = Err(error);
                }
            }
            // Not synchronised: what a loss of power leaves of it, the checksums find.
            Ok(Message::End) => {
                file?;
                return fs::rename(beside, path).map(|()| true);
            }
            Ok(Message::Abandon | Message::Begin { .. }) | Err(_) => return Ok(false),
        }
    }
}

/// A new file that only this user reads: it holds what people wrote.
fn create(path: &Path) -> io::Result<File> {
    // One that an earlier process of the same number left.
    let _ = fs::remove_file(path);
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.open(path)
}
