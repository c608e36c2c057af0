//! The server with the embedded model on the CPU, and a client that sees every byte.
#![allow(dead_code)] // No test uses all of it.

pub mod scripted;

use lily_checkpoint::Checkpoint;
use lily_cpu::{CpuDevice, CpuOptions};
use lily_engine::{Device, Engine, EngineOptions, TextModel};
use lily_server::{ServerOptions, serve};
use lily_testing::repository;
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::sync::oneshot;

/// Short chunks, so that short prompts have several.
pub fn engine_options() -> EngineOptions {
    EngineOptions {
        context: Some(4_096),
        prefill_chunk: 64,
        snapshots: true,
        ..EngineOptions::default()
    }
}

/// A server, and what stops it.
pub struct Server {
    pub address: SocketAddr,
    pub stop: Option<oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<std::io::Result<()>>>,
}

impl Server {
    pub fn start(options: ServerOptions) -> Self {
        Self::start_with(options, engine_options())
    }

    pub fn start_with(options: ServerOptions, engine: EngineOptions) -> Self {
        Self::start_on(options, engine, |device| Box::new(device))
    }

    /// With something around the device.
    pub fn start_on(
        options: ServerOptions,
        engine: EngineOptions,
        wrap: impl FnOnce(CpuDevice) -> Box<dyn Device>,
    ) -> Self {
        let checkpoint = Arc::new(Checkpoint::open(&repository("models/lily-tiny")).unwrap());
        let text = Arc::new(TextModel::load(&checkpoint).unwrap());
        let device = CpuDevice::new(checkpoint, &CpuOptions::default()).unwrap();
        let model = device.model().clone();
        let device = wrap(device);
        let engine = Engine::new(device, model, text, engine).unwrap();
        let (stop, stopped) = oneshot::channel();
        let (told, address) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_multi_thread()
                .worker_threads(2)
                .enable_all()
                .build()
                .unwrap();
            runtime.block_on(async move {
                let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
                told.send(listener.local_addr().unwrap()).unwrap();
                let stopped = async move {
                    let _ = stopped.await;
                };
                serve(listener, engine, options, stopped).await
            })
        });
        Server {
            address: address.recv().unwrap(),
            stop: Some(stop),
            thread: Some(thread),
        }
    }

    pub fn send(&self, head: &str, body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(self.address).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(120)))
            .unwrap();
        let length = body.len();
        let text = format!("{head}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}");
        // A server may answer, and close, before it has read all.
        let _ = stream.write_all(text.as_bytes());
        stream
    }

    pub fn ask(&self, head: &str, body: &str) -> Reply {
        let mut all = Vec::new();
        // A body that is too long is not read to its end, and the connection is reset.
        let _ = self.send(head, body).read_to_end(&mut all);
        Reply::parse(&String::from_utf8(all).unwrap())
    }

    pub fn get(&self, path: &str) -> Reply {
        self.ask(
            &format!("GET {path} HTTP/1.1\r\nHost: {}", self.address),
            "",
        )
    }

    pub fn post(&self, body: &Value) -> Reply {
        self.ask(&self.chat_head(), &body.to_string())
    }

    /// Posts to another address than that of chat completions.
    pub fn post_to(&self, path: &str, body: &Value) -> Reply {
        self.ask(&self.head(path), &body.to_string())
    }

    pub fn chat_head(&self) -> String {
        self.head("/v1/chat/completions")
    }

    pub fn head(&self, path: &str) -> String {
        let address = self.address;
        format!("POST {path} HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json")
    }

    /// How a server ends that fails by itself.
    pub fn failure(mut self) -> std::io::Error {
        let thread = self.thread.take().unwrap();
        thread.join().unwrap().unwrap_err()
    }

    pub fn requests(&self) -> u64 {
        self.get("/health").json()["requests"].as_u64().unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap().unwrap();
        }
    }
}

pub struct Reply {
    pub status: u16,
    pub head: String,
    pub body: String,
}

impl Reply {
    pub fn parse(text: &str) -> Self {
        let (head, body) = text.split_once("\r\n\r\n").expect("a head");
        let head = head.to_ascii_lowercase();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        let body = if head.contains("transfer-encoding: chunked") {
            unchunked(body)
        } else {
            body.to_string()
        };
        Reply { status, head, body }
    }

    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.body))
    }

    /// The events of a stream, its end left out.
    pub fn events(&self) -> Vec<Value> {
        let data = self
            .body
            .lines()
            .filter_map(|line| line.strip_prefix("data: "));
        let mut data: Vec<&str> = data.collect();
        assert_eq!(data.pop(), Some("[DONE]"));
        data.into_iter()
            .map(|data| serde_json::from_str(data).unwrap())
            .collect()
    }
}

