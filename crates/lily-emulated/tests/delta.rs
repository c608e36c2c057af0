//! The forms of the delta rule over many rows: by rows, by chunks, and with the state in memory every 64 rows.

mod common;

use common::scan::{Inputs, Scan};
use lily_cpu::{CpuDevice, CpuOptions, Kernels, compare_device};
use lily_emulated::{Emulated, EmulatedOptions};
use lily_gpu::kernels::{Constant, ConstantValue, SOURCES};
use lily_gpu::{GpuDevice, GpuOptions, Switches};
use lily_msl::{BuildKind, Schedule, Sources, removable_barriers};
use lily_plan::{Device, Phase, Plan, PlanClass, PlanOutput, Precision, SessionState};
use lily_testing::Synthetic;
use serde_json::{Value, json};
use std::sync::Arc;

const BY_ROWS: Switches = Switches::DESIGNED;
const BY_CHUNKS: Switches = Switches {
    chunked_scan: true,
    ..BY_ROWS
};
const BY_BLOCKS: Switches = Switches {
    blockwise_scan: true,
    ..BY_ROWS
};

/// The real model's heads, but fewer of them.
fn real_heads() -> Value {
    json!({"num_hidden_layers": 1, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
           "linear_key_head_dim": 128, "linear_value_head_dim": 128})
}

/// Heads that fill neither a threadgroup's rows of the state nor a lane's columns.
fn odd_heads() -> Value {
    json!({"num_hidden_layers": 1, "linear_num_key_heads": 2, "linear_num_value_heads": 8,
           "linear_key_head_dim": 48, "linear_value_head_dim": 40})
}

/// Whole models, step by step against the reference, in runs that begin and end anywhere in a chunk.
#[track_caller]
fn check_model(heads: Value, switches: Switches, precision: Precision, rows: &[usize]) {
    let checkpoint = Synthetic::small(heads).open();
    let options = CpuOptions {
        kernels: Kernels::Reference,
        ..CpuOptions::default()
    };
    let mut reference = CpuDevice::new(checkpoint.clone(), &options).unwrap();
    let mut device = common::device_with(&checkpoint, EmulatedOptions::default(), switches);
    let new = |device: &dyn Device| -> Vec<Box<dyn SessionState>> {
        vec![device.new_session(precision, 1_024).unwrap()]
    };
    let (mut right, mut sessions) = (new(&reference), new(&device));
    for &rows in rows {
        let class = PlanClass {
            phase: Phase::Prefill,
            precision,
            rows,
            context: 4_096,
            output: PlanOutput::State,
        };
        let plan = Arc::new(Plan::record(device.model(), class));
        let tokens: Vec<u32> = (0..rows as u32).map(|i| (i * 37 + 11) % 300).collect();
        let differences = compare_device(
            &mut reference,
            &mut right,
            &mut device,
            &mut sessions,
            &plan,
            (&tokens, 320),
        )
        .unwrap();
        for difference in &differences {
            assert!(difference.excess <= 1.0, "{class}: {difference:?}");
            if difference.label.contains("delta-scan") {
                println!("{rows} rows, {precision}: {:.3}", difference.excess);
            }
        }
    }
}

const ROWS: [usize; 9] = [1, 2, 31, 32, 33, 63, 64, 65, 130];
/// Runs that begin where chunks do, in turn with others.
const ALIGNED: [usize; 6] = [64, 33, 63, 32, 130, 65];

#[test]
fn rows_agree_with_the_reference() {
    for precision in [Precision::F32, Precision::Bf16] {
        check_model(real_heads(), BY_ROWS, precision, &ROWS);
        check_model(odd_heads(), BY_ROWS, precision, &ROWS);
    }
}

#[test]
fn chunks_agree_with_the_reference() {
    for precision in [Precision::F32, Precision::Bf16] {
        check_model(real_heads(), BY_CHUNKS, precision, &ROWS);
        check_model(odd_heads(), BY_CHUNKS, precision, &ROWS);
        check_model(odd_heads(), BY_CHUNKS, precision, &ALIGNED);
    }
}

/// One scan on a new session, in runs of these rows.
fn in_pieces(
    heads: Value,
    switches: Switches,
    precision: Precision,
    inputs: &Inputs,
    pieces: &[usize],
) -> (Vec<f32>, Vec<f32>) {
    let checkpoint = Synthetic::small(heads).open();
    let mut device = common::device_with(&checkpoint, EmulatedOptions::default(), switches);
    let model = device.model().clone();
    let mut scan = Scan::new(&mut device, &model, precision);
    let mut first = 0;
    let mut outputs = Vec::new();
    for rows in pieces {
        outputs.extend(scan.run(inputs, first..first + rows).unwrap());
        first += rows;
    }
    (outputs, scan.state())
}

