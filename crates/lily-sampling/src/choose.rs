//! The choice of one token as a function of a row of logits and of everything that the choice depends on:
//! what a session's [`Sampler`](crate::Sampler) computes, and what a device that chooses for itself is held to.

use crate::candidates::{Candidates, Scale};
use crate::{SamplingError, SamplingParameters, uniform};

/// What a device writes in place of a token where [`Chooser::choose`] refuses. No vocabulary has it.
pub const NO_TOKEN: u32 = u32::MAX;

/// Greedy, and nothing else.
static GREEDY: SamplingParameters = SamplingParameters {
    temperature: 0.0,
    top_k: None,
    top_p: 1.0,
    min_p: 0.0,
    repetition_penalty: 1.0,
    presence_penalty: 0.0,
    frequency_penalty: 0.0,
    logit_bias: Vec::new(),
    seed: 0,
    logprobs: None,
};

/// Everything but the logits that decides which token is chosen: nothing else does.
#[derive(Debug, Clone, Copy)]
pub struct SamplingRow<'a> {
    /// How tokens are chosen. They are taken to be valid ([`SamplingParameters::validate`]).
    pub parameters: &'a SamplingParameters,
    /// The position in the sequence of random numbers: tokens accepted so far.
    pub step: u64,
    /// Tokens that penalties know of, each once, with how often the answer has it: 0 where the prompt alone has it.
    /// In any order; ignored where no penalty is set.
    pub history: &'a [(u32, u32)],
    /// Tokens that may be chosen, as bits: `t` may if bit `t % 32` of word `t / 32` is set. All, if not given.
    pub allowed: Option<&'a [u32]>,
}

impl Default for SamplingRow<'_> {
    /// Greedy: the best token, of equal ones the lowest.
    fn default() -> Self {
        SamplingRow {
            parameters: &GREEDY,
            step: 0,
            history: &[],
            allowed: None,
        }
    }
}

/// What bias and penalties do to the logit of one token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Adjustment {
    /// The token.
    pub token: u32,
    /// Added first, where there is one.
    pub bias: Option<f32>,
    /// Where the token is in the history: what presence and frequency penalties subtract, once the repetition penalty
    /// has divided (a positive logit) or multiplied (any other).
    pub subtracted: Option<f32>,
    /// How often the answer has the token, as far as penalties know.
    pub count: u32,
}

impl Adjustment {
    /// The logit afterwards. Computed in f32, one rounding for each of bias, repetition and subtraction; kept finite.
    #[must_use]
    pub fn apply(&self, logit: f32, repetition_penalty: f32) -> f32 {
        let mut logit = logit;
        if let Some(bias) = self.bias {
            logit = stay_finite(logit, logit + bias);
        }
        if let Some(subtracted) = self.subtracted {
            let repeated = if logit > 0.0 {
                logit / repetition_penalty
            } else {
                logit * repetition_penalty
            };
            logit = stay_finite(logit, repeated - subtracted);
        }
        logit
    }
}

impl SamplingRow<'_> {
    /// The tokens whose logits bias and penalties change, each once.
    pub fn adjustments(&self) -> impl Iterator<Item = Adjustment> + '_ {
        let SamplingParameters {
            presence_penalty,
            frequency_penalty,
            ref logit_bias,
            ..
        } = *self.parameters;
        let history = if self.parameters.has_penalties() {
            self.history
        } else {
            &[]
        };
        let mut bias: Vec<(u32, f32)> = logit_bias.clone();
        bias.sort_unstable_by_key(|&(token, _)| token);
        let mut is_taken = vec![false; bias.len()];
        let mut adjustments = Vec::with_capacity(history.len() + bias.len());
        for &(token, count) in history {
            let known = bias.binary_search_by_key(&token, |&(token, _)| token);
            if let Ok(at) = known {
                is_taken[at] = true;
            }
            adjustments.push(Adjustment {
                token,
                bias: known.ok().map(|at| bias[at].1),
                subtracted: Some(if count > 0 {
                    presence_penalty + count as f32 * frequency_penalty
                } else {
                    0.0
                }),
                count,
            });
        }
        let rest = bias.iter().zip(&is_taken).filter(|(_, taken)| !**taken);
        adjustments.extend(rest.map(|(&(token, bias), _)| Adjustment {
            token,
            bias: Some(bias),
            subtracted: None,
            count: 0,
        }));
        adjustments.into_iter()
    }
}

