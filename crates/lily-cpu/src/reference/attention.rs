//! Gated full attention (docs/model.md, section 5.1).

use super::{rms_norm, sigmoid, store_rows};
use crate::context::{Context, Row};
use lily_checkpoint::WeightId;
use lily_plan::ScratchId;
use std::ops::Range;

/// Step 2: norm of each head. The heads of `input` may lie further apart than they are wide.
pub(super) fn head_norm(
    context: &Context<'_>,
    input: ScratchId,
    weight: WeightId,
    output: ScratchId,
) {
    let width = context.config.head_dim;
    let heads = context.columns(output) / width;
    let stride = context.columns(input) / heads;
    let weight = context.weights.vector(weight);
    let rows = context
        .read(input)
        .chunks(stride)
        .map(|head| rms_norm(&head[..width], weight, context.config.rms_norm_eps));
    store_rows(context, output, rows);
}

/// Step 3: the pair (i, i + rotary_dim/2) turns by `position · theta^(−2i/rotary_dim)`.
pub(super) fn rotate(context: &Context<'_>, input: ScratchId, output: ScratchId) {
    let config = context.config;
    let (width, half) = (config.head_dim, config.rotary_dim / 2);
    let heads = context.columns(input) / width;
    let rows = context
        .read(input)
        .chunks(width)
        .enumerate()
        .map(|(index, head)| {
            let position = context.row(index / heads).position;
            let mut rotated: Vec<f64> = head.iter().map(|&x| f64::from(x)).collect();
            for pair in 0..half {
                let exponent = -2.0 * pair as f64 / config.rotary_dim as f64;
                let frequency = config.rope_theta.powf(exponent) as f32;
                let angle = f64::from(position as f32 * frequency);
                let (a, b) = (f64::from(head[pair]), f64::from(head[pair + half]));
                rotated[pair] = a * angle.cos() - b * angle.sin();
                rotated[pair + half] = b * angle.cos() + a * angle.sin();
            }
            rotated
        });
    store_rows(context, output, rows);
}

/// Appends keys and values.
pub(super) fn cache_write(context: &Context<'_>, layer: u16, keys: ScratchId, values: ScratchId) {
    let config = context.config;
    for (which, id) in [keys, values].into_iter().enumerate() {
        for (row, stored) in context
            .read(id)
            .chunks(config.key_value_width())
            .enumerate()
        {
            let Row { session, position } = context.row(row);
            for (head, stored) in stored.chunks(config.head_dim).enumerate() {
                // SAFETY: this step writes the cache, on one thread.
                unsafe { session.cache(layer)[which].write(head, position, stored) };
            }
        }
    }
}

/// Unnormalised attention of one query over some positions: D sums, largest score, sum of weights.
fn attend_over(
    context: &Context<'_>,
    layer: u16,
    row: Row<'_>,
    head: usize,
    query: &[f32],
    positions: Range<usize>,
) -> Vec<f64> {
    let config = context.config;
    let width = config.head_dim;
    let group_head = head * config.key_value_heads / config.attention_heads;
    let [keys, values] = [0, 1].map(|which| {
        let mut rows = vec![0.0; positions.len() * width];
        // SAFETY: the calling step reads the cache and nobody writes it meanwhile.
        unsafe { row.session.cache(layer)[which].read(group_head, positions.start, &mut rows) };
        rows
    });
    let scores: Vec<f64> = keys
        .chunks(width)
        .map(|key| {
            let dot: f64 = key
                .iter()
                .zip(query)
                .map(|(&k, &q)| f64::from(k) * f64::from(q))
                .sum();
            dot / (width as f64).sqrt()
        })
        .collect();
    let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let mut sums = vec![0.0; width];
    let mut weight = 0.0;
    for (score, value) in scores.iter().zip(values.chunks(width)) {
        let p = (score - largest).exp();
        weight += p;
        sums.iter_mut()
            .zip(value)
            .for_each(|(sum, &v)| *sum += p * f64::from(v));
    }
    sums.extend([largest, weight]);
    sums
}

/// Step 4, whole.
pub(super) fn attend(context: &Context<'_>, layer: u16, queries: ScratchId, output: ScratchId) {
    let width = context.config.head_dim;
    let heads = context.config.attention_heads;
    let rows = context
        .read(queries)
        .chunks(width)
        .enumerate()
        .map(|(index, query)| {
            let row = context.row(index / heads);
            let mut sums = attend_over(
                context,
                layer,
                row,
                index % heads,
                query,
                0..row.position + 1,
            );
            let weight = sums[width + 1];
            sums.truncate(width);
            sums.iter_mut().for_each(|sum| *sum /= weight);
            sums
        });
    store_rows(context, output, rows);
}

/// Step 4, by blocks. Blocks beyond a row's position are left as they are.
pub(super) fn partial(
    context: &Context<'_>,
    layer: u16,
    queries: ScratchId,
    block_length: usize,
    output: ScratchId,
) {
    let width = context.config.head_dim;
    let heads = context.config.attention_heads;
    let blocks = context.plan.attention_blocks(block_length);
    // SAFETY: this step writes `output`, on one thread.
    let out = unsafe { context.output(output).memory.all() };
    for (index, query) in context.read(queries).chunks(width).enumerate() {
        let row = context.row(index / heads);
        for block in 0..=row.position / block_length {
            let end = ((block + 1) * block_length).min(row.position + 1);
            let positions = block * block_length..end;
            let sums = attend_over(context, layer, row, index % heads, query, positions);
            let start = (index * blocks + block) * (width + 2);
            for (out, sum) in out[start..][..width + 2].iter_mut().zip(sums) {
                *out = sum as f32;
            }
        }
    }
}

/// Puts blocks together.
pub(super) fn merge(
    context: &Context<'_>,
    partials: ScratchId,
    block_length: usize,
    output: ScratchId,
) {
    let width = context.config.head_dim;
    let heads = context.config.attention_heads;
    let blocks = context.plan.attention_blocks(block_length);
    let partials = context.read(partials);
    let rows = (0..context.rows() * heads).map(|index| {
        let used = context.row(index / heads).position / block_length + 1;
        let blocks = &partials[index * blocks * (width + 2)..][..used * (width + 2)];
        let largest = blocks
            .chunks(width + 2)
            .map(|b| b[width])
            .fold(f32::NEG_INFINITY, f32::max);
        let (mut sums, mut weight) = (vec![0.0; width], 0.0);
        for block in blocks.chunks(width + 2) {
            let scale = (f64::from(block[width]) - f64::from(largest)).exp();
            weight += scale * f64::from(block[width + 1]);
            sums.iter_mut()
                .zip(block)
                .for_each(|(sum, &x)| *sum += scale * f64::from(x));
        }
        sums.iter_mut().for_each(|sum| *sum /= weight);
        sums
    });
    store_rows(context, output, rows);
}

/// Step 5: the sigmoid gate, interleaved with the queries by head.
pub(super) fn output_gate(
    context: &Context<'_>,
    input: ScratchId,
    query_gate: ScratchId,
    output: ScratchId,
) {
    let width = context.config.head_dim;
    let heads = context
        .read(input)
        .chunks(width)
        .zip(context.read(query_gate).chunks(2 * width));
    let rows = heads.map(|(attended, query_gate)| {
        let gate = &query_gate[width..];
        attended
            .iter()
            .zip(gate)
            .map(|(&x, &g)| f64::from(x) * sigmoid(g.into()))
            .collect()
    });
    store_rows(context, output, rows);
}
