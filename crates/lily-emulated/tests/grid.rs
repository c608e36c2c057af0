//! Products of many shapes, a step at a time, on both sides of every threshold at which another form of a kernel runs.
//!
//! All of the grid: `cargo test -p lily-emulated --test grid -- --ignored`, which takes an hour or two. A part drawn by
//! chance runs otherwise.

mod common;

use common::alone::{Alone, Inputs};
use lily_checkpoint::{Checkpoint, WeightId, WeightRole};
use lily_gpu::route;
use lily_plan::{ElementType, Operation, Precision, Projection, ScratchId, WeightArithmetic};
use lily_testing::Synthetic;
use serde_json::json;
use std::sync::Arc;

const OUTPUTS: [usize; 10] = [1, 3, 4, 5, 31, 32, 33, 63, 64, 65];
const COLUMNS: [usize; 8] = [64, 128, 960, 1_024, 1_088, 2_048, 4_096, 4_160];
const ROWS: [usize; 10] = [1, 2, 3, 4, 5, 8, 9, 16, 17, 33];

/// Which way a product takes: everything in f32, activations in bfloat, or weights as well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    F32,
    Bf16,
    Tiles,
}

const WAYS: [Way; 3] = [Way::F32, Way::Bf16, Way::Tiles];

impl Way {
    fn precision(self) -> Precision {
        match self {
            Way::F32 => Precision::F32,
            Way::Bf16 | Way::Tiles => Precision::Bf16,
        }
    }

    fn activation(self) -> ElementType {
        self.precision().activation()
    }

    fn arithmetic(self) -> WeightArithmetic {
        match self {
            Way::F32 | Way::Bf16 => WeightArithmetic::Exact,
            Way::Tiles => WeightArithmetic::RoundedToBf16,
        }
    }
}

fn weight(role: WeightRole) -> WeightId {
    WeightId::in_layer(0, role)
}

/// One of a few, as good as by chance and the same each time.
struct Draw {
    one_in: u64,
    state: u64,
}

impl Draw {
    fn all() -> Self {
        Draw::one_in(1)
    }

    fn one_in(one_in: u64) -> Self {
        Draw { one_in, state: 1 }
    }

    fn takes(&mut self) -> bool {
        self.state = self
            .state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.state >> 33).is_multiple_of(self.one_in)
    }
}

/// A model whose head has these outputs and columns.
fn dense_model(outputs: usize, columns: usize, bits: u8) -> Arc<Checkpoint> {
    let mut synthetic = Synthetic::small(json!({
        "num_hidden_layers": 1, "full_attention_interval": 1, "hidden_size": columns, "vocab_size": outputs,
        "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64,
        "num_experts": 2, "num_experts_per_tok": 1,
    }));
    synthetic.config["quantization"]["bits"] = json!(bits);
    synthetic.open()
}

/// The products of one shape; how many, and the largest difference relative to its bound.
#[derive(Default)]
struct Sum {
    count: usize,
    most: f64,
}

impl Sum {
    fn add(&mut self, excess: f64) {
        self.count += 1;
        self.most = self.most.max(excess);
    }
}

