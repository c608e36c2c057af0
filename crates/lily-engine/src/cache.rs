//! What later prompts go on from: sessions of answers that are complete, and prefixes on disk.
//!
//! Parked sessions live in the engine's memory budget, as those of running answers do. Where a request needs memory, the
//! session goes whole that was used longest ago: without its snapshots it would be of no use. With a directory, what goes
//! is written there first, and so is what nobody has come back for in a while, and everything at the end.

use crate::disk::{Disk, DiskFigures, DiskOptions, Saving};
use crate::engine::Engine;
use crate::error::EngineError;
use crate::generation::{CancelFlag, Generation, GenerationRequest};
use crate::session::Session;
use lily_sampling::SamplingParameters;
use std::collections::VecDeque;
use std::io;
use std::time::{Duration, Instant};

/// Most sessions that are parked, whatever memory there is.
const MOST_PARKED: usize = 16;
/// What a cache of prefixes came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefixFigures {
    /// Sessions that are parked.
    pub parked: usize,
    /// Bytes of the memory budget that they take, snapshots left out.
    pub parked_bytes: u64,
    /// Their snapshots.
    pub snapshots: usize,
    /// Bytes that those take.
    pub snapshot_bytes: u64,
    /// Requests that were begun with.
    pub requests: u64,
    /// Of those, the ones that went on from something.
    pub hits: u64,
    /// Tokens of all their prompts.
    pub prompt_tokens: u64,
    /// Of those, the ones that were not computed again.
    pub cached_tokens: u64,
    /// Parked sessions that went for others.
    pub evictions: u64,
    /// The directory, where there is one.
    pub disk: DiskFigures,
}

/// Parked sessions and stored prefixes, of one engine.
#[derive(Default)]
pub struct PrefixCache {
    /// The latest first.
    parked: VecDeque<Parked>,
    disk: Option<Disk>,
    /// What is counted as it happens.
    counted: PrefixFigures,
}

struct Parked {
    session: Session,
    since: Instant,
    stored: Stored,
}

impl Parked {
    /// Bytes of the memory budget that it takes.
    fn bytes(&self, engine: &Engine) -> u64 {
        let snapshots = self.session.snapshots().0 as u64;
        self.session.reservation.bytes() + snapshots * engine.snapshot_bytes()
    }
}

/// How much of a session is on disk.
enum Stored {
    Nothing,
    Part(Saving),
    /// All that is worth it.
    Whole,
}

impl PrefixCache {
    /// A cache that also stores prefixes in a directory, and knows those that are there.
    ///
    /// # Errors
    /// Where the directory cannot be made or read. What its files are is told by
    /// [`take_warnings`](Self::take_warnings).
    pub fn on_disk(engine: &Engine, options: &DiskOptions) -> io::Result<Self> {
        Ok(PrefixCache {
            disk: Some(Disk::open(engine, options)?),
            ..PrefixCache::default()
        })
    }

    /// Where it stands.
    pub fn figures(&self) -> PrefixFigures {
        let mut figures = PrefixFigures {
            parked: self.parked.len(),
            disk: self.disk.as_ref().map(Disk::figures).unwrap_or_default(),
            ..self.counted
        };
        for Parked { session, .. } in &self.parked {
            let (count, bytes) = session.snapshots();
            figures.parked_bytes += session.reservation.bytes();
            figures.snapshots += count;
            figures.snapshot_bytes += bytes;
        }
        figures
    }

    /// What people should know and have not been told: of files that are not what they should be.
    pub fn take_warnings(&mut self) -> Vec<String> {
        let disk = self.disk.as_mut();
        disk.map_or(Vec::new(), |disk| std::mem::take(&mut disk.warnings))
    }

    /// Starts an answer with what there is of its prompt. Parked sessions go, one after the other, where memory is short.
    ///
    /// # Errors
    /// As [`Engine::start`].
    pub fn start(
        &mut self,
        engine: &mut Engine,
        request: &GenerationRequest,
        cancel: &CancelFlag,
    ) -> Result<Generation, EngineError> {
        // What is refused anyhow costs nobody's session.
        let limits = engine.limits();
        limits.check(&request.prompt)?;
        request.sampling.validate(limits.vocabulary as u32)?;
        let needed = engine.positions_of(request);
        let session = self.session_for(engine, &request.prompt, needed)?;
        if session.is_none() {
            self.make_room(engine, engine.session_bytes(needed));
        }
        self.make_room_for_snapshots(engine, request, needed, session.as_ref());
        let generation = engine.start(session, request.clone(), cancel.clone())?;
        let cached = generation.timings().cached_tokens as u64;
        self.counted.requests += 1;
        self.counted.hits += u64::from(cached > 0);
        self.counted.prompt_tokens += request.prompt.len() as u64;
        self.counted.cached_tokens += cached;
        Ok(generation)
    }

