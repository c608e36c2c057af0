//! The thread that owns the engine. Requests take turns in it: each gets a chunk of its prompt or a token, then the
//! next, so that none waits for another's end. A request whose client has gone costs nothing from its next turn on.

use lily_engine::{
    CancelFlag, DiskOptions, Engine, EngineError, Finished, Generation, GenerationRequest,
    MemoryUse, PrefixCache, PrefixFigures, Progress, Timings, TokenEvent,
};
use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// Most requests that are answered in turns; others wait.
const MOST_ACTIVE: usize = 8;

/// What becomes of a request.
pub(crate) enum Event {
    /// Part of a prompt was computed.
    Prefilled(Reading),
    /// A token was chosen.
    Token(TokenEvent),
    /// The answer is complete.
    Finished(Finished, Usage),
    /// It failed, and nothing follows.
    Failed(EngineError),
}

/// How far a prompt is read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Reading {
    pub total: usize,
    /// Tokens that were known before.
    pub cached: usize,
    /// Tokens that are done, those that were known among them.
    pub done: usize,
}

/// What an answer took.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Usage {
    pub prompt_tokens: usize,
    pub completion_tokens: usize,
    pub timings: Timings,
}

/// A request on its way; when this goes, the request is given up.
pub(crate) struct Answer {
    events: UnboundedReceiver<(usize, Event)>,
    cancel: CancelFlag,
}

impl Answer {
    /// The next of its events, with the number of the choice it belongs to; none behind the last.
    pub async fn next(&mut self) -> Option<(usize, Event)> {
        self.events.recv().await
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        self.cancel.cancel();
    }
}

/// Why a request was not taken.
#[derive(Debug)]
pub(crate) enum Refused {
    /// There are as many as there may be.
    Overloaded,
    /// The thread is at its end.
    Stopping,
}

/// Where the thread stands.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Figures {
    /// Choices that are being answered.
    pub active: usize,
    /// Choices that wait.
    pub waiting: usize,
    /// What later prompts go on from.
    pub prefixes: PrefixFigures,
    pub memory: MemoryUse,
}

/// The thread, from outside.
pub(crate) struct Worker {
    figures: Arc<Mutex<Figures>>,
    /// Nothing once the thread is to end.
    jobs: Mutex<Option<Sender<Job>>>,
    thread: Mutex<Option<JoinHandle<()>>>,
    /// Requests that wait or are answered.
    requests: Arc<AtomicUsize>,
    most_requests: usize,
    stopping: Arc<AtomicBool>,
}

/// One choice of a request.
struct Job {
    request: GenerationRequest,
    /// Its number in the request.
    choice: usize,
    /// Further choices for the same prompt, which is computed once for all.
    others: Vec<Job>,
    events: UnboundedSender<(usize, Event)>,
    cancel: CancelFlag,
    _counted: Arc<Counted>,
}

impl Job {
    /// Tells the client; false where it has gone.
    fn tell(&self, event: Event) -> bool {
        self.events.send((self.choice, event)).is_ok()
    }
}

