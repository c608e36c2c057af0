//! An answer, followed token by token.

use crate::ConstraintError;
use crate::grammars::{Grammar, Grammars};
use lily_engine::{Allowed, Detokenizer, Guide, GuideError, OutputEvent, OutputParser, Tokenizer};
use llguidance::Matcher;
use llguidance::toktrie::SimpleVob;
use std::collections::VecDeque;
use std::sync::Arc;

/// Holds an answer to what was asked for.
#[derive(Clone)]
pub struct Constraint {
    parser: OutputParser,
    detokenizer: Detokenizer,
    /// Tokens that come next, whatever the model says.
    forced: VecDeque<u32>,
    /// Reasoning tokens that may yet come.
    budget: Option<usize>,
    /// What stands behind the reasoning.
    answer: Option<Matcher>,
    /// What stands behind each `<tool_call>` that the model begins by itself.
    call: Option<Matcher>,
    /// The call that is being made.
    open_call: Option<Matcher>,
    one_call: bool,
    /// What was allowed last.
    mask: SimpleVob,
    tokens: Tokens,
}

/// Tokens with a meaning.
#[derive(Clone)]
struct Tokens {
    stops: Vec<u32>,
    /// The end of the reasoning, with what stands around it where it is cut short.
    end_reasoning: Vec<u32>,
    /// What stands between reasoning and answer.
    gap: Vec<u32>,
    think_end: Option<u32>,
    call_begin: Option<u32>,
}

impl Tokens {
    fn new(tokenizer: &Tokenizer, stop_ids: &[u32]) -> Self {
        let added = |name: &str| tokenizer.id_of(name).filter(|&id| tokenizer.is_added(id));
        // What cannot be encoded is left out: nothing is known to be.
        let encode = |text: &str| tokenizer.encode(text).unwrap_or_default();
        Tokens {
            stops: stop_ids.to_vec(),
            end_reasoning: encode("\n</think>\n\n"),
            gap: encode("\n\n"),
            think_end: added("</think>"),
            call_begin: added("<tool_call>"),
        }
    }
}

impl Constraint {
    /// A constraint that allows everything, for an answer that follows `prompt`; `stop_ids`, of which there is at least
    /// one, end it.
    ///
    /// # Errors
    /// Where no token ends an answer.
    pub fn new(
        tokenizer: &Arc<Tokenizer>,
        stop_ids: &[u32],
        prompt: &str,
    ) -> Result<Self, ConstraintError> {
        if stop_ids.is_empty() {
            return Err(ConstraintError::Vocabulary(
                "no token ends an answer".into(),
            ));
        }
        Ok(Constraint {
            parser: OutputParser::new(prompt, &[]),
            detokenizer: Detokenizer::new(tokenizer.clone(), true),
            forced: VecDeque::new(),
            budget: None,
            answer: None,
            call: None,
            open_call: None,
            one_call: false,
            mask: SimpleVob::new(),
            tokens: Tokens::new(tokenizer, stop_ids),
        })
    }

    /// The answer behind the reasoning is one of `grammar`.
    #[must_use]
    pub fn with_answer(mut self, grammar: Grammar) -> Self {
        self.answer = Some(grammar.0);
        self
    }

    /// What follows each `<tool_call>` is of `grammar`.
    #[must_use]
    pub fn with_calls(mut self, grammar: Grammar) -> Self {
        self.call = Some(grammar.0);
        self
    }

    /// The answer ends behind its first call.
    #[must_use]
    pub fn with_one_call(mut self) -> Self {
        self.one_call = true;
        self
    }

    /// The reasoning has at most so many tokens; then it is ended.
    #[must_use]
    pub fn with_reasoning_budget(mut self, tokens: usize) -> Self {
        self.budget = Some(tokens);
        if tokens == 0 && self.parser.is_reasoning() {
            self.forced.extend(&self.tokens.end_reasoning);
        }
        self
    }

    /// The grammar that is in force.
    fn matcher(&mut self) -> Option<&mut Matcher> {
        self.open_call.as_mut().or(self.answer.as_mut())
    }

    fn follow_reasoning(&mut self, token: u32) {
        if !self.parser.is_reasoning() {
            // Nothing was forced to follow it, and a token of its own has no text behind the tag.
            if self.forced.is_empty()
                && Some(token) == self.tokens.think_end
                && self.answer.is_some()
            {
                self.forced.extend(&self.tokens.gap);
            }
            return;
        }
        if let Some(budget) = &mut self.budget {
            *budget = budget.saturating_sub(1);
            if *budget == 0 && self.forced.is_empty() {
                self.forced.extend(&self.tokens.end_reasoning);
            }
        }
    }
}

fn failed(error: impl std::fmt::Display) -> GuideError {
    GuideError(
        error
            .to_string()
            .lines()
            .next()
            .unwrap_or_default()
            .to_string(),
    )
}

impl Guide for Constraint {
    fn allowed(&mut self) -> Result<Allowed<'_>, GuideError> {
        if let Some(&token) = self.forced.front() {
            return Ok(Allowed::Token(token));
        }
        if self.parser.is_reasoning() {
            return Ok(Allowed::Any);
        }
        let end = self.tokens.stops[0];
        let Some(matcher) = self.matcher() else {
            return Ok(Allowed::Any);
        };
        if matcher.is_stopped() && !matcher.is_error() {
            return Ok(Allowed::Token(end));
        }
        self.mask = matcher.compute_mask().map_err(failed)?;
        Ok(Allowed::Only(self.mask.as_slice()))
    }

    fn take(&mut self, token: u32) -> Result<u32, GuideError> {
        let mut token = token;
        let is_reasoning = self.parser.is_reasoning();
        let is_forced = self.forced.pop_front().is_some();
        let is_stop = self.tokens.stops.contains(&token);
        if is_stop && is_reasoning && !is_forced && self.answer.is_some() {
            // What was asked for has not come: the end is that of the reasoning.
            self.forced.extend(&self.tokens.end_reasoning);
            if let Some(first) = self.forced.pop_front() {
                token = first;
            }
        } else if is_stop {
            return Ok(token);
        }
        let text = self.detokenizer.push(token);
        let events = self.parser.push(&text);
        if is_reasoning {
            self.follow_reasoning(token);
            return Ok(token);
        }
        if let Some(matcher) = self.matcher().filter(|_| !is_forced) {
            matcher.consume_token(token).map_err(failed)?;
            if self.open_call.as_ref().is_some_and(Matcher::is_stopped) {
                self.open_call = None;
            }
        } else if Some(token) == self.tokens.call_begin {
            self.open_call.clone_from(&self.call);
        }
        let is_call = |event: &OutputEvent| matches!(event, OutputEvent::ToolCallFinished { .. });
        if self.one_call && events.iter().any(is_call) {
            self.forced.push_back(self.tokens.stops[0]);
        }
        Ok(token)
    }

    fn boxed_clone(&self) -> Box<dyn Guide> {
        Box::new(self.clone())
    }
}

impl Grammars {
    /// A constraint that allows everything, for an answer that follows `prompt`.
    ///
    /// # Errors
    /// As [`Constraint::new`].
    pub fn constraint(
        &self,
        stop_ids: &[u32],
        prompt: &str,
    ) -> Result<Constraint, ConstraintError> {
        Constraint::new(self.tokenizer(), stop_ids, prompt)
    }
}
