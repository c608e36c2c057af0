//! `lily chat`: a conversation.

mod command;
mod history;
mod input;
mod interrupts;
mod model;
mod transcript;

use crate::args::{ChatArguments, ReasoningChoice};
use crate::console::Console;
use crate::failure::Failure;
use crate::format::counted;
use crate::model::{Opening, on, open};
use crate::{prompt, sampling};
use command::{Command, Setting};
use input::{Input, Line};
use interrupts::Interrupts;
use lily_engine::FinishReason;
use model::{Model, Said};
use std::path::Path;
use transcript::{Transcript, typed_path};

/// Runs the subcommand.
pub fn chat(path: Option<&Path>, arguments: &ChatArguments) -> Result<(), Failure> {
    sampling::refuse_empty_stops(&arguments.stop)?;
    let tools = match &arguments.tools {
        Some(path) => prompt::tools(path)?,
        None => Vec::new(),
    };
    let mut console = Console::new(false);
    let opening = Opening {
        context: arguments.context,
        snapshots: true,
        ..Opening::default()
    };
    let opened = open(path, &arguments.device, opening, console.status())?;
    console.status().end();
    let from = opened.name.to_text();
    let model = Model::new(path, opened, arguments)?;
    let interrupts = Interrupts::default();
    let input = Input::new(arguments, &interrupts, &mut console)?;
    if input.somebody_types() {
        console.note(&format!("lily: model {from}"));
        console.note(&format!("lily: device {}", on(&model.engine().device())));
        console.note("lily: /help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves");
    }
    interrupts.install(input.somebody_types(), console.status())?;
    let shows_reasoning = match arguments.reasoning {
        ReasoningChoice::Auto => console.is_watched(),
        ReasoningChoice::Show => true,
        ReasoningChoice::Hide => false,
    };
    let chat = Chat {
        console,
        input,
        interrupts,
        model,
        transcript: Transcript {
            system: arguments.system.clone(),
            tools,
            thinking: !arguments.no_thinking,
            messages: Vec::new(),
        },
        shows_reasoning,
    };
    chat.run()
}

struct Chat {
    console: Console,
    input: Input,
    interrupts: Interrupts,
    model: Model,
    transcript: Transcript,
    shows_reasoning: bool,
}

impl Chat {
    fn run(mut self) -> Result<(), Failure> {
        loop {
            let line = match self.input.message(&mut self.console)? {
                Line::Text(line) => line,
                Line::Interrupted => continue,
                Line::End => return Ok(()),
            };
            match self.take(&line) {
                Ok(()) => {}
                // Whoever types can do something about it.
                Err(failure @ (Failure::Request(_) | Failure::Usage(_)))
                    if self.input.somebody_types() =>
                {
                    self.console.note(failure.to_text().trim_end());
                }
                Err(failure) => return Err(failure),
            }
        }
    }

    fn take(&mut self, line: &str) -> Result<(), Failure> {
        match command::parse(line) {
            Some(command) => self.obey(command?),
            None if line.trim().is_empty() => Ok(()),
            None => self.changed_by(|chat| {
                chat.transcript.ask(line);
                chat.answer()
            }),
        }
    }

    /// Does something to the messages. If it fails, they are as they were.
    fn changed_by(
        &mut self,
        change: impl FnOnce(&mut Self) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let before = self.transcript.messages.clone();
        change(self).inspect_err(|_| self.transcript.messages = before)
    }

    /// The model's answer, and what it says to the results of its tool calls.
    fn answer(&mut self) -> Result<(), Failure> {
        loop {
            let cancel = self.interrupts.answering();
            let said = self.model.answer(
                &mut self.console,
                &self.transcript,
                cancel,
                self.shows_reasoning,
            );
            self.interrupts.answered();
            let said = said?;
            let mut ids = Vec::new();
            if said.is_something {
                ids = self.transcript.answer(&said.parsed, said.reason.as_ref());
            }
            if said.reason == Some(FinishReason::Cancelled) && !self.input.somebody_types() {
                return Err(Failure::Interrupted);
            }
            if !said.is_complete() || !self.call_tools(&said, &ids)? {
                return Ok(());
            }
        }
    }

    /// Asks for what the tools return that the model calls; false where none returns anything.
    fn call_tools(&mut self, said: &Said, ids: &[String]) -> Result<bool, Failure> {
        let mut results = Vec::new();
        for call in &said.parsed.tool_calls {
            self.console.note(&format!(
                "lily: the model calls {}: type what it returns, or nothing to skip it",
                call.name
            ));
            let result = match self.input.result(&call.name, &mut self.console)? {
                Line::Text(text) => text,
                Line::Interrupted => return Ok(false),
                Line::End => String::new(),
            };
            results.push(result.trim().to_string());
        }
        if results.iter().all(String::is_empty) {
            return Ok(false);
        }
        for (id, result) in ids.iter().zip(&results) {
            // Results belong to calls by their order: none may be missing between others.
            let result = match result.as_str() {
                "" => "(skipped by the user)",
                given => given,
            };
            self.transcript.tool_result(id, result);
        }
        Ok(true)
    }

    fn obey(&mut self, command: Command<'_>) -> Result<(), Failure> {
        match command {
            Command::Help => self.console.note(command::help().trim_end()),
            Command::System(setting) => self.system(setting),
            Command::Think(wanted) => {
                self.transcript.thinking = wanted.unwrap_or(self.transcript.thinking);
                self.tell_thinking();
            }
            Command::Clear => {
                self.transcript.messages.clear();
                self.console.note("lily: the messages are forgotten");
            }
            Command::Retry => {
                return self.changed_by(|chat| {
                    if !chat.transcript.take_answer_back() {
                        return Err(Failure::usage("there is no message to answer again"));
                    }
                    chat.answer()
                });
            }
            Command::Save(file) => {
                let path = typed_path(file);
                self.transcript.save(&path, &self.model.name)?;
                let count = counted(self.transcript.messages.len(), "message");
                self.console
                    .note(&format!("lily: {count} saved in {}", path.display()));
            }
            Command::Load(file) => {
                let path = typed_path(file);
                let text = self.model.engine().text();
                self.transcript = self.transcript.load(&path, text)?;
                let count = counted(self.transcript.messages.len(), "message");
                self.console
                    .note(&format!("lily: {count} loaded from {}", path.display()));
                self.system(Setting::Show);
                self.tell_thinking();
                self.tell_tools();
            }
            Command::Tools(setting) => {
                match setting {
                    Setting::Show => {}
                    Setting::Set(file) => self.transcript.tools = prompt::tools(&typed_path(file))?,
                    Setting::Clear => self.transcript.tools.clear(),
                }
                self.tell_tools();
            }
        }
        Ok(())
    }

    fn system(&mut self, setting: Setting<'_>) {
        let system = &mut self.transcript.system;
        match setting {
            Setting::Show => {}
            Setting::Set(text) => *system = Some(text.to_string()),
            Setting::Clear => *system = None,
        }
        let line = match system {
            Some(text) => format!("lily: system message: {text}"),
            None => "lily: no system message".into(),
        };
        self.console.note(&line);
    }

    fn tell_thinking(&mut self) {
        self.console.note(match self.transcript.thinking {
            true => "lily: the model reasons before it answers",
            false => "lily: the model answers at once",
        });
    }

    fn tell_tools(&mut self) {
        let names: Vec<&str> = self
            .transcript
            .tools
            .iter()
            .map(prompt::tool_name)
            .collect();
        let line = match names.as_slice() {
            [] => "lily: no tools".into(),
            names => format!("lily: tools: {}", names.join(", ")),
        };
        self.console.note(&line);
    }
}
