//! Log-probabilities of the tokens that make up an answer's text.

use lily_engine::{TokenEvent, Tokenizer};
use serde_json::{Value, json};
use std::sync::Arc;

/// A token of the answer with its log-probability and those of others in its place.
#[derive(Clone, Debug)]
pub(crate) struct TokenLogprob {
    bytes: Vec<u8>,
    logprob: f32,
    top: Vec<(Vec<u8>, f32)>,
}

impl TokenLogprob {
    /// The token's text, as far as it is text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes).into_owned()
    }

    /// As chat completions have it.
    pub fn to_chat_json(&self) -> Value {
        let mut value = of_chat(&self.bytes, self.logprob);
        let top = self.top.iter();
        value["top_logprobs"] = top
            .map(|(bytes, logprob)| of_chat(bytes, *logprob))
            .collect();
        value
    }

    pub fn logprob(&self) -> f32 {
        self.logprob
    }

    /// The likeliest tokens by their text.
    pub fn top(&self) -> Value {
        let top = self.top.iter();
        let entry = |(bytes, logprob): &(Vec<u8>, f32)| {
            (String::from_utf8_lossy(bytes).into_owned(), json!(logprob))
        };
        Value::Object(top.map(entry).collect())
    }
}

fn of_chat(bytes: &[u8], logprob: f32) -> Value {
    json!({"token": String::from_utf8_lossy(bytes), "logprob": logprob, "bytes": bytes})
}

/// Keeps the log-probabilities of tokens until their text is certain.
#[derive(Clone)]
pub(crate) struct Logprobs {
    tokenizer: Arc<Tokenizer>,
    held: Vec<TokenLogprob>,
}

impl Logprobs {
    pub fn new(tokenizer: Arc<Tokenizer>) -> Self {
        Logprobs {
            tokenizer,
            held: Vec::new(),
        }
    }

    /// Takes a token, if it has a log-probability.
    pub fn push(&mut self, token: &TokenEvent) {
        let bytes = |id| self.tokenizer.token_bytes(id).unwrap_or_default();
        if let Some(logprob) = token.logprob {
            let top = token.alternatives.iter();
            self.held.push(TokenLogprob {
                bytes: bytes(token.token),
                logprob,
                top: top.map(|&(id, logprob)| (bytes(id), logprob)).collect(),
            });
        }
    }

    /// The tokens that `text` is made of, which has just become certain: the last ones of its length. What was held
    /// before them was markup, or what no text came of.
    pub fn of(&mut self, text: &str) -> Vec<TokenLogprob> {
        let mut length = 0;
        let mut from = self.held.len();
        while from > 0 && length < text.len() {
            length += self.held[from - 1].bytes.len();
            from -= 1;
        }
        let tokens = self.held.split_off(from);
        self.held.clear();
        tokens
    }
}
