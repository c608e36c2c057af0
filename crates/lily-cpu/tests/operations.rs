//! Single operations against the recorded numbers of fixtures/oracle-ops, native and reference, fused
//! and not: each as a plan of one step on a model that has the recorded weights.

mod common;

use common::{native, on, reference};
use lily_checkpoint::{WeightId, WeightRole};
use lily_cpu::CpuDevice;
use lily_plan::{
    Device, ElementType, Launch, Observer, Operation, Phase, Plan, PlanBuilder, PlanClass,
    PlanOutput, Precision, ScratchId, StateCopy, StateSlot, WeightArithmetic,
};
use lily_testing::{Packed, Runner, Synthetic, distance, read_stored, read_tensors, repository};
use serde_json::json;
use std::collections::HashMap;
use std::sync::Arc;

type Tensors = HashMap<String, (Vec<usize>, Vec<f32>)>;

fn goldens() -> Tensors {
    read_tensors(&repository("fixtures/oracle-ops/ops.safetensors"))
}

/// Both implementations of a model.
fn both(model: &Synthetic) -> [Runner<CpuDevice>; 2] {
    let checkpoint = model.open();
    [native(), reference()].map(|options| on(checkpoint.clone(), Precision::F32, &options))
}

struct Keep {
    wanted: Vec<ScratchId>,
    values: Vec<Vec<f32>>,
}

impl Observer for Keep {
    fn after_step(&mut self, _: usize, read: &dyn Fn(ScratchId) -> Vec<f32>) {
        self.values = self.wanted.iter().map(|&id| read(id)).collect();
    }
}

/// A plan of one operation over `rows` tokens of one sequence: what is read and what is written, as
/// (name, rows, columns).
struct OneStep<'a> {
    rows: usize,
    reads: Vec<(&'static str, usize, &'a [f32])>,
    writes: Vec<(&'static str, usize, ElementType)>,
}

impl OneStep<'_> {
    /// Runs the operation that `make` makes of the values' ids; returns what it wrote.
    fn run(
        &self,
        runner: &mut Runner<CpuDevice>,
        make: impl Fn(&[ScratchId], &[ScratchId]) -> Operation,
    ) -> Vec<Vec<f32>> {
        let class = class_of(self.rows);
        let mut builder = PlanBuilder::new(&runner.model, class);
        builder.set_layer(Some(0));
        let mut preset = Vec::new();
        let mut inputs = Vec::new();
        for &(name, rows, values) in &self.reads {
            let columns = values.len() / rows;
            let id = builder.scratch(name, rows, columns, ElementType::F32);
            preset.push((id, values.to_vec()));
            inputs.push(id);
        }
        let outputs: Vec<ScratchId> = self
            .writes
            .iter()
            .map(|&(name, columns, element)| builder.scratch(name, self.rows, columns, element))
            .collect();
        builder.push(make(&inputs, &outputs));
        let plan: Arc<Plan> = Arc::new(builder.finish(None, outputs.clone()));
        assert_eq!(plan.steps.len(), 1);
        let mut keep = Keep {
            wanted: outputs,
            values: Vec::new(),
        };
        let launch = Launch {
            tokens: &vec![0; self.rows],
            sessions: &mut [runner.session.as_mut()],
            preset: &preset,
            token_limit: u32::MAX,
            sampling: &[],
            observer: Some(&mut keep),
        };
        runner.device.execute(&plan, launch).unwrap();
        keep.values
    }
}

/// Rows of one sequence, in f32.
fn class_of(rows: usize) -> PlanClass {
    PlanClass {
        phase: Phase::Prefill,
        precision: Precision::F32,
        rows,
        context: 4_096,
        output: PlanOutput::State,
    }
}

fn assert_close(what: &str, found: &[f32], expected: &[f32], bound: f64) {
    let (relative, largest) = distance(found, expected);
    assert!(
        relative <= bound,
        "{what}: rel. RMS {relative:.2e}, largest {largest:.2e}"
    );
}

fn in_first(role: WeightRole) -> WeightId {
    WeightId::in_layer(0, role)
}

const F32: ElementType = ElementType::F32;

