//! What the server tells people on standard error.

use std::io::Write as _;

/// Writes a line. Whoever closed the other end wants none.
pub(crate) fn say(text: &str) {
    let _ = writeln!(std::io::stderr().lock(), "lily: {text}");
}