/// One of the requests that are counted.
struct Counted(Arc<AtomicUsize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Worker {
    /// Starts the thread, with prefixes in a directory if one is given. It ends when the worker goes.
    ///
    /// # Errors
    /// Where the system has no thread, and where the directory cannot be made or read.
    pub fn start(
        engine: Engine,
        most_requests: usize,
        cache: Option<&DiskOptions>,
    ) -> io::Result<Self> {
        let (jobs, received) = channel();
        let stopping = Arc::new(AtomicBool::new(false));
        let prefixes = match cache {
            Some(options) => PrefixCache::on_disk(&engine, options)?,
            None => PrefixCache::default(),
        };
        let figures = Arc::new(Mutex::new(Figures {
            active: 0,
            waiting: 0,
            prefixes: prefixes.figures(),
            memory: engine.memory(),
        }));
        let thread = Thread {
            engine,
            figures: figures.clone(),
            jobs: received,
            waiting: VecDeque::new(),
            active: Vec::new(),
            prefixes,
            stopping: stopping.clone(),
        };
        let thread = std::thread::Builder::new()
            .name("engine".into())
            .spawn(move || thread.run())?;
        Ok(Worker {
            figures,
            jobs: Mutex::new(Some(jobs)),
            thread: Mutex::new(Some(thread)),
            requests: Arc::new(AtomicUsize::new(0)),
            most_requests,
            stopping,
        })
    }

    /// Requests that wait or are answered.
    pub fn requests(&self) -> usize {
        self.requests.load(Ordering::Acquire)
    }

    /// Where the thread stands.
    pub fn figures(&self) -> Figures {
        *self.figures.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Cuts all answers short, and takes no further request.
    pub fn stop(&self) {
        self.stopping.store(true, Ordering::Release);
    }

    /// Ends the thread, and waits until it has written what is to outlast it.
    pub fn end(&self) {
        self.stop();
        drop(self.lock_jobs().take());
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(thread) = thread.take() {
            // Where it failed, it has said so.
            let _ = thread.join();
        }
    }

    fn lock_jobs(&self) -> MutexGuard<'_, Option<Sender<Job>>> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hands a request to the thread: prompts, each with the seeds of its choices. Choices are numbered through.
    pub fn submit(&self, prompts: Vec<(GenerationRequest, Vec<u64>)>) -> Result<Answer, Refused> {
        if self.stopping.load(Ordering::Acquire) {
            return Err(Refused::Stopping);
        }
        let most = self.most_requests;
        let counted = self
            .requests
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |count| {
                (count < most).then_some(count + 1)
            });
        if counted.is_err() {
            return Err(Refused::Overloaded);
        }
        let counted = Arc::new(Counted(self.requests.clone()));
        let (sender, events) = unbounded_channel();
        let cancel = CancelFlag::default();
        let mut choice = 0;
        let mut job = |request: GenerationRequest| {
            choice += 1;
            Job {
                request,
                choice: choice - 1,
                others: Vec::new(),
                events: sender.clone(),
                cancel: cancel.clone(),
                _counted: counted.clone(),
            }
        };
        for (request, seeds) in prompts {
            let mut jobs = seeds.into_iter().map(|seed| {
                let mut request = request.clone();
                request.sampling.seed = seed;
                job(request)
            });
            let Some(mut first) = jobs.next() else {
                continue;
            };
            first.others = jobs.collect();
            let jobs = self.lock_jobs();
            let jobs = jobs.as_ref().ok_or(Refused::Stopping)?;
            jobs.send(first).map_err(|_| Refused::Stopping)?;
        }
        Ok(Answer { events, cancel })
    }
}

/// A request that is answered in turns with others.
struct Active {
    generation: Generation,
    job: Job,
}

/// The thread, from inside.
struct Thread {
    engine: Engine,
    figures: Arc<Mutex<Figures>>,
    jobs: Receiver<Job>,
    waiting: VecDeque<Job>,
    active: Vec<Active>,
    prefixes: PrefixCache,
    stopping: Arc<AtomicBool>,
}

impl Thread {
    fn run(mut self) {
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
            eprintln!("lily: {warning}");
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
            let Some(job) = self.waiting.pop_front() else {
                return;
            };
            let Job {
                request, cancel, ..
            } = &job;
            match self.prefixes.start(&mut self.engine, request, cancel) {
                Ok(generation) => self.active.push(Active { generation, job }),
                // Others will give theirs back.
                Err(EngineError::MemoryExceeded { .. }) if !self.active.is_empty() => {
                    self.waiting.push_front(job);
                    return;
                }
                Err(error) => {
                    // Nobody may be there any more to hear it.
                    let _ = job.tell(Event::Failed(error));
                }
            }
        }
    }

    /// A turn of every request.
    fn advance(&mut self) {
        let mut index = 0;
        while index < self.active.len() {
            if take_turn(&mut self.engine, &mut self.active[index]) {
                self.branch(index);
                index += 1;
                continue;
            }
            // In order, so that turns stay fair.
            let Active { generation, job } = self.active.remove(index);
            let session = generation.into_session();
            self.prefixes.park(&mut self.engine, session);
            // Where the first of several is done with, so is the client.
            drop(job);
        }
    }

    /// Begins with the further choices of a request whose prompt is computed. One that there is no memory for now waits.
    fn branch(&mut self, index: usize) {
        let Active { generation, job } = &mut self.active[index];
        if job.others.is_empty() || !generation.is_prefilled() {
            return;
        }
        for other in std::mem::take(&mut job.others) {
            let sampling = other.request.sampling.clone();
            let Active { generation, .. } = &mut self.active[index];
            match self
                .engine
                .branch(generation, sampling, other.cancel.clone())
            {
                Ok(generation) => self.active.push(Active {
                    generation,
                    job: other,
                }),
                Err(_) => self.waiting.push_back(other),
            }
        }
    }
}

/// Does the request's next bit of work; false where it was the last.
fn take_turn(engine: &mut Engine, active: &mut Active) -> bool {
    let Active { generation, job } = active;
    let event = match engine.advance(generation) {
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
    job.tell(event) && goes_on
}
