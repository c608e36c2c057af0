//! Checks and times the kernels on an NVIDIA GPU, in one go:
//!
//! `cargo run --release -p lily-cuda --example measure -- [quick] [latency] [presets] [check] [speed] [steps] [batches]`
//!
//! - `quick`: the goldens, and every step of fused plans of small models against the reference;
//! - `latency`: what steps cost that do next to nothing;
//! - `presets`: whether what the host writes is there when kernels run;
//! - `check`: every step of small models against the reference, and the recorded goldens;
//! - `speed`: decode and prefill of a model of the real shapes with random weights (19.5 GB in TMPDIR);
//! - `steps`: each kind of step of that model alone, with the bandwidth it reaches;
//! - `batches`: the same for decode of several sessions together, behind 256 tokens, and no more.

use lily_checkpoint::Checkpoint;
use lily_cpu::{CpuDevice, CpuOptions, Kernels, compare_device};
use lily_cuda::{Cuda, CudaOptions};
use lily_gpu::{GpuDevice, GpuOptions, Stage};
use lily_plan::{
    Assumptions, Device, ElementType, Launch, Observer, Operation, Phase, Plan, PlanBuilder,
    PlanClass, PlanOutput, Precision, ScratchId, SessionState, route,
};
use lily_sampling::{SamplingParameters, SamplingRow};
use lily_testing::{
    Runner, Synthetic, arg_max, distance, fixture, golden_prompts, read_tensors, repository,
};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::slice::from_mut;
use std::sync::Arc;
use std::time::Instant;

fn main() {
    let wanted: Vec<String> = std::env::args().skip(1).collect();
    let wants = |name: &str| wanted.is_empty() || wanted.iter().any(|want| want == name);
    let gpu = Cuda::open(CudaOptions::default()).expect("a GPU");
    println!("{:?}", lily_gpu::Gpu::describe(&gpu));
    drop(gpu);
    if wants("latency") {
        latency();
    }
    if wants("presets") {
        presets_arrive();
    }
    if wants("check") || wants("quick") {
        check(!wants("check"));
    }
    if wants("speed") || wants("steps") {
        real(wants("speed"), wants("steps"));
    } else if wants("batches") {
        let mut runner = real_model();
        let tokens: Vec<u32> = (1..257).collect();
        let plan = runner.plan(Phase::Prefill, tokens.len(), PlanOutput::State);
        runner.run(&plan, &tokens);
        batches(&mut runner, tokens.len(), true);
    }
}

fn device(checkpoint: &Checkpoint) -> GpuDevice<Cuda> {
    let gpu = Cuda::open(CudaOptions::default()).expect("a GPU");
    GpuDevice::new(gpu, checkpoint, GpuOptions::default(), &mut |_, _| {}).expect("a device")
}

fn check(quick: bool) {
    let started = Instant::now();
    let oracle =
        Arc::new(Checkpoint::open(&fixture("oracle-small-b").expect("there")).expect("sound"));
    for precision in [Precision::F32, Precision::Bf16] {
        let mut runner = {
            let device = device(&oracle);
            let model = device.model().clone();
            Runner::new(device, model, precision)
        };
        goldens(&mut runner);
    }
    println!("goldens: {:.1} s", started.elapsed().as_secs_f64());
    let mut runner = {
        let device = device(&oracle);
        let model = device.model().clone();
        Runner::new(device, model, Precision::Bf16)
    };
    runner.prefill(&(0..200).collect::<Vec<u32>>(), 64);
    let (expected, _) = runner.greedy(7, 600);
    for _ in 0..3 {
        runner.session.reset();
        runner.prefill(&(0..200).collect::<Vec<u32>>(), 64);
        assert!(runner.greedy_ahead(7, 600) == expected, "runs ahead");
    }
    println!("600 tokens ahead: the same as one by one");
    runner.check_snapshots();
    runner.check_exports();
    println!("snapshots: gone back to, and shared");
    // The real layers' dimensions, with fewer experts and a small vocabulary: the reference is slow.
    let real = Synthetic::small(json!({
        "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "num_experts": 32, "num_experts_per_tok": 8,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "vocab_size": 512,
    }))
    .open();
    for (name, checkpoint, rows) in [
        ("oracle-small-b", &oracle, &[17, 1, 70][..]),
        ("real layers", &real, &[17]),
    ] {
        for precision in [Precision::F32, Precision::Bf16] {
            for expanded in if quick {
                vec![false]
            } else {
                vec![false, true]
            } {
                let worst = steps_agree(checkpoint, precision, expanded, rows);
                println!(
                    "{name}, {precision}, expanded {expanded}: worst {:.3} of what rounding allows ({}), {:.0} s",
                    worst.0,
                    worst.1,
                    started.elapsed().as_secs_f64()
                );
            }
        }
    }
}

