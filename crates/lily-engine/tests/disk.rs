//! Prefixes that outlast the engine that computed them.

mod support;

use lily_engine::{
    CancelFlag, DiskOptions, Engine, EngineOptions, GenerationRequest, PlanOutput, Precision,
    PrefixCache,
};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;
use support::engine_with;
use tempfile::TempDir;

const CHUNK: usize = 64;
/// `<|im_end|>`.
const END: u32 = 4_057;

fn engine() -> Engine {
    engine_of(|_| {})
}

fn engine_of(change: impl FnOnce(&mut EngineOptions)) -> Engine {
    engine_with(|options| {
        options.prefill_chunk = CHUNK;
        options.snapshots = true;
        options.context = Some(4_096);
        change(options);
    })
}

fn options(directory: &Path) -> DiskOptions {
    DiskOptions::new(directory.to_path_buf(), 1 << 30, "lily-tiny".into())
}

fn opened(engine: &Engine, directory: &Path) -> PrefixCache {
    PrefixCache::on_disk(engine, &options(directory)).unwrap()
}

/// A message of so many tokens, its end included.
fn message(length: usize, salt: u32) -> Vec<u32> {
    let tokens = (1..length as u32).map(|at| (at * 37 + salt) % 4_000);
    tokens.chain([END]).collect()
}

/// Answers a prompt: how many of its tokens were computed, the answer, and the bits of the logits behind it.
fn turn(
    engine: &mut Engine,
    cache: &mut PrefixCache,
    prompt: &[u32],
) -> (usize, Vec<u32>, Vec<u32>) {
    let request = GenerationRequest {
        prompt: prompt.to_vec(),
        max_tokens: Some(5),
        stop_ids: Some(Vec::new()),
        ..GenerationRequest::default()
    };
    let generation = cache
        .start(engine, &request, &CancelFlag::default())
        .unwrap();
    let done = engine.run(generation, |_| {}).unwrap();
    let (computed, tokens) = (done.timings().prefilled_tokens, done.tokens().to_vec());
    let mut session = done.into_session();
    let outcome = engine
        .decode(&mut session, 8, PlanOutput::AllLogits)
        .unwrap();
    cache.park(engine, session);
    let logits = outcome.logits.iter().map(|logit| logit.to_bits());
    (computed, tokens, logits.collect())
}

/// Stores prompts, one after the other, each by an engine of its own.
fn store(directory: &Path, prompts: &[Vec<u32>]) {
    for prompt in prompts {
        let mut engine = engine();
        let mut cache = opened(&engine, directory);
        turn(&mut engine, &mut cache, prompt);
        cache.close(&mut engine);
        assert_eq!(cache.take_warnings(), [""; 0]);
    }
}

fn files(directory: &Path) -> Vec<PathBuf> {
    let found = fs::read_dir(directory).unwrap();
    let mut files: Vec<PathBuf> = found.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

#[test]
fn a_known_prefix_is_not_computed_after_a_restart() {
    let place = TempDir::new().unwrap();
    let directory = place.path().join("made/for it");
    let large = |options: &mut EngineOptions| options.prefill_chunk = 256;
    let first = [message(1_100, 1), message(1_050, 2), message(900, 3)].concat();
    let prompt = [&first[..], &[5, 6]].concat();
    let mut engine = engine_of(large);
    let mut cache = opened(&engine, &directory);
    let expected = turn(&mut engine, &mut cache, &prompt);
    assert_eq!(expected.0, prompt.len());
    cache.close(&mut engine);
    let figures = cache.figures().disk;
    assert_eq!((figures.files, figures.writes, figures.reads), (1, 1, 0));
    assert_eq!(figures.bytes, figures.written_bytes);
    let stored = files(&directory);
    assert_eq!(fs::metadata(&stored[0]).unwrap().len(), figures.bytes);
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&directory), mode(&stored[0])), (0o700, 0o600));
    }
    drop((engine, cache));

    let mut engine = engine_of(large);
    let mut cache = opened(&engine, &directory);
    let found = turn(&mut engine, &mut cache, &prompt);
    assert_eq!(found.0, 2);
    assert!(found.1 == expected.1 && found.2 == expected.2);
    let figures = cache.figures();
    assert_eq!((figures.hits, figures.disk.reads), (1, 1));
    assert!(figures.disk.read_bytes < figures.disk.bytes);
    // Nothing new is written for it, and what goes on is written in its place.
    let longer = [prompt.clone(), message(300, 4), vec![5, 6]].concat();
    assert!(turn(&mut engine, &mut cache, &longer).0 < 300 + 2 + 64);
    cache.close(&mut engine);
    let figures = cache.figures().disk;
    assert_eq!((figures.files, figures.writes, figures.removed), (1, 1, 1));
    assert_ne!(files(&directory), stored);
    drop((engine, cache));

    // Another conversation with the same first message, from the stored one; as from the beginning.
    let mut engine = engine_of(large);
    let mut cache = opened(&engine, &directory);
    let other = [message(1_100, 1), message(100, 9)].concat();
    let found = turn(&mut engine, &mut cache, &other);
    assert!(found.0 < 100 + 64, "{}", found.0);
    let expected = turn(&mut engine, &mut PrefixCache::default(), &other);
    assert_eq!(expected.0, other.len());
    assert!(found.1 == expected.1 && found.2 == expected.2);
    assert_eq!(cache.take_warnings(), [""; 0]);
}

