//! Choosing tokens: kernels/sampling.metal.

use super::Recorder;
use crate::kernels::{Memory, Output, Region, Sample};
use lily_plan::{DeviceError, ScratchId};

/// Most tokens of a vocabulary that is sampled from: so many weights sum to 64 bits.
pub const MOST_SAMPLED_TOKENS: usize = 1 << 18;

impl Recorder<'_> {
    pub(super) fn sample(
        &mut self,
        logits: ScratchId,
        adjusted: ScratchId,
    ) -> Result<(), DeviceError> {
        let (rows, vocabulary) = (self.rows_of(logits), self.columns(logits));
        if vocabulary > MOST_SAMPLED_TOKENS {
            let what = format!("sampling from {vocabulary} tokens");
            return Err(self.unsupported(what, "its kernel takes at most 262,144"));
        }
        let kernel = Sample {
            vocabulary: vocabulary as u32,
            logits: self.input(logits),
            adjusted: self.output(adjusted),
            sequence: self.is_sequence(),
            sampling: Output(Region {
                memory: Memory::Sampling,
                offset: 0,
                bytes: usize::MAX,
            }),
            table: self.table(),
            tokens: self.next_tokens(),
            chosen: self.chosen(),
        };
        self.dispatch(kernel, [rows, 1, 1], 1024);
        Ok(())
    }
}
