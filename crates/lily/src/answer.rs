//! An answer as it comes: taken apart, shown, and kept for the report.

use crate::console::Console;
use crate::failure::Failure;
use crate::format::{counted, grouped, per_second, rate};
use crate::prompt::Prompt;
use lily_engine::{
    Engine, FinishReason, Generation, OutputEvent, OutputParser, ParsedOutput, Progress,
    TokenEvent, Tokenizer,
};
use serde::Serialize;
use serde_json::{Value, json};
use std::time::Duration;

/// Most tokens of an answer that names no limit itself: what the makers of the model recommend to leave
/// room for, and no more memory than that.
const DEFAULT_MAX_TOKENS: usize = 32_768;

/// Most tokens of an answer: as many as `asked` for, or as there is `room` for and people wait for.
pub fn most_tokens(asked: Option<usize>, room: usize) -> usize {
    // Where not even one token fits, the engine says so with its numbers.
    asked.unwrap_or_else(|| room.clamp(1, DEFAULT_MAX_TOKENS))
}

/// How many tokens were read and written, and how fast: parts of a line.
pub fn counts(generation: &Generation) -> Vec<String> {
    let part = |tokens: String, count: usize, time: Duration| match per_second(count, time) {
        Some(value) => format!("{tokens} at {}/s", rate(value)),
        None => tokens,
    };
    let timings = generation.timings();
    // All of the prompt, but where it was interrupted.
    let done = timings.cached_tokens + timings.prefilled_tokens;
    let mut read = format!("{} read", counted(done, "token"));
    if timings.cached_tokens > 0 {
        read += &format!(" ({} cached)", grouped(timings.cached_tokens as u64));
    }
    let written = format!("{} written", grouped(generation.tokens().len() as u64));
    vec![
        part(read, timings.prefilled_tokens, timings.prefill),
        part(written, timings.decoded_tokens, timings.decode),
    ]
}

/// Where an answer that [is all reasoning](Answer::is_all_reasoning) went.
pub fn no_content_yet(generation: &Generation) -> String {
    format!(
        "the answer's {} went to reasoning and it has no content yet",
        counted(generation.tokens().len(), "token")
    )
}

/// A token's log-probability, and those of the likeliest tokens in its place.
#[derive(Debug, Serialize)]
pub struct TokenLogprob {
    id: u32,
    token: String,
    logprob: f32,
    top: Vec<Alternative>,
}

#[derive(Debug, Serialize)]
struct Alternative {
    id: u32,
    token: String,
    logprob: f32,
}

/// Takes an answer as it comes.
pub struct Answer {
    /// `None` where the answer is plain text.
    parser: Option<OutputParser>,
    events: Vec<OutputEvent>,
    /// The open tool call: name and arguments so far.
    call: Option<(String, String)>,
    logprobs: Vec<TokenLogprob>,
    streams: bool,
    shows_reasoning: bool,
    /// What the last character went to, and whether that ended a line.
    last: Option<(Channel, bool)>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Channel {
    Reasoning,
    Content,
}

impl Answer {
    /// The answer to `prompt`. If it `streams`, it is shown as it comes, its reasoning too if that is
    /// wanted.
    pub fn new(prompt: &Prompt, streams: bool, shows_reasoning: bool) -> Self {
        let parser = OutputParser::new(&prompt.text, &prompt.tools)
            // Without tools, their markup is text like any other.
            .with_tool_calls(!prompt.tools.is_empty());
        Answer {
            parser: (!prompt.raw).then_some(parser),
            events: Vec::new(),
            call: None,
            logprobs: Vec::new(),
            streams,
            shows_reasoning,
            last: None,
        }
    }

    /// Runs a generation to its end and takes all of it.
    pub fn follow(
        &mut self,
        console: &mut Console,
        engine: &mut Engine,
        generation: &mut Generation,
    ) -> Result<(), Failure> {
        let text = engine.text().clone();
        let held = generation.timings().cached_tokens;
        console.status().begin("reading the prompt");
        console
            .status()
            .advance(held, Some(generation.prompt_tokens()));
        loop {
            match engine.advance(generation)? {
                Progress::Prefilled { done, total } => {
                    console.status().advance(done, Some(total));
                    if done == total {
                        console.status().begin("answering");
                        console.status().advance(0, None);
                    }
                }
                Progress::Token(token) => {
                    console.status().advance(generation.tokens().len(), None);
                    self.token(console, text.tokenizer(), &token)?;
                }
                Progress::Finished(finished) => {
                    console.status().end();
                    self.text(console, &finished.text)?;
                    let truncated = matches!(
                        finished.reason,
                        FinishReason::Length | FinishReason::Cancelled
                    );
                    return self.finish(console, truncated);
                }
            }
        }
    }

