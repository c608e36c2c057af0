//! Prefixes on disk: what a prompt can go on from after a restart.
//!
//! One file a prefix (`format.rs`): its tokens, its cache, and snapshots at some of its positions. The tokens of all files
//! are held in memory, to be compared with prompts. A file that is not what it should be is told once, and then it only
//! takes its room, until it is the one that was used longest ago.

mod format;
mod writer;

use crate::engine::Engine;
use crate::error::EngineError;
use crate::segments::LEAST_SHARE;
use crate::session::Session;
use format::{
    Content, FORMAT, HEADER_BYTES, Header, Kind, MOST_SNAPSHOTS, Section, decode_tokens,
    encode_tokens,
};
use lily_plan::DeviceError;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};
use twox_hash::XxHash3_128;
use writer::{Writer, Written};

/// How names of files end that are counted, used and removed; others in the directory are left alone.
const ENDING: &str = "lily-prefix";
/// The same while they are written.
const UNFINISHED: &str = "lily-prefix-unfinished";

/// Where prefixes are stored.
#[derive(Clone, Debug)]
pub struct DiskOptions {
    /// The directory. It is made where it is not there, for this user alone.
    pub directory: PathBuf,
    /// Most bytes of the files in it. Those used longest ago go for others.
    pub most_bytes: u64,
    /// The checkpoint's identity, and whatever else states depend on that the engine cannot know.
    pub model: String,
    /// How long nobody has to come back for a session before it is written. An agent's next turn takes less, and each
    /// would be written for nothing.
    pub settled: Duration,
}

impl DiskOptions {
    /// A directory for so many bytes of prefixes of a model, written when nobody has come back for half a minute.
    pub fn new(directory: PathBuf, most_bytes: u64, model: String) -> Self {
        DiskOptions {
            directory,
            most_bytes,
            model,
            settled: Duration::from_secs(30),
        }
    }
}

/// What stored prefixes came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskFigures {
    /// Files in the directory, those of other models included.
    pub files: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Prompts that went on from a file.
    pub reads: u64,
    /// Bytes read for them.
    pub read_bytes: u64,
    /// Files written.
    pub writes: u64,
    /// Their bytes.
    pub written_bytes: u64,
    /// Files removed to make room, or as longer ones took their place.
    pub removed: u64,
    /// Files that were not what they should be.
    pub refused: u64,
}

/// A file in the directory.
struct Entry {
    path: PathBuf,
    bytes: u64,
    used: SystemTime,
    /// Nothing for one that cannot be used.
    stored: Option<Stored>,
}

/// What a file of this engine holds.
struct Stored {
    header: Header,
    tokens: Vec<u32>,
}

/// A file that is being written.
pub(crate) struct Saving {
    header: Header,
    sections: std::vec::IntoIter<Section>,
}

/// A directory of prefixes.
pub(crate) struct Disk {
    directory: PathBuf,
    most_bytes: u64,
    /// [`DiskOptions::settled`].
    pub settled: Duration,
    kind: Kind,
    entries: Vec<Entry>,
    /// Those that are written, in their order.
    pending: Vec<Entry>,
    writer: Writer,
    figures: DiskFigures,
    /// What people should know.
    pub warnings: Vec<String>,
}

impl Disk {
    /// Opens the directory and reads which prefixes it has.
    ///
    /// # Errors
    /// Where the directory cannot be made or read.
    pub fn open(engine: &Engine, options: &DiskOptions) -> io::Result<Self> {
        let directory = &options.directory;
        let named = |error: io::Error| {
            let reason = format!("the cache directory {}: {error}", directory.display());
            io::Error::new(error.kind(), reason)
        };
        make_private(directory).map_err(named)?;
        let mut disk = Disk {
            directory: directory.clone(),
            most_bytes: options.most_bytes,
            settled: options.settled,
            kind: kind(engine, &options.model),
            entries: Vec::new(),
            pending: Vec::new(),
            writer: Writer::start()?,
            figures: DiskFigures::default(),
            warnings: Vec::new(),
        };
        for found in fs::read_dir(directory).map_err(named)? {
            disk.add(&found.map_err(named)?.path());
        }
        // There may be less room than there was.
        disk.make_room(0, &[]);
        Ok(disk)
    }

    pub fn figures(&self) -> DiskFigures {
        DiskFigures {
            files: self.entries.len(),
            bytes: self.entries.iter().map(|entry| entry.bytes).sum(),
            ..self.figures
        }
    }

