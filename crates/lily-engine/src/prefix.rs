//! Going on from what was computed before: snapshots of a session behind chunks, and prompts that begin as an earlier one
//! did.
//!
//! An answer must not depend on what was kept. So a prompt goes on from a snapshot alone: from a cut (`segments.rs`) up to
//! which everything was prefilled, chunk by chunk, as it would be again. What decode made of an answer is not such a
//! state: its last bits are others.

use crate::budget::Reservation;
use crate::engine::Engine;
use crate::error::EngineError;
use crate::generation::GenerationRequest;
use crate::session::Session;
use lily_plan::Snapshot;

/// A state of a session that it can go back to.
pub(crate) struct Kept {
    snapshot: Box<dyn Snapshot>,
    /// Given back when it goes.
    _reservation: Reservation,
}

impl Kept {
    pub fn position(&self) -> usize {
        self.snapshot.position()
    }

    pub fn snapshot(&self) -> &dyn Snapshot {
        self.snapshot.as_ref()
    }
}

impl Session {
    /// How many of its tokens a later prompt can go on from: up to its last snapshot.
    pub fn reusable(&self) -> usize {
        self.kept.last().map_or(0, Kept::position)
    }

    /// States that it can go back to, and the bytes they take.
    pub fn snapshots(&self) -> (usize, u64) {
        let bytes = self.kept.iter().map(|kept| kept.snapshot.bytes());
        (self.kept.len(), bytes.sum())
    }

    /// How many tokens of `prompt` need not be computed again: up to the last snapshot at which the session holds a
    /// prefix of it. The prompt's last token is always computed.
    pub fn usable(&self, prompt: &[u32]) -> usize {
        let both = self.tokens.iter().zip(prompt);
        let shared = both.take_while(|(ours, theirs)| ours == theirs).count();
        let most = shared.min(prompt.len().saturating_sub(1));
        let positions = self.kept.iter().map(Kept::position);
        positions
            .filter(|position| *position <= most)
            .max()
            .unwrap_or(0)
    }
}

impl Engine {
    /// A session for a prompt, with room for `needed` tokens and with what `given` has of the prompt: `given` itself, or
    /// one that is large enough. It never has all of the prompt, whose last token's logits choose the answer's first.
    pub(crate) fn session_for(
        &mut self,
        given: Option<Session>,
        request: &GenerationRequest,
        needed: usize,
    ) -> Result<Session, EngineError> {
        let prompt = request.prompt.as_slice();
        let mut session = match given {
            Some(mut given) if given.capacity() >= needed => {
                self.grow(&mut given, needed)?;
                given
            }
            Some(too_small) => self.larger(too_small, prompt, needed)?,
            None => self.open_session(needed)?,
        };
        if self.options().snapshots {
            let usable = session.usable(prompt);
            self.rewind(&mut session, usable)?;
            let wanted = self.segments().kept(prompt, request.landmark);
            session
                .kept
                .retain(|kept| wanted.contains(&kept.position()));
            session.wanted = wanted;
        } else {
            let held = session.tokens.len();
            if held >= prompt.len() || session.tokens != prompt[..held] {
                session.reset();
            }
        }
        Ok(session)
    }

    /// Sets aside what a session takes that grows to `positions`.
    pub(crate) fn grow(&self, session: &mut Session, positions: usize) -> Result<(), EngineError> {
        let needed = self.session_bytes(positions);
        let grown = session.reservation.grow(needed);
        grown.map_err(|free| {
            let more = needed - session.reservation.bytes();
            self.memory_exceeded(positions, more, free)
        })
    }

    /// A larger session, with what a smaller one has of the prompt where memory is there for both.
    fn larger(
        &mut self,
        mut small: Session,
        prompt: &[u32],
        needed: usize,
    ) -> Result<Session, EngineError> {
        let usable = small.usable(prompt);
        if usable > 0 && self.enlarge(&mut small, usable, needed).is_ok() {
            return Ok(small);
        }
        // Its memory is free before more is asked for.
        drop(small);
        self.open_session(needed)
    }