#[test]
fn rows_do_not_depend_on_how_a_prompt_is_cut() {
    for (heads, precision) in [
        (real_heads(), Precision::F32),
        (odd_heads(), Precision::Bf16),
    ] {
        let inputs = Inputs::random(130, &heads, 1);
        let run = |pieces: &[usize]| in_pieces(heads.clone(), BY_ROWS, precision, &inputs, pieces);
        let whole = run(&[130]);
        assert!(whole == run(&[1, 2, 31, 32, 63, 1]));
        assert!(whole == run(&[65, 65]));
    }
}

#[test]
fn chunks_do_not_depend_on_cuts_between_them() {
    for (heads, precision) in [
        (real_heads(), Precision::F32),
        (odd_heads(), Precision::Bf16),
    ] {
        let inputs = Inputs::random(162, &heads, 2);
        let run =
            |pieces: &[usize]| in_pieces(heads.clone(), BY_CHUNKS, precision, &inputs, pieces);
        let whole = run(&[162]);
        assert!(whole == run(&[32, 64, 66]));
        assert!(whole == run(&[96, 66]));
        // The rows before the end of a run do not depend on it; those behind a cut in a chunk do, in the last bits.
        let cut = run(&[50, 112]);
        let columns = whole.0.len() / 162;
        assert!(whole.0[..50 * columns] == cut.0[..50 * columns]);
        // (A bfloat does not show those.)
        let differ = whole.0[50 * columns..] != cut.0[50 * columns..];
        assert!(differ || precision == Precision::Bf16);
        assert_close(&whole.1, &cut.1, 64.0);
    }
}

#[test]
fn blocks_give_what_rows_give() {
    for (heads, precision) in [
        (real_heads(), Precision::F32),
        (odd_heads(), Precision::Bf16),
    ] {
        let inputs = Inputs::random(130, &heads, 3);
        let run = |switches| in_pieces(heads.clone(), switches, precision, &inputs, &[130]);
        assert!(run(BY_ROWS) == run(BY_BLOCKS));
    }
}

/// Up to `roundings` units of f32 epsilon times the largest of all.
#[track_caller]
fn assert_close(expected: &[f32], found: &[f32], roundings: f32) {
    let largest = expected.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
    let worst = expected
        .iter()
        .zip(found)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0_f32, f32::max);
    println!(
        "{:.2} roundings of the largest value",
        worst / largest / f32::EPSILON
    );
    assert!(
        worst <= roundings * f32::EPSILON * largest,
        "{worst} of {largest}"
    );
}

/// What chunks make of numbers that are hard on them: keys that are all alike, strengths of one, decays of nothing
/// and of everything.
#[test]
fn chunks_hold_where_triangles_are_full() {
    let heads = real_heads();
    for (name, change) in [
        ("alike", Inputs::alike as fn(&mut Inputs)),
        ("kept", |inputs| inputs.decay.fill(1.0)),
        ("forgotten", |inputs| {
            inputs.decay.iter_mut().step_by(3).for_each(|g| *g = 0.0)
        }),
        ("fading", |inputs| inputs.decay.fill(1e-5)),
        ("opposed", |inputs| {
            inputs.alike();
            inputs.alternate();
        }),
    ] {
        let mut inputs = Inputs::random(96, &heads, 4);
        inputs.strength.fill(1.0);
        change(&mut inputs);
        let run = |switches| in_pieces(heads.clone(), switches, Precision::F32, &inputs, &[96]);
        let (rows, chunks) = (run(BY_ROWS), run(BY_CHUNKS));
        println!("{name}:");
        assert_close(&rows.0, &chunks.0, 64.0);
        assert_close(&rows.1, &chunks.1, 64.0);
    }
}

fn race(schedule: Schedule) -> EmulatedOptions {
    EmulatedOptions {
        build: BuildKind::Race,
        schedule,
        keep_reports: true,
        ..EmulatedOptions::default()
    }
}

/// The reports of a scan of `rows` rows, on the build that checks every access.
fn report(heads: &Value, switches: Switches, rows: usize, schedule: Schedule) -> lily_msl::Report {
    let checkpoint = Synthetic::small(heads.clone()).open();
    let mut device = common::device_with(&checkpoint, race(schedule), switches);
    let model = device.model().clone();
    let inputs = Inputs::random(rows, heads, 5);
    let mut scan = Scan::new(&mut device, &model, Precision::Bf16);
    scan.run(&inputs, 0..rows).unwrap();
    let mut reports = device.with_gpu(Emulated::take_reports);
    assert_eq!(reports.len(), 1);
    reports.remove(0).report
}

