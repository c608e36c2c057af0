//! The sampler of one session: its history, and what it reports.

use std::collections::HashMap;

use crate::candidates::Scale;
use crate::{Chooser, SamplingError, SamplingParameters, SamplingRow};

/// The outcome of one step.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampled {
    /// The token chosen.
    pub token: u32,
    /// Its log-probability in the model's own distribution; `None` unless log-probabilities were asked for.
    pub logprob: Option<f32>,
    /// The model's likeliest tokens with their log-probabilities, best first; as many as were asked for,
    /// whether or not the chosen token is one of them.
    pub alternatives: Vec<(u32, f32)>,
}

/// Chooses the tokens of one session.
///
/// [`sample`](Self::sample) chooses and [`accept`](Self::accept) records: until a token is accepted, sampling
/// again from the same logits gives the same token, and the engine may accept another than the one chosen.
#[derive(Debug, Clone)]
pub struct Sampler {
    parameters: SamplingParameters,
    vocab_size: usize,
    sampleable: usize,
    /// The tokens accepted so far, which is the position in the sequence of random numbers.
    step: u64,
    /// Tokens that penalties know of with how often the answer has each: 0 for one of the prompt alone.
    history: Vec<(u32, u32)>,
    /// Where each stands in the history.
    places: HashMap<u32, usize>,
    chooser: Chooser,
}

impl Sampler {
    /// A sampler for a vocabulary of `vocab_size` rows, of which those below `sampleable` have a token: the
    /// rows above are padding, and are never chosen. The prompt counts for the repetition penalty.
    ///
    /// # Errors
    ///
    /// Parameters outside their ranges, and a `sampleable` of 0 or beyond the vocabulary.
    pub fn new(
        parameters: SamplingParameters,
        vocab_size: u32,
        sampleable: u32,
        prompt_tokens: &[u32],
    ) -> Result<Self, SamplingError> {
        if sampleable == 0 || sampleable > vocab_size {
            return Err(SamplingError::Sampleable {
                sampleable,
                vocab_size,
            });
        }
        parameters.validate(vocab_size)?;
        let mut sampler = Self {
            parameters,
            vocab_size: vocab_size as usize,
            sampleable: sampleable as usize,
            step: 0,
            history: Vec::new(),
            places: HashMap::new(),
            chooser: Chooser::default(),
        };
        if sampler.parameters.repetition_penalty != 1.0 {
            for &token in prompt_tokens {
                sampler.entry(token);
            }
        }
        Ok(sampler)
    }

    /// The parameters that the sampler was made with.
    #[must_use]
    pub fn parameters(&self) -> &SamplingParameters {
        &self.parameters
    }

    /// The number of tokens accepted so far.
    #[must_use]
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Everything but the logits that decides the next token: what a device needs to choose it as
    /// [`sample`](Self::sample) would.
    #[must_use]
    pub fn row<'a>(&'a self, allowed: Option<&'a [u32]>) -> SamplingRow<'a> {
        SamplingRow {
            parameters: &self.parameters,
            step: self.step,
            history: &self.history,
            allowed,
        }
    }

    /// Records a token of the answer, and moves on to the next random number.
    pub fn accept(&mut self, token: u32) {
        self.step += 1;
        if self.parameters.has_penalties() {
            *self.entry(token) += 1;
        }
    }

    /// How often the answer has a token, which the history knows of from now on.
    fn entry(&mut self, token: u32) -> &mut u32 {
        let place = *self.places.entry(token).or_insert(self.history.len());
        if place == self.history.len() {
            self.history.push((token, 0));
        }
        &mut self.history[place].1
    }

    /// Chooses a token from one row of logits.
    ///
    /// `allowed` is a set of tokens as bits: token `t` is allowed if bit `t % 32` of word `t / 32` is set.
    ///
    /// # Errors
    ///
    /// Logits or a mask of the wrong length, logits that are not finite (single ones may be negative
    /// infinity, which excludes a token), and a mask that leaves nothing to choose from.
    pub fn sample(
        &mut self,
        logits: &[f32],
        allowed: Option<&[u32]>,
    ) -> Result<Sampled, SamplingError> {
        let (model_best, best) = self.adjust(logits, allowed)?;
        let row = SamplingRow {
            parameters: &self.parameters,
            step: self.step,
            history: &self.history,
            allowed,
        };
        let mut sampled = Sampled {
            token: self.chooser.draw(best, &row),
            logprob: None,
            alternatives: Vec::new(),
        };
        if let Some(count) = self.parameters.logprobs {
            self.report(&logits[..self.sampleable], model_best, count, &mut sampled);
        }
        Ok(sampled)
    }

    /// The distribution that [`sample`](Self::sample) draws from: every token that it may choose with its
    /// probability, in ascending order of tokens. Greedy sampling has one token of probability 1.
    ///
    /// # Errors
    ///
    /// As for [`sample`](Self::sample).
    pub fn distribution(
        &mut self,
        logits: &[f32],
        allowed: Option<&[u32]>,
    ) -> Result<Vec<(u32, f64)>, SamplingError> {
        let (_, best) = self.adjust(logits, allowed)?;
        Ok(self.chooser.distribution(best, &self.parameters))
    }

    fn adjust(
        &mut self,
        logits: &[f32],
        allowed: Option<&[u32]>,
    ) -> Result<(f32, f32), SamplingError> {
        if logits.len() != self.vocab_size {
            return Err(SamplingError::LogitsLength {
                expected: self.vocab_size,
                found: logits.len(),
            });
        }
        let row = SamplingRow {
            parameters: &self.parameters,
            step: self.step,
            history: &self.history,
            allowed,
        };
        self.chooser.adjust(&logits[..self.sampleable], &row)
    }

    /// Adds the log-probabilities of the model's own distribution.
    fn report(&mut self, logits: &[f32], best: f32, count: u32, sampled: &mut Sampled) {
        let logarithm_of_sum = f64::from(best) + Scale::new(best, 1.0).mass(logits).ln();
        let logprob = |logit: f32| (f64::from(logit) - logarithm_of_sum) as f32;
        sampled.logprob = Some(logprob(logits[sampled.token as usize]));
        // The list has served the draw, and its memory serves again.
        self.chooser.candidates.take_best(logits, count as usize);
        self.chooser.candidates.order_by_rank();
        sampled.alternatives.extend(
            self.chooser
                .candidates
                .iter()
                .map(|(token, logit)| (token, logprob(logit))),
        );
    }
}
