//! What a device offers: it executes plans over session states. The engine knows devices only by these
//! traits.

use crate::ahead::RunAhead;
use crate::operand::{ScratchId, StateSlot};
use crate::plan::{Phase, Plan};
use crate::route;
use lily_sampling::SamplingRow;
use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

/// Why a device could not do what was asked.
#[derive(Clone, Debug, thiserror::Error)]
pub enum DeviceError {
    /// The device has no kernel for what the plan asks for.
    #[error("the {device} device cannot run {what}: {reason}")]
    Unsupported {
        /// Which device.
        device: String,
        /// The operation or format.
        what: String,
        /// Why not, and what to do instead.
        reason: String,
    },
    /// Memory could not be had.
    #[error("out of memory: {what} needs {bytes} bytes: {reason}")]
    OutOfMemory {
        /// What for.
        what: String,
        /// How much.
        bytes: u64,
        /// What the system said.
        reason: String,
    },
    /// A weight could not be read.
    #[error("weight {weight}: {reason}")]
    Weight {
        /// Which.
        weight: String,
        /// What is wrong.
        reason: String,
    },
    /// The launch does not fit the plan or the session.
    #[error("launch refused: {0}")]
    Launch(String),
    /// The device could not do what it should have been able to.
    #[error("the device failed: {0}")]
    Failed(String),
}

/// What stands behind a position of a session beside its cache: convolution histories and recurrent states. A cache can be
/// cut back to any position; these cannot, so they are kept where a session may have to go back to.
pub trait Snapshot: Any + Send {
    /// The position it was taken at.
    fn position(&self) -> usize;
    /// Memory it takes, in bytes.
    fn bytes(&self) -> u64;
    /// All bits of it, for [`SessionState::import_snapshot`] of the same device, model and precision.
    fn export(&self) -> Vec<u8>;
    /// For the device to find its own type again.
    fn as_any(&self) -> &dyn Any;
}

/// A session's state on a device: KV cache, convolution histories, recurrent states.
pub trait SessionState: Any + Send {
    /// Tokens the state stands behind; the position of the next.
    fn position(&self) -> usize;
    /// The precision it was made for.
    fn precision(&self) -> crate::Precision;
    /// Positions the cache can grow to.
    fn capacity(&self) -> usize;
    /// Takes back the last run, if it has not been taken back already and nothing ran since: the
    /// alternating copies still hold the state before it. Returns whether it could.
    fn step_back(&mut self) -> bool;
    /// A slot as f32, for snapshots, tests and tools: the live copies [K−1, channels] and [Hv, Dv, Dk], a
    /// cache as [Nkv, position(), D]. Empty for slots that are not kept between runs.
    fn read(&self, slot: StateSlot) -> Vec<f32>;
    /// Replaces a live copy, or the first positions of a cache ([Nkv, positions, D]) up to the present
    /// position. The values must have the slot's shape.
    fn write(&mut self, slot: StateSlot, values: &[f32]) -> Result<(), DeviceError>;
    /// Stands the session behind `position` tokens whose state the caller writes next: where a snapshot begins.
    /// Nothing is cleared, and nothing before can be taken back.
    ///
    /// # Errors
    /// Beyond the capacity, and where memory for the positions cannot be had. The session is as it was.
    fn seek(&mut self, position: usize) -> Result<(), DeviceError>;
    /// Keeps what stands behind the present position.
    ///
    /// # Errors
    /// Where memory for it cannot be had.
    fn snapshot(&self) -> Result<Box<dyn Snapshot>, DeviceError>;
    /// Stands the session where a snapshot was taken, of this session or of one whose cache it has up to there
    /// ([`copy_cache`](Self::copy_cache)). Nothing before can be taken back.
    ///
    /// # Errors
    /// For a snapshot of another device, model or precision, and beyond the capacity. The session is as it was.
    fn restore(&mut self, snapshot: &dyn Snapshot) -> Result<(), DeviceError>;
    /// Takes over the first `positions` positions of another session's cache. Where this session stands behind more than
    /// that, what follows no longer belongs to it: [`restore`](Self::restore) comes next.
    ///
    /// # Errors
    /// For a session of another device or precision, more positions than it has, and beyond the capacity. The session
    /// is as it was.
    fn copy_cache(
        &mut self,
        from: &mut dyn SessionState,
        positions: usize,
    ) -> Result<(), DeviceError>;
    /// All bits of some positions of the cache: of each layer with one its keys, then its values, as
    /// [Nkv, positions, D] in the type that the device keeps. [`SessionBytes::each_position`] bytes for each.
    ///
    /// # Errors
    /// For positions that it has not.
    fn export_cache(&self, positions: Range<usize>) -> Result<Vec<u8>, DeviceError>;
    /// Takes over positions that [`export_cache`](Self::export_cache) gave, of a session of the same device, model and
    /// precision. What the session stood behind no longer belongs to it: [`restore`](Self::restore) comes behind the
    /// last part.
    ///
    /// # Errors
    /// Beyond the capacity, for bytes of another length, and where memory cannot be had.
    fn import_cache(&mut self, positions: Range<usize>, bytes: &[u8]) -> Result<(), DeviceError>;
    /// The snapshot at `position` that [`Snapshot::export`] gave these bytes.
    ///
    /// # Errors
    /// For bytes of another length, and where memory cannot be had.
    fn import_snapshot(
        &self,
        position: usize,
        bytes: &[u8],
    ) -> Result<Box<dyn Snapshot>, DeviceError>;
    /// Empties the state for another sequence.
    fn reset(&mut self);
    /// Memory in use, in bytes: fixed part and cache pages touched so far.
    fn resident_bytes(&self) -> u64;
    /// For the device to find its own type again.
    fn as_any_mut(&mut self) -> &mut dyn Any;
}

