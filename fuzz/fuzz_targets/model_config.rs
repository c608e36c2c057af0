#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| lily_checkpoint::fuzzing::model_config(bytes));
