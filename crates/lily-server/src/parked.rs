//! Sessions of answers that are complete: a conversation's next turn begins as the last did.

use lily_engine::{Engine, GenerationRequest, Session};
use std::collections::VecDeque;

/// Most sessions that are parked, whatever memory there is.
const MOST: usize = 16;

/// Parked sessions, the latest first.
#[derive(Default)]
pub(crate) struct Parked(VecDeque<Session>);

impl Parked {
    /// Parks a session; the one that was parked longest goes for it.
    pub fn park(&mut self, session: Session) {
        self.0.push_front(session);
        self.0.truncate(MOST);
    }

    /// The session to go on with: the one that has most of the prompt, or, where it has more that another request may come
    /// back for and memory is there, a copy of that part. None where there is nothing of the prompt.
    pub fn take(&mut self, engine: &mut Engine, request: &GenerationRequest) -> Option<Session> {
        let usable = self.0.iter().map(|session| session.usable(&request.prompt));
        // The latest of equals.
        let (index, usable) = usable.enumerate().rev().max_by_key(|(_, usable)| *usable)?;
        if usable == 0 {
            return None;
        }
        if self.0[index].reusable() > usable {
            let room = request.max_tokens.unwrap_or(usize::MAX);
            let needed = request.prompt.len().saturating_add(room);
            let needed = needed.min(engine.context());
            if let Ok(copy) = engine.fork(&mut self.0[index], usable, needed) {
                return Some(copy);
            }
        }
        self.0.remove(index)
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Drops the session that was parked longest; false where there is none.
    pub fn drop_oldest(&mut self) -> bool {
        self.0.pop_back().is_some()
    }
}
