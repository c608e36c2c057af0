//! Properties of the output parser that hold for any text: above all, that the
//! pieces in which it arrives do not matter.

mod common;

use common::{call, path, weather};
use lily_text::{fuzzing, parse_output};
use proptest::prelude::*;

const THINKING: &str = "<|im_start|>assistant\n<think>\n";

#[test]
fn the_fuzzing_corpus_passes() {
    let mut count = 0;
    for entry in std::fs::read_dir(path("fuzz/corpus/output_parser")).unwrap() {
        let bytes = std::fs::read(entry.unwrap().path()).unwrap();
        // Every prompt, end and kind of cut for every text.
        for mode in 0..32 {
            for cut in [0, 1, 7] {
                let mut bytes = bytes.clone();
                if let [first, second, ..] = bytes.as_mut_slice() {
                    (*first, *second) = (mode, cut);
                }
                fuzzing::output_parser(&bytes);
            }
        }
        fuzzing::output_parser(&bytes);
        fuzzing::python_literal(&bytes);
        count += 1;
    }
    assert!(count >= 10);
}

fn markup_soup() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        4 => prop::sample::select(vec![
            "<tool_call>", "</tool_call>", "<function=get_weather>", "<function=", "</function>",
            "<parameter=city>", "<parameter=days>", "<parameter=", "</parameter>", "<think>",
            "</think>", "\n", "\n\n", " ", "<", "</", ">", "{\"name\": \"now\"}", "{", "}", "3.0",
        ]).prop_map(str::to_owned),
        1 => "[a-z<>/=\\n é🙂]{0,8}",
        1 => Just(weather("A")),
    ];
    prop::collection::vec(piece, 0..24).prop_map(|pieces| pieces.concat())
}

fn transcript() -> impl Strategy<Value = String> {
    let value = prop_oneof![
        "[a-zA-Zé0-9 <>/\n{}\"']{0,20}",
        "\\PC{0,12}",
        Just("3.0".to_owned())
    ];
    let one_call = (
        prop::sample::select(vec!["get_weather", "write_file", "now"]),
        prop::collection::vec(
            (
                prop::sample::select(vec!["city", "days", "text", "list"]),
                value,
            ),
            0..3,
        ),
    )
        .prop_map(|(name, parameters)| {
            let parameters: Vec<(&str, &str)> = parameters
                .iter()
                .map(|(key, value)| (*key, value.as_str()))
                .collect();
            call(name, &parameters)
        });
    (
        "[a-z .\n]{0,20}",
        "[a-z .\n]{0,20}",
        prop::collection::vec(one_call, 0..3),
    )
        .prop_map(|(reasoning, content, calls)| {
            format!("{reasoning}\n</think>\n\n{content}\n\n{}", calls.join("\n"))
        })
}

fn fuzz(mode: u8, cut: u8, text: &str) {
    let mut bytes = vec![mode, cut];
    bytes.extend_from_slice(text.as_bytes());
    fuzzing::output_parser(&bytes);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    #[test]
    fn random_markup_is_parsed_alike_in_pieces(mode in 0..32_u8, cut: u8, text in markup_soup()) {
        fuzz(mode, cut, &text);
    }

    #[test]
    fn random_bytes_are_parsed_alike_in_pieces(bytes in prop::collection::vec(any::<u8>(), 0..80)) {
        fuzzing::output_parser(&bytes);
        fuzzing::python_literal(&bytes);
    }

    #[test]
    fn mutated_transcripts_are_parsed_alike_in_pieces(
        mode in 0..32_u8,
        cut: u8,
        text in transcript(),
        edits in prop::collection::vec((any::<prop::sample::Index>(), 0..3_u8, "[<>/=a-z\n]{0,3}"), 0..4),
    ) {
        let mut characters: Vec<char> = text.chars().collect();
        for (place, kind, insert) in edits {
            if characters.is_empty() {
                break;
            }
            let place = place.index(characters.len());
            match kind {
                0 => { characters.remove(place); }
                1 => { characters.splice(place..place, insert.chars()); }
                _ => characters.truncate(place),
            }
        }
        fuzz(mode, cut, &characters.into_iter().collect::<String>());
    }

    #[test]
    fn well_formed_output_leaves_no_tags_in_content(text in transcript()) {
        let output = parse_output(THINKING, &text, &fuzzing::tools(), false);
        let tags = ["<tool_call", "</tool_call", "<function", "<parameter", "</parameter", "think>"];
        for tag in tags {
            prop_assert!(!output.content.contains(tag), "{}", output.content);
        }
        prop_assert!(!output.truncated_call);
        prop_assert_eq!(output.tool_calls.len(), text.matches("<tool_call>").count());
    }
}
