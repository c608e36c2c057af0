//! The CPU device at its edges: large arguments, ties, resets, refusals, and the comparison itself.

mod common;

use common::{native, on, reference};
use lily_checkpoint::{Checkpoint, WeightId, WeightRole};
use lily_cpu::CpuDevice;
use lily_plan::{
    Device, DeviceError, ElementType, Launch, Observer, Operation, Phase, Plan, PlanBuilder,
    PlanClass, PlanOutput, Precision, Resource, ScratchId, StateCopy, StateSlot, WeightArithmetic,
};
use lily_testing::{Runner, Synthetic, repository};
use serde_json::json;
use std::sync::Arc;

fn tiny() -> Arc<Checkpoint> {
    Arc::new(Checkpoint::open(&repository("models/lily-tiny")).unwrap())
}

fn tokens(seed: u32, count: u32) -> Vec<u32> {
    (0..count)
        .map(|i| (i + seed).wrapping_mul(2_654_435_761) % 4_000)
        .collect()
}

// ---- sessions.rs ----

/// Whichever of the two copies of a state is live when it is emptied.
#[test]
fn a_session_that_was_reset_is_as_new() {
    let prompt = tokens(1, 10);
    let mut new = on(tiny(), Precision::Bf16, &native());
    let expected = new.prefill(&prompt, 64);
    let mut runner = on(tiny(), Precision::Bf16, &native());
    for runs in [1, 2] {
        for _ in 0..runs {
            runner.prefill(&tokens(2, 300), 512);
        }
        let resident = runner.session.resident_bytes();
        runner.session.reset();
        assert_eq!(runner.session.position(), 0);
        assert!(!runner.session.step_back(), "nothing to take back");
        assert!(runner.prefill(&prompt, 64) == expected, "after {runs} runs");
        // Pages stay with the session.
        assert_eq!(runner.session.resident_bytes(), resident);
        runner.session.reset();
    }
}

/// What is written to a slot is read from it, and from no other; the other copy holds what was live
/// before the last run.
#[test]
fn slots_are_read_as_they_were_written() {
    use StateCopy::{Live, Next};
    use StateSlot::{ConvolutionHistory, KeyCache, RecurrentState, ValueCache};
    for precision in [Precision::F32, Precision::Bf16] {
        let mut runner = on(Synthetic::small(json!({})).open(), precision, &native());
        runner.prefill(&[1, 2, 3, 4, 5], 64);
        // Two KV heads, five positions, 64 columns.
        assert_eq!(runner.session.read(KeyCache(1)).len(), 2 * 5 * 64);
        let slots = [
            KeyCache(1),
            ValueCache(1),
            ConvolutionHistory(0, Live),
            RecurrentState(0, Live),
        ];
        for slot in slots {
            let others: Vec<_> = slots.iter().filter(|&&other| other != slot).collect();
            let before: Vec<_> = others
                .iter()
                .map(|&&slot| runner.session.read(slot))
                .collect();
            let length = runner.session.read(slot).len();
            let values: Vec<f32> = (0..length).map(|i| (i % 251) as f32 - 100.0).collect();
            runner.session.write(slot, &values).unwrap();
            assert_eq!(runner.session.read(slot), values, "{slot:?}");
            let after: Vec<_> = others
                .iter()
                .map(|&&slot| runner.session.read(slot))
                .collect();
            assert!(before == after, "{slot:?}");
            assert!(runner.session.write(slot, &values[1..]).is_err());
        }
        let live = [ConvolutionHistory(0, Live), RecurrentState(0, Live)];
        let before = live.map(|slot| runner.session.read(slot));
        runner.feed(&[6]);
        let next = [ConvolutionHistory(0, Next), RecurrentState(0, Next)];
        assert!(next.map(|slot| runner.session.read(slot)) == before);
        assert!(runner.session.step_back());
        assert!(live.map(|slot| runner.session.read(slot)) == before);
    }
}

#[test]
fn a_decode_plan_refuses_positions_beyond_its_context() {
    let mut runner = on(tiny(), Precision::F32, &native());
    runner.prefill(&tokens(1, 7), 64);
    let class = PlanClass {
        phase: Phase::Decode,
        precision: Precision::F32,
        rows: 1,
        context: 8,
        output: PlanOutput::Token,
    };
    let plan = Arc::new(Plan::record(&runner.model, class));
    runner.run(&plan, &[1]);
    let launch = Launch {
        tokens: &[1],
        sessions: &mut [runner.session.as_mut()],
        preset: &[],
        token_limit: u32::MAX,
        sampling: &[],
        observer: None,
    };
    match runner.device.execute(&plan, launch) {
        Err(DeviceError::Launch(reason)) => assert!(reason.contains("position 9"), "{reason}"),
        other => panic!("{other:?}"),
    }
    assert_eq!(runner.session.position(), 8);
}

