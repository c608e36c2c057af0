//! One answer: prefill by chunks, then token by token. A generation advances in small steps, so that
//! whoever drives it can stop it, or take turns, between any two.

use crate::decode::{Decode, DecodeRow, Pace};
use crate::engine::Engine;
use crate::error::EngineError;
use crate::guide::{Guide, Next};
use crate::session::Session;
use lily_plan::{NO_TOKEN, Outcome, PlanOutput};
use lily_sampling::{Sampled, Sampler, SamplingParameters};
use lily_text::{Detokenizer, StopMatcher};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// What to generate.
#[derive(Clone, Debug, Default)]
pub struct GenerationRequest {
    /// The whole prompt. What the session already holds of it is not computed again.
    pub prompt: Vec<u32>,
    /// Tokens of the prompt behind which a later prompt may part from it, however long ago that is, such as the end of the
    /// last question: a state is kept there, where states are.
    pub landmark: Option<usize>,
    /// How tokens are chosen.
    pub sampling: SamplingParameters,
    /// Most tokens of the answer; to the end of the context, if not given.
    pub max_tokens: Option<usize>,
    /// Texts that end the answer and are not part of it.
    pub stop: Vec<String>,
    /// Those texts count only behind the first token of this id, and the blanks that follow it: behind the reasoning.
    pub stops_behind: Option<u32>,
    /// Tokens that end the answer; the checkpoint's own, if not given.
    pub stop_ids: Option<Vec<u32>>,
    /// Tokens are chosen on the host even where the device could: for comparisons.
    pub host_sampling: bool,
    /// Has a say in every token of the answer.
    pub guide: Option<Box<dyn Guide>>,
}

/// Stops a generation from another thread, between two chunks or tokens.
#[derive(Clone, Debug, Default)]
pub struct CancelFlag(Arc<AtomicBool>);

impl CancelFlag {
    /// Asks for the end.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether the end was asked for.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Why an answer ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// The model ended it with this token.
    StopToken(u32),
    /// It came to this text.
    StopText(String),
    /// It reached the most tokens asked for, or the end of the context.
    Length,
    /// It was cancelled.
    Cancelled,
    /// The device or the sampler failed, and said why then.
    Failed,
}

/// A chosen token.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenEvent {
    /// Its id.
    pub token: u32,
    /// The text that became certain with it: possibly none (half a character, or what may yet become a
    /// stop text), possibly that of earlier tokens too.
    pub text: String,
    /// Its log-probability, if asked for.
    pub logprob: Option<f32>,
    /// The likeliest tokens with theirs, if asked for.
    pub alternatives: Vec<(u32, f32)>,
}

/// The end of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finished {
    /// Why.
    pub reason: FinishReason,
    /// Text that was still held back.
    pub text: String,
}

/// What a step of a generation did.
#[derive(Clone, Debug, PartialEq)]
pub enum Progress {
    /// Part of the prompt was computed.
    Prefilled {
        /// Tokens of the prompt that are done, what the session held included.
        done: usize,
        /// Tokens of the prompt.
        total: usize,
    },
    /// A token was chosen.
    Token(TokenEvent),
    /// The answer is complete.
    Finished(Finished),
}

/// Where the time went.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Timings {
    /// Tokens of the prompt that the session already held.
    pub cached_tokens: usize,
    /// Tokens of the prompt that were computed.
    pub prefilled_tokens: usize,
    /// Time that took.
    pub prefill: Duration,
    /// Tokens that went through decode.
    pub decoded_tokens: usize,
    /// Time that took, sampling included; that of a step that others shared is counted by each.
    pub decode: Duration,
}

/// Where the tokens of an answer are chosen, its first excepted: that the host chooses, from the prompt's logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenChoice {
    /// By the device: the decode plan ends with arg-max.
    DeviceGreedy,
    /// By the device: the decode plan ends with sampling, and the logits stay there.
    DeviceSampling,
    /// By the host, from the logits of each step, for this reason.
    Host(&'static str),
}

impl TokenChoice {
    fn new(engine: &Engine, request: &GenerationRequest) -> Self {
        let sampling = &request.sampling;
        let is_plain = sampling.temperature == 0.0
            && sampling.repetition_penalty == 1.0
            && sampling.presence_penalty == 0.0
            && sampling.frequency_penalty == 0.0
            && sampling.logit_bias.is_empty();
        if request.host_sampling {
            TokenChoice::Host("as asked for")
        } else if sampling.logprobs.is_some() {
            TokenChoice::Host("log-probabilities need all logits")
        } else if is_plain && request.guide.is_none() {
            TokenChoice::DeviceGreedy
        } else if engine.device_can_sample() {
            TokenChoice::DeviceSampling
        } else {
            TokenChoice::Host("the device does not sample from so large a vocabulary")
        }
    }

