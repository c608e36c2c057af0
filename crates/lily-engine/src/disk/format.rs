//! The file of a stored prefix: a header, its tokens, snapshots at some of its positions, and the cache in parts, each
//! with a checksum behind it. Little-endian.
//!
//! All lengths follow from the header, and the file must have just that length: so no number of a file that anyone may
//! have written makes anything larger than the file is, and than this engine's own sessions are.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use twox_hash::XxHash3_64;

const MAGIC: [u8; 8] = *b"lilypfx\n";
/// Raised when anything here means something else.
pub const FORMAT: u32 = 1;
/// Bytes of the header, its checksum included.
pub const HEADER_BYTES: usize = 64;
const SUM_BYTES: usize = 8;
/// Most snapshots of a file: behind the first message, with which other conversations begin, and before and behind the
/// last.
pub const MOST_SNAPSHOTS: usize = 3;
/// The cache is written and read in parts of so many positions, 5 MB in the largest model: what is computed meanwhile
/// waits for one at a time.
const PART_POSITIONS: usize = 256;

/// What files of this engine have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind {
    /// Of everything that the bits depend on.
    pub fingerprint: u128,
    /// Bytes of a position of the cache.
    pub position_bytes: u64,
    /// Most positions of a session.
    pub most_positions: usize,
    /// Most bytes of a snapshot; the device knows how many it must have.
    pub most_snapshot_bytes: u64,
}

/// What a file holds, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    kind: Kind,
    snapshot_bytes: u64,
    /// Where there are snapshots, in order. The last is behind all tokens.
    snapshots: Vec<usize>,
}

/// A part of a file, its checksum left out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Section {
    pub what: Content,
    pub offset: u64,
    pub bytes: usize,
}

/// What a part of a file holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// The tokens.
    Tokens,
    /// The snapshot at this position.
    Snapshot(usize),
    /// These positions of the cache.
    Cache(Range<usize>),
}

impl Header {
    /// The header of a prefix with snapshots, of so many bytes each, at some positions in order.
    pub fn new(kind: Kind, snapshot_bytes: u64, snapshots: Vec<usize>) -> Self {
        Header {
            kind,
            snapshot_bytes,
            snapshots,
        }
    }

    /// Tokens of the prefix.
    pub fn positions(&self) -> usize {
        self.snapshots.last().copied().unwrap_or(0)
    }

    pub fn snapshots(&self) -> &[usize] {
        &self.snapshots
    }

    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEADER_BYTES);
        bytes.extend(MAGIC);
        bytes.extend(FORMAT.to_le_bytes());
        bytes.extend((self.snapshots.len() as u32).to_le_bytes());
        bytes.extend(self.kind.fingerprint.to_le_bytes());
        bytes.extend(self.snapshot_bytes.to_le_bytes());
        for index in 0..MOST_SNAPSHOTS {
            let position = self.snapshots.get(index).copied().unwrap_or(0);
            bytes.extend((position as u32).to_le_bytes());
        }
        bytes.resize(HEADER_BYTES - SUM_BYTES, 0);
        bytes.extend(checksum(&bytes, 0).to_le_bytes());
        bytes
    }

    /// Reads the header of a file of `length` bytes, or says why it is none of this kind.
    pub fn parse(bytes: &[u8; HEADER_BYTES], kind: Kind, length: u64) -> Result<Self, String> {
        if bytes[..8] != MAGIC {
            return Err("it is no stored prefix".into());
        }
        let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|index| bytes[at + index]));
        let long = |at: usize| u64::from_le_bytes(std::array::from_fn(|index| bytes[at + index]));
        let format = word(8);
        if format != FORMAT {
            return Err(format!("it has format {format}, and this is {FORMAT}"));
        }
        let (known, sum) = bytes.split_at(HEADER_BYTES - SUM_BYTES);
        if checksum(known, 0).to_le_bytes() != sum {
            return Err("its header is damaged".into());
        }
        let fingerprint = u128::from_le_bytes(std::array::from_fn(|index| bytes[16 + index]));
        if fingerprint != kind.fingerprint {
            return Err(
                "it is of another model, precision, chunk length, device or version of Lily".into(),
            );
        }
        let count = word(12) as usize;
        if count == 0 || count > MOST_SNAPSHOTS {
            return Err(format!("it counts {count} snapshots"));
        }
        let snapshots: Vec<usize> = (0..count).map(|at| word(40 + 4 * at) as usize).collect();
        let header = Header::new(kind, long(32), snapshots);
        let is_ordered = header.snapshots.windows(2).all(|pair| pair[0] < pair[1]);
        if header.snapshots[0] == 0 || !is_ordered || header.positions() > kind.most_positions {
            return Err(format!("it has snapshots at {:?}", header.snapshots));
        }
        if header.snapshot_bytes > kind.most_snapshot_bytes {
            let bytes = header.snapshot_bytes;
            return Err(format!("its snapshots have {bytes} bytes"));
        }
        let expected = header.length();
        if length != expected {
            return Err(format!("it has {length} bytes of {expected}"));
        }
        Ok(header)
    }

    /// The parts of the file, in order. A part of the cache ends where a snapshot is, so that none holds more than what
    /// goes on from there.
    pub fn sections(&self) -> Vec<Section> {
        let mut contents = vec![(Content::Tokens, 4 * self.positions() as u64)];
        for &position in &self.snapshots {
            contents.push((Content::Snapshot(position), self.snapshot_bytes));
        }
        let mut done = 0;
        for &position in &self.snapshots {
            while done < position {
                let end = (done + PART_POSITIONS).min(position);
                let bytes = (end - done) as u64 * self.kind.position_bytes;
                contents.push((Content::Cache(done..end), bytes));
                done = end;
            }
        }
        let mut offset = HEADER_BYTES as u64;
        let place = |(what, bytes): (Content, u64)| {
            let section = Section {
                what,
                offset,
                bytes: bytes as usize,
            };
            offset += bytes + SUM_BYTES as u64;
            section
        };
        contents.into_iter().map(place).collect()
    }

    /// Bytes of the file.
    pub fn length(&self) -> u64 {
        let sections = self.sections();
        let end = |section: &Section| section.offset + (section.bytes + SUM_BYTES) as u64;
        sections.last().map_or(HEADER_BYTES as u64, end)
    }

    /// The checksum behind a section. It is the section's alone: at its place, behind this header.
    pub fn sum(&self, section: &Section, bytes: &[u8]) -> [u8; SUM_BYTES] {
        let seed = checksum(&self.encode(), section.offset);
        checksum(bytes, seed).to_le_bytes()
    }

    /// Reads a section.
    pub fn read(&self, file: &mut File, section: &Section) -> Result<Vec<u8>, String> {
        let mut bytes = vec![0; section.bytes];
        let mut sum = [0; SUM_BYTES];
        let mut read = || {
            file.seek(SeekFrom::Start(section.offset))?;
            file.read_exact(&mut bytes)?;
            file.read_exact(&mut sum)
        };
        read().map_err(|error| error.to_string())?;
        if self.sum(section, &bytes) != sum {
            return Err(match &section.what {
                Content::Tokens => "its tokens are damaged".into(),
                Content::Snapshot(position) => format!("its snapshot at {position} is damaged"),
                Content::Cache(positions) => format!(
                    "its cache is damaged at positions {} to {}",
                    positions.start, positions.end
                ),
            });
        }
        Ok(bytes)
    }
}