#[test]
fn rms_norm() {
    let goldens = goldens();
    let mut model = Synthetic::small(json!({"hidden_size": 256}));
    model.given.insert(
        "model.layers.0.input_layernorm".into(),
        goldens["rms.w"].1.clone(),
    );
    for mut runner in both(&model) {
        let step = OneStep {
            rows: 3,
            reads: vec![("x", 3, &goldens["rms.x"].1)],
            writes: vec![("y", 256, F32)],
        };
        let found = step.run(&mut runner, |inputs, outputs| Operation::RmsNorm {
            input: inputs[0],
            weight: in_first(WeightRole::InputNorm),
            output: outputs[0],
        });
        assert_close("rms norm", &found[0], &goldens["rms.y"].1, 5e-7);
    }
}

#[test]
fn gated_norm() {
    let goldens = goldens();
    let mut model = Synthetic::small(json!({
        "linear_num_key_heads": 1, "linear_num_value_heads": 1, "linear_value_head_dim": 128,
    }));
    model.given.insert(
        "model.layers.0.linear_attn.norm".into(),
        goldens["gated_norm.w"].1.clone(),
    );
    for mut runner in both(&model) {
        let step = OneStep {
            rows: 3,
            reads: vec![
                ("x", 3, &goldens["gated_norm.x"].1),
                ("z", 3, &goldens["gated_norm.z"].1),
            ],
            writes: vec![("y", 128, F32)],
        };
        let found = step.run(&mut runner, |inputs, outputs| Operation::GatedNorm {
            input: inputs[0],
            gate: inputs[1],
            weight: in_first(WeightRole::DeltaNorm),
            output: outputs[0],
        });
        assert_close("gated norm", &found[0], &goldens["gated_norm.y"].1, 5e-7);
    }
}

#[test]
fn convolution_and_its_history() {
    let goldens = goldens();
    let mut model = Synthetic::small(json!({
        "linear_num_key_heads": 1, "linear_key_head_dim": 16,
        "linear_num_value_heads": 2, "linear_value_head_dim": 16,
    }));
    model.given.insert(
        "model.layers.0.linear_attn.conv1d".into(),
        goldens["conv.w"].1.clone(),
    );
    for mut runner in both(&model) {
        let live = StateSlot::ConvolutionHistory(0, StateCopy::Live);
        runner
            .session
            .write(live, &goldens["conv.history"].1)
            .unwrap();
        let step = OneStep {
            rows: 5,
            reads: vec![("x", 5, &goldens["conv.x"].1)],
            writes: vec![("y", 64, F32)],
        };
        let found = step.run(&mut runner, |inputs, outputs| Operation::Convolve {
            layer: 0,
            input: inputs[0],
            taps: in_first(WeightRole::DeltaConv),
            output: outputs[0],
        });
        assert_close("convolution", &found[0], &goldens["conv.y"].1, 5e-7);
        assert_eq!(runner.session.read(live), goldens["conv.history_out"].1);
    }
}

