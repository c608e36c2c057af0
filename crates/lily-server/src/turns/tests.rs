use super::*;
use crate::worker::{Answer, Counted, Event, Figures};
use lily_checkpoint::Checkpoint;
use lily_cpu::{CpuDevice, CpuOptions};
use lily_engine::{CancelFlag, GenerationRequest, PrefixFigures};
use lily_engine::{EngineOptions, TextModel};
use lily_testing::repository;
use std::sync::atomic::AtomicUsize;
use std::sync::mpsc::{Sender, channel};
use tokio::sync::mpsc::unbounded_channel;

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
    let figures = Figures {
        active: 0,
        waiting: 0,
        prefixes: PrefixFigures::default(),
        memory: engine.memory(),
    };
    let figures = Arc::new(Mutex::new(figures));
    let thread = Thread::new(
        engine,
        PrefixCache::default(),
        received,
        figures,
        Arc::default(),
    );
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
        counted: Arc::new(Counted(Arc::new(AtomicUsize::new(1)))),
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
