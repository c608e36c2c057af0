//! Memory is budgeted before it is taken.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

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
    pub fn new(limit: u64, working: u64) -> Arc<Self> {
        Arc::new(Budget {
            limit,
            working,
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
        let budget = Budget::new(100, 20);
        let first = budget.reserve(50).unwrap();
        assert_eq!(budget.reserve(31).unwrap_err(), 30);
        let second = budget.reserve(30).unwrap();
        assert_eq!(budget.reserve(1).unwrap_err(), 0);
        drop(first);
        assert_eq!(budget.used().sessions, 30);
        assert!(budget.reserve(50).is_ok());
        drop(second);
    }
}
