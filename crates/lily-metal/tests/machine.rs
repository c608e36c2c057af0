//! The machine itself: memory, small kernels, order, errors. These tests run on a Mac; so far they have been
//! type-checked and linked, and never run.
#![cfg(target_os = "macos")]

use lily_gpu::kernels::{Bound, Constant, ConstantValue};
use lily_gpu::{Argument, Cost, Dispatch, Gpu};
use lily_metal::{Buffer, Metal, MetalOptions, Pipeline, open};
use lily_plan::DeviceError;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Tests take turns: what one takes of the GPU's memory another misses.
fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Kernels of these tests. `chase` follows an address as kernels follow those of sessions.
const KERNELS: &str = "
#include <metal_stdlib>
using namespace metal;
constant uint U [[function_constant(0)]];
constant int I [[function_constant(1)]];
constant bool B [[function_constant(2)]];
constant float F [[function_constant(3)]];

kernel void constants(device float* out [[buffer(0)]], constant uint& word [[buffer(3)]]) {
    out[0] = float(U);
    out[1] = float(I);
    out[2] = B ? 1.0f : 0.0f;
    out[3] = F;
    out[4] = float(word);
}

kernel void add_one(device uint* values [[buffer(0)]], uint i [[thread_position_in_grid]]) {
    values[i] += 1;
}

// Reads what another threadgroup of the stage before wrote.
kernel void rotate(
    device const uint* from [[buffer(0)]], device uint* to [[buffer(1)]], uint i [[thread_position_in_grid]],
    uint count [[threads_per_grid]])
{
    to[i] = from[(i + 257) % count] + 1;
}

struct Link {
    device uint* memory;
};
kernel void chase(device const Link* links [[buffer(0)]], uint i [[thread_position_in_grid]]) {
    links[0].memory[i] = i * 3;
}
";

const FILE: &str = "tests.metal";
const WORDS: usize = 64 * 1024;

fn machine(options: MetalOptions) -> Metal {
    let mut metal = open(options).expect("a Mac with Apple Silicon and macOS 15 or later");
    metal.add_source(FILE, KERNELS);
    metal
}

fn pipeline(metal: &mut Metal, name: &'static str, constants: &[Constant]) -> Pipeline {
    let bound = Bound {
        file: FILE,
        name,
        constants: constants.to_vec(),
        operands: Vec::new(),
    };
    metal.pipeline(&bound, constants).expect("a sound kernel")
}

fn whole(buffer: &Buffer, written: bool) -> Argument<'_, Metal> {
    Argument::Buffer {
        buffer,
        offset: 0,
        bytes: usize::MAX,
        written,
    }
}

fn dispatch<'a>(
    pipeline: &'a Pipeline,
    arguments: Vec<Argument<'a, Metal>>,
    threadgroups: usize,
    threads: u32,
) -> Dispatch<'a, Metal> {
    Dispatch {
        pipeline,
        arguments,
        grid: [threadgroups as u32, 1, 1],
        threads,
        reached: &[],
        cost: Cost::default(),
        divisible: None,
    }
}

fn read_words(metal: &Metal, buffer: &Buffer, count: usize) -> Vec<u32> {
    let mut bytes = vec![0; count * 4];
    metal.read(buffer, 0, &mut bytes);
    let words = bytes.chunks_exact(4);
    words
        .map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]]))
        .collect()
}

#[test]
fn it_says_what_it_is() {
    let _alone = alone();
    let metal = machine(MetalOptions::default());
    let description = metal.describe();
    eprintln!("{description:?}\n{:?}", metal.machine());
    assert_eq!(description.device, "metal");
    assert!(!metal.machine().name.is_empty() && metal.machine().family >= 7);
    assert!(!description.matrices.is_empty());
    assert!(metal.available_memory().expect("known") > 1 << 30);
}

#[test]
fn buffers_begin_as_zeros_and_keep_what_is_written() {
    let _alone = alone();
    let metal = machine(MetalOptions::default());
    let bytes: Vec<u8> = (0..1_000_003_u32).map(|i| (i * 31 / 8) as u8).collect();
    // The second time, perhaps, in memory that was used before.
    for _ in 0..2 {
        let buffer = metal.allocate(bytes.len() + 7, "a test").expect("memory");
        assert_eq!(metal.address(&buffer) % 256, 0);
        let mut found = vec![1; bytes.len() + 7];
        metal.read(&buffer, 0, &mut found);
        assert!(found.iter().all(|byte| *byte == 0));
        metal.write(&buffer, 7, &bytes);
        metal.read(&buffer, 7, &mut found[7..]);
        assert_eq!(found[7..], bytes);
    }
}

