//! The engine's thread, from inside. In each turn of it, one of the requests whose prompts are not computed gets a chunk
//! of its own, and then all others get a token, decoded together: none waits for another's end, and what is being said
//! goes on while long prompts are read. A request whose client has gone costs nothing from the next turn on.

use crate::log;
use crate::worker::{Event, Figures, Job, Reading, Usage};
use lily_engine::{Engine, EngineError, Generation, PrefixCache, Progress};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::sync::{Arc, Mutex, PoisonError};

/// Most requests that are answered at a time, which one batch of decode holds; others wait.
const MOST_ACTIVE: usize = 8;

/// A request that is answered along with others.
struct Active {
    generation: Generation,
    job: Job,
    /// The turn in which it last got a chunk of its prompt, or came.
    last_chunk: u64,
    is_over: bool,
}

/// The thread, from inside.
pub(crate) struct Thread {
    engine: Engine,
    figures: Arc<Mutex<Figures>>,
    jobs: Receiver<Job>,
    waiting: VecDeque<Job>,
    active: Vec<Active>,
    turn: u64,
    prefixes: PrefixCache,
    stopping: Arc<AtomicBool>,
}

impl Thread {
    /// With nothing to do yet. Requests come by `jobs`; figures are told in `figures`, and `stopping` cuts answers short.
    pub fn new(
        engine: Engine,
        prefixes: PrefixCache,
        jobs: Receiver<Job>,
        figures: Arc<Mutex<Figures>>,
        stopping: Arc<AtomicBool>,
    ) -> Self {
        Thread {
            engine,
            figures,
            jobs,
            waiting: VecDeque::new(),
            active: Vec::new(),
            turn: 0,
            prefixes,
            stopping,
        }
    }

    /// Answers until no request can come any more.
    pub fn run(mut self) {
        while self.take_jobs() {
            if self.stopping.load(Ordering::Acquire) {
                let jobs = self
                    .active
                    .iter()
                    .map(|active| &active.job)
                    .chain(&self.waiting);
                jobs.for_each(|job| job.cancel.cancel());
            }
            self.admit();
            self.advance();
            self.prefixes.tend(&mut self.engine);
            self.publish();
        }
        self.prefixes.close(&mut self.engine);
        self.publish();
    }

    /// Tells where the thread stands, and people what they should know of the cache.
    fn publish(&mut self) {
        for warning in self.prefixes.take_warnings() {
            log::say(&warning.to_string());
        }
        *self.figures.lock().unwrap_or_else(PoisonError::into_inner) = Figures {
            active: self.active.len(),
            waiting: self.waiting.len(),
            prefixes: self.prefixes.figures(),
            memory: self.engine.memory(),
        };
    }

    /// Takes what has come; waits for it where there is nothing else to do. False where nothing can come any more.
    fn take_jobs(&mut self) -> bool {
        if self.active.is_empty() && self.waiting.is_empty() {
            match self.wait() {
                Some(job) => self.waiting.push_back(job),
                None => return false,
            }
        }
        loop {
            match self.jobs.try_recv() {
                Ok(job) => self.waiting.push_back(job),
                Err(TryRecvError::Empty) => return true,
                // What is there is answered to its end.
                Err(TryRecvError::Disconnected) => {
                    return !(self.active.is_empty() && self.waiting.is_empty());
                }
            }
        }
    }

    /// Waits for a request, and tends the cache meanwhile. None where none can come any more.
    fn wait(&mut self) -> Option<Job> {
        loop {
            let received = match self.prefixes.tend(&mut self.engine) {
                Some(wait) => self.jobs.recv_timeout(wait),
                None => self.jobs.recv().map_err(RecvTimeoutError::from),
            };
            self.publish();
            match received {
                Ok(job) => return Some(job),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return None,
            }
        }
    }

