//! Parses random output of a model in pieces and as a whole, and compares.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    lily_text::fuzzing::output_parser(bytes);
});
