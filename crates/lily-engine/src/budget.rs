//! Memory is budgeted before it is taken.

use crate::options::EngineOptions;
use crate::plans;
use lily_plan::{Device, ModelDescription, Phase, PlanClass, PlanOutput, route};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Of the memory that is free, the engine takes nine tenths and leaves the rest to others.
const USABLE_TENTHS: u64 = 9;

/// What the budget stands at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryUse {
    /// Bytes that sessions and working memory may take together.
    pub limit: u64,
    /// Bytes of working memory, set aside once: it does not depend on prompt lengths.
    pub working: u64,
    /// Bytes reserved by open sessions.
    pub sessions: u64,
}

impl MemoryUse {
    /// What `device` may take for a model with these options, before anything is taken.
    pub fn plan(
        device: &dyn Device,
        model: &Arc<ModelDescription>,
        options: &EngineOptions,
    ) -> MemoryUse {
        let limit = options.memory_limit.unwrap_or_else(|| {
            // A device that cannot tell refuses nothing.
            let free = device.available_memory().unwrap_or(u64::MAX / 2);
            free / 10 * USABLE_TENTHS
        });
        let longest = model.config.max_positions;
        let context = options.context.unwrap_or(longest).min(longest);
        let class = |phase, rows, context, output| PlanClass {
            phase,
            precision: options.precision,
            rows,
            context,
            output,
        };
        // The largest plans of either phase: every other needs less.
        let rows = options.prefill_chunk.clamp(1, context);
        let prefill = class(Phase::Prefill, rows, context, PlanOutput::LastLogits);
        let band = route::context_band(context);
        let most_rows = device.most_decode_rows();
        let decode = |output| class(Phase::Decode, most_rows, band, output);
        let working = [
            prefill,
            decode(PlanOutput::AllLogits),
            decode(PlanOutput::Sampled),
        ]
        .map(|class| {
            let plan = plans::record(device, model, class, options.plan_transform.as_ref());
            device.working_bytes(&plan)
        })
        .into_iter()
        .fold(0, u64::max);
        MemoryUse {
            limit,
            working,
            sessions: 0,
        }
    }

    /// Bytes that further sessions may take.
    pub fn free(&self) -> u64 {
        self.limit
            .saturating_sub(self.working)
            .saturating_sub(self.sessions)
    }
}

#[derive(Debug)]
pub(crate) struct Budget {
    limit: u64,
    working: u64,
    reserved: AtomicU64,
}

/// Bytes set aside for a session, given back when it goes.
#[derive(Debug)]
pub(crate) struct Reservation {
    budget: Arc<Budget>,
    bytes: u64,
}

impl Budget {
    pub fn new(planned: MemoryUse) -> Arc<Self> {
        Arc::new(Budget {
            limit: planned.limit,
            working: planned.working,
            reserved: AtomicU64::new(0),
        })
    }

    pub fn used(&self) -> MemoryUse {
        MemoryUse {
            limit: self.limit,
            working: self.working,
            sessions: self.reserved.load(Ordering::Relaxed),
        }
    }

    /// Sets `bytes` aside, or says how many are free.
    pub fn reserve(self: &Arc<Self>, bytes: u64) -> Result<Reservation, u64> {
        let mut free = 0;
        self.reserved
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |reserved| {
                free = self
                    .limit
                    .saturating_sub(self.working)
                    .saturating_sub(reserved);
                (bytes <= free).then(|| reserved + bytes)
            })
            .map(|_| Reservation {
                budget: self.clone(),
                bytes,
            })
            .map_err(|_| free)
    }
}

impl Reservation {
    /// Sets more aside, up to `bytes` in all, or says how many are free.
    pub fn grow(&mut self, bytes: u64) -> Result<(), u64> {
        let mut more = self.budget.reserve(bytes.saturating_sub(self.bytes))?;
        // They are this one's now, and nothing is left to be given back by the other.
        self.bytes += std::mem::take(&mut more.bytes);
        Ok(())
    }

    /// Gives back all but `bytes`.
    pub fn shrink(&mut self, bytes: u64) {
        let less = self.bytes.saturating_sub(bytes);
        self.bytes -= less;
        self.budget.reserved.fetch_sub(less, Ordering::Relaxed);
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.budget
            .reserved
            .fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_reserved_is_not_given_twice_and_comes_back() {
        let budget = Budget::new(MemoryUse {
            limit: 100,
            working: 20,
            sessions: 0,
        });
        let first = budget.reserve(50).unwrap();
        assert_eq!(budget.reserve(31).unwrap_err(), 30);
        let second = budget.reserve(30).unwrap();
        assert_eq!(budget.reserve(1).unwrap_err(), 0);
        drop(first);
        assert_eq!(budget.used().sessions, 30);
        assert!(budget.reserve(50).is_ok());
        drop(second);
        let mut changing = budget.reserve(30).unwrap();
        assert_eq!(changing.grow(81), Err(50));
        changing.grow(80).unwrap();
        changing.grow(10).unwrap();
        assert_eq!((changing.bytes(), budget.used().sessions), (80, 80));
        changing.shrink(90);
        changing.shrink(40);
        assert_eq!((changing.bytes(), budget.used().sessions), (40, 40));
        drop(changing);
        assert_eq!(budget.used().sessions, 0);
    }
}