    /// Begins with requests that wait, as many as there may be and memory is there for.
    fn admit(&mut self) {
        self.waiting.retain(|job| !job.events.is_closed());
        while self.active.len() < MOST_ACTIVE {
            // Of the request that has the fewest answers under way: one with many does not keep others out.
            let of_its = |job: &Job| {
                let active = self.active.iter();
                active
                    .filter(|active| Arc::ptr_eq(&active.job.counted, &job.counted))
                    .count()
            };
            let next = (0..self.waiting.len()).min_by_key(|&index| of_its(&self.waiting[index]));
            let Some((next, job)) = next.and_then(|next| Some((next, self.waiting.remove(next)?)))
            else {
                return;
            };
            let Job {
                request, cancel, ..
            } = &job;
            match self.prefixes.start(&mut self.engine, request, cancel) {
                Ok(generation) => self.active.push(Active::new(generation, job, self.turn)),
                // Others will give theirs back.
                Err(EngineError::MemoryExceeded { .. }) if !self.active.is_empty() => {
                    self.waiting.insert(next, job);
                    return;
                }
                Err(error) => {
                    // Nobody may be there any more to hear it.
                    let _ = job.tell(Event::Failed(error));
                }
            }
        }
    }

    /// A turn: a chunk of the prompt that has waited longest for one, then a token of every request whose prompt is done.
    fn advance(&mut self) {
        self.turn += 1;
        let prompts = self.active.iter_mut();
        let prompts = prompts.filter(|active| active.generation.is_prefilling());
        if let Some(active) = prompts.min_by_key(|active| active.last_chunk) {
            active.last_chunk = self.turn;
            let progress = self.engine.advance(&mut active.generation);
            active.tell(progress);
        }
        self.branch();
        let others = self.active.iter_mut();
        let mut others: Vec<&mut Active> = others
            .filter(|active| !active.is_over && !active.generation.is_prefilling())
            .collect();
        let generations = others.iter_mut().map(|active| &mut active.generation);
        let mut generations: Vec<&mut Generation> = generations.collect();
        let progress = self.engine.advance_all(&mut generations);
        for (active, progress) in others.into_iter().zip(progress) {
            active.tell(progress);
        }
        // In order, so that turns stay fair and batches what they were.
        for active in std::mem::take(&mut self.active) {
            if active.is_over {
                let session = active.generation.into_session();
                self.prefixes.park(&mut self.engine, session);
            } else {
                self.active.push(active);
            }
        }
    }

    /// Begins with the further choices of requests whose prompt is computed. One that there is no room for now waits, and
    /// goes on from what is parked by then.
    fn branch(&mut self) {
        for index in 0..self.active.len() {
            let from = &mut self.active[index];
            if from.is_over || !from.generation.is_prefilled() {
                continue;
            }
            for other in std::mem::take(&mut from.job.others) {
                if self.active.len() >= MOST_ACTIVE {
                    self.waiting.push_back(other);
                    continue;
                }
                let (sampling, cancel) = (other.request.sampling.clone(), other.cancel.clone());
                let generation = &mut self.active[index].generation;
                let branch = self
                    .prefixes
                    .branch(&mut self.engine, generation, sampling, cancel);
                match branch {
                    Ok(generation) => {
                        self.active.push(Active::new(generation, other, self.turn));
                    }
                    Err(EngineError::MemoryExceeded { .. }) => self.waiting.push_back(other),
                    Err(error) => {
                        // Nobody may be there any more to hear it.
                        let _ = other.tell(Event::Failed(error));
                    }
                }
            }
        }
    }
}

impl Active {
    fn new(generation: Generation, job: Job, turn: u64) -> Self {
        Active {
            generation,
            job,
            last_chunk: turn,
            is_over: false,
        }
    }

    /// Tells the client what was done; it is over with the last of it, and where nobody is there any more to hear it.
    fn tell(&mut self, progress: Result<Progress, EngineError>) {
        let Active {
            generation, job, ..
        } = self;
        let event = match progress {
            Ok(Progress::Prefilled { done, total }) => Event::Prefilled(Reading {
                total,
                cached: generation.timings().cached_tokens,
                done,
            }),
            Ok(Progress::Token(token)) => Event::Token(token),
            Ok(Progress::Finished(finished)) => Event::Finished(
                finished,
                Usage {
                    prompt_tokens: generation.prompt_tokens(),
                    completion_tokens: generation.tokens().len(),
                    timings: generation.timings(),
                },
            ),
            Err(error) => Event::Failed(error),
        };
        let goes_on = matches!(event, Event::Prefilled(_) | Event::Token(_));
        self.is_over = !job.tell(event) || !goes_on;
    }
}

#[cfg(test)]
mod tests;