/// Products with the head alone, with a residual, and beside others from one input, in this way and for these rows.
fn check_dense(alone: &mut Alone, sum: &mut Sum, way: Way, rows: usize, forms: [bool; 3]) {
    let (outputs, columns) = {
        let config = &alone.model.config;
        (config.vocab_size, config.hidden_size)
    };
    let what =
        |form: &str| format!("{form}: {rows} rows, {outputs} outputs, {columns} columns, {way:?}");
    let head = WeightId::global(WeightRole::Head);
    let arithmetic = way.arithmetic();
    if forms[0] {
        let mut inputs = Inputs::new(&alone.model, way.precision(), rows);
        let input = inputs.random(rows, columns, way.activation());
        let output = inputs.output(rows, outputs, way.activation());
        inputs.builder.push(Operation::Project {
            input,
            weight: head,
            output,
            arithmetic,
        });
        sum.add(alone.check(&what("project"), inputs, &[output]));
    }
    if forms[1] {
        let mut inputs = Inputs::new(&alone.model, way.precision(), rows);
        let input = inputs.random(rows, columns, way.activation());
        let residual = inputs.random(rows, outputs, ElementType::F32);
        let output = inputs.output(rows, outputs, ElementType::F32);
        inputs.builder.push(Operation::ProjectAdd {
            input,
            weight: head,
            residual,
            output,
            arithmetic,
        });
        sum.add(alone.check(&what("project-add"), inputs, &[output]));
    }
    if forms[2] {
        let mut inputs = Inputs::new(&alone.model, way.precision(), rows);
        // Tiles take what was normalised before; otherwise the residual stream is, on the way.
        let (element, norm) = match way {
            Way::Tiles => (ElementType::Bf16, None),
            _ => (ElementType::F32, Some(weight(WeightRole::InputNorm))),
        };
        let input = inputs.random(rows, columns, element);
        let mut projections = vec![
            Projection::Linear {
                weight: head,
                output: inputs.output(rows, outputs, way.activation()),
            },
            Projection::Gated {
                gate: weight(WeightRole::SharedGateProjection),
                up: weight(WeightRole::SharedUp),
                output: inputs.output(rows, 64, way.activation()),
            },
            Projection::Linear {
                weight: weight(WeightRole::SharedGate),
                output: inputs.output(rows, 1, ElementType::F32),
            },
            Projection::Linear {
                weight: weight(WeightRole::Router),
                output: inputs.output(rows, 2, ElementType::F32),
            },
        ];
        // Each of them first, and one to four of them.
        projections.rotate_left((rows + outputs) % 4);
        projections.truncate(1 + (rows + columns / 64) % 4);
        let written: Vec<ScratchId> = projections.iter().map(Projection::output).collect();
        inputs.builder.push(Operation::Projections {
            input,
            norm,
            projections,
            arithmetic,
        });
        sum.add(alone.check(&what("projections"), inputs, &written));
    }
}

fn dense_grid(models: &mut Draw, products: &mut Draw) -> Sum {
    let mut sum = Sum::default();
    for columns in COLUMNS {
        for outputs in OUTPUTS {
            for bits in [4, 8] {
                if !models.takes() {
                    continue;
                }
                let mut alone = Alone::new(&dense_model(outputs, columns, bits), bits == 8);
                for way in WAYS {
                    for rows in ROWS {
                        let forms = [0; 3].map(|_| products.takes());
                        check_dense(&mut alone, &mut sum, way, rows, forms);
                    }
                }
            }
        }
    }
    sum
}

#[test]
fn dense_products_agree_on_a_part_of_the_grid() {
    let sum = dense_grid(&mut Draw::one_in(8), &mut Draw::one_in(6));
    println!("{} products, at most {:.3} of a bound", sum.count, sum.most);
    assert!(sum.count > 200);
}

#[test]
#[ignore = "many minutes"]
fn dense_products_agree_on_all_of_the_grid() {
    let sum = dense_grid(&mut Draw::all(), &mut Draw::all());
    println!("{} products, at most {:.3} of a bound", sum.count, sum.most);
    assert_eq!(sum.count, 10 * 8 * 2 * 3 * 10 * 3);
}

/// Numbers of blocks on both sides of where the form of a product changes, for one row and for several.
fn edges(columns: usize, rows: usize, most: usize) -> Vec<usize> {
    let shape = |blocks| route::vector_shape(columns, blocks, route::vector_rows(rows), 1, 0);
    let changes = (1..most).filter(|&blocks| shape(blocks) != shape(blocks + 1));
    changes.flat_map(|blocks| [blocks, blocks + 1]).collect()
}