    /// Another answer to the prompt of `generation`, as [`Engine::branch`] makes it. Parked sessions go where memory is short.
    ///
    /// # Errors
    /// As [`Engine::branch`].
    pub fn branch(
        &mut self,
        engine: &mut Engine,
        generation: &mut Generation,
        sampling: SamplingParameters,
        cancel: CancelFlag,
    ) -> Result<Generation, EngineError> {
        let needed = engine.session_bytes(generation.capacity());
        self.make_room(engine, needed);
        engine.branch(generation, sampling, cancel)
    }

    /// Parks the session of an answer that is complete. The one that was used longest ago goes for it.
    pub fn park(&mut self, engine: &mut Engine, mut session: Session) {
        if session.reusable() == 0 {
            return;
        }
        session.rest();
        self.parked.push_front(Parked {
            session,
            since: Instant::now(),
            stored: Stored::Nothing,
        });
        while self.parked.len() > MOST_PARKED {
            self.evict(engine);
        }
    }

    /// Does the next bit of what can be done meanwhile, in milliseconds: writing to disk. Returns how soon there is more,
    /// if there will be by itself.
    pub fn tend(&mut self, engine: &mut Engine) -> Option<Duration> {
        let disk = self.disk.as_mut()?;
        disk.collect();
        let settled = disk.settled;
        let is_whole = |parked: &Parked| matches!(parked.stored, Stored::Whole);
        let index = self.parked.iter().rposition(|parked| !is_whole(parked))?;
        let left = settled.saturating_sub(self.parked[index].since.elapsed());
        if left.is_zero() {
            self.store_part(engine, index);
        }
        Some(left)
    }

    /// Writes everything to disk that is worth it and not there, and waits for that.
    pub fn close(&mut self, engine: &mut Engine) {
        for index in (0..self.parked.len()).rev() {
            self.store(engine, index);
        }
        if let Some(disk) = &mut self.disk {
            disk.finish();
        }
    }

    /// A session that has some of the prompt, with memory set aside for `needed` positions; none where there is none.
    ///
    /// # Errors
    /// Where it has to wait for the memory of answers that are not complete.
    fn session_for(
        &mut self,
        engine: &mut Engine,
        prompt: &[u32],
        needed: usize,
    ) -> Result<Option<Session>, EngineError> {
        let parked = self.parked.iter();
        let usable = parked.map(|parked| parked.session.usable(prompt));
        // The latest of equals.
        let best = usable.enumerate().rev().max_by_key(|(_, usable)| *usable);
        let (index, usable) = best.unwrap_or((0, 0));
        if let Some(session) = self.read(engine, prompt, usable, needed) {
            return Ok(Some(session));
        }
        if usable == 0 {
            return Ok(None);
        }
        let Some(mut found) = self.parked.remove(index) else {
            return Ok(None);
        };
        self.abandon(&mut found);
        let whole = engine.session_bytes(needed);
        // Another request may come back for what it has beyond that: a copy goes on, where memory is there for it.
        if found.session.reusable() > usable
            && self.make_room(engine, whole + engine.snapshot_bytes())
            && let Ok(copy) = engine.fork(&mut found.session, usable, needed)
        {
            found.since = Instant::now();
            self.parked.push_front(found);
            return Ok(Some(copy));
        }
        let grows = found.session.capacity() >= needed;
        let held = if grows {
            found.session.reservation.bytes()
        } else {
            0
        };
        let more = whole.saturating_sub(held);
        let parked = self.bytes(engine) + found.bytes(engine);
        let is_busy = engine.memory().sessions > parked;
        if !self.make_room(engine, more) && !is_busy {
            // Its other snapshots are the next to go.
            found.session.kept.retain(|kept| kept.position() == usable);
        }
        let ready = match grows {
            true => engine.grow(&mut found.session, needed),
            false => engine.enlarge(&mut found.session, usable, needed),
        };
        match ready {
            Ok(()) => Ok(Some(found.session)),
            // Others will give theirs back.
            Err(error @ EngineError::MemoryExceeded { .. }) if is_busy => {
                self.parked.insert(index.min(self.parked.len()), found);
                Err(error)
            }
            Err(_) => {
                // It goes as others do, for one that begins anew.
                self.parked.push_back(found);
                self.evict(engine);
                Ok(None)
            }
        }
    }

