//! Kernels with one defect each, and good kernels with one barrier removed: what the emulator has to find.

mod common;

use common::{Random, bytes, bytes_mut, compile};
use lily_msl::{
    Argument, BuildKind, Constant, ConstantValue, EmulatorError, FaultKind, Launch, Library,
    Report, Schedule, removable_barriers,
};

fn run(library: &Library, kernel: &str, schedule: Schedule) -> Result<Report, EmulatorError> {
    let (mut out, input) = ([0.0_f32; 64], [0.0_f32; 64]);
    let takes_input = library
        .kernel(kernel)
        .is_some_and(|kernel| kernel.buffers.len() > 1);
    let mut arguments = vec![Argument::Buffer(bytes_mut(&mut out))];
    if takes_input {
        arguments.push(Argument::ReadOnly(bytes(&input)));
    }
    // The kernels share their output among threadgroups: only the one that is about that gets two.
    let threadgroups = if kernel == "bad_grid_race" { 2 } else { 1 };
    let launch = Launch::new([threadgroups, 1, 1], [64, 1, 1]).schedule(schedule);
    library.dispatch(kernel, &[], launch, &mut arguments)
}

#[test]
fn seeded_defects_are_found() {
    use FaultKind::{Divergence, Limit, OutOfBounds, Race, Uninitialised};
    let library = compile(
        include_str!("kernels/bad.metal"),
        "bad.metal",
        BuildKind::Race,
    );
    // The line is that of the access or of an operation named in the message.
    let expected = [
        ("bad_missing_barrier", Race, 7),
        ("bad_barrier_flags", Race, 13),
        ("bad_simd_race", Race, 18),
        ("bad_divergent_barrier", Divergence, 27),
        ("bad_two_barriers", Divergence, 34),
        ("bad_divergent_simd", Divergence, 40),
        ("bad_half_simd", Divergence, 46),
        ("bad_oob_read", OutOfBounds, 51),
        ("bad_oob_write", OutOfBounds, 54),
        ("bad_oob_vec", OutOfBounds, 57),
        ("bad_oob_threadgroup", OutOfBounds, 61),
        ("bad_grid_race", Race, 65),
        ("bad_early_return", Divergence, 69),
        ("bad_uninit", Uninitialised, 74),
        ("bad_big", Limit, 0),
    ];
    assert_eq!(library.kernels().len(), expected.len() + 1);
    for (kernel, kind, line) in expected {
        for schedule in [Schedule::ProgramOrder, Schedule::Shuffled(5)] {
            let error = run(&library, kernel, schedule).expect_err(kernel);
            let fault = error.fault().unwrap_or_else(|| panic!("{kernel}: {error}"));
            let text = error.to_string();
            // Without its barrier, a value may also be read before anybody has written it.
            let early = kind == Race && fault.kind == Uninitialised;
            assert!(fault.kind == kind || early, "{text}");
            // A shuffled schedule may meet the other side of a race first.
            // Elsewhere the line of an access is not looked up.
            let has_line = cfg!(target_os = "linux") || kind == Divergence;
            if has_line && line > 0 && schedule == Schedule::ProgramOrder {
                assert!(text.contains(&format!("bad.metal:{line}")), "{text}");
            }
        }
    }
    for schedule in [Schedule::ProgramOrder, Schedule::Shuffled(5)] {
        if let Err(error) = run(&library, "good_simd", schedule) {
            panic!("{error}");
        }
    }
}

#[test]
fn divergence_is_found_in_the_plain_build() {
    let library = compile(
        include_str!("kernels/bad.metal"),
        "bad.metal",
        BuildKind::Plain,
    );
    for kernel in [
        "bad_divergent_barrier",
        "bad_two_barriers",
        "bad_divergent_simd",
        "bad_half_simd",
        "bad_early_return",
    ] {
        let error = run(&library, kernel, Schedule::ProgramOrder).expect_err(kernel);
        let fault = error.fault().unwrap_or_else(|| panic!("{kernel}: {error}"));
        assert_eq!(fault.kind, FaultKind::Divergence, "{error}");
        assert!(error.to_string().contains("bad.metal:"), "{error}");
    }
}