    /// Moves a session up to `position`, where it has a snapshot, to memory for `needed` tokens.
    pub(crate) fn enlarge(
        &mut self,
        session: &mut Session,
        position: usize,
        needed: usize,
    ) -> Result<(), EngineError> {
        let mut larger = self.copy(session, position, needed)?;
        larger.kept = std::mem::take(&mut session.kept);
        *session = larger;
        Ok(())
    }

    /// Stands a session behind the first `position` tokens that it holds, where it has a snapshot; 0 empties it.
    fn rewind(&mut self, session: &mut Session, position: usize) -> Result<(), EngineError> {
        session.settle();
        session.kept.retain(|kept| kept.position() <= position);
        if session.tokens.len() == position {
            return Ok(());
        }
        match session.kept.last() {
            Some(kept) if kept.position() == position => {
                session.state.restore(kept.snapshot.as_ref())?;
                session.tokens.truncate(position);
            }
            _ => session.reset(),
        }
        Ok(())
    }

    /// Another session for up to `capacity` tokens, behind the first `position` that this one holds, where it has a
    /// snapshot; the other has one there too. This one stays as it is.
    ///
    /// # Errors
    /// Where memory is short, and where there is no snapshot at the position.
    pub fn fork(
        &mut self,
        session: &mut Session,
        position: usize,
        capacity: usize,
    ) -> Result<Session, EngineError> {
        let mut other = self.copy(session, position, capacity)?;
        self.keep(&mut other);
        Ok(other)
    }

    /// Another session that stands where this one does; nothing is kept to go back to.
    pub(crate) fn duplicate(&mut self, session: &mut Session) -> Result<Session, EngineError> {
        session.settle();
        let snapshot = session.state.snapshot()?;
        let mut other = self.open_session(session.capacity())?;
        let position = session.tokens.len();
        other.state.copy_cache(session.state.as_mut(), position)?;
        other.state.restore(snapshot.as_ref())?;
        other.tokens.extend_from_slice(&session.tokens);
        Ok(other)
    }

    fn copy(
        &mut self,
        session: &mut Session,
        position: usize,
        capacity: usize,
    ) -> Result<Session, EngineError> {
        session.settle();
        let mut kept = session.kept.iter();
        let Some(kept) = kept.find(|kept| kept.position() == position) else {
            return Err(EngineError::NoSnapshot { position });
        };
        let mut other = self.open_session(capacity)?;
        other.state.copy_cache(session.state.as_mut(), position)?;
        other.state.restore(kept.snapshot.as_ref())?;
        other.tokens.extend_from_slice(&session.tokens[..position]);
        Ok(other)
    }

    /// Keeps the state behind a chunk of a prompt, if it is one of those that are worth it.
    pub(crate) fn keep_behind_chunk(&mut self, session: &mut Session) {
        if session.wanted.contains(&session.tokens.len()) {
            self.keep(session);
        }
    }

    /// Keeps the present state, where memory is there for it: nothing depends on it but time.
    fn keep(&mut self, session: &mut Session) {
        let Ok(reservation) = self.reserve(self.snapshot_bytes(), 0) else {
            return;
        };
        if let Ok(snapshot) = session.state.snapshot() {
            session.kept.push(Kept {
                snapshot,
                _reservation: reservation,
            });
        }
    }

    /// Adds a state that was kept elsewhere, behind those that the session has, where memory is there for it.
    pub(crate) fn keep_imported(&self, session: &mut Session, snapshot: Box<dyn Snapshot>) {
        if let Ok(_reservation) = self.reserve(self.snapshot_bytes(), 0) {
            session.kept.push(Kept {
                snapshot,
                _reservation,
            });
        }
    }

    /// Memory of a snapshot: half of what a session takes whatever its length.
    pub(crate) fn snapshot_bytes(&self) -> u64 {
        self.device.session_bytes(self.options().precision).fixed / 2
    }

    /// Memory of a session for `positions` tokens.
    pub(crate) fn session_bytes(&self, positions: usize) -> u64 {
        let session = self.device.session_bytes(self.options().precision);
        session.for_positions(positions)
    }

    /// Positions that prompt and answer of a request may take.
    pub(crate) fn positions_of(&self, request: &GenerationRequest) -> usize {
        let most = request.max_tokens.unwrap_or(usize::MAX);
        let needed = request.prompt.len().saturating_add(most);
        needed.min(self.context())
    }
}
