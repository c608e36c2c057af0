//! Gated full attention: query and key preparation, cache, softmax by blocks of keys.

use super::Native;
use super::dense::{rms_norm, sigmoid};
use super::work::{Work, with_buffer};
use crate::context::Row;
use lily_checkpoint::WeightId;
use lily_plan::ScratchId;
use std::ops::Range;

/// Keys that are scored together. Blocks lie at fixed distances from the beginning of the range, so the
/// order of a query's sums does not depend on the chunk it came in.
const KEY_BLOCK: usize = 64;

/// Query rows of a work item: with eight query heads a KV head, 128 queries share each key read.
const QUERY_ROWS: usize = 16;

/// Running attention of some queries that share a KV head: sums of weighted values (not normalised),
/// largest score and sum of weights so far.
struct Running<'b> {
    sums: &'b mut [f32],
    largest: &'b mut [f32],
    weight: &'b mut [f32],
}

/// The keys (and values) that queries attend to: some positions of one KV head of a row's session.
struct Keys<'b> {
    layer: u16,
    row: Row<'b>,
    group: usize,
    positions: Range<usize>,
}

/// Rotary factors of one position.
struct Rotation {
    factors: Vec<(f32, f32)>,
}

impl Rotation {
    fn apply(&self, head: &mut [f32]) {
        let half = self.factors.len();
        for (pair, &(sin, cos)) in self.factors.iter().enumerate() {
            let (a, b) = (head[pair], head[pair + half]);
            head[pair] = a * cos - b * sin;
            head[pair + half] = b * cos + a * sin;
        }
    }
}

impl<'a> Native<'a> {
    /// Frequencies in f64 rounded to f32; the angle is their f32 product with the position.
    fn rotation(self, position: usize) -> Rotation {
        let config = self.context.config;
        let factors = (0..config.rotary_dim / 2)
            .map(|pair| {
                let exponent = -2.0 * pair as f64 / config.rotary_dim as f64;
                let frequency = config.rope_theta.powf(exponent) as f32;
                let (sin, cos) = f64::from(position as f32 * frequency).sin_cos();
                (sin as f32, cos as f32)
            })
            .collect();
        Rotation { factors }
    }

    fn normed_head(self, head: &[f32], weight: &[f32], out: &mut [f32]) {
        out.copy_from_slice(&head[..out.len()]);
        rms_norm(
            self.set,
            out,
            weight,
            self.context.config.rms_norm_eps as f32,
        );
    }

