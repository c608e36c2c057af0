//! What the hot kernels move at the real model's shapes, held against what a plan says that it moves.
//!
//! Bytes of memory are lines of 128 bytes, counted once for each load of a simdgroup that touches them: what a GPU moves
//! whose caches hold nothing between two loads. Bytes asked for are counted by lane, so that what two lanes share counts
//! twice. Where either is more than the plan says, the factor is worked out beside the assertion.

mod common;

use common::alone::{Inputs, random};
use common::real;
use lily_checkpoint::{Checkpoint, WeightFormat, WeightId, WeightRole, WeightShape};
use lily_emulated::{Emulated, EmulatedOptions};
use lily_gpu::kernels::{Memory, Operand, Region};
use lily_gpu::record::Recorded;
use lily_gpu::{GpuDevice, Switches, matrix_bytes};
use lily_msl::{BuildKind, MemoryCounters, Traffic};
use lily_plan::{
    Assumptions, Device, ElementType, Launch, Operation, Outcome, Phase, Plan, PlanClass,
    PlanOutput, Precision, SamplingRow, ScratchId, WeightArithmetic, Work,
};
use lily_sampling::SamplingParameters;
use lily_testing::Synthetic;
use serde_json::json;
use std::sync::{Arc, OnceLock};

const LINE: u64 = 128;
/// Positions in the cache, this run's own among them: a whole number of fours, which a simdgroup of `attend` takes.
const POSITIONS: usize = 1_000;

fn device(checkpoint: &Arc<Checkpoint>, switches: Switches) -> GpuDevice<Emulated> {
    let options = EmulatedOptions {
        build: BuildKind::Race,
        keep_reports: true,
        counters_only: true,
        ..EmulatedOptions::default()
    };
    common::device_with(checkpoint, options, switches)
}

/// A dispatch that ran.
struct Counted {
    plan: Arc<Plan>,
    label: String,
    kernel: &'static str,
    recorded: Recorded,
    work: Work,
    memory: MemoryCounters,
}

impl Counted {
    fn threadgroups(&self) -> u64 {
        self.recorded
            .grid
            .iter()
            .map(|&size| u64::from(size))
            .product()
    }

    /// Buffers with what they are bound to.
    fn bound(&self) -> impl Iterator<Item = (Region, Traffic)> + '_ {
        let operands = self.recorded.bound.operands.iter().enumerate();
        operands.filter_map(|(index, operand)| {
            let region = match operand {
                Operand::Input(input) => input.0,
                Operand::Output(output) => output.0,
                Operand::None | Operand::Word(_) => return None,
            };
            Some((region, self.memory.buffers[index]))
        })
    }

    /// Traffic with the buffer that this weight lies in.
    fn weight(&self, role: WeightRole) -> Traffic {
        let found = self.bound().find(|(region, _)| match region.memory {
            Memory::Weight(id) => id.role == role,
            _ => false,
        });
        found.expect("a weight of this dispatch").1
    }

    fn written_bytes(&self) -> u64 {
        self.memory.device.written_bytes
    }
}

/// Runs a plan on a new session that stands `before` positions in.
fn count(
    device: &mut GpuDevice<Emulated>,
    plan: &Arc<Plan>,
    before: usize,
    preset: &[(ScratchId, Vec<f32>)],
    sampling: &[SamplingRow<'_>],
) -> (Vec<Counted>, Outcome) {
    let mut session = device.new_session(plan.class.precision, 4_096).unwrap();
    session.seek(before).unwrap();
    let recording = device.recording(plan).unwrap();
    device.with_gpu(Emulated::take_reports);
    let launch = Launch {
        tokens: &vec![5; plan.class.rows],
        sessions: &mut [session.as_mut()],
        preset,
        token_limit: u32::MAX,
        sampling,
        observer: None,
    };
    let outcome = device.execute(plan, launch).unwrap();
    let assumptions = Assumptions::at_context(before);
    let ran = device.with_gpu(Emulated::take_reports);
    assert_eq!(ran.len(), recording.dispatches());
    let dispatches = recording.stages.iter().flatten().zip(ran);
    let counted = dispatches.map(|(recorded, ran)| Counted {
        plan: plan.clone(),
        label: plan.steps[recorded.step].label(),
        kernel: ran.kernel,
        recorded: recorded.clone(),
        work: plan.work(recorded.step, &assumptions),
        memory: ran.report.memory.expect("the race build counts"),
    });
    (counted.collect(), outcome)
}

fn decode_plan(device: &GpuDevice<Emulated>) -> Plan {
    let class = PlanClass {
        phase: Phase::Decode,
        precision: Precision::Bf16,
        rows: 1,
        context: 4_096,
        output: PlanOutput::Token,
    };
    Plan::record(device.model(), class)
}

fn decode(switches: Switches) -> (Vec<Counted>, Outcome) {
    let mut device = device(&real::layers(), switches);
    let plan = Arc::new(decode_plan(&device));
    count(&mut device, &plan, POSITIONS - 1, &[], &[])
}

/// The same with everything as designed.
fn designed() -> &'static (Vec<Counted>, Outcome) {
    static COUNTED: OnceLock<(Vec<Counted>, Outcome)> = OnceLock::new();
    COUNTED.get_or_init(|| decode(Switches::default()))
}