#[test]
fn gated_delta_steps_with_a_zero_key() {
    let goldens = goldens();
    // Recorded are the first 8 and the last 8 of each value head's 128 rows; no row depends on another.
    let mut model = Synthetic::small(json!({
        "linear_num_key_heads": 2, "linear_key_head_dim": 128,
        "linear_num_value_heads": 4, "linear_value_head_dim": 16,
    }));
    model.given.insert(
        "model.layers.0.linear_attn.A_log".into(),
        goldens["gdn.A_log"].1.clone(),
    );
    model.given.insert(
        "model.layers.0.linear_attn.dt_bias".into(),
        goldens["gdn.dt_bias"].1.clone(),
    );
    let rows = 6;
    let row = |name: &str, row: usize| {
        let values = &goldens[name].1;
        let width = values.len() / rows;
        values[row * width..(row + 1) * width].to_vec()
    };
    // Queries, keys and values side by side, as the convolution leaves them.
    let side_by_side = |names: &[&str]| -> Vec<f32> {
        (0..rows)
            .flat_map(|r| names.iter().flat_map(move |name| row(name, r)))
            .collect()
    };
    let convolved = side_by_side(&["gdn.q", "gdn.k", "gdn.v"]);
    for mut runner in both(&model) {
        let prepare = OneStep {
            rows,
            reads: vec![
                ("convolved", rows, &convolved),
                ("a", rows, &goldens["gdn.a"].1),
                ("b", rows, &goldens["gdn.b"].1),
            ],
            writes: vec![
                ("query-key", 512, F32),
                ("decay", 4, F32),
                ("strength", 4, F32),
            ],
        };
        let prepared = prepare.run(&mut runner, |inputs, outputs| Operation::DeltaPrepare {
            convolved: inputs[0],
            a: inputs[1],
            b: inputs[2],
            a_log: in_first(WeightRole::DeltaALog),
            dt_bias: in_first(WeightRole::DeltaDtBias),
            query_key: outputs[0],
            decay: outputs[1],
            strength: outputs[2],
        });
        let normalised = side_by_side(&["gdn.qn", "gdn.kn"]);
        assert_close("normalised", &prepared[0], &normalised, 1e-6);

        let live = StateSlot::RecurrentState(0, StateCopy::Live);
        runner
            .session
            .write(live, &goldens["gdn.state_in"].1)
            .unwrap();
        let scan = OneStep {
            rows,
            reads: vec![
                ("query-key", rows, &prepared[0]),
                ("convolved", rows, &convolved),
                ("decay", rows, &prepared[1]),
                ("strength", rows, &prepared[2]),
            ],
            writes: vec![("y", 64, F32)],
        };
        let found = scan.run(&mut runner, |inputs, outputs| Operation::DeltaScan {
            layer: 0,
            query_key: inputs[0],
            convolved: inputs[1],
            decay: inputs[2],
            strength: inputs[3],
            output: outputs[0],
        });
        assert_close("y", &found[0], &goldens["gdn.y"].1, 2e-6);
        let state = runner.session.read(live);
        assert_close("state", &state, &goldens["gdn.state_out"].1, 2e-6);
    }
}

/// Positions up to the end of the context. The angle's own rounding grows with the position: in its cosine MLX and
/// Hugging Face differ by a quarter of these bounds (fixtures/oracle-ops/ops.json), and values go up to four.
#[test]
fn rotary_embedding_at_recorded_positions() {
    let goldens = goldens();
    let model = Synthetic::small(json!({
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 256,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25
        },
    }));
    for mut runner in both(&model) {
        for (position, bound) in [
            (0, 0.0),
            (1, 4e-6),
            (2, 4e-6),
            (100, 2e-5),
            (4_095, 4e-4),
            (100_000, 8e-3),
            (262_143, 1.6e-2),
        ] {
            runner.session = runner.device.new_session(Precision::F32, 262_144).unwrap();
            skip_to(&mut runner, position);
            let step = OneStep {
                rows: 1,
                reads: vec![("x", 1, &goldens["rope.x"].1)],
                writes: vec![("y", 512, F32)],
            };
            let found = step.run(&mut runner, |inputs, outputs| Operation::Rotate {
                input: inputs[0],
                output: outputs[0],
            });
            let expected = &goldens[&format!("rope.pos{position}")].1;
            let (_, largest) = distance(&found[0], expected);
            assert!(largest <= bound, "position {position}: {largest:.2e}");
        }
    }
}

/// Moves a session on without computing anything: an empty plan over many rows.
fn skip_to(runner: &mut Runner<CpuDevice>, position: usize) {
    if position == 0 {
        return;
    }
    let class = PlanClass {
        phase: Phase::Prefill,
        precision: Precision::F32,
        rows: position,
        context: 262_144,
        output: PlanOutput::State,
    };
    let plan = Arc::new(PlanBuilder::new(&runner.model, class).finish(None, Vec::new()));
    runner.run(&plan, &vec![0; position]);
    assert_eq!(runner.session.position(), position);
}

