//! Teacher-forced scoring: what the model thinks of a given text.

use crate::engine::Engine;
use crate::error::EngineError;
use lily_plan::PlanOutput;

/// Bytes that the logits of one chunk may take.
const LOGITS_BYTES: usize = 64 << 20;

/// The model's view of one position: of the token that follows it.
#[derive(Clone, Debug, PartialEq)]
pub struct Score {
    /// The likeliest next token (the lower id wins a tie).
    pub top: u32,
    /// Log-probability of the token that really follows.
    pub logprob: f64,
}

impl Engine {
    /// Scores `targets[i]` as the token after `inputs[..=i]`, for every i. `on_progress` hears how many
    /// positions are done.
    pub fn score(
        &mut self,
        inputs: &[u32],
        targets: &[u32],
        mut on_progress: impl FnMut(usize),
    ) -> Result<Vec<Score>, EngineError> {
        let config = &self.model().config;
        let (vocabulary, model) = (config.vocab_size, config.max_positions);
        if inputs.is_empty() || inputs.len() != targets.len() {
            return Err(EngineError::EmptyPrompt);
        }
        if let Some(&token) = inputs
            .iter()
            .chain(targets)
            .find(|&&t| t as usize >= vocabulary)
        {
            return Err(EngineError::UnknownToken { token, vocabulary });
        }
        let context = self.context();
        if inputs.len() > context {
            return Err(EngineError::ContextExceeded {
                prompt: inputs.len(),
                context,
                model,
            });
        }
        // The logits of every row are wanted: chunks are short enough that these stay small beside the rest.
        let rows = (LOGITS_BYTES / (4 * vocabulary)).clamp(1, self.options().prefill_chunk);
        let plan = self.prefill_plan(rows.min(inputs.len()), PlanOutput::AllLogits);
        let _working = self.reserve_working(&plan)?;
        let mut session = self.open_session(inputs.len())?;
        let mut scores = Vec::with_capacity(inputs.len());
        while scores.len() < inputs.len() {
            let rest = &inputs[scores.len()..];
            let (_, outcome) =
                self.prefill_chunk_of(&mut session, rest, rows, PlanOutput::AllLogits)?;
            for logits in outcome.logits.chunks(vocabulary) {
                scores.push(score_row(logits, targets[scores.len()]));
            }
            on_progress(scores.len());
        }
        Ok(scores)
    }
}

fn score_row(logits: &[f32], target: u32) -> Score {
    let mut top = 0;
    for (token, &logit) in logits.iter().enumerate() {
        if logit > logits[top] {
            top = token;
        }
    }
    let largest = f64::from(logits[top]);
    let sum: f64 = logits
        .iter()
        .map(|&logit| (f64::from(logit) - largest).exp())
        .sum();
    let logprob = f64::from(logits[target as usize]) - largest - sum.ln();
    Score {
        top: top as u32,
        logprob,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lower_of_equal_logits_is_on_top() {
        let logits = [1.0, 3.0, 2.0, 3.0];
        let score = score_row(&logits, 2);
        assert_eq!(score.top, 1);
        let sum: f64 = logits.iter().map(|&x| f64::from(x).exp()).sum();
        assert!((score.logprob - (2.0 - sum.ln())).abs() < 1e-12);
        // Far from 0 too.
        let far = score_row(&logits.map(|x| x + 1_000.0), 2);
        assert!((far.logprob - score.logprob).abs() < 1e-12);
    }
}
