//! Stored weights against recorded numbers: MLX's own dequantisation, and linear maps of whole models
//! whose inputs and outputs were recorded.

mod common;

use common::repository;
use lily_checkpoint::{
    Checkpoint, DType, DeclaredModel, Header, StoredType, Weight, WeightData, WeightFormat,
    WeightId, WeightRole, WeightShape, WeightSpec, parse_header,
};
use std::path::Path;

/// A safetensors file in memory.
struct Recorded {
    bytes: Vec<u8>,
    header: Header,
}

impl Recorded {
    fn read(path: &Path) -> Recorded {
        let bytes = std::fs::read(path).unwrap();
        let header = parse_header(&bytes, bytes.len() as u64, "recorded").unwrap();
        Recorded { bytes, header }
    }

    fn tensor(&self, name: &str) -> (StoredType, &[usize], &[u8]) {
        let tensor = self
            .header
            .tensors
            .iter()
            .find(|tensor| tensor.name == name);
        let tensor = tensor.unwrap_or_else(|| panic!("no tensor {name}"));
        let start = tensor.start as usize;
        let bytes = &self.bytes[start..start + tensor.length as usize];
        (tensor.stored, &tensor.shape, bytes)
    }

    fn numbers(&self, name: &str) -> Vec<f32> {
        let (stored, _, bytes) = self.tensor(name);
        assert_eq!(stored, StoredType::F32, "{name}");
        bytes
            .chunks_exact(4)
            .map(|four| f32::from_le_bytes(four.try_into().unwrap()))
            .collect()
    }

    /// Those rows of recorded values whose positions in `all` are also in `wanted`.
    fn rows(&self, name: &str, all: &[usize], wanted: &[usize]) -> Vec<f32> {
        let numbers = self.numbers(name);
        assert_eq!(self.tensor(name).1[0], all.len(), "{name}");
        let width = numbers.len() / all.len();
        let rows = wanted.iter().flat_map(|position| {
            let row = all.iter().position(|at| at == position);
            let row = row.unwrap_or_else(|| panic!("{name} has no position {position}"));
            numbers[row * width..(row + 1) * width].to_vec()
        });
        rows.collect()
    }

    /// The positions that are recorded of the larger values.
    fn rows_kept(&self) -> Vec<usize> {
        let (stored, _, bytes) = self.tensor("p17.rows_kept");
        assert_eq!(stored, StoredType::I32);
        bytes
            .chunks_exact(4)
            .map(|four| u32::from_le_bytes(four.try_into().unwrap()) as usize)
            .collect()
    }
}

/// Compares `y` with `x·Wᵀ`, both in rows, to the rounding of f32 sums over the operands' magnitudes.
fn assert_product(weight: &Weight<'_>, x: &[f32], y: &[f32], what: &str) {
    let (rows, columns) = (weight.rows(), weight.columns());
    assert_eq!(
        (x.len() / columns, x.len() % columns),
        (y.len() / rows, y.len() % rows),
        "{what}"
    );
    let mut numbers = vec![0.0; columns];
    let mut largest = 0.0f64;
    for row in 0..rows {
        weight.dequantise_row(row, &mut numbers);
        for (position, x) in x.chunks_exact(columns).enumerate() {
            let terms = x
                .iter()
                .zip(&numbers)
                .map(|(a, b)| f64::from(*a) * f64::from(*b));
            let (sum, magnitude) = terms.fold((0.0, 0.0), |(sum, all), term| {
                (sum + term, all + term.abs())
            });
            let difference = (f64::from(y[position * rows + row]) - sum).abs();
            let bound = 4.0 * f64::from(f32::EPSILON) * magnitude;
            assert!(
                difference <= bound,
                "{what}: row {row}, position {position}: {difference:e}"
            );
            largest = largest.max(sum.abs());
        }
    }
    assert!(largest > 1e-3, "{what}: the product must not be all zeros");
}

