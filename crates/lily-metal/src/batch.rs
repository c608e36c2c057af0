//! How much work goes into a command buffer.
//!
//! A Mac's display shares its GPU, and macOS ends a command buffer that keeps the display waiting ("Impacting
//! Interactivity", "Caused GPU Timeout Error"): users of other engines report it from about half a second on
//! (ml-explore/mlx#3267). So a run is cut between stages into command buffers that are sent off one behind the
//! other without waiting. How long a dispatch takes is not known here; two counts stand for it, and neither has been
//! measured on a Mac.

use std::ops::Range;

/// Most dispatches of a command buffer. A decoded token of Qwen3.6-35B-A3B has 303, which makes three
/// command buffers: the GPU begins with the first while the others are encoded.
pub(crate) const MOST_DISPATCHES: usize = 128;

/// Most bytes that the dispatches of a command buffer write; it bounds prefill, where work grows with what is
/// written. A layer of Qwen3.6-35B-A3B writes about 65 MB for 512 tokens, from 77 GFLOP: two layers are a tenth of a
/// second at 1.3 TFLOP/s, half of what the first and smallest M1 can do at best.
pub(crate) const MOST_WRITTEN: u64 = 128 << 20;

/// What is known of a stage's work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Work {
    /// Dispatches.
    pub dispatches: usize,
    /// Bytes they may write.
    pub written: u64,
}

/// Which stages go into which command buffer: as many as fit, at least one. With `single`, one each.
pub(crate) fn cut(stages: &[Work], single: bool) -> Vec<Range<usize>> {
    let mut batches = Vec::new();
    let mut begin = 0;
    let mut held = Work::default();
    for (index, work) in stages.iter().enumerate() {
        let together = Work {
            dispatches: held.dispatches + work.dispatches,
            written: held.written.saturating_add(work.written),
        };
        let fits = together.dispatches <= MOST_DISPATCHES && together.written <= MOST_WRITTEN;
        if index > begin && (single || !fits) {
            batches.push(begin..index);
            begin = index;
            held = *work;
        } else {
            held = together;
        }
    }
    if begin < stages.len() {
        batches.push(begin..stages.len());
    }
    batches
}

#[cfg(test)]
mod tests {
    use super::*;

    fn work(dispatches: usize, written: u64) -> Work {
        Work {
            dispatches,
            written,
        }
    }

    #[test]
    fn both_limits_hold_on_both_sides() {
        for (first, second, together) in [
            (work(MOST_DISPATCHES - 1, 0), work(1, 0), true),
            (work(MOST_DISPATCHES, 0), work(1, 0), false),
            (work(1, MOST_WRITTEN - 1), work(1, 1), true),
            (work(1, MOST_WRITTEN), work(1, 1), false),
            (work(1, u64::MAX), work(1, u64::MAX), false),
        ] {
            let batches = cut(&[first, second], false);
            assert_eq!(batches.len(), if together { 1 } else { 2 });
        }
    }

    #[test]
    fn every_stage_is_in_one_batch_in_order() {
        let stages: Vec<Work> = (0..500)
            .map(|index| work(index % 7, (index as u64 % 11) << 23))
            .collect();
        for single in [false, true] {
            let batches = cut(&stages, single);
            let all: Vec<usize> = batches.iter().cloned().flatten().collect();
            assert_eq!(all, (0..500).collect::<Vec<_>>());
            assert_eq!(batches.len() == 500, single);
        }
        assert!(cut(&[], false).is_empty());
    }

    #[test]
    fn a_stage_beyond_the_limits_goes_alone() {
        let stages = [
            work(1, 0),
            work(MOST_DISPATCHES * 3, MOST_WRITTEN * 3),
            work(1, 0),
        ];
        assert_eq!(cut(&stages, false), [0..1, 1..2, 2..3]);
    }

    /// The first stage of a batch counts towards it.
    #[test]
    fn a_new_batch_starts_with_its_first_stage() {
        let half = work(MOST_DISPATCHES / 2, 0);
        assert_eq!(
            cut(&[half, half, half, half, half], false),
            [0..2, 2..4, 4..5]
        );
    }
}