#[test]
fn what_is_not_what_it_should_be_is_told_and_ignored() {
    let place = TempDir::new().unwrap();
    let prompt = [message(70, 1), message(90, 2), vec![5, 6]].concat();
    store(place.path(), std::slice::from_ref(&prompt));
    let path = files(place.path()).pop().unwrap();
    let name = path.file_name().unwrap().to_str().unwrap().to_string();
    let good = fs::read(&path).unwrap();
    let mut engine = engine();
    let expected = turn(&mut engine, &mut PrefixCache::default(), &prompt);
    // It is itself good.
    let mut cache = opened(&engine, place.path());
    let found = turn(&mut engine, &mut cache, &prompt);
    assert!(found.0 < CHUNK && found.1 == expected.1 && found.2 == expected.2);

    let mut check = |what: &str, told: &str| {
        let mut cache = opened(&engine, place.path());
        let found = turn(&mut engine, &mut cache, &prompt);
        assert!(found.1 == expected.1 && found.2 == expected.2, "{what}");
        assert_eq!(found.0, prompt.len(), "{what}");
        let warnings = cache.take_warnings();
        assert_eq!(warnings.len(), 1, "{what}: {warnings:?}");
        assert!(warnings[0].contains(&name), "{what}: {warnings:?}");
        assert!(warnings[0].contains(told), "{what}: {warnings:?}");
        let figures = cache.figures().disk;
        assert_eq!((figures.refused, figures.reads), (1, 0), "{what}");
    };
    let stored_tokens = 64 + 4 * 160;
    let snapshots = stored_tokens + 8;
    for (at, told) in [
        (0, "no stored prefix"),
        (8, "format"),
        (12, "header"),
        (20, "header"),
        (33, "header"),
        (44, "header"),
        (54, "header"),
        (60, "header"),
        (64, "tokens"),
        (stored_tokens + 3, "tokens"),
        (snapshots + 10_000, "snapshot"),
        (good.len() - 9, "cache"),
        (good.len() - 1, "cache"),
    ] {
        let mut damaged = good.clone();
        damaged[at] ^= 4;
        fs::write(&path, damaged).unwrap();
        check(&format!("byte {at}"), told);
    }
    for length in [
        0,
        10,
        63,
        64,
        80,
        stored_tokens,
        snapshots + 70_000,
        good.len() - 1,
    ] {
        fs::write(&path, &good[..length]).unwrap();
        let told = if length < 64 {
            "within its header"
        } else {
            "bytes of"
        };
        check(&format!("{length} bytes"), told);
    }
    fs::write(&path, [&good[..], &[0]].concat()).unwrap();
    check("a byte more", "bytes of");
    fs::write(&path, [0xff; 5_000]).unwrap();
    check("anything", "no stored prefix");
    // Two parts in each other's place: each is whole, and of the same length.
    let mut exchanged = good.clone();
    let middle = |index: usize| {
        let length = (good.len() - snapshots - 160 * cache_bytes() - 8 * caches()) / 3;
        snapshots + index * length..snapshots + (index + 1) * length
    };
    exchanged[middle(0)].copy_from_slice(&good[middle(1)]);
    exchanged[middle(1)].copy_from_slice(&good[middle(0)]);
    fs::write(&path, exchanged).unwrap();
    check("exchanged", "snapshot");
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    check("a directory", "no file");
    fs::remove_dir(&path).unwrap();
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink("/nowhere", &path).unwrap();
        check("a link", "no file");
    }
}

