//! The kernels, as the host binds them. The structures are made from the kernels' own signatures when this crate
//! is built (build.rs): a field for each function constant and buffer.

use lily_checkpoint::WeightId;

/// The value of a function constant.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ConstantValue {
    /// `uint`.
    UInt(u32),
    /// `int`.
    Int(i32),
    /// `bool`.
    Bool(bool),
    /// `float`.
    Float(f32),
}

/// A function constant with its value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Constant {
    /// Index in the source.
    pub index: u32,
    /// Its value.
    pub value: ConstantValue,
}

/// Where memory lies that a dispatch names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Memory {
    /// The arena of scratch values.
    Arena,
    /// A weight.
    Weight(WeightId),
    /// What varies between runs of one plan: tokens, sessions, chosen tokens.
    Launch,
    /// The rotary frequencies.
    Frequencies,
    /// Sampling parameters of a run.
    Sampling,
}

/// A part of a memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Region {
    /// Which memory.
    pub memory: Memory,
    /// Where it begins, in bytes.
    pub offset: usize,
    /// Bytes.
    pub bytes: usize,
}

/// A region that a kernel reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Input(pub Region);

/// A region that a kernel writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Output(pub Region);

/// What stands at one buffer index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operand {
    /// Nothing.
    None,
    /// Memory that is read.
    Input(Input),
    /// Memory that is written (and may be read).
    Output(Output),
    /// A small number, copied.
    Word(u32),
}

/// A kernel with everything bound.
#[derive(Clone, Debug)]
pub struct Bound {
    /// File below kernels/.
    pub file: &'static str,
    /// Host name.
    pub name: &'static str,
    /// Function constants.
    pub constants: Vec<Constant>,
    /// By buffer index.
    pub operands: Vec<Operand>,
}

/// A kernel's own structure of operands.
pub trait Kernel {
    /// In the general form.
    fn bind(self) -> Bound;
}

include!(concat!(env!("OUT_DIR"), "/bindings.rs"));
