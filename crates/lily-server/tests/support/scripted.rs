//! A model that says what it is told to: the CPU device, with the choice of tokens taken from a script. What a parser, a
//! stream and a client make of an answer is then known word for word.

use super::{Server, engine_options};
use lily_cpu::CpuDevice;
use lily_engine::{Device, DeviceDescription, Plan, PlanOutput, Precision, Tokenizer};
use lily_plan::{
    DeviceError, Launch, NO_TOKEN, Outcome, Phase, RunAhead, SessionBytes, SessionState,
};
use lily_server::ServerOptions;
use lily_testing::repository;
use std::sync::{Arc, Mutex};

/// What is said next.
#[derive(Clone, Default)]
pub struct Script(Arc<Mutex<Lines>>);

#[derive(Default)]
struct Lines {
    /// The answer's tokens.
    answer: Vec<u32>,
    /// How many were said.
    said: usize,
    /// Logits that are no numbers, behind so many tokens more.
    breaks_behind: Option<usize>,
    /// Tokens of prompts that went through the model.
    read: usize,
    /// A mistake of the program itself, in place of the next token.
    fails: bool,
}

impl Script {
    /// A server whose answers this script gives, one request at a time.
    pub fn server() -> (Self, Server) {
        let script = Script::default();
        let device = script.clone();
        let wrap = |inner: CpuDevice| -> Box<dyn Device> {
            Box::new(Scripted {
                inner,
                script: device,
            })
        };
        let server = Server::start_on(ServerOptions::default(), engine_options(), wrap);
        (script, server)
    }

    /// The next answers are this text, up to the end of the turn.
    pub fn say(&self, text: &str) {
        let tokenizer = tokenizer();
        let mut tokens = tokenizer.encode(text).unwrap();
        tokens.push(tokenizer.id_of("<|im_end|>").unwrap());
        self.say_tokens(tokens);
    }

    /// The same, and no end: then token 0 for ever.
    pub fn say_on(&self, text: &str) {
        self.say_tokens(tokenizer().encode(text).unwrap());
    }

    /// The next answers are this text, each byte a token of its own.
    pub fn say_byte_by_byte(&self, text: &str) {
        let tokenizer = tokenizer();
        let byte = |wanted: u8| {
            let mut ids = 0..tokenizer.id_bound() as u32;
            ids.find(|&id| tokenizer.token_bytes(id).as_deref() == Some(&[wanted]))
                .unwrap()
        };
        let mut tokens: Vec<u32> = text.bytes().map(byte).collect();
        tokens.push(tokenizer.id_of("<|im_end|>").unwrap());
        self.say_tokens(tokens);
    }

    fn say_tokens(&self, tokens: Vec<u32>) {
        let mut lines = self.0.lock().unwrap();
        lines.answer = tokens;
        lines.said = 0;
    }

    /// The thread that works ends as it should not.
    pub fn fail(&self) {
        self.0.lock().unwrap().fails = true;
    }

    /// The model breaks once: what it says next is not a number.
    pub fn break_once(&self) {
        self.break_behind(0);
    }

    /// The same, behind so many tokens.
    pub fn break_behind(&self, tokens: usize) {
        self.0.lock().unwrap().breaks_behind = Some(tokens);
    }

    /// Tokens of prompts that went through the model so far.
    pub fn read(&self) -> usize {
        self.0.lock().unwrap().read
    }
}

pub fn tokenizer() -> Tokenizer {
    let json = std::fs::read(repository("models/lily-tiny/tokenizer.json")).unwrap();
    Tokenizer::from_bytes(&json).unwrap()
}

struct Scripted {
    inner: CpuDevice,
    script: Script,
}

impl Device for Scripted {
    fn describe(&self) -> DeviceDescription {
        self.inner.describe()
    }

    fn available_memory(&self) -> Option<u64> {
        self.inner.available_memory()
    }

    fn session_bytes(&self, precision: Precision) -> SessionBytes {
        self.inner.session_bytes(precision)
    }

    fn working_bytes(&self, plan: &Plan) -> u64 {
        self.inner.working_bytes(plan)
    }

    fn can_sample(&self) -> bool {
        self.inner.can_sample()
    }

    fn new_session(
        &self,
        precision: Precision,
        capacity: usize,
    ) -> Result<Box<dyn SessionState>, DeviceError> {
        self.inner.new_session(precision, capacity)
    }

    fn execute(&mut self, plan: &Arc<Plan>, launch: Launch<'_>) -> Result<Outcome, DeviceError> {
        let rows = launch.tokens.len();
        let mut outcome = self.inner.execute(plan, launch)?;
        if plan.class.phase == Phase::Prefill {
            self.script.0.lock().unwrap().read += rows;
        }
        if plan.class.output == PlanOutput::State {
            return Ok(outcome);
        }
        let mut lines = self.script.0.lock().unwrap();
        if plan.class.phase == Phase::Prefill {
            lines.said = 0;
        }
        if lines.fails {
            drop(lines);
            panic!("as the test wants it");
        }
        if lines.breaks_behind == Some(0) {
            // Where the device finds no token, the logits are asked for to see why.
            outcome.tokens.fill(NO_TOKEN);
            if !outcome.logits.is_empty() {
                outcome.logits.fill(f32::NAN);
                lines.breaks_behind = None;
            }
            return Ok(outcome);
        }
        lines.breaks_behind = lines.breaks_behind.map(|left| left - 1);
        let next = lines.answer.get(lines.said).copied().unwrap_or(0);
        lines.said += 1;
        if let Some(token) = outcome.tokens.first_mut() {
            *token = next;
        }
        if !outcome.logits.is_empty() {
            outcome.logits.fill(0.0);
            outcome.logits[next as usize] = 100.0;
        }
        Ok(outcome)
    }

    fn run_ahead(&mut self) -> Result<&mut dyn RunAhead, &'static str> {
        Err("the script is the host's")
    }
}