    /// What a decode plan has to leave.
    pub(crate) fn output(self) -> PlanOutput {
        match self {
            TokenChoice::DeviceGreedy => PlanOutput::Token,
            TokenChoice::DeviceSampling => PlanOutput::Sampled,
            TokenChoice::Host(_) => PlanOutput::AllLogits,
        }
    }
}

impl fmt::Display for TokenChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TokenChoice::DeviceGreedy => f.write_str("on the device, by arg-max"),
            TokenChoice::DeviceSampling => f.write_str("on the device, by sampling"),
            TokenChoice::Host(reason) => write!(f, "on the host: {reason}"),
        }
    }
}

/// Where stop texts begin to count.
#[derive(Debug)]
enum Gate {
    /// Behind this token.
    Until(u32),
    /// Behind the blanks that come next.
    Blank,
    Open,
}

impl Gate {
    /// How many bytes of a token's text are passed without being looked at.
    fn pass(&mut self, token: u32, piece: &str) -> usize {
        match *self {
            Gate::Open => 0,
            Gate::Until(end) => {
                if token == end {
                    *self = Gate::Blank;
                }
                piece.len()
            }
            Gate::Blank => {
                let text = piece.trim_start();
                if !text.is_empty() {
                    *self = Gate::Open;
                }
                piece.len() - text.len()
            }
        }
    }
}

/// An answer in the making.
pub struct Generation {
    session: Session,
    request: GenerationRequest,
    cancel: CancelFlag,
    sampler: Sampler,
    detokenizer: Detokenizer,
    stop: StopMatcher,
    gate: Gate,
    stop_ids: Vec<u32>,
    choice: TokenChoice,
    pace: Pace,
    max_tokens: usize,
    generated: Vec<u32>,
    /// Chosen, but not yet part of the session's state.
    pending: Option<u32>,
    /// What the guide has said of the next token, once it was asked.
    next: Option<Next>,
    /// What the last run left, from which the next token is chosen.
    outcome: Option<Outcome>,
    finished: Option<FinishReason>,
    timings: Timings,
}

impl Engine {
    /// Starts an answer. If `session` is given and the prompt continues what it holds, only the rest is
    /// computed; otherwise it begins anew. Without one, a session is opened for prompt and answer.
    pub fn start(
        &mut self,
        session: Option<Session>,
        request: GenerationRequest,
        cancel: CancelFlag,
    ) -> Result<Generation, EngineError> {
        let limits = self.limits();
        limits.check(&request.prompt)?;
        let prompt = request.prompt.len();
        let room = limits.context - prompt;
        let max_tokens = request.max_tokens.unwrap_or(room).min(room);
        // Before memory is taken for a request that is not sound.
        let sampler = self.sampler(&request)?;
        let session = self.session_for(session, &request, prompt + max_tokens)?;
        Ok(Generation {
            timings: Timings {
                cached_tokens: session.tokens.len(),
                ..Timings::default()
            },
            ..self.generation(session, sampler, request, cancel, max_tokens)
        })
    }

    fn sampler(&self, request: &GenerationRequest) -> Result<Sampler, EngineError> {
        let vocabulary = self.model().config.vocab_size as u32;
        let (sampling, limit) = (request.sampling.clone(), self.token_limit());
        Ok(Sampler::new(sampling, vocabulary, limit, &request.prompt)?)
    }

    fn generation(
        &mut self,
        session: Session,
        sampler: Sampler,
        request: GenerationRequest,
        cancel: CancelFlag,
        max_tokens: usize,
    ) -> Generation {
        let stop_ids = request.stop_ids.clone();
        let choice = TokenChoice::new(self, &request);
        Generation {
            detokenizer: Detokenizer::new(self.text().tokenizer().clone(), true),
            stop: StopMatcher::new(request.stop.iter().map(String::as_str)),
            gate: request.stops_behind.map_or(Gate::Open, Gate::Until),
            stop_ids: stop_ids.unwrap_or_else(|| self.text().stop_ids().to_vec()),
            session,
            request,
            cancel,
            sampler,
            choice,
            pace: self.pace(choice.output()),
            max_tokens,
            generated: Vec::new(),
            pending: None,
            next: None,
            outcome: None,
            finished: None,
            timings: Timings::default(),
        }
    }