/// Bytes of a position in lily-tiny's caches: layers, keys and values, heads, width, bf16.
fn cache_bytes() -> usize {
    let engine = engine();
    let config = &engine.model().config;
    config.attention_layers() * 2 * config.key_value_width() * 2
}

/// Parts of the cache in the file of the test above: up to each of three snapshots.
fn caches() -> usize {
    3
}

#[test]
fn states_of_other_engines_are_not_mixed() {
    let place = TempDir::new().unwrap();
    let prompt = message(100, 1);
    store(place.path(), std::slice::from_ref(&prompt));
    let foreign = |what: &str, mut engine: Engine, options: DiskOptions| {
        let mut cache = PrefixCache::on_disk(&engine, &options).unwrap();
        let warnings = cache.take_warnings();
        assert_eq!(warnings.len(), 1, "{what}");
        assert!(
            warnings[0].contains("another model"),
            "{what}: {warnings:?}"
        );
        assert_eq!(
            turn(&mut engine, &mut cache, &prompt).0,
            prompt.len(),
            "{what}"
        );
    };
    let here = || options(place.path());
    let other = DiskOptions {
        model: "another".into(),
        ..here()
    };
    foreign("model", engine(), other);
    let exact = engine_of(|options| options.precision = Precision::F32);
    foreign("precision", exact, here());
    let longer = engine_of(|options| options.prefill_chunk = 2 * CHUNK);
    foreign("chunk", longer, here());
    // A shorter context alone is no other engine, but has no room for it.
    let short = engine_of(|options| options.context = Some(99));
    let mut cache = opened(&short, place.path());
    assert_eq!(cache.take_warnings().len(), 1);
    // It is still there for those it is for.
    let mut engine = engine();
    let mut cache = opened(&engine, place.path());
    assert!(turn(&mut engine, &mut cache, &prompt).0 <= CHUNK);
}

#[test]
fn the_directory_is_bounded_and_what_was_used_longest_ago_goes() {
    let place = TempDir::new().unwrap();
    let prompts: Vec<Vec<u32>> = (0..4).map(|salt| message(100, 10 * salt)).collect();
    fs::write(place.path().join("notes.txt"), "mine").unwrap();
    fs::write(place.path().join("0-1.lily-prefix-unfinished"), "half").unwrap();
    store(place.path(), &prompts[..1]);
    assert_eq!(
        files(place.path()).len(),
        2,
        "what was half written has gone"
    );
    let size = fs::metadata(&files(place.path())[0]).unwrap().len();
    let bounded = DiskOptions {
        most_bytes: size * 5 / 2,
        ..options(place.path())
    };
    let known = |engine: &mut Engine, prompt: &[u32], is_known: bool, what: &str| {
        let mut cache = PrefixCache::on_disk(engine, &bounded).unwrap();
        let (computed, ..) = turn(engine, &mut cache, prompt);
        assert_eq!(computed <= CHUNK, is_known, "{what}");
        cache.close(engine);
        let figures = cache.figures().disk;
        assert!(figures.bytes <= bounded.most_bytes && figures.files <= 2);
        assert_eq!(cache.take_warnings(), [""; 0]);
        // A file's time of use has to be another.
        std::thread::sleep(Duration::from_millis(20));
    };
    let engine = &mut engine();
    known(engine, &prompts[1], false, "the second");
    known(engine, &prompts[0], true, "the first, used again");
    known(
        engine,
        &prompts[2],
        false,
        "the third, for which the second goes",
    );
    known(engine, &prompts[0], true, "the first, which was used later");
    known(
        engine,
        &prompts[1],
        false,
        "the second, for which the third goes",
    );
    // Less room than there was.
    let less = DiskOptions {
        most_bytes: size,
        ..bounded.clone()
    };
    let cache = PrefixCache::on_disk(engine, &less).unwrap();
    assert_eq!(cache.figures().disk.files, 1);
    // What has no room at all is not written.
    let none = DiskOptions {
        most_bytes: size / 2,
        ..bounded.clone()
    };
    let mut cache = PrefixCache::on_disk(engine, &none).unwrap();
    turn(engine, &mut cache, &prompts[3]);
    cache.close(engine);
    assert_eq!(cache.figures().disk.files, 0);
    let names = files(place.path());
    assert_eq!(names, [place.path().join("notes.txt")]);
}

