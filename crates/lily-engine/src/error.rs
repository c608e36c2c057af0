//! What can go wrong between a request and its answer.

use crate::guide::GuideError;
use lily_plan::DeviceError;
use lily_plan::units::bytes;
use lily_sampling::SamplingError;

/// Why the engine refused or failed a request.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// There is nothing to go on from.
    #[error("the prompt is empty: at least one token is needed")]
    EmptyPrompt,
    /// The prompt does not leave room for one token of an answer.
    #[error(
        "the prompt has {prompt} tokens and the context {context}: shorten the prompt{}",
        if *.context < *.model { format!(" or raise the context (the model allows {model})") } else { String::new() }
    )]
    ContextExceeded {
        /// Tokens of the prompt.
        prompt: usize,
        /// Tokens the engine was set up for.
        context: usize,
        /// Tokens the model was made for.
        model: usize,
    },
    /// What constrains the answer cannot go on.
    #[error("the answer cannot be constrained further: {0}")]
    Guide(#[from] GuideError),
    /// A session has no state to go back to there.
    #[error("the session has no snapshot at position {position}")]
    NoSnapshot {
        /// Where.
        position: usize,
    },
    /// The prompt is far too long to be cut into tokens for nothing.
    #[error(
        "the prompt has {bytes} bytes, which cannot fit the context of {context} tokens: shorten the prompt"
    )]
    PromptTooLong {
        /// Bytes of the prompt.
        bytes: usize,
        /// Tokens the engine was set up for.
        context: usize,
    },
    /// The request's memory is more than there is.
    #[error(
        "the request needs {} for {positions} tokens and {} are free of {}: ask for fewer tokens, \
         close other sessions or raise the memory limit",
        bytes(*.needed), bytes(*.free), bytes(*.limit)
    )]
    MemoryExceeded {
        /// Positions of prompt and answer together.
        positions: usize,
        /// Bytes they take.
        needed: u64,
        /// Bytes of the budget that are free.
        free: u64,
        /// The budget.
        limit: u64,
    },
    /// Working memory alone, which every request needs, is more than there is.
    #[error(
        "working memory needs {} and the limit is {}: raise the limit or take a smaller prefill chunk",
        bytes(*.needed), bytes(*.limit)
    )]
    WorkingMemoryExceeded {
        /// Bytes of the largest plan.
        needed: u64,
        /// The budget.
        limit: u64,
    },
    /// The engine was set up for a context that the model does not have.
    #[error("a context of {context} tokens: the model was made for 1 to {model}")]
    Context {
        /// Tokens asked for.
        context: usize,
        /// Tokens the model was made for.
        model: usize,
    },
    /// A token the vocabulary does not have.
    #[error("token {token} of a vocabulary of {vocabulary} rows")]
    UnknownToken {
        /// The token.
        token: u32,
        /// Rows.
        vocabulary: usize,
    },
    /// Sampling parameters out of range, or logits that are not numbers.
    #[error(transparent)]
    Sampling(#[from] SamplingError),
    /// The device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A file of the checkpoint that the text side needs.
    #[error("{file}: {reason}")]
    TextFile {
        /// Which.
        file: String,
        /// What is wrong, and what to do.
        reason: String,
    },
}