/// Codes and pairs of a matrix in the kernels' layout (of the chosen experts), and bits of a code; nothing for vectors.
fn stored(plan: &Plan, id: WeightId) -> Option<(u64, u64, u64)> {
    let WeightFormat::Affine { bits, .. } = plan.model.format(id) else {
        return None;
    };
    let (outputs, columns) = plan.model.dimensions(id);
    let count = match plan.model.shape(id) {
        WeightShape::Experts { .. } => plan.model.config.experts_per_token,
        _ => 1,
    };
    let all = matrix_bytes(outputs, columns, usize::from(bits)) * count;
    let pairs = outputs.next_multiple_of(4) * (columns / 64) * 4 * count;
    Some(((all - pairs) as u64, pairs as u64, u64::from(bits)))
}

/// Bytes that a kernel writes for the run behind: the count of turns, the next token, the position and the copies of its
/// session; in a sequence of rows, nothing but the number of the next draw.
fn turn_bytes(kernel: &str) -> u64 {
    match kernel {
        "arg_max" => 4 + 4 + 4 + 2 * 8,
        "sample" => 4,
        _ => 0,
    }
}

/// Every dispatch writes its outputs and nothing else, each once.
fn check_written(counted: &[Counted]) {
    for dispatch in counted {
        let Work {
            scratch_written,
            state_written,
            ..
        } = dispatch.work;
        let expected = scratch_written + state_written + turn_bytes(dispatch.kernel);
        assert_eq!(dispatch.written_bytes(), expected, "{}", dispatch.label);
    }
}

#[test]
fn decode_reads_each_weight_once() {
    let (counted, _) = designed();
    check_written(counted);
    let kernels = ["project_1", "project_experts_1", "expert_output_1"];
    let mut seen = Vec::new();
    for dispatch in counted {
        if !kernels.contains(&dispatch.kernel) {
            continue;
        }
        seen.push(dispatch.kernel);
        let mut bytes = 0;
        for (region, traffic) in dispatch.bound() {
            let Memory::Weight(id) = region.memory else {
                continue;
            };
            let Some((codes, pairs, bits)) = stored(&dispatch.plan, id) else {
                continue;
            };
            // Codes of 4 bits come 32 to a load of 16 bytes, lanes side by side: full lines, once. Of 8 bits, a lane's
            // 32 columns are two loads side by side, each half of every line; and the pairs come with either.
            let loads = bits / 4;
            let what = format!("{}: {id}", dispatch.label);
            assert_eq!(traffic.read_lines * LINE, loads * (codes + pairs), "{what}");
            // The two lanes of a group share its pairs.
            assert_eq!(traffic.read_bytes, codes + loads * 2 * pairs, "{what}");
            if bits == 4 {
                let filled = traffic.read_bytes as f64 / (traffic.read_lines * LINE) as f64;
                assert!(filled >= 0.95, "{what}: {filled}");
            }
            bytes += traffic.read_lines * LINE / loads;
        }
        // What the plan says, and it counts the norm's weights.
        let ratio = bytes as f64 / dispatch.work.weight_bytes as f64;
        println!(
            "{} {}: {bytes} bytes of weights, {ratio:.4}",
            dispatch.label, dispatch.kernel
        );
        assert!((0.95..1.05).contains(&ratio), "{}: {ratio}", dispatch.label);
    }
    // Two layers with two products and an output each, routers, and the head.
    assert_eq!(seen.len(), 2 * 5 + 1, "{seen:?}");
}

