//! The sampler: from one row of logits to one token.
//!
//! A pure library: no input or output, no clock, no global state. What a session's sampler draws depends
//! on its parameters, its token history and the logits, and on nothing else, so a text can be reproduced
//! whatever other sessions do.
//!
//! # The order of transformations
//!
//! 1. **Rows without a token** are cut off, and tokens outside the caller's mask are banned.
//! 2. **Logit bias** is added, then the **repetition penalty** is applied over prompt and generated tokens
//!    (a positive logit is divided, a negative one multiplied, as Hugging Face does), then **presence and
//!    frequency penalties** over generated tokens only (as OpenAI and vLLM do). The bias comes first, as in
//!    vLLM: a caller's bias is part of the model that the penalties then act on.
//! 3. Temperature 0 ends here: the highest logit, and of equal ones the lowest token, is the answer.
//! 4. **Temperature** divides the logits.
//! 5. **Top-k** keeps the k best tokens; **top-p** keeps the fewest best tokens whose share of the mass
//!    *that top-k left* reaches p; **min-p** keeps tokens at least `min_p` times as likely as the best one.
//!    This is the order of Hugging Face. Each filter keeps the head of one ranking, so the result is the
//!    shortest of the three heads; the order decides only which mass top-p's share is taken of. Top-k goes
//!    first because it costs least and spares the sum over the whole vocabulary; min-p compares two tokens'
//!    ratio, which no filter changes, so going last it leaves top-p meaning what it means alone.
//!    Among equal logits the lower token ranks first, so top-k keeps exactly k tokens.
//! 6. What is left is renormalised, and one counter-based random number ([`uniform`]) picks from it, walking
//!    the tokens in ascending order.
//!
//! # Log-probabilities
//!
//! Reported log-probabilities are those of the model: the log-softmax of the logits as they came, before
//! bias, penalties, temperature and filters, over the rows that have a token. This is what OpenAI's and
//! vLLM's interfaces report by default, and it lets answers drawn with different parameters be compared.
//!
//! # On other devices
//!
//! A token is a function of its row of logits and of a [`SamplingRow`]: [`Chooser::choose`] is that function, in f64
//! where it weighs. A device that chooses for itself takes the same row, and may differ where a sum of weights comes
//! as close to the random number, to top-p's share or to min-p's bar as its weights are inexact; it says how close.
//!
//! # Cost
//!
//! No step sorts the vocabulary. Top-k is one pass that keeps a short list; top-p sums the mass in one pass
//! and then selects by mass in a list that grows only when the distribution is flat. Buffers are reused:
//! once warm, a step allocates nothing unless bias, penalties or alternatives were asked for.

#![forbid(unsafe_code)]

mod candidates;
mod choose;
mod parameters;
mod random;
mod sampler;

pub use choose::{Adjustment, Chooser, NO_TOKEN, SamplingRow};
pub use parameters::{MAXIMUM_ALTERNATIVES, SamplingParameters};
pub use random::{philox4x32_10, uniform};
pub use sampler::{Sampled, Sampler};

/// Why a sampler could not be made, or could not choose a token.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SamplingError {
    /// A parameter lies outside its range.
    #[error("{parameter} is {value}; allowed is {allowed}")]
    OutOfRange {
        /// The parameter, by the name of its field.
        parameter: &'static str,
        /// What was given.
        value: f64,
        /// The range, in words.
        allowed: &'static str,
    },
    /// A logit bias lies outside its range.
    #[error("logit_bias for token {token} is {value}; allowed is a number from -100 to 100")]
    BiasOutOfRange {
        /// The token whose bias it is.
        token: u32,
        /// What was given.
        value: f32,
    },
    /// A logit bias names a token that the vocabulary lacks.
    #[error("logit_bias names token {token}; allowed are tokens below {vocab_size}")]
    BiasToken {
        /// The token named.
        token: u32,
        /// The number of rows in the vocabulary.
        vocab_size: u32,
    },
    /// A token has more than one logit bias.
    #[error("logit_bias names token {token} more than once; allowed is one bias for each token")]
    BiasRepeated {
        /// The token named twice.
        token: u32,
    },
    /// The number of rows that have a token does not fit the vocabulary.
    #[error("sampleable is {sampleable}; allowed is 1 to the vocabulary's {vocab_size} rows")]
    Sampleable {
        /// The number of rows that have a token, as given.
        sampleable: u32,
        /// The number of rows in the vocabulary.
        vocab_size: u32,
    },
    /// The logits are not one row of the vocabulary.
    #[error("{found} logits were given for a vocabulary of {expected} rows")]
    LogitsLength {
        /// The vocabulary's rows.
        expected: usize,
        /// The logits given.
        found: usize,
    },
    /// The mask of allowed tokens is too short for the vocabulary.
    #[error("the mask of allowed tokens has {found} words of 32 bits; {expected} are needed")]
    MaskLength {
        /// The words needed for every token to have a bit.
        expected: usize,
        /// The words given.
        found: usize,
    },
    /// The logits hold NaN or positive infinity, or nothing but infinities: the forward pass went wrong,
    /// and any token chosen from them would be an accident.
    #[error("{count} of {total} logits are not finite")]
    NotFinite {
        /// How many logits are NaN or infinite.
        count: usize,
        /// How many logits there are.
        total: usize,
    },
    /// The mask leaves no token that the logits do not exclude.
    #[error("the mask of allowed tokens leaves none of {total} tokens to choose from")]
    NothingAllowed {
        /// The number of tokens before the mask.
        total: usize,
    },
}
