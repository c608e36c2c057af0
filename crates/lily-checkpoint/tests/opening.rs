//! Opening checkpoints of every form, and what the summary says of them.

mod common;

use common::{Draft, Files, open, repository, write};
use lily_checkpoint::{
    Checkpoint, CheckpointError, DType, TensorCount, WeightData, WeightFormat, WeightId, WeightRole,
};
use serde_json::json;

fn assert_send_sync<T: Send + Sync>() {}

#[test]
fn checkpoints_may_be_shared_between_threads() {
    assert_send_sync::<Checkpoint>();
    assert_send_sync::<CheckpointError>();
}

/// All numbers of all weights, to compare checkpoints stored differently.
fn numbers(checkpoint: &Checkpoint) -> Vec<Vec<f32>> {
    checkpoint
        .weights()
        .map(|weight| weight.read_plain())
        .collect()
}

#[test]
fn one_file_shards_memory_and_another_prefix_hold_the_same_weights() {
    let single = open(&Draft::single().files()).unwrap();
    let sharded = open(&Draft::sharded().files()).unwrap();
    assert_eq!(numbers(&single), numbers(&sharded));
    assert_eq!(sharded.summary().files.len(), 2);

    let mut renamed = Draft::single();
    for tensor in &mut renamed.shards[0].1 {
        tensor.name = tensor.name.replace("language_model.", "");
    }
    assert_eq!(numbers(&single), numbers(&open(&renamed.files()).unwrap()));

    let memory = from_memory(&Draft::sharded().files());
    assert_eq!(numbers(&single), numbers(&memory));
    assert_eq!(memory.summary().identity, sharded.summary().identity);
}