#[test]
fn decode_reads_activations_as_often_as_named() {
    let (counted, _) = designed();
    for dispatch in counted {
        let (region, input) = dispatch.bound().next().unwrap();
        let threadgroups = dispatch.threadgroups();
        match dispatch.kernel {
            // Once a threadgroup, in full lines; the norm's weights alike.
            "project_1" | "project_experts_1" => {
                let expected = threadgroups * region.bytes as u64;
                assert_eq!(input.read_bytes, expected, "{}", dispatch.label);
                assert_eq!(input.read_lines * LINE, expected, "{}", dispatch.label);
            }
            // 16 lanes share a row of 512 columns, so that a row is asked for twice by a threadgroup; each of a lane's
            // eight loads touches all eight lines of it (a lane has 64 bytes side by side).
            "expert_output_1" => {
                let rows = threadgroups * region.bytes as u64;
                assert_eq!(input.read_bytes, 2 * rows);
                assert_eq!(input.read_lines * LINE, 8 * rows);
            }
            // Four heads of 512 bytes by each simdgroup of those threadgroups that have a block: 8 of 32.
            "attend_4" => {
                let (_, input) = dispatch.bound().nth(1).unwrap();
                let used = 4 * POSITIONS.div_ceil(128) as u64;
                assert_eq!(input.read_bytes, used * 8 * 4 * 512);
                assert_eq!(input.read_lines * LINE, input.read_bytes);
            }
            // Once, each value.
            "arg_max" => assert_eq!(input.read_bytes, region.bytes as u64),
            "route" => assert_eq!(input.read_bytes, region.bytes as u64),
            _ => {}
        }
    }
}

fn of<'a>(counted: &'a [Counted], kernel: &str) -> &'a Counted {
    let mut found = counted.iter().filter(|dispatch| dispatch.kernel == kernel);
    let dispatch = found.next().unwrap_or_else(|| panic!("no {kernel}"));
    assert!(found.next().is_none(), "one {kernel}");
    dispatch
}

#[test]
fn decode_moves_each_state_once() {
    let (counted, _) = designed();
    // States in full lines once; histories twice for queries and keys, which two value heads share, and in half lines,
    // 32 bfloats a load. Those are 1 % of the states.
    let step = of(counted, "delta_step");
    let resident = step.memory.resident;
    let (read, written) = (resident.read_lines * LINE, resident.written_lines * LINE);
    let states = 32 * 128 * 128 * 4;
    let history = 3 * 8_192 * 2;
    assert_eq!(step.work.state_read, states + history);
    // Queries and keys are half of the channels.
    assert_eq!(read, states + 2 * (history + history / 2));
    assert_eq!(written, states + 2 * history);
    assert!(read * 20 <= step.work.state_read * 21);
    assert!(written * 20 <= step.work.state_written * 21);
    println!(
        "states: {:.4} read",
        read as f64 / step.work.state_read as f64
    );

    // Keys and values once for each pack of four heads, of which a KV head has two; and for every four positions the
    // line in which their page's address stands.
    let attend = of(counted, "attend_4");
    let cache = (POSITIONS * 2 * 2 * 256 * 2) as u64;
    assert_eq!(attend.work.state_read, cache);
    let packs = 2;
    let addresses = (POSITIONS as u64 / 4) * 2 * packs;
    let resident = attend.memory.resident;
    assert_eq!(resident.read_lines * LINE, packs * cache + addresses * LINE);
    // 32 lanes ask for the address.
    assert_eq!(resident.read_bytes, packs * cache + addresses * 32 * 8);
    println!(
        "cache: {:.4} read of {packs} times",
        (resident.read_lines * LINE) as f64 / (packs * cache) as f64
    );
    // Blocks of positions that there are: all their sums once, their largest scores and weights twice.
    let merge = of(counted, "merge_blocks");
    let partials = merge.bound().nth(1).unwrap().1;
    let blocks = POSITIONS.div_ceil(128) as u64;
    let queries = 16 * 256 * 2;
    assert_eq!(merge.work.scratch_read, 16 * blocks * 258 * 4 + queries);
    assert_eq!(partials.read_bytes, 16 * blocks * (258 + 1) * 4);
}