/// Memory a device needs for sessions and plans, before it is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionBytes {
    /// Independent of the length: recurrent states and histories, both copies.
    pub fixed: u64,
    /// Each position of the KV cache.
    pub each_position: u64,
    /// Positions come in pages of this many.
    pub page_positions: usize,
}

impl SessionBytes {
    /// Bytes of a session that holds `positions` tokens.
    pub fn for_positions(&self, positions: usize) -> u64 {
        let pages = positions.div_ceil(self.page_positions) as u64;
        self.fixed + pages * self.page_positions as u64 * self.each_position
    }

    /// Most positions that `bytes` are enough for, in whole pages.
    pub fn positions_within(&self, bytes: u64) -> usize {
        let page = self.page_positions as u64 * self.each_position;
        let pages = bytes.saturating_sub(self.fixed) / page.max(1);
        usize::try_from(pages).map_or(usize::MAX, |pages| {
            pages.saturating_mul(self.page_positions)
        })
    }
}

/// What runs where: reported, never guessed.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct DeviceDescription {
    /// `cpu`, `metal`, `emulated` or `cuda`.
    pub device: String,
    /// The hardware, as it names itself.
    pub hardware: String,
    /// Which family of kernels was chosen.
    pub kernels: String,
    /// How it was chosen; empty where there was nothing to choose. It may name others that were not.
    pub reason: String,
    /// Parallel workers (threads or cores).
    pub workers: usize,
}

/// How long a device's own clock says that stages of one kind took.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct StageTiming {
    /// The kernels of the stage, in their order; or of what else was timed as a whole.
    pub label: String,
    /// How often it ran.
    pub runs: u64,
    /// Microseconds in all, each from its beginning to its end. In that is what it costs to time a stage by itself, so
    /// that the sum over stages is more than an untimed run takes.
    pub microseconds: f64,
}

/// Sees each step of an execution; slow, for tests and tools.
pub trait Observer {
    /// Called when step `index` has run. `read` gives any scratch value alive at that moment as f32
    /// (integers converted).
    fn after_step(&mut self, index: usize, read: &dyn Fn(ScratchId) -> Vec<f32>);
}

/// What a run of a plan is bound to.
pub struct Launch<'a> {
    /// The tokens, one a row of the plan.
    pub tokens: &'a [u32],
    /// Prefill: the one session the rows belong to. Decode: a session for each row.
    pub sessions: &'a mut [&'a mut dyn SessionState],
    /// Values of scratch that no step writes, set before the first stage. For tests and tools; integers
    /// are given as f32.
    pub preset: &'a [(ScratchId, Vec<f32>)],
    /// Ids at and above this have no token and are never chosen on the device.
    pub token_limit: u32,
    /// What chooses each row's token where the plan samples; greedy for rows beyond its end, so that an empty slice is
    /// greedy for all.
    pub sampling: &'a [SamplingRow<'a>],
    /// Looks on.
    pub observer: Option<&'a mut dyn Observer>,
}

