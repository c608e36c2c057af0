//! The mixture of experts (docs/model.md, section 5.3).

use super::{Matrix, sigmoid, store, store_rows};
use crate::context::Context;
use lily_checkpoint::WeightId;
use lily_plan::{ScratchId, WeightArithmetic};

/// Step 1: the k largest logits; the lower id wins a tie.
pub(super) fn route(context: &Context<'_>, logits: ScratchId, ids: ScratchId, weights: ScratchId) {
    let config = context.config;
    let mut chosen_ids = Vec::new();
    let mut chosen_weights = Vec::new();
    for row in context.read(logits).chunks(config.experts) {
        let mut order: Vec<usize> = (0..config.experts).collect();
        order.sort_by(|&a, &b| row[b].total_cmp(&row[a]).then(a.cmp(&b)));
        order.truncate(config.experts_per_token);
        // Softmax over all, renormalised over the chosen, is a softmax over the chosen.
        let largest = f64::from(row[order[0]]);
        let p: Vec<f64> = order
            .iter()
            .map(|&id| (f64::from(row[id]) - largest).exp())
            .collect();
        let total: f64 = p.iter().sum();
        chosen_ids.extend(order.iter().map(|&id| id as u32));
        chosen_weights.extend(p.iter().map(|p| p / total));
    }
    // SAFETY: this step writes `ids`, on one thread.
    unsafe { context.output_u32(ids).all() }.copy_from_slice(&chosen_ids);
    store(context, weights, chosen_weights.into_iter());
}

/// Offsets of the experts' pairs, then the pairs.
pub(super) fn group(context: &Context<'_>, ids: ScratchId, grouping: ScratchId) {
    let experts = context.config.experts;
    let ids = context.read_u32(ids);
    // SAFETY: this step writes `grouping`, on one thread.
    let out = unsafe { context.output_u32(grouping).all() };
    let (offsets, pairs) = out.split_at_mut(experts + 1);
    let mut placed = 0;
    for (expert, offset) in offsets[..experts].iter_mut().enumerate() {
        *offset = placed as u32;
        for (pair, &id) in ids.iter().enumerate() {
            if id as usize == expert {
                pairs[placed] = pair as u32;
                placed += 1;
            }
        }
    }
    offsets[experts] = placed as u32;
}

/// Step 2: each pair's product with its expert, pair by pair.
pub(super) fn project(
    context: &Context<'_>,
    input: ScratchId,
    ids: ScratchId,
    weight: WeightId,
    output: ScratchId,
    arithmetic: WeightArithmetic,
) {
    let columns = context.columns(input);
    let outputs = context.columns(output);
    let (inputs, ids) = (context.read(input), context.read_u32(ids));
    // One input row a token, or one a pair.
    let shared_by = ids.len() * columns / inputs.len();
    let matrix = Matrix::new(context, weight, arithmetic);
    let rows = ids.iter().enumerate().map(|(pair, &expert)| {
        let x = &inputs[pair / shared_by * columns..][..columns];
        matrix.multiply(x, expert as usize * outputs, outputs)
    });
    store_rows(context, output, rows);
}

/// Steps 2 and 3: the weighted sum, and the shared expert behind its gate.
pub(super) fn combine(
    context: &Context<'_>,
    experts: ScratchId,
    weights: ScratchId,
    shared: ScratchId,
    shared_gate: ScratchId,
    output: ScratchId,
) {
    let hidden = context.columns(output);
    let choices = context.config.experts_per_token;
    let [experts, weights, shared, gate] =
        [experts, weights, shared, shared_gate].map(|id| context.read(id));
    let rows = (0..context.rows()).map(|row| {
        let gate = sigmoid(gate[row].into());
        (0..hidden)
            .map(|column| {
                let routed: f64 = (row * choices..(row + 1) * choices)
                    .map(|pair| {
                        f64::from(weights[pair]) * f64::from(experts[pair * hidden + column])
                    })
                    .sum();
                routed + gate * f64::from(shared[row * hidden + column])
            })
            .collect()
    });
    store_rows(context, output, rows);
}