/// What a mechanism is worth in traffic with the cache: with it, and without; results are the same.
fn without(kernel: &str, switches: Switches) -> [Traffic; 2] {
    let (counted, outcome) = designed();
    let (other, same) = decode(switches);
    assert!(same == *outcome);
    [of(counted, "attend_4"), of(&other, kernel)].map(|attend| attend.memory.resident)
}

#[test]
fn packed_heads_read_the_cache_a_quarter_as_often() {
    let alone = Switches {
        packed_heads: false,
        ..Switches::default()
    };
    let [packed, alone] = without("attend_1", alone);
    assert_eq!(alone.read_lines, 4 * packed.read_lines);
    assert_eq!(alone.read_bytes, 4 * packed.read_bytes);
}

#[test]
fn columns_one_by_one_touch_eight_times_the_lines() {
    let one_by_one = Switches {
        coalesced_cache: false,
        ..Switches::default()
    };
    let [together, one_by_one] = without("attend_4", one_by_one);
    // A row of 256 bfloats is four lines. A lane has eight columns side by side, which are 16 bytes: one load of 16 bytes
    // touches each line once; eight loads of 2 bytes, 16 bytes from lane to lane, touch all four lines each.
    let addresses = POSITIONS as u64 / 4 * 2 * 2;
    let rows = (POSITIONS * 2 * 2 * 2) as u64;
    assert_eq!(together.read_lines, rows * 4 + addresses);
    assert_eq!(one_by_one.read_lines, rows * 4 * 8 + addresses);
    assert_eq!(one_by_one.read_bytes, together.read_bytes);
}

/// Bytes of working memory: read, and written.
fn arena(counted: &[Counted]) -> (u64, u64) {
    let traffic = counted.iter().flat_map(Counted::bound);
    let traffic = traffic.filter(|(region, _)| region.memory == Memory::Arena);
    traffic.fold((0, 0), |(read, written), (_, traffic)| {
        (read + traffic.read_bytes, written + traffic.written_bytes)
    })
}

#[test]
fn fused_steps_leave_their_intermediates_out_of_memory() {
    let mut device = device(&real::layers(), Switches::default());
    let fused = Arc::new(decode_plan(&device));
    let expanded = Arc::new(fused.expanded());
    let mut moved = Vec::new();
    for plan in [&fused, &expanded] {
        let (counted, _) = count(&mut device, plan, POSITIONS - 1, &[], &[]);
        check_written(&counted);
        let (read, written) = arena(&counted);
        let work = plan.totals(&Assumptions::at_context(POSITIONS - 1)).work;
        assert_eq!(written, work.scratch_written);
        println!(
            "{} dispatches: {read} bytes asked for, {written} written",
            counted.len()
        );
        moved.push((read, written, work));
    }
    let [(_, written, work), (_, more_written, more_work)] = moved[..] else {
        unreachable!("two plans")
    };
    // What is gone is what the plan says, to the byte.
    assert_eq!(
        more_written - written,
        more_work.scratch_written - work.scratch_written
    );
    assert!(more_written > written);
}

/// One step with `rows` rows of a prompt, at the end of `before` positions.
fn step(
    device: &mut GpuDevice<Emulated>,
    before: usize,
    inputs: Inputs,
    outputs: &[ScratchId],
) -> Counted {
    let (plan, preset) = inputs.finish(outputs);
    let (mut counted, _) = count(device, &plan, before, &preset, &[]);
    assert_eq!(counted.len(), 1);
    check_written(&counted);
    counted.remove(0)
}

