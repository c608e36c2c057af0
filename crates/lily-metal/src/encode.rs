//! Stages as command buffers.

use crate::compile::Pipeline;
use crate::memory::Buffer;
use crate::metal::Metal;
use core::ptr::NonNull;
use lily_gpu::{Argument, Dispatch, Stage};
use lily_plan::DeviceError;
use objc2::rc::Retained;
use objc2::runtime::ProtocolObject;
use objc2_foundation::NSString;
use objc2_metal::{
    MTLBarrierScope, MTLCommandBuffer, MTLCommandEncoder, MTLCommandQueue,
    MTLComputeCommandEncoder, MTLComputePipelineState, MTLDispatchType, MTLFence, MTLSize,
};

/// Buffer indices of a kernel.
const MOST_ARGUMENTS: usize = 31;

type Encoder = ProtocolObject<dyn MTLComputeCommandEncoder>;

/// A command buffer that was sent off.
pub(crate) struct Sent {
    pub buffer: Retained<ProtocolObject<dyn MTLCommandBuffer>>,
    /// Its kernels, for errors and times.
    pub label: String,
    /// The command buffer holds no references. Buffers stay until work has been waited for (`Memory`); pipelines
    /// stay because they are here.
    _pipelines: Vec<Retained<ProtocolObject<dyn MTLComputePipelineState>>>,
}

// SAFETY: a command buffer may be used from any thread, by one at a time; `Sent` is not `Sync`, and is only reached
// through `&mut Metal`.
unsafe impl Send for Sent {}

/// How command buffers are encoded.
pub(crate) struct Encoding<'a> {
    pub queue: &'a ProtocolObject<dyn MTLCommandQueue>,
    pub fence: &'a ProtocolObject<dyn MTLFence>,
}

impl Encoding<'_> {
    /// Encodes stages that [`check`] has passed into one command buffer, and sends it off. `follows` says whether
    /// anything that was sent before may still run.
    pub fn send(
        &self,
        stages: &[Stage<'_, Metal>],
        label: String,
        follows: bool,
    ) -> Result<Sent, DeviceError> {
        let none = |what: &str| DeviceError::Failed(format!("Metal made no {what} for {label}"));
        let buffer = self
            .queue
            .commandBufferWithUnretainedReferences()
            .ok_or_else(|| none("command buffer"))?;
        buffer.setLabel(Some(&NSString::from_str(&label)));
        let encoder = buffer
            .computeCommandEncoderWithDispatchType(MTLDispatchType::Concurrent)
            .ok_or_else(|| none("encoder"))?;
        // From here on nothing fails: an encoder must come to its end.
        //
        // Buffers are not tracked, so that without the fence a command buffer could begin before the one ahead of it
        // has ended. A pass that waits and updates does so in this order.
        if follows {
            encoder.waitForFence(self.fence);
        }
        let mut pipelines: Vec<Retained<ProtocolObject<dyn MTLComputePipelineState>>> = Vec::new();
        let mut first = true;
        for stage in stages.iter().filter(|stage| !stage.is_empty()) {
            if !first {
                encoder.memoryBarrierWithScope(MTLBarrierScope::Buffers);
            }
            first = false;
            for dispatch in stage {
                let state = &dispatch.pipeline.state;
                let set = pipelines
                    .last()
                    .is_some_and(|last| Retained::as_ptr(last) == Retained::as_ptr(state));
                if !set {
                    encoder.setComputePipelineState(state);
                    pipelines.push(state.clone());
                }
                set_arguments(&encoder, dispatch);
                run(&encoder, dispatch);
            }
        }
        encoder.updateFence(self.fence);
        encoder.endEncoding();
        buffer.commit();
        Ok(Sent {
            buffer,
            label,
            _pipelines: pipelines,
        })
    }
}

fn set_arguments(encoder: &Encoder, dispatch: &Dispatch<'_, Metal>) {
    for (index, argument) in dispatch.arguments.iter().enumerate() {
        match argument {
            Argument::None => {}
            Argument::Buffer { buffer, offset, .. } => {
                // SAFETY: `check` has passed the index and the offset. The buffer outlives the work: if it is dropped
                // before that has been waited for, `Memory` keeps it.
                unsafe {
                    encoder.setBuffer_offset_atIndex(Some(&buffer.raw), *offset, index);
                }
            }
            Argument::Word(word) => {
                // SAFETY: the four bytes are copied during the call; `check` has passed the index.
                unsafe {
                    encoder.setBytes_length_atIndex(NonNull::from(word).cast(), 4, index);
                }
            }
        }
    }
}

fn run(encoder: &Encoder, dispatch: &Dispatch<'_, Metal>) {
    let [width, height, depth] = dispatch.grid.map(|count| count as usize);
    // Metal takes no empty grid, and there is nothing to do in one.
    if width * height * depth == 0 {
        return;
    }
    encoder.dispatchThreadgroups_threadsPerThreadgroup(
        MTLSize {
            width,
            height,
            depth,
        },
        MTLSize {
            width: dispatch.threads as usize,
            height: 1,
            depth: 1,
        },
    );
}

/// Refuses what Metal would stop the program for, before anything is encoded.
pub(crate) fn check(dispatch: &Dispatch<'_, Metal>) -> Result<(), DeviceError> {
    let Pipeline {
        kernel,
        most_threads,
        ..
    } = dispatch.pipeline;
    let refuse = |reason: String| Err(DeviceError::Launch(format!("kernel {kernel}: {reason}")));
    let threads = dispatch.threads as usize;
    if threads == 0 || threads > *most_threads {
        return refuse(format!(
            "{threads} threads a threadgroup, of which this GPU takes {most_threads} at most for it"
        ));
    }
    if dispatch.arguments.len() > MOST_ARGUMENTS {
        return refuse(format!("{} arguments", dispatch.arguments.len()));
    }
    for (index, argument) in dispatch.arguments.iter().enumerate() {
        let Argument::Buffer {
            buffer,
            offset,
            bytes,
            ..
        } = argument
        else {
            continue;
        };
        let Buffer { bytes: held, .. } = *buffer;
        // A length of usize::MAX is the rest of the buffer.
        let fits = *offset <= *held && (*bytes == usize::MAX || *bytes <= held - offset);
        if !fits || offset % 4 != 0 {
            return refuse(format!(
                "argument {index} is {bytes} bytes at {offset} of a buffer of {held}"
            ));
        }
    }
    Ok(())
}
