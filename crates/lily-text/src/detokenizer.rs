//! Text from a stream of tokens.

use std::sync::Arc;

use crate::Tokenizer;

/// Turns tokens into text one at a time.
///
/// A character may be spread over several tokens; it comes out with the token
/// that completes it. All pieces together equal [`Tokenizer::decode`] of all
/// tokens, bytes that are not UTF-8 included.
#[derive(Debug, Clone)]
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    skip_special: bool,
    /// The beginning of a character whose remaining bytes have not come yet.
    pending: Vec<u8>,
}

impl Detokenizer {
    /// A detokenizer at the beginning of a text. With `skip_special`, special
    /// tokens (`<|im_end|>`) leave no text; tokens that are only added
    /// (`<think>`, `<tool_call>`) do.
    #[must_use]
    pub fn new(tokenizer: Arc<Tokenizer>, skip_special: bool) -> Self {
        Self {
            tokenizer,
            skip_special,
            pending: Vec::new(),
        }
    }

    /// Takes a token; returns the text that became complete, often empty.
    /// Ids that are not in the table add nothing.
    #[must_use = "the text is not returned again"]
    pub fn push(&mut self, token: u32) -> String {
        if self.skip_special && self.tokenizer.is_special(token) {
            return String::new();
        }
        if let Some(bytes) = self.tokenizer.bytes_of(token) {
            self.pending.extend_from_slice(bytes);
        }
        self.take_complete()
    }

    /// Ends the text: half a character left over becomes U+FFFD.
    #[must_use = "the text is not returned again"]
    pub fn finish(&mut self) -> String {
        let rest = String::from_utf8_lossy(&self.pending).into_owned();
        self.pending.clear();
        rest
    }

    fn take_complete(&mut self) -> String {
        let mut text = String::with_capacity(self.pending.len());
        let mut used = 0;
        for chunk in self.pending.utf8_chunks() {
            let is_last = used + chunk.valid().len() + chunk.invalid().len() == self.pending.len();
            text.push_str(chunk.valid());
            used += chunk.valid().len();
            if chunk.invalid().is_empty() {
                continue;
            }
            // Invalid bytes at the very end may be the start of a character;
            // `error_len` is `None` exactly then.
            let may_continue = is_last
                && std::str::from_utf8(chunk.invalid())
                    .is_err_and(|error| error.error_len().is_none());
            if !may_continue {
                text.push(char::REPLACEMENT_CHARACTER);
                used += chunk.invalid().len();
            }
        }
        self.pending.drain(..used);
        text
    }
}