/// Bytes of the states of `real_heads`.
const STATE: u64 = 2 * 128 * 128 * 4;

#[test]
fn the_state_is_read_and_written_once_in_a_run() {
    let resident = |switches, rows| {
        let report = report(&real_heads(), switches, rows, Schedule::ProgramOrder);
        report.memory.unwrap().resident
    };
    for (switches, rows, times) in [
        (BY_ROWS, 1, 1),
        (BY_ROWS, 130, 1),
        (BY_CHUNKS, 130, 1),
        // Once more after 64 and after 128 rows.
        (BY_BLOCKS, 64, 1),
        (BY_BLOCKS, 65, 2),
        (BY_BLOCKS, 130, 3),
    ] {
        let traffic = resident(switches, rows);
        assert_eq!(traffic.read_bytes, times * STATE, "{switches:?}, {rows}");
        assert_eq!(traffic.written_bytes, times * STATE, "{switches:?}, {rows}");
        if !switches.chunked_scan {
            // In whole lines.
            assert_eq!(traffic.read_lines, times * STATE / 128);
            assert_eq!(traffic.written_lines, times * STATE / 128);
        }
    }
}

/// What the contract of the scan says of a row, for 32 simdgroups of eight rows of the state.
#[test]
fn a_row_of_the_scan_costs_what_its_contract_says() {
    let count = |rows| report(&real_heads(), BY_ROWS, rows, Schedule::ProgramOrder);
    let (short, long) = (count(64), count(128));
    let (simdgroups, threadgroups) = (32, 8);
    let each = |long: u64, short: u64| (long - short) as f64 / 64.0;
    // Sums over eight lanes: four of them at once.
    assert_eq!(
        each(long.simdgroup_operations, short.simdgroup_operations),
        3.0 * simdgroups as f64
    );
    assert_eq!(
        each(long.threadgroup_barriers, short.threadgroup_barriers),
        2.0 / 8.0 * threadgroups as f64
    );
    let (short, long) = (short.memory.unwrap(), long.memory.unwrap());
    // A query and a key of 128, a threadgroup, once.
    assert_eq!(
        each(long.buffers[1].read_bytes, short.buffers[1].read_bytes),
        1_024.0 * threadgroups as f64
    );
    assert_eq!(
        each(
            long.threadgroup.read_bytes - short.threadgroup.read_bytes,
            0
        ),
        // Eight loads of 16 bytes a lane, a pair of values, decay and strength; and outputs, as they are written.
        (simdgroups * 32 * (8 * 16 + 8 + 4 + 4) + threadgroups * 32 * 4) as f64
    );
}

#[test]
fn no_form_has_a_race_or_leaves_its_buffers() {
    for heads in [real_heads(), odd_heads()] {
        for switches in [BY_ROWS, BY_CHUNKS, BY_BLOCKS] {
            for schedule in [Schedule::ProgramOrder, Schedule::Shuffled(3)] {
                report(&heads, switches, 70, schedule);
            }
        }
    }
}

/// Index of the function constant that says which barrier is gone.
const REMOVED: u32 = 63;

#[test]
fn a_barrier_taken_away_from_chunks_is_missed() {
    const FILE: &str = "delta_chunk.metal";
    let heads = json!({"num_hidden_layers": 1, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
                       "linear_key_head_dim": 16, "linear_value_head_dim": 32});
    let checkpoint = Synthetic::small(heads.clone()).open();
    let mut all = Sources::new();
    for (name, text) in SOURCES {
        all = all.with(name, text);
    }
    let (_, text) = SOURCES.iter().find(|(name, _)| *name == FILE).unwrap();
    let (removable, count) = removable_barriers(text, REMOVED);
    all = all.with(FILE, &removable);
    let inputs = Inputs::random(75, &heads, 6);
    let run = |barrier| {
        let options = EmulatedOptions {
            further_constant: Some(Constant {
                index: REMOVED,
                value: ConstantValue::UInt(barrier),
            }),
            ..race(Schedule::ProgramOrder)
        };
        let gpu = Emulated::with_sources(all.clone(), options);
        let options = GpuOptions {
            switches: BY_CHUNKS,
        };
        let mut device = GpuDevice::new(gpu, &checkpoint, options, &mut |_, _| {}).unwrap();
        let model = device.model().clone();
        let mut scan = Scan::new(&mut device, &model, Precision::F32);
        // Chunks that are whole, that begin late and that end early.
        scan.run(&inputs, 0..35)
            .and_then(|_| scan.run(&inputs, 35..75))
    };
    run(count).unwrap();
    let unnoticed: Vec<u32> = (0..count).filter(|&barrier| run(barrier).is_ok()).collect();
    assert!(unnoticed.is_empty(), "of {count}: {unnoticed:?}");
}