fn from_memory(files: &Files) -> Checkpoint {
    let config = std::str::from_utf8(&files["config.json"])
        .unwrap()
        .to_string();
    let files: Vec<(&str, &'static [u8])> = files
        .iter()
        .map(|(name, bytes)| (name.as_str(), &*bytes.clone().leak()))
        .collect();
    Checkpoint::from_memory(&config, &files).unwrap()
}

#[test]
fn tensors_lie_at_odd_addresses_and_are_read_all_the_same() {
    let mut draft = Draft::single();
    let name = "language_model.model.norm.weight";
    draft.tensor(name).data = (1..=64u16).flat_map(|n| (n << 7).to_le_bytes()).collect();
    let checkpoint = from_memory(&draft.files());
    let norm = checkpoint
        .weight(WeightId::global(WeightRole::FinalNorm))
        .unwrap();
    let WeightData::Plain(bytes) = norm.data else {
        panic!("a vector is plain")
    };
    let header = checkpoint.summary().files[0].header_bytes;
    assert_eq!(header % 2, 1, "the test's header is odd, as MLX's may be");
    assert_eq!(norm.read_plain()[0], f32::from_bits(1 << 23));
    assert_eq!(norm.read_plain()[63], f32::from_bits(64 << 23));
    assert_eq!(bytes.len(), 128);
}

#[test]
fn f16_and_f32_numbers_are_read_as_such() {
    let mut draft = Draft::single();
    let a_log = "language_model.model.layers.0.linear_attn.A_log";
    draft.reshape(a_log, "F32", &[2], 4);
    draft.tensor(a_log).data = [1.5f32, -2.25]
        .iter()
        .flat_map(|n| n.to_le_bytes())
        .collect();
    let dt_bias = "language_model.model.layers.0.linear_attn.dt_bias";
    draft.reshape(dt_bias, "F16", &[2], 2);
    draft.tensor(dt_bias).data = vec![0x00, 0x3c, 0x00, 0xc0];
    for part in ["scales", "biases"] {
        let name = format!("language_model.model.layers.0.mlp.gate.{part}");
        draft.reshape(&name, "F32", &[4, 2], 4);
        let number = if part == "scales" { 0.5f32 } else { -1.0 };
        draft.tensor(&name).data = [number; 8].iter().flat_map(|n| n.to_le_bytes()).collect();
    }
    let checkpoint = open(&draft.files()).unwrap();
    let weight = |role| checkpoint.weight(WeightId::in_layer(0, role)).unwrap();
    assert_eq!(weight(WeightRole::DeltaALog).read_plain(), [1.5, -2.25]);
    assert_eq!(weight(WeightRole::DeltaDtBias).read_plain(), [1.0, -2.0]);
    let router = weight(WeightRole::Router);
    let format = WeightFormat::Affine {
        bits: 8,
        group: 32,
        scales: DType::F32,
    };
    assert_eq!(router.format, format);
    let WeightData::Affine { codes, .. } = router.data else {
        panic!("quantised")
    };
    let expected: Vec<f32> = codes
        .iter()
        .map(|code| f32::from(*code) * 0.5 - 1.0)
        .collect();
    assert_eq!(router.read_plain(), expected);
}

#[test]
fn a_tied_head_is_the_embedding() {
    let mut draft = Draft::single();
    draft.text()["tie_word_embeddings"] = json!(true);
    for part in ["weight", "scales", "biases"] {
        draft.remove(&format!("language_model.lm_head.{part}"));
    }
    let checkpoint = open(&draft.files()).unwrap();
    let head = checkpoint
        .weight(WeightId::global(WeightRole::Head))
        .unwrap();
    let embedding = checkpoint
        .weight(WeightId::global(WeightRole::Embedding))
        .unwrap();
    assert_eq!(head.data, embedding.data);
    assert_eq!(head.spec.id, embedding.spec.id);

    // Tied outside the text model's table, which itself says nothing.
    draft
        .text()
        .as_object_mut()
        .unwrap()
        .remove("tie_word_embeddings");
    draft.config["tie_word_embeddings"] = json!(true);
    assert!(open(&draft.files()).unwrap().config().tie_word_embeddings);
}

#[test]
fn a_weight_that_the_model_has_not_is_an_error() {
    let checkpoint = open(&Draft::single().files()).unwrap();
    for id in [
        WeightId::in_layer(0, WeightRole::Query),
        WeightId::in_layer(2, WeightRole::Router),
    ] {
        let error = checkpoint.weight(id).unwrap_err();
        assert!(matches!(error, CheckpointError::NoSuchWeight { .. }));
        assert!(error.to_string().contains(&id.to_string()), "{error}");
    }
}

#[test]
fn the_summary_counts_every_tensor_and_byte_once() {
    let draft = Draft::single();
    let (tensors, files) = (draft.shards[0].1.clone(), draft.files());
    let summary = open(&files).unwrap().summary();
    let one = TensorCount {
        tensors: 1,
        bytes: 6,
    };
    assert_eq!(
        (summary.vision, summary.multi_token, summary.unknown),
        (one, one, one)
    );
    assert_eq!(summary.text.tensors, tensors.len() - 3);
    let bytes: usize = tensors.iter().map(|tensor| tensor.data.len()).sum();
    assert_eq!(summary.text.bytes, bytes as u64 - 18);
    assert_eq!(summary.files.len(), 1);
    let file = &summary.files[0];
    assert_eq!(
        (file.name.as_str(), file.tensors),
        ("model.safetensors", tensors.len())
    );
    assert_eq!(file.bytes, files["model.safetensors"].len() as u64);
    assert_eq!(file.header_bytes + bytes as u64, file.bytes);

    assert_eq!(
        summary
            .formats
            .iter()
            .map(|format| format.bytes)
            .sum::<u64>(),
        summary.text.bytes
    );
    let weights: usize = summary.formats.iter().map(|format| format.weights).sum();
    assert_eq!(weights, summary.config.weights().len());
    assert!(
        summary.formats.is_sorted_by(|a, b| a.bytes >= b.bytes),
        "{:?}",
        summary.formats
    );
    let affine = |bits| WeightFormat::Affine {
        bits,
        group: 32,
        scales: DType::Bf16,
    };
    let of = |format| {
        summary
            .formats
            .iter()
            .find(|found| found.format == format)
            .unwrap()
    };
    assert_eq!(summary.formats[0].format, affine(4));
    assert_eq!(
        (of(affine(8)).weights, of(affine(8)).parameters),
        (2, 2 * 4 * 64)
    );
    assert_eq!(of(affine(8)).bytes, 2 * 4 * (64 + 2 * 2 * 2));
    let parameters: u64 = summary.formats.iter().map(|format| format.parameters).sum();
    assert_eq!(summary.parameters, parameters);
}

#[test]
fn the_identity_is_that_of_the_content() {
    let identity = |files: &Files| open(files).unwrap().identity();
    let good = Draft::single().files();
    assert_eq!(
        identity(&good),
        identity(&good),
        "the directory's name plays no part"
    );
    assert_eq!(identity(&good).len(), 32);

    let mut changed = good.clone();
    *changed
        .get_mut("model.safetensors")
        .unwrap()
        .last_mut()
        .unwrap() ^= 1;
    assert_ne!(identity(&changed), identity(&good), "the data sampled");
    let mut changed = good.clone();
    changed.get_mut("config.json").unwrap().push(b' ');
    assert_ne!(identity(&changed), identity(&good), "the configuration");
    let mut changed = good.clone();
    // Of the same length: nothing but the header's own bytes tells them apart.
    let file = changed.get_mut("model.safetensors").unwrap();
    common::edit_header(file, |header| {
        header.replace("something_new", "something_odd")
    });
    assert_ne!(identity(&changed), identity(&good), "the header");
}

#[test]
fn small_files_are_read_from_the_checkpoint_alone() {
    let mut files = Draft::single().files();
    files.insert("tokenizer.json".into(), b"{\"v\": 1}".to_vec());
    files.insert("chat_template.jinja".into(), b"\xff".to_vec());
    let directory = write(&files);
    std::fs::write(directory.path().join("secret"), "s").unwrap();
    let inner = directory.path().join("inner");
    std::fs::create_dir(&inner).unwrap();
    for (name, bytes) in &files {
        std::fs::write(inner.join(name), bytes).unwrap();
    }
    for checkpoint in [Checkpoint::open(&inner).unwrap(), from_memory(&files)] {
        let text = |name| checkpoint.small_text(name).map(Result::unwrap);
        assert_eq!(text("tokenizer.json").as_deref(), Some("{\"v\": 1}"));
        assert_eq!(text("generation_config.json"), None);
        assert_eq!(
            text("config.json").unwrap().as_bytes(),
            files["config.json"]
        );
        assert_eq!(
            checkpoint
                .small_file("chat_template.jinja")
                .unwrap()
                .unwrap(),
            b"\xff"
        );
        let error = checkpoint
            .small_text("chat_template.jinja")
            .unwrap()
            .unwrap_err();
        assert!(matches!(error, CheckpointError::NotText { .. }), "{error}");
        assert!(
            checkpoint.small_file("../secret").is_none(),
            "the way out of the directory"
        );
    }
}

#[test]
fn the_embedded_model_opens_in_memory_as_on_disk() {
    let directory = repository("models/lily-tiny");
    let names = [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
    ];
    let read = |name: &str| {
        (
            name.to_string(),
            std::fs::read(directory.join(name)).unwrap(),
        )
    };
    let files: Files = names.into_iter().map(read).collect();
    let (memory, disk) = (from_memory(&files), Checkpoint::open(&directory).unwrap());
    assert_eq!(memory.identity(), disk.identity());
    assert_eq!(memory.config(), disk.config());
    let summary = disk.summary();
    assert_eq!((summary.vision.tensors, summary.unknown.tensors), (0, 0));
    assert_eq!(summary.files[0].tensors, summary.text.tensors);
    for (a, b) in memory.weights().zip(disk.weights()) {
        assert_eq!(a.data, b.data, "{}", a.spec.id);
    }
}

#[test]
fn skipped_tensors_of_the_oracle_are_counted() {
    let summary = Checkpoint::open(&repository("fixtures/oracle-small-b"))
        .unwrap()
        .summary();
    assert!(
        summary.vision.tensors > 0 && summary.multi_token.tensors > 0,
        "{summary:?}"
    );
    assert_eq!(summary.unknown, TensorCount::default());
    let tensors: usize = summary.files.iter().map(|file| file.tensors).sum();
    let skipped = summary.vision.tensors + summary.multi_token.tensors;
    assert_eq!(summary.text.tensors + skipped, tensors);
}
