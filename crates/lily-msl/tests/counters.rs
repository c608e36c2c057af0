//! Counts of memory traffic, held against what can be worked out by hand.

mod common;

use common::{bytes, bytes_mut, compile};
use lily_msl::{
    Argument, BuildKind, Constant, ConstantValue, Launch, Library, MemoryCounters, Report,
    Schedule, SharedBuffer, Traffic,
};

fn library() -> Library {
    compile(
        include_str!("kernels/counters.metal"),
        "counters.metal",
        BuildKind::Race,
    )
}

/// Runs a kernel in several ways, which must count the same.
#[track_caller]
fn run(
    library: &Library,
    kernel: &str,
    constants: &[Constant],
    threadgroups: u32,
    threads: u32,
    arguments: &mut [Argument],
) -> (Report, MemoryCounters) {
    let launch = Launch::new([threadgroups, 1, 1], [threads, 1, 1]);
    let ways = [
        launch,
        launch,
        launch.schedule(Schedule::Shuffled(1)),
        launch.schedule(Schedule::Shuffled(2)),
        launch.counters_only(),
    ];
    let reports = ways.map(
        |launch| match library.dispatch(kernel, constants, launch, arguments) {
            Ok(report) => report,
            Err(error) => panic!("{error}"),
        },
    );
    for report in &reports {
        assert_eq!(*report, reports[0], "{kernel}");
    }
    let [report, ..] = reports;
    let memory = report.memory.clone().expect("the race build counts");
    (report, memory)
}

/// Loads of buffer 0 and stores to buffer 1 over 4 simdgroups in 2 threadgroups.
#[track_caller]
fn copy(kernel: &str, floats_read: usize, floats_written: usize) -> (Traffic, Traffic) {
    let library = library();
    let x = vec![1.0_f32; floats_read];
    let mut y = vec![0.0_f32; floats_written];
    let mut arguments = [
        Argument::ReadOnly(bytes(&x)),
        Argument::Buffer(bytes_mut(&mut y)),
    ];
    let (report, memory) = run(&library, kernel, &[], 2, 64, &mut arguments);
    assert_eq!(
        (report.threadgroups, report.simdgroups, report.threads),
        (2, 4, 128)
    );
    let mut total = memory.buffers[0];
    total += memory.buffers[1];
    assert_eq!(memory.device, total);
    assert_eq!(memory.constant, Traffic::default());
    (memory.buffers[0], memory.buffers[1])
}

fn reads(bytes: u64, lines: u64, accesses: u64) -> Traffic {
    Traffic {
        read_bytes: bytes,
        read_lines: lines,
        read_accesses: accesses,
        ..Traffic::default()
    }
}

fn writes(bytes: u64, lines: u64, accesses: u64) -> Traffic {
    Traffic {
        written_bytes: bytes,
        written_lines: lines,
        written_accesses: accesses,
        ..Traffic::default()
    }
}

#[test]
fn coalesced_loads_touch_one_line_a_simdgroup() {
    let (x, y) = copy("copy_coalesced", 128, 128);
    assert_eq!(x, reads(512, 4, 4));
    assert_eq!(y, writes(512, 4, 4));
}

#[test]
fn strided_loads_touch_a_line_each() {
    let (x, y) = copy("copy_strided", 128 * 33, 128);
    assert_eq!(x, reads(512, 128, 4));
    assert_eq!(y, writes(512, 4, 4));
}

#[test]
fn vectors_are_one_access() {
    let (x, y) = copy("copy_wide", 512, 512);
    assert_eq!(x, reads(2048, 16, 4));
    assert_eq!(y, writes(2048, 16, 4));
    let (x, y) = copy("copy_bfloats", 256, 256);
    assert_eq!(x, reads(1024, 8, 4));
    assert_eq!(y, writes(1024, 8, 4));
}

#[test]
fn narrow_accesses_touch_their_lines_again() {
    let (x, y) = copy("copy_narrow", 512, 512);
    assert_eq!(x, reads(2048, 64, 16));
    assert_eq!(y, writes(2048, 64, 16));
}

#[test]
fn each_side_of_a_branch_is_an_access() {
    // Of a simdgroup, 16 lanes take each side; together they read two lines.
    let (x, y) = copy("branches", 160, 128);
    assert_eq!(x, reads(512, 8, 8));
    assert_eq!(y, writes(512, 4, 4));
}