/// What steps cost that do next to nothing: one behind the other, two side by side, and in a single threadgroup.
fn latency() {
    const STEPS: usize = 500;
    let mut device = device(&Synthetic::small(json!({})).open());
    let class = PlanClass {
        phase: Phase::Decode,
        precision: Precision::F32,
        rows: 1,
        context: 4_096,
        output: PlanOutput::State,
    };
    let config = device.model().config.clone();
    let mut session = device.new_session(Precision::F32, 256).expect("room");
    for (what, beside, route) in [
        ("sums of a row, one behind the other", 1, false),
        ("two of them side by side, and so on", 2, false),
        ("choices of experts, one behind the other", 1, true),
    ] {
        let mut builder = PlanBuilder::new(device.model(), class);
        let wide = |builder: &mut PlanBuilder, columns| {
            builder.scratch("value", 1, columns, ElementType::F32)
        };
        let mut last = vec![wide(&mut builder, config.hidden_size); beside];
        let first = last[0];
        let mut kept = Vec::new();
        for _ in 0..STEPS {
            if route {
                // Their order is given below: they have none of their own.
                let logits = wide(&mut builder, config.experts);
                let ids = builder.scratch("ids", 1, config.experts_per_token, ElementType::U32);
                let weights = wide(&mut builder, config.experts_per_token);
                builder.push(Operation::Route {
                    logits,
                    ids,
                    weights,
                });
                kept.extend([ids, weights]);
                continue;
            }
            for last in &mut last {
                let output = wide(&mut builder, config.hidden_size);
                builder.push(Operation::ResidualAdd {
                    residual: *last,
                    update: first,
                    output,
                });
                *last = output;
            }
        }
        kept.extend(&last);
        let plan = Arc::new(builder.finish(None, kept));
        let sessions = &mut [session.as_mut() as &mut dyn SessionState];
        let time = |gpu: &mut Cuda, stages: &[Stage<'_, Cuda>]| {
            let one_by_one: Vec<Stage<'_, Cuda>> = stages
                .iter()
                .flatten()
                .map(|one| vec![one.clone()])
                .collect();
            gpu.time(if route { &one_by_one } else { stages }, 10)
        };
        let microseconds = device
            .with_stages(&plan, launch(&[0], sessions, &[]), time)
            .expect("it runs");
        println!(
            "{what}: {:.2} us each ({} steps)",
            microseconds / STEPS as f64,
            plan.steps.len()
        );
    }
}

struct Nobody;

impl Observer for Nobody {
    fn after_step(&mut self, _: usize, _: &dyn Fn(ScratchId) -> Vec<f32>) {}
}

/// What the host writes is there when work behind it runs, also where its memory was made a moment before: sums of two
/// presets, each longer than the last. With an observer the kernel is launched at once.
fn presets_arrive() {
    const ROUNDS: usize = 500;
    let mut device = device(&Synthetic::small(json!({})).open());
    let columns = device.model().config.hidden_size;
    let mut session = device.new_session(Precision::F32, 4_096).expect("room");
    let mut wrong = 0;
    for rows in 1..=ROUNDS {
        let class = PlanClass {
            phase: Phase::Prefill,
            precision: Precision::F32,
            rows,
            context: 4_096,
            output: PlanOutput::AllLogits,
        };
        let mut builder = PlanBuilder::new(device.model(), class);
        let mut value = |name| builder.scratch(name, rows, columns, ElementType::F32);
        let (residual, update, output) = (value("residual"), value("update"), value("sum"));
        builder.push(Operation::ResidualAdd {
            residual,
            update,
            output,
        });
        let plan = Arc::new(builder.finish(Some(output), Vec::new()));
        let values = |factor: f32| -> Vec<f32> {
            let counted = rows..rows + rows * columns;
            counted.map(|i| i as f32 * factor).collect()
        };
        session.reset();
        let launch = Launch {
            tokens: &vec![0; rows],
            sessions: &mut [session.as_mut()],
            preset: &[(residual, values(1.0)), (update, values(2.0))],
            token_limit: u32::MAX,
            sampling: &[],
            observer: Some(&mut Nobody),
        };
        let found = device.execute(&plan, launch).expect("it runs").logits;
        wrong += usize::from(found != values(3.0));
    }
    println!("presets: {wrong} of {ROUNDS} sums wrong");
    assert_eq!(wrong, 0);
}

