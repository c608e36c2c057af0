//! Scratch values in one arena. Placement comes after the stages: two values share memory only if the
//! last stage that touches the one lies before the stage that writes the other, so that sharing never
//! adds a hazard that the stages do not already order.

use crate::operand::{ElementType, Resource, ScratchId};
use crate::plan::Plan;

/// Where the scratch values of a plan lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Byte offset by [`ScratchId`]; `None` for a value no step of the plan touches.
    pub offsets: Vec<Option<usize>>,
    /// Bytes by [`ScratchId`].
    pub sizes: Vec<usize>,
    /// Bytes of the arena.
    pub arena_bytes: usize,
}

/// Values begin on cache lines (and where GPUs bind buffers at an offset).
const ALIGNMENT: usize = 256;

impl Placement {
    pub(crate) fn compute(plan: &Plan, element_bytes: impl Fn(ElementType) -> usize) -> Self {
        // First and last stage of each value.
        let mut lifetimes: Vec<Option<(usize, usize)>> = vec![None; plan.scratch.len()];
        let mut written = vec![false; plan.scratch.len()];
        for (stage, steps) in plan.stages.iter().enumerate() {
            for &step in steps {
                let access = plan.steps[step].operation.access();
                for resource in access.reads.iter().chain(&access.writes) {
                    if let Resource::Scratch(id) = resource {
                        let (_, last) = lifetimes[id.index()].get_or_insert((stage, stage));
                        *last = stage;
                    }
                }
                for resource in &access.writes {
                    if let Resource::Scratch(id) = resource {
                        written[id.index()] = true;
                    }
                }
            }
        }
        for (lifetime, written) in lifetimes.iter_mut().zip(written) {
            // What no step writes is given by the caller, before everything.
            if let (Some((first, _)), false) = (lifetime, written) {
                *first = 0;
            }
        }
        for id in plan.outputs() {
            // Read by the caller, after everything.
            let (_, last) = lifetimes[id.index()].get_or_insert((0, 0));
            *last = usize::MAX;
        }

        let sizes: Vec<usize> = plan
            .scratch
            .iter()
            .map(|spec| (spec.elements() * element_bytes(spec.element)).next_multiple_of(ALIGNMENT))
            .collect();
        // Largest first, each at the lowest offset where it meets no value alive at the same time.
        let mut order: Vec<usize> = (0..sizes.len())
            .filter(|&index| lifetimes[index].is_some())
            .collect();
        order.sort_by_key(|&index| (std::cmp::Reverse(sizes[index]), index));
        let mut offsets: Vec<Option<usize>> = vec![None; sizes.len()];
        let mut arena_bytes = 0;
        let mut placed: Vec<usize> = Vec::new();
        for index in order {
            let (first, last) = lifetimes[index].expect("only touched values are ordered");
            let mut neighbours: Vec<(usize, usize)> = placed
                .iter()
                .filter(|&&other| {
                    let (other_first, other_last) = lifetimes[other].expect("placed values live");
                    other_first <= last && first <= other_last
                })
                .map(|&other| (offsets[other].expect("placed"), sizes[other]))
                .collect();
            neighbours.sort_unstable();
            let mut offset = 0;
            for (start, size) in neighbours {
                if offset + sizes[index] <= start {
                    break;
                }
                offset = offset.max(start + size);
            }
            offsets[index] = Some(offset);
            arena_bytes = arena_bytes.max(offset + sizes[index]);
            placed.push(index);
        }
        Placement {
            offsets,
            sizes,
            arena_bytes,
        }
    }

    /// The byte range of a value. Panics for one that no step touches.
    pub fn range(&self, id: ScratchId) -> std::ops::Range<usize> {
        let offset = self.offsets[id.index()].expect("a value that some step touches");
        offset..offset + self.sizes[id.index()]
    }
}
