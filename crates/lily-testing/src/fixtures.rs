//! Fixtures and recorded numbers.

use lily_checkpoint::{StoredType, parse_header};
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// A path in the repository.
pub fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .join(path)
}

/// Where a fixture lies: in the repository, or below the folder that `LILY_FIXTURES` names (for those too
/// large for the repository). `None`, with a line that says so, if it is in neither.
pub fn fixture(name: &str) -> Option<PathBuf> {
    let outside = std::env::var_os("LILY_FIXTURES").map(|folder| Path::new(&folder).join(name));
    let found = [Some(repository("fixtures").join(name)), outside]
        .into_iter()
        .flatten()
        .find(|path| path.exists());
    if found.is_none() {
        eprintln!(
            "SKIPPED {name}: not in the repository; set LILY_FIXTURES to a folder that has it"
        );
    }
    found
}

/// The tensors of 32-bit numbers of a small safetensors file, shapes and values, integers converted.
///
/// # Panics
/// If the file is not there or not sound.
pub fn read_tensors(path: &Path) -> HashMap<String, (Vec<usize>, Vec<f32>)> {
    let bytes = std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let header = parse_header(&bytes, bytes.len() as u64, "golden").expect("a sound file");
    let mut tensors = HashMap::new();
    for tensor in header.tensors {
        let data = &bytes[tensor.start as usize..(tensor.start + tensor.length) as usize];
        let words = data
            .chunks_exact(4)
            .map(|word| [word[0], word[1], word[2], word[3]]);
        let values = match tensor.stored {
            StoredType::F32 => words.map(f32::from_le_bytes).collect(),
            StoredType::I32 => words.map(|word| i32::from_le_bytes(word) as f32).collect(),
            _ => continue,
        };
        tensors.insert(tensor.name, (tensor.shape, values));
    }
    tensors
}

/// The tensors of a small safetensors file as they are stored: shapes and bytes.
///
/// # Panics
/// If the file is not there or not sound.
pub fn read_stored(path: &Path) -> HashMap<String, (Vec<usize>, Vec<u8>)> {
    let bytes = std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let header = parse_header(&bytes, bytes.len() as u64, "golden").expect("a sound file");
    let stored =
        |start: u64, length: u64| bytes[start as usize..(start + length) as usize].to_vec();
    let tensors = header.tensors.into_iter();
    tensors
        .map(|t| (t.name, (t.shape, stored(t.start, t.length))))
        .collect()
}

/// A recorded prompt of one of the small oracles.
#[derive(Clone, Debug)]
pub struct GoldenPrompt {
    /// Its name in the tensors: `p17` and so on.
    pub name: String,
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// Positions whose logits are recorded.
    pub logit_positions: Vec<usize>,
    /// The most probable token at every position.
    pub argmax_all: Vec<u32>,
    /// What follows greedily.
    pub greedy: Vec<u32>,
}

/// The prompts of a small oracle's golden.json.
///
/// # Panics
/// If the file is not as expected.
pub fn golden_prompts(directory: &Path) -> Vec<GoldenPrompt> {
    let text = std::fs::read_to_string(directory.join("golden.json")).expect("golden.json");
    let golden: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let prompts = golden["prompts"].as_object().expect("prompts");
    prompts
        .iter()
        .map(|(name, prompt)| {
            let list = |key: &str| -> Vec<u32> {
                let list = prompt[key].as_array().expect(key);
                list.iter()
                    .map(|number| number.as_u64().expect(key) as u32)
                    .collect()
            };
            GoldenPrompt {
                name: format!("p{name}"),
                tokens: list("tokens"),
                logit_positions: list("logit_positions")
                    .into_iter()
                    .map(|at| at as usize)
                    .collect(),
                argmax_all: list("argmax_all"),
                greedy: list("greedy"),
            }
        })
        .collect()
}

/// The position of the largest value, the lowest of several.
pub fn arg_max(values: &[f32]) -> u32 {
    (0..values.len())
        .rev()
        .max_by(|&a, &b| values[a].total_cmp(&values[b]))
        .unwrap_or(0) as u32
}

/// Root mean square of the difference relative to that of `expected`, and the largest difference.
///
/// # Panics
/// If the lengths differ or a value is not finite.
pub fn distance(found: &[f32], expected: &[f32]) -> (f64, f64) {
    assert_eq!(found.len(), expected.len(), "number of values");
    let (mut difference, mut total, mut largest) = (0.0, 0.0, 0.0_f64);
    for (&a, &b) in found.iter().zip(expected) {
        let d = f64::from(a) - f64::from(b);
        assert!(d.is_finite(), "a value is not finite");
        difference += d * d;
        total += f64::from(b) * f64::from(b);
        largest = largest.max(d.abs());
    }
    ((difference / total).sqrt(), largest)
}
