//! Byte-level BPE tokenizer, read from `tokenizer.json`.

use std::collections::HashMap;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use serde::Deserialize;
use serde_json::Value;
use tokenizers::{
    Decoder as _, Model as _, Normalizer as _, OffsetType, PreTokenizedString, PreTokenizer as _,
};
use tokenizers::{DecoderWrapper, NormalizedString};

use crate::TextError;

/// Token ids index tables, so a file must not be able to ask for tables of any
/// size it likes. The largest published vocabularies have under 2^19 rows.
const MAXIMUM_ID: u32 = 1 << 22;

/// The parts of `tokenizer.json` that are checked here before the library
/// sees them, because it trusts them.
#[derive(Deserialize)]
struct File {
    #[serde(default)]
    added_tokens: Vec<AddedTokenEntry>,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    model: ModelEntry,
}

#[derive(Deserialize)]
struct AddedTokenEntry {
    id: u32,
    content: String,
    #[serde(default)]
    special: bool,
}

#[derive(Deserialize)]
struct ModelEntry {
    #[serde(rename = "type")]
    kind: Option<String>,
    #[serde(default)]
    dropout: Option<f32>,
    #[serde(default)]
    continuing_subword_prefix: Option<String>,
    #[serde(default)]
    end_of_word_suffix: Option<String>,
    vocab: HashMap<String, u32>,
}

/// A byte-level BPE tokenizer.
///
/// Text and tokens correspond by bytes: the concatenated bytes of the tokens
/// of a text are the (normalised) text, and every byte has a token, so any
/// text can be encoded.
pub struct Tokenizer {
    library: tokenizers::Tokenizer,
    /// Bytes of every token, by id; `None` where the table has a hole.
    bytes: Vec<Option<Box<[u8]>>>,
    /// Added tokens, and whether each is special.
    added: HashMap<u32, bool>,
    count: usize,
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Tokenizer")
            .field("count", &self.count)
            .field("added", &self.added.len())
            .finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Reads the contents of a `tokenizer.json`.
    ///
    /// # Errors
    ///
    /// If the file is malformed, contradicts itself, or is not byte-level BPE.
    pub fn from_bytes(json: &[u8]) -> Result<Self, TextError> {
        let file: File = serde_json::from_slice(json)?;
        check_kind(&file)?;

        // The library has code paths that panic on files nobody publishes; the
        // checks above keep the known ones out, and this keeps the others from
        // taking the process down.
        let parsed = catch_unwind(AssertUnwindSafe(|| tokenizers::Tokenizer::from_bytes(json)));
        let mut library = match parsed {
            Ok(Ok(library)) => library,
            Ok(Err(error)) => return Err(TextError::Library(error)),
            Err(_) => return Err(TextError::Inconsistent("the file cannot be loaded".into())),
        };
        // Prompts are cut and padded by nobody but the engine.
        library
            .with_truncation(None)
            .map_err(TextError::Library)?
            .with_padding(None)
            .with_post_processor(None::<tokenizers::PostProcessorWrapper>);
        if !has_byte_level_decoder(library.get_decoder()) {
            return Err(TextError::Unsupported(
                "the decoder is not ByteLevel".into(),
            ));
        }

        let (bytes, count) = byte_table(&file, &library)?;
        check_every_byte_has_a_token(&file.model.vocab)?;
        let added = file.added_tokens.iter();
        let added = added.map(|token| (token.id, token.special)).collect();
        let tokenizer = Self {
            library,
            bytes,
            added,
            count,
        };
        tokenizer.check_round_trip()?;
        Ok(tokenizer)
    }

    /// The tokens of a text. The text of added tokens (`<|im_start|>`,
    /// `<think>`, …) becomes those tokens; nothing is added around the text.
    ///
    /// # Errors
    ///
    /// If the library gives up on the text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TextError> {
        let encoding = self
            .library
            .encode_fast(text, false)
            .map_err(TextError::Library)?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The tokens of a text in which nothing has a special meaning: the text
    /// of an added token is spelled out with ordinary tokens.
    ///
    /// # Errors
    ///
    /// As for [`Self::encode`].
    pub fn encode_plain(&self, text: &str) -> Result<Vec<u32>, TextError> {
        self.try_encode_plain(text).map_err(TextError::Library)
    }