    /// Reads a file's header and tokens.
    fn add(&mut self, path: &Path) {
        let ending = path.extension();
        if ending.is_some_and(|ending| ending == UNFINISHED) {
            // Left by a process that was ended. One that is at it now fails to move the file, and tells.
            let _ = fs::remove_file(path);
        }
        if ending.is_none_or(|ending| ending != ENDING) {
            return;
        }
        let metadata = match fs::symlink_metadata(path) {
            Ok(metadata) if metadata.is_file() => metadata,
            Ok(_) => return self.refuse(path, "it is no file"),
            Err(error) => return self.refuse(path, &error.to_string()),
        };
        let stored = match open_stored(path, self.kind) {
            Ok((_, stored)) => Some(stored),
            Err(reason) => {
                self.refuse(path, &reason);
                None
            }
        };
        self.entries.push(Entry {
            path: path.to_path_buf(),
            bytes: metadata.len(),
            used: metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH),
            stored,
        });
    }

    fn refuse(&mut self, path: &Path, reason: &str) {
        self.figures.refused += 1;
        self.warn(format!(
            "the stored prefix {} is ignored: {reason}",
            path.display()
        ));
    }

    fn warn(&mut self, warning: String) {
        self.warnings.push(warning);
    }

    /// The file that has most of a prompt: which, and the position to go on from. The prompt's last token is always
    /// computed.
    pub fn find(&self, prompt: &[u32]) -> Option<(PathBuf, usize)> {
        let usable = |entry: &Entry| {
            let stored = entry.stored.as_ref()?;
            let both = stored.tokens.iter().zip(prompt);
            let shared = both.take_while(|(ours, theirs)| ours == theirs).count();
            let most = shared.min(prompt.len().saturating_sub(1));
            let positions = stored.header.snapshots().iter().rev();
            positions.copied().find(|&position| position <= most)
        };
        let found = self
            .entries
            .iter()
            .filter_map(|entry| Some((entry, usable(entry)?)));
        let (entry, position) = found.max_by_key(|(_, position)| *position)?;
        Some((entry.path.clone(), position))
    }

    /// A session for up to `capacity` tokens behind the first `position` of a file that [`find`](Self::find) gave; none
    /// where memory is short, or the file is of no use.
    pub fn load(
        &mut self,
        engine: &Engine,
        path: &Path,
        position: usize,
        capacity: usize,
    ) -> Option<Session> {
        match self.read(engine, path, position, capacity) {
            Ok((session, bytes)) => {
                self.figures.reads += 1;
                self.figures.read_bytes += bytes;
                Some(session)
            }
            Err(Unread::Memory) => None,
            Err(Unread::Bad(reason)) => {
                self.refuse(path, &reason);
                let mut entries = self.entries.iter_mut();
                if let Some(entry) = entries.find(|entry| entry.path == path) {
                    entry.stored = None;
                }
                None
            }
        }
    }

    fn read(
        &self,
        engine: &Engine,
        path: &Path,
        position: usize,
        capacity: usize,
    ) -> Result<(Session, u64), Unread> {
        // It may be another than it was.
        let (mut file, stored) = open_stored(path, self.kind)?;
        let known = self.entries.iter().find(|entry| entry.path == path);
        let Some(known) = known.and_then(|entry| entry.stored.as_ref()) else {
            // It went for what was written since it was found.
            return Err(Unread::Memory);
        };
        if known.tokens != stored.tokens || known.header != stored.header {
            return Err(Unread::Bad("it has changed".into()));
        }
        let mut session = engine.open_session(capacity)?;
        let mut snapshots = Vec::new();
        let mut read = 0;
        for section in stored.header.sections() {
            let is_wanted = match &section.what {
                Content::Tokens => false,
                Content::Snapshot(at) => *at <= position,
                Content::Cache(positions) => positions.end <= position,
            };
            if !is_wanted {
                continue;
            }
            let bytes = stored.header.read(&mut file, &section)?;
            read += bytes.len() as u64;
            match section.what {
                Content::Tokens => {}
                Content::Snapshot(at) => {
                    snapshots.push(session.state.import_snapshot(at, &bytes)?);
                }
                Content::Cache(positions) => session.state.import_cache(positions, &bytes)?,
            }
        }
        let last = snapshots.last().expect("there is one at the position");
        session.state.restore(last.as_ref())?;
        session.tokens.extend_from_slice(&stored.tokens[..position]);
        for snapshot in snapshots {
            engine.keep_imported(&mut session, snapshot);
        }
        Ok((session, read))
    }

    /// Notes that a file is of use: here, and for processes to come.
    pub fn touch(&mut self, path: &Path) {
        let now = SystemTime::now();
        let mut entries = self.entries.iter_mut();
        if let Some(entry) = entries.find(|entry| entry.path == path) {
            entry.used = now;
        }
        // Of use it is all the same.
        let _ = File::options()
            .append(true)
            .open(path)
            .and_then(|file| file.set_modified(now));
    }

    /// Begins to write what a session holds up to its last snapshot; nothing where that is not worth it, stored already
    /// or too large. No run of the session is under way.
    pub fn begin(&mut self, engine: &Engine, session: &Session) -> Option<Saving> {
        self.collect();
        let position = session.reusable();
        // Less than a chunk is computed in the time that reading takes.
        if position < engine.options().prefill_chunk {
            return None;
        }
        let tokens = &session.tokens[..position];
        let all = || self.entries.iter().chain(&self.pending);
        let covering = all().find(|entry| {
            let stored = entry.stored.as_ref();
            stored.is_some_and(|stored| stored.tokens.starts_with(tokens))
        });
        if let Some(covering) = covering.map(|entry| entry.path.clone()) {
            self.touch(&covering);
            return None;
        }
        let continued = all().filter(|entry| {
            let stored = entry.stored.as_ref();
            stored.is_some_and(|stored| tokens.starts_with(&stored.tokens))
        });
        let continued: Vec<PathBuf> = continued.map(|entry| entry.path.clone()).collect();
        let kept: Vec<usize> = session.kept.iter().map(|kept| kept.position()).collect();
        let last = kept.len().saturating_sub(MOST_SNAPSHOTS - 1);
        // That behind the first message serves every conversation with the same instructions and tools.
        let stops = engine.segments().stops;
        let first = tokens.iter().position(|token| stops.contains(token));
        let first = first.map_or(0, |at| kept[..last].partition_point(|&kept| kept <= at + 1));
        let first = first.saturating_sub(1)..first.max(1).min(last);
        let snapshots = kept[first].iter().chain(&kept[last..]);
        let snapshot_bytes = session.kept.last()?.snapshot().bytes();
        let header = Header::new(self.kind, snapshot_bytes, snapshots.copied().collect());
        let bytes = header.length();
        if !self.make_room(bytes, &continued) {
            return None;
        }
        let encoded = encode_tokens(tokens);
        let name = XxHash3_128::oneshot_with_seed(self.kind.fingerprint as u64, &encoded);
        let path = self.directory.join(format!("{name:032x}.{ENDING}"));
        let process = std::process::id();
        let beside = self
            .directory
            .join(format!("{name:032x}-{process}.{UNFINISHED}"));
        self.writer.begin(beside, path.clone());
        self.writer.bytes(header.encode());
        self.pending.push(Entry {
            path,
            bytes,
            used: SystemTime::now(),
            stored: Some(Stored {
                header: header.clone(),
                tokens: tokens.to_vec(),
            }),
        });
        Some(Saving {
            sections: header.sections().into_iter(),
            header,
        })
    }

    /// Writes the next part of what [`begin`](Self::begin) began with; false where that was the last.
    pub fn proceed(&mut self, session: &Session, saving: &mut Saving) -> bool {
        let Some(section) = saving.sections.next() else {
            self.writer.end();
            return false;
        };
        let content = match &section.what {
            Content::Tokens => {
                let position = saving.header.positions();
                Some(encode_tokens(&session.tokens[..position]))
            }
            Content::Snapshot(position) => {
                let mut kept = session.kept.iter();
                let kept = kept.find(|kept| kept.position() == *position);
                kept.map(|kept| kept.snapshot().export())
            }
            Content::Cache(positions) => session.state.export_cache(positions.clone()).ok(),
        };
        match content {
            Some(mut bytes) if bytes.len() == section.bytes => {
                bytes.extend(saving.header.sum(&section, &bytes));
                self.writer.bytes(bytes);
                true
            }
            // What a session was found to hold, it holds: this is for a device that fails.
            _ => {
                self.abandon();
                false
            }
        }
    }

    /// Gives up what was begun with.
    pub fn abandon(&mut self) {
        self.writer.abandon();
        self.pending.pop();
    }

    /// Takes note of what was written.
    pub fn collect(&mut self) {
        let reports: Vec<Written> = self.writer.reports().collect();
        for Written { path, result } in reports {
            let mut pending = self.pending.iter();
            let Some(index) = pending.position(|entry| entry.path == path) else {
                continue;
            };
            let entry = self.pending.remove(index);
            match result {
                Ok(()) => self.written(entry),
                Err(error) => self.warn(format!(
                    "a prefix could not be stored as {}: {error}",
                    path.display()
                )),
            }
        }
    }

    fn written(&mut self, entry: Entry) {
        self.figures.writes += 1;
        self.figures.written_bytes += entry.bytes;
        // One of the same name, damaged, was replaced.
        self.entries.retain(|known| known.path != entry.path);
        let tokens = entry.stored.as_ref().map(|stored| stored.tokens.as_slice());
        let continued = self.entries.iter().filter(|known| {
            let (known, tokens) = (known.stored.as_ref(), tokens.unwrap_or_default());
            known.is_some_and(|known| tokens.starts_with(&known.tokens))
        });
        let continued: Vec<PathBuf> = continued.map(|known| known.path.clone()).collect();
        for path in continued {
            self.remove(&path);
        }
        self.entries.push(entry);
    }

    /// Waits for all that is written.
    pub fn finish(&mut self) {
        self.writer.finish();
        self.collect();
    }

    /// Removes files until another of `bytes` has room: those that it continues first, then those that were used longest
    /// ago. False where it never has.
    fn make_room(&mut self, bytes: u64, continued: &[PathBuf]) -> bool {
        let sum = |entries: &[Entry]| entries.iter().map(|entry| entry.bytes).sum::<u64>();
        // What is written now cannot go.
        let bytes = bytes.saturating_add(sum(&self.pending));
        if bytes > self.most_bytes {
            return false;
        }
        loop {
            if sum(&self.entries).saturating_add(bytes) <= self.most_bytes {
                return true;
            }
            let goes_first = |entry: &&Entry| (!continued.contains(&entry.path), entry.used);
            let Some(oldest) = self.entries.iter().min_by_key(goes_first) else {
                return true;
            };
            let path = oldest.path.clone();
            self.remove(&path);
        }
    }

    fn remove(&mut self, path: &Path) {
        self.entries.retain(|entry| entry.path != path);
        self.figures.removed += 1;
        match fs::remove_file(path) {
            Ok(()) => {}
            // Another process that shares the directory was faster.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => self.warn(format!("{} cannot be removed: {error}", path.display())),
        }
    }
}