/// So many weights at most: reference and emulation take a second for some tens of millions.
fn threshold_products(most_weights: usize) -> Sum {
    let mut sum = Sum::default();
    let mut shapes = std::collections::BTreeSet::new();
    for (columns, bits) in [(64, 4), (128, 8), (1_088, 4), (2_112, 8), (4_096, 4)] {
        for rows in [1, 2, 3, 5] {
            for blocks in edges(columns, rows, most_weights / columns / 4) {
                // The last block is whole, or has one row.
                let outputs = blocks * 4 - if blocks % 2 == 0 { 3 } else { 0 };
                let mut alone = Alone::new(&dense_model(outputs, columns, bits), bits == 8);
                let way = if blocks % 3 == 0 { Way::F32 } else { Way::Bf16 };
                check_dense(&mut alone, &mut sum, way, rows, [true, false, false]);
                let rows = route::vector_rows(rows);
                let shape = route::vector_shape(columns, blocks, rows, 1, 0);
                shapes.insert((
                    rows == 1,
                    shape.simdgroups,
                    shape.split,
                    shape.rounds,
                    shape.by_chunk,
                ));
            }
        }
    }
    println!(
        "{} products of {} shapes: {shapes:?}",
        sum.count,
        shapes.len()
    );
    sum
}

#[test]
fn products_agree_where_their_form_changes() {
    let sum = threshold_products(3_000_000);
    println!("at most {:.3} of a bound", sum.most);
    assert!(sum.count > 20);
}

#[test]
#[ignore = "some minutes"]
fn large_products_agree_where_their_form_changes() {
    threshold_products(200_000_000);
}

/// Experts as [experts, choices], of `inner` columns within.
fn expert_model(
    [experts, choices]: [usize; 2],
    hidden: usize,
    inner: usize,
    bits: u8,
) -> Arc<Checkpoint> {
    let mut synthetic = Synthetic::small(json!({
        "num_hidden_layers": 1, "full_attention_interval": 1, "hidden_size": hidden, "vocab_size": 64,
        "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64,
        "num_experts": experts, "num_experts_per_tok": choices,
        "moe_intermediate_size": inner, "shared_expert_intermediate_size": inner,
    }));
    synthetic.config["quantization"]["bits"] = json!(bits);
    synthetic.open()
}

/// How rows choose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Choice {
    /// Each others, but the last expert is nobody's.
    Spread,
    /// All the same.
    Same,
    /// The first expert so many rows: those of a tile.
    Filled(usize),
}

/// Experts of each row, without repetition.
fn chosen([experts, choices]: [usize; 2], rows: usize, choice: Choice) -> Vec<u32> {
    let experts = experts as u32;
    (0..rows as u32)
        .flat_map(|row| {
            let first = match choice {
                Choice::Spread => row * 7 % (experts - 1),
                Choice::Same => experts / 2,
                Choice::Filled(count) if (row as usize) < count => 0,
                Choice::Filled(_) => 1 % experts,
            };
            // The last expert comes up only where there are as many choices.
            let others = if choices as u32 == experts {
                experts
            } else {
                experts - 1
            };
            (0..choices as u32).map(move |k| (first + k) % others)
        })
        .collect()
}

/// The pairs by expert, as the step before leaves them.
fn grouped(experts: usize, ids: &[u32]) -> Vec<f32> {
    let mut pairs: Vec<usize> = (0..ids.len()).collect();
    pairs.sort_by_key(|&pair| ids[pair]);
    let offsets =
        (0..=experts).map(|expert| ids.iter().filter(|&&id| (id as usize) < expert).count());
    offsets.chain(pairs).map(|x| x as f32).collect()
}

