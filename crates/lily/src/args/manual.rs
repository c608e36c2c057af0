//! Arguments of what tells of the command line itself.

use super::EXIT_CODES;
use clap::Args;
use clap_complete::Shell;
use std::path::PathBuf;

/// Arguments of `lily completions`.
#[derive(Debug, Args)]
#[command(
    about = "Print what a shell needs to complete commands and flags",
    after_help = format!("\
Examples:
  lily completions bash > ~/.local/share/bash-completion/completions/lily
  lily completions zsh > DIRECTORY/_lily      (a directory that $fpath names)
  lily completions fish > ~/.config/fish/completions/lily.fish

{EXIT_CODES}")
)]
pub struct CompletionsArguments {
    /// Which shell
    #[arg(value_enum, value_name = "SHELL")]
    pub shell: Shell,
}

/// Arguments of `lily man`.
#[derive(Debug, Args)]
#[command(
    about = "Print the manual page, or write one for each command",
    after_help = format!("\
Examples:
  lily man > lily.1 && man ./lily.1
  lily man --directory ~/.local/share/man/man1

{EXIT_CODES}")
)]
pub struct ManArguments {
    /// Write lily.1, lily-run.1 and so on to this directory, which is there
    #[arg(long, value_name = "DIRECTORY")]
    pub directory: Option<PathBuf>,
}
