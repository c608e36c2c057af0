//! What the cache of prefixes is worth: `lily-tiny` on the CPU. Prints the figures of `docs/performance.md`: all, or those
//! that arguments name (`first`, `turns`, `cuts`). With `first`, a number is the length of the prefix that is known, in
//! tokens: 3,900 and 8,192 otherwise.

use lily_checkpoint::Checkpoint;
use lily_cpu::{CpuDevice, CpuOptions};
use lily_engine::{
    CancelFlag, DiskOptions, Engine, EngineOptions, GenerationRequest, PrefixCache, Progress,
    TextModel,
};
use lily_testing::repository;
use std::sync::Arc;
use std::time::{Duration, Instant};

const REPETITIONS: usize = 5;
/// `<|im_end|>`.
const END: u32 = 4_057;
/// What stands behind the last message, and not there any more in the next turn.
const OPENING: [u32; 3] = [5, 6, 7];

fn engine() -> Engine {
    let checkpoint = Checkpoint::open(&repository("models/lily-tiny")).expect("a checkpoint");
    let checkpoint = Arc::new(checkpoint);
    let text = Arc::new(TextModel::load(&checkpoint).expect("its text side"));
    let device = CpuDevice::new(checkpoint, &CpuOptions::default()).expect("a device");
    let model = device.model().clone();
    let options = EngineOptions {
        // As long as the model allows.
        context: None,
        snapshots: true,
        ..EngineOptions::default()
    };
    Engine::new(Box::new(device), model, text, options).expect("an engine")
}

/// A message of so many tokens with this end.
fn message(length: usize, salt: u32, end: u32) -> Vec<u32> {
    let tokens = (1..length as u32).map(|at| (at * 37 + salt) % 4_000);
    tokens.chain([end]).collect()
}

/// How long it is to the first token, how many tokens of the prompt were computed, and the answer.
fn turn(
    engine: &mut Engine,
    cache: &mut PrefixCache,
    prompt: &[u32],
    most: usize,
) -> (Duration, usize, Vec<u32>) {
    let request = GenerationRequest {
        prompt: prompt.to_vec(),
        max_tokens: Some(most),
        stop_ids: Some(Vec::new()),
        ..GenerationRequest::default()
    };
    let began = Instant::now();
    let started = cache.start(engine, &request, &CancelFlag::default());
    let mut first = None;
    let done = engine.run(started.expect("it fits"), |progress| {
        if matches!(progress, Progress::Token(_)) {
            first.get_or_insert_with(|| began.elapsed());
        }
    });
    let done = done.expect("it runs");
    let (computed, tokens) = (done.timings().prefilled_tokens, done.tokens().to_vec());
    cache.park(engine, done.into_session());
    (first.unwrap_or_default(), computed, tokens)
}

fn median(mut times: Vec<Duration>) -> f64 {
    times.sort();
    times[times.len() / 2].as_secs_f64() * 1_000.0
}

fn first_tokens() {
    let given = std::env::args().filter_map(|argument| argument.parse().ok());
    let mut lengths: Vec<usize> = given.collect();
    if lengths.is_empty() {
        lengths = vec![3_900, 8_192];
    }
    lengths.into_iter().for_each(first_tokens_behind);
}

fn first_tokens_behind(known: usize) {
    let place = tempfile::TempDir::new().expect("a directory");
    let disk = DiskOptions::new(place.path().to_path_buf(), 1 << 30, "lily-tiny".into());
    let prefix = message(known, 1, END);
    let asked = |salt: usize| [&prefix[..], &message(20, salt as u32, END), &OPENING].concat();
    let mut engine = engine();
    let mut cold = Vec::new();
    for salt in 0..REPETITIONS {
        cold.push(turn(&mut engine, &mut PrefixCache::default(), &asked(salt), 2).0);
    }
    let open = |engine: &Engine| PrefixCache::on_disk(engine, &disk).expect("a directory");
    let mut cache = open(&engine);
    turn(&mut engine, &mut cache, &asked(100), 2);
    let (mut memory, mut computed) = (Vec::new(), 0);
    for salt in 0..REPETITIONS {
        let (time, tokens, _) = turn(&mut engine, &mut cache, &asked(200 + salt), 2);
        memory.push(time);
        computed = tokens;
    }
    cache.close(&mut engine);
    let (mut restarted, mut opened) = (Vec::new(), Vec::new());
    for salt in 0..REPETITIONS {
        let began = Instant::now();
        let mut cache = open(&engine);
        opened.push(began.elapsed());
        let (time, tokens, _) = turn(&mut engine, &mut cache, &asked(300 + salt), 2);
        assert_eq!(tokens, computed);
        restarted.push(time);
    }
    let figures = cache.figures().disk;
    println!(
        "prompt of {} tokens, milliseconds to the first token:",
        asked(0).len()
    );
    println!("  computed whole        {:8.1}", median(cold));
    println!(
        "  from memory           {:8.1}  ({computed} tokens computed)",
        median(memory)
    );
    println!(
        "  from disk, restarted  {:8.1}  ({computed} tokens computed)",
        median(restarted)
    );
    println!(
        "  {} files of {:.1} MB; opening the directory {:.1}",
        figures.files,
        figures.bytes as f64 / 1e6,
        median(opened)
    );
}

fn ten_turns() {
    let mut engine = engine();
    let mut cache = PrefixCache::default();
    let mut messages = message(1_200, 1, END);
    let (mut shared, mut total) = (0, [0; 3]);
    println!("turn, tokens of the prompt, of them new, computed:");
    for (index, length) in [60, 300, 25, 150, 400, 12, 90, 220, 35, 180]
        .into_iter()
        .enumerate()
    {
        messages.extend(message(length, 10 + index as u32, END));
        let prompt = [&messages[..], &OPENING].concat();
        let new = prompt.len() - shared;
        let (_, computed, answer) = turn(&mut engine, &mut cache, &prompt, 40);
        println!("  {:2} {:6} {new:6} {computed:6}", index + 1, prompt.len());
        for (sum, count) in total.iter_mut().zip([prompt.len(), new, computed]) {
            *sum += count;
        }
        shared = messages.len();
        messages.extend([&OPENING[..1], &answer, &[END]].concat());
    }
    println!(
        "  in all {} of which {} new: {} computed",
        total[0], total[1], total[2]
    );
}

/// What cuts at ends of messages cost, at worst and with usual messages, when nothing is known.
fn cuts() {
    let mut engine = engine();
    for length in [130, 400] {
        let text = |end| -> Vec<u32> {
            (0..3_900 / length)
                .flat_map(|index| message(length, index as u32, end))
                .collect()
        };
        let mut times = [Vec::new(), Vec::new()];
        for _ in 0..REPETITIONS {
            for (times, end) in times.iter_mut().zip([END, 3]) {
                let found = turn(&mut engine, &mut PrefixCache::default(), &text(end), 1);
                times.push(found.0);
            }
        }
        let [cut, whole] = times.map(median);
        println!(
            "{} tokens in messages of {length}: {cut:.0} ms, {whole:.0} without ends ({:+.1} %)",
            text(END).len(),
            (cut / whole - 1.0) * 100.0
        );
    }
}

fn main() {
    let named: Vec<String> = std::env::args().skip(1).collect();
    let is_number = |named: &String| named.parse::<usize>().is_ok();
    let all = named.iter().all(is_number);
    let parts: [(&str, fn()); 3] = [
        ("first", first_tokens),
        ("turns", ten_turns),
        ("cuts", cuts),
    ];
    for (name, measure) in parts {
        if all || named.iter().any(|named| named == name) {
            measure();
        }
    }
}