impl Launch<'_> {
    /// Checks the launch of `plan` as every device has to, and finds the device's own states, of type `S`, in it.
    ///
    /// # Errors
    /// [`DeviceError::Launch`] where tokens, sessions, presets or sampling do not fit the plan.
    pub fn states<S: SessionState + 'static>(
        &mut self,
        plan: &Plan,
    ) -> Result<Vec<&mut S>, DeviceError> {
        self.check_sampling(plan)?;
        self.check_presets(plan)?;
        let refuse = |reason: String| Err(DeviceError::Launch(reason));
        let class = plan.class;
        let wanted = match class.phase {
            Phase::Prefill => 1,
            Phase::Decode => class.rows,
        };
        if self.tokens.len() != class.rows || self.sessions.len() != wanted {
            return refuse(format!(
                "the plan has {} rows and {wanted} sessions, the launch {} and {}",
                class.rows,
                self.tokens.len(),
                self.sessions.len()
            ));
        }
        let vocabulary = plan.model.config.vocab_size;
        let mut tokens = self.tokens.iter();
        if let Some(token) = tokens.find(|&&token| token as usize >= vocabulary) {
            return refuse(format!("token {token} of a vocabulary of {vocabulary}"));
        }
        let rows_each = class.rows / wanted;
        let mut states = Vec::with_capacity(wanted);
        for session in self.sessions.iter_mut() {
            let state = own_state::<S>(*session)?;
            if state.precision() != class.precision {
                let precision = state.precision();
                return refuse(format!(
                    "a {precision} session in a {} plan",
                    class.precision
                ));
            }
            let end = state.position() + rows_each;
            if end > state.capacity() {
                let capacity = state.capacity();
                return refuse(format!("position {end} of a session made for {capacity}"));
            }
            if class.phase == Phase::Decode && end > class.context {
                return refuse(format!(
                    "position {end} in a plan for {} positions",
                    class.context
                ));
            }
            states.push(state);
        }
        Ok(states)
    }

    fn check_presets(&self, plan: &Plan) -> Result<(), DeviceError> {
        for (id, values) in self.preset {
            let spec = plan.spec(*id);
            if values.len() != spec.elements() {
                return Err(DeviceError::Launch(format!(
                    "{} values for {} of {} by {}",
                    values.len(),
                    spec.name,
                    spec.rows,
                    spec.columns
                )));
            }
        }
        Ok(())
    }

    /// Refuses sampling parameters outside of their ranges, and masks that do not reach the last id that may be chosen.
    fn check_sampling(&self, plan: &Plan) -> Result<(), DeviceError> {
        let vocabulary = plan.model.config.vocab_size;
        let words = vocabulary
            .min(self.token_limit as usize)
            .div_ceil(u32::BITS as usize);
        for (index, row) in self.sampling.iter().enumerate() {
            let refuse = |reason: String| DeviceError::Launch(format!("row {index}: {reason}"));
            let valid = row.parameters.validate(vocabulary as u32);
            valid.map_err(|error| refuse(error.to_string()))?;
            if let Some(found) = row.allowed.map(<[u32]>::len).filter(|found| *found < words) {
                return Err(refuse(format!(
                    "a mask of {found} words of 32 tokens; {words} are needed"
                )));
            }
        }
        Ok(())
    }
}

/// The snapshot as the type that its device gave it, of a session of this precision and with so many positions.
///
/// # Errors
/// [`DeviceError::Launch`] for a snapshot of another device, and beyond the capacity.
pub fn own_snapshot<'a, S: Snapshot>(
    snapshot: &'a dyn Snapshot,
    session: &dyn SessionState,
) -> Result<&'a S, DeviceError> {
    let (position, capacity) = (snapshot.position(), session.capacity());
    if position > capacity {
        return Err(DeviceError::Launch(format!(
            "a snapshot at position {position} for a session made for {capacity}"
        )));
    }
    let own = snapshot.as_any().downcast_ref::<S>();
    own.ok_or_else(|| DeviceError::Launch("a snapshot of another device".into()))
}

/// The session whose first `positions` positions of cache go to session `to`, as the type that its device gave it.
///
/// # Errors
/// [`DeviceError::Launch`] for a session of another device or precision, for positions that it has not, and for more
/// than `to` was made for.
pub fn own_cache<'a, S: SessionState + 'static>(
    from: &'a mut dyn SessionState,
    to: &dyn SessionState,
    positions: usize,
) -> Result<&'a mut S, DeviceError> {
    let (has, capacity) = (from.position(), to.capacity());
    if positions > has || positions > capacity {
        return Err(DeviceError::Launch(format!(
            "{positions} positions of a cache that has {has}, for a session made for {capacity}"
        )));
    }
    if from.precision() != to.precision() {
        let (from, to) = (from.precision(), to.precision());
        return Err(DeviceError::Launch(format!(
            "a {from} cache for a {to} session"
        )));
    }
    own_state(from)
}