    /// Another answer to the prompt of `generation`, whose prompt is computed and whose answer has not begun. It is what
    /// it would be by itself: its session begins with a copy of the same state.
    ///
    /// # Errors
    /// Where memory is short, for parameters outside of their ranges, and where the prompt is not computed or the answer
    /// has begun.
    pub fn branch(
        &mut self,
        generation: &mut Generation,
        sampling: SamplingParameters,
        cancel: CancelFlag,
    ) -> Result<Generation, EngineError> {
        if !generation.is_prefilled() {
            let position = generation.session.tokens.len();
            return Err(EngineError::NoSnapshot { position });
        }
        let request = GenerationRequest {
            sampling,
            ..generation.request.clone()
        };
        let sampler = self.sampler(&request)?;
        let session = self.duplicate(&mut generation.session)?;
        let max_tokens = generation.max_tokens;
        Ok(Generation {
            outcome: generation.outcome.clone(),
            timings: generation.timings,
            ..self.generation(session, sampler, request, cancel, max_tokens)
        })
    }

    /// Does the next bit of work: a chunk of the prompt, or a token. Behind an error the generation is at its end.
    pub fn advance(&mut self, generation: &mut Generation) -> Result<Progress, EngineError> {
        self.try_to_advance(generation)
            .or_else(|error| generation.fail(error))
    }

    fn try_to_advance(&mut self, generation: &mut Generation) -> Result<Progress, EngineError> {
        if generation.finished.is_none() && generation.cancel.is_cancelled() {
            generation.finished = Some(FinishReason::Cancelled);
        }
        if let Some(reason) = generation.finished.clone() {
            return Ok(Progress::Finished(generation.finish(reason)));
        }
        let done = generation.session.tokens.len();
        let total = generation.request.prompt.len();
        if done < total {
            return self.advance_prefill(generation, done, total);
        }
        if generation.max_tokens == 0 {
            generation.finished = Some(FinishReason::Length);
            return self.try_to_advance(generation);
        }
        self.advance_decode(generation).map(Progress::Token)
    }

    /// Runs a generation to its end, telling `on_progress` each step; gives the session back.
    pub fn run(
        &mut self,
        mut generation: Generation,
        mut on_progress: impl FnMut(&Progress),
    ) -> Result<Generation, EngineError> {
        loop {
            let progress = self.advance(&mut generation)?;
            on_progress(&progress);
            if matches!(progress, Progress::Finished(_)) {
                return Ok(generation);
            }
        }
    }

    fn advance_prefill(
        &mut self,
        generation: &mut Generation,
        done: usize,
        total: usize,
    ) -> Result<Progress, EngineError> {
        let start = Instant::now();
        let rest = &generation.request.prompt[done..];
        let (rows, outcome) =
            self.prefill_chunk(&mut generation.session, rest, PlanOutput::LastLogits)?;
        self.keep_behind_chunk(&mut generation.session);
        generation.timings.prefilled_tokens += rows;
        generation.timings.prefill += start.elapsed();
        if done + rows == total {
            generation.outcome = Some(outcome);
        }
        Ok(Progress::Prefilled {
            done: done + rows,
            total,
        })
    }

    fn advance_decode(&mut self, generation: &mut Generation) -> Result<TokenEvent, EngineError> {
        generation.ask_guide()?;
        if generation.pending.is_some() {
            let output = generation.choice.output();
            self.decode_batch(&mut [generation], output)?;
        }
        let start = Instant::now();
        let outcome = generation.outcome.as_ref();
        if outcome.is_some_and(|outcome| outcome.tokens.first() == Some(&NO_TOKEN))
            && let Some(&token) = generation.generated.last()
        {
            // The device found nothing to choose: the sampler, given the logits, says why.
            self.take_back(&mut generation.session);
            let outcome = self.decode(&mut generation.session, token, PlanOutput::AllLogits)?;
            generation.outcome = Some(outcome);
        }
        let sampled = generation.choose()?;
        generation.timings.decode += start.elapsed();
        generation.accept(sampled)
    }
}

impl Generation {
    /// Whether its next bit of work is a chunk of its prompt.
    pub fn is_prefilling(&self) -> bool {
        self.goes_on() && self.session.tokens.len() < self.request.prompt.len()
    }

    /// Whether its next bit of work is a decode step: its first token is chosen without one.
    pub(crate) fn has_step(&self) -> bool {
        self.goes_on() && self.pending.is_some()
    }

    fn goes_on(&self) -> bool {
        self.finished.is_none() && !self.cancel.is_cancelled()
    }

    /// Has the guide say what the next token may be, if it has not yet.
    pub(crate) fn ask_guide(&mut self) -> Result<(), EngineError> {
        if self.next.is_none() {
            self.next = Some(Next::ask(self.request.guide.as_mut())?);
        }
        Ok(())
    }

    /// Positions that its session may grow to.
    pub(crate) fn capacity(&self) -> usize {
        self.session.capacity()
    }

    /// Tokens that its session holds.
    pub(crate) fn position(&self) -> usize {
        self.session.tokens.len()
    }

