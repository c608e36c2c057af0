//! A session: a token history and the state that stands behind it.

use crate::budget::Reservation;
use crate::decode::Underway;
use crate::prefix::Kept;
use lily_plan::SessionState;

/// One sequence: its tokens and its state on the device.
pub struct Session {
    pub(crate) tokens: Vec<u32>,
    pub(crate) state: Box<dyn SessionState>,
    /// What the device has been sent beyond these tokens.
    pub(crate) underway: Option<Underway>,
    /// States that it can go back to, by position.
    pub(crate) kept: Vec<Kept>,
    /// Given back when the session goes.
    pub(crate) _reservation: Reservation,
}

impl Session {
    /// The tokens whose state the session holds.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Positions it may grow to.
    pub fn capacity(&self) -> usize {
        self.state.capacity()
    }

    /// Bytes it really takes so far.
    pub fn resident_bytes(&self) -> u64 {
        self.state.resident_bytes()
    }

    /// Takes back what was sent off ahead and is not wanted: it goes with its chain. Of others that share the chain, no
    /// further step goes on by it.
    pub(crate) fn settle(&mut self) {
        self.underway = None;
    }

    /// Forgets everything.
    pub fn reset(&mut self) {
        self.settle();
        self.kept.clear();
        self.tokens.clear();
        self.state.reset();
    }
}