/// Both products of experts in this way, and grouping, combination and output.
fn check_experts(
    alone: &mut Alone,
    sum: &mut Sum,
    way: Way,
    rows: usize,
    choice: Choice,
    is_grouped: bool,
) {
    let config = alone.model.config.clone();
    let (experts, choices) = (config.experts, config.experts_per_token);
    let (hidden, inner, pairs) = (
        config.hidden_size,
        config.expert_intermediate,
        rows * choices,
    );
    let ids = chosen([experts, choices], rows, choice);
    let what = |form: &str| {
        format!(
            "{form}: {rows} rows, {choices} of {experts} experts of {inner} by {hidden}, {way:?}, {choice:?}, \
             grouped: {is_grouped}"
        )
    };
    let arithmetic = way.arithmetic();
    let activation = way.activation();
    let new = |inputs: &mut Inputs| {
        let values = ids.iter().map(|&id| id as f32).collect();
        let numbers = inputs.given(rows, choices, ElementType::U32, values);
        let grouping = is_grouped.then(|| {
            let columns = experts + 1 + pairs;
            inputs.given(1, columns, ElementType::U32, grouped(experts, &ids))
        });
        (numbers, grouping)
    };
    {
        let mut inputs = Inputs::new(&alone.model, way.precision(), rows);
        let (ids, grouping) = new(&mut inputs);
        let (element, norm) = match is_grouped {
            true => (activation, None),
            false => (ElementType::F32, Some(weight(WeightRole::PostNorm))),
        };
        let input = inputs.random(rows, hidden, element);
        let output = inputs.output(pairs, inner, activation);
        inputs.builder.push(Operation::ExpertInput {
            input,
            norm,
            ids,
            grouping,
            gate: weight(WeightRole::ExpertGateProjection),
            up: weight(WeightRole::ExpertUp),
            output,
            arithmetic,
        });
        sum.add(alone.check(&what("expert-input"), inputs, &[output]));
    }
    {
        let mut inputs = Inputs::new(&alone.model, way.precision(), rows);
        let (ids, grouping) = new(&mut inputs);
        let input = inputs.random(pairs, inner, activation);
        let output = inputs.output(pairs, hidden, activation);
        inputs.builder.push(Operation::ExpertProject {
            input,
            ids,
            grouping,
            weight: weight(WeightRole::ExpertDown),
            output,
            arithmetic,
        });
        sum.add(alone.check(&what("expert-project"), inputs, &[output]));
    }
    let routing = |inputs: &mut Inputs| {
        let weights = common::alone::random(pairs, 77)
            .iter()
            .map(|x| x.abs())
            .collect();
        let weights = inputs.given(rows, choices, ElementType::F32, weights);
        (weights, inputs.random(rows, 1, ElementType::F32))
    };
    if is_grouped {
        let mut inputs = Inputs::new(&alone.model, way.precision(), rows);
        let values = ids.iter().map(|&id| id as f32).collect();
        let ids = inputs.given(rows, choices, ElementType::U32, values);
        let grouping = inputs.output(1, experts + 1 + pairs, ElementType::U32);
        inputs
            .builder
            .push(Operation::GroupExperts { ids, grouping });
        sum.add(alone.check(&what("group-experts"), inputs, &[grouping]));

        let mut inputs = Inputs::new(&alone.model, way.precision(), rows);
        let experts = inputs.random(pairs, hidden, activation);
        let shared = inputs.random(rows, hidden, activation);
        let (weights, shared_gate) = routing(&mut inputs);
        let output = inputs.output(rows, hidden, activation);
        inputs.builder.push(Operation::Combine {
            experts,
            weights,
            shared,
            shared_gate,
            output,
        });
        sum.add(alone.check(&what("combine"), inputs, &[output]));
    } else {
        let mut inputs = Inputs::new(&alone.model, way.precision(), rows);
        let (ids, _) = new(&mut inputs);
        let activated = inputs.random(pairs, inner, activation);
        let shared = inputs.random(rows, inner, activation);
        let residual = inputs.random(rows, hidden, ElementType::F32);
        let (weights, shared_gate) = routing(&mut inputs);
        let output = inputs.output(rows, hidden, ElementType::F32);
        inputs.builder.push(Operation::ExpertOutput {
            activated,
            ids,
            weights,
            down: weight(WeightRole::ExpertDown),
            shared,
            shared_down: weight(WeightRole::SharedDown),
            shared_gate,
            residual,
            output,
        });
        sum.add(alone.check(&what("expert-output"), inputs, &[output]));
    }
}

/// Hidden and inner columns, each with every number of columns once.
const EXPERT_SHAPES: [(usize, usize); 8] = [
    (64, 4_160),
    (128, 2_048),
    (960, 1_088),
    (1_024, 960),
    (1_088, 64),
    (2_048, 128),
    (4_096, 64),
    (4_160, 1_024),
];