    /// A session from disk, where that has enough more of the prompt than `usable` tokens.
    fn read(
        &mut self,
        engine: &mut Engine,
        prompt: &[u32],
        usable: usize,
        needed: usize,
    ) -> Option<Session> {
        let disk = self.disk.as_mut()?;
        disk.collect();
        let (path, position) = disk.find(prompt)?;
        // Less than a chunk is computed in the time that reading takes.
        if position < usable + engine.options().prefill_chunk {
            return None;
        }
        // What goes for it may be written in another's place, and not in this one's.
        disk.touch(&path);
        self.make_room(
            engine,
            engine.session_bytes(needed) + engine.snapshot_bytes(),
        );
        let disk = self.disk.as_mut()?;
        disk.load(engine, &path, position, needed)
    }

    /// Lets parked sessions go for the states that a prompt will keep. It can do without.
    fn make_room_for_snapshots(
        &mut self,
        engine: &mut Engine,
        request: &GenerationRequest,
        needed: usize,
        session: Option<&Session>,
    ) {
        let prompt = &request.prompt;
        let (held, bytes) = match session {
            Some(session) => (session.usable(prompt), 0),
            None => (0, engine.session_bytes(needed)),
        };
        let kept = engine.segments().kept(prompt, request.landmark);
        let missing = kept.iter().filter(|&&position| position > held).count();
        self.make_room(engine, bytes + missing as u64 * engine.snapshot_bytes());
    }

    /// Lets parked sessions go until `bytes` are free; false where they cannot be, and then none goes.
    fn make_room(&mut self, engine: &mut Engine, bytes: u64) -> bool {
        if engine.memory().free() + self.bytes(engine) < bytes {
            return false;
        }
        while engine.memory().free() < bytes {
            if !self.evict(engine) {
                return false;
            }
        }
        true
    }

    /// Bytes of the memory budget that all parked sessions take.
    fn bytes(&self, engine: &Engine) -> u64 {
        self.parked.iter().map(|parked| parked.bytes(engine)).sum()
    }

    /// Lets the session go that was used longest ago; false where there is none.
    fn evict(&mut self, engine: &mut Engine) -> bool {
        let Some(last) = self.parked.len().checked_sub(1) else {
            return false;
        };
        self.store(engine, last);
        self.parked.pop_back();
        self.counted.evictions += 1;
        true
    }

    /// Writes all of a session that is worth it.
    fn store(&mut self, engine: &mut Engine, index: usize) {
        while !matches!(self.parked[index].stored, Stored::Whole) {
            self.store_part(engine, index);
        }
    }

    /// Writes the next part of a session.
    fn store_part(&mut self, engine: &mut Engine, index: usize) {
        let Some(disk) = &mut self.disk else {
            self.parked[index].stored = Stored::Whole;
            return;
        };
        if matches!(self.parked[index].stored, Stored::Nothing) {
            // Files are written one after the other.
            for parked in &mut self.parked {
                if matches!(parked.stored, Stored::Part(_)) {
                    disk.abandon();
                    parked.stored = Stored::Nothing;
                }
            }
        }
        let Parked {
            session, stored, ..
        } = &mut self.parked[index];
        *stored = match std::mem::replace(stored, Stored::Whole) {
            Stored::Nothing => {
                session.settle();
                let begun = disk.begin(engine, session);
                begun.map_or(Stored::Whole, Stored::Part)
            }
            Stored::Part(mut saving) => match disk.proceed(session, &mut saving) {
                true => Stored::Part(saving),
                false => Stored::Whole,
            },
            Stored::Whole => Stored::Whole,
        };
    }

    /// Gives up writing a session that goes on.
    fn abandon(&mut self, parked: &mut Parked) {
        if let (Stored::Part(_), Some(disk)) = (&parked.stored, &mut self.disk) {
            disk.abandon();
            parked.stored = Stored::Nothing;
        }
    }
}
