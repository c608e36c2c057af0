//! What a caller may ask of the sampler, and the ranges it may ask within.

use crate::SamplingError;

/// The most alternatives that may be asked for with each token, as in OpenAI's interface.
pub const MAXIMUM_ALTERNATIVES: u32 = 20;

/// How tokens are chosen. The crate's documentation gives the order in which these act.
///
/// There is no penalty window: penalties look at the whole history, as in the interfaces that they are
/// taken from.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParameters {
    /// Divides the logits before the draw. 0 is greedy: the best token, always. At most 100.
    pub temperature: f32,
    /// Keeps this many best tokens; at least 1. `None` keeps all.
    pub top_k: Option<u32>,
    /// Keeps the fewest best tokens that hold this share of the probability mass. Above 0, at most 1;
    /// 1 keeps all.
    pub top_p: f32,
    /// Keeps tokens at least this many times as likely as the best one. At least 0, below 1; 0 keeps all.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of every token in the prompt or the answer so far.
    /// Above 0; 1 changes nothing.
    pub repetition_penalty: f32,
    /// Subtracted once from the logit of every token that the answer already has. From -2 to 2.
    pub presence_penalty: f32,
    /// Subtracted from a token's logit once for each time that the answer already has it. From -2 to 2.
    pub frequency_penalty: f32,
    /// Added to the logits of single tokens; each from -100 to 100, and each token named once.
    pub logit_bias: Vec<(u32, f32)>,
    /// Chooses the sequence of random numbers. The same seed, parameters, prompt and logits give the same
    /// tokens.
    pub seed: u64,
    /// Whether log-probabilities are reported, and with how many alternatives; at most
    /// [`MAXIMUM_ALTERNATIVES`]. `None` spares a sum over the vocabulary at each step.
    pub logprobs: Option<u32>,
}

impl Default for SamplingParameters {
    /// Greedy, with every other transformation neutral: temperature 0, no top-k, top-p 1, min-p 0,
    /// repetition penalty 1, presence and frequency penalty 0, no bias, seed 0, no log-probabilities.
    fn default() -> Self {
        Self {
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
        }
    }
}

impl SamplingParameters {
    /// Whether the tokens of prompt or answer change logits.
    #[must_use]
    pub fn has_penalties(&self) -> bool {
        self.repetition_penalty != 1.0
            || self.presence_penalty != 0.0
            || self.frequency_penalty != 0.0
    }

    /// Checks every parameter against its range. The error names the parameter, its value and the range.
    ///
    /// # Errors
    ///
    /// The first parameter that lies outside its range, in the order of the fields.
    pub fn validate(&self, vocab_size: u32) -> Result<(), SamplingError> {
        // Each condition says what is allowed, so that NaN, for which every comparison is false, is refused.
        check(
            "temperature",
            self.temperature,
            (0.0..=100.0).contains(&self.temperature),
            "a number from 0 (greedy) to 100",
        )?;
        if self.top_k == Some(0) {
            return Err(SamplingError::OutOfRange {
                parameter: "top_k",
                value: 0.0,
                allowed: "a whole number of at least 1, or none to keep all tokens",
            });
        }
        check(
            "top_p",
            self.top_p,
            self.top_p > 0.0 && self.top_p <= 1.0,
            "a number above 0 and at most 1",
        )?;
        check(
            "min_p",
            self.min_p,
            (0.0..1.0).contains(&self.min_p),
            "a number of at least 0 and below 1",
        )?;
        check(
            "repetition_penalty",
            self.repetition_penalty,
            self.repetition_penalty > 0.0 && self.repetition_penalty.is_finite(),
            "a finite number above 0",
        )?;
        for (parameter, value) in [
            ("presence_penalty", self.presence_penalty),
            ("frequency_penalty", self.frequency_penalty),
        ] {
            check(
                parameter,
                value,
                (-2.0..=2.0).contains(&value),
                "a number from -2 to 2",
            )?;
        }
        self.validate_bias(vocab_size)?;
        match self.logprobs {
            Some(alternatives) if alternatives > MAXIMUM_ALTERNATIVES => {
                Err(SamplingError::OutOfRange {
                    parameter: "logprobs",
                    value: f64::from(alternatives),
                    allowed: "at most 20 alternatives",
                })
            }
            _ => Ok(()),
        }
    }

