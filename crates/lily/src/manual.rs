//! `lily completions` and `lily man`: the command line's grammar, for shells and for `man`.

use crate::args::{Arguments, CompletionsArguments, ManArguments};
use crate::console::Console;
use crate::failure::Failure;
use clap::CommandFactory;
use clap_mangen::Man;

/// Runs `lily completions`.
pub fn completions(arguments: &CompletionsArguments) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(
        arguments.shell,
        &mut Arguments::command(),
        "lily",
        &mut script,
    );
    print(&script)
}

/// Runs `lily man`.
pub fn man(arguments: &ManArguments) -> Result<(), Failure> {
    let command = Arguments::command();
    match &arguments.directory {
        Some(directory) => clap_mangen::generate_to(command, directory).map_err(|error| {
            Failure::request(format!(
                "pages cannot be written to {}",
                directory.display()
            ))
            .because(&error)
        }),
        None => {
            let mut page = Vec::new();
            Man::new(command)
                .render(&mut page)
                .map_err(|error| Failure::request("the page cannot be made").because(&error))?;
            print(&page)
        }
    }
}

fn print(text: &[u8]) -> Result<(), Failure> {
    Console::new(true).print(&String::from_utf8_lossy(text))
}