#[test]
fn memory_comes_back() {
    let _alone = alone();
    let metal = machine(MetalOptions::default());
    let before = metal.available_memory().expect("known");
    let buffer = metal.allocate(256 << 20, "a test").expect("memory");
    assert!(metal.available_memory().expect("known") + (200 << 20) < before);
    drop(buffer);
    assert!(metal.available_memory().expect("known") + (50 << 20) > before);
}

#[test]
fn memory_that_there_is_not_is_refused_by_name() {
    let _alone = alone();
    let metal = machine(MetalOptions::default());
    let too_much = metal.machine().largest_buffer as usize + 1;
    let error = metal.allocate(too_much, "an absurd buffer").err();
    let Some(DeviceError::OutOfMemory { what, bytes, .. }) = error else {
        panic!("{error:?}")
    };
    assert_eq!(
        (what.as_str(), bytes),
        ("an absurd buffer", too_much as u64)
    );
    // Together too much, each of them small enough.
    let piece = (metal.machine().largest_buffer / 2) as usize;
    let mut held = Vec::new();
    let error = (0..64).find_map(|_| match metal.allocate(piece, "one more") {
        Ok(buffer) => {
            held.push(buffer);
            None
        }
        Err(error) => Some(error),
    });
    assert!(
        matches!(error, Some(DeviceError::OutOfMemory { .. })),
        "{error:?}"
    );
}

#[test]
fn constants_and_words_arrive() {
    let _alone = alone();
    let mut metal = machine(MetalOptions::default());
    let constants = [
        ConstantValue::UInt(4_000_000),
        ConstantValue::Int(-5),
        ConstantValue::Bool(true),
        ConstantValue::Float(0.25),
    ];
    let constants: Vec<Constant> = constants
        .into_iter()
        .zip(0..)
        .map(|(value, index)| Constant { index, value })
        .collect();
    let kernel = pipeline(&mut metal, "constants", &constants);
    let out = metal.allocate(20, "a test").expect("memory");
    let arguments = vec![
        whole(&out, true),
        Argument::None,
        Argument::None,
        Argument::Word(77),
    ];
    let stage = vec![dispatch(&kernel, arguments, 1, 1)];
    metal.submit(None, &[stage]).expect("sent");
    metal.wait().expect("done");
    let found = read_words(&metal, &out, 5);
    assert_eq!(
        found,
        [4_000_000.0, -5.0, 1.0, 0.25, 77.0].map(f32::to_bits)
    );
}

#[test]
fn kernels_follow_addresses() {
    let _alone = alone();
    let mut metal = machine(MetalOptions::default());
    let kernel = pipeline(&mut metal, "chase", &[]);
    let table = metal.allocate(8, "a table").expect("memory");
    let target = metal.allocate(WORDS * 4, "what it names").expect("memory");
    metal.write(&table, 0, &metal.address(&target).to_le_bytes());
    let stage = vec![dispatch(
        &kernel,
        vec![whole(&table, false)],
        WORDS / 256,
        256,
    )];
    metal.submit(None, &[stage]).expect("sent");
    metal.wait().expect("done");
    let expected: Vec<u32> = (0..WORDS as u32).map(|i| i * 3).collect();
    assert_eq!(read_words(&metal, &target, WORDS), expected);
}

