//! The model in a conversation: its session is kept from turn to turn.

use super::transcript::Transcript;
use crate::answer::{Answer, counts, most_tokens, no_content_yet};
use crate::args::ChatArguments;
use crate::console::Console;
use crate::failure::Failure;
use crate::model::{Opened, text_failure};
use crate::sampling;
use lily_engine::{
    CancelFlag, Engine, FinishReason, Generation, GenerationRequest, ParsedOutput,
    SamplingParameters, Session,
};
use std::path::{Path, PathBuf};

/// Sessions are opened for multiples of so many tokens, so that few turns need a larger one. A test needs one soon.
const ROOM: usize = if cfg!(test) { 64 } else { 32_768 };

/// A model that remembers what it has computed.
pub struct Model {
    path: Option<PathBuf>,
    /// Its name, for files.
    pub name: String,
    engine: Engine,
    session: Option<Session>,
    sampling: SamplingParameters,
    max_tokens: Option<usize>,
    stop: Vec<String>,
    host_sampling: bool,
}

/// What the model said.
pub struct Said {
    /// Its parts, as far as they came.
    pub parsed: ParsedOutput,
    /// Why it ended.
    pub reason: Option<FinishReason>,
    /// Whether there is anything at all.
    pub is_something: bool,
}

impl Said {
    /// Whether the model ended it.
    pub fn is_complete(&self) -> bool {
        !matches!(
            self.reason,
            Some(FinishReason::Cancelled | FinishReason::Length)
        )
    }
}

impl Model {
    /// A model that was opened from `path`.
    pub fn new(
        path: Option<&Path>,
        opened: Opened,
        arguments: &ChatArguments,
    ) -> Result<Self, Failure> {
        let engine = opened.engine;
        let sampling = sampling::parameters(&arguments.sampling, engine.text());
        sampling::validate(&sampling, &engine)?;
        Ok(Model {
            path: path.map(Path::to_path_buf),
            name: opened.name.name,
            engine,
            session: None,
            sampling,
            max_tokens: arguments.max_tokens,
            stop: arguments.stop.clone(),
            host_sampling: arguments.sampling.host_sampling,
        })
    }

    /// Its engine.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Answers a conversation, shown as it comes, and tells what it took.
    pub fn answer(
        &mut self,
        console: &mut Console,
        transcript: &Transcript,
        cancel: CancelFlag,
        shows_reasoning: bool,
    ) -> Result<Said, Failure> {
        let prompt = transcript.prompt(self.engine.text())?;
        let ids = self
            .engine
            .text()
            .encode(&prompt.text, self.engine.context());
        let ids = ids.map_err(|error| text_failure(error, self.path.as_deref()))?;
        let mut generation = self.start(ids, cancel)?;
        let mut answer = Answer::new(&prompt, true, shows_reasoning);
        let followed = answer.follow(console, &mut self.engine, &mut generation);
        console.status().end();
        // Behind an error its session goes with the generation: what it holds need not be right.
        followed?;
        let said = Said {
            parsed: answer.parsed(),
            reason: generation.finish_reason().cloned(),
            is_something: !generation.tokens().is_empty(),
        };
        tell(console, &generation, &answer, &said);
        self.session = Some(generation.into_session());
        Ok(said)
    }

    fn start(&mut self, ids: Vec<u32>, cancel: CancelFlag) -> Result<Generation, Failure> {
        let context = self.engine.context();
        // With the room of the session that there is: it goes, where a larger one takes its place.
        let held = self.session.as_ref().map_or(0, Session::capacity);
        let most = (self.engine.largest_session() + held).min(context);
        let max_tokens = most_tokens(self.max_tokens, most.saturating_sub(ids.len()));
        let session = if ids.len() < context {
            let needed = (ids.len() + max_tokens).min(context);
            self.session_for(&ids, needed, most)
        } else {
            // It is refused, and what there is stays for a shorter one.
            None
        };
        let request = GenerationRequest {
            prompt: ids,
            sampling: self.sampling.clone(),
            max_tokens: Some(max_tokens),
            stop: self.stop.clone(),
            host_sampling: self.host_sampling,
            ..GenerationRequest::default()
        };
        // Otherwise the same question would always have the same answer.
        self.sampling.seed = self.sampling.seed.wrapping_add(1);
        Ok(self.engine.start(session, request, cancel)?)
    }

    /// A session with room for `needed` tokens: the one there is, or a larger one with what it has of the prompt. Where
    /// memory is short for both, the engine sees to it.
    fn session_for(&mut self, ids: &[u32], needed: usize, most: usize) -> Option<Session> {
        let roomy = needed.next_multiple_of(ROOM).min(most).max(needed);
        let Some(mut session) = self.session.take() else {
            return self.engine.open_session(roomy).ok();
        };
        if session.capacity() >= needed {
            return Some(session);
        }
        let usable = session.usable(ids);
        match self.engine.fork(&mut session, usable, roomy) {
            Ok(larger) => Some(larger),
            Err(_) => Some(session),
        }
    }
}

/// Counts, speed, and what else there is to know of an answer.
fn tell(console: &mut Console, generation: &Generation, answer: &Answer, said: &Said) {
    let mut parts = counts(generation);
    match said.reason {
        Some(FinishReason::Cancelled) => parts.push("interrupted".into()),
        Some(FinishReason::Length) => parts.push("stopped at --max-tokens".into()),
        _ => {}
    }
    console.aside(&format!("\n{}\n\n", parts.join(" · ")));
    if answer.is_all_reasoning(generation) {
        console.note(&format!(
            "lily: {}: start with a larger --max-tokens, or answer at once with /think off",
            no_content_yet(generation)
        ));
    }
    if said.is_complete() && said.parsed.truncated_call {
        console.note("lily: a tool call makes no sense and was left out");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Arguments, Command};
    use crate::model::{Opening, open};
    use crate::status::Status;
    use clap::Parser;

    #[test]
    fn a_session_that_is_too_small_gives_way_to_a_larger_one_with_what_it_has() {
        let line = "lily chat --greedy --chunk 8 --max-tokens 4";
        let Command::Chat(arguments) = Arguments::parse_from(line.split(' ')).command else {
            unreachable!();
        };
        let opening = Opening {
            snapshots: true,
            ..Opening::default()
        };
        let opened = open(None, &arguments.device, opening, &Status::new(false)).unwrap();
        let mut model = Model::new(None, opened, &arguments).unwrap();
        let mut turn = |tokens: u32| {
            let ids = (0..tokens).map(|id| 100 + id).collect();
            let generation = model.start(ids, CancelFlag::default()).unwrap();
            let cached = generation.timings().cached_tokens;
            let generation = model.engine.run(generation, |_| {}).unwrap();
            model.session = Some(generation.into_session());
            (cached, model.session.as_ref().unwrap().capacity())
        };
        assert_eq!(turn(20), (0, 64));
        assert_eq!(turn(40), (16, 64));
        assert_eq!(turn(61), (40, 128));
        assert_eq!(turn(90), (56, 128));
        // What is too long is refused, and what there is stays.
        let ids = vec![100; model.engine.context()];
        assert!(model.start(ids, CancelFlag::default()).is_err());
        assert!(model.session.is_some());
    }
}
