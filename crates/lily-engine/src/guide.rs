//! Who has a say in which token comes next, beside the model: a grammar, a limit on reasoning.

use crate::error::EngineError;
use std::fmt;

/// What may come next in an answer.
#[derive(Debug)]
pub enum Allowed<'a> {
    /// Any token.
    Any,
    /// A token of this set: `t` is in it if bit `t % 32` of word `t / 32` is set. It has a word for every 32 tokens.
    Only(&'a [u32]),
    /// This token, whatever the model says.
    Token(u32),
}

/// Follows an answer token by token, and says what may come next.
pub trait Guide: Send {
    /// What may come next. It is asked for once a token.
    ///
    /// # Errors
    /// Where the guide is at its wits' end, such as a grammar that has become too large: the answer fails.
    fn allowed(&mut self) -> Result<Allowed<'_>, GuideError>;

    /// Takes a token that was chosen. What it returns stands in the answer: the token, or another in its place.
    ///
    /// # Errors
    /// As [`allowed`](Self::allowed).
    fn take(&mut self, token: u32) -> Result<u32, GuideError>;

    /// The same once more, for another answer from here.
    fn boxed_clone(&self) -> Box<dyn Guide>;
}

impl Clone for Box<dyn Guide> {
    fn clone(&self) -> Self {
        self.boxed_clone()
    }
}

impl fmt::Debug for dyn Guide {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Guide")
    }
}

/// Why a guide cannot go on.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{0}")]
pub struct GuideError(pub String);

/// What the guide of an answer has said of its next token.
#[derive(Clone, Debug, Default)]
pub(crate) enum Next {
    /// Nothing.
    #[default]
    Free,
    /// It is one of these.
    Only(Vec<u32>),
    /// It is this.
    Token(u32),
}

impl Next {
    /// Asks the guide, if there is one.
    pub fn ask(guide: Option<&mut Box<dyn Guide>>) -> Result<Self, EngineError> {
        Ok(match guide {
            None => Next::Free,
            Some(guide) => match guide.allowed()? {
                Allowed::Any => Next::Free,
                Allowed::Only(set) => Next::Only(set.to_vec()),
                Allowed::Token(token) => Next::Token(token),
            },
        })
    }

    /// The set that a sampler chooses from, where it is not all.
    pub fn set(&self) -> Option<&[u32]> {
        match self {
            Next::Only(set) => Some(set),
            Next::Free | Next::Token(_) => None,
        }
    }
}
