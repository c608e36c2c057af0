//! The `lily` command.
fn main() {}