#[test]
fn lanes_that_share_a_word_ask_for_it_each() {
    let library = library();
    let (x, mut y, n) = ([1.0_f32], vec![0.0_f32; 64], [40_u32]);
    let mut arguments = [
        Argument::ReadOnly(bytes(&x)),
        Argument::Buffer(bytes_mut(&mut y)),
        Argument::Bytes(bytes(&n)),
    ];
    let (_, memory) = run(&library, "broadcast", &[], 1, 64, &mut arguments);
    assert_eq!(memory.buffers[0], reads(160, 2, 2));
    assert_eq!(memory.buffers[1], writes(160, 2, 2));
    assert_eq!(memory.constant, reads(256, 2, 2));
}

#[test]
fn loops_count_each_time_round() {
    let library = library();
    let (x, mut y) = (vec![1.0_f32; 128 * 8], vec![0.0_f32; 8]);
    let mut arguments = [
        Argument::ReadOnly(bytes(&x)),
        Argument::Buffer(bytes_mut(&mut y)),
    ];
    let (report, memory) = run(&library, "row_sum", &[], 8, 32, &mut arguments);
    assert_eq!(report.simdgroup_operations, 8);
    assert_eq!(memory.buffers[0], reads(4096, 32, 32));
    assert_eq!(memory.buffers[1], writes(32, 8, 8));
    assert_eq!(y, [128.0; 8]);
}

#[test]
fn banks_conflict_by_their_stride() {
    let library = library();
    // 64 lanes are two simdgroups, each with one store and one load: four accesses. Lane i is at bank
    // i * stride modulo 32.
    for (stride, rounds) in [(1, 1), (2, 2), (3, 1), (4, 4), (32, 32), (33, 1)] {
        let mut y = vec![0.0_f32; 64];
        let constants = [Constant {
            index: 0,
            value: ConstantValue::UInt(stride),
        }];
        let mut arguments = [
            Argument::Buffer(bytes_mut(&mut y)),
            Argument::Threadgroup(64 * 4 * stride as usize),
        ];
        let (report, memory) = run(&library, "banks", &constants, 1, 64, &mut arguments);
        assert_eq!(report.threadgroup_barriers, 1);
        let counted = memory.threadgroup;
        assert_eq!((counted.read_bytes, counted.written_bytes), (256, 256));
        assert_eq!(counted.accesses, 4);
        assert_eq!(counted.bank_conflicts, 4 * (rounds - 1), "stride {stride}");
    }
}

#[test]
fn wide_stores_side_by_side_do_not_conflict() {
    let library = library();
    let mut y = vec![0.0_f32; 32];
    let mut arguments = [Argument::Buffer(bytes_mut(&mut y))];
    let (report, memory) = run(&library, "wide_banks", &[], 1, 32, &mut arguments);
    assert_eq!(report.simdgroup_barriers, 1);
    let counted = memory.threadgroup;
    // The two components are loads of four bytes each, 16 bytes apart from lane to lane: four rounds for
    // what one could do.
    assert_eq!((counted.read_bytes, counted.written_bytes), (256, 512));
    assert_eq!(counted.accesses, 3);
    assert_eq!(counted.bank_conflicts, 2 * 3);
}

#[test]
fn atomics_read_and_write() {
    let library = library();
    let mut n = [0_u32];
    let mut arguments = [Argument::Buffer(bytes_mut(&mut n))];
    let (_, memory) = run(&library, "count_threads", &[], 2, 32, &mut arguments);
    let counted = memory.buffers[0];
    assert_eq!((counted.read_bytes, counted.written_bytes), (256, 256));
    assert_eq!((counted.read_lines, counted.written_lines), (2, 2));
    // Five runs, each with the sum of 0 to 63.
    assert_eq!(n, [5 * 63 * 32]);
}

#[test]
fn lines_start_where_the_allocation_does() {
    let library = library();
    let arena = SharedBuffer::new(4096);
    // 64 bytes into a line, each simdgroup's 128 bytes lie on two.
    let part = |offset| Argument::Shared {
        buffer: &arena,
        offset,
        length: 512,
    };
    let mut arguments = [part(64), part(1024)];
    let (_, memory) = run(&library, "copy_coalesced", &[], 4, 32, &mut arguments);
    assert_eq!(memory.buffers[0], reads(512, 8, 4));
    assert_eq!(memory.buffers[1], writes(512, 4, 4));
}
