//! The thread that owns the engine, from outside: requests go to it, and what becomes of them comes back.

use crate::turns::Thread;
use lily_engine::{
    CancelFlag, DiskOptions, Engine, EngineError, Finished, GenerationRequest, MemoryUse,
    PrefixCache, PrefixFigures, Timings, TokenEvent,
};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;

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
    pub events: UnboundedReceiver<(usize, Event)>,
    pub cancel: CancelFlag,
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
    /// Told when the thread has ended.
    ended: Mutex<Option<oneshot::Receiver<()>>>,
    /// Requests that wait or are answered.
    requests: Arc<AtomicUsize>,
    most_requests: usize,
    stopping: Arc<AtomicBool>,
}

/// One choice of a request.
pub(crate) struct Job {
    pub request: GenerationRequest,
    /// Its number in the request.
    pub choice: usize,
    /// Further choices for the same prompt, which is computed once for all.
    pub others: Vec<Job>,
    pub events: UnboundedSender<(usize, Event)>,
    pub cancel: CancelFlag,
    /// The request that it belongs to.
    pub counted: Arc<Counted>,
}

impl Job {
    /// Tells the client; false where it has gone.
    pub fn tell(&self, event: Event) -> bool {
        self.events.send((self.choice, event)).is_ok()
    }
}

/// One of the requests that are counted.
pub(crate) struct Counted(pub Arc<AtomicUsize>);

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
        let thread = Thread::new(
            engine,
            prefixes,
            received,
            figures.clone(),
            stopping.clone(),
        );
        let (alive, ended) = oneshot::channel();
        let thread = std::thread::Builder::new()
            .name("engine".into())
            .spawn(move || {
                // Gone with the thread, however that ends.
                let _alive: oneshot::Sender<()> = alive;
                thread.run();
            })?;
        Ok(Worker {
            ended: Mutex::new(Some(ended)),
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

    /// Done when the thread has ended; never, for whoever asks second.
    pub fn ended(&self) -> impl Future<Output = ()> + Send + 'static {
        let ended = self.ended.lock();
        let ended = ended.unwrap_or_else(PoisonError::into_inner).take();
        async move {
            match ended {
                // Nothing is ever sent.
                Some(ended) => drop(ended.await),
                None => std::future::pending().await,
            }
        }
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
                counted: counted.clone(),
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
