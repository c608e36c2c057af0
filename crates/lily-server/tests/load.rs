//! Many clients at once, of whom a third vanish. `LILY_LOAD_SECONDS=300 cargo test -p lily-server --test load` takes
//! its time; otherwise it is half a minute.

mod support;

use lily_server::ServerOptions;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use support::{Reply, Server, question, together, tools, wait_until, without_ids};

const CLIENTS: u64 = 32;
/// Fewer than there are clients, so that some are told to come back.
const MOST_REQUESTS: usize = 24;

/// What clients ask, from greedy to sampled, with tools and without, short and long.
fn requests() -> Vec<Value> {
    let mut requests = Vec::new();
    for index in 0..12 {
        let mut request = question(&format!(
            "{} What is {} + {}?",
            "Please be exact. ".repeat(index * 3 % 10),
            20 + index,
            30 + index
        ));
        request["max_tokens"] = json!(10 + 2 * index);
        match index % 4 {
            1 => {
                request["temperature"] = json!(0.9);
                request["seed"] = json!(index);
            }
            2 => {
                request["messages"][0]["content"] = json!("Set a timer for 5 minutes.");
                request["tools"] = tools();
                request["max_tokens"] = json!(60);
            }
            3 => {
                request["response_format"] = json!({"type": "json_object"});
                request["repetition_penalty"] = json!(1.1);
            }
            _ => {}
        }
        requests.push(request);
    }
    requests
}

struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

fn what_matters(message: Value, reason: &Value) -> Value {
    json!([without_ids(message), reason])
}

/// Bytes of this process's memory that are resident; none where the system does not tell.
fn resident() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = text.split(' ').nth(1)?.parse().ok()?;
    Some(pages * 4_096)
}

/// Processor time of this process, in seconds; none where the system does not tell.
fn processor_seconds() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/self/stat").ok()?;
    let mut fields = text.rsplit(')').next()?.split_whitespace();
    let ticks = |text: &str| text.parse::<f64>().ok();
    let (user, system) = (ticks(fields.nth(11)?)?, ticks(fields.next()?)?);
    Some((user + system) / 100.0)
}

#[test]
fn many_clients_of_whom_a_third_vanish() {
    let seconds = std::env::var("LILY_LOAD_SECONDS").ok();
    let seconds = seconds.map_or(30, |text| {
        text.parse().expect("LILY_LOAD_SECONDS is a number")
    });
    let server = Server::start(ServerOptions {
        most_requests: MOST_REQUESTS,
        ..ServerOptions::default()
    });
    let requests = requests();
    let alone: Vec<Value> = requests
        .iter()
        .map(|request| {
            let body = server.post(request).json();
            let choice = &body["choices"][0];
            assert!(choice["message"].is_object(), "{body}");
            what_matters(choice["message"].clone(), &choice["finish_reason"])
        })
        .collect();
    let (finished, vanished, overloaded) = (
        AtomicUsize::new(0),
        AtomicUsize::new(0),
        AtomicUsize::new(0),
    );
    let samples = Mutex::new(Vec::new());
    let began = Instant::now();
    let length = Duration::from_secs(seconds);
    std::thread::scope(|scope| {
        for client in 0..CLIENTS {
            let (server, requests, alone) = (&server, &requests, &alone);
            let (finished, vanished, overloaded) = (&finished, &vanished, &overloaded);
            scope.spawn(move || {
                let mut random = Random(client + 1);
                while began.elapsed() < length {
                    let which = random.below(requests.len() as u64) as usize;
                    let mut request = requests[which].clone();
                    request["stream"] = true.into();
                    let vanishes = random.below(3) == 0;
                    let stream = server.send(&server.chat_head(), &request.to_string());
                    let mut reader = BufReader::new(stream);
                    if vanishes {
                        let mut line = String::new();
                        for _ in 0..random.below(40) {
                            line.clear();
                            if reader.read_line(&mut line).unwrap_or(0) == 0 {
                                break;
                            }
                        }
                        vanished.fetch_add(1, Ordering::Relaxed);
                        std::thread::sleep(Duration::from_millis(100));
                        continue;
                    }
                    let mut all = Vec::new();
                    std::io::Read::read_to_end(&mut reader, &mut all).unwrap();
                    let reply = Reply::parse(&String::from_utf8(all).unwrap());
                    if reply.status == 503 {
                        assert_eq!(reply.json()["error"]["code"], "overloaded");
                        overloaded.fetch_add(1, Ordering::Relaxed);
                        std::thread::sleep(Duration::from_millis(50));
                        continue;
                    }
                    assert_eq!(reply.status, 200, "{}", reply.body);
                    let events = reply.events();
                    let reason = &events.last().unwrap()["choices"][0]["finish_reason"];
                    assert_eq!(
                        what_matters(together(&events), reason),
                        alone[which],
                        "request {which} is not what it is alone"
                    );
                    finished.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let samples = &samples;
        scope.spawn(move || {
            while began.elapsed() < length {
                samples.lock().unwrap().extend(resident());
                std::thread::sleep(Duration::from_millis(200));
            }
        });
    });
    let (finished, vanished, overloaded) = (
        finished.into_inner(),
        vanished.into_inner(),
        overloaded.into_inner(),
    );
    println!(
        "{finished} finished, {vanished} vanished, {overloaded} told to come back, in {seconds} s"
    );
    assert!(finished > 10 && vanished > 5, "{finished} {vanished}");
    wait_until(|| server.requests() == 0);

    let samples = samples.into_inner().unwrap();
    if let (Some(early), Some(late)) = (greatest(&samples, 0.3, 0.5), greatest(&samples, 0.8, 1.0))
    {
        println!(
            "resident {} MB in the middle, {} MB at the end",
            early >> 20,
            late >> 20
        );
        assert!(
            late < early + early / 10 + (16 << 20),
            "memory grows: {early} {late}"
        );
    }
    if let Some(before) = processor_seconds() {
        std::thread::sleep(Duration::from_secs(2));
        let used = processor_seconds().unwrap() - before;
        println!("idle: {used:.2} s of processor time in 2 s");
        assert!(used < 0.1, "{used} s of processor time with nothing to do");
    }
}

/// The greatest of the samples in a part of the time.
fn greatest(samples: &[u64], from: f64, to: f64) -> Option<u64> {
    let at = |part: f64| (samples.len() as f64 * part) as usize;
    samples[at(from)..at(to)].iter().max().copied()
}
