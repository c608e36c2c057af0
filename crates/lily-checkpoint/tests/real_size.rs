//! A checkpoint of the real model's size, as a file of holes. Linux alone tells what a process and a file
//! take.
#![cfg(target_os = "linux")]

mod common;

use common::repository;
use lily_checkpoint::{Checkpoint, DeclaredModel, WeightFormat, WeightId, WeightRole};
use serde_json::json;
use std::io::{Seek, SeekFrom, Write};
use std::time::{Duration, Instant};

const REAL: &str = "fixtures/qwen3.6-35b-a3b/config.json";

/// Kilobytes of this process in memory.
fn resident_kilobytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status
        .lines()
        .find(|line| line.starts_with("VmRSS:"))
        .unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Blocks of 512 bytes that the file takes on disk.
fn blocks(file: &std::fs::File) -> u64 {
    use std::os::unix::fs::MetadataExt;
    file.metadata().unwrap().blocks()
}

/// The real model's size, as a file of holes: opening reads its header and nothing else.
#[test]
fn a_checkpoint_of_the_real_size_opens_at_once_and_in_little_memory() {
    let json = std::fs::read_to_string(repository(REAL)).unwrap();
    let model = DeclaredModel::parse(&json, REAL).unwrap();
    let mut header = serde_json::Map::new();
    let mut end = 0u64;
    let mut tensor = |name: String, dtype: &str, shape: Vec<usize>, width: usize| {
        let start = end;
        end += (shape.iter().product::<usize>() * width) as u64;
        let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": [start, end]});
        header.insert(name, entry);
    };
    for spec in model.config.weights() {
        let path = format!("language_model.{}", spec.id);
        let name = if spec.id.role.is_bare() {
            path.clone()
        } else {
            format!("{path}.weight")
        };
        let mut shape = spec.shape.stored();
        match model.quantization.format_of(&spec) {
            WeightFormat::Plain(_) => tensor(name, "BF16", shape, 2),
            WeightFormat::Affine { bits, group, .. } => {
                let columns = shape.pop().unwrap();
                let with = |last: usize| [shape.as_slice(), &[last]].concat();
                tensor(name, "U32", with(columns * usize::from(bits) / 32), 4);
                for part in ["scales", "biases"] {
                    tensor(
                        format!("{path}.{part}"),
                        "BF16",
                        with(columns / usize::from(group)),
                        2,
                    );
                }
            }
        }
    }
    assert_eq!(end, 19_508_787_456);
    let head = common::join_header(serde_json::Value::Object(header).to_string().as_bytes());

    let directory = tempfile::tempdir().unwrap();
    let mut file = std::fs::File::create(directory.path().join("model.safetensors")).unwrap();
    file.set_len(64 << 20).unwrap();
    if blocks(&file) > 1024 {
        eprintln!("skipped: the temporary directory stores holes");
        return;
    }
    file.set_len(head.len() as u64 + end).unwrap();
    file.write_all(&head).unwrap();
    // The last scales and biases of the head lie beyond 19 GB; these bytes are its last row's biases.
    file.seek(SeekFrom::End(-64)).unwrap();
    file.write_all(&[0x80, 0x3f].repeat(32)).unwrap();
    std::fs::write(directory.path().join("config.json"), &json).unwrap();

    let before = resident_kilobytes();
    let start = Instant::now();
    let checkpoint = Checkpoint::open(directory.path()).unwrap();
    let elapsed = start.elapsed();
    let grown = resident_kilobytes().saturating_sub(before);
    assert!(
        elapsed < Duration::from_millis(500),
        "opening took {elapsed:?}"
    );
    assert!(grown < 64 << 10, "opening took {grown} KB of memory");

    let head = checkpoint
        .weight(WeightId::global(WeightRole::Head))
        .unwrap();
    let mut row = vec![0.0; head.columns()];
    head.dequantise_row(head.rows() - 1, &mut row);
    assert!(
        row.iter().all(|number| *number == 1.0),
        "the bytes at the far end"
    );
    head.dequantise_row(head.rows() - 2, &mut row);
    assert!(
        row.iter().all(|number| *number == 0.0),
        "the row before is a hole"
    );

    let summary = checkpoint.summary();
    assert_eq!(
        (summary.text.tensors, summary.text.bytes),
        (1757, 19_508_787_456)
    );
    assert_eq!(summary.parameters, 34_660_610_688);
}
