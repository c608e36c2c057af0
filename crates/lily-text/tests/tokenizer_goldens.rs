//! Golden encodings of the Qwen3.6 token table.

mod common;

use std::sync::Arc;

use common::fixture;
use lily_text::{Detokenizer, TextError, Tokenizer};
use proptest::prelude::*;
use serde_json::{Value, json};

fn reduced() -> Tokenizer {
    let json = fixture("fixtures/tokenizer/qwen3_6-reduced.json");
    Tokenizer::from_bytes(json.as_bytes()).unwrap()
}

fn check_goldens(tokenizer: &Tokenizer) {
    let cases: Vec<Value> =
        serde_json::from_str(&fixture("fixtures/tokenizer/encodings.json")).unwrap();
    assert_eq!(cases.len(), 37);
    for case in &cases {
        let text = case["text"].as_str().unwrap();
        let ids: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
        assert_eq!(tokenizer.encode(text).unwrap(), ids, "{text:?}");
        assert_eq!(tokenizer.decode(&ids), case["decoded"].as_str().unwrap());
        let bytes: Vec<u8> = ids
            .iter()
            .flat_map(|&id| tokenizer.token_bytes(id).unwrap())
            .collect();
        assert_eq!(bytes, case["decoded"].as_str().unwrap().as_bytes());
    }
}

#[test]
fn the_reduced_table_passes_all_goldens() {
    check_goldens(&reduced());
}

#[test]
fn the_full_table_passes_all_goldens() {
    let Some(path) = std::env::var_os("LILY_QWEN_TOKENIZER") else {
        println!("LILY_QWEN_TOKENIZER is not set: only the reduced table was tested");
        return;
    };
    let tokenizer = Tokenizer::from_bytes(&std::fs::read(path).unwrap()).unwrap();
    check_goldens(&tokenizer);
    assert_eq!(tokenizer.token_count(), 248_077);
    assert_eq!(tokenizer.id_bound(), 248_077);
}

/// Report: a pre-tokeniser that lost `\p{M}` gave Hindi, Thai and Arabic 14 to
/// 53 % more tokens.
#[test]
fn combining_marks_stay_with_their_letters() {
    let tokenizer = reduced();
    for (text, count) in [
        ("क्षत्रिय नमस्ते", 7),
        ("สวัสดีชาวโลก", 4),
        ("مرحبا بالعالم", 5),
        ("कि กำ", 2),
    ] {
        assert_eq!(tokenizer.encode(text).unwrap().len(), count, "{text}");
    }
}

#[test]
fn tokens_have_names_ids_and_bytes() {
    let tokenizer = reduced();
    assert_eq!(tokenizer.id_of("<|im_end|>"), Some(248_046));
    assert_eq!(tokenizer.id_of("<think>"), Some(248_068));
    assert_eq!(tokenizer.id_of("Ġ"), Some(220));
    assert_eq!(tokenizer.id_of("no such token"), None);
    assert_eq!(tokenizer.token_bytes(220).as_deref(), Some(&b" "[..]));
    assert_eq!(
        tokenizer.token_bytes(248_059).as_deref(),
        Some(&b"</tool_call>"[..])
    );
    assert_eq!(tokenizer.token_bytes(248_319), None);
    assert_eq!(tokenizer.token_bytes(u32::MAX), None);
    assert!(tokenizer.is_special(248_046));
    assert!(!tokenizer.is_special(248_068) && !tokenizer.is_special(248_058));
    let bytes: Vec<u8> = (0..tokenizer.id_bound() as u32)
        .filter_map(|id| tokenizer.token_bytes(id))
        .filter(|bytes| bytes.len() == 1)
        .flatten()
        .collect();
    assert_eq!(bytes.len(), 256, "every byte has one token");
}

#[test]
fn plain_encoding_gives_markup_no_meaning() {
    let tokenizer = reduced();
    let text = "<|im_end|>\n<think>a";
    let markup = tokenizer.encode(text).unwrap();
    assert!(markup.contains(&248_046) && markup.contains(&248_068));
    let plain = tokenizer.encode_plain(text).unwrap();
    assert!(plain.iter().all(|&id| id < 248_044));
    assert_eq!(tokenizer.decode(&plain), text);
    assert_eq!(
        tokenizer.encode_plain("Hello, world!").unwrap(),
        tokenizer.encode("Hello, world!").unwrap()
    );
}

#[test]
fn every_tokenizer_of_the_repository_loads() {
    for name in [
        "models/lily-tiny/tokenizer.json",
        "fixtures/oracle-small-b/tokenizer.json",
        "fixtures/oracle-small-c/tokenizer.json",
    ] {
        let tokenizer = Tokenizer::from_bytes(fixture(name).as_bytes()).unwrap();
        assert!(tokenizer.is_special(tokenizer.id_of("<|im_end|>").unwrap()));
    }
}

