//! The mixture of experts. Pairs of (row, choice) that chose one expert are computed together, so that
//! its packed weights are read and dequantised once.

use super::Native;
use super::dense::{Input, sigmoid};
use super::work::{Work, with_buffer};
use lily_checkpoint::WeightId;
use lily_plan::{ScratchId, WeightArithmetic};

/// Expert rows dequantised at a time.
const TILE_ROWS: usize = 16;

/// The pairs that chose one expert.
struct Group {
    expert: usize,
    pairs: Vec<u32>,
}

impl<'a> Native<'a> {
    pub fn route(self, logits: ScratchId, ids: ScratchId, weights: ScratchId) -> Work<'a> {
        let config = self.context.config;
        let (experts, choices) = (config.experts, config.experts_per_token);
        let logits = self.context.read(logits);
        let (ids, weights) = (self.context.output_u32(ids), self.context.output(weights));
        Work::new(self.context.rows(), move |row| {
            let logits = &logits[row * experts..][..experts];
            // SAFETY: each item writes its own row.
            let ids = unsafe { ids.slice(row * choices, choices) };
            with_buffer(choices, |p| {
                for (choice, p) in p.iter_mut().enumerate() {
                    let (taken, rest) = ids.split_at_mut(choice);
                    let mut best: Option<usize> = None;
                    for (id, logit) in logits.iter().enumerate() {
                        // The lower id wins a tie.
                        let better = best.is_none_or(|best| logit.total_cmp(&logits[best]).is_gt());
                        if better && !taken.contains(&(id as u32)) {
                            best = Some(id);
                        }
                    }
                    let best = best.expect("no more choices than experts");
                    rest[0] = best as u32;
                    *p = (logits[best] - logits[ids[0] as usize]).exp();
                }
                let total: f32 = p.iter().sum();
                p.iter_mut().for_each(|p| *p /= total);
                // SAFETY: each item writes its own row.
                unsafe { weights.write(row * choices, p) };
            });
        })
    }

    pub fn group_experts(self, ids: ScratchId, grouping: ScratchId) -> Work<'a> {
        let experts = self.context.config.experts;
        let (ids, out) = (
            self.context.read_u32(ids),
            self.context.output_u32(grouping),
        );
        Work::new(1, move |_| {
            // SAFETY: the only item.
            let (offsets, pairs) = unsafe { out.all() }.split_at_mut(experts + 1);
            offsets.fill(0);
            ids.iter().for_each(|&id| offsets[id as usize + 1] += 1);
            for expert in 0..experts {
                offsets[expert + 1] += offsets[expert];
            }
            let mut next = offsets.to_vec();
            for (pair, &id) in ids.iter().enumerate() {
                pairs[next[id as usize] as usize] = pair as u32;
                next[id as usize] += 1;
            }
        })
    }

    /// The experts that were chosen and the pairs that chose them: from the grouping where the plan has
    /// made one, from the ids themselves for a few rows.
    fn groups(self, ids: ScratchId, grouping: Option<ScratchId>) -> Vec<Group> {
        let experts = self.context.config.experts;
        if let Some(grouping) = grouping {
            let (offsets, pairs) = self.context.read_u32(grouping).split_at(experts + 1);
            return (0..experts)
                .map(|expert| {
                    let range = offsets[expert] as usize..offsets[expert + 1] as usize;
                    Group {
                        expert,
                        pairs: pairs[range].to_vec(),
                    }
                })
                .filter(|group| !group.pairs.is_empty())
                .collect();
        }
        let mut groups: Vec<Group> = Vec::new();
        for (pair, &id) in self.context.read_u32(ids).iter().enumerate() {
            match groups.iter_mut().find(|group| group.expert == id as usize) {
                Some(group) => group.pairs.push(pair as u32),
                None => groups.push(Group {
                    expert: id as usize,
                    pairs: vec![pair as u32],
                }),
            }
        }
        groups
    }

    /// Calls `compute(input rows, pairs, first weight row, count, first output column)` for each expert
    /// and block of `outputs` output columns. `input` has a row a token or a row a pair.
    fn by_expert(
        self,
        input: Input<'a>,
        (ids, grouping): (ScratchId, Option<ScratchId>),
        outputs: usize,
        compute: impl Fn(&Input<'_>, &[u32], &[u32], (usize, usize), usize) + Send + Sync + 'a,
    ) -> Work<'a> {
        let pairs = self.context.rows() * self.context.config.experts_per_token;
        let shared_by = pairs / input.rows.len();
        let groups: Vec<(Group, Vec<u32>)> = self
            .groups(ids, grouping)
            .into_iter()
            .map(|group| {
                let rows = group
                    .pairs
                    .iter()
                    .map(|&pair| pair / shared_by as u32)
                    .collect();
                (group, rows)
            })
            .collect();
        let blocks = outputs.div_ceil(TILE_ROWS);
        Work::new(groups.len() * blocks, move |item| {
            let (group, rows) = &groups[item / blocks];
            let first = item % blocks * TILE_ROWS;
            let count = TILE_ROWS.min(outputs - first);
            let block = (group.expert * outputs + first, count);
            compute(&input, rows, &group.pairs, block, first);
        })
    }

    pub fn expert_project(
        self,
        input: ScratchId,
        ids: (ScratchId, Option<ScratchId>),
        weight: WeightId,
        output: ScratchId,
        arithmetic: WeightArithmetic,
    ) -> Work<'a> {
        let (out, outputs) = (self.context.output(output), self.context.columns(output));
        self.by_expert(
            self.input(input),
            ids,
            outputs,
            move |input, rows, pairs, block, first| {
                self.products(input, rows, weight, block, arithmetic, |products| {
                    for (&pair, values) in pairs.iter().zip(products.chunks(block.1)) {
                        // SAFETY: each item owns its pairs' columns of the block.
                        unsafe { out.write(pair as usize * outputs + first, values) };
                    }
                });
            },
        )
    }

    pub fn expert_input(
        self,
        input: ScratchId,
        norm: Option<WeightId>,
        ids: (ScratchId, Option<ScratchId>),
        weights: [WeightId; 2],
        output: ScratchId,
        arithmetic: WeightArithmetic,
    ) -> Work<'a> {
        let input = self.normed_input(input, norm);
        let (out, outputs) = (self.context.output(output), self.context.columns(output));
        self.by_expert(
            input,
            ids,
            outputs,
            move |input, rows, pairs, block, first| {
                self.gated(input, rows, weights, block, arithmetic, |products| {
                    for (&pair, values) in pairs.iter().zip(products.chunks(block.1)) {
                        // SAFETY: each item owns its pairs' columns of the block.
                        unsafe { out.write(pair as usize * outputs + first, values) };
                    }
                });
            },
        )
    }

    pub fn combine(
        self,
        [experts, weights, shared, shared_gate]: [ScratchId; 4],
        residual: Option<ScratchId>,
        output: ScratchId,
    ) -> Work<'a> {
        let hidden = self.context.columns(output);
        let choices = self.context.config.experts_per_token;
        let [experts, weights, shared, gate] =
            [experts, weights, shared, shared_gate].map(|id| self.context.read(id));
        let residual = residual.map(|id| self.context.read(id));
        let out = self.context.output(output);
        Work::new(self.context.rows(), move |row| {
            let gate = sigmoid(gate[row]);
            with_buffer(hidden, |sums| {
                sums.fill(0.0);
                for pair in row * choices..(row + 1) * choices {
                    add_scaled(sums, weights[pair], &experts[pair * hidden..][..hidden]);
                }
                add_scaled(sums, gate, &shared[row * hidden..][..hidden]);
                if let Some(residual) = residual {
                    add_scaled(sums, 1.0, &residual[row * hidden..][..hidden]);
                }
                // SAFETY: each item writes its own row.
                unsafe { out.write(row * hidden, sums) };
            });
        })
    }

    pub fn expert_output(
        self,
        [activated, weights, shared, shared_gate, residual]: [ScratchId; 5],
        ids: ScratchId,
        [down, shared_down]: [WeightId; 2],
        output: ScratchId,
    ) -> Work<'a> {
        let choices = self.context.config.experts_per_token;
        let hidden = self.context.columns(output);
        let (activated, shared) = (self.input(activated), self.input(shared));
        let [weights, gate, residual] =
            [weights, shared_gate, residual].map(|id| self.context.read(id));
        let groups = self.groups(ids, None);
        let out = self.context.output(output);
        let exact = WeightArithmetic::Exact;
        Work::blocks(hidden, TILE_ROWS, move |first, count| {
            with_buffer(activated.rows.len() * count, |by_pair| {
                for Group { expert, pairs } in &groups {
                    let block = (expert * hidden + first, count);
                    self.products(&activated, pairs, down, block, exact, |products| {
                        for (&pair, values) in pairs.iter().zip(products.chunks(count)) {
                            by_pair[pair as usize * count..][..count].copy_from_slice(values);
                        }
                    });
                }
                self.products(
                    &shared,
                    &shared.rows,
                    shared_down,
                    (first, count),
                    exact,
                    |shared| {
                        with_buffer(count, |sums| {
                            for (row, shared) in shared.chunks(count).enumerate() {
                                sums.fill(0.0);
                                for pair in row * choices..(row + 1) * choices {
                                    add_scaled(
                                        sums,
                                        weights[pair],
                                        &by_pair[pair * count..][..count],
                                    );
                                }
                                add_scaled(sums, sigmoid(gate[row]), shared);
                                add_scaled(sums, 1.0, &residual[row * hidden + first..][..count]);
                                // SAFETY: each item owns these columns of every row.
                                unsafe { out.write(row * hidden + first, sums) };
                            }
                        });
                    },
                );
            });
        })
    }
}

fn add_scaled(sums: &mut [f32], factor: f32, values: &[f32]) {
    sums.iter_mut()
        .zip(values)
        .for_each(|(sum, value)| *sum += factor * value);
}