pub fn unchunked(mut body: &str) -> String {
    let mut all = String::new();
    while let Some((length, rest)) = body.split_once("\r\n") {
        let length = usize::from_str_radix(length.trim(), 16).unwrap();
        if length == 0 {
            break;
        }
        all.push_str(&rest[..length]);
        body = &rest[length + 2..];
    }
    all
}

pub fn server() -> &'static Server {
    static SERVER: OnceLock<Server> = OnceLock::new();
    SERVER.get_or_init(|| {
        Server::start(ServerOptions {
            model: "lily-tiny".into(),
            ..ServerOptions::default()
        })
    })
}

pub fn question(text: &str) -> Value {
    json!({
        "model": "lily-tiny",
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": 200,
        "chat_template_kwargs": {"enable_thinking": false},
    })
}

/// An answer that does not end by itself for minutes.
pub fn endless() -> Value {
    let checkpoint = Checkpoint::open(&repository("models/lily-tiny")).unwrap();
    let text = TextModel::load(&checkpoint).unwrap();
    let mut request = question("Tell me a story.");
    request["max_tokens"] = 3_000.into();
    for id in text.stop_ids() {
        request["logit_bias"][id.to_string()] = json!(-100);
    }
    request
}

pub fn tools() -> Value {
    serde_json::from_str(
        &std::fs::read_to_string(repository("models/lily-tiny/tools.json")).unwrap(),
    )
    .unwrap()
}

/// A stream's message, put together as clients do it.
pub fn together(events: &[Value]) -> Value {
    let mut message = json!({"role": null, "content": "", "refusal": null});
    for event in events {
        let Some(delta) = event["choices"].get(0).map(|choice| &choice["delta"]) else {
            continue;
        };
        for (key, value) in delta.as_object().unwrap() {
            match key.as_str() {
                "role" => message["role"] = value.clone(),
                "tool_calls" => {
                    for call in value.as_array().unwrap() {
                        let index = call["index"].as_u64().unwrap() as usize;
                        if message.get("tool_calls").is_none() {
                            message["tool_calls"] = json!([]);
                        }
                        let calls = message["tool_calls"].as_array_mut().unwrap();
                        if calls.len() == index {
                            let mut begun = call.clone();
                            begun.as_object_mut().unwrap().remove("index");
                            calls.push(begun);
                        } else {
                            let more = call["function"]["arguments"].as_str().unwrap();
                            let so_far = calls[index]["function"]["arguments"].as_str().unwrap();
                            calls[index]["function"]["arguments"] =
                                format!("{so_far}{more}").into();
                        }
                    }
                }
                text => {
                    let so_far = message
                        .get(text)
                        .and_then(Value::as_str)
                        .unwrap_or_default();
                    message[text] = format!("{so_far}{}", value.as_str().unwrap()).into();
                }
            }
        }
    }
    if message["content"] == "" && message.get("tool_calls").is_some() {
        message["content"] = Value::Null;
    }
    message
}

/// Ids of tool calls are an answer's own.
pub fn without_ids(mut message: Value) -> Value {
    if let Some(calls) = message.get_mut("tool_calls").and_then(Value::as_array_mut) {
        for call in calls {
            assert!(call["id"].as_str().unwrap().starts_with("call_"));
            call["id"] = Value::Null;
        }
    }
    message
}

pub fn wait_until(condition: impl Fn() -> bool) {
    let started = Instant::now();
    while !condition() {
        assert!(
            started.elapsed() < Duration::from_secs(10),
            "it does not come"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}

pub fn cached(body: &Value) -> u64 {
    body["usage"]["prompt_tokens_details"]["cached_tokens"]
        .as_u64()
        .unwrap()
}

/// The message of a plain answer.
pub fn message(body: &Value) -> &Value {
    &body["choices"][0]["message"]
}

/// A request with a field of it replaced.
pub fn asked(request: &Value, name: &str, value: Value) -> Value {
    let mut request = request.clone();
    request[name] = value;
    request
}

/// A function with parameters of every type.
pub fn every_type() -> Value {
    json!([{"type": "function", "function": {"name": "set", "parameters": {"type": "object", "properties": {
        "count": {"type": "integer"},
        "part": {"type": "number"},
        "is_on": {"type": "boolean"},
        "names": {"type": "array", "items": {"type": "string"}},
        "more": {"type": "object"},
        "text": {"type": "string"},
        "none": {"type": ["string", "null"]},
    }}}}])
}

/// A call of it, as the model writes calls.
pub fn call(parameters: &[(&str, &str)]) -> String {
    let parameters: String = parameters
        .iter()
        .map(|(name, value)| format!("<parameter={name}>\n{value}\n</parameter>\n"))
        .collect();
    format!("<tool_call>\n<function=set>\n{parameters}</function>\n</tool_call>")
}
