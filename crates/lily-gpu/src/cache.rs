//! Plans that were recorded lately.

use crate::record::Recording;
use lily_plan::Plan;
use std::collections::VecDeque;
use std::sync::{Arc, Weak};

/// Recordings of the plans run lately.
#[derive(Default)]
pub(crate) struct RecordingCache(VecDeque<(Weak<Plan>, Kept)>);

/// A recording, its dispatches' pipelines and the key that its submission is kept under.
#[derive(Clone)]
pub(crate) struct Kept {
    pub recording: Arc<Recording>,
    /// For each stage, the pipelines of its dispatches.
    pub pipelines: Arc<[Vec<usize>]>,
    pub key: u64,
}

impl RecordingCache {
    const ENTRIES: usize = 16;

    /// The plan's recording. Keys of recordings that are no longer kept go to `forgotten`.
    pub fn find(&mut self, plan: &Arc<Plan>, forgotten: &mut Vec<u64>) -> Option<Kept> {
        self.0.retain(|(known, kept)| {
            let alive = known.strong_count() > 0;
            if !alive {
                forgotten.push(kept.key);
            }
            alive
        });
        let same = |known: &Weak<Plan>| std::ptr::eq(known.as_ptr(), Arc::as_ptr(plan));
        let found = self.0.iter().find(|(known, _)| same(known))?;
        Some(found.1.clone())
    }

    pub fn keep(&mut self, plan: &Arc<Plan>, kept: &Kept, forgotten: &mut Vec<u64>) {
        self.0.push_front((Arc::downgrade(plan), kept.clone()));
        let more = self.0.len().min(Self::ENTRIES);
        forgotten.extend(self.0.drain(more..).map(|(_, kept)| kept.key));
    }

    /// Nothing submitted before may come again: its buffers are gone.
    pub fn renew(&mut self, keys: &mut u64, forgotten: &mut Vec<u64>) {
        for (_, kept) in &mut self.0 {
            forgotten.push(kept.key);
            *keys += 1;
            kept.key = *keys;
        }
    }
}