    /// The decode step that is due ([`has_step`](Self::has_step)), no longer pending.
    pub(crate) fn take_step(&mut self) -> DecodeRow<'_> {
        DecodeRow {
            session: &mut self.session,
            token: self.pending.take().expect("looked for by the caller"),
            decode: Decode {
                output: self.choice.output(),
                sampling: self.sampler.row(self.next.as_ref().and_then(Next::set)),
                stops: &self.stop_ids,
                goes_on: self.generated.len() + 1 < self.max_tokens,
            },
        }
    }

    /// What the step left, and how long it took.
    pub(crate) fn decoded(&mut self, outcome: Outcome, elapsed: Duration) {
        self.outcome = Some(outcome);
        self.timings.decoded_tokens += 1;
        self.timings.decode += elapsed;
    }

    /// What its session holds need not be what it was any more.
    pub(crate) fn fail(&mut self, error: EngineError) -> Result<Progress, EngineError> {
        self.finished = Some(FinishReason::Failed);
        Err(error)
    }
}

impl Generation {
    /// Where its tokens are chosen.
    pub fn choice(&self) -> TokenChoice {
        self.choice
    }

    /// How its steps are sent off.
    pub fn pace(&self) -> Pace {
        self.pace
    }

    /// The tokens chosen so far, the one that ended the answer included.
    pub fn tokens(&self) -> &[u32] {
        &self.generated
    }

    /// Tokens of the prompt.
    pub fn prompt_tokens(&self) -> usize {
        self.request.prompt.len()
    }

    /// Whether its prompt is computed and its answer has not begun: where it can be branched.
    pub fn is_prefilled(&self) -> bool {
        self.outcome.is_some() && self.generated.is_empty()
    }

    /// Where the time went so far.
    pub fn timings(&self) -> Timings {
        self.timings
    }

    /// Why the answer ended, once it has.
    pub fn finish_reason(&self) -> Option<&FinishReason> {
        self.finished.as_ref()
    }

    /// The session, for the next turn.
    pub fn into_session(self) -> Session {
        self.session
    }

    fn choose(&mut self) -> Result<Sampled, EngineError> {
        let outcome = self.outcome.take().unwrap_or_default();
        let next = self.next.take().unwrap_or_default();
        if let Next::Token(token) = next {
            return self.forced(&outcome.logits, token);
        }
        if let Some(&token) = outcome.tokens.first() {
            return Ok(Sampled {
                token,
                logprob: None,
                alternatives: Vec::new(),
            });
        }
        Ok(self.sampler.sample(&outcome.logits, next.set())?)
    }

    /// A token that nobody chose, with its log-probability if that was asked for.
    fn forced(&mut self, logits: &[f32], token: u32) -> Result<Sampled, EngineError> {
        let mut sampled = Sampled {
            token,
            logprob: None,
            alternatives: Vec::new(),
        };
        if self.request.sampling.logprobs.is_some() {
            let mut only = vec![0; token as usize / 32 + 1];
            only[token as usize / 32] = 1 << (token % 32);
            only.resize(logits.len().div_ceil(32), 0);
            sampled = self.sampler.sample(logits, Some(&only))?;
        }
        Ok(sampled)
    }

    fn accept(&mut self, sampled: Sampled) -> Result<TokenEvent, EngineError> {
        let Sampled {
            mut token,
            logprob,
            alternatives,
        } = sampled;
        if let Some(guide) = &mut self.request.guide {
            token = guide.take(token)?;
        }
        self.sampler.accept(token);
        self.generated.push(token);
        let mut text = String::new();
        if self.stop_ids.contains(&token) {
            self.finished = Some(FinishReason::StopToken(token));
        } else {
            let piece = self.detokenizer.push(token);
            let (passed, piece) = piece.split_at(self.gate.pass(token, &piece));
            let step = self.stop.push(piece);
            text = passed.to_string() + &step.text;
            if let Some(stop) = step.stop {
                self.finished = Some(FinishReason::StopText(stop));
            } else if self.generated.len() >= self.max_tokens {
                self.finished = Some(FinishReason::Length);
            } else {
                self.pending = Some(token);
            }
        }
        Ok(TokenEvent {
            token,
            text,
            logprob,
            alternatives,
        })
    }

    /// Flushes what was held back. What follows a stop text is not part of the answer.
    fn finish(&mut self, reason: FinishReason) -> Finished {
        let mut text = String::new();
        if !matches!(reason, FinishReason::StopText(_)) {
            let step = self.stop.push(&self.detokenizer.finish());
            text = step.text;
            match step.stop {
                Some(stop) => self.finished = Some(FinishReason::StopText(stop)),
                None => text.push_str(&self.stop.finish()),
            }
        }
        Finished {
            reason: self.finished.clone().unwrap_or(reason),
            text,
        }
    }
}
