//! What a request may be, for whoever has to say so before the engine has time for it.

use crate::engine::Engine;
use crate::error::EngineError;
use lily_plan::SessionBytes;

/// Bounds of a request, as they are from the engine's beginning to its end.
#[derive(Clone, Copy, Debug)]
pub struct RequestLimits {
    /// Longest sequence, in tokens.
    pub context: usize,
    /// Longest sequence that the model was made for, in tokens.
    pub model: usize,
    /// Rows of the vocabulary.
    pub vocabulary: usize,
    /// Bytes that all sessions together may take.
    memory: u64,
    session: SessionBytes,
}

impl RequestLimits {
    /// Whether `prompt` can be answered by at least a token.
    ///
    /// # Errors
    /// For an empty prompt, tokens that the vocabulary does not have, and prompts that fill the context.
    pub fn check(&self, prompt: &[u32]) -> Result<(), EngineError> {
        let (vocabulary, context, model) = (self.vocabulary, self.context, self.model);
        if prompt.is_empty() {
            return Err(EngineError::EmptyPrompt);
        }
        if let Some(&token) = prompt.iter().find(|&&token| token as usize >= vocabulary) {
            return Err(EngineError::UnknownToken { token, vocabulary });
        }
        let prompt = prompt.len();
        if prompt >= context {
            return Err(EngineError::ContextExceeded {
                prompt,
                context,
                model,
            });
        }
        Ok(())
    }

    /// Most tokens of an answer to a prompt of `prompt` tokens, if nothing else takes memory.
    ///
    /// # Errors
    /// Where there is not memory for one, with the figures.
    pub fn most_tokens(&self, prompt: usize) -> Result<usize, EngineError> {
        let positions = self.session.positions_within(self.memory).min(self.context);
        match positions.checked_sub(prompt) {
            Some(most) if most > 0 => Ok(most),
            _ => Err(EngineError::MemoryExceeded {
                positions: prompt + 1,
                needed: self.session.for_positions(prompt + 1),
                free: self.memory,
                limit: self.memory,
            }),
        }
    }
}

impl Engine {
    /// What requests may be.
    pub fn limits(&self) -> RequestLimits {
        let memory = self.memory();
        let config = &self.model().config;
        RequestLimits {
            context: self.context(),
            model: config.max_positions,
            vocabulary: config.vocab_size,
            memory: memory.limit.saturating_sub(memory.working),
            session: self.device.session_bytes(self.options().precision),
        }
    }
}
