//! What a dispatch did, and what went wrong.

use std::fmt;

use crate::translate::TranslateError;

/// Traffic between simdgroups and one buffer, or several together.
///
/// An access is what the lanes of a simdgroup do at one place in the code, the n-th time since they last met
/// at a barrier or a simdgroup operation. Lines are lines of 128 bytes, counted once for each access that
/// touches them and from the start of the buffer's allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Traffic {
    /// Bytes that lanes asked for.
    pub read_bytes: u64,
    /// Bytes that lanes wrote.
    pub written_bytes: u64,
    /// Lines touched by loads.
    pub read_lines: u64,
    /// Lines touched by stores.
    pub written_lines: u64,
    /// Loads of a simdgroup.
    pub read_accesses: u64,
    /// Stores of a simdgroup.
    pub written_accesses: u64,
}

impl std::ops::AddAssign for Traffic {
    fn add_assign(&mut self, other: Self) {
        self.read_bytes += other.read_bytes;
        self.written_bytes += other.written_bytes;
        self.read_lines += other.read_lines;
        self.written_lines += other.written_lines;
        self.read_accesses += other.read_accesses;
        self.written_accesses += other.written_accesses;
    }
}

/// Traffic with threadgroup memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ThreadgroupTraffic {
    /// Bytes that lanes asked for.
    pub read_bytes: u64,
    /// Bytes that lanes wrote.
    pub written_bytes: u64,
    /// Loads and stores of a simdgroup.
    pub accesses: u64,
    /// Further rounds that accesses take because words share a bank, in a model of 32 banks of 4 bytes in
    /// which lanes that name the same word share it. An access of n different words takes at least n / 32
    /// rounds; what it takes beyond that is counted here.
    pub bank_conflicts: u64,
}

/// What the race build counts of memory.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MemoryCounters {
    /// All buffers in `device` memory, and tensors.
    pub device: Traffic,
    /// All buffers in `constant` memory.
    pub constant: Traffic,
    /// Each buffer, by index.
    pub buffers: Vec<Traffic>,
    /// Buffers that the kernel reached by address, together; part of `device`.
    pub resident: Traffic,
    /// Threadgroup memory.
    pub threadgroup: ThreadgroupTraffic,
}

/// What a dispatch did. The same dispatch gives the same counts, whatever its schedule.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Report {
    /// Threadgroups that ran.
    pub threadgroups: u64,
    /// Simdgroups that ran.
    pub simdgroups: u64,
    /// Threads that ran.
    pub threads: u64,
    /// Barriers that whole threadgroups passed.
    pub threadgroup_barriers: u64,
    /// Barriers that simdgroups passed.
    pub simdgroup_barriers: u64,
    /// Exchanges in simdgroups: reductions, shuffles, votes, matrix products.
    pub simdgroup_operations: u64,
    /// Those of simdgroups with less than 32 lanes: some have returned, or the threadgroup's size is no multiple of
    /// 32. Metal leaves such lanes out; elsewhere that costs time (see [`crate::cuda`]).
    pub partial_simdgroup_operations: u32,
    /// Loads and stores; counted by the race build alone.
    pub memory: Option<MemoryCounters>,
}

/// A kind of defect that shows in a dispatch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FaultKind {
    /// Threads do not all come to the same barrier or simdgroup operation.
    Divergence,
    /// Two threads touch the same memory, one of them writes, and nothing orders them.
    Race,
    /// A load or store outside of every buffer, or a store to memory bound read-only.
    OutOfBounds,
    /// A load of threadgroup memory that was never written.
    Uninitialised,
    /// An address that is no multiple of the access's size.
    Misaligned,
    /// More threadgroup memory than there is.
    Limit,
}

impl FaultKind {
    fn words(self) -> &'static str {
        match self {
            Self::Divergence => "divergence",
            Self::Race => "race",
            Self::OutOfBounds => "out of bounds",
            Self::Uninitialised => "uninitialised",
            Self::Misaligned => "misaligned",
            Self::Limit => "limit",
        }
    }
}

/// A defect that a dispatch met; the dispatch ended there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// Its kind.
    pub kind: FaultKind,
    /// The kernel.
    pub kernel: String,
    /// What happened.
    pub message: String,
    /// The line of the access, as `file:line`, where it could be found.
    pub place: Option<String>,
    /// The threadgroup's position in the grid.
    pub threadgroup: [u32; 3],
    /// The thread's index in the threadgroup.
    pub thread: u32,
}

impl fmt::Display for Fault {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(place) = &self.place {
            write!(out, "{place}: ")?;
        }
        let [x, y, z] = self.threadgroup;
        write!(
            out,
            "kernel {}: {}: {} [threadgroup ({x}, {y}, {z}), thread {}]",
            self.kernel,
            self.kind.words(),
            self.message,
            self.thread
        )
    }
}

/// Why a kernel file was not built or a dispatch not finished.
#[derive(Debug, thiserror::Error)]
pub enum EmulatorError {
    /// The translator rejects the file.
    #[error(transparent)]
    Translate(#[from] TranslateError),
    /// The C++ compiler rejects it, or there is none; its messages name lines of the kernel file.
    #[error("{0}")]
    Compile(String),
    /// The cache or the built library cannot be used.
    #[error("{0}")]
    Load(String),
    /// The dispatch does not fit the kernel.
    #[error("kernel {kernel}: {message}")]
    Binding {
        /// The kernel.
        kernel: String,
        /// What does not fit.
        message: String,
    },
    /// The kernel has a defect.
    #[error("{0}")]
    Fault(Box<Fault>),
}

impl EmulatorError {
    /// The defect, if it is one.
    pub fn fault(&self) -> Option<&Fault> {
        match self {
            Self::Fault(fault) => Some(fault),
            _ => None,
        }
    }
}