fn checksum(bytes: &[u8], seed: u64) -> u64 {
    XxHash3_64::oneshot_with_seed(seed, bytes)
}

/// Tokens as a file has them.
pub fn encode_tokens(tokens: &[u32]) -> Vec<u8> {
    tokens
        .iter()
        .flat_map(|token| token.to_le_bytes())
        .collect()
}

/// Tokens of a file.
pub fn decode_tokens(bytes: &[u8]) -> Vec<u32> {
    let words = bytes.chunks_exact(4);
    words
        .map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]]))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIND: Kind = Kind {
        fingerprint: 7 << 100,
        position_bytes: 10,
        most_positions: 1_000,
        most_snapshot_bytes: 500,
    };

    fn parse(header: &Header) -> Result<Header, String> {
        let bytes = header.encode().try_into().unwrap();
        Header::parse(&bytes, KIND, header.length())
    }

    #[test]
    fn a_header_comes_back_and_says_where_everything_is() {
        let header = Header::new(KIND, 300, vec![100, 400]);
        assert_eq!(parse(&header), Ok(header.clone()));
        let sections = header.sections();
        let whats: Vec<_> = sections.iter().map(|section| &section.what).collect();
        assert_eq!(
            whats,
            [
                &Content::Tokens,
                &Content::Snapshot(100),
                &Content::Snapshot(400),
                &Content::Cache(0..100),
                &Content::Cache(100..356),
                &Content::Cache(356..400),
            ]
        );
        for pair in sections.windows(2) {
            assert_eq!(pair[1].offset, pair[0].offset + pair[0].bytes as u64 + 8);
        }
        assert_eq!(header.length(), 64 + 1_600 + 600 + 4_000 + 6 * 8);
    }

    /// Whatever a header says, with a checksum that is right.
    #[test]
    fn numbers_that_cannot_be_are_refused() {
        for (snapshot_bytes, snapshots) in [
            (501, vec![10]),
            (u64::MAX, vec![10]),
            (5, vec![]),
            (5, vec![0]),
            (5, vec![20, 10]),
            (5, vec![10, 10]),
            (5, vec![1_001]),
            (5, vec![u32::MAX as usize]),
        ] {
            let header = Header::new(KIND, snapshot_bytes, snapshots);
            let bytes = header.encode().try_into().unwrap();
            for length in [0, 64, 1 << 40, u64::MAX] {
                assert!(Header::parse(&bytes, KIND, length).is_err(), "{header:?}");
            }
        }
        let mut bytes = Header::new(KIND, 5, vec![10]).encode();
        bytes[12..16].copy_from_slice(&u32::MAX.to_le_bytes());
        let sum = checksum(&bytes[..56], 0).to_le_bytes();
        bytes[56..].copy_from_slice(&sum);
        let refused = Header::parse(&bytes.try_into().unwrap(), KIND, 1_000).unwrap_err();
        assert!(refused.contains("4294967295 snapshots"), "{refused}");
    }

    #[test]
    fn a_header_of_any_bytes_is_refused_or_read() {
        let good = Header::new(KIND, 300, vec![100, 400]);
        let bytes: [u8; HEADER_BYTES] = good.encode().try_into().unwrap();
        for at in 0..HEADER_BYTES {
            let mut damaged = bytes;
            damaged[at] ^= 0x40;
            assert!(
                Header::parse(&damaged, KIND, good.length()).is_err(),
                "{at}"
            );
        }
    }
}