fn goldens(runner: &mut Runner<GpuDevice<Cuda>>) {
    let directory = fixture("oracle-small-b").expect("there");
    let goldens = read_tensors(&directory.join("golden.safetensors"));
    let exact = runner.precision == Precision::F32;
    for prompt in golden_prompts(&directory) {
        runner.session.reset();
        let logits = runner.prefill(&prompt.tokens, 64);
        let rows: Vec<&[f32]> = logits.chunks(runner.model.config.vocab_size).collect();
        let chosen: Vec<u32> = rows.iter().map(|row| arg_max(row)).collect();
        let same = chosen
            .iter()
            .zip(&prompt.argmax_all)
            .filter(|(a, b)| a == b)
            .count();
        let wanted: Vec<f32> = prompt
            .logit_positions
            .iter()
            .flat_map(|&at| rows[at].to_vec())
            .collect();
        let (relative, largest) = distance(&wanted, &goldens[&format!("{}.logits", prompt.name)].1);
        let (greedy, _) = runner.greedy(chosen[chosen.len() - 1], prompt.greedy.len());
        let right = greedy
            .iter()
            .zip(&prompt.greedy)
            .take_while(|(a, b)| a == b)
            .count();
        println!(
            "goldens {} {}: rel. RMS {relative:.1e}, max {largest:.1e}, argmax {same}/{}, greedy {right}/{}",
            prompt.name,
            runner.precision,
            rows.len(),
            greedy.len()
        );
        if exact {
            assert!(relative <= 2e-5 && same == rows.len() && right == greedy.len());
        }
    }
}

/// Tensor cores cut off the last bits of their sums where the bound takes them to be rounded: sums of 4,096 products
/// have been seen at 1.2 times the bound.
const TENSOR_CORE_SLACK: f64 = 2.0;

fn steps_agree(
    checkpoint: &Arc<Checkpoint>,
    precision: Precision,
    expanded: bool,
    rows: &[usize],
) -> (f64, String) {
    let options = CpuOptions {
        kernels: Kernels::Reference,
        ..CpuOptions::default()
    };
    let mut reference = CpuDevice::new(checkpoint.clone(), &options).expect("a reference");
    let mut device = device(checkpoint);
    let vocabulary = device.model().config.vocab_size as u32;
    let new = |device: &dyn Device| -> Vec<Box<dyn SessionState>> {
        (0..4)
            .map(|_| device.new_session(precision, 1_024).expect("room"))
            .collect()
    };
    let (mut right, mut sessions) = (new(&reference), new(&device));
    let mut worst = (0.0, String::new());
    let shapes = rows
        .iter()
        .map(|&rows| (Phase::Prefill, rows))
        .chain([(Phase::Decode, 1), (Phase::Decode, 4)]);
    for (phase, rows) in shapes {
        let class = PlanClass {
            phase,
            precision,
            rows,
            context: 4_096,
            output: if phase == Phase::Decode {
                PlanOutput::Token
            } else {
                PlanOutput::AllLogits
            },
        };
        let plan = Plan::record(device.model(), class);
        let plan = Arc::new(if expanded { plan.expanded() } else { plan });
        let tokens: Vec<u32> = (0..rows as u32)
            .map(|i| i.wrapping_mul(2_654_435_761) % vocabulary)
            .collect();
        let count = if phase == Phase::Prefill { 1 } else { rows };
        let differences = compare_device(
            &mut reference,
            &mut right[..count],
            &mut device,
            &mut sessions[..count],
            &plan,
            (&tokens, vocabulary),
        )
        .expect("both run");
        for difference in differences {
            if difference.excess > TENSOR_CORE_SLACK {
                println!("WRONG {class}: {difference:?}");
            }
            if difference.excess > worst.0 {
                worst = (difference.excess, difference.label);
            }
        }
    }
    worst
}

/// A model of the real shapes on the device, with a session.
fn real_model() -> Runner<GpuDevice<Cuda>> {
    let config =
        std::fs::read_to_string(repository("fixtures/qwen3.6-35b-a3b/config.json")).expect("there");
    let config: Value = serde_json::from_str(&config).expect("JSON");
    let started = Instant::now();
    let model = Synthetic {
        config,
        given: Default::default(),
        packed: Default::default(),
        seed: 7,
    };
    let checkpoint = model.open();
    println!(
        "random weights of the real shapes: {:.1} s",
        started.elapsed().as_secs_f64()
    );
    let started = Instant::now();
    let device = device(&checkpoint);
    println!("loaded: {:.1} s", started.elapsed().as_secs_f64());
    let description = device.model().clone();
    let mut runner = Runner::new(device, description, Precision::Bf16);
    runner.session = runner
        .device
        .new_session(Precision::Bf16, 40_000)
        .expect("room");
    runner
}

