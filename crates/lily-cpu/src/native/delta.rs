//! Gated DeltaNet: convolution, preparation, recurrence, gated norm.

use super::dense::{rms_norm, sigmoid, silu};
use super::work::{Work, with_buffer};
use super::{InstructionSet, Native};
use crate::state::{LIVE, NEXT, StateView};
use lily_checkpoint::WeightId;
use lily_plan::ScratchId;
use std::ops::Range;

/// Rows of a head's state that one work item carries through the scan: 32 rows of 128 are 16 KiB,
/// which stay in a core's first cache for the whole chunk.
const STATE_ROWS: usize = 32;

/// The inputs of a convolution: rows before the run, then the run's.
struct History<'a> {
    live: &'a [f32],
    input: &'a [f32],
    channels: usize,
    kernel: usize,
}

impl<'a> History<'a> {
    fn new(native: Native<'a>, session: &'a StateView<'a>, layer: u16, input: &'a [f32]) -> Self {
        let config = native.context.config;
        let live = session.history(layer)[LIVE];
        // SAFETY: a step with a convolution reads the live history, which no step of a run writes.
        let live = unsafe { live.all_shared() };
        History {
            live,
            input,
            channels: config.conv_channels(),
            kernel: config.conv_kernel,
        }
    }

    /// Row `index`, counted from the oldest of the history.
    fn row(&self, index: usize) -> &'a [f32] {
        let before = self.kernel - 1;
        let (rows, index) = if index < before {
            (self.live, index)
        } else {
            (self.input, index - before)
        };
        &rows[index * self.channels..][..self.channels]
    }

    /// Convolution and silu of some channels at row `row` of the run.
    fn convolve(&self, taps: &[f32], row: usize, channels: Range<usize>, out: &mut [f32]) {
        out.fill(0.0);
        for tap in 0..self.kernel {
            let source = &self.row(row + tap)[channels.clone()];
            let weights = taps[channels.start * self.kernel..]
                .iter()
                .skip(tap)
                .step_by(self.kernel);
            for ((out, x), w) in out.iter_mut().zip(source).zip(weights) {
                *out += w * x;
            }
        }
        out.iter_mut().for_each(|value| *value = silu(*value));
    }

    /// Stores some channels of the history after the run's `rows` rows.
    ///
    /// # Safety
    /// The calling work item owns these channels of the next history.
    unsafe fn store_next(
        &self,
        session: &StateView<'_>,
        layer: u16,
        rows: usize,
        channels: Range<usize>,
    ) {
        let next = session.history(layer)[NEXT];
        for index in 0..self.kernel - 1 {
            // SAFETY: by this function's contract.
            let out = unsafe { next.slice(index * self.channels + channels.start, channels.len()) };
            out.copy_from_slice(&self.row(rows + index)[channels.clone()]);
        }
    }
}

/// Decay and write strength of one head: `exp(−exp(A_log) · softplus(a + dt_bias))`, `sigmoid(b)`.
fn decay_and_strength(a: f32, b: f32, a_log: f32, dt_bias: f32) -> (f32, f32) {
    let x = a + dt_bias;
    let softplus = x.max(0.0) + (-x.abs()).exp().ln_1p();
    ((-a_log.exp() * softplus).exp(), sigmoid(b))
}

/// Divides a head by its length (and by sqrt(Dk) for a query).
fn normalise(set: InstructionSet, head: &mut [f32], is_query: bool) {
    let mut squares = [0.0];
    set.products(head, &[0], head, head.len(), &mut squares);
    let mut scale = 1.0 / (squares[0] + 1e-6).sqrt();
    if is_query {
        scale /= (head.len() as f32).sqrt();
    }
    head.iter_mut().for_each(|x| *x *= scale);
}