#[test]
fn sessions_are_written_when_nobody_comes_back_or_others_need_their_place() {
    let place = TempDir::new().unwrap();
    let at_once = DiskOptions {
        settled: Duration::ZERO,
        ..options(place.path())
    };
    let mut engine = engine();
    let mut cache = PrefixCache::on_disk(&engine, &at_once).unwrap();
    assert_eq!(cache.tend(&mut engine), None);
    let prompt = [message(300, 1), vec![5, 6]].concat();
    turn(&mut engine, &mut cache, &prompt);
    for _ in 0..3 {
        assert_eq!(cache.tend(&mut engine), Some(Duration::ZERO));
    }
    // It is taken while it is written, and written anew behind that.
    assert!(turn(&mut engine, &mut cache, &prompt).0 < CHUNK);
    assert_eq!(cache.figures().disk.writes, 0);
    while cache.tend(&mut engine).is_some() {}
    cache.close(&mut engine);
    let figures = cache.figures().disk;
    assert_eq!((figures.files, figures.writes), (1, 1));
    assert_eq!(files(place.path()).len(), 1, "nothing half written is left");
    // What is shorter than a chunk is not worth it, nor is what is there already.
    let mut cache = PrefixCache::on_disk(&engine, &at_once).unwrap();
    turn(&mut engine, &mut cache, &message(CHUNK - 1, 1));
    turn(&mut engine, &mut cache, &prompt);
    while cache.tend(&mut engine).is_some() {}
    assert_eq!(cache.figures().disk.files, 1);
    // Later, where nobody has come back yet.
    let later = DiskOptions {
        settled: Duration::from_secs(1_000),
        ..at_once
    };
    let mut cache = PrefixCache::on_disk(&engine, &later).unwrap();
    turn(&mut engine, &mut cache, &message(100, 50));
    let wait = cache.tend(&mut engine).unwrap();
    assert!(wait > Duration::from_secs(900), "{wait:?}");
    // Sixteen others need its place.
    for salt in 0..16 {
        turn(&mut engine, &mut cache, &message(20, 100 + salt));
    }
    assert_eq!(cache.figures().evictions, 1);
    cache.close(&mut engine);
    let mut others = PrefixCache::on_disk(&engine, &later).unwrap();
    assert!(turn(&mut engine, &mut others, &message(100, 50)).0 <= CHUNK);
}

#[test]
fn a_directory_that_cannot_be_had_is_an_error_and_one_that_goes_is_told() {
    let place = TempDir::new().unwrap();
    let file = place.path().join("file");
    fs::write(&file, "").unwrap();
    let mut engine = engine();
    let error = PrefixCache::on_disk(&engine, &options(&file))
        .err()
        .unwrap();
    assert!(error.to_string().contains("file"), "{error}");
    let directory = place.path().join("gone");
    let mut cache = opened(&engine, &directory);
    turn(&mut engine, &mut cache, &message(100, 1));
    fs::remove_dir(&directory).unwrap();
    cache.close(&mut engine);
    let warnings = cache.take_warnings();
    assert!(
        warnings.len() == 1 && warnings[0].contains("could not be stored"),
        "{warnings:?}"
    );
}

/// Of a stored prefix, the end of its first message is kept however long that is: there other conversations part.
#[test]
fn long_instructions_serve_every_conversation() {
    let place = TempDir::new().unwrap();
    let instructions = message(20 * CHUNK + 20, 1);
    let prompt = [
        &instructions[..],
        &message(900, 2),
        &message(500, 3),
        &[5, 6],
    ]
    .concat();
    store(place.path(), &[prompt]);
    let mut engine = engine();
    let mut cache = opened(&engine, place.path());
    let other = [instructions, message(100, 9)].concat();
    let (computed, ..) = turn(&mut engine, &mut cache, &other);
    assert!(computed <= 100 + CHUNK, "{computed}");
}