#[test]
fn every_affine_format_is_dequantised_as_mlx_does() {
    let recorded = Recorded::read(&repository("fixtures/oracle-ops/quant.safetensors"));
    let mut formats = 0;
    for bits in [2u8, 3, 4, 5, 6, 8] {
        for group in [32u16, 64, 128] {
            let name = |part: &str| format!("affine.b{bits}.g{group}.{part}");
            let (_, shape, _) = recorded.tensor(&name("deq"));
            let weight = Weight {
                spec: WeightSpec {
                    id: WeightId::global(WeightRole::Head),
                    shape: WeightShape::Matrix {
                        outputs: shape[0],
                        inputs: shape[1],
                    },
                },
                format: WeightFormat::Affine {
                    bits,
                    group,
                    scales: DType::Bf16,
                },
                data: WeightData::Affine {
                    codes: recorded.tensor(&name("weight")).2,
                    scales: recorded.tensor(&name("scales")).2,
                    biases: recorded.tensor(&name("biases")).2,
                },
            };
            // MLX multiplies and adds in f32 with the same two roundings: the bits are equal.
            let found: Vec<u32> = weight
                .read_plain()
                .iter()
                .map(|number| number.to_bits())
                .collect();
            let expected: Vec<u32> = recorded
                .numbers(&name("deq"))
                .iter()
                .map(|number| number.to_bits())
                .collect();
            assert_eq!(found, expected, "{bits} bits, groups of {group}");
            let (x, y) = (recorded.numbers(&name("x")), recorded.numbers(&name("y")));
            assert_product(&weight, &x, &y, &name("y"));
            formats += 1;
        }
    }
    assert_eq!(formats, 18);
}

#[test]
fn a_chosen_experts_rows_give_its_recorded_product() {
    let recorded = Recorded::read(&repository("fixtures/oracle-ops/quant.safetensors"));
    let (_, shape, codes) = recorded.tensor("gather.weight");
    let (experts, outputs) = (shape[0], shape[1]);
    let (_, inputs_shape, _) = recorded.tensor("gather.x");
    let inputs = inputs_shape[1];
    let spec = WeightSpec {
        id: WeightId::in_layer(0, WeightRole::ExpertUp),
        shape: WeightShape::Experts {
            experts,
            outputs,
            inputs,
        },
    };
    let weight = Weight {
        spec,
        format: WeightFormat::Affine {
            bits: 4,
            group: 64,
            scales: DType::Bf16,
        },
        data: WeightData::Affine {
            codes,
            scales: recorded.tensor("gather.scales").2,
            biases: recorded.tensor("gather.biases").2,
        },
    };
    let chosen = recorded.tensor("gather.idx").2.chunks_exact(4);
    let chosen = chosen.map(|four| u32::from_le_bytes(four.try_into().unwrap()) as usize);
    let (x, y) = (recorded.numbers("gather.x"), recorded.numbers("gather.y"));
    let mut checked = 0;
    for (at, expert) in chosen.enumerate() {
        let one = Weight {
            spec: WeightSpec {
                shape: WeightShape::Matrix { outputs, inputs },
                ..spec
            },
            data: weight.row_range(expert * outputs..(expert + 1) * outputs),
            ..weight
        };
        let token = at / 2;
        let x = &x[token * inputs..(token + 1) * inputs];
        assert_product(
            &one,
            x,
            &y[at * outputs..(at + 1) * outputs],
            &format!("choice {at}"),
        );
        checked += 1;
    }
    assert_eq!(checked, 10);
}

/// What the tests below read of `golden.json`: the tokens of the 17-token prompt, and the positions whose logits are
/// recorded.
fn prompt(path: &Path) -> [Vec<usize>; 2] {
    let text = std::fs::read_to_string(path).unwrap();
    let golden: serde_json::Value = serde_json::from_str(&text).unwrap();
    ["tokens", "logit_positions"].map(|key| {
        let list = golden["prompts"]["17"][key].as_array().unwrap();
        list.iter()
            .map(|number| number.as_u64().unwrap() as usize)
            .collect()
    })
}

