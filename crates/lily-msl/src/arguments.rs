//! What a dispatch is given: buffers, small values, threadgroup memory and function constants.

use std::cell::Cell;

/// Bytes of a line of device memory; also the alignment of a [`SharedBuffer`].
pub const LINE_BYTES: usize = 128;

#[repr(align(128))]
struct Line([Cell<u8>; LINE_BYTES]);

/// Memory that several arguments of one dispatch may name, as parts of an arena do. Zero at first.
pub struct SharedBuffer {
    lines: Vec<Line>,
    length: usize,
}

impl SharedBuffer {
    /// A buffer of `length` zero bytes.
    pub fn new(length: usize) -> Self {
        let zero = || Line([const { Cell::new(0) }; LINE_BYTES]);
        Self {
            lines: std::iter::repeat_with(zero)
                .take(length.div_ceil(LINE_BYTES))
                .collect(),
            length,
        }
    }

    /// Its size in bytes.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether it holds nothing.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Writes `bytes` at `offset`. Panics if they do not fit.
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        self.check(offset, bytes.len());
        for (part, at) in self.parts(offset, bytes.len()) {
            for (cell, byte) in part.iter().zip(&bytes[at..]) {
                cell.set(*byte);
            }
        }
    }

    /// Reads into `bytes` from `offset`. Panics if the buffer ends before.
    pub fn read(&self, offset: usize, bytes: &mut [u8]) {
        self.check(offset, bytes.len());
        for (part, at) in self.parts(offset, bytes.len()) {
            for (cell, byte) in part.iter().zip(&mut bytes[at..]) {
                *byte = cell.get();
            }
        }
    }

    fn check(&self, offset: usize, length: usize) {
        assert!(
            offset <= self.length && length <= self.length - offset,
            "{length} bytes at {offset} of a buffer of {}",
            self.length
        );
    }

    /// The pieces of a span, one a line, each with its position in the span.
    fn parts(&self, offset: usize, length: usize) -> impl Iterator<Item = (&[Cell<u8>], usize)> {
        let first = offset / LINE_BYTES;
        let end = (offset + length).div_ceil(LINE_BYTES).max(first);
        (first..end).map(move |line| {
            let start = offset.max(line * LINE_BYTES);
            let stop = (offset + length).min((line + 1) * LINE_BYTES);
            let cells = &self.lines[line].0[start % LINE_BYTES..][..stop - start];
            (cells, start - offset)
        })
    }

    /// Where the memory starts, as kernels that reach it through another buffer find it there.
    pub fn address(&self) -> u64 {
        self.start().expose_provenance() as u64
    }

    /// Where the memory starts. Cells may be written through a shared reference.
    pub(crate) fn start(&self) -> *mut u8 {
        self.lines.as_ptr().cast::<u8>().cast_mut()
    }
}

/// One argument of a dispatch. Buffers, tensors and bytes take the buffer indices 0, 1, 2 … in the order in
/// which they are given; threadgroup memory takes its own indices in the same way.
pub enum Argument<'a> {
    /// Memory that the kernel may read and write.
    Buffer(&'a mut [u8]),
    /// Memory that the kernel may only read; the parameter must be `const` or `constant`.
    ReadOnly(&'a [u8]),
    /// A part of a buffer that other arguments may name too.
    Shared {
        /// The buffer.
        buffer: &'a SharedBuffer,
        /// Where the part starts.
        offset: usize,
        /// How many bytes it has.
        length: usize,
    },
    /// A small value, copied.
    Bytes(&'a [u8]),
    /// A tensor of rank 2 with dense rows, bound as a resource.
    Tensor {
        /// The elements.
        data: &'a mut [u8],
        /// Elements in a row, and rows.
        extents: [i32; 2],
    },
    /// Memory that is no parameter, but that the kernel may read and write through an address in another buffer
    /// (see [`SharedBuffer::address`]). Takes no index.
    Resident(&'a SharedBuffer),
    /// No buffer at this index.
    Unbound,
    /// So many bytes of threadgroup memory.
    Threadgroup(usize),
}

/// The value of a function constant.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ConstantValue {
    /// A `bool`.
    Bool(bool),
    /// A `ushort`.
    UShort(u16),
    /// A `uint`.
    UInt(u32),
    /// An `int`.
    Int(i32),
    /// A `float`.
    Float(f32),
}

impl ConstantValue {
    pub(crate) fn bytes(self) -> Vec<u8> {
        match self {
            Self::Bool(value) => vec![u8::from(value)],
            Self::UShort(value) => value.to_ne_bytes().to_vec(),
            Self::UInt(value) => value.to_ne_bytes().to_vec(),
            Self::Int(value) => value.to_ne_bytes().to_vec(),
            Self::Float(value) => value.to_ne_bytes().to_vec(),
        }
    }

    pub(crate) fn type_names(self) -> &'static [&'static str] {
        match self {
            Self::Bool(_) => &["bool"],
            Self::UShort(_) => &["ushort", "uint16_t"],
            Self::UInt(_) => &["uint", "uint32_t"],
            Self::Int(_) => &["int", "int32_t"],
            Self::Float(_) => &["float"],
        }
    }
}

/// A function constant and its value.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Constant {
    /// The index in the source.
    pub index: u32,
    /// The value.
    pub value: ConstantValue,
}

/// In which order threads run between barriers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Schedule {
    /// Each thread as far as it comes, in order.
    #[default]
    ProgramOrder,
    /// Threads and threadgroups in an order drawn from a seed.
    Shuffled(u64),
}

/// The size of a dispatch and how it is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Launch {
    /// Threadgroups in each dimension.
    pub threadgroups: [u32; 3],
    /// Threads of a threadgroup in each dimension.
    pub threads: [u32; 3],
    /// The order of threads.
    pub schedule: Schedule,
    /// In the race build: count, but do not look for races or for reads of threadgroup memory that was never
    /// written. Bounds are still checked. Saves 48 bytes of memory for each byte that a kernel may write.
    pub counters_only: bool,
}

impl Launch {
    /// In program order.
    pub fn new(threadgroups: [u32; 3], threads: [u32; 3]) -> Self {
        Self {
            threadgroups,
            threads,
            schedule: Schedule::ProgramOrder,
            counters_only: false,
        }
    }

    /// The same in another order.
    #[must_use]
    pub fn schedule(mut self, schedule: Schedule) -> Self {
        self.schedule = schedule;
        self
    }

    /// The same without the checks that need memory.
    #[must_use]
    pub fn counters_only(mut self) -> Self {
        self.counters_only = true;
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_buffers_read_what_was_written() {
        let buffer = SharedBuffer::new(300);
        let bytes: Vec<u8> = (0..200).map(|i| i as u8).collect();
        buffer.write(70, &bytes);
        let mut out = [9; 230];
        buffer.read(70, &mut out);
        assert_eq!(out[..200], bytes[..]);
        assert_eq!(out[200..], [0; 30]);
        buffer.read(300, &mut []);
        assert_eq!(buffer.start().addr() % LINE_BYTES, 0);
    }
}
