//! Decode without a round trip to the processor between two tokens: a run takes its tokens from the run before it, on
//! the device, and is sent off before anyone has seen them.

use crate::device::{DeviceError, Launch, SessionState};
use crate::plan::Plan;
use std::sync::{Arc, Weak};

/// In place of a chosen token: the session's text had ended before this run, which has not moved it. No vocabulary has
/// it.
pub const STOPPED: u32 = u32::MAX - 1;

/// The name of a chain of runs. A device forgets what it has of a chain whose name is gone.
#[derive(Debug)]
pub struct Chain(Arc<()>);

/// What a device knows a [`Chain`] by.
#[derive(Clone, Debug)]
pub struct ChainReference(Weak<()>);

impl Chain {
    /// A name like no other, with what its device knows it by.
    pub fn new() -> (Self, ChainReference) {
        let name = Arc::new(());
        let reference = ChainReference(Arc::downgrade(&name));
        (Chain(name), reference)
    }
}

impl ChainReference {
    /// Whether this is the chain.
    pub fn is(&self, chain: &Chain) -> bool {
        std::ptr::eq(self.0.as_ptr(), Arc::as_ptr(&chain.0))
    }

    /// Whether nobody can ask for the chain any more.
    pub fn is_gone(&self) -> bool {
        self.0.strong_count() == 0
    }
}

/// Decode by chains: at most two runs are under way, and the tokens of the first can be seen while the second runs.
///
/// Sessions move on when a run is collected, each by a token, unless the device had stopped it before. What else the device
/// is asked for before the last run of a chain is collected is done behind the runs under way, whose tokens stay there to
/// be collected. If that concerns a session of the chain, or the chain is dropped, it is not collected any more, and what
/// was not collected is as if taken back: its sessions stand where the last collected run left them, and cannot step back
/// from there.
pub trait RunAhead {
    /// Sends off the first run of a chain: `plan` decodes and chooses tokens. `stops[row]` are tokens that end the
    /// row's text (none for rows beyond its end): the run behind one does not move its session on, nor does the run
    /// behind [`NO_TOKEN`](lily_sampling::NO_TOKEN). A device may know fewer of them than are given.
    ///
    /// # Errors
    /// As [`Device::execute`](crate::Device::execute), as far as they are known before the run has ended; and launches
    /// with presets or an observer.
    fn begin(
        &mut self,
        plan: &Arc<Plan>,
        launch: Launch<'_>,
        stops: &[&[u32]],
    ) -> Result<Chain, DeviceError>;

    /// Sends off the next run, which decodes the tokens that the run under way chooses, by the sampling parameters of
    /// that run with each token accepted. False where that cannot be now: two are under way, or none; the plan ends
    /// there; a session has no room that needs no waiting; a mask is set. Then the chain is collected, and another
    /// begun.
    ///
    /// # Errors
    /// Where the device fails.
    fn follow(
        &mut self,
        chain: &Chain,
        sessions: &mut [&mut dyn SessionState],
    ) -> Result<bool, DeviceError>;

    /// Waits for the chain's oldest run that has not been collected: the token of each row, or [`STOPPED`].
    ///
    /// # Errors
    /// Where a run has failed. Nothing of the chain is left to be collected then, and the states of its sessions are
    /// lost: they are to be reset.
    fn collect(
        &mut self,
        chain: &Chain,
        sessions: &mut [&mut dyn SessionState],
    ) -> Result<Vec<u32>, DeviceError>;
}
