//! Choosing tokens by the launch's sampling parameters: the sampler's own function, for the reference and the native
//! kernels alike.

use crate::context::Context;
use lily_plan::{NO_TOKEN, ScratchId};
use lily_sampling::Chooser;

/// Runs [`Operation::Sample`](lily_plan::Operation::Sample) for all rows.
pub(crate) fn sample(context: &Context<'_>, logits: ScratchId) {
    let columns = context.columns(logits);
    let limit = columns.min(context.token_limit as usize);
    let mut chooser = Chooser::default();
    let tokens = context.read(logits).chunks(columns).enumerate();
    let tokens = tokens
        .map(|(row, logits)| {
            let parameters = context.sampling.get(row).copied().unwrap_or_default();
            chooser
                .choose(logits, limit, &parameters)
                .unwrap_or(NO_TOKEN)
        })
        .collect();
    // SAFETY: called by the one work item of the step that declares writing the token slot.
    unsafe { context.next_tokens.set(tokens) };
}
