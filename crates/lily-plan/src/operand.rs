//! What steps read and write: weights, session state and scratch.

use std::fmt;

/// Arithmetic of a plan. Every device executes every step with f32 accumulation; the precision decides
/// to what type results are rounded when they are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Precision {
    /// Nothing is rounded below f32: the oracle's precision, and that of the goldens.
    F32,
    /// The product's: activations that the next product multiplies are rounded to bfloat16, the
    /// residual stream and what is sensitive (router, decay, normalised keys) stays f32.
    Bf16,
}

impl Precision {
    /// The element type of activations and of the KV cache.
    pub fn activation(self) -> ElementType {
        match self {
            Precision::F32 => ElementType::F32,
            Precision::Bf16 => ElementType::Bf16,
        }
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Precision::F32 => "f32",
            Precision::Bf16 => "bf16",
        })
    }
}

/// Element type of a scratch value or a state slot. **It is the rounding point**: an operation computes
/// in f32 and rounds once, to the type of the operand it writes (nearest, ties to even).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ElementType {
    /// IEEE single precision.
    F32,
    /// bfloat16.
    Bf16,
    /// Unsigned 32-bit integers (expert ids, groupings).
    U32,
}

impl ElementType {
    /// Bytes of one element as a GPU stores it.
    pub fn bytes(self) -> usize {
        match self {
            ElementType::F32 | ElementType::U32 => 4,
            ElementType::Bf16 => 2,
        }
    }
}

impl fmt::Display for ElementType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ElementType::F32 => "f32",
            ElementType::Bf16 => "bf16",
            ElementType::U32 => "u32",
        })
    }
}

/// A scratch value of a plan. Single assignment: exactly one step writes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ScratchId(pub(crate) u32);

impl ScratchId {
    /// Position in [`Plan::scratch`](crate::Plan::scratch).
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Shape and type of a scratch value: a row-major [rows, columns] matrix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScratchSpec {
    /// What it holds, for people.
    pub name: &'static str,
    /// The layer it belongs to.
    pub layer: Option<u16>,
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub columns: usize,
    /// Element type, and so the rounding of what is written here.
    pub element: ElementType,
}

impl ScratchSpec {
    /// Elements in all.
    pub fn elements(&self) -> usize {
        self.rows * self.columns
    }

    /// Bytes as a GPU stores it.
    pub fn bytes(&self) -> usize {
        self.elements() * self.element.bytes()
    }
}

/// Which of the two alternating copies of a state. A run reads `Live` and writes `Next`; when the run is
/// committed the copies change roles, so that one run can be taken back for free.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum StateCopy {
    /// The state before this run.
    Live,
    /// The state after this run.
    Next,
}

/// A named slot of session state, resolved through the launch's table of sessions when the plan runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum StateSlot {
    /// The tokens of this run, one a row.
    Tokens,
    /// The token chosen by this run.
    NextToken,
    /// Keys of an attention layer after rotation: [Nkv, positions, D] in the activation type.
    KeyCache(u16),
    /// Values of an attention layer: [Nkv, positions, D] in the activation type.
    ValueCache(u16),
    /// The last K−1 inputs of a layer's convolution: [K−1, channels] in the activation type.
    ConvolutionHistory(u16, StateCopy),
    /// A Gated DeltaNet layer's recurrent state: [Hv, Dv, Dk], always f32.
    RecurrentState(u16, StateCopy),
}

/// Something that a step reads or writes and that hazards are computed from. Weights are only ever
/// read, so they are no resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Resource {
    /// A scratch value.
    Scratch(ScratchId),
    /// A slot of session state.
    State(StateSlot),
}