impl<'a> Native<'a> {
    pub fn convolve(
        self,
        layer: u16,
        input: ScratchId,
        taps: WeightId,
        output: ScratchId,
    ) -> Work<'a> {
        let channels = self.context.columns(input);
        let input = self.context.read(input);
        let (taps, out) = (
            self.context.weights.vector(taps),
            self.context.output(output),
        );
        let rows: Vec<(&StateView<'_>, Range<usize>, usize)> = self
            .context
            .sequences()
            .flat_map(|(session, rows)| rows.clone().map(move |row| (session, rows.clone(), row)))
            .collect();
        Work::new(rows.len(), move |item| {
            let (session, ref sequence, row) = rows[item];
            let input = &input[sequence.start * channels..sequence.end * channels];
            let history = History::new(self, session, layer, input);
            with_buffer(channels, |buffer| {
                history.convolve(taps, row - sequence.start, 0..channels, buffer);
                // SAFETY: each item writes its own row.
                unsafe { out.write(row * channels, buffer) };
            });
            if row == sequence.start {
                // SAFETY: one item a session writes its next history.
                unsafe { history.store_next(session, layer, sequence.len(), 0..channels) };
            }
        })
    }

    pub fn delta_prepare(
        self,
        [convolved, a, b]: [ScratchId; 3],
        [a_log, dt_bias]: [WeightId; 2],
        [query_key, decay, strength]: [ScratchId; 3],
    ) -> Work<'a> {
        let config = self.context.config;
        let (heads, width) = (config.linear_value_heads, config.linear_key_dim);
        let key_width = config.linear_key_heads * width;
        let channels = self.context.columns(convolved);
        let [convolved, a, b] = [convolved, a, b].map(|id| self.context.read(id));
        let [a_log, dt_bias] = [a_log, dt_bias].map(|id| self.context.weights.vector(id));
        let [query_key, decay, strength] =
            [query_key, decay, strength].map(|id| self.context.output(id));
        Work::new(self.context.rows(), move |row| {
            with_buffer(2 * key_width, |buffer| {
                buffer.copy_from_slice(&convolved[row * channels..][..2 * key_width]);
                for (index, head) in buffer.chunks_mut(width).enumerate() {
                    normalise(self.set, head, index < config.linear_key_heads);
                }
                // SAFETY: each item writes its own row.
                unsafe { query_key.write(row * 2 * key_width, buffer) };
            });
            for head in 0..heads {
                let at = row * heads + head;
                let (g, beta) = decay_and_strength(a[at], b[at], a_log[head], dt_bias[head]);
                // SAFETY: each item writes its own row.
                unsafe {
                    decay.write(at, &[g]);
                    strength.write(at, &[beta]);
                }
            }
        })
    }

    pub fn delta_scan(self, layer: u16, inputs: [ScratchId; 4], output: ScratchId) -> Work<'a> {
        let config = self.context.config;
        let (heads, value_dim) = (config.linear_value_heads, config.linear_value_dim);
        let (key_heads, key_dim) = (config.linear_key_heads, config.linear_key_dim);
        let channels = config.conv_channels();
        let [query_key, convolved, decay, strength] = inputs.map(|id| self.context.read(id));
        let out = self.context.output(output);
        let blocks = value_dim.div_ceil(STATE_ROWS);
        let sequences: Vec<_> = self.context.sequences().collect();
        Work::new(sequences.len() * heads * blocks, move |item| {
            let (session, ref rows) = sequences[item / (heads * blocks)];
            let (head, block) = (item / blocks % heads, item % blocks);
            let first = block * STATE_ROWS;
            let count = STATE_ROWS.min(value_dim - first);
            let key_head = head * key_heads / heads;
            let [live, next] = session.recurrent(layer);
            let part = ((head * value_dim + first) * key_dim, count * key_dim);
            // SAFETY: the live copy is only read; each item owns its rows of the next.
            let (live, state) =
                unsafe { (live.shared(part.0, part.1), next.slice(part.0, part.1)) };
            state.copy_from_slice(live);
            let mut y = [0.0; STATE_ROWS];
            for row in rows.clone() {
                let at = |head: usize| (row * 2 * key_heads + head) * key_dim;
                let values = row * channels + 2 * key_heads * key_dim + head * value_dim + first;
                self.set.delta_rows(
                    state,
                    &query_key[at(key_head)..][..key_dim],
                    &query_key[at(key_heads + key_head)..][..key_dim],
                    &convolved[values..][..count],
                    (decay[row * heads + head], strength[row * heads + head]),
                    &mut y[..count],
                );
                // SAFETY: each item writes its own columns.
                unsafe { out.write((row * heads + head) * value_dim + first, &y[..count]) };
            }
        })
    }

    pub fn gated_norm(
        self,
        input: ScratchId,
        gate: ScratchId,
        weight: WeightId,
        output: ScratchId,
    ) -> Work<'a> {
        let width = self.context.config.linear_value_dim;
        let (input, gate) = (self.context.read(input), self.context.read(gate));
        let (weight, out) = (
            self.context.weights.vector(weight),
            self.context.output(output),
        );
        Work::new(input.len() / width, move |head| {
            let at = head * width;
            self.gate_head(
                &input[at..][..width],
                &gate[at..][..width],
                weight,
                |values| {
                    // SAFETY: each item writes its own head.
                    unsafe { out.write(at, values) };
                },
            );
        })
    }

    /// `rms(head, weight) · silu(gate)`.
    fn gate_head(self, head: &[f32], gate: &[f32], weight: &[f32], store: impl FnOnce(&[f32])) {
        with_buffer(head.len(), |buffer| {
            buffer.copy_from_slice(head);
            rms_norm(
                self.set,
                buffer,
                weight,
                self.context.config.rms_norm_eps as f32,
            );
            buffer
                .iter_mut()
                .zip(gate)
                .for_each(|(value, &z)| *value *= silu(z));
            store(buffer);
        });
    }

    /// Everything from convolution to gated norm for one token a session, a work item a value head.
    pub fn delta_step(
        self,
        layer: u16,
        [input, gate, a, b]: [ScratchId; 4],
        [taps, a_log, dt_bias, norm]: [WeightId; 4],
        output: ScratchId,
    ) -> Work<'a> {
        let config = self.context.config;
        let (heads, value_dim) = (config.linear_value_heads, config.linear_value_dim);
        let (key_heads, key_dim) = (config.linear_key_heads, config.linear_key_dim);
        let channels = config.conv_channels();
        let [input, gate, a, b] = [input, gate, a, b].map(|id| self.context.read(id));
        let [taps, a_log, dt_bias, norm] =
            [taps, a_log, dt_bias, norm].map(|id| self.context.weights.vector(id));
        let out = self.context.output(output);
        Work::new(self.context.rows() * heads, move |item| {
            let (row, head) = (item / heads, item % heads);
            let key_head = head * key_heads / heads;
            let session = self.context.row(row).session;
            let history = History::new(self, session, layer, &input[row * channels..][..channels]);
            let query_channels = key_head * key_dim..(key_head + 1) * key_dim;
            let key_channels = query_channels.start + key_heads * key_dim
                ..query_channels.end + key_heads * key_dim;
            let first = 2 * key_heads * key_dim + head * value_dim;
            let value_channels = first..first + value_dim;
            with_buffer(2 * key_dim + 2 * value_dim, |buffer| {
                let (query, rest) = buffer.split_at_mut(key_dim);
                let (key, rest) = rest.split_at_mut(key_dim);
                let (values, y) = rest.split_at_mut(value_dim);
                history.convolve(taps, 0, query_channels.clone(), query);
                history.convolve(taps, 0, key_channels.clone(), key);
                history.convolve(taps, 0, value_channels.clone(), values);
                normalise(self.set, query, true);
                normalise(self.set, key, false);
                let at = row * heads + head;
                let factors = decay_and_strength(a[at], b[at], a_log[head], dt_bias[head]);
                let [live, next] = session.recurrent(layer);
                let part = (head * value_dim * key_dim, value_dim * key_dim);
                // SAFETY: the live copy is only read; each item owns its head of the next.
                let (live, state) =
                    unsafe { (live.shared(part.0, part.1), next.slice(part.0, part.1)) };
                state.copy_from_slice(live);
                self.set.delta_rows(state, query, key, values, factors, y);
                self.gate_head(y, &gate[at * value_dim..][..value_dim], norm, |values| {
                    // SAFETY: each item writes its own head.
                    unsafe { out.write(at * value_dim, values) };
                });
            });
            // SAFETY: each head owns its value channels; the first head of a key head its key channels.
            unsafe {
                history.store_next(session, layer, 1, value_channels);
                if head == 0 || (head - 1) * key_heads / heads != key_head {
                    history.store_next(session, layer, 1, query_channels);
                    history.store_next(session, layer, 1, key_channels);
                }
            }
        })
    }
}