/// More stages than a command buffer takes, in several runs before one wait: each reads what the one before wrote.
#[test]
fn stages_and_command_buffers_run_in_order() {
    let _alone = alone();
    const STAGES: usize = 300;
    const RUNS: usize = 3;
    let options = [
        MetalOptions::default(),
        MetalOptions {
            stage_timing: true,
            ..MetalOptions::default()
        },
    ];
    for options in options {
        let mut metal = machine(options.clone());
        let kernel = pipeline(&mut metal, "rotate", &[]);
        let pair = [(); 2].map(|()| metal.allocate(WORDS * 4, "a test").expect("memory"));
        for run in 0..RUNS {
            let stages: Vec<_> = (0..STAGES)
                .map(|stage| {
                    let from = (run * STAGES + stage) % 2;
                    let arguments = vec![whole(&pair[from], false), whole(&pair[1 - from], true)];
                    vec![dispatch(&kernel, arguments, WORDS / 256, 256)]
                })
                .collect();
            metal.submit(None, &stages).expect("sent");
        }
        metal.wait().expect("done");
        let last = read_words(&metal, &pair[RUNS * STAGES % 2], WORDS);
        assert!(
            last.iter().all(|word| *word == (RUNS * STAGES) as u32),
            "{options:?}"
        );
        let timings = metal.take_timings();
        let runs: u64 = timings.iter().map(|timing| timing.runs).sum();
        if options.stage_timing {
            assert_eq!(runs, (RUNS * STAGES) as u64);
        }
        assert!(timings.iter().all(|timing| timing.microseconds > 0.0));
        assert!(metal.take_timings().is_empty());
    }
}

/// Whoever drops buffers and pipelines while they are in use takes nothing from the GPU.
#[test]
fn what_is_in_use_stays() {
    let _alone = alone();
    let mut metal = machine(MetalOptions::default());
    for _ in 0..20 {
        let kernel = pipeline(&mut metal, "add_one", &[]);
        let buffer = metal.allocate(WORDS * 4, "a test").expect("memory");
        let stages: Vec<_> = (0..200)
            .map(|_| {
                vec![dispatch(
                    &kernel,
                    vec![whole(&buffer, true)],
                    WORDS / 256,
                    256,
                )]
            })
            .collect();
        metal.submit(None, &stages).expect("sent");
        drop(stages);
        drop(buffer);
        drop(kernel);
    }
    metal.wait().expect("done");
}

#[test]
fn an_error_in_a_kernel_names_file_and_line() {
    let _alone = alone();
    let mut metal = machine(MetalOptions::default());
    metal.add_source(
        "wrong.h",
        "inline float wrong() {\n    return undeclared;\n}\n",
    );
    metal.add_source(
        "wrong.metal",
        "#include \"elements.h\"\n#include \"wrong.h\"\nkernel void nothing() {}\n",
    );
    let bound = Bound {
        file: "wrong.metal",
        name: "nothing",
        constants: Vec::new(),
        operands: Vec::new(),
    };
    let error = metal.pipeline(&bound, &[]).err().expect("it is wrong");
    let message = error.to_string();
    for part in ["kernels/wrong.metal", "kernels/wrong.h:2", "undeclared"] {
        assert!(message.contains(part), "{part}: {message}");
    }
    let absent = Bound {
        name: "absent",
        file: FILE,
        ..bound
    };
    let error = metal.pipeline(&absent, &[]).err().expect("it is absent");
    assert!(error.to_string().contains("absent of kernels/tests.metal"));
    // And the machine goes on.
    pipeline(&mut metal, "add_one", &[]);
}

#[test]
fn what_metal_would_stop_the_program_for_is_refused() {
    let _alone = alone();
    let mut metal = machine(MetalOptions::default());
    let kernel = pipeline(&mut metal, "add_one", &[]);
    let buffer = metal.allocate(1024, "a test").expect("memory");
    let beyond = |offset, bytes| Argument::Buffer {
        buffer: &buffer,
        offset,
        bytes,
        written: true,
    };
    for (arguments, threads) in [
        (vec![whole(&buffer, true)], 4096),
        (vec![whole(&buffer, true)], 0),
        (vec![beyond(1028, usize::MAX)], 32),
        (vec![beyond(512, 516)], 32),
    ] {
        let stage = vec![dispatch(&kernel, arguments, 1, threads)];
        let error = metal.submit(None, &[stage]).expect_err("refused");
        assert!(error.to_string().contains("kernel add_one"), "{error}");
    }
    // An empty grid is nothing to do.
    let stage = vec![dispatch(&kernel, vec![whole(&buffer, true)], 0, 32)];
    metal.submit(None, &[stage]).expect("sent");
    metal.wait().expect("done");
    assert!(
        read_words(&metal, &buffer, 256)
            .iter()
            .all(|word| *word == 0)
    );
}