fn real(speed: bool, steps: bool) {
    let mut runner = real_model();
    let vocabulary = runner.model.config.vocab_size as u32;
    let token = |i: usize| (i as u32).wrapping_mul(2_654_435_761) % vocabulary;
    let mut position = 0;
    for target in [256, 4_096, 16_384, 32_768] {
        while position < target {
            let rows = 2_048.min(target - position);
            let plan = runner.plan(Phase::Prefill, rows, PlanOutput::State);
            let tokens: Vec<u32> = (position..position + rows).map(token).collect();
            runner.run(&plan, &tokens);
            position += rows;
            if speed && (position == target || position == 2_048 + 256) {
                let started = Instant::now();
                assert!(runner.session.step_back());
                runner.run(&plan, &tokens);
                let seconds = started.elapsed().as_secs_f64();
                println!(
                    "prefill {rows} at {}: {:.0} tok/s",
                    position - rows,
                    rows as f64 / seconds
                );
            }
        }
        let decode = runner.plan(Phase::Decode, 1, PlanOutput::Token);
        if speed {
            let microseconds = whole(
                &mut runner.device,
                &decode,
                &[token(position)],
                from_mut(&mut runner.session),
            );
            println!(
                "decode at {position}: {microseconds:.0} us on the GPU, {:.1} tok/s",
                1e6 / microseconds
            );
        }
        if speed {
            walls(&mut runner, position);
        }
        if target <= 4_096 {
            batches(&mut runner, position, false);
        }
        if speed {
            let sampled = runner.plan(Phase::Decode, 1, PlanOutput::Sampled);
            let microseconds = whole(
                &mut runner.device,
                &sampled,
                &[token(position)],
                from_mut(&mut runner.session),
            );
            println!(
                "  with temperature 1, top-p 0.95, top-k 20 in place of the most probable: {microseconds:.0} us"
            );
        }
        if steps && target <= 4_096 {
            table(
                &mut runner.device,
                &decode,
                &[token(position)],
                from_mut(&mut runner.session),
            );
        }
    }
    if steps {
        for rows in [512, 2_048] {
            let plan = runner.plan(Phase::Prefill, rows, PlanOutput::State);
            let tokens: Vec<u32> = (0..rows).map(token).collect();
            table(
                &mut runner.device,
                &plan,
                &tokens,
                from_mut(&mut runner.session),
            );
        }
    }
    runner.device.with_gpu(|gpu| {
        for resources in gpu.resources() {
            println!("{resources:?}");
        }
    });
}

fn launch<'a>(
    tokens: &'a [u32],
    sessions: &'a mut [&'a mut dyn SessionState],
    sampling: &'a [SamplingRow<'a>],
) -> Launch<'a> {
    Launch {
        tokens,
        sessions,
        preset: &[],
        token_limit: u32::MAX,
        sampling,
        observer: None,
    }
}

/// Decode by the clock on the wall, one by one and ahead in turns: 64 tokens each from the same position.
fn walls(runner: &mut Runner<GpuDevice<Cuda>>, position: usize) {
    const TOKENS: usize = 64;
    let mut microseconds = [vec![], vec![]];
    for round in 0..6 {
        for (ahead, times) in microseconds.iter_mut().enumerate() {
            runner.session.seek(position).expect("it was there");
            let started = Instant::now();
            if ahead == 1 {
                runner.greedy_ahead(1, TOKENS + 1);
            } else {
                runner.greedy(1, TOKENS + 1);
            }
            // The first round warms up.
            if round > 0 {
                times.push(started.elapsed().as_secs_f64() * 1e6 / TOKENS as f64);
            }
        }
    }
    runner.session.seek(position).expect("it was there");
    let [one_by_one, ahead] = microseconds.map(|mut times| {
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    });
    println!("  by the clock: {one_by_one:.0} us one by one, {ahead:.0} us ahead");
}