#[test]
fn router() {
    let goldens = goldens();
    let model = Synthetic::small(json!({"num_experts": 256, "num_experts_per_tok": 8}));
    for mut runner in both(&model) {
        let step = OneStep {
            rows: 4,
            reads: vec![("logits", 4, &goldens["router.logits"].1)],
            writes: vec![("ids", 8, ElementType::U32), ("weights", 8, F32)],
        };
        let found = step.run(&mut runner, |inputs, outputs| Operation::Route {
            logits: inputs[0],
            ids: outputs[0],
            weights: outputs[1],
        });
        assert_eq!(found[0], goldens["router.ids_desc"].1);
        assert_close("weights", &found[1], &goldens["router.scores"].1, 1e-6);
    }
}

/// The tie-break: of equal logits the lower id comes first, at the k-th place too.
#[test]
fn router_ties_go_to_the_lower_id() {
    let model = Synthetic::small(json!({"num_experts": 6, "num_experts_per_tok": 3}));
    let logits = [1.0, 2.0, 2.0, 1.0, 1.0, -0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0];
    for mut runner in both(&model) {
        let step = OneStep {
            rows: 2,
            reads: vec![("logits", 2, &logits)],
            writes: vec![("ids", 3, ElementType::U32), ("weights", 3, F32)],
        };
        let found = step.run(&mut runner, |inputs, outputs| Operation::Route {
            logits: inputs[0],
            ids: outputs[0],
            weights: outputs[1],
        });
        assert_eq!(found[0], [1.0, 2.0, 0.0, 0.0, 1.0, 2.0]);
        let sum: f32 = found[1][..3].iter().sum();
        assert!((sum - 1.0).abs() < 1e-6 && (found[1][3] - 1.0 / 3.0).abs() < 1e-6);
    }
}

/// Products with the recorded weights of every affine width and group.
#[test]
fn products_of_every_format() {
    let path = repository("fixtures/oracle-ops/quant.safetensors");
    let (stored, goldens) = (read_stored(&path), read_tensors(&path));
    let mut formats = 0;
    for bits in [2, 3, 4, 5, 6, 8] {
        for group in [32, 64, 128] {
            let name = format!("affine.b{bits}.g{group}");
            let part = |part: &str| stored[&format!("{name}.{part}")].clone();
            let mut model = Synthetic::small(json!({"num_experts": 4}));
            let packed = Packed {
                codes: part("weight"),
                scales: part("scales"),
                biases: part("biases"),
            };
            model
                .packed
                .insert("model.layers.0.mlp.gate".into(), packed);
            for mut runner in both(&model) {
                let step = OneStep {
                    rows: 3,
                    reads: vec![("x", 3, &goldens[&format!("{name}.x")].1)],
                    writes: vec![("y", 4, F32)],
                };
                let found = step.run(&mut runner, |inputs, outputs| Operation::Project {
                    input: inputs[0],
                    weight: in_first(WeightRole::Router),
                    output: outputs[0],
                    arithmetic: WeightArithmetic::Exact,
                });
                assert_close(&name, &found[0], &goldens[&format!("{name}.y")].1, 1e-6);
            }
            formats += 1;
        }
    }
    assert_eq!(formats, 18);
}

