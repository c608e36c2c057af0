//! The thread that owns the engine. Requests take turns in it: each gets a chunk of its prompt or a token, then the
//! next, so that none waits for another's end. A request whose client has gone costs nothing from its next turn on.

use lily_engine::{
    CancelFlag, DiskOptions, Engine, EngineError, Finished, Generation, GenerationRequest,
    PrefixCache, PrefixFigures, Progress, Timings, TokenEvent,
};
use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// Most requests that are answered in turns; others wait.
const MOST_ACTIVE: usize = 8;

/// What becomes of a request.
pub(crate) enum Event {
    /// Its turn has come: what could be wrong with it by itself is not.
    Started,
    /// A token was chosen.
    Token(TokenEvent),
    /// The answer is complete.
    Finished(Finished, Usage),
    /// It failed, and nothing follows.
    Failed(EngineError),
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
    events: UnboundedReceiver<Event>,
    cancel: CancelFlag,
}

impl Answer {
    /// The next of its events; none behind the last.
    pub async fn next(&mut self) -> Option<Event> {
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

/// The thread, from outside.
pub(crate) struct Worker {
    /// Nothing once the thread is to end.
    jobs: Mutex<Option<Sender<Job>>>,
    thread: Mutex<Option<JoinHandle<()>>>,
    prefixes: Arc<Mutex<PrefixFigures>>,
    /// Requests that wait or are answered.
    requests: Arc<AtomicUsize>,
    most_requests: usize,
    stopping: Arc<AtomicBool>,
}

struct Job {
    request: GenerationRequest,
    events: UnboundedSender<Event>,
    cancel: CancelFlag,
    _counted: Counted,
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
        let figures: Arc<Mutex<PrefixFigures>> = Arc::default();
        let thread = Thread {
            engine,
            jobs: received,
            waiting: VecDeque::new(),
            active: Vec::new(),
            prefixes,
            figures: figures.clone(),
            stopping: stopping.clone(),
        };
        let thread = std::thread::Builder::new()
            .name("engine".into())
            .spawn(move || thread.run())?;
        Ok(Worker {
            jobs: Mutex::new(Some(jobs)),
            thread: Mutex::new(Some(thread)),
            prefixes: figures,
            requests: Arc::new(AtomicUsize::new(0)),
            most_requests,
            stopping,
        })
    }

    /// Ends the thread, and waits until it has written what is to be kept.
    pub fn end(&self) {
        self.stop();
        drop(self.lock_jobs().take());
        let thread = self
            .thread
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(thread) = thread {
            // Where it failed, it has said so.
            let _ = thread.join();
        }
    }

    /// What later prompts go on from, as of the last request's beginning or end.
    pub fn prefixes(&self) -> PrefixFigures {
        *self.prefixes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_jobs(&self) -> std::sync::MutexGuard<'_, Option<Sender<Job>>> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Requests that wait or are answered.
    pub fn requests(&self) -> usize {
        self.requests.load(Ordering::Acquire)
    }

    /// Cuts all answers short, and takes no further request.
    pub fn stop(&self) {
        self.stopping.store(true, Ordering::Release);
    }

    /// Hands a request to the thread.
    pub fn submit(&self, request: GenerationRequest) -> Result<Answer, Refused> {
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
        let (sender, events) = unbounded_channel();
        let cancel = CancelFlag::default();
        let job = Job {
            request,
            events: sender,
            cancel: cancel.clone(),
            _counted: Counted(self.requests.clone()),
        };
        let jobs = self.lock_jobs();
        let jobs = jobs.as_ref().ok_or(Refused::Stopping)?;
        jobs.send(job).map_err(|_| Refused::Stopping)?;
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
    jobs: Receiver<Job>,
    waiting: VecDeque<Job>,
    active: Vec<Active>,
    prefixes: PrefixCache,
    /// What is told of them.
    figures: Arc<Mutex<PrefixFigures>>,
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
            self.tell();
        }
        self.prefixes.close(&mut self.engine);
        self.tell();
    }

    /// Tells what became of prefixes: figures to whoever asks, and what people should know.
    fn tell(&mut self) {
        for warning in self.prefixes.take_warnings() {
            eprintln!("lily: {warning}");
        }
        *self.figures.lock().unwrap_or_else(PoisonError::into_inner) = self.prefixes.figures();
    }

    /// Waits for a request; prefixes are written meanwhile. None where none can come any more.
    fn wait(&mut self) -> Option<Job> {
        loop {
            let received = match self.prefixes.tend(&mut self.engine) {
                Some(wait) => self.jobs.recv_timeout(wait),
                None => self.jobs.recv().map_err(RecvTimeoutError::from),
            };
            self.tell();
            match received {
                Ok(job) => return Some(job),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return None,
            }
        }
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

    /// Begins with requests that wait, as many as there may be and memory is there for.
    fn admit(&mut self) {
        self.waiting.retain(|job| !job.events.is_closed());
        while self.active.len() < MOST_ACTIVE {
            let Some(job) = self.waiting.pop_front() else {
                return;
            };
            match self
                .prefixes
                .start(&mut self.engine, &job.request, &job.cancel)
            {
                Ok(generation) => {
                    if job.events.send(Event::Started).is_ok() {
                        self.active.push(Active { generation, job });
                    }
                }
                // Others will give theirs back.
                Err(EngineError::MemoryExceeded { .. }) if !self.active.is_empty() => {
                    self.waiting.push_front(job);
                    return;
                }
                Err(error) => {
                    // Nobody may be there any more to hear it.
                    let _ = job.events.send(Event::Failed(error));
                }
            }
        }
    }

    /// A turn of every request.
    fn advance(&mut self) {
        let mut index = 0;
        while index < self.active.len() {
            if take_turn(&mut self.engine, &mut self.active[index]) {
                index += 1;
                continue;
            }
            // In order, so that turns stay fair.
            let Active { generation, job } = self.active.remove(index);
            self.prefixes
                .park(&mut self.engine, generation.into_session());
            drop(job);
        }
    }
}

/// Does the request's next bit of work; false where it was the last.
fn take_turn(engine: &mut Engine, active: &mut Active) -> bool {
    let Active { generation, job } = active;
    let event = match engine.advance(generation) {
        Ok(Progress::Prefilled { .. }) => return true,
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
    let goes_on = matches!(event, Event::Token(_));
    job.events.send(event).is_ok() && goes_on
}