/// Decode of several sessions as one batch, each at the same position with a token of its own.
fn batches(runner: &mut Runner<GpuDevice<Cuda>>, position: usize, steps: bool) {
    let snapshot = runner.session.snapshot().expect("room");
    let vocabulary = runner.model.config.vocab_size as u32;
    let mut alone = 0.0;
    for rows in route::DECODE_ROWS {
        let mut sessions: Vec<Box<dyn SessionState>> = Vec::new();
        for _ in 0..rows {
            let made = runner.device.new_session(Precision::Bf16, position + 64);
            let mut session = made.expect("room");
            let copied = session.copy_cache(runner.session.as_mut(), position);
            copied.expect("the same device");
            session.restore(snapshot.as_ref()).expect("the same model");
            sessions.push(session);
        }
        let plan = runner.plan(Phase::Decode, rows, PlanOutput::Token);
        let tokens: Vec<u32> = (0..rows as u32)
            .map(|row| (row + 1) * 40_503 % vocabulary)
            .collect();
        let gpu = &mut runner.device;
        let microseconds = whole(gpu, &plan, &tokens, &mut sessions) / rows as f64;
        if rows == 1 {
            alone = microseconds;
        }
        println!(
            "  {rows} together: {microseconds:.0} us a token, {:.2} times the rate of one",
            alone / microseconds
        );
        if steps {
            table(gpu, &plan, &tokens, &mut sessions);
        }
    }
}

fn borrowed(sessions: &mut [Box<dyn SessionState>]) -> Vec<&mut dyn SessionState> {
    sessions
        .iter_mut()
        .map(|session| session.as_mut())
        .collect()
}

/// Microseconds of a whole plan as one graph.
fn whole(
    device: &mut GpuDevice<Cuda>,
    plan: &Arc<Plan>,
    tokens: &[u32],
    sessions: &mut [Box<dyn SessionState>],
) -> f64 {
    let parameters = SamplingParameters {
        temperature: 1.0,
        top_k: Some(20),
        top_p: 0.95,
        ..SamplingParameters::default()
    };
    let row = SamplingRow {
        parameters: &parameters,
        ..SamplingRow::default()
    };
    let sampling = if plan.samples() { vec![row] } else { vec![] };
    device
        .with_stages(
            plan,
            launch(tokens, &mut borrowed(sessions), &sampling),
            |gpu, stages| gpu.time(stages, 10),
        )
        .expect("the plan runs")
}

/// Each kind of step: how many, microseconds of one alone, bandwidth, share.
fn table(
    device: &mut GpuDevice<Cuda>,
    plan: &Arc<Plan>,
    tokens: &[u32],
    sessions: &mut [Box<dyn SessionState>],
) {
    let context = sessions[0].position();
    let total = whole(device, plan, tokens, sessions);
    let assumptions = Assumptions::at_context(context);
    let times = device
        .with_stages(
            plan,
            launch(tokens, &mut borrowed(sessions), &[]),
            |gpu, stages| {
                stages
                    .iter()
                    .map(|stage| gpu.time(std::slice::from_ref(stage), 5))
                    .collect::<Result<Vec<f64>, _>>()
            },
        )
        .expect("the plan runs");
    let mut kinds: BTreeMap<String, (usize, f64, f64)> = BTreeMap::new();
    for (steps, microseconds) in plan.stages.iter().zip(&times) {
        let name: Vec<&str> = steps
            .iter()
            .map(|&step| plan.steps[step].operation.name())
            .collect();
        let bytes: f64 = steps
            .iter()
            .map(|&step| plan.work(step, &assumptions).bytes() as f64)
            .sum();
        let outputs: Vec<String> = steps
            .iter()
            .flat_map(|&step| plan.steps[step].operation.access().writes)
            .filter_map(|resource| match resource {
                lily_plan::Resource::Scratch(id) => Some(plan.spec(id).name.to_string()),
                lily_plan::Resource::State(_) => None,
            })
            .take(1)
            .collect();
        let entry = kinds
            .entry(format!("{} {}", name.join("+"), outputs.join(",")))
            .or_default();
        entry.0 += 1;
        entry.1 += microseconds;
        entry.2 += bytes;
    }
    let sum: f64 = times.iter().sum();
    println!(
        "{}: whole {total:.0} us, steps alone {sum:.0} us",
        plan.class
    );
    let mut rows: Vec<_> = kinds.into_iter().collect();
    rows.sort_by(|a, b| b.1.1.total_cmp(&a.1.1));
    for (name, (count, microseconds, bytes)) in rows {
        println!(
            "  {name:44} {count:4} x {:8.2} us  {:7.0} GB/s  {:5.1} %",
            microseconds / count as f64,
            bytes / microseconds / 1e3,
            100.0 * microseconds / sum
        );
    }
}