    pub fn head_norm(self, input: ScratchId, weight: WeightId, output: ScratchId) -> Work<'a> {
        let width = self.context.config.head_dim;
        let heads = self.context.columns(output) / width;
        let stride = self.context.columns(input) / heads;
        let (input, weight) = (
            self.context.read(input),
            self.context.weights.vector(weight),
        );
        let out = self.context.output(output);
        Work::new(self.context.rows(), move |row| {
            with_buffer(width, |buffer| {
                for head in row * heads..(row + 1) * heads {
                    self.normed_head(&input[head * stride..][..width], weight, buffer);
                    // SAFETY: each item writes its own row.
                    unsafe { out.write(head * width, buffer) };
                }
            });
        })
    }

    pub fn rotate(self, input: ScratchId, output: ScratchId) -> Work<'a> {
        let columns = self.context.columns(input);
        let (input, out) = (self.context.read(input), self.context.output(output));
        Work::new(self.context.rows(), move |row| {
            let rotation = self.rotation(self.context.row(row).position);
            with_buffer(columns, |buffer| {
                buffer.copy_from_slice(&input[row * columns..][..columns]);
                for head in buffer.chunks_mut(self.context.config.head_dim) {
                    rotation.apply(head);
                }
                // SAFETY: each item writes its own row.
                unsafe { out.write(row * columns, buffer) };
            });
        })
    }

    pub fn cache_write(self, layer: u16, keys: ScratchId, values: ScratchId) -> Work<'a> {
        let config = self.context.config;
        let inputs = [keys, values].map(|id| self.context.read(id));
        Work::new(self.context.rows(), move |row| {
            let Row { session, position } = self.context.row(row);
            for (cache, input) in session.cache(layer).into_iter().zip(inputs) {
                let rows = input[row * config.key_value_width()..][..config.key_value_width()]
                    .chunks(config.head_dim);
                for (head, stored) in rows.enumerate() {
                    // SAFETY: each item writes its own position.
                    unsafe { cache.write(head, position, stored) };
                }
            }
        })
    }

    pub fn query_key_prepare(
        self,
        layer: u16,
        [query_gate, keys, values]: [ScratchId; 3],
        [query_norm, key_norm]: [WeightId; 2],
        queries: ScratchId,
    ) -> Work<'a> {
        let config = self.context.config;
        let (width, heads) = (config.head_dim, config.attention_heads);
        let narrow = config.key_value_width();
        let [query_gate, keys, values] = [query_gate, keys, values].map(|id| self.context.read(id));
        let [query_norm, key_norm] =
            [query_norm, key_norm].map(|id| self.context.weights.vector(id));
        let out = self.context.output(queries);
        Work::new(self.context.rows(), move |row| {
            let Row { session, position } = self.context.row(row);
            let rotation = self.rotation(position);
            let [key_cache, value_cache] = session.cache(layer);
            with_buffer(width, |buffer| {
                for head in row * heads..(row + 1) * heads {
                    self.normed_head(&query_gate[head * 2 * width..], query_norm, buffer);
                    rotation.apply(buffer);
                    // SAFETY: each item writes its own row.
                    unsafe { out.write(head * width, buffer) };
                }
                for head in 0..config.key_value_heads {
                    let at = row * narrow + head * width;
                    self.normed_head(&keys[at..], key_norm, buffer);
                    rotation.apply(buffer);
                    // SAFETY: each item writes its own position.
                    unsafe {
                        key_cache.write(head, position, buffer);
                        value_cache.write(head, position, &values[at..][..width]);
                    }
                }
            });
        })
    }

    /// Attends over some positions of one KV head. Query `i` sees positions up to `limits[i]`.
    fn attend(self, keys: Keys<'_>, queries: &[f32], limits: &[usize], running: Running<'_>) {
        let Keys {
            layer,
            row,
            group,
            positions,
        } = keys;
        let width = self.context.config.head_dim;
        let scale = 1.0 / (width as f32).sqrt();
        let [keys, values] = row.session.cache(layer);
        let rows: Vec<u32> = (0..limits.len() as u32).collect();
        running.sums.fill(0.0);
        running.largest.fill(f32::NEG_INFINITY);
        running.weight.fill(0.0);
        with_buffer(KEY_BLOCK * width, |block| {
            with_buffer(limits.len() * KEY_BLOCK, |scores| {
                for start in positions.clone().step_by(KEY_BLOCK) {
                    let count = KEY_BLOCK.min(positions.end - start);
                    let block = &mut block[..count * width];
                    let scores = &mut scores[..limits.len() * count];
                    // SAFETY: the calling step reads the cache; nobody writes it in this stage.
                    unsafe { keys.read(group, start, block) };
                    self.set.products(queries, &rows, block, width, scores);
                    for (query, scores) in scores.chunks_mut(count).enumerate() {
                        let seen = (limits[query] + 1).saturating_sub(start).min(count);
                        let (seen, unseen) = scores.split_at_mut(seen);
                        unseen.fill(0.0);
                        let old = running.largest[query];
                        let new = seen.iter().fold(old, |new, &s| new.max(s * scale));
                        if seen.is_empty() {
                            continue;
                        }
                        let mut sum = 0.0;
                        for score in seen {
                            *score = (*score * scale - new).exp();
                            sum += *score;
                        }
                        let kept = (old - new).exp();
                        running.largest[query] = new;
                        running.weight[query] = running.weight[query] * kept + sum;
                        if kept != 1.0 {
                            let sums = &mut running.sums[query * width..][..width];
                            sums.iter_mut().for_each(|sum| *sum *= kept);
                        }
                    }
                    // SAFETY: as above.
                    unsafe { values.read(group, start, block) };
                    self.set.weighted_rows(scores, block, width, running.sums);
                }
            });
        });
    }

    pub fn attention(self, layer: u16, queries: ScratchId, output: ScratchId) -> Work<'a> {
        let config = self.context.config;
        let (width, heads) = (config.head_dim, config.attention_heads);
        let groups = config.key_value_heads;
        let each = heads / groups;
        let (queries, out) = (self.context.read(queries), self.context.output(output));
        let sequences: Vec<_> = self
            .context
            .sequences()
            .flat_map(|(_, rows)| {
                rows.clone()
                    .step_by(QUERY_ROWS)
                    .map(move |first| first..(first + QUERY_ROWS).min(rows.end))
            })
            .collect();
        Work::new(sequences.len() * groups, move |item| {
            // The longest first: they are last in the chunk.
            let rows = sequences[sequences.len() - 1 - item / groups].clone();
            let group = item % groups;
            let count = rows.len() * each;
            let limits: Vec<usize> = rows
                .clone()
                .flat_map(|row| std::iter::repeat_n(self.context.row(row).position, each))
                .collect();
            let end = limits[count - 1] + 1;
            with_buffer(count * width, |gathered| {
                with_buffer(count * (width + 2), |state| {
                    for (index, row) in rows.clone().enumerate() {
                        let from = (row * heads + group * each) * width;
                        gathered[index * each * width..][..each * width]
                            .copy_from_slice(&queries[from..][..each * width]);
                    }
                    let (sums, rest) = state.split_at_mut(count * width);
                    let (largest, weight) = rest.split_at_mut(count);
                    let running = Running {
                        sums,
                        largest,
                        weight,
                    };
                    let row = self.context.row(rows.start);
                    let keys = Keys {
                        layer,
                        row,
                        group,
                        positions: 0..end,
                    };
                    self.attend(keys, gathered, &limits, running);
                    for (index, sums) in sums.chunks_mut(width).enumerate() {
                        sums.iter_mut().for_each(|sum| *sum /= weight[index]);
                        let (row, head) = (rows.start + index / each, group * each + index % each);
                        // SAFETY: each item writes its own rows and heads.
                        unsafe { out.write((row * heads + head) * width, sums) };
                    }
                });
            });
        })
    }

    pub fn attention_partial(
        self,
        layer: u16,
        queries: ScratchId,
        block_length: usize,
        output: ScratchId,
    ) -> Work<'a> {
        let config = self.context.config;
        let (width, heads) = (config.head_dim, config.attention_heads);
        let groups = config.key_value_heads;
        let each = heads / groups;
        let blocks = self.context.plan.attention_blocks(block_length);
        let (queries, out) = (self.context.read(queries), self.context.output(output));
        let items: Vec<(usize, usize, usize)> = (0..self.context.rows())
            .flat_map(|row| {
                let used = self.context.row(row).position / block_length + 1;
                (0..used).flat_map(move |block| (0..groups).map(move |group| (row, group, block)))
            })
            .collect();
        Work::new(items.len(), move |item| {
            let (row_index, group, block) = items[item];
            let row = self.context.row(row_index);
            let limits = vec![row.position; each];
            let end = ((block + 1) * block_length).min(row.position + 1);
            let first = row_index * heads + group * each;
            let queries = &queries[first * width..][..each * width];
            with_buffer(each * (width + 2), |state| {
                let (sums, rest) = state.split_at_mut(each * width);
                let (largest, weight) = rest.split_at_mut(each);
                let running = Running {
                    sums,
                    largest,
                    weight,
                };
                let positions = block * block_length..end;
                let keys = Keys {
                    layer,
                    row,
                    group,
                    positions,
                };
                self.attend(keys, queries, &limits, running);
                for (index, sums) in sums.chunks(width).enumerate() {
                    let at = ((first + index) * blocks + block) * (width + 2);
                    // SAFETY: each item writes its own heads and block.
                    unsafe {
                        out.write(at, sums);
                        out.write(at + width, &[largest[index], weight[index]]);
                    }
                }
            });
        })
    }

    /// Merges blocks in ascending order; with the gate applied where there is one.
    pub fn attention_merge(
        self,
        partials: ScratchId,
        block_length: usize,
        query_gate: Option<ScratchId>,
        output: ScratchId,
    ) -> Work<'a> {
        let config = self.context.config;
        let (width, heads) = (config.head_dim, config.attention_heads);
        let blocks = self.context.plan.attention_blocks(block_length);
        let partials = self.context.read(partials);
        let query_gate = query_gate.map(|id| self.context.read(id));
        let out = self.context.output(output);
        Work::new(self.context.rows() * heads, move |index| {
            let used = self.context.row(index / heads).position / block_length + 1;
            let blocks = &partials[index * blocks * (width + 2)..][..used * (width + 2)];
            let largest = blocks
                .chunks(width + 2)
                .map(|block| block[width])
                .fold(f32::NEG_INFINITY, f32::max);
            with_buffer(width, |sums| {
                sums.fill(0.0);
                let mut weight = 0.0;
                for block in blocks.chunks(width + 2) {
                    let scale = (block[width] - largest).exp();
                    weight += scale * block[width + 1];
                    sums.iter_mut()
                        .zip(block)
                        .for_each(|(sum, x)| *sum += scale * x);
                }
                sums.iter_mut().for_each(|sum| *sum /= weight);
                if let Some(query_gate) = query_gate {
                    gate(sums, &query_gate[index * 2 * width..]);
                }
                // SAFETY: each item writes its own head.
                unsafe { out.write(index * width, sums) };
            });
        })
    }

    pub fn output_gate(
        self,
        input: ScratchId,
        query_gate: ScratchId,
        output: ScratchId,
    ) -> Work<'a> {
        let width = self.context.config.head_dim;
        let (input, query_gate) = (self.context.read(input), self.context.read(query_gate));
        let out = self.context.output(output);
        Work::new(input.len() / width, move |head| {
            with_buffer(width, |buffer| {
                buffer.copy_from_slice(&input[head * width..][..width]);
                gate(buffer, &query_gate[head * 2 * width..]);
                // SAFETY: each item writes its own head.
                unsafe { out.write(head * width, buffer) };
            });
        })
    }
}

/// Multiplies a head by the sigmoid of its gate, which follows its query.
fn gate(head: &mut [f32], query_gate: &[f32]) {
    let gates = &query_gate[head.len()..2 * head.len()];
    head.iter_mut()
        .zip(gates)
        .for_each(|(value, &g)| *value *= sigmoid(g));
}