// ---- operations.rs (with OneStep; here a plain version of it) ----

fn both(model: &Synthetic) -> [Runner<CpuDevice>; 2] {
    let checkpoint = model.open();
    [native(), reference()].map(|options| on(checkpoint.clone(), Precision::F32, &options))
}

fn one_row(runner: &Runner<CpuDevice>) -> PlanBuilder {
    let class = PlanClass {
        phase: Phase::Prefill,
        precision: Precision::F32,
        rows: 1,
        context: 4_096,
        output: PlanOutput::State,
    };
    PlanBuilder::new(&runner.model, class)
}

/// Runs a plan over one row of token 0; the values of `kept` and the outcome's tokens.
fn run(
    runner: &mut Runner<CpuDevice>,
    builder: PlanBuilder,
    preset: &[(ScratchId, Vec<f32>)],
    kept: Vec<ScratchId>,
    token_limit: u32,
) -> (Vec<Vec<f32>>, Vec<u32>) {
    struct Keep(Vec<ScratchId>, usize, Vec<Vec<f32>>);
    impl Observer for Keep {
        fn after_step(&mut self, step: usize, read: &dyn Fn(ScratchId) -> Vec<f32>) {
            if step == self.1 {
                self.2 = self.0.iter().map(|&id| read(id)).collect();
            }
        }
    }
    let plan = Arc::new(builder.finish(None, kept.clone()));
    let mut keep = Keep(kept, plan.steps.len() - 1, Vec::new());
    let launch = Launch {
        tokens: &vec![0; plan.class.rows],
        sessions: &mut [runner.session.as_mut()],
        preset,
        token_limit,
        sampling: &[],
        observer: Some(&mut keep),
    };
    let outcome = runner.device.execute(&plan, launch).unwrap();
    (keep.2, outcome.tokens)
}

/// Of equal logits the lower id is chosen, and never one at or above the limit.
#[test]
fn the_lower_of_equal_logits_below_the_limit_is_chosen() {
    let row = vec![1.0, 3.0, 2.0, 3.0, 4.0, 5.0, 4.0, 5.0];
    for mut runner in both(&Synthetic::small(json!({}))) {
        for (limit, expected) in [(u32::MAX, 5), (8, 5), (6, 5), (5, 4), (4, 1), (1, 0)] {
            let mut builder = one_row(&runner);
            let logits = builder.scratch("logits", 1, 8, ElementType::F32);
            builder.push(Operation::ArgMax { logits });
            let preset = [(logits, row.clone())];
            let (_, chosen) = run(&mut runner, builder, &preset, Vec::new(), limit);
            assert_eq!(chosen, [expected], "limit {limit}");
        }
    }
}

