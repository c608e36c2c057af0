//! The sampler of one session: history, transformations, draw.

use std::collections::HashMap;

use crate::candidates::{Candidates, Scale};
use crate::{SamplingError, SamplingParameters, uniform};

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
    /// How often the answer has each token. A token of the prompt alone has an entry of 0.
    history: HashMap<u32, u32>,
    /// The logits after mask, bias and penalties.
    adjusted: Vec<f32>,
    candidates: Candidates,
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
        let history = if parameters.repetition_penalty == 1.0 {
            HashMap::new()
        } else {
            prompt_tokens.iter().map(|&token| (token, 0)).collect()
        };
        Ok(Self {
            parameters,
            vocab_size: vocab_size as usize,
            sampleable: sampleable as usize,
            step: 0,
            history,
            adjusted: Vec::new(),
            candidates: Candidates::default(),
        })
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

    /// Records a token of the answer, and moves on to the next random number.
    pub fn accept(&mut self, token: u32) {
        self.step += 1;
        if self.has_penalties() {
            *self.history.entry(token).or_insert(0) += 1;
        }
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
        let token = if self.parameters.temperature == 0.0 {
            self.first_of(best)
        } else {
            let scale = Scale::new(best, self.parameters.temperature);
            self.filter(scale);
            let part = uniform(self.parameters.seed, self.step);
            // The best token has weight 1 and passes every filter, so the list is never empty.
            self.candidates
                .draw(part, scale)
                .unwrap_or_else(|| self.first_of(best))
        };
        let mut sampled = Sampled {
            token,
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
        if self.parameters.temperature == 0.0 {
            return Ok(vec![(self.first_of(best), 1.0)]);
        }
        let scale = Scale::new(best, self.parameters.temperature);
        self.filter(scale);
        let total = self.candidates.total(scale);
        Ok(self
            .candidates
            .iter()
            .map(|(token, logit)| (token, scale.weight(logit) / total))
            .collect())
    }

    fn has_penalties(&self) -> bool {
        self.parameters.repetition_penalty != 1.0
            || self.parameters.presence_penalty != 0.0
            || self.parameters.frequency_penalty != 0.0
    }

    /// Fills `adjusted` with the logits after mask, bias and penalties. Returns the greatest logit before
    /// and after.
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
        let logits = &logits[..self.sampleable];
        let model_best = greatest(logits);
        // NaN is below nothing, so a count of what is below infinity finds it and infinity alike.
        let sound = logits
            .iter()
            .filter(|&&logit| logit < f32::INFINITY)
            .count();
        if sound < logits.len() || model_best == f32::NEG_INFINITY {
            return Err(SamplingError::NotFinite {
                count: logits.iter().filter(|logit| !logit.is_finite()).count(),
                total: logits.len(),
            });
        }
        self.adjusted.clear();
        self.adjusted.extend_from_slice(logits);
        for &(token, bias) in &self.parameters.logit_bias {
            if let Some(logit) = self.adjusted.get_mut(token as usize) {
                *logit = stay_finite(*logit, *logit + bias);
            }
        }
        self.penalise();
        if let Some(allowed) = allowed {
            self.mask(allowed)?;
        }
        match greatest(&self.adjusted) {
            f32::NEG_INFINITY => Err(SamplingError::NothingAllowed {
                total: self.sampleable,
            }),
            best => Ok((model_best, best)),
        }
    }

    fn penalise(&mut self) {
        if !self.has_penalties() {
            return;
        }
        let SamplingParameters {
            repetition_penalty,
            presence_penalty,
            frequency_penalty,
            ..
        } = self.parameters;
        // Each entry changes its own token's logit only, so the map's order does not matter.
        for (&token, &count) in &self.history {
            let Some(logit) = self.adjusted.get_mut(token as usize) else {
                continue;
            };
            let mut penalised = if *logit > 0.0 {
                *logit / repetition_penalty
            } else {
                *logit * repetition_penalty
            };
            if count > 0 {
                penalised -= presence_penalty + count as f32 * frequency_penalty;
            }
            *logit = stay_finite(*logit, penalised);
        }
    }

    fn mask(&mut self, allowed: &[u32]) -> Result<(), SamplingError> {
        let expected = self.sampleable.div_ceil(32);
        if allowed.len() < expected {
            return Err(SamplingError::MaskLength {
                expected,
                found: allowed.len(),
            });
        }
        for (chunk, &word) in self.adjusted.chunks_mut(32).zip(allowed) {
            if word == u32::MAX {
                continue;
            }
            for (bit, logit) in chunk.iter_mut().enumerate() {
                if word >> bit & 1 == 0 {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
        Ok(())
    }

    /// The lowest token with this adjusted logit, which some token has.
    fn first_of(&self, best: f32) -> u32 {
        self.adjusted
            .iter()
            .position(|&logit| logit == best)
            .map_or(0, |token| token as u32)
    }

    /// Leaves the candidates that pass top-k, top-p and min-p, in ascending order of tokens.
    fn filter(&mut self, scale: Scale) {
        let share = f64::from(self.parameters.top_p);
        let part_of_best = f64::from(self.parameters.min_p);
        match self.parameters.top_k {
            Some(count) => {
                self.candidates.take_best(&self.adjusted, count as usize);
                if share < 1.0 {
                    self.candidates.keep_share(share, scale);
                }
            }
            None if share < 1.0 => self.candidates.take_share(&self.adjusted, share, scale),
            None if part_of_best > 0.0 => {
                self.candidates
                    .take_near_best(&self.adjusted, part_of_best, scale);
            }
            None => self.candidates.take_all(&self.adjusted),
        }
        if part_of_best > 0.0 {
            self.candidates.keep_above_part(part_of_best, scale);
        }
        self.candidates.order_by_token(&self.adjusted);
    }

    /// Adds the log-probabilities of the model's own distribution.
    fn report(&mut self, logits: &[f32], best: f32, count: u32, sampled: &mut Sampled) {
        let logarithm_of_sum = f64::from(best) + Scale::new(best, 1.0).mass(logits).ln();
        let logprob = |logit: f32| (f64::from(logit) - logarithm_of_sum) as f32;
        sampled.logprob = Some(logprob(logits[sampled.token as usize]));
        // The list has served the draw, and its memory serves again.
        self.candidates.take_best(logits, count as usize);
        self.candidates.order_by_rank();
        sampled.alternatives.extend(
            self.candidates
                .iter()
                .map(|(token, logit)| (token, logprob(logit))),
        );
    }
}

/// The greatest of numbers; NaN counts for nothing, and of no numbers it is negative infinity.
fn greatest(numbers: &[f32]) -> f32 {
    // Parts side by side, as a single running maximum would make every comparison wait for the one before.
    let mut lanes = [f32::NEG_INFINITY; 16];
    let (chunks, rest) = numbers.as_chunks::<16>();
    for chunk in chunks {
        for (lane, &number) in lanes.iter_mut().zip(chunk) {
            *lane = if number > *lane { number } else { *lane };
        }
    }
    lanes.iter().chain(rest).fold(
        f32::NEG_INFINITY,
        |best, &number| {
            if number > best { number } else { best }
        },
    )
}

/// A changed logit, kept from overflowing: extreme parameters may not ban a token, nor make an infinity that
/// only a broken forward pass should make. An excluded token stays excluded.
fn stay_finite(before: f32, after: f32) -> f32 {
    if before == f32::NEG_INFINITY {
        before
    } else {
        after.clamp(f32::MIN, f32::MAX)
    }
}
