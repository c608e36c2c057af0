//! The corpus of the fuzz target of requests.

use lily_checkpoint::Checkpoint;
use lily_engine::TextModel;
use lily_server::fuzzing::RequestReader;
use lily_testing::repository;

#[test]
fn the_fuzzing_corpus_is_read() {
    let checkpoint = Checkpoint::open(&repository("models/lily-tiny")).unwrap();
    let reader = RequestReader::new(TextModel::load(&checkpoint).unwrap());
    let (mut sound, mut all) = (0, 0);
    for entry in std::fs::read_dir(repository("fuzz/corpus/chat_request")).unwrap() {
        sound += usize::from(reader.read(&std::fs::read(entry.unwrap().path()).unwrap()));
        all += 1;
    }
    assert!(sound >= 4 && all >= 4, "{sound} of {all}");
    assert!(!reader.read(b"{}") && !reader.read(b"\xff"));
}