/// Scores as far apart as exponentials reach: the largest is taken out before, over all blocks.
#[test]
fn attention_bears_large_scores() {
    let columns = 64;
    for (at, first) in [(3, 200.0), (3, -200.0), (99, 200.0), (99, -200.0)] {
        for mut runner in both(&Synthetic::small(json!({}))) {
            // 100 positions without computing anything.
            let mut class = one_row(&runner).class;
            class.rows = 100;
            let empty = PlanBuilder::new(&runner.model, class).finish(None, Vec::new());
            runner.run(&Arc::new(empty), &[0; 100]);
            // One key's score is `first`, all others are 0; its value is 1, all others are 2.
            let (mut keys, mut values) =
                (vec![0.0; 2 * 100 * columns], vec![2.0; 2 * 100 * columns]);
            for head in 0..2 {
                let row = (head * 100 + at) * columns;
                keys[row] = first;
                values[row..row + columns].fill(1.0);
            }
            runner.session.write(StateSlot::KeyCache(1), &keys).unwrap();
            runner
                .session
                .write(StateSlot::ValueCache(1), &values)
                .unwrap();
            runner.session.step_back();
            let mut class = one_row(&runner).class;
            class.rows = 100;
            let mut builder = PlanBuilder::new(&runner.model, class);
            let queries = builder.scratch("queries", 100, 4 * columns, ElementType::F32);
            let output = builder.scratch("output", 100, 4 * columns, ElementType::F32);
            builder.push(Operation::Attention {
                layer: 1,
                queries,
                output,
            });
            let mut query = vec![0.0; 100 * 4 * columns];
            // Times 1/sqrt(64).
            query.iter_mut().step_by(columns).for_each(|x| *x = 8.0);
            let kept = vec![output];
            let (found, _) = run(&mut runner, builder, &[(queries, query.clone())], kept, 0);
            let whole = found[0][99 * 4 * columns..].to_vec();
            let expected = if first > 0.0 { 1.0 } else { 2.0 };
            assert!(
                whole.iter().all(|x| (x - expected).abs() < 1e-6),
                "{first} at {at}: {:?}",
                &whole[..4]
            );
            // By blocks of 32, for the last row alone.
            runner.session.step_back();
            let mut class = one_row(&runner).class;
            class.rows = 99;
            let empty = PlanBuilder::new(&runner.model, class).finish(None, Vec::new());
            runner.run(&Arc::new(empty), &[0; 99]);
            class.rows = 1;
            class.phase = Phase::Decode;
            class.context = 128;
            let mut builder = PlanBuilder::new(&runner.model, class);
            let queries = builder.scratch("queries", 1, 4 * columns, ElementType::F32);
            let partials = builder.scratch("partials", 1, 4 * 4 * (columns + 2), ElementType::F32);
            let output = builder.scratch("output", 1, 4 * columns, ElementType::F32);
            builder.push(Operation::AttentionPartial {
                layer: 1,
                queries,
                block_length: 32,
                output: partials,
            });
            builder.push(Operation::AttentionMerge {
                partials,
                block_length: 32,
                output,
            });
            let preset = [(queries, query[..4 * columns].to_vec())];
            let (found, _) = run(&mut runner, builder, &preset, vec![output], 0);
            assert!(
                found[0].iter().all(|x| (x - expected).abs() < 1e-6),
                "{first} at {at}"
            );
        }
    }
}

#[test]
fn routing_bears_large_logits() {
    let model = Synthetic::small(json!({"num_experts": 4, "num_experts_per_tok": 2}));
    for mut runner in both(&model) {
        for offset in [300.0, -300.0] {
            let mut builder = one_row(&runner);
            let logits = builder.scratch("logits", 1, 4, ElementType::F32);
            let ids = builder.scratch("ids", 1, 2, ElementType::U32);
            let weights = builder.scratch("weights", 1, 2, ElementType::F32);
            builder.push(Operation::Route {
                logits,
                ids,
                weights,
            });
            let row = [0.0, 2.0, -1.0, 1.0].map(|x| x + offset).to_vec();
            let (found, _) = run(
                &mut runner,
                builder,
                &[(logits, row)],
                vec![ids, weights],
                0,
            );
            assert_eq!(found[0], [1.0, 3.0]);
            let expected = 1.0 / (1.0 + (-1.0f32).exp());
            assert!((found[1][0] - expected).abs() < 1e-6, "{:?}", found[1]);
        }
    }
}

/// Decay far from 0 on either side of softplus: `exp(−exp(A_log) · softplus(a + dt_bias))`.
#[test]
fn decay_bears_large_arguments() {
    let mut model = Synthetic::small(json!({}));
    let layer = "model.layers.0.linear_attn";
    model.given.insert(format!("{layer}.A_log"), vec![-10.0; 4]);
    model.given.insert(format!("{layer}.dt_bias"), vec![0.0; 4]);
    let in_first = |role| WeightId::in_layer(0, role);
    for mut runner in both(&model) {
        let mut builder = one_row(&runner);
        builder.set_layer(Some(0));
        let convolved = builder.scratch("convolved", 1, 512, ElementType::F32);
        let a = builder.scratch("a", 1, 4, ElementType::F32);
        let b = builder.scratch("b", 1, 4, ElementType::F32);
        let query_key = builder.scratch("query-key", 1, 256, ElementType::F32);
        let decay = builder.scratch("decay", 1, 4, ElementType::F32);
        let strength = builder.scratch("strength", 1, 4, ElementType::F32);
        builder.push(Operation::DeltaPrepare {
            convolved,
            a,
            b,
            a_log: in_first(WeightRole::DeltaALog),
            dt_bias: in_first(WeightRole::DeltaDtBias),
            query_key,
            decay,
            strength,
        });
        let arguments = [200.0, 1_000.0, -200.0, 0.0];
        let preset = [
            (convolved, vec![0.5; 512]),
            (a, arguments.to_vec()),
            (b, vec![200.0, -200.0, 0.0, 1_000.0]),
        ];
        let (found, _) = run(&mut runner, builder, &preset, vec![decay, strength], 0);
        for (&found, x) in found[0].iter().zip(arguments) {
            let x = f64::from(x);
            let softplus = if x > 50.0 { x } else { x.exp().ln_1p() };
            let expected = (-(-10.0f64).exp() * softplus).exp();
            assert!((f64::from(found) - expected).abs() < 1e-6, "{x}: {found}");
        }
        let expected = [1.0, 0.0, 0.5, 1.0];
        assert!(
            found[1]
                .iter()
                .zip(expected)
                .all(|(x, y)| (x - y).abs() < 1e-6)
        );
    }
}