#[test]
fn tiles_read_weights_once_for_their_rows_and_write_none() {
    let mut device = device(&real::layers(), Switches::default());
    let model = device.model().clone();
    for (rows, kernel, row_tiles) in [
        (16, "tile_project_16", 1),
        (32, "tile_project_32", 1),
        (64, "tile_project_64", 1),
        (65, "tile_project_64", 2),
    ] {
        for (layer, role, outputs) in [(1, WeightRole::Key, 512), (0, WeightRole::Router, 32)] {
            let mut inputs = Inputs::new(&model, Precision::Bf16, rows);
            let input = inputs.random(rows, 2_048, ElementType::Bf16);
            let output = inputs.output(rows, outputs, ElementType::Bf16);
            let weight = WeightId::in_layer(layer, role);
            inputs.builder.push(Operation::Project {
                input,
                weight,
                output,
                arithmetic: WeightArithmetic::RoundedToBf16,
            });
            // That it writes its output alone was checked: no weight is ever expanded in memory.
            let counted = step(&mut device, 0, inputs, &[output]);
            assert_eq!(counted.kernel, kernel);
            let (codes, pairs, bits) = stored(&counted.plan, weight).unwrap();
            let read = counted.weight(role);
            // Codes once; a row's pair for either half of its group.
            assert_eq!(
                read.read_bytes,
                row_tiles * (codes + 2 * pairs),
                "{rows}, {bits} bits"
            );
            // A step takes 64 columns: of codes a quarter of a line of a row (of 8 bits, half a line in two loads), and of
            // pairs 16 bytes of each block of four rows, by each load of 16 rows. The steps that follow find the rest in a
            // cache.
            let lines = row_tiles * (4 * codes + 8 * pairs) / LINE;
            assert_eq!(read.read_lines, lines, "{rows}, {bits} bits");
            // Rows once for each 64 outputs. A step is a line of a row; a load takes half of it of eight rows.
            let (region, read) = counted.bound().next().unwrap();
            let times = outputs.div_ceil(64) as u64;
            assert_eq!(read.read_bytes, times * region.bytes as u64);
            assert_eq!(read.read_lines * LINE, 2 * read.read_bytes);
        }
    }
}

#[test]
fn tiles_of_experts_read_each_expert_once() {
    let mut device = device(&real::layers(), Switches::default());
    let model = device.model().clone();
    // Three rows that choose the same eight experts: a tile each.
    let rows = 3;
    let mut inputs = Inputs::new(&model, Precision::Bf16, rows);
    let chosen: Vec<f32> = (0..rows * 8).map(|pair| (pair % 8 * 4) as f32).collect();
    let expert = |number: usize| (0..rows).map(move |row| (row * 8 + number) as f32);
    let offsets = (0..=real::EXPERTS).map(|expert| (expert.div_ceil(4) * rows) as f32);
    let grouping: Vec<f32> = offsets.chain((0..8).flat_map(expert)).collect();
    let ids = inputs.given(rows, 8, ElementType::U32, chosen);
    let grouping = inputs.given(1, grouping.len(), ElementType::U32, grouping);
    let input = inputs.random(rows, 2_048, ElementType::Bf16);
    let output = inputs.output(rows * 8, 512, ElementType::Bf16);
    inputs.builder.push(Operation::ExpertInput {
        input,
        norm: None,
        ids,
        grouping: Some(grouping),
        gate: WeightId::in_layer(0, WeightRole::ExpertGateProjection),
        up: WeightId::in_layer(0, WeightRole::ExpertUp),
        output,
        arithmetic: WeightArithmetic::RoundedToBf16,
    });
    let counted = step(&mut device, 0, inputs, &[output]);
    assert_eq!(counted.kernel, "tile_experts_16");
    for role in [WeightRole::ExpertGateProjection, WeightRole::ExpertUp] {
        let (codes, pairs, _) = stored(&counted.plan, WeightId::in_layer(0, role)).unwrap();
        assert_eq!(counted.weight(role).read_bytes, codes + 2 * pairs);
    }
    // Each pair's row once for each 32 outputs of gate and up.
    let (_, read) = counted.bound().next().unwrap();
    assert_eq!(read.read_bytes, (rows * 8 * 2_048 * 2 * 512 / 32) as u64);
}

#[test]
fn attention_of_a_prompt_reads_the_cache_once_for_32_queries() {
    let mut device = device(&real::layers(), Switches::default());
    let model = device.model().clone();
    // 20 rows of eight query heads a KV head are five tiles of queries, four rows each.
    let (rows, before) = (20, 300);
    let mut inputs = Inputs::new(&model, Precision::Bf16, rows);
    inputs.builder.set_layer(Some(1));
    let queries = inputs.random(rows, 16 * 256, ElementType::Bf16);
    let output = inputs.output(rows, 16 * 256, ElementType::Bf16);
    inputs.builder.push(Operation::Attention {
        layer: 1,
        queries,
        output,
    });
    let counted = step(&mut device, before, inputs, &[output]);
    // Keys by sixteens, values by eights and what is left, up to each tile's last row; for two KV heads. A simdgroup's
    // lanes ask for the address of a page with each sixteen keys, and with its columns of each 64 values.
    let (mut positions, mut addresses) = (0, 0);
    for last in (0..5).map(|tile| before + tile * 4 + 4) {
        positions += last.next_multiple_of(16) + last;
        addresses += last.div_ceil(16) + last.div_ceil(64) * 4;
    }
    let expected = 2 * (positions * 256 * 2 + addresses * 32 * 8);
    assert_eq!(counted.memory.resident.read_bytes, expected as u64);
    // Five times what the plan says, which counts each position once: for each 32 queries, and no more.
    let ratio = expected as f64 / counted.work.state_read as f64;
    println!("cache: {ratio:.3} of what is there, by five tiles of queries");
    assert!((4.75..5.25).contains(&ratio), "{ratio}");
    let (region, read) = counted.bound().nth(1).unwrap();
    assert_eq!(read.read_bytes, region.bytes as u64, "queries once");
}

