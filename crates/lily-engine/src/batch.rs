//! Answers decoded together: what a step reads of the weights is read once for all of them. A row of a batch is computed
//! as it is alone, so that an answer does not depend on what else was asked at the time.

use crate::decode::DecodeRow;
use crate::engine::Engine;
use crate::error::EngineError;
use crate::generation::{Generation, Progress};
use lily_plan::{DeviceError, Outcome, PlanOutput, route};
use std::time::Instant;

/// What decode of a generation asks of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Wanted {
    output: PlanOutput,
    /// The band of contexts it stands in.
    context: usize,
}

impl Wanted {
    fn of(generation: &Generation) -> Self {
        Wanted {
            output: generation.choice().output(),
            context: route::context_band(generation.position() + 1),
        }
    }

    /// Whether one plan does for both. One that samples chooses greedily for the rows that want that.
    fn shares_with(self, other: Self) -> bool {
        let is_host = |wanted: Self| wanted.output == PlanOutput::AllLogits;
        self.context == other.context && is_host(self) == is_host(other)
    }
}

/// Generations that share a plan, and what it leaves.
#[derive(Debug, PartialEq, Eq)]
struct Batch {
    output: PlanOutput,
    /// Which, in order.
    members: Vec<usize>,
}

/// Batches of the sizes that plans have, the largest first, for generations by their numbers. Three are two and one: no
/// session is at hand that could fill up a plan of four.
fn batches(wanted: &[(usize, Wanted)], most: usize) -> Vec<Batch> {
    let mut groups: Vec<Vec<(usize, Wanted)>> = Vec::new();
    for &one in wanted {
        match groups
            .iter_mut()
            .find(|group| group[0].1.shares_with(one.1))
        {
            Some(group) => group.push(one),
            None => groups.push(vec![one]),
        }
    }
    let mut batches = Vec::new();
    for group in groups {
        let mut rest = &group[..];
        while !rest.is_empty() {
            let mut sizes = route::DECODE_ROWS.into_iter().rev();
            let size = sizes.find(|&size| size <= rest.len().min(most));
            let (these, others) = rest.split_at(size.unwrap_or(1));
            let mut outputs = these.iter().map(|(_, wanted)| wanted.output);
            let sampled = outputs.find(|&output| output == PlanOutput::Sampled);
            batches.push(Batch {
                output: sampled.unwrap_or(these[0].1.output),
                members: these.iter().map(|&(index, _)| index).collect(),
            });
            rest = others;
        }
    }
    batches
}

impl Engine {
    /// [`advance`](Self::advance) for each of these generations, in order. Those that stand in decode make their step in
    /// batches, as far as plans can be shared.
    ///
    /// An error is that of its generation alone, unless the device fails: then it is that of a batch.
    pub fn advance_all(
        &mut self,
        generations: &mut [&mut Generation],
    ) -> Vec<Result<Progress, EngineError>> {
        let mut failed: Vec<Option<EngineError>> = Vec::new();
        failed.resize_with(generations.len(), || None);
        for (generation, failed) in generations.iter_mut().zip(&mut failed) {
            if generation.has_step() {
                *failed = generation.ask_guide().err();
            }
        }
        let decoding = generations.iter().zip(&failed).enumerate();
        let decoding = decoding.filter_map(|(index, (generation, failed))| {
            (generation.has_step() && failed.is_none()).then_some((index, generation))
        });
        let wanted: Vec<(usize, Wanted)> = decoding
            .map(|(index, generation)| (index, Wanted::of(generation)))
            .collect();
        let most = self.device.most_decode_rows();
        for Batch { output, members } in batches(&wanted, most) {
            let mut batch: Vec<&mut Generation> = generations
                .iter_mut()
                .enumerate()
                .filter(|(index, _)| members.contains(index))
                .map(|(_, generation)| &mut **generation)
                .collect();
            if let Err(error) = self.decode_batch(&mut batch, output) {
                for index in members {
                    failed[index] = Some(error.clone().into());
                }
            }
        }
        let all = generations.iter_mut().zip(failed);
        all.map(|(generation, failed)| match failed {
            Some(error) => generation.fail(error),
            None => self.advance(generation),
        })
        .collect()
    }

    /// Decodes the pending tokens of these generations, which a plan that leaves `output` can be shared by, and leaves
    /// each what it chooses its next token from.
    pub(crate) fn decode_batch(
        &mut self,
        batch: &mut [&mut Generation],
        output: PlanOutput,
    ) -> Result<(), DeviceError> {
        let start = Instant::now();
        let rows = batch.iter_mut().map(|generation| generation.take_step());
        let mut rows: Vec<DecodeRow<'_>> = rows.collect();
        let Outcome { logits, tokens } = self.decode_together(&mut rows, output)?;
        let elapsed = start.elapsed();
        let columns = logits.len() / batch.len();
        for (index, generation) in batch.iter_mut().enumerate() {
            let outcome = Outcome {
                logits: logits[index * columns..][..columns].to_vec(),
                tokens: tokens.get(index).copied().into_iter().collect(),
            };
            generation.decoded(outcome, elapsed);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(output: PlanOutput, context: usize) -> Wanted {
        Wanted { output, context }
    }

    /// The batches of what is wanted, as output and members.
    fn of(wanted: &[Wanted]) -> Vec<(PlanOutput, Vec<usize>)> {
        let numbered: Vec<_> = wanted.iter().copied().enumerate().collect();
        let batches = batches(&numbered, 8).into_iter();
        batches.map(|batch| (batch.output, batch.members)).collect()
    }

    #[test]
    fn batches_have_the_sizes_of_plans_and_keep_their_order() {
        let sizes = |count: usize| -> Vec<usize> {
            let batches = of(&vec![wanted(PlanOutput::Token, 4_096); count]);
            let members: Vec<usize> = batches.iter().flat_map(|batch| batch.1.clone()).collect();
            assert_eq!(members, (0..count).collect::<Vec<_>>());
            batches.iter().map(|batch| batch.1.len()).collect()
        };
        assert_eq!(sizes(1), [1]);
        assert_eq!(sizes(3), [2, 1]);
        assert_eq!(sizes(7), [4, 2, 1]);
        assert_eq!(sizes(8), [8]);
        assert_eq!(sizes(11), [8, 2, 1]);
        assert!(of(&[]).is_empty());
        let three = [(0, wanted(PlanOutput::Token, 4_096)); 3];
        let alone = batches(&three, 1);
        assert!(alone.len() == 3 && alone.iter().all(|batch| batch.members.len() == 1));
    }

    #[test]
    fn greedy_and_sampled_answers_share_a_plan_host_chosen_and_longer_ones_have_theirs() {
        use PlanOutput::{AllLogits, Sampled, Token};
        let found = of(&[
            wanted(Token, 4_096),
            wanted(AllLogits, 4_096),
            wanted(Token, 32_768),
            wanted(Sampled, 4_096),
            wanted(AllLogits, 4_096),
            wanted(Token, 4_096),
        ]);
        let expected = [
            (Sampled, vec![0, 3]),
            (Token, vec![5]),
            (AllLogits, vec![1, 4]),
            (Token, vec![2]),
        ];
        assert_eq!(found, expected);
    }
}