/// Products of rows with the experts they chose.
#[test]
fn products_with_chosen_experts() {
    let path = repository("fixtures/oracle-ops/quant.safetensors");
    let (stored, goldens) = (read_stored(&path), read_tensors(&path));
    let part = |part: &str| stored[&format!("gather.{part}")].clone();
    let mut model = Synthetic::small(json!({
        "hidden_size": 64, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2,
    }));
    for layer in 0..2 {
        let path = format!("language_model.model.layers.{layer}.mlp.switch_mlp.down_proj");
        model.config["quantization"][path] = json!(false);
    }
    let packed = Packed {
        codes: part("weight"),
        scales: part("scales"),
        biases: part("biases"),
    };
    model
        .packed
        .insert("model.layers.0.mlp.switch_mlp.gate_proj".into(), packed);
    let ids: Vec<f32> = stored["gather.idx"]
        .1
        .chunks_exact(4)
        .map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]]) as f32)
        .collect();
    for mut runner in both(&model) {
        for grouped in [false, true] {
            let class = class_of(5);
            let mut builder = PlanBuilder::new(&runner.model, class);
            builder.set_layer(Some(0));
            let input = builder.scratch("x", 5, 64, F32);
            let chosen = builder.scratch("ids", 5, 2, ElementType::U32);
            let grouping = builder.scratch("grouping", 1, 4 + 1 + 10, ElementType::U32);
            let output = builder.scratch("y", 10, 16, F32);
            if grouped {
                builder.push(Operation::GroupExperts {
                    ids: chosen,
                    grouping,
                });
            }
            builder.push(Operation::ExpertProject {
                input,
                ids: chosen,
                grouping: grouped.then_some(grouping),
                weight: in_first(WeightRole::ExpertGateProjection),
                output,
                arithmetic: WeightArithmetic::Exact,
            });
            let plan = Arc::new(builder.finish(None, vec![output]));
            let mut keep = Keep {
                wanted: vec![output],
                values: Vec::new(),
            };
            let launch = Launch {
                tokens: &[0; 5],
                sessions: &mut [runner.session.as_mut()],
                preset: &[
                    (input, goldens["gather.x"].1.clone()),
                    (chosen, ids.clone()),
                ],
                token_limit: u32::MAX,
                sampling: &[],
                observer: Some(&mut keep),
            };
            runner.device.execute(&plan, launch).unwrap();
            assert_close("experts", &keep.values[0], &goldens["gather.y"].1, 1e-6);
        }
    }
}

