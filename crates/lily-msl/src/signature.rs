//! What a kernel asks of whoever launches it.

/// Where a buffer's memory lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AddressSpace {
    /// `device`: any buffer.
    Device,
    /// `constant`: small and read-only, the same for every thread.
    Constant,
    /// A tensor bound as a resource by itself.
    Tensor,
}

/// A parameter with `[[buffer(n)]]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BufferBinding {
    /// Position in the argument table, 0 to 30.
    pub index: u32,
    /// The parameter's name.
    pub name: String,
    /// The parameter's address space.
    pub address_space: AddressSpace,
    /// Whether the kernel can only read it.
    pub read_only: bool,
    /// Type of an element, with template parameters replaced by the instantiation's arguments.
    pub element: String,
    /// The function constant that decides whether the parameter exists, if it has one.
    pub condition: Option<String>,
}

/// A parameter with `[[threadgroup(n)]]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ThreadgroupBinding {
    /// Position in the table of threadgroup memory.
    pub index: u32,
    /// The parameter's name.
    pub name: String,
    /// Type of an element, with template parameters replaced.
    pub element: String,
}

/// A parameter that the GPU itself fills.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Builtin {
    /// The parameter's name.
    pub name: String,
    /// The attribute, for example `thread_position_in_grid`.
    pub attribute: String,
    /// The parameter's type.
    pub type_name: String,
}

/// A constant that is set when a pipeline is made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FunctionConstant {
    /// The index in the source.
    pub index: u32,
    /// The constant's name.
    pub name: String,
    /// The constant's type.
    pub type_name: String,
}

/// One kernel that a host can ask for by name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelSignature {
    /// The name that the host uses.
    pub name: String,
    /// The function in the source; differs from `name` for an instantiation of a template.
    pub function: String,
    /// The instantiation's template arguments, in order.
    pub template_arguments: Vec<String>,
    /// Buffers in the order of the parameters.
    pub buffers: Vec<BufferBinding>,
    /// Threadgroup memory whose size the host sets.
    pub threadgroup: Vec<ThreadgroupBinding>,
    /// Parameters that the GPU fills.
    pub builtins: Vec<Builtin>,
    /// Function constants that the kernel reads, itself or through what it calls, by index.
    pub function_constants: Vec<FunctionConstant>,
}