    fn validate_bias(&self, vocab_size: u32) -> Result<(), SamplingError> {
        for &(token, value) in &self.logit_bias {
            if token >= vocab_size {
                return Err(SamplingError::BiasToken { token, vocab_size });
            }
            if !(-100.0..=100.0).contains(&value) {
                return Err(SamplingError::BiasOutOfRange { token, value });
            }
        }
        let mut tokens: Vec<u32> = self.logit_bias.iter().map(|&(token, _)| token).collect();
        tokens.sort_unstable();
        match tokens.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => Err(SamplingError::BiasRepeated { token: pair[0] }),
            None => Ok(()),
        }
    }
}

fn check(
    parameter: &'static str,
    value: f32,
    is_allowed: bool,
    allowed: &'static str,
) -> Result<(), SamplingError> {
    if is_allowed {
        Ok(())
    } else {
        Err(SamplingError::OutOfRange {
            parameter,
            value: f64::from(value),
            allowed,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(change: impl FnOnce(&mut SamplingParameters)) -> String {
        let mut parameters = SamplingParameters::default();
        change(&mut parameters);
        parameters.validate(10).unwrap_err().to_string()
    }

    fn accepted(change: impl FnOnce(&mut SamplingParameters)) {
        let mut parameters = SamplingParameters::default();
        change(&mut parameters);
        assert_eq!(parameters.validate(10), Ok(()));
    }

    #[test]
    fn the_ends_of_every_range_are_accepted() {
        accepted(|_| {});
        accepted(|parameters| parameters.temperature = 100.0);
        accepted(|parameters| parameters.top_k = Some(1));
        accepted(|parameters| parameters.top_k = Some(u32::MAX));
        accepted(|parameters| parameters.top_p = f32::MIN_POSITIVE);
        accepted(|parameters| parameters.min_p = 0.999);
        accepted(|parameters| parameters.repetition_penalty = 1e-6);
        accepted(|parameters| parameters.presence_penalty = -2.0);
        accepted(|parameters| parameters.frequency_penalty = 2.0);
        accepted(|parameters| parameters.logit_bias = vec![(0, -100.0), (9, 100.0)]);
        accepted(|parameters| parameters.logprobs = Some(20));
    }

    #[test]
    fn values_outside_a_range_are_refused_by_name() {
        for value in [-0.1, 100.1, f32::INFINITY, f32::NAN] {
            let message = refused(|parameters| parameters.temperature = value);
            assert!(message.starts_with("temperature is "), "{message}");
        }
        for value in [0.0, -0.5, 1.1, f32::NAN] {
            let message = refused(|parameters| parameters.top_p = value);
            assert!(message.starts_with("top_p is "), "{message}");
        }
        for value in [-0.1, 1.0, f32::NAN] {
            let message = refused(|parameters| parameters.min_p = value);
            assert!(message.starts_with("min_p is "), "{message}");
        }
        for value in [0.0, -1.0, f32::INFINITY, f32::NAN] {
            let message = refused(|parameters| parameters.repetition_penalty = value);
            assert!(message.starts_with("repetition_penalty is "), "{message}");
        }
        for value in [-2.5, 2.5, f32::NAN] {
            let message = refused(|parameters| parameters.presence_penalty = value);
            assert!(message.starts_with("presence_penalty is "), "{message}");
            let message = refused(|parameters| parameters.frequency_penalty = value);
            assert!(message.starts_with("frequency_penalty is "), "{message}");
        }
        assert_eq!(
            refused(|parameters| parameters.top_k = Some(0)),
            "top_k is 0; allowed is a whole number of at least 1, or none to keep all tokens"
        );
        assert_eq!(
            refused(|parameters| parameters.logprobs = Some(21)),
            "logprobs is 21; allowed is at most 20 alternatives"
        );
    }

    #[test]
    fn a_bias_needs_a_known_token_a_finite_value_and_no_rival() {
        assert_eq!(
            refused(|parameters| parameters.logit_bias = vec![(10, 1.0)]),
            "logit_bias names token 10; allowed are tokens below 10"
        );
        assert_eq!(
            refused(|parameters| parameters.logit_bias = vec![(3, 100.5)]),
            "logit_bias for token 3 is 100.5; allowed is a number from -100 to 100"
        );
        assert_eq!(
            refused(|parameters| parameters.logit_bias = vec![(3, f32::NAN)]),
            "logit_bias for token 3 is NaN; allowed is a number from -100 to 100"
        );
        assert_eq!(
            refused(|parameters| parameters.logit_bias = vec![(3, 1.0), (4, 1.0), (3, 1.0)]),
            "logit_bias names token 3 more than once; allowed is one bias for each token"
        );
    }
}