#[test]
fn the_scan_of_a_prompt_moves_its_states_once() {
    let mut device = device(&real::layers(), Switches::default());
    let model = device.model().clone();
    let rows = 17;
    let mut inputs = Inputs::new(&model, Precision::Bf16, rows);
    let query_key = inputs.random(rows, 2 * 16 * 128, ElementType::F32);
    let convolved = inputs.random(rows, 8_192, ElementType::Bf16);
    let decay = inputs.random(rows, 32, ElementType::F32);
    let strength = inputs.random(rows, 32, ElementType::F32);
    let output = inputs.output(rows, 32 * 128, ElementType::Bf16);
    inputs.builder.push(Operation::DeltaScan {
        layer: 0,
        query_key,
        convolved,
        decay,
        strength,
        output,
    });
    let counted = step(&mut device, 0, inputs, &[output]);
    assert_eq!(counted.kernel, "delta_scan");
    let resident = counted.memory.resident;
    // In full lines, whatever the number of rows.
    assert_eq!(resident.read_bytes, counted.work.state_read);
    assert_eq!(resident.read_lines * LINE, counted.work.state_read);
    assert_eq!(resident.written_lines * LINE, counted.work.state_written);
    // A threadgroup has a quarter of a head's rows and reads each token's query and key once; the first key comes to each
    // of its four simdgroups, of 32 lanes with 16 numbers each.
    let (_, read) = counted.bound().nth(1).unwrap();
    let tokens = rows as u64 * 2 * 128 * 4 - 128 * 4;
    let first = 4 * 32 * 16 * 4;
    assert_eq!(read.read_bytes, 4 * 32 * (tokens + first));
}

/// How often all logits are read: the largest is found, good tokens are gathered, and the rest is a matter of a list; or,
/// without a filter, three digits of the draw.
#[test]
fn sampling_reads_logits_a_few_times() {
    const VOCABULARY: usize = 248_320;
    let checkpoint =
        Synthetic::small(json!({ "hidden_size": 64, "vocab_size": VOCABULARY })).open();
    let mut device = device(&checkpoint, Switches::default());
    let drawn = |top_k, top_p| SamplingParameters {
        temperature: 1.0,
        top_k,
        top_p,
        ..SamplingParameters::default()
    };
    for (parameters, passes) in [
        (SamplingParameters::default(), 1),
        (drawn(Some(20), 0.95), 2),
        (drawn(None, 1.0), 1 + 3),
    ] {
        let mut inputs = Inputs::new(device.model(), Precision::Bf16, 1);
        let logits = random(VOCABULARY, 3).iter().map(|x| x * 8.0).collect();
        let logits = inputs.given(1, VOCABULARY, ElementType::F32, logits);
        let adjusted = inputs.output(1, VOCABULARY, ElementType::F32);
        inputs.builder.push(Operation::Sample { logits, adjusted });
        let (plan, preset) = inputs.finish(&[]);
        let row = SamplingRow {
            parameters: &parameters,
            ..SamplingRow::default()
        };
        let (counted, _) = count(&mut device, &plan, 0, &preset, &[row]);
        check_written(&counted);
        let read = of(&counted, "sample").bound().next().unwrap().1;
        let all = VOCABULARY as u64 * 4;
        assert_eq!(read.read_bytes, passes * all, "{parameters:?}");
        // 32 floats of a simdgroup are a line.
        assert_eq!(read.read_lines * LINE, read.read_bytes);
    }
}
