//! The fuzzers' corpora, run as ordinary tests: what was once found must never panic again.

mod common;

use common::repository;
use lily_checkpoint::fuzzing;

fn replay(target: &str, least: usize, run: fn(&[u8])) {
    let directory = repository("fuzz/corpus").join(target);
    let mut files = 0;
    for entry in std::fs::read_dir(&directory).unwrap() {
        let path = entry.unwrap().path();
        let bytes = std::fs::read(&path).unwrap();
        // The name of the file stands in the captured output if it panics.
        println!("{}", path.display());
        run(&bytes);
        files += 1;
    }
    assert!(files >= least, "{}: {files} files", directory.display());
}

#[test]
fn safetensors_headers() {
    replay("safetensors_header", 8, fuzzing::safetensors_header);
}

#[test]
fn model_configurations() {
    replay("model_config", 6, fuzzing::model_config);
}