/// Runs the kernels of the demonstration that have barriers.
fn run_with_barriers(library: &Library, constants: &[Constant]) -> Vec<EmulatorError> {
    let mut errors = Vec::new();
    let mut random = Random(6);
    let keys: Vec<u32> = (0..1000).map(|_| random.bits()).collect();
    let (mut total, mut offsets) = (vec![0_u32; 256], vec![0_u32; 512]);
    let count = [1000_u32];
    let launch = Launch::new([2, 1, 1], [256, 1, 1]);
    let mut arguments = [
        Argument::ReadOnly(bytes(&keys)),
        Argument::Buffer(bytes_mut(&mut total)),
        Argument::Buffer(bytes_mut(&mut offsets)),
        Argument::Bytes(bytes(&count)),
    ];
    errors.extend(
        library
            .dispatch("hist_scan", constants, launch, &mut arguments)
            .err(),
    );
    let (a, b) = (vec![0_u16; 32 * 64], vec![0_u16; 32 * 64]);
    let mut c = vec![0.0_f32; 32 * 32];
    let sizes = [32_u32, 32, 64];
    let launch = Launch::new([1, 1, 1], [128, 1, 1]);
    let mut arguments = [
        Argument::ReadOnly(bytes(&a)),
        Argument::ReadOnly(bytes(&b)),
        Argument::Buffer(bytes_mut(&mut c)),
        Argument::Bytes(bytes(&sizes)),
    ];
    errors.extend(
        library
            .dispatch("gemm_sg", constants, launch, &mut arguments)
            .err(),
    );
    let sizes = [64_u32, 40, 1, 1, 64, 0.1_f32.to_bits()];
    let (q, kv) = (vec![0_u16; 64], vec![0_u16; 64 * 40]);
    let (mut partial, mut sums) = (vec![0.0_f32; 64], vec![0.0_f32; 2]);
    let mut arguments = [
        Argument::ReadOnly(bytes(&q)),
        Argument::ReadOnly(bytes(&kv)),
        Argument::ReadOnly(bytes(&kv)),
        Argument::Buffer(bytes_mut(&mut partial)),
        Argument::Buffer(bytes_mut(&mut sums)),
        Argument::Bytes(bytes(&sizes)),
        Argument::Threadgroup((4 * 64 + 8) * 4),
    ];
    errors.extend(
        library
            .dispatch("attn_partial_f16_64", constants, launch, &mut arguments)
            .err(),
    );
    errors
}

#[test]
fn a_removed_barrier_is_found() {
    let demo = include_str!("kernels/demo.metal");
    // The kernels with barriers alone, so that they compile quickly.
    let start = demo.find("struct GemvParams").expect("the first kernel");
    let end = demo
        .find("// ---------------------------------------------------------------- 2.")
        .expect("the second kernel");
    let odds = demo
        .find("// ---------------------------------------------------------------- 5.")
        .expect("the last kernel");
    let source = [&demo[..start], &demo[end..odds]].concat();
    let (mutants, barriers) = removable_barriers(&source, 9);
    assert_eq!(barriers, 7);
    let library = compile(&mutants, "mutants.metal", BuildKind::Race);
    let run = |removed| {
        let constant = Constant {
            index: 9,
            value: ConstantValue::UInt(removed),
        };
        run_with_barriers(&library, &[constant])
    };
    let errors = run(barriers);
    assert!(errors.is_empty(), "{errors:?}");
    for removed in 0..barriers {
        let errors = run(removed);
        let kinds: Vec<_> = errors
            .iter()
            .filter_map(EmulatorError::fault)
            .map(|fault| fault.kind)
            .collect();
        let [FaultKind::Race | FaultKind::Uninitialised] = kinds[..] else {
            panic!("barrier {removed} can go unnoticed: {errors:?}");
        };
    }
}