/// The epsilon is added to the square of a head's length, which shows where heads are short:
/// `x / sqrt(Σx² + 1e-6)`, queries also divided by `sqrt(Dk)`.
#[test]
fn short_heads_are_normalised_with_the_epsilon_inside() {
    let model = Synthetic::small(json!({}));
    let in_first = |role| WeightId::in_layer(0, role);
    for mut runner in both(&model) {
        let mut builder = one_row(&runner);
        builder.set_layer(Some(0));
        let convolved = builder.scratch("convolved", 1, 512, ElementType::F32);
        let [a, b, decay, strength] = ["a", "b", "decay", "strength"]
            .map(|name| builder.scratch(name, 1, 4, ElementType::F32));
        let query_key = builder.scratch("query-key", 1, 256, ElementType::F32);
        builder.push(Operation::DeltaPrepare {
            convolved,
            a,
            b,
            a_log: in_first(WeightRole::DeltaALog),
            dt_bias: in_first(WeightRole::DeltaDtBias),
            query_key,
            decay,
            strength,
        });
        let preset = [
            (convolved, vec![1e-4; 512]),
            (a, vec![0.0; 4]),
            (b, vec![0.0; 4]),
        ];
        let (found, _) = run(&mut runner, builder, &preset, vec![query_key], 0);
        let key = 1e-4 / (64.0 * 1e-8 + 1e-6f32).sqrt();
        for (index, &x) in found[0].iter().enumerate() {
            let expected = if index < 128 { key / 8.0 } else { key };
            assert!(
                (x - expected).abs() < 1e-6 * expected,
                "{index}: {x}, {expected}"
            );
        }
    }
}

/// The angle is the f32 product of position and frequency, in both implementations: far out that shows.
#[test]
fn angles_far_out_are_products_in_f32() {
    let model = Synthetic::small(json!({}));
    let mut found = both(&model).map(|mut runner| {
        let mut class = one_row(&runner).class;
        class.rows = 200_003;
        class.context = 262_144;
        runner.session = runner.device.new_session(Precision::F32, 262_144).unwrap();
        let empty = PlanBuilder::new(&runner.model, class).finish(None, Vec::new());
        runner.run(&Arc::new(empty), &vec![0; class.rows]);
        let mut builder = one_row(&runner);
        let input = builder.scratch("input", 1, 256, ElementType::F32);
        let output = builder.scratch("output", 1, 256, ElementType::F32);
        builder.push(Operation::Rotate { input, output });
        let preset = [(input, vec![1.0; 256])];
        run(&mut runner, builder, &preset, vec![output], 0)
            .0
            .remove(0)
    });
    // cos − sin and cos + sin of the second pair of eight, whose frequency is theta^(−1/8).
    let frequency = 10_000_000f64.powf(-0.125) as f32;
    let (sin, cos) = f64::from(200_003.0f32 * frequency).sin_cos();
    for found in &mut found {
        assert!(
            (f64::from(found[1]) - (cos - sin)).abs() < 1e-6,
            "{}",
            found[1]
        );
        assert!(
            (f64::from(found[9]) - (cos + sin)).abs() < 1e-6,
            "{}",
            found[9]
        );
    }
}

// ---- steps.rs ----

