//! Hazards → stages. A step must come after the steps whose results it reads, and may not overwrite
//! what earlier steps still read or wrote. Its stage is one more than the latest such step's: as soon
//! as possible. A barrier stands only between stages.

use crate::operand::Resource;
use crate::plan::Step;
use std::collections::HashMap;

#[derive(Default)]
struct Seen {
    last_write: Option<usize>,
    last_read: Option<usize>,
}

/// The stage of each step, by the hazards between them.
pub(crate) fn stage_of_each(steps: &[Step]) -> Vec<usize> {
    let mut seen: HashMap<Resource, Seen> = HashMap::new();
    let mut stages = Vec::with_capacity(steps.len());
    for step in steps {
        let access = step.operation.access();
        let mut stage = 0;
        let mut after = |earlier: Option<usize>| {
            if let Some(earlier) = earlier {
                stage = stage.max(earlier + 1);
            }
        };
        for resource in &access.reads {
            // Read after write.
            after(seen.get(resource).and_then(|seen| seen.last_write));
        }
        for resource in &access.writes {
            // Write after write, write after read.
            if let Some(seen) = seen.get(resource) {
                after(seen.last_write);
                after(seen.last_read);
            }
        }
        for resource in access.reads {
            let seen = seen.entry(resource).or_default();
            seen.last_read = seen.last_read.max(Some(stage));
        }
        for resource in access.writes {
            seen.entry(resource).or_default().last_write = Some(stage);
        }
        stages.push(stage);
    }
    stages
}

/// Step numbers by stage.
pub(crate) fn levels(steps: &[Step]) -> Vec<Vec<usize>> {
    let stages = stage_of_each(steps);
    let count = stages.iter().max().map_or(0, |last| last + 1);
    let mut levels = vec![Vec::new(); count];
    for (step, stage) in stages.into_iter().enumerate() {
        levels[stage].push(step);
    }
    levels
}
