//! Kernels from text to pipelines.

use crate::machine::Machine;
use crate::source::inline;
use core::ptr::NonNull;
use lily_gpu::kernels::{Bound, Constant, ConstantValue, SOURCES};
use lily_plan::DeviceError;
use objc2::rc::Retained;
use objc2::runtime::ProtocolObject;
use objc2_foundation::{NSError, NSString};
use objc2_metal::{
    MTLCompileOptions, MTLComputePipelineDescriptor, MTLComputePipelineState, MTLDataType,
    MTLDevice, MTLFunctionConstantValues, MTLLanguageVersion, MTLLibrary,
    MTLMathFloatingPointFunctions, MTLMathMode, MTLPipelineOption,
};
use std::collections::HashMap;

/// Lanes of a simdgroup, as the kernels have it.
const SIMDGROUP: usize = 32;

/// A kernel for given function constants, ready to run. Cheap to clone; the compiled code is shared.
#[derive(Clone)]
pub struct Pipeline {
    pub(crate) state: Retained<ProtocolObject<dyn MTLComputePipelineState>>,
    /// Host name.
    pub(crate) kernel: &'static str,
    /// Most threads of a threadgroup, after registers.
    pub(crate) most_threads: usize,
}

/// The kernel files, each compiled when it is first needed.
pub(crate) struct Libraries {
    device: Retained<ProtocolObject<dyn MTLDevice>>,
    options: Retained<MTLCompileOptions>,
    sources: HashMap<&'static str, &'static str>,
    compiled: HashMap<&'static str, Retained<ProtocolObject<dyn MTLLibrary>>>,
}

// SAFETY: the options are only read after they are made, and only through `&mut self`; the other objects may be used
// from any thread.
unsafe impl Send for Libraries {}

impl Libraries {
    pub fn new(device: &Retained<ProtocolObject<dyn MTLDevice>>, machine: &Machine) -> Self {
        Libraries {
            device: device.clone(),
            options: compile_options(machine),
            sources: SOURCES.iter().copied().collect(),
            compiled: HashMap::new(),
        }
    }

    /// Adds a file, or takes another in its place.
    pub fn add_source(&mut self, file: &'static str, text: &'static str) {
        self.sources.insert(file, text);
        self.compiled.remove(file);
    }

    /// The pipeline of a kernel.
    pub fn pipeline(
        &mut self,
        kernel: &Bound,
        constants: &[Constant],
    ) -> Result<Pipeline, DeviceError> {
        let Bound { name, file, .. } = *kernel;
        let refuse = |reason: String| DeviceError::Unsupported {
            device: "metal".into(),
            what: format!("{name} of kernels/{file}"),
            reason,
        };
        let library = self.library(file)?;
        let function = library
            .newFunctionWithName_constantValues_error(
                &NSString::from_str(name),
                &constant_values(constants),
            )
            .map_err(|error| refuse(text_of(&error)))?;
        let descriptor = MTLComputePipelineDescriptor::new();
        descriptor.setComputeFunction(Some(&function));
        descriptor.setLabel(Some(&NSString::from_str(name)));
        let state = self
            .device
            .newComputePipelineStateWithDescriptor_options_reflection_error(
                &descriptor,
                MTLPipelineOption::None,
                None,
            )
            .map_err(|error| refuse(text_of(&error)))?;
        let lanes = state.threadExecutionWidth();
        if lanes != SIMDGROUP {
            return Err(refuse(format!(
                "its simdgroups would have {lanes} lanes, and it is written for {SIMDGROUP}"
            )));
        }
        Ok(Pipeline {
            kernel: name,
            most_threads: state.maxTotalThreadsPerThreadgroup(),
            state,
        })
    }

    fn library(
        &mut self,
        file: &'static str,
    ) -> Result<Retained<ProtocolObject<dyn MTLLibrary>>, DeviceError> {
        if let Some(library) = self.compiled.get(file) {
            return Ok(library.clone());
        }
        let refuse = |reason: String| DeviceError::Unsupported {
            device: "metal".into(),
            what: format!("kernels/{file}"),
            reason,
        };
        let text = inline(file, &|name| self.sources.get(name).copied()).map_err(refuse)?;
        let library = self
            .device
            .newLibraryWithSource_options_error(&NSString::from_str(&text), Some(&self.options))
            .map_err(|error| refuse(text_of(&error)))?;
        library.setLabel(Some(&NSString::from_str(file)));
        self.compiled.insert(file, library.clone());
        Ok(library)
    }
}

/// How kernels are compiled.
///
/// Arithmetic is **safe**, and functions are precise. Kernels write down the order of their sums, and a row's value may
/// not depend on which rows are computed with it: a compiler that reorders sums (Metal's "relaxed", the default, and
/// "fast") may reorder them differently in two forms of a kernel. Running maxima of a softmax begin at −∞ and
/// are compared with it, which "fast" may assume not to happen. What it costs in speed is not known yet; kernels
/// that are bound by memory should not notice. Fused multiply-adds are written where they are meant.
fn compile_options(machine: &Machine) -> Retained<MTLCompileOptions> {
    let options = MTLCompileOptions::new();
    // bfloat came with 3.1, and 3.2 with the oldest system that is taken.
    options.setLanguageVersion(if machine.has_language_4() {
        MTLLanguageVersion::Version4_0
    } else {
        MTLLanguageVersion::Version3_2
    });
    options.setMathMode(MTLMathMode::Safe);
    options.setMathFloatingPointFunctions(MTLMathFloatingPointFunctions::Precise);
    options
}

fn constant_values(constants: &[Constant]) -> Retained<MTLFunctionConstantValues> {
    let values = MTLFunctionConstantValues::new();
    for constant in constants {
        let (bytes, kind) = match constant.value {
            ConstantValue::UInt(value) => (value.to_ne_bytes(), MTLDataType::UInt),
            ConstantValue::Int(value) => (value.to_ne_bytes(), MTLDataType::Int),
            ConstantValue::Float(value) => (value.to_ne_bytes(), MTLDataType::Float),
            ConstantValue::Bool(value) => ([u8::from(value), 0, 0, 0], MTLDataType::Bool),
        };
        // Aligned as the largest of the four.
        let word = u32::from_ne_bytes(bytes);
        // SAFETY: the pointer is to four bytes, which are read during the call; a bool is the first of them. Metal
        // takes any index of function constants, up to 65,535, and those come from the kernels' own text.
        unsafe {
            values.setConstantValue_type_atIndex(
                NonNull::from(&word).cast(),
                kind,
                constant.index as usize,
            );
        }
    }
    values
}

/// The compiler's own words.
fn text_of(error: &NSError) -> String {
    error.localizedDescription().to_string()
}
