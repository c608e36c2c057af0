//! What a machine that runs kernels offers: the one interface of Metal, CUDA and the emulator.

use crate::kernels::{Bound, Constant};
use lily_plan::{DeviceError, StageTiming, route};
use std::fmt;

/// What multiplies matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MatrixUnits {
    /// Simdgroup matrices, as fast in float as in bfloat (Apple's M1 to M4).
    SimdgroupMatrices,
    /// Simdgroup matrices on units that take 16-bit operands alone (NVIDIA's tensor cores).
    SixteenBitMatrices,
    /// Metal 4 tensor operations; simdgroup matrices where a kernel has no form for them.
    TensorOperations,
    /// Those that also take weights of four bits as they are (macOS 26.4): so do products whose weights are exact
    /// ([`Plan::with_exact_weights`](lily_plan::Plan::with_exact_weights)).
    PackedTensorOperations,
}

impl fmt::Display for MatrixUnits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            MatrixUnits::SimdgroupMatrices => "simdgroup matrices",
            MatrixUnits::SixteenBitMatrices => "simdgroup matrices of 16-bit operands",
            MatrixUnits::TensorOperations => "tensor operations of Metal 4",
            MatrixUnits::PackedTensorOperations => {
                "tensor operations of Metal 4 on codes of four bits"
            }
        })
    }
}

/// What a GPU says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuDescription {
    /// `metal`, `cuda` or `emulated`.
    pub device: &'static str,
    /// The hardware, as it names itself.
    pub hardware: String,
    /// Cores (Apple), multiprocessors (NVIDIA), host threads (emulator).
    pub cores: usize,
    /// What multiplies matrices.
    pub matrix_units: MatrixUnits,
    /// The same for people.
    pub matrices: String,
    /// How it was chosen; empty where there was nothing to choose.
    pub reason: String,
}

/// One argument of a dispatch.
pub enum Argument<'a, G: Gpu + ?Sized> {
    /// No buffer at this index.
    None,
    /// `bytes` bytes from `offset` on. `written` where the kernel may write them.
    Buffer {
        /// The buffer.
        buffer: &'a G::Buffer,
        /// Where the part begins.
        offset: usize,
        /// How long it is.
        bytes: usize,
        /// Whether the kernel may write it.
        written: bool,
    },
    /// A small number.
    Word(u32),
}

impl<G: Gpu + ?Sized> Clone for Argument<'_, G> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<G: Gpu + ?Sized> Copy for Argument<'_, G> {}

/// What a dispatch costs, by counting.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Floating-point operations.
    pub operations: f64,
    /// Bytes read and written.
    pub bytes: f64,
}

/// How a dispatch can be cut into several: along one axis of its grid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Divisible {
    /// Which axis.
    pub axis: usize,
    /// Index of the argument, a word, that says where a part begins on it.
    pub first: usize,
}

/// A kernel to be run.
pub struct Dispatch<'a, G: Gpu + ?Sized> {
    /// What [`Gpu::pipeline`] made.
    pub pipeline: &'a G::Pipeline,
    /// By buffer index.
    pub arguments: Vec<Argument<'a, G>>,
    /// Threadgroups.
    pub grid: [u32; 3],
    /// Threads of a threadgroup.
    pub threads: u32,
    /// Buffers that the kernel reaches by addresses in other buffers: those of the run's sessions.
    pub reached: &'a [&'a G::Buffer],
    /// What it costs.
    pub cost: Cost,
    /// How its grid can be cut.
    pub divisible: Option<Divisible>,
}

impl<G: Gpu + ?Sized> Clone for Dispatch<'_, G> {
    fn clone(&self) -> Self {
        Dispatch {
            arguments: self.arguments.clone(),
            ..*self
        }
    }
}

/// Dispatches that do not depend on one another. A barrier stands between one stage and the next, and nowhere
/// else.
pub type Stage<'a, G> = Vec<Dispatch<'a, G>>;

/// A machine that runs kernels. Buffers are zero at first, and aligned to 256 bytes.
pub trait Gpu: Send {
    /// Memory; freed when dropped. It is not dropped before the work that uses it has ended.
    type Buffer: Send;
    /// A kernel made for given function constants.
    type Pipeline: Send;

    /// What it is.
    fn describe(&self) -> GpuDescription;
    /// Bytes that could be taken now.
    fn available_memory(&self) -> Option<u64>;
    /// Memory of `bytes` bytes; `what` names it in an error.
    fn allocate(&self, bytes: usize, what: &str) -> Result<Self::Buffer, DeviceError>;
    /// Its address, as kernels find it in other buffers.
    fn address(&self, buffer: &Self::Buffer) -> u64;
    /// Copies to a buffer that no unfinished work uses. Where the machine has failed, whoever waits next is told, here and
    /// in [`read`](Self::read).
    fn write(&self, buffer: &Self::Buffer, offset: usize, bytes: &[u8]);
    /// Copies from a part of a buffer that no unfinished work writes.
    fn read(&self, buffer: &Self::Buffer, offset: usize, bytes: &mut [u8]);
    /// Copies between buffers that no unfinished work uses, from offset to offset. What is sent off later finds the bytes,
    /// and so does [`read`](Self::read).
    fn copy(&self, from: (&Self::Buffer, usize), to: (&Self::Buffer, usize), bytes: usize);
    /// A kernel, ready to run.
    fn pipeline(
        &mut self,
        kernel: &Bound,
        constants: &[Constant],
    ) -> Result<Self::Pipeline, DeviceError>;
    /// Sends stages off, in order, behind everything sent before. With a key, the same stages with the same buffers may
    /// come again: a machine that can keeps them ready for [`replay`](Self::replay).
    fn submit(&mut self, key: Option<u64>, stages: &[Stage<'_, Self>]) -> Result<(), DeviceError>;
    /// Sends off what was kept under `key`; false where nothing is.
    fn replay(&mut self, _key: u64) -> Result<bool, DeviceError> {
        Ok(false)
    }
    /// Drops what was kept under `key`.
    fn forget(&mut self, _key: u64) {}
    /// Waits for everything that was sent; an error of any of it is told here.
    fn wait(&mut self) -> Result<(), DeviceError>;
    /// A mark behind everything that was sent so far.
    ///
    /// # Errors
    /// Where the machine makes none.
    fn mark(&mut self) -> Result<u64, DeviceError>;
    /// Waits for what was sent before the mark, and not for what was sent behind it. Where any of that has failed,
    /// waits for everything, and tells the error.
    ///
    /// # Errors
    /// Of what was sent before the mark; of that behind it too, where the machine does not tell them apart.
    fn wait_for(&mut self, mark: u64) -> Result<(), DeviceError>;
    /// Most sessions that are decoded together ([`Device::most_decode_rows`](lily_plan::Device::most_decode_rows)).
    fn most_decode_rows(&self) -> usize {
        route::MOST_DECODE_ROWS
    }
    /// What the machine's clock says of the work that was waited for since this was last asked, where it was opened to
    /// tell.
    fn take_timings(&mut self) -> Vec<StageTiming> {
        Vec::new()
    }
    /// Comes back when nothing runs. Errors are told by who waits.
    fn idle(&mut self);
}