fn check_model(folder: &str) {
    let directory = repository("fixtures").join(folder);
    let checkpoint = Checkpoint::open(&directory).unwrap();
    let config = checkpoint.config();
    let recorded = Recorded::read(&directory.join("golden.safetensors"));
    let [tokens, logit_positions] = prompt(&directory.join("golden.json"));
    let kept = recorded.rows_kept();
    let all: Vec<usize> = (0..tokens.len()).collect();
    let hidden = recorded.numbers("p17.hidden");
    let width = config.hidden_size;
    assert_eq!(hidden.len(), (config.layers + 2) * kept.len() * width);

    // The first recorded state is the embedding, row by row and bit by bit.
    let embedding = checkpoint
        .weight(WeightId::global(WeightRole::Embedding))
        .unwrap();
    let mut row = vec![0.0; width];
    for (position, expected) in kept.iter().zip(hidden.chunks_exact(width)) {
        let token = tokens[*position];
        embedding.dequantise_row(token, &mut row);
        assert_eq!(row, expected, "token {token}");
    }

    // The last one is the head's input.
    let head = checkpoint
        .weight(WeightId::global(WeightRole::Head))
        .unwrap();
    let last = &hidden[hidden.len() - kept.len() * width..];
    let logits = recorded.rows("p17.logits", &logit_positions, &kept);
    assert_product(&head, last, &logits, "logits");

    // Linear maps whose inputs and outputs are recorded.
    for (layer, role, input, output) in [
        (0, WeightRole::Router, "post_norm", "router_logits"),
        (0, WeightRole::SharedGate, "post_norm", "shared_gate_logit"),
        (0, WeightRole::DeltaZ, "input_norm", "gdn.in_proj_z"),
        (0, WeightRole::DeltaB, "input_norm", "gdn.in_proj_b"),
        (0, WeightRole::DeltaA, "input_norm", "gdn.in_proj_a"),
        (3, WeightRole::Router, "post_norm", "router_logits"),
        (3, WeightRole::SharedGate, "post_norm", "shared_gate_logit"),
    ] {
        let weight = checkpoint.weight(WeightId::in_layer(layer, role)).unwrap();
        let x = recorded.numbers(&format!("p17.l{layer}.{input}"));
        let output = format!("p17.l{layer}.{output}");
        // Of the smaller values every position is recorded.
        let every = recorded.tensor(&output).1[0] == tokens.len();
        let y = recorded.rows(&output, if every { &all } else { &kept }, &kept);
        assert_product(&weight, &x, &y, &format!("{folder}, {}", weight.spec.id));
    }

    // The final norm is a vector: recorded output over recorded input is the stored weight.
    let norm = checkpoint
        .weight(WeightId::global(WeightRole::FinalNorm))
        .unwrap()
        .read_plain();
    let before = &hidden[hidden.len() - 2 * last.len()..][..last.len()];
    for (x, y) in before.chunks_exact(width).zip(last.chunks_exact(width)) {
        let mean = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / width as f64;
        let scale = 1.0 / (mean + config.rms_norm_eps).sqrt();
        for ((x, y), weight) in x.iter().zip(y).zip(&norm) {
            let expected = f64::from(*x) * scale * f64::from(*weight);
            let difference = (f64::from(*y) - expected).abs();
            assert!(
                difference <= 1e-6 * expected.abs().max(1e-3),
                "{folder}: {y} {expected}"
            );
        }
    }
}

#[test]
fn the_linear_maps_of_oracle_small_b_give_the_recorded_numbers() {
    check_model("oracle-small-b");
}

#[test]
fn the_linear_maps_of_oracle_small_c_give_the_recorded_numbers() {
    check_model("oracle-small-c");
}

/// Formats inferred from shapes and formats that the configuration declares are found independently and
/// must agree, for every weight of every model at hand; and every number must be finite.
#[test]
fn inferred_formats_are_the_declared_ones_and_all_numbers_are_finite() {
    let mut seen = std::collections::BTreeSet::new();
    for folder in [
        "fixtures/oracle-small-b",
        "fixtures/oracle-small-c",
        "models/lily-tiny",
    ] {
        let directory = repository(folder);
        let checkpoint = Checkpoint::open(&directory).unwrap();
        let declared = DeclaredModel::read(&directory).unwrap();
        assert_eq!(*checkpoint.config(), declared.config);
        let specs: Vec<WeightSpec> = checkpoint.weights().map(|weight| weight.spec).collect();
        assert_eq!(specs, declared.config.weights(), "{folder}");
        for weight in checkpoint.weights() {
            let id = weight.spec.id;
            let format = declared.quantization.format_of(&weight.spec);
            // Some conversions keep A_log in f32, which no table says.
            if id.role != WeightRole::DeltaALog {
                assert_eq!(weight.format, format, "{folder}: {id}");
                assert_eq!(
                    weight.data.bytes() as u64,
                    declared.weight_bytes(&weight.spec),
                    "{id}"
                );
            }
            seen.insert(weight.format.to_string());
            assert!(
                weight.read_plain().iter().all(|number| number.is_finite()),
                "{folder}: {id}"
            );
        }
    }
    // bf16, f32 and the thirteen affine formats of oracle-small-c's table.
    assert!(seen.len() >= 14, "{seen:?}");
}