    /// Takes a token with the text that became certain with it.
    fn token(
        &mut self,
        console: &mut Console,
        tokenizer: &Tokenizer,
        token: &TokenEvent,
    ) -> Result<(), Failure> {
        if let Some(logprob) = token.logprob {
            let name = |id: u32| tokenizer.decode(&[id]);
            self.logprobs.push(TokenLogprob {
                id: token.token,
                token: name(token.token),
                logprob,
                top: token
                    .alternatives
                    .iter()
                    .map(|&(id, logprob)| Alternative {
                        id,
                        token: name(id),
                        logprob,
                    })
                    .collect(),
            });
        }
        self.text(console, &token.text)
    }

    /// Takes text.
    fn text(&mut self, console: &mut Console, text: &str) -> Result<(), Failure> {
        if text.is_empty() {
            return Ok(());
        }
        let events = match &mut self.parser {
            Some(parser) => parser.push(text),
            None => vec![OutputEvent::Content(text.to_string())],
        };
        self.take(console, events)
    }

    /// Ends the answer; `truncated` if the model did not end it itself.
    fn finish(&mut self, console: &mut Console, truncated: bool) -> Result<(), Failure> {
        if let Some(mut parser) = self.parser.take() {
            let events = parser.finish(truncated);
            self.take(console, events)?;
        }
        if !self.streams {
            return Ok(());
        }
        match self.last {
            Some((Channel::Reasoning, false)) => console.aside("\n"),
            Some((Channel::Content, false)) => console.print("\n")?,
            _ => {}
        }
        Ok(())
    }

    /// The log-probabilities of the tokens so far.
    pub fn logprobs(&self) -> &[TokenLogprob] {
        &self.logprobs
    }

    /// Whether the limit came before the answer proper.
    pub fn is_all_reasoning(&self, generation: &Generation) -> bool {
        let parsed = self.parsed();
        generation.finish_reason() == Some(&FinishReason::Length)
            && parsed.content.is_empty()
            && parsed.tool_calls.is_empty()
            && !parsed.reasoning.is_empty()
    }

    /// The parts.
    pub fn parsed(&self) -> ParsedOutput {
        ParsedOutput::from_events(self.events.iter().cloned())
    }

    fn take(&mut self, console: &mut Console, events: Vec<OutputEvent>) -> Result<(), Failure> {
        for event in &events {
            self.show(console, event)?;
        }
        self.events.extend(events);
        Ok(())
    }

    fn show(&mut self, console: &mut Console, event: &OutputEvent) -> Result<(), Failure> {
        if !self.streams {
            return Ok(());
        }
        match event {
            OutputEvent::Reasoning(text) if self.shows_reasoning => {
                console.aside(text);
                self.went_to(Channel::Reasoning, text);
            }
            OutputEvent::Content(text) => self.content(console, text)?,
            OutputEvent::ToolCallStarted { name, .. } => {
                self.call = Some((name.clone(), String::new()));
            }
            OutputEvent::ToolCallArguments { json_fragment, .. } => {
                if let Some((_, arguments)) = &mut self.call {
                    arguments.push_str(json_fragment);
                }
            }
            OutputEvent::ToolCallFinished { .. } => {
                if let Some((name, arguments)) = self.call.take() {
                    let arguments: Value = serde_json::from_str(&arguments).unwrap_or_default();
                    let line = json!({"name": name, "arguments": arguments});
                    self.line_of_its_own(console)?;
                    self.content(console, &format!("{line}\n"))?;
                }
            }
            OutputEvent::ToolCallTruncated { .. } => self.call = None,
            _ => {}
        }
        Ok(())
    }

    fn content(&mut self, console: &mut Console, text: &str) -> Result<(), Failure> {
        if let Some((Channel::Reasoning, ended)) = self.last {
            // An empty line stands between, on the stream that the reasoning went to.
            console.aside(if ended { "\n" } else { "\n\n" });
        }
        self.went_to(Channel::Content, text);
        console.print(text)
    }

    fn line_of_its_own(&mut self, console: &mut Console) -> Result<(), Failure> {
        match self.last {
            Some((Channel::Content, false)) => console.print("\n"),
            _ => Ok(()),
        }
    }

    fn went_to(&mut self, channel: Channel, text: &str) {
        if !text.is_empty() {
            self.last = Some((channel, text.ends_with('\n')));
        }
    }
}
