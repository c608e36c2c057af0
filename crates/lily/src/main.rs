//! The `lily` command: runs, plans, inspects, measures and verifies models.

#![forbid(unsafe_code)]

mod answer;
mod args;
mod bench;
mod chat;
mod console;
mod failure;
mod format;
mod inspect;
mod interrupt;
mod machine;
mod manual;
mod model;
mod plan;
mod prompt;
mod run;
mod sampling;
mod serve;
mod status;
mod verify;
mod without;

use args::{Arguments, Command};
use clap::Parser;
use std::io::Write;
use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let model = arguments.model.as_deref();
    let result = match &arguments.command {
        Command::Run(run) => run::run(model, run),
        Command::Chat(chat) => chat::chat(model, chat),
        Command::Serve(serve) => serve::serve(model, serve),
        Command::Plan(plan) => plan::plan(model, plan),
        Command::Inspect(inspect) => inspect::inspect(model, inspect),
        Command::Bench(bench) => bench::bench(model, bench),
        Command::Verify(verify) => verify::verify(model, verify),
        Command::Completions(completions) => manual::completions(completions),
        Command::Man(man) => manual::man(man),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            // A closed standard error is no reason to panic.
            let _ = std::io::stderr().write_all(failure.to_text().as_bytes());
            failure.exit_code()
        }
    }
}