#[test]
fn malformed_tokenizers_are_errors() {
    let good: Value = serde_json::from_str(&fixture("models/lily-tiny/tokenizer.json")).unwrap();
    let load = |value: &Value| Tokenizer::from_bytes(value.to_string().as_bytes());
    assert!(load(&good).is_ok());
    assert!(matches!(
        Tokenizer::from_bytes(b""),
        Err(TextError::Json(_))
    ));
    assert!(matches!(
        Tokenizer::from_bytes(b"{}"),
        Err(TextError::Json(_))
    ));
    assert!(matches!(
        Tokenizer::from_bytes(&[0xff; 40]),
        Err(TextError::Json(_))
    ));
    let changes: [(&str, Value); 17] = [
        ("/model/type", json!("WordPiece")),
        ("/model/type", json!(3)),
        ("/model/vocab", json!({})),
        ("/model/vocab", json!([])),
        ("/model/vocab/Ġ", json!(-1)),
        ("/model/vocab/Ġ", json!(4_000_000_000_u32)),
        ("/model/vocab/Ġ", json!(7)),
        ("/model/merges/0", json!(["no such", "tokens"])),
        ("/model/merges/0", json!(["one"])),
        ("/model/merges", json!("x")),
        ("/model/dropout", json!(0.5)),
        ("/model/continuing_subword_prefix", json!("####")),
        ("/decoder", json!(null)),
        ("/pre_tokenizer", json!(null)),
        (
            "/pre_tokenizer/pretokenizers/0/pattern",
            json!({"Regex": "("}),
        ),
        (
            "/normalizer",
            json!({"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
        ),
        ("/added_tokens/0/id", json!(4_000_000_000_u32)),
    ];
    for (pointer, value) in changes {
        let mut bad = good.clone();
        *bad.pointer_mut(pointer).unwrap() = value.clone();
        let result = load(&bad);
        assert!(result.is_err(), "{pointer} = {value} was accepted");
    }
    // The file cut off anywhere is not valid either.
    let text = good.to_string();
    for end in (0..text.len()).step_by(text.len() / 23) {
        let end = (0..=end)
            .rev()
            .find(|&end| text.is_char_boundary(end))
            .unwrap();
        assert!(Tokenizer::from_bytes(&text.as_bytes()[..end]).is_err());
    }
}

#[test]
fn half_characters_are_held_until_they_are_whole() {
    let tokenizer = Arc::new(reduced());
    let ids = tokenizer.encode_plain("👩 a").unwrap();
    assert!(ids.len() >= 4, "the emoji takes several tokens");
    let mut detokenizer = Detokenizer::new(tokenizer.clone(), false);
    let pieces: Vec<String> = ids.iter().map(|&id| detokenizer.push(id)).collect();
    assert_eq!(pieces.concat(), "👩 a");
    assert_eq!(pieces[0], "");
    assert!(pieces.iter().all(|piece| !piece.contains('\u{fffd}')));
    assert_eq!(detokenizer.finish(), "");
    // Cut inside the character.
    assert_eq!(detokenizer.push(ids[0]), "");
    assert_eq!(detokenizer.finish(), tokenizer.decode(&ids[..1]));
    assert_eq!(detokenizer.finish(), "");
}

#[test]
fn special_tokens_are_skipped_on_demand() {
    let tokenizer = Arc::new(reduced());
    let ids = tokenizer
        .encode("<think>a</think><tool_call>b<|im_end|>")
        .unwrap();
    let text = |skip| {
        let mut detokenizer = Detokenizer::new(tokenizer.clone(), skip);
        let mut text: String = ids.iter().map(|&id| detokenizer.push(id)).collect();
        text.push_str(&detokenizer.finish());
        text
    };
    assert_eq!(text(false), "<think>a</think><tool_call>b<|im_end|>");
    assert_eq!(text(true), "<think>a</think><tool_call>b");
}

proptest! {
    #[test]
    fn streamed_text_equals_whole_text(
        choices in prop::collection::vec((0..4_u8, any::<u32>()), 0..60),
    ) {
        // Single bytes (which are often not UTF-8 together), any token, added
        // tokens, and ids that do not exist.
        let tokenizer = SHARED.with(Arc::clone);
        let bytes: Vec<u32> = BYTES.with(Clone::clone);
        let ids: Vec<u32> = choices
            .iter()
            .map(|&(kind, number)| match kind {
                0 | 1 => bytes[number as usize % bytes.len()],
                2 => number % tokenizer.id_bound() as u32,
                _ => 248_040 + number % 50,
            })
            .collect();
        let mut detokenizer = Detokenizer::new(tokenizer.clone(), false);
        let mut streamed = String::new();
        for (index, &id) in ids.iter().enumerate() {
            streamed.push_str(&detokenizer.push(id));
            // Stopping here would give the text so far.
            let mut rest = detokenizer.clone();
            prop_assert_eq!(
                format!("{streamed}{}", rest.finish()),
                tokenizer.decode(&ids[..=index])
            );
        }
        streamed.push_str(&detokenizer.finish());
        prop_assert_eq!(streamed, tokenizer.decode(&ids));
    }

    #[test]
    fn any_text_survives_encoding(text in "\\PC{0,40}|[ \\r\\n\\ta-zé\u{300}]{0,60}|(<\\|im_end\\|>|<think>|x){0,8}") {
        let tokenizer = SHARED.with(Arc::clone);
        // NFC is idempotent, so what came out once comes out again.
        let once = tokenizer.decode(&tokenizer.encode(&text).unwrap());
        prop_assert_eq!(&tokenizer.decode(&tokenizer.encode(&once).unwrap()), &once);
        prop_assert_eq!(&tokenizer.decode(&tokenizer.encode_plain(&once).unwrap()), &once);
        if text.is_ascii() {
            prop_assert_eq!(once, text);
        }
    }
}

thread_local! {
    static SHARED: Arc<Tokenizer> = Arc::new(reduced());
    static BYTES: Vec<u32> = SHARED.with(|tokenizer| {
        (0..tokenizer.id_bound() as u32)
            .filter(|&id| tokenizer.token_bytes(id).is_some_and(|bytes| bytes.len() == 1))
            .collect()
    });
}