    fn try_encode_plain(&self, text: &str) -> tokenizers::Result<Vec<u32>> {
        let mut normalized = NormalizedString::from(text);
        if let Some(normalizer) = self.library.get_normalizer() {
            normalizer.normalize(&mut normalized)?;
        }
        let mut pieces = PreTokenizedString::from(normalized);
        if let Some(pre_tokenizer) = self.library.get_pre_tokenizer() {
            pre_tokenizer.pre_tokenize(&mut pieces)?;
        }
        let model = self.library.get_model();
        pieces.tokenize(|piece| model.tokenize(piece.get()))?;
        let encoding = pieces.into_encoding(None, 0, OffsetType::None)?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The text of tokens. Bytes that are not UTF-8 become U+FFFD; ids that
    /// are not in the table are skipped.
    #[must_use]
    pub fn decode(&self, ids: &[u32]) -> String {
        let mut bytes = Vec::new();
        for &id in ids {
            bytes.extend_from_slice(self.bytes_of(id).unwrap_or_default());
        }
        match String::from_utf8(bytes) {
            Ok(text) => text,
            Err(error) => String::from_utf8_lossy(error.as_bytes()).into_owned(),
        }
    }

    /// The exact bytes that a token stands for.
    #[must_use]
    pub fn token_bytes(&self, id: u32) -> Option<Vec<u8>> {
        self.bytes_of(id).map(<[u8]>::to_vec)
    }

    pub(crate) fn bytes_of(&self, id: u32) -> Option<&[u8]> {
        self.bytes.get(usize::try_from(id).ok()?)?.as_deref()
    }

    /// How many tokens there are, added ones included. Ids may have gaps: see
    /// [`Self::id_bound`].
    #[must_use]
    pub fn token_count(&self) -> usize {
        self.count
    }

    /// Bytes of the longest token.
    #[must_use]
    pub fn longest_token(&self) -> usize {
        let lengths = self.bytes.iter().flatten().map(|bytes| bytes.len());
        lengths.max().unwrap_or(0).max(1)
    }

    /// One more than the largest id.
    #[must_use]
    pub fn id_bound(&self) -> usize {
        self.bytes.len()
    }

    /// The id of a token, by its name in the file: plain text for added
    /// tokens (`<|im_end|>`), the byte-level spelling (`Ġthe`) for others.
    #[must_use]
    pub fn id_of(&self, token_text: &str) -> Option<u32> {
        self.library.token_to_id(token_text)
    }

    /// Whether a token is markup that users do not see, such as `<|im_end|>`.
    /// `<think>` and `<tool_call>` are added, but not special.
    #[must_use]
    pub fn is_special(&self, id: u32) -> bool {
        self.added.get(&id) == Some(&true)
    }

    /// Whether a token is one that no text is cut into by itself: markup, special or not.
    #[must_use]
    pub fn is_added(&self, id: u32) -> bool {
        self.added.contains_key(&id)
    }

    /// A tokenizer whose parts do not fit together (no byte-level step before
    /// the model, for example) would silently lose text, so it is tried once.
    fn check_round_trip(&self) -> Result<(), TextError> {
        let probe = "a B\t1\n é漢🙂\u{0}";
        if self.decode(&self.encode_plain(probe)?) == probe {
            Ok(())
        } else {
            Err(TextError::Unsupported(
                "text does not survive being encoded and decoded".into(),
            ))
        }
    }
}

fn check_kind(file: &File) -> Result<(), TextError> {
    let model = &file.model;
    if model.kind.as_deref().is_some_and(|kind| kind != "BPE") {
        return Err(TextError::Unsupported("the model is not BPE".into()));
    }
    if model.dropout.is_some_and(|dropout| dropout != 0.0) {
        return Err(TextError::Unsupported("BPE dropout".into()));
    }
    let affixes = [&model.continuing_subword_prefix, &model.end_of_word_suffix];
    if affixes
        .into_iter()
        .any(|affix| affix.as_deref().is_some_and(|text| !text.is_empty()))
    {
        return Err(TextError::Unsupported("word prefixes or suffixes".into()));
    }
    check_steps(
        &file.normalizer,
        "normalizers",
        &["NFC", "NFD", "NFKC", "NFKD", "Lowercase"],
    )?;
    check_steps(
        &file.pre_tokenizer,
        "pretokenizers",
        &["Split", "ByteLevel", "Digits"],
    )
}

/// Steps are allowed by name: some of the library's others expect data that a
/// file could get wrong, and none of them occurs in byte-level BPE.
fn check_steps(step: &Value, list: &str, allowed: &[&str]) -> Result<(), TextError> {
    if step.is_null() {
        return Ok(());
    }
    match step.get("type").and_then(Value::as_str) {
        Some("Sequence") => step
            .get(list)
            .and_then(Value::as_array)
            .map(Vec::as_slice)
            .unwrap_or_default()
            .iter()
            .try_for_each(|inner| check_steps(inner, list, allowed)),
        Some(kind) if allowed.contains(&kind) => Ok(()),
        kind => Err(TextError::Unsupported(format!(
            "step {}",
            kind.unwrap_or("without a type")
        ))),
    }
}

fn has_byte_level_decoder(decoder: Option<&DecoderWrapper>) -> bool {
    // Sequences do not show their members, so behaviour decides: "Ċ" is how
    // byte-level tokenizers spell a newline.
    match decoder {
        Some(DecoderWrapper::ByteLevel(_)) => true,
        Some(other) => other
            .decode(vec!["Ċ".to_owned(), "Ġa".to_owned()])
            .is_ok_and(|text| text == "\n a"),
        None => false,
    }
}

type ByteTable = Vec<Option<Box<[u8]>>>;

fn byte_table(
    file: &File,
    library: &tokenizers::Tokenizer,
) -> Result<(ByteTable, usize), TextError> {
    let characters = byte_characters();
    let mut table: ByteTable = Vec::new();
    let mut count = 0;
    let mut place = |id: u32, bytes: Vec<u8>| -> Result<bool, TextError> {
        if id > MAXIMUM_ID {
            return Err(TextError::Inconsistent(format!(
                "token id {id} is too large"
            )));
        }
        let index = id as usize;
        if index >= table.len() {
            table.resize(index + 1, None);
        }
        let fresh = table[index].is_none();
        table[index] = Some(bytes.into_boxed_slice());
        count += usize::from(fresh);
        Ok(fresh)
    };
    for (token, &id) in &file.model.vocab {
        let bytes = token
            .chars()
            .map(|character| characters.get(&character).copied())
            .collect::<Option<Vec<u8>>>()
            // Spellings outside the byte alphabet stand for themselves, as in
            // the library's own decoder.
            .unwrap_or_else(|| token.as_bytes().to_vec());
        if !place(id, bytes)? {
            return Err(TextError::Inconsistent(format!("two tokens have id {id}")));
        }
    }
    let mut names: HashMap<u32, &str> = HashMap::new();
    for token in &file.added_tokens {
        if library.token_to_id(&token.content) != Some(token.id) {
            return Err(TextError::Inconsistent(format!(
                "added token {} does not get its id {}",
                token.content, token.id
            )));
        }
        if names
            .insert(token.id, &token.content)
            .is_some_and(|name| name != token.content)
        {
            return Err(TextError::Inconsistent(format!(
                "two added tokens have id {}",
                token.id
            )));
        }
        place(token.id, token.content.as_bytes().to_vec())?;
    }
    Ok((table, count))
}

fn check_every_byte_has_a_token(vocabulary: &HashMap<String, u32>) -> Result<(), TextError> {
    for (character, byte) in byte_characters() {
        let mut buffer = [0; 4];
        let name: &str = character.encode_utf8(&mut buffer);
        if !vocabulary.contains_key(name) {
            let reason = format!("there is no token for the byte {byte:#04x}");
            return Err(TextError::Unsupported(reason));
        }
    }
    Ok(())
}

/// The byte-level alphabet: printable bytes stand for themselves, the others
/// are shifted to characters from U+0100 on, in order.
fn byte_characters() -> HashMap<char, u8> {
    let mut next = 0x100;
    (0..=u8::MAX)
        .map(|byte| {
            let character = if matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF) {
                char::from(byte)
            } else {
                next += 1;
                char::from_u32(next - 1).unwrap_or(char::REPLACEMENT_CHARACTER)
            };
            (character, byte)
        })
        .collect()
}
