//! Ctrl-C, without unsafe code of our own.

use crate::failure::Failure;

/// What happens at every Ctrl-C, on a thread of its own, instead of the end of the program.
pub fn on_interrupt(handler: impl FnMut() + Send + 'static) -> Result<(), Failure> {
    ctrlc::set_handler(handler)
        .map_err(|error| Failure::request("Ctrl-C cannot be caught").because(&error))
}