/// Every intermediate value that is recorded, by the names that expanded plans give them.
#[test]
fn intermediate_values_of_the_small_oracles() {
    for name in ["oracle-small-a", "oracle-small-b", "oracle-small-c"] {
        let Some(directory) = lily_testing::fixture(name) else {
            assert_eq!(name, "oracle-small-a", "the others are in the repository");
            continue;
        };
        let goldens = read_tensors(&directory.join("golden.safetensors"));
        let prompt = lily_testing::golden_prompts(&directory)
            .into_iter()
            .find(|prompt| prompt.name == "p17")
            .unwrap();
        for options in [native(), reference()] {
            let mut runner = common::open(&directory, Precision::F32, &options);
            runner.expanded = true;
            let plan = runner.plan(Phase::Prefill, 17, PlanOutput::AllLogits);
            let mut seen = Seen {
                plan: plan.clone(),
                values: HashMap::new(),
            };
            let launch = Launch {
                tokens: &prompt.tokens,
                sessions: &mut [runner.session.as_mut()],
                preset: &[],
                token_limit: u32::MAX,
                sampling: &[],
                observer: Some(&mut seen),
            };
            runner.device.execute(&plan, launch).unwrap();
            let config = &runner.model.config;
            let (shape, hidden) = &goldens["p17.hidden"];
            let hidden: Vec<&[f32]> = hidden.chunks(shape[1] * config.hidden_size).collect();
            assert_eq!(hidden.len(), config.layers + 2, "{name}");
            let states = (0..config.layers).map(|layer| seen.get(Some(layer), "residual", 1));
            let states = std::iter::once(seen.get(None, "embedded", 0))
                .chain(states)
                .chain([seen.get(None, "normed", 0)]);
            for (index, (found, expected)) in states.zip(hidden).enumerate() {
                let found = recorded_rows(&goldens, shape[1], &found);
                let bound = if index == 0 { 1e-7 } else { 1e-5 };
                assert_close(&format!("{name}: state {index}"), &found, expected, bound);
            }
            let mut compared = 0;
            for layer in [0, 3] {
                let golden = |what: &str| goldens.get(&format!("p17.l{layer}.{what}"));
                for (value, nth, what) in [
                    ("normed", 0, "input_norm"),
                    ("projected", 0, "mixer_out"),
                    ("normed", 1, "post_norm"),
                    ("router-logits", 0, "router_logits"),
                    ("shared-gate", 0, "shared_gate_logit"),
                    ("shared-output", 0, "shared_out"),
                    ("combined", 0, "moe_out"),
                    ("z", 0, "gdn.in_proj_z"),
                    ("b", 0, "gdn.in_proj_b"),
                    ("a", 0, "gdn.in_proj_a"),
                    ("convolved", 0, "gdn.conv1d"),
                    ("mixed", 0, "gdn.norm"),
                    ("normed-queries", 0, "attn.q_norm"),
                    ("normed-keys", 0, "attn.k_norm"),
                ] {
                    let Some((shape, expected)) = golden(what) else {
                        continue;
                    };
                    let mut expected = expected.clone();
                    if what == "gdn.conv1d" {
                        // Recorded before silu.
                        expected.iter_mut().for_each(|x| *x /= 1.0 + (-*x).exp());
                    }
                    let found = seen.get(Some(layer), value, nth);
                    let found = recorded_rows(&goldens, shape[0], &found);
                    assert_close(&format!("{name}: {what}"), &found, &expected, 1e-5);
                    compared += 1;
                }
                let mut ids = seen.get(Some(layer), "expert-ids", 0);
                for row in ids.chunks_mut(config.experts_per_token) {
                    row.sort_by(f32::total_cmp);
                }
                assert_eq!(
                    ids,
                    golden("topk_ids").unwrap().1,
                    "{name}: topk_ids of layer {layer}"
                );
            }
            let recorded = goldens
                .keys()
                .filter(|key| key.starts_with("p17.l0.") || key.starts_with("p17.l3."))
                .filter(|key| !key.contains("cache") && !key.contains("topk"))
                .count();
            assert_eq!(
                compared, recorded,
                "{name}: everything that is recorded is compared"
            );
            let read = |slot| runner.session.read(slot);
            let history = read(StateSlot::ConvolutionHistory(2, StateCopy::Live));
            assert_close("history", &history, &goldens["p17.l2.conv_state"].1, 1e-5);
            let state = read(StateSlot::RecurrentState(2, StateCopy::Live));
            // Of the first and the last head the first and the last few rows.
            let (shape, expected) = &goldens["p17.l2.gdn_state_first_last"];
            let head = config.linear_value_dim * config.linear_key_dim;
            let kept = shape[1] / 2 * config.linear_key_dim;
            let last = state.len() - head;
            let ends = [0, head - kept, last, state.len() - kept]
                .map(|start| &state[start..start + kept])
                .concat();
            assert_close("state", &ends, expected, 1e-5);
            for (slot, what) in [
                (StateSlot::KeyCache(3), "k_cache"),
                (StateSlot::ValueCache(3), "v_cache"),
            ] {
                let (shape, expected) = &goldens[&format!("p17.l3.{what}")];
                let cache = read(slot);
                let found: Vec<f32> = cache
                    .chunks(cache.len() / shape[0])
                    .flat_map(|head| recorded_rows(&goldens, shape[1], head))
                    .collect();
                assert_close(what, &found, expected, 1e-5);
            }
        }
    }
}

/// Of all 17 rows of a value those that are recorded: all, or those of the larger ones.
fn recorded_rows(goldens: &Tensors, recorded: usize, values: &[f32]) -> Vec<f32> {
    if recorded == 17 {
        return values.to_vec();
    }
    let rows: Vec<&[f32]> = values.chunks(values.len() / 17).collect();
    let kept = &goldens["p17.rows_kept"].1;
    kept.iter()
        .flat_map(|&at| rows[at as usize].to_vec())
        .collect()
}

/// Every value that a plan writes, by layer and name, in order.
struct Seen {
    plan: Arc<Plan>,
    values: HashMap<(Option<u16>, &'static str), Vec<Vec<f32>>>,
}

impl Observer for Seen {
    fn after_step(&mut self, index: usize, read: &dyn Fn(ScratchId) -> Vec<f32>) {
        for resource in self.plan.steps[index].operation.access().writes {
            if let lily_plan::Resource::Scratch(id) = resource {
                let spec = self.plan.spec(id);
                self.values
                    .entry((spec.layer, spec.name))
                    .or_default()
                    .push(read(id));
            }
        }
    }
}

impl Seen {
    fn get(&self, layer: Option<usize>, name: &'static str, nth: usize) -> Vec<f32> {
        self.values[&(layer.map(|layer| layer as u16), name)][nth].clone()
    }
}
