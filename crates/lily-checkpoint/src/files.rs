//! Where a checkpoint's files come from: a directory, whose large files are mapped, or memory.

use crate::error::CheckpointError;
use memmap2::Mmap;
use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::ops::Deref;
use std::path::{Component, Path, PathBuf};

/// Longest `config.json` that is read; the real one has 24 KB.
pub(crate) const MAX_CONFIG_BYTES: u64 = 16 << 20;
/// Longest shard index that is read; the real one has 200 KB.
pub(crate) const MAX_INDEX_BYTES: u64 = 64 << 20;
/// Longest other small file that is read; the real `tokenizer.json` has 20 MB.
pub(crate) const MAX_SMALL_BYTES: u64 = 128 << 20;

/// The content of a large file.
pub(crate) enum Content {
    Mapped(Mmap),
    Static(&'static [u8]),
}

impl Deref for Content {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Content::Mapped(map) => map,
            Content::Static(bytes) => bytes,
        }
    }
}

/// A checkpoint's files by name.
pub(crate) enum Source {
    Directory(PathBuf),
    Memory(HashMap<String, &'static [u8]>),
}

impl Source {
    /// What errors call the file.
    pub fn display(&self, name: &str) -> String {
        match self {
            Source::Directory(directory) => directory.join(name).display().to_string(),
            Source::Memory(_) => name.to_string(),
        }
    }

    /// Whether there is such a file.
    pub fn has(&self, name: &str) -> bool {
        match self {
            // Where the system does not say, reading it will.
            Source::Directory(directory) => directory.join(name).try_exists().unwrap_or(true),
            Source::Memory(files) => files.contains_key(name),
        }
    }

    /// A file read whole, of at most `limit` bytes; `None` where there is none.
    pub fn small(&self, name: &str, limit: u64) -> Option<Result<Vec<u8>, CheckpointError>> {
        if !is_plain_name(name) || !self.has(name) {
            return None;
        }
        Some(match self {
            Source::Directory(directory) => {
                read_capped(&directory.join(name), &self.display(name), limit)
            }
            Source::Memory(files) => match files.get(name) {
                Some(bytes) if bytes.len() as u64 <= limit => Ok(bytes.to_vec()),
                _ => Err(CheckpointError::FileTooLarge {
                    file: name.to_string(),
                    limit,
                }),
            },
        })
    }

    /// A file too large to read whole: mapped. The caller has made sure that it is there.
    pub fn large(&self, name: &str) -> Result<Content, CheckpointError> {
        match self {
            Source::Directory(directory) => map(&directory.join(name), &self.display(name)),
            Source::Memory(files) => Ok(Content::Static(files.get(name).copied().unwrap_or(&[]))),
        }
    }
}

/// Whether the name is that of a file in the directory itself: no separators, no way out.
pub(crate) fn is_plain_name(name: &str) -> bool {
    let mut components = Path::new(name).components();
    let single = matches!(components.next(), Some(Component::Normal(part)) if part == name);
    // A trailing separator is no component of its own, and a backslash separates elsewhere.
    let clean = !name.contains(|c: char| matches!(c, '/' | '\\') || c.is_control());
    single && components.next().is_none() && clean
}

fn io_error(file: &str, source: std::io::Error) -> CheckpointError {
    CheckpointError::Io {
        file: file.to_string(),
        source,
    }
}

/// Opens a regular file. Links are followed (model hubs keep their files behind links); anything else, a
/// directory or a pipe that would block, is refused before it is opened.
fn open_regular(path: &Path, file: &str) -> Result<File, CheckpointError> {
    let metadata = std::fs::metadata(path).map_err(|error| io_error(file, error))?;
    if !metadata.is_file() {
        return Err(io_error(file, std::io::Error::other("not a regular file")));
    }
    File::open(path).map_err(|error| io_error(file, error))
}

/// Reads a file of at most `limit` bytes.
pub(crate) fn read_capped(path: &Path, file: &str, limit: u64) -> Result<Vec<u8>, CheckpointError> {
    let mut bytes = Vec::new();
    // One byte more than allowed is asked for: the length in the metadata may lie.
    open_regular(path, file)?
        .take(limit + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| io_error(file, error))?;
    if bytes.len() as u64 > limit {
        return Err(CheckpointError::FileTooLarge {
            file: file.to_string(),
            limit,
        });
    }
    Ok(bytes)
}

fn map(path: &Path, file: &str) -> Result<Content, CheckpointError> {
    let handle = open_regular(path, file)?;
    let length = handle
        .metadata()
        .map_err(|error| io_error(file, error))?
        .len();
    if length == 0 {
        // An empty file cannot be mapped; the header check says what is wrong with it.
        return Ok(Content::Static(&[]));
    }
    // SAFETY: the mapping is read only. What remains is that another process
    // changes or truncates the file meanwhile; `Checkpoint::open` documents that it must not, as every
    // program that maps its model does, and no check of ours relies on bytes staying equal: offsets
    // are copied out of the header once and verified, and every access is bounds-checked.
    let map = unsafe { Mmap::map(&handle) }.map_err(|error| io_error(file, error))?;
    Ok(Content::Mapped(map))
}

/// The bytes as text.
pub(crate) fn text_of(bytes: Vec<u8>, file: &str) -> Result<String, CheckpointError> {
    String::from_utf8(bytes).map_err(|error| CheckpointError::NotText {
        file: file.to_string(),
        after: error.utf8_error().valid_up_to(),
    })
}

#[cfg(test)]
mod tests {
    use super::is_plain_name;

    #[test]
    fn only_names_within_the_directory_are_plain() {
        for good in [
            "model.safetensors",
            "a",
            "..a",
            "model-00001-of-00004.safetensors",
        ] {
            assert!(is_plain_name(good), "{good}");
        }
        for bad in [
            "", ".", "..", "../x", "/x", "a/b", "a/", "./a", "a\\b", "a\0b",
        ] {
            assert!(!is_plain_name(bad), "{bad:?}");
        }
    }
}
