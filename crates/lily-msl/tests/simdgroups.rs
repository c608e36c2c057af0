//! What simdgroup functions compute, and what other backends cannot do as cheaply.

mod common;

use common::{Format, Random, bytes, bytes_mut, compile};
use lily_msl::{Argument, BuildKind, EmulatorError, FaultKind, Launch, Library};

const PARTS: &str = "#include <metal_stdlib>
#include <metal_simdgroup_matrix>
using namespace metal;
kernel void sums(
    device const float* x [[buffer(0)]], device float* inclusive [[buffer(1)]], device float* exclusive [[buffer(2)]],
    device float* total [[buffer(3)]], constant uint& n [[buffer(4)]], uint i [[thread_index_in_threadgroup]])
{
    if (i >= n) return;
    inclusive[i] = simd_prefix_inclusive_sum(x[i]);
    exclusive[i] = simd_prefix_exclusive_sum(x[i]);
    total[i] = simd_sum(x[i]);
}
kernel void copy(device const half* x [[buffer(0)]], device half* y [[buffer(1)]], constant uint& stride [[buffer(2)]])
{
    simdgroup_half8x8 m;
    simdgroup_load(m, x, stride);
    simdgroup_store(m, y, 8);
}
";

/// Results of `sums` with `alive` of `threads` lanes, and how many operations were those of part of a simdgroup.
fn sums(library: &Library, x: &[f32], threads: u32, alive: u32) -> ([Vec<f32>; 3], u32) {
    let alive = [alive];
    let mut results = [(); 3].map(|()| vec![-1.0_f32; x.len()]);
    let mut input = x.to_vec();
    let [inclusive, exclusive, total] = &mut results;
    let mut arguments = [
        Argument::Buffer(bytes_mut(&mut input)),
        Argument::Buffer(bytes_mut(inclusive)),
        Argument::Buffer(bytes_mut(exclusive)),
        Argument::Buffer(bytes_mut(total)),
        Argument::Bytes(bytes(&alive)),
    ];
    let launch = Launch::new([1, 1, 1], [threads, 1, 1]);
    let report = library.dispatch("sums", &[], launch, &mut arguments);
    let report = report.unwrap_or_else(|error| panic!("{error}"));
    (results, report.partial_simdgroup_operations)
}

/// Lanes add what stands 1, 2, 4, 8 and 16 below them: as GPUs without a unit for it do, bit for bit.
#[test]
fn prefix_sums_are_added_in_one_order() {
    let library = compile(PARTS, "parts.metal", BuildKind::Plain);
    let x = Random(7).floats(32);
    let ([inclusive, exclusive, total], partial) = sums(&library, &x, 32, 32);
    assert_eq!(partial, 0);
    let mut expected = x.clone();
    for distance in [1, 2, 4, 8, 16] {
        let before = expected.clone();
        for lane in distance..32 {
            expected[lane] = before[lane] + before[lane - distance];
        }
    }
    assert_eq!(inclusive, expected);
    assert_eq!(exclusive[0], 0.0);
    assert_eq!(exclusive[1..], expected[..31]);
    let mut tree = x;
    for distance in [16, 8, 4, 2, 1] {
        for lane in 0..distance {
            tree[lane] += tree[lane + distance];
        }
    }
    assert_eq!(total, vec![tree[0]; 32]);
}

#[test]
fn operations_of_parts_of_simdgroups_are_counted() {
    let library = compile(PARTS, "parts.metal", BuildKind::Plain);
    let x: Vec<f32> = (1..=64).map(|value| value as f32).collect();
    // The second simdgroup has eight lanes.
    let ([inclusive, _, total], partial) = sums(&library, &x, 40, 40);
    assert_eq!(partial, 3);
    assert_eq!((inclusive[39], total[39]), (292.0, 292.0));
    // Lanes from 5 on have returned.
    let ([_, exclusive, total], partial) = sums(&library, &x, 32, 5);
    assert_eq!(partial, 3);
    assert_eq!((exclusive[4], total[0]), (10.0, 15.0));
    // The second simdgroup has returned as a whole.
    let (_, partial) = sums(&library, &x, 64, 32);
    assert_eq!(partial, 0);
}

/// Two 16-bit elements of a row are one access.
#[test]
fn rows_of_narrow_matrices_begin_at_even_elements() {
    let library = compile(PARTS, "parts.metal", BuildKind::Plain);
    let values: Vec<f32> = (0..100).map(|value| value as f32).collect();
    let mut x = Format::Half.encode_all(&values);
    let mut y = vec![0_u16; 64];
    let mut copy = |stride: u32| {
        let stride = [stride];
        let mut arguments = [
            Argument::Buffer(bytes_mut(&mut x)),
            Argument::Buffer(bytes_mut(&mut y)),
            Argument::Bytes(bytes(&stride)),
        ];
        let launch = Launch::new([1, 1, 1], [32, 1, 1]);
        library.dispatch("copy", &[], launch, &mut arguments)
    };
    assert!(copy(10).is_ok());
    let Err(EmulatorError::Fault(fault)) = copy(9) else {
        panic!("an odd stride was taken");
    };
    assert_eq!(fault.kind, FaultKind::Misaligned);
    assert!(
        fault.message.starts_with("simdgroup_load: rows of 16-bit"),
        "{fault}"
    );
    assert_eq!(y[8], x[10]);
}

/// Every kernel that other backends are tested with is one for this.
#[test]
fn the_whole_library_is_known() {
    for (text, file) in [
        (include_str!("kernels/surface.metal"), "surface.metal"),
        (include_str!("kernels/elements.metal"), "elements.metal"),
    ] {
        assert!(!compile(text, file, BuildKind::Plain).kernels().is_empty());
    }
}