fn expert_grid(models: &mut Draw, products: &mut Draw) -> Sum {
    let mut sum = Sum::default();
    for (hidden, inner) in EXPERT_SHAPES {
        for bits in [4, 8] {
            for experts in [[2, 1], [4, 1], [9, 4]] {
                if !models.takes() {
                    continue;
                }
                let mut alone = Alone::new(&expert_model(experts, hidden, inner, bits), bits == 8);
                for way in WAYS {
                    for rows in ROWS {
                        for choice in [
                            Choice::Spread,
                            Choice::Same,
                            Choice::Filled(8),
                            Choice::Filled(16),
                        ] {
                            for is_grouped in [false, true] {
                                // Tiles are of groups; without them a decode plan has eight rows.
                                let there = is_grouped || (way != Way::Tiles && rows <= 8);
                                if there && products.takes() {
                                    check_experts(
                                        &mut alone, &mut sum, way, rows, choice, is_grouped,
                                    );
                                }
                            }
                        }
                    }
                }
            }
        }
    }
    sum
}

#[test]
fn experts_agree_on_a_part_of_the_grid() {
    let sum = expert_grid(&mut Draw::one_in(5), &mut Draw::one_in(100));
    println!("{} steps, at most {:.3} of a bound", sum.count, sum.most);
    assert!(sum.count > 40);
}

#[test]
#[ignore = "many minutes"]
fn experts_agree_on_all_of_the_grid() {
    let sum = expert_grid(&mut Draw::all(), &mut Draw::all());
    println!("{} steps, at most {:.3} of a bound", sum.count, sum.most);
}

/// Tiles of 16, 32 and 64 rows begin where an expert has so many on average, and each is filled to the last row.
#[test]
fn experts_agree_where_their_tiles_change() {
    let mut sum = Sum::default();
    let mut alone = Alone::new(&expert_model([2, 1], 64, 128, 4), false);
    let tile = |rows| route::expert_tile(rows, 2).rows;
    let mut seen = Vec::new();
    let changes = (1..200).filter(|&rows| tile(rows) != tile(rows + 1));
    for rows in changes.flat_map(|rows| [rows, rows + 1]) {
        for choice in [Choice::Spread, Choice::Same, Choice::Filled(tile(rows))] {
            check_experts(&mut alone, &mut sum, Way::Tiles, rows, choice, true);
            seen.push(tile(rows));
        }
    }
    for rows in [16, 32, 64] {
        assert!(seen.contains(&rows), "{seen:?}");
    }
    // Dense tiles by their rows.
    let mut alone = Alone::new(&dense_model(65, 128, 4), false);
    let tile = |rows| route::dense_tile(rows).rows;
    let changes = (1..200).filter(|&rows| tile(rows) != tile(rows + 1));
    for rows in changes
        .flat_map(|rows| [rows, rows + 1])
        .chain([64, 65, 128, 129])
    {
        check_dense(&mut alone, &mut sum, Way::Tiles, rows, [true; 3]);
    }
    println!("{} steps, at most {:.3} of a bound", sum.count, sum.most);
}

/// More pairs than a simdgroup of the grouping takes at once.
#[test]
fn many_pairs_are_grouped() {
    let mut alone = Alone::new(&expert_model([9, 4], 64, 64, 4), true);
    for rows in [255, 256, 257, 600] {
        for choice in [Choice::Spread, Choice::Same] {
            let ids = chosen([9, 4], rows, choice);
            let mut inputs = Inputs::new(&alone.model, Precision::F32, rows);
            let values = ids.iter().map(|&id| id as f32).collect();
            let numbers = inputs.given(rows, 4, ElementType::U32, values);
            let grouping = inputs.output(1, 10 + rows * 4, ElementType::U32);
            inputs.builder.push(Operation::GroupExperts {
                ids: numbers,
                grouping,
            });
            alone.check(&format!("{rows} rows, {choice:?}"), inputs, &[grouping]);
        }
    }
}