/// Checks that `positions` are some of the first `most` positions of a cache.
///
/// # Errors
/// [`DeviceError::Launch`] where they are not.
pub fn check_positions(positions: &Range<usize>, most: usize) -> Result<(), DeviceError> {
    if positions.start > positions.end || positions.end > most {
        return Err(DeviceError::Launch(format!(
            "positions {} to {} of a cache of {most}",
            positions.start, positions.end
        )));
    }
    Ok(())
}

/// Checks the length of bytes that were kept for `what`.
///
/// # Errors
/// [`DeviceError::Launch`] where it is another.
pub fn check_length(what: &str, bytes: &[u8], expected: usize) -> Result<(), DeviceError> {
    if bytes.len() != expected {
        return Err(DeviceError::Launch(format!(
            "{} bytes for {what}, which takes {expected}",
            bytes.len()
        )));
    }
    Ok(())
}

/// The session's state as the type that its device gave it.
///
/// # Errors
/// [`DeviceError::Launch`] for a session of another device.
pub fn own_state<S: SessionState + 'static>(
    session: &mut dyn SessionState,
) -> Result<&mut S, DeviceError> {
    let state = session.as_any_mut().downcast_mut::<S>();
    state.ok_or_else(|| DeviceError::Launch("a session of another device".into()))
}

/// What a run leaves behind.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    /// Logits, row by row, where the plan has them.
    pub logits: Vec<f32>,
    /// The token of each row, where the plan chooses it. [`NO_TOKEN`](lily_sampling::NO_TOKEN) where there is none to
    /// be chosen ([`Operation::Sample`](crate::Operation::Sample)).
    pub tokens: Vec<u32>,
}

/// A device: weights resident, executes plans.
pub trait Device: Send {
    /// What it is and which kernels it chose.
    fn describe(&self) -> DeviceDescription;
    /// Bytes that could be taken now for sessions and working memory, where the device can tell.
    fn available_memory(&self) -> Option<u64>;
    /// Memory of a session at `precision`.
    fn session_bytes(&self, precision: crate::Precision) -> SessionBytes;
    /// Bytes of working memory that running `plan` takes.
    fn working_bytes(&self, plan: &Plan) -> u64;
    /// The plan with the arithmetic that the device is fastest at; what it runs in place of the one recorded.
    fn suit(&self, plan: Plan) -> Plan {
        plan
    }
    /// Most sessions that are decoded together, of those that plans have: where more would take longer together than one
    /// after another, fewer.
    fn most_decode_rows(&self) -> usize {
        route::MOST_DECODE_ROWS
    }
    /// Whether it runs plans that sample ([`PlanOutput::Sampled`](crate::PlanOutput::Sampled)) for its model.
    fn can_sample(&self) -> bool;
    /// A new session whose cache may grow to `capacity` positions.
    fn new_session(
        &self,
        precision: crate::Precision,
        capacity: usize,
    ) -> Result<Box<dyn SessionState>, DeviceError>;
    /// Runs `plan`; on success each session has moved on by its rows. On error no session has changed.
    fn execute(&mut self, plan: &Arc<Plan>, launch: Launch<'_>) -> Result<Outcome, DeviceError>;
    /// What the device's own clock says of the work since this was last asked, where it was opened to tell; else nothing.
    fn take_timings(&mut self) -> Vec<StageTiming> {
        Vec::new()
    }
    /// Decode by chains of runs, where the device has that; why not, where it does not.
    fn run_ahead(&mut self) -> Result<&mut dyn RunAhead, &'static str>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_pages_are_what_fits() {
        let session = SessionBytes {
            fixed: 1_000,
            each_position: 10,
            page_positions: 16,
        };
        assert_eq!(session.positions_within(0), 0);
        assert_eq!(session.positions_within(1_159), 0);
        assert_eq!(session.positions_within(1_160), 16);
        assert_eq!(session.positions_within(1_000 + 16_000), 1_600);
        for positions in [1, 16, 17, 1_600] {
            let fits = session.positions_within(session.for_positions(positions));
            assert!(fits >= positions && fits < positions + 16, "{positions}");
        }
    }
}
