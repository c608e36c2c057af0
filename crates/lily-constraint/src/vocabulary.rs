//! The model's tokens as grammars see them.

use lily_engine::Tokenizer;
use llguidance::toktrie::{TokEnv, TokRxInfo, TokTrie, TokenId, TokenizerEnv};
use std::sync::Arc;

struct Environment {
    trie: TokTrie,
    tokenizer: Arc<Tokenizer>,
}

impl TokenizerEnv for Environment {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        let encode = |text: &str| self.tokenizer.encode_plain(text).unwrap_or_default();
        self.trie.tokenize_with_greedy_fallback(bytes, encode)
    }
}

/// The vocabulary of a tokenizer, with the tokens that end an answer, of which there is at least one. Added tokens, such
/// as `<tool_call>`, are never part of a text: a grammar names them where it wants them.
pub(crate) fn vocabulary(tokenizer: Arc<Tokenizer>, stop_ids: &[u32]) -> TokEnv {
    let words: Vec<Vec<u8>> = (0..tokenizer.id_bound() as u32)
        .map(|id| {
            let bytes = tokenizer.token_bytes(id).unwrap_or_default();
            if tokenizer.is_added(id) {
                [&[TokTrie::SPECIAL_TOKEN_MARKER], bytes.as_slice()].concat()
            } else {
                bytes
            }
        })
        .collect();
    let end = stop_ids[0];
    let trie = TokTrie::from(&TokRxInfo::new(words.len() as u32, end), &words);
    let trie = trie.with_eos_tokens(stop_ids);
    Arc::new(Environment { trie, tokenizer })
}
