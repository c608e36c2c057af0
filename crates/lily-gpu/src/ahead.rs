//! Chains of decode runs, each sent off before the tokens of the one before it were seen.
//!
//! The kernel that chooses a row's token also binds the next run of its session (kernels/turn.h), so that a run that
//! follows is the same dispatches once more, and the host writes nothing while any is under way.

use crate::cache::Kept;
use crate::device::GpuDevice;
use crate::gpu::Gpu;
use crate::sampling;
use crate::state::{GpuState, lock};
use lily_plan::{
    Chain, ChainReference, DeviceError, Launch, Phase, Plan, RunAhead, STOPPED, SessionState,
    own_state,
};
use std::collections::VecDeque;
use std::sync::Arc;

/// Runs that may be under way at once: so many slots the chosen tokens have.
const MOST_UNDER_WAY: usize = 2;

/// The chains of a device.
#[derive(Default)]
pub(crate) struct Chains {
    /// The one whose runs are under way, or were when it was last looked at.
    live: Option<Live>,
    /// Others, with what their last runs chose.
    settled: Vec<Settled>,
}

struct Live {
    reference: ChainReference,
    plan: Arc<Plan>,
    kept: Kept,
    /// Behind each run that was not collected, in order.
    marks: VecDeque<u64>,
    /// Runs sent off, and how many can be.
    runs: usize,
    most_runs: usize,
}

struct Settled {
    reference: ChainReference,
    results: VecDeque<Result<Vec<u32>, DeviceError>>,
}

impl<G: Gpu + 'static> GpuDevice<G> {
    /// Waits for what is under way, and keeps what it chose: from here on the host may write what runs read.
    pub(crate) fn settle(&mut self) {
        let Some(mut live) = self.chains.live.take() else {
            return;
        };
        let mut results = VecDeque::new();
        while !live.marks.is_empty() && results.back().is_none_or(Result::is_ok) {
            results.push_back(self.await_oldest(&mut live));
        }
        let settled = &mut self.chains.settled;
        settled.retain(|chain| !chain.reference.is_gone());
        if !live.reference.is_gone() {
            settled.push(Settled {
                reference: live.reference,
                results,
            });
        }
    }

    /// The tokens of the oldest run that was not collected.
    fn await_oldest(&self, live: &mut Live) -> Result<Vec<u32>, DeviceError> {
        let index = live.runs - live.marks.len();
        let mark = live.marks.pop_front().expect("looked for by the caller");
        let mut gpu = lock(&self.gpu);
        gpu.wait_for(mark)?;
        let tokens = self.chosen(&gpu, &live.plan, index);
        // The run behind may have failed before they were read.
        gpu.wait_for(mark)?;
        Ok(tokens)
    }

    /// Sends the run off that `live` is bound to.
    fn send(&self, live: &mut Live, states: &mut [&mut GpuState<G>]) -> Result<(), DeviceError> {
        let ready = self.ready(&live.plan, live.kept.clone(), states);
        let mut gpu = lock(&self.gpu);
        ready.send(&mut gpu)?;
        live.marks.push_back(gpu.mark()?);
        live.runs += 1;
        drop(ready);
        states.iter_mut().for_each(|state| state.keep_going());
        Ok(())
    }
}

/// Whether a further run of the chain's plan finds all that it needs in place.
fn has_room<G: Gpu + 'static>(live: &Live, states: &[&mut GpuState<G>]) -> bool {
    let ahead = live.marks.len() + 1;
    let fits = |state: &&mut GpuState<G>| {
        let end = state.position() + ahead;
        end <= state
            .capacity()
            .min(live.plan.class.context)
            .min(state.reserved())
    };
    live.runs < live.most_runs
        && (1..MOST_UNDER_WAY).contains(&live.marks.len())
        && states.iter().all(fits)
}

fn own_states<'a, G: Gpu + 'static>(
    sessions: &'a mut [&mut dyn SessionState],
) -> Result<Vec<&'a mut GpuState<G>>, DeviceError> {
    let sessions = sessions.iter_mut();
    sessions.map(|session| own_state(*session)).collect()
}

impl<G: Gpu + 'static> RunAhead for GpuDevice<G> {
    fn begin(
        &mut self,
        plan: &Arc<Plan>,
        mut launch: Launch<'_>,
        stops: &[&[u32]],
    ) -> Result<Chain, DeviceError> {
        let refuse = |reason: &str| Err(DeviceError::Launch(reason.into()));
        if plan.class.phase != Phase::Decode || !plan.chooses_token() {
            return refuse("only plans that decode and choose tokens make chains");
        }
        if launch.observer.is_some() || !launch.preset.is_empty() {
            return refuse("a chain has neither presets nor an observer");
        }
        let most_runs = if plan.samples() {
            sampling::most_runs(launch.sampling)
        } else {
            usize::MAX
        };
        let (kept, mut states) = self.bind(plan, &mut launch, Some(stops))?;
        let (chain, reference) = Chain::new();
        let mut live = Live {
            reference,
            plan: plan.clone(),
            kept,
            marks: VecDeque::new(),
            runs: 0,
            most_runs,
        };
        self.send(&mut live, &mut states)?;
        self.chains.live = Some(live);
        Ok(chain)
    }

    fn follow(
        &mut self,
        chain: &Chain,
        sessions: &mut [&mut dyn SessionState],
    ) -> Result<bool, DeviceError> {
        let mut states = own_states::<G>(sessions)?;
        let Some(mut live) = self.chains.live.take_if(|live| live.reference.is(chain)) else {
            return Ok(false);
        };
        let has_room = states.len() == live.plan.class.rows && has_room(&live, &states);
        let sent = if has_room {
            self.send(&mut live, &mut states)
        } else {
            Ok(())
        };
        self.chains.live = Some(live);
        sent.map(|()| has_room)
    }

    fn collect(
        &mut self,
        chain: &Chain,
        sessions: &mut [&mut dyn SessionState],
    ) -> Result<Vec<u32>, DeviceError> {
        let mut states = own_states::<G>(sessions)?;
        let none = || DeviceError::Launch("no run of this chain is left to be collected".into());
        let (tokens, is_last) = match self.chains.live.take_if(|live| live.reference.is(chain)) {
            Some(live) if live.marks.is_empty() => {
                self.chains.live = Some(live);
                return Err(none());
            }
            Some(mut live) => {
                let tokens = self.await_oldest(&mut live)?;
                let is_last = live.marks.is_empty();
                self.chains.live = Some(live);
                (tokens, is_last)
            }
            None => {
                let mut settled = self.chains.settled.iter_mut();
                let found = settled.find(|settled| settled.reference.is(chain));
                let results = &mut found.ok_or_else(none)?.results;
                let tokens = results.pop_front().ok_or_else(none)??;
                (tokens, results.is_empty())
            }
        };
        if tokens.len() != states.len() {
            return Err(DeviceError::Launch(format!(
                "{} sessions for a chain of {}",
                states.len(),
                tokens.len()
            )));
        }
        for (state, &token) in states.iter_mut().zip(&tokens) {
            match token {
                STOPPED => state.stay(),
                _ => {
                    state.commit(1);
                    if !is_last {
                        state.keep_going();
                    }
                }
            }
        }
        Ok(tokens)
    }
}