/// Every value of type bf16 is rounded to it, fused or not, in either implementation.
#[test]
fn what_is_declared_bf16_is_rounded_to_bf16() {
    struct Rounded(Arc<Plan>, usize);
    impl Observer for Rounded {
        fn after_step(&mut self, step: usize, read: &dyn Fn(ScratchId) -> Vec<f32>) {
            for resource in self.0.steps[step].operation.access().writes {
                let Resource::Scratch(id) = resource else {
                    continue;
                };
                if self.0.spec(id).element == ElementType::Bf16 {
                    let whole = read(id).iter().all(|x| x.to_bits() & 0xffff == 0);
                    assert!(
                        whole,
                        "{}: {}",
                        self.0.steps[step].label(),
                        self.0.spec(id).name
                    );
                    self.1 += 1;
                }
            }
        }
    }
    let checkpoint = Synthetic::small(json!({})).open();
    for options in [native(), reference()] {
        for expanded in [false, true] {
            let mut runner = on(checkpoint.clone(), Precision::Bf16, &options);
            runner.expanded = expanded;
            for (phase, rows) in [(Phase::Prefill, 5), (Phase::Decode, 1)] {
                let plan = runner.plan(phase, rows, PlanOutput::AllLogits);
                let mut observer = Rounded(plan.clone(), 0);
                let launch = Launch {
                    tokens: &vec![3; rows],
                    sessions: &mut [runner.session.as_mut()],
                    preset: &[],
                    token_limit: u32::MAX,
                    sampling: &[],
                    observer: Some(&mut observer),
                };
                runner.device.execute(&plan, launch).unwrap();
                assert!(observer.1 > 10, "{}", observer.1);
            }
        }
    }
}

/// The comparison must be able to fail. The reference does not look at a grouping: with one that leaves
/// a pair out the native kernel does not write that pair, and what it leaves must be found.
#[test]
fn a_result_that_is_not_written_is_found() {
    let mut runner = on(
        Synthetic::small(json!({})).open(),
        Precision::F32,
        &native(),
    );
    for complete in [true, false] {
        let mut builder = one_row(&runner);
        builder.set_layer(Some(0));
        let input = builder.scratch("input", 1, 256, ElementType::F32);
        let ids = builder.scratch("ids", 1, 4, ElementType::U32);
        let grouping = builder.scratch("grouping", 1, 17 + 4, ElementType::U32);
        let output = builder.scratch("output", 4, 64, ElementType::F32);
        builder.push(Operation::ExpertProject {
            input,
            ids,
            grouping: Some(grouping),
            weight: WeightId::in_layer(0, WeightRole::ExpertUp),
            output,
            arithmetic: WeightArithmetic::Exact,
        });
        // Experts 0 to 3, a pair each; the last is left out.
        let pairs = if complete { 4 } else { 3 };
        let mut groups: Vec<f32> = (0..17).map(|expert| expert.min(pairs) as f32).collect();
        groups.extend([0.0, 1.0, 2.0, 3.0]);
        let preset = [
            (input, vec![1.0; 256]),
            (ids, vec![0.0, 1.0, 2.0, 3.0]),
            (grouping, groups),
        ];
        let plan = Arc::new(builder.finish(None, vec![output]));
        let launch = Launch {
            tokens: &[0],
            sessions: &mut [runner.session.as_mut()],
            preset: &preset,
            token_limit: u32::MAX,
            sampling: &[],
            observer: None,
        };
        let (_, differences) = runner.device.compare_steps(&plan, launch).unwrap();
        assert_eq!(differences[0].excess <= 1.0, complete, "{differences:?}");
    }
}

/// Bounds are no wider than rounding: products come near theirs, and so do the other operations.
#[test]
fn bounds_are_near_what_rounding_does() {
    let mut runner = on(tiny(), Precision::F32, &native());
    let plan = runner.plan(Phase::Prefill, 4, PlanOutput::AllLogits);
    let launch = Launch {
        tokens: &[1, 2, 3, 4],
        sessions: &mut [runner.session.as_mut()],
        preset: &[],
        token_limit: u32::MAX,
        sampling: &[],
        observer: None,
    };
    let (_, differences) = runner.device.compare_steps(&plan, launch).unwrap();
    let largest = |wanted: &[&str]| {
        differences
            .iter()
            .filter(|difference| wanted.iter().any(|name| difference.label.ends_with(name)))
            .map(|difference| difference.excess)
            .fold(0.0, f64::max)
    };
    let products = largest(&[
        "projections",
        "project-add",
        "expert-input",
        "expert-project",
    ]);
    let others = largest(&["rms-norm", "attention", "delta-scan", "gated-norm"]);
    println!("{products} {others}");
    assert!(products > 0.005 && others > 0.005, "{products}, {others}");
}
