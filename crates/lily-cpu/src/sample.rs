//! Choosing tokens: the sampler's own function, for the reference and the native kernels alike.

use crate::context::Context;
use lily_plan::{NO_TOKEN, ScratchId};
use lily_sampling::{Chooser, SamplingRow};

/// Runs [`Operation::ArgMax`](lily_plan::Operation::ArgMax) for all rows.
pub(crate) fn arg_max(context: &Context<'_>, logits: ScratchId) {
    choose(context, logits, &[]);
}

/// Runs [`Operation::Sample`](lily_plan::Operation::Sample) for all rows.
pub(crate) fn sample(context: &Context<'_>, logits: ScratchId) {
    choose(context, logits, context.sampling);
}

fn choose(context: &Context<'_>, logits: ScratchId, sampling: &[SamplingRow<'_>]) {
    let columns = context.columns(logits);
    let limit = columns.min(context.token_limit as usize);
    let mut chooser = Chooser::default();
    let tokens = context.read(logits).chunks(columns).enumerate();
    let tokens = tokens
        .map(|(row, logits)| {
            let parameters = sampling.get(row).copied().unwrap_or_default();
            chooser
                .choose(logits, limit, &parameters)
                .unwrap_or(NO_TOKEN)
        })
        .collect();
    // SAFETY: called by the one work item of the step that declares writing the token slot.
    unsafe { context.next_tokens.set(tokens) };
}