/// Chooses tokens; keeps its memory from one to the next, and nothing else.
#[derive(Debug, Clone, Default)]
pub struct Chooser {
    /// The logits after bias, penalties and mask.
    adjusted: Vec<f32>,
    pub(crate) candidates: Candidates,
}

impl Chooser {
    /// The token of a row of logits, of which those below `sampleable` have a token.
    ///
    /// # Errors
    ///
    /// Logits that are not finite (single ones may be negative infinity, which excludes a token), a mask that is too
    /// short, and one that leaves nothing to choose from. `sampleable` of 0 is taken for logits that are not finite.
    pub fn choose(
        &mut self,
        logits: &[f32],
        sampleable: usize,
        row: &SamplingRow<'_>,
    ) -> Result<u32, SamplingError> {
        let logits = &logits[..sampleable.min(logits.len())];
        let (_, best) = self.adjust(logits, row)?;
        Ok(self.draw(best, row))
    }

    /// The token, once [`adjust`](Self::adjust) has told the best logit.
    pub(crate) fn draw(&mut self, best: f32, row: &SamplingRow<'_>) -> u32 {
        if row.parameters.temperature == 0.0 {
            return self.first_of(best);
        }
        let scale = self.filter(best, row.parameters);
        let part = uniform(row.parameters.seed, row.step);
        // The best token has weight 1 and passes every filter, so the list is never empty.
        self.candidates
            .draw(part, scale)
            .unwrap_or_else(|| self.first_of(best))
    }

    /// Every token that [`draw`](Self::draw) may choose with its probability, in ascending order.
    pub(crate) fn distribution(
        &mut self,
        best: f32,
        parameters: &SamplingParameters,
    ) -> Vec<(u32, f64)> {
        if parameters.temperature == 0.0 {
            return vec![(self.first_of(best), 1.0)];
        }
        let scale = self.filter(best, parameters);
        let total = self.candidates.total(scale);
        self.candidates
            .iter()
            .map(|(token, logit)| (token, scale.weight(logit) / total))
            .collect()
    }

    /// Fills `adjusted` with the logits (those that have a token) after bias, penalties and mask. Returns the
    /// greatest logit before and after.
    pub(crate) fn adjust(
        &mut self,
        logits: &[f32],
        row: &SamplingRow<'_>,
    ) -> Result<(f32, f32), SamplingError> {
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
        let repetition_penalty = row.parameters.repetition_penalty;
        // Each changes its own token's logit only, so their order does not matter.
        for adjustment in row.adjustments() {
            if let Some(logit) = self.adjusted.get_mut(adjustment.token as usize) {
                *logit = adjustment.apply(*logit, repetition_penalty);
            }
        }
        if let Some(allowed) = row.allowed {
            self.mask(allowed)?;
        }
        match greatest(&self.adjusted) {
            f32::NEG_INFINITY => Err(SamplingError::NothingAllowed {
                total: logits.len(),
            }),
            best => Ok((model_best, best)),
        }
    }

    fn mask(&mut self, allowed: &[u32]) -> Result<(), SamplingError> {
        let expected = self.adjusted.len().div_ceil(32);
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
    fn filter(&mut self, best: f32, parameters: &SamplingParameters) -> Scale {
        let scale = Scale::new(best, parameters.temperature);
        let share = f64::from(parameters.top_p);
        let part_of_best = f64::from(parameters.min_p);
        match parameters.top_k {
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
        scale
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
