//! Gated DeltaNet (docs/model.md, section 5.2).

use super::{rms_norm, silu, store, store_rows};
use crate::context::Context;
use crate::state::{LIVE, NEXT};
use lily_checkpoint::WeightId;
use lily_plan::ScratchId;

/// Step 2: depthwise causal convolution and silu.
pub(super) fn convolve(
    context: &Context<'_>,
    layer: u16,
    input: ScratchId,
    taps: WeightId,
    output: ScratchId,
) {
    let channels = context.columns(input);
    let kernel = context.config.conv_kernel;
    let (input, taps) = (context.read(input), context.weights.vector(taps));
    let mut result = Vec::new();
    for (session, rows) in context.sequences() {
        let [live, next] = [LIVE, NEXT].map(|copy| session.history(layer)[copy]);
        // SAFETY: this step reads the live history and writes the next, on one thread.
        let (live, next) = unsafe { (live.all_shared(), next.all()) };
        // The K−1 rows before the run, then the run's own.
        let padded: Vec<f32> = live
            .iter()
            .chain(&input[rows.start * channels..rows.end * channels])
            .copied()
            .collect();
        for row in 0..rows.len() {
            for channel in 0..channels {
                let sum: f64 = (0..kernel)
                    .map(|tap| {
                        f64::from(taps[channel * kernel + tap])
                            * f64::from(padded[(row + tap) * channels + channel])
                    })
                    .sum();
                result.push(silu(sum));
            }
        }
        next.copy_from_slice(&padded[rows.len() * channels..]);
    }
    store(context, output, result.into_iter());
}

/// Step 3: queries and keys normalised by head, queries divided by sqrt(Dk).
pub(super) fn prepare_queries_and_keys(
    context: &Context<'_>,
    convolved: ScratchId,
    query_key: ScratchId,
) {
    let config = context.config;
    let (heads, width) = (config.linear_key_heads, config.linear_key_dim);
    let channels = context.columns(convolved);
    let rows = context.read(convolved).chunks(channels).map(|row| {
        let mut normalised = Vec::with_capacity(2 * heads * width);
        for (index, head) in row[..2 * heads * width].chunks(width).enumerate() {
            let squares: f64 = head.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
            let mut scale = 1.0 / (squares + 1e-6).sqrt();
            if index < heads {
                scale /= (width as f64).sqrt();
            }
            normalised.extend(head.iter().map(|&x| f64::from(x) * scale));
        }
        normalised
    });
    store_rows(context, query_key, rows);
}

/// Step 4: `g = exp(−exp(A_log) · softplus(a + dt_bias))`.
pub(super) fn prepare_decay(
    context: &Context<'_>,
    a: ScratchId,
    a_log: WeightId,
    dt_bias: WeightId,
    decay: ScratchId,
) {
    let heads = context.config.linear_value_heads;
    let (a_log, dt_bias) = (
        context.weights.vector(a_log),
        context.weights.vector(dt_bias),
    );
    let values = context.read(a).iter().enumerate().map(|(index, &a)| {
        let head = index % heads;
        let x = f64::from(a) + f64::from(dt_bias[head]);
        // softplus without overflow.
        let softplus = x.max(0.0) + (-x.abs()).exp().ln_1p();
        (-f64::from(a_log[head]).exp() * softplus).exp()
    });
    store(context, decay, values);
}

/// Step 5: the gated delta rule, token by token. The state is rounded to f32 after each token, as it is
/// stored.
pub(super) fn scan(
    context: &Context<'_>,
    layer: u16,
    [query_key, convolved, decay, strength]: [ScratchId; 4],
    output: ScratchId,
) {
    let config = context.config;
    let (key_heads, value_heads) = (config.linear_key_heads, config.linear_value_heads);
    let (key_dim, value_dim) = (config.linear_key_dim, config.linear_value_dim);
    let channels = context.columns(convolved);
    let [query_key, convolved, decay, strength] =
        [query_key, convolved, decay, strength].map(|id| context.read(id));
    let mut result = vec![0.0; context.rows() * value_heads * value_dim];
    for (session, rows) in context.sequences() {
        let [live, next] = [LIVE, NEXT].map(|copy| session.recurrent(layer)[copy]);
        // SAFETY: this step reads the live state and writes the next, on one thread.
        let (live, state) = unsafe { (live.all_shared(), next.all()) };
        state.copy_from_slice(live);
        for row in rows {
            for head in 0..value_heads {
                let key_head = head * key_heads / value_heads;
                let at = |head: usize| (row * 2 * key_heads + head) * key_dim;
                let query = &query_key[at(key_head)..][..key_dim];
                let key = &query_key[at(key_heads + key_head)..][..key_dim];
                let values = row * channels + 2 * key_heads * key_dim + head * value_dim;
                let g = f64::from(decay[row * value_heads + head]);
                let beta = f64::from(strength[row * value_heads + head]);
                for index in 0..value_dim {
                    let state = &mut state[(head * value_dim + index) * key_dim..][..key_dim];
                    let decayed: Vec<f64> = state.iter().map(|&s| g * f64::from(s)).collect();
                    let u: f64 = decayed
                        .iter()
                        .zip(key)
                        .map(|(s, &k)| s * f64::from(k))
                        .sum();
                    let delta = beta * (f64::from(convolved[values + index]) - u);
                    let mut y = 0.0;
                    for position in 0..key_dim {
                        let updated = decayed[position] + delta * f64::from(key[position]);
                        y += updated * f64::from(query[position]);
                        state[position] = updated as f32;
                    }
                    result[(row * value_heads + head) * value_dim + index] = y;
                }
            }
        }
    }
    store(context, output, result.into_iter());
}

/// Step 6: norm by head, then the gate.
pub(super) fn gated_norm(
    context: &Context<'_>,
    input: ScratchId,
    gate: ScratchId,
    weight: WeightId,
    output: ScratchId,
) {
    let width = context.config.linear_value_dim;
    let weight = context.weights.vector(weight);
    let heads = context
        .read(input)
        .chunks(width)
        .zip(context.read(gate).chunks(width));
    let rows = heads.map(|(head, gate)| {
        let mut normed = rms_norm(head, weight, context.config.rms_norm_eps);
        normed
            .iter_mut()
            .zip(gate)
            .for_each(|(value, &z)| *value *= silu(z.into()));
        normed
    });
    store_rows(context, output, rows);
}
