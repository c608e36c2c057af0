//! Reads random bodies of requests, and follows the first tokens of what they demand.
#![no_main]

use lily_checkpoint::Checkpoint;
use lily_engine::TextModel;
use lily_server::fuzzing::RequestReader;
use std::path::Path;
use std::sync::OnceLock;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    static READER: OnceLock<RequestReader> = OnceLock::new();
    let reader = READER.get_or_init(|| {
        let path = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../models/lily-tiny"));
        let checkpoint = Checkpoint::open(path).expect("the embedded model");
        RequestReader::new(TextModel::load(&checkpoint).expect("its text"))
    });
    reader.read(bytes);
});
