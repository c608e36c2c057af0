//! Going on from what was computed before: snapshots of a session on the grid of chunks, and prompts that begin as an
//! earlier one did.
//!
//! An answer must not depend on what was kept. So a prompt goes on from a snapshot alone: from a multiple of the chunk's
//! length up to which everything was prefilled, chunk by chunk, as it would be again. What decode made of an answer is
//! not such a state: its last bits are others.

use crate::budget::Reservation;
use crate::engine::Engine;
use crate::error::EngineError;
use crate::session::Session;
use lily_plan::Snapshot;

/// So many snapshots before the end of a prompt are kept, one a chunk: a prompt that is edited there, or answered once
/// more, goes on from one of them.
const LAST: usize = 3;
/// Before those there is one at each of so many chunks, for prompts that part earlier.
const SPACING: usize = 8;

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
}

impl Session {
    /// How many of its tokens a later prompt can go on from: up to its last snapshot.
    pub fn reusable(&self) -> usize {
        self.kept.last().map_or(0, Kept::position)
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
        prompt: &[u32],
        needed: usize,
    ) -> Result<Session, EngineError> {
        let mut session = match given {
            Some(given) if given.capacity() >= needed => given,
            Some(too_small) => self.larger(too_small, prompt, needed)?,
            None => self.open_session(needed)?,
        };
        if self.options().snapshots {
            let usable = session.usable(prompt);
            self.rewind(&mut session, usable)?;
        } else {
            let held = session.tokens.len();
            if held >= prompt.len() || session.tokens != prompt[..held] {
                session.reset();
            }
        }
        Ok(session)
    }

    /// A larger session, with what a smaller one has of the prompt where memory is there for both.
    fn larger(
        &mut self,
        mut small: Session,
        prompt: &[u32],
        needed: usize,
    ) -> Result<Session, EngineError> {
        let usable = small.usable(prompt);
        if usable > 0
            && let Ok(mut larger) = self.copy(&mut small, usable, needed)
        {
            larger.kept = std::mem::take(&mut small.kept);
            return Ok(larger);
        }
        // Its memory is free before more is asked for.
        drop(small);
        self.open_session(needed)
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

    /// Keeps the state behind a chunk of a prompt of `total` tokens, if it is one of those that are worth it.
    pub(crate) fn keep_behind_chunk(&mut self, session: &mut Session, total: usize) {
        let chunk = self.options().prefill_chunk;
        let position = session.tokens.len();
        let is_last = total - position < LAST * chunk;
        let is_wanted = is_last || position.is_multiple_of(SPACING * chunk);
        if self.options().snapshots && position.is_multiple_of(chunk) && is_wanted {
            self.keep(session);
            // Those that were last for a shorter prompt.
            session.kept.retain(|kept| {
                total - kept.position() < LAST * chunk
                    || kept.position().is_multiple_of(SPACING * chunk)
            });
        }
    }

    /// Keeps the present state, where memory is there for it: nothing depends on it but time.
    fn keep(&mut self, session: &mut Session) {
        let bytes = self.device.session_bytes(self.options().precision).fixed / 2;
        let Ok(reservation) = self.reserve(bytes, 0) else {
            return;
        };
        if let Ok(snapshot) = session.state.snapshot() {
            session.kept.push(Kept {
                snapshot,
                _reservation: reservation,
            });
        }
    }
}
