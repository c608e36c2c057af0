//! What Ctrl-C does in a conversation: it stops the answer, and never loses what there was.

use crate::failure::Failure;
use crate::interrupt::on_interrupt;
use crate::status::Status;
use lily_engine::CancelFlag;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What is told at an empty line.
pub const HINT: &str = "(Ctrl-D leaves)";

/// What is going on, for the thread that hears of Ctrl-C.
#[derive(Clone, Default)]
pub struct Interrupts(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    /// Stops the answer, while there is one.
    answer: Option<CancelFlag>,
    /// What a line is being typed behind, where no editor sees to Ctrl-C itself.
    prompt: Option<String>,
    /// Whether there was one since a line began.
    at_line: bool,
}

impl Interrupts {
    /// From now on Ctrl-C does not end the program, but where nobody types and so nobody goes on.
    pub fn install(&self, somebody_types: bool, status: &Status) -> Result<(), Failure> {
        let interrupts = self.clone();
        let erase = status.eraser();
        on_interrupt(move || {
            let mut state = interrupts.lock();
            match &state.answer {
                Some(answer) if somebody_types || !answer.is_cancelled() => answer.cancel(),
                None if somebody_types => {
                    state.at_line = true;
                    if let Some(prompt) = &state.prompt {
                        // The terminal has forgotten what was typed.
                        eprint!("\n{HINT}\n{prompt}");
                    }
                }
                _ => {
                    erase();
                    std::process::exit(130);
                }
            }
        })
    }

    /// An answer begins: what stops it.
    pub fn answering(&self) -> CancelFlag {
        let cancel = CancelFlag::default();
        self.lock().answer = Some(cancel.clone());
        cancel
    }

    /// The answer is over.
    pub fn answered(&self) {
        self.lock().answer = None;
    }

    /// A line is typed behind `prompt`, without an editor; `None`: it is over. Returns whether there was a Ctrl-C.
    pub fn typing(&self, prompt: Option<&str>) -> bool {
        let mut state = self.lock();
        state.prompt = prompt.map(String::from);
        std::mem::take(&mut state.at_line)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
