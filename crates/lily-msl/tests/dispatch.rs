//! Dispatches against signatures, errors of compilers, memory that arguments share, and the language.

mod common;

use common::{Random, bytes, bytes_mut, compile};
use lily_msl::{
    Argument, BuildKind, Constant, ConstantValue, Emulator, EmulatorError, FaultKind, Launch,
    Library, SharedBuffer, Sources,
};

const KERNELS: &str = "#include <metal_stdlib>
using namespace metal;
constant uint N [[function_constant(2)]];
kernel void fill(device float* o [[buffer(0)]], device const float* x [[buffer(1)]],
    threadgroup float* s [[threadgroup(0)]], uint t [[thread_index_in_threadgroup]]) {
    s[t] = x[t];
    o[t] = s[t] * N;
}
kernel void shift(device float* o [[buffer(0)]], device const float* x [[buffer(1)]],
    uint t [[thread_index_in_threadgroup]]) {
    o[t] = x[t] + 1;
}
kernel void wide(device uchar* o [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
    *(device uint*)(o + 2 * t) = t;
}
";

fn one() -> Launch {
    Launch::new([1, 1, 1], [32, 1, 1])
}

#[track_caller]
fn refused(result: Result<lily_msl::Report, EmulatorError>, message: &str) {
    match result {
        Err(EmulatorError::Binding {
            message: actual, ..
        }) => assert_eq!(actual, message),
        other => panic!("{other:?}"),
    }
}

#[test]
fn dispatches_are_held_against_signatures() {
    let library = compile(KERNELS, "kernels.metal", BuildKind::Plain);
    let (mut o, x) = ([0.0_f32; 32], [2.0_f32; 32]);
    let n = |value| [Constant { index: 2, value }];
    let three = n(ConstantValue::UInt(3));
    let mut run = |constants: &[Constant], launch: Launch, which: usize| {
        let output = Argument::Buffer(bytes_mut(&mut o));
        let input = || Argument::ReadOnly(bytes(&x));
        let memory = || Argument::Threadgroup(128);
        let mut arguments = match which {
            0 => vec![output, input(), memory()],
            1 => vec![output],
            2 => vec![input(), input(), memory()],
            3 => vec![output, input()],
            4 => vec![output, input(), input(), memory()],
            5 => vec![output, Argument::Unbound, memory()],
            _ => vec![output, input(), Argument::Threadgroup(40_000)],
        };
        library.dispatch("fill", constants, launch, &mut arguments)
    };
    run(&three, one(), 0).expect("a fitting dispatch");
    refused(run(&three, one(), 1), "buffer 1 (x) is not bound");
    refused(
        run(&three, one(), 2),
        "buffer 0 (o) is written, but bound read-only",
    );
    refused(
        run(&three, one(), 3),
        "threadgroup memory 0 (s) has no size",
    );
    refused(run(&three, one(), 4), "it has no buffer 2");
    refused(run(&three, one(), 5), "buffer 1 (x) is not bound");
    refused(
        run(&three, one(), 6),
        "more than 32 KiB of threadgroup memory",
    );
    let float = n(ConstantValue::Float(1.0));
    refused(
        run(&float, one(), 0),
        "function constant N is uint, not Float(1.0)",
    );
    let other = [Constant {
        index: 0,
        ..three[0]
    }];
    refused(run(&other, one(), 0), "it reads no function constant 0");
    let large = Launch::new([1, 1, 1], [64, 32, 1]);
    refused(
        run(&three, large, 0),
        "[64, 32, 1] threads in a threadgroup; 1 to 1024 can be",
    );
    assert_eq!(o, [6.0; 32]);
    refused(
        library.dispatch("none", &[], one(), &mut []),
        "not in the library",
    );
}

#[test]
fn messages_of_the_compiler_name_the_kernel_file() {
    let source = "#include <metal_stdlib>\nusing namespace metal;\nkernel void k(device float* o [[buffer(0)]]) {\n    o[0] = missing(1);\n}\n";
    let sources = Sources::new().with("wrong.metal", source);
    let result = Emulator::in_target_directory().compile(&sources, "wrong.metal", BuildKind::Plain);
    let Err(EmulatorError::Compile(message)) = result else {
        panic!("it cannot compile");
    };
    assert!(message.contains("wrong.metal:4:"), "{message}");
    assert!(message.contains("missing"), "{message}");
}

#[test]
fn arguments_may_share_memory() {
    let library = compile(KERNELS, "kernels.metal", BuildKind::Race);
    let arena = SharedBuffer::new(1024);
    arena.write(512, bytes(&[5.0_f32; 32]));
    let part = |offset| Argument::Shared {
        buffer: &arena,
        offset,
        length: 128,
    };
    library
        .dispatch("shift", &[], one(), &mut [part(0), part(512)])
        .expect("apart");
    let mut out = [0.0_f32; 32];
    arena.read(0, bytes_mut(&mut out));
    assert_eq!(out, [6.0; 32]);
    // In place is fine, one element off is a race although the two are different arguments.
    library
        .dispatch("shift", &[], one(), &mut [part(0), part(0)])
        .expect("in place");
    let error = library
        .dispatch("shift", &[], one(), &mut [part(4), part(0)])
        .expect_err("a race");
    assert_eq!(
        error.fault().map(|fault| fault.kind),
        Some(FaultKind::Race),
        "{error}"
    );
}

#[test]
fn misaligned_accesses_are_found() {
    let library = compile(KERNELS, "kernels.metal", BuildKind::Race);
    let mut out = [0_u32; 32];
    let error = library
        .dispatch(
            "wide",
            &[],
            one(),
            &mut [Argument::Buffer(bytes_mut(&mut out))],
        )
        .expect_err("misaligned");
    let kinds = [FaultKind::Misaligned, FaultKind::Race];
    let kind = error.fault().expect("a fault").kind;
    assert!(kinds.contains(&kind), "{error}");
}

fn language(build: BuildKind) -> Library {
    let sources = Sources::new()
        .with("language.metal", include_str!("kernels/language.metal"))
        .with("language.h", include_str!("kernels/language.h"));
    match Emulator::in_target_directory().compile(&sources, "language.metal", build) {
        Ok(library) => library,
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn reductions_by_a_tree() {
    let x = Random(9).floats(300);
    for build in [BuildKind::Plain, BuildKind::Race] {
        let library = language(build);
        let signature = library.kernel("reduce_sum").expect("an instantiation");
        assert_eq!(signature.function_constants[0].name, "SCALE");
        for (kernel, scale) in [("reduce_sum", 1), ("reduce_sum", 2), ("reduce_largest", 1)] {
            let mut out = [0_u32; 2];
            let range = [10_u32, 200];
            let constants = [Constant {
                index: 3,
                value: ConstantValue::Int(scale),
            }];
            let mut arguments = [
                Argument::ReadOnly(bytes(&x)),
                Argument::Buffer(bytes_mut(&mut out)),
                Argument::Unbound,
                Argument::Bytes(bytes(&range)),
            ];
            let launch = Launch::new([1, 1, 1], [256, 1, 1]);
            if let Err(error) = library.dispatch(kernel, &constants, launch, &mut arguments) {
                panic!("{error}");
            }
            let value = f32::from_bits(out[0]);
            let part = &x[10..210];
            if kernel == "reduce_sum" {
                let expected = part.iter().sum::<f32>() * scale as f32;
                assert!((value - expected).abs() < 1e-4, "{value} for {expected}");
                assert_eq!(out[1], 10);
            } else {
                assert_eq!(value, part.iter().copied().fold(f32::MIN, f32::max));
                assert_eq!(x[out[1] as usize], value);
            }
        }
    }
}

#[test]
fn memory_is_cast_and_bits_are_moved() {
    let mut random = Random(10);
    let packed: Vec<u32> = (0..128).map(|_| random.bits()).collect();
    for build in [BuildKind::Plain, BuildKind::Race] {
        let (mut out, mut words) = ([0.0_f32; 32], [0_u32; 32]);
        let mut arguments = [
            Argument::ReadOnly(bytes(&packed)),
            Argument::Buffer(bytes_mut(&mut out)),
            Argument::Buffer(bytes_mut(&mut words)),
        ];
        if let Err(error) = language(build).dispatch("unpack", &[], one(), &mut arguments) {
            panic!("{error}");
        }
        for lane in 0..32 {
            let row = bytes(&packed[(31 - lane) * 4..][..4]);
            let sum: f32 = row.iter().map(|code| f32::from(*code) * 0.5).sum();
            assert_eq!(out[lane], sum + (lane % 4 + 1) as f32);
            let [x, y, z, w] = packed[lane * 4..][..4] else {
                panic!("four words");
            };
            let product = (u64::from(x) * 0x9E37_79B9) >> 32;
            let inserted = (w & !(31 << 8)) | ((lane as u32 & 31) << 8);
            let distance = (lane as u32).abs_diff(9) << 3;
            let expected =
                product as u32 ^ y.rotate_left(7) ^ z.reverse_bits() ^ inserted ^ distance;
            assert_eq!(words[lane], expected, "lane {lane}");
        }
    }
}
