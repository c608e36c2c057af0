//! What the fuzz target of requests runs, here so that tests run it over its corpus as well.

use crate::chat;
use crate::error::ApiError;
use crate::request::ChatRequest;
use lily_constraint::Grammars;
use lily_engine::{Allowed, TextModel};

/// Reads requests as the server does, up to where the engine would begin.
pub struct RequestReader {
    text: TextModel,
    grammars: Grammars,
}

impl RequestReader {
    /// A reader for the model that `text` is of.
    ///
    /// # Panics
    /// For a model without tokens that end an answer.
    #[must_use]
    pub fn new(text: TextModel) -> Self {
        let grammars = Grammars::new(text.tokenizer().clone(), text.stop_ids());
        RequestReader {
            grammars: grammars.expect("a vocabulary with an end"),
            text,
        }
    }

    /// Reads the body of a chat completion: whether it is sound.
    ///
    /// # Panics
    /// Where a refusal is not the client's.
    pub fn read(&self, body: &[u8]) -> bool {
        match self.prepare(body) {
            Ok(()) => true,
            Err(error) => {
                let told = error.to_json();
                assert_eq!(told["error"]["type"], "invalid_request_error", "{told}");
                false
            }
        }
    }

    fn prepare(&self, body: &[u8]) -> Result<(), ApiError> {
        let body = serde_json::from_slice(body)
            .map_err(|error| ApiError::invalid(format!("the body is not JSON: {error}")))?;
        let request = ChatRequest::read(&body, self.text.default_sampling())?;
        let prompt = self.text.render(&request.conversation)?;
        self.text.encode(&prompt, 4_096)?;
        let guide = chat::guide(&self.text, || Ok(&self.grammars), &prompt, &request)?;
        // A few tokens of the answer, so that what is held to is run as well.
        let Some(mut guide) = guide else {
            return Ok(());
        };
        for _ in 0..4 {
            let token = match guide.allowed() {
                Ok(Allowed::Any) => 0,
                Ok(Allowed::Token(token)) => token,
                Ok(Allowed::Only(set)) => {
                    let mut words = set.iter().enumerate().filter(|(_, word)| **word != 0);
                    let Some((index, word)) = words.next() else {
                        break;
                    };
                    index as u32 * u32::BITS + word.trailing_zeros()
                }
                Err(_) => break,
            };
            if guide.take(token).is_err() {
                break;
            }
        }
        Ok(())
    }
}
