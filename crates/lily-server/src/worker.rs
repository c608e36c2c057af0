//! The thread that owns the engine. In each turn of it, one of the requests whose prompts are not computed gets a chunk
//! of its own, and then all others get a token, decoded together: none waits for another's end, and what is being said
//! goes on while long prompts are read. A request whose client has gone costs nothing from the next turn on.

use crate::parked::Parked;
use lily_engine::{
    CancelFlag, Engine, EngineError, Finished, Generation, GenerationRequest, MemoryUse, Progress,
    Timings, TokenEvent,
};
use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// Most requests that are answered at a time, which one batch of decode holds; others wait.
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
    /// Sessions that are parked.
    pub parked: usize,
    pub memory: MemoryUse,
}

/// The thread, from outside.
pub(crate) struct Worker {
    figures: Arc<Mutex<Figures>>,
    jobs: Mutex<Sender<Job>>,
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
    /// Starts the thread. It ends when the worker goes.
    pub fn start(engine: Engine, most_requests: usize) -> io::Result<Self> {
        let (jobs, received) = channel();
        let stopping = Arc::new(AtomicBool::new(false));
        let figures = Arc::new(Mutex::new(Figures {
            active: 0,
            waiting: 0,
            parked: 0,
            memory: engine.memory(),
        }));
        let thread = Thread {
            engine,
            figures: figures.clone(),
            jobs: received,
            waiting: VecDeque::new(),
            active: Vec::new(),
            turn: 0,
            parked: Parked::default(),
            stopping: stopping.clone(),
        };
        std::thread::Builder::new()
            .name("engine".into())
            .spawn(move || thread.run())?;
        Ok(Worker {
            figures,
            jobs: Mutex::new(jobs),
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
            let jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
            jobs.send(first).map_err(|_| Refused::Stopping)?;
        }
        Ok(Answer { events, cancel })
    }
}

/// A request that is answered along with others.
struct Active {
    generation: Generation,
    job: Job,
    /// The turn in which it last got a chunk of its prompt, or came.
    last_chunk: u64,
    is_over: bool,
}

/// The thread, from inside.
struct Thread {
    engine: Engine,
    figures: Arc<Mutex<Figures>>,
    jobs: Receiver<Job>,
    waiting: VecDeque<Job>,
    active: Vec<Active>,
    turn: u64,
    parked: Parked,
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
            self.publish();
        }
    }

    fn publish(&self) {
        *self.figures.lock().unwrap_or_else(PoisonError::into_inner) = Figures {
            active: self.active.len(),
            waiting: self.waiting.len(),
            parked: self.parked.len(),
            memory: self.engine.memory(),
        };
    }

    /// Takes what has come; waits for it where there is nothing else to do. False where nothing can come any more.
    fn take_jobs(&mut self) -> bool {
        if self.active.is_empty() && self.waiting.is_empty() {
            match self.jobs.recv() {
                Ok(job) => self.waiting.push_back(job),
                Err(_) => return false,
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
            match self.start(&job) {
                Ok(generation) => self.active.push(Active::new(generation, job, self.turn)),
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

    /// Begins with a request, with the parked session that has most of its prompt. Those that were parked longest go
    /// where memory is short.
    fn start(&mut self, job: &Job) -> Result<Generation, EngineError> {
        let mut session = self.parked.take(&mut self.engine, &job.request);
        loop {
            let (request, cancel) = (job.request.clone(), job.cancel.clone());
            match self.engine.start(session.take(), request, cancel) {
                Err(EngineError::MemoryExceeded { .. }) if self.parked.drop_oldest() => {}
                started => return started,
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
                self.parked.park(active.generation.into_session());
            } else {
                self.active.push(active);
            }
        }
    }

    /// Begins with the further choices of requests whose prompt is computed. One that there is no memory for now waits.
    fn branch(&mut self) {
        for index in 0..self.active.len() {
            let Active {
                generation, job, ..
            } = &mut self.active[index];
            if !generation.is_prefilled() {
                continue;
            }
            for other in std::mem::take(&mut job.others) {
                let (sampling, cancel) = (other.request.sampling.clone(), other.cancel.clone());
                let generation = &mut self.active[index].generation;
                match self.engine.branch(generation, sampling, cancel) {
                    Ok(generation) => {
                        self.active.push(Active::new(generation, other, self.turn));
                    }
                    Err(_) => self.waiting.push_back(other),
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
mod tests {
    use super::*;
    use lily_checkpoint::Checkpoint;
    use lily_cpu::{CpuDevice, CpuOptions};
    use lily_engine::{EngineOptions, TextModel};
    use lily_testing::repository;

    const CHUNK: usize = 16;

    /// The thread, whose turns are taken by hand, and where jobs go to it.
    fn thread() -> (Thread, Sender<Job>) {
        let checkpoint = Arc::new(Checkpoint::open(&repository("models/lily-tiny")).unwrap());
        let text = Arc::new(TextModel::load(&checkpoint).unwrap());
        let device = CpuDevice::new(checkpoint, &CpuOptions::default()).unwrap();
        let model = device.model().clone();
        let options = EngineOptions {
            prefill_chunk: CHUNK,
            ..EngineOptions::default()
        };
        let (jobs, received) = channel();
        let engine = Engine::new(Box::new(device), model, text, options).unwrap();
        let thread = Thread {
            figures: Arc::new(Mutex::new(Figures {
                active: 0,
                waiting: 0,
                parked: 0,
                memory: engine.memory(),
            })),
            engine,
            jobs: received,
            waiting: VecDeque::new(),
            active: Vec::new(),
            turn: 0,
            parked: Parked::default(),
            stopping: Arc::default(),
        };
        (thread, jobs)
    }

    /// A request with a prompt of so many chunks, in the queue.
    fn submit(jobs: &Sender<Job>, chunks: usize) -> Answer {
        let (sender, events) = unbounded_channel();
        let cancel = CancelFlag::default();
        let request = GenerationRequest {
            prompt: (0..(chunks * CHUNK) as u32)
                .map(|i| 100 + i % 900)
                .collect(),
            max_tokens: Some(200),
            stop_ids: Some(Vec::new()),
            ..GenerationRequest::default()
        };
        let job = Job {
            request,
            choice: 0,
            others: Vec::new(),
            events: sender,
            cancel: cancel.clone(),
            _counted: Arc::new(Counted(Arc::new(AtomicUsize::new(1)))),
        };
        jobs.send(job).unwrap();
        Answer { events, cancel }
    }

    fn tokens(answer: &mut Answer) -> usize {
        let events = std::iter::from_fn(|| answer.events.try_recv().ok());
        events
            .filter(|(_, event)| matches!(event, Event::Token(_)))
            .count()
    }

    /// Chunks of its prompt that each request has so far, in the order in which they came.
    fn chunks(thread: &Thread) -> Vec<usize> {
        let active = thread.active.iter();
        let done = active.map(|active| active.generation.timings().prefilled_tokens);
        done.map(|done| done / CHUNK).collect()
    }

    #[test]
    fn answers_go_on_while_prompts_are_read_in_turn() {
        let (mut thread, jobs) = thread();
        let turn = |thread: &mut Thread| {
            assert!(thread.take_jobs());
            thread.admit();
            thread.advance();
        };
        let mut answer = submit(&jobs, 1);
        turn(&mut thread);
        assert_eq!(tokens(&mut answer), 1, "in the turn of its prompt's end");
        let mut prompts = [submit(&jobs, 6), submit(&jobs, 3)];
        for expected in [[1, 0], [1, 1], [2, 1], [2, 2], [3, 2]] {
            turn(&mut thread);
            assert_eq!(chunks(&thread), [1, expected[0], expected[1]]);
            assert_eq!(tokens(&mut answer), 1);
        }
        // Who comes now waits for those that waited longer, and is not passed over.
        let _late = submit(&jobs, 2);
        for expected in [
            [3, 3, 0],
            [4, 3, 0],
            [4, 3, 1],
            [5, 3, 1],
            [5, 3, 2],
            [6, 3, 2],
        ] {
            turn(&mut thread);
            assert_eq!(chunks(&thread)[1..], expected);
            assert_eq!(tokens(&mut answer), 1);
        }
        assert_eq!(prompts.each_mut().map(tokens), [1, 6]);
        // Whoever goes is gone with the next turn, whatever they waited for.
        let long = [submit(&jobs, 60), submit(&jobs, 60)];
        turn(&mut thread);
        assert_eq!(thread.active.len(), 6);
        drop((prompts, long));
        turn(&mut thread);
        assert_eq!(thread.active.len(), 2);
    }
}