/// What went wrong with reading.
enum Unread {
    Memory,
    Bad(String),
}

impl From<EngineError> for Unread {
    fn from(error: EngineError) -> Self {
        match error {
            EngineError::MemoryExceeded { .. }
            | EngineError::Device(DeviceError::OutOfMemory { .. }) => Unread::Memory,
            error => Unread::Bad(error.to_string()),
        }
    }
}

impl From<DeviceError> for Unread {
    fn from(error: DeviceError) -> Self {
        EngineError::from(error).into()
    }
}

impl From<String> for Unread {
    fn from(reason: String) -> Self {
        Unread::Bad(reason)
    }
}

/// A file, with its header and tokens read.
fn open_stored(path: &Path, kind: Kind) -> Result<(File, Stored), String> {
    let failed = |error: io::Error| error.to_string();
    // To open something else may take for ever.
    if !fs::symlink_metadata(path).map_err(failed)?.is_file() {
        return Err("it is no file".into());
    }
    let mut file = File::open(path).map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    let mut bytes = [0; HEADER_BYTES];
    match file.read_exact(&mut bytes) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            return Err("it ends within its header".into());
        }
        Err(error) => return Err(error.to_string()),
    }
    let header = Header::parse(&bytes, kind, metadata.len())?;
    let tokens = header.read(&mut file, &header.sections()[0])?;
    let tokens = decode_tokens(&tokens);
    Ok((file, Stored { header, tokens }))
}

/// What the files of this engine have in common. States of other kernels have other bits: an answer would depend on
/// who computed its beginning.
fn kind(engine: &Engine, model: &str) -> Kind {
    let options = engine.options();
    let device = engine.device();
    let segments = engine.segments();
    let bytes = engine.device.session_bytes(options.precision);
    let all = [
        env!("CARGO_PKG_VERSION"),
        model,
        &FORMAT.to_string(),
        &options.precision.to_string(),
        &format!("{LEAST_SHARE} {segments:?}"),
        &device.device,
        &device.hardware,
        &device.kernels,
        &program(),
    ]
    .join("\n");
    Kind {
        fingerprint: XxHash3_128::oneshot(all.as_bytes()),
        position_bytes: bytes.each_position,
        most_positions: engine.context(),
        most_snapshot_bytes: bytes.fixed,
    }
}

/// What this program is: another build of it may compute otherwise in the last bits.
fn program() -> String {
    let file = std::env::current_exe().and_then(std::fs::read);
    file.map_or(String::new(), |bytes| {
        format!("{:032x}", XxHash3_128::oneshot(&bytes))
    })
}

/// Makes a directory that only this user looks into, where there is none.
fn make_private(directory: &Path) -> io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(directory)
}
