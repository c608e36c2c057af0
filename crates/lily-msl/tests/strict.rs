//! The strict check: what it must take and what it must refuse, and every kernel file there is.
//!
//! Without a clang that can do it these tests say SKIPPED, unless `LILY_REQUIRE_STRICT` is set.

use std::fs;
use std::path::Path;

use lily_msl::{Sources, StrictCheck, StrictError};

/// Where a piece of source goes.
#[derive(Clone, Copy)]
enum Place {
    /// Before the kernel.
    Top,
    /// Into the kernel's body.
    Body,
}

use Place::{Body, Top};

/// A file with a kernel and the two pieces in it. Each lies on a line of its own: 24 and 33.
fn source(top: &str, body: &str) -> String {
    format!(
        "#include <metal_stdlib>
using namespace metal;
struct P {{ uint n; float s; }};
struct Q {{ float a[4]; uint k; }};
struct Row {{ device const uint4* words; device const bfloat* scales; uint count; }};
struct Counter {{ uint n; void count() {{ n += 1; }} uint get() const device {{ return n; }} }};
constant bool TAIL [[function_constant(0)]];
constant uint GROUP = 64;
template <typename T> inline T first(device const T* p) {{ return p[0]; }}
inline float sum_of(const device float* p, uint n) {{
    float s = 0;
    for (uint i = 0; i < n; ++i) s += p[i];
    return s;
}}
inline void put(threadgroup float* p, float v) {{ p[0] = v; }}
inline void increase(thread float& x) {{ x += 1; }}
template <typename T, typename U> struct Sum {{
    T v;
    void add(U x) {{ v += T(x); }}
}};
inline float halve(float x) {{ return x / 2; }}


{top}
kernel void k(device float* o [[buffer(0)]], device const half* h [[buffer(1)]], constant P& p [[buffer(2)]],
    device atomic_uint* au [[buffer(3)]], device const bfloat4* b4 [[buffer(4)]], constant float* cf [[buffer(5)]],
    device Q* dq [[buffer(6)]], device bfloat* bo [[buffer(7)]], device const Row* rows [[buffer(8)]],
    device atomic_float* af [[buffer(9)]], threadgroup float* tg [[threadgroup(0)]],
    uint tid [[thread_index_in_threadgroup]], uint3 g [[threadgroup_position_in_grid]]) {{
    threadgroup float sh[64];
    threadgroup half4 sh4[8][2];
    threadgroup atomic_uint at[4];
    {body}
}}
"
    )
}

/// What must pass.
const TAKEN: &[(Place, &str)] = &[
    (Body, "device float* q = o + tid; q[0] = float(h[tid]);"),
    (
        Body,
        "threadgroup float* s = sh; s[tid] = 1; put(sh, 2); put(tg, 3.0);",
    ),
    (
        Body,
        "float x = 0; increase(x); thread float* px = &x; *px = 2;",
    ),
    (Body, "o[tid] = sum_of(o, p.n) + p.s * cf[1];"),
    (
        Body,
        "float4 v = float4(b4[tid]); v.xy = v.zw; o[0] = v.x + v[1]; sh4[1][0] = half4(v);",
    ),
    (
        Body,
        "atomic_fetch_add_explicit(&at[1], 1u, memory_order_relaxed); atomic_fetch_add_explicit(au, 1u, memory_order_relaxed);",
    ),
    (
        Body,
        "using T4 = vec<float, 4>; T4 a = T4(1, 2, 3, 4); T4 b = T4(a.xy, 1.0f, 2.0f); o[0] = dot(a, b);",
    ),
    (Body, "const float s = simd_sum(o[tid]); o[tid] = s;"),
    (
        Body,
        "Sum<float, half> a; a.v = 0; a.add(h[0]); o[0] = a.v;",
    ),
    (Body, "Q q = dq[1]; q.a[0] = 1; dq[0] = q;"),
    (Body, "if constexpr (sizeof(float) == 4) { o[0] = 1; }"),
    (
        Body,
        "simdgroup_float8x8 m; simdgroup_load(m, sh, 8); simdgroup_store(m, o, 8); m.thread_elements()[0] = 1;",
    ),
    (
        Body,
        "o[0] = select(1.0f, 2.0f, tid > 3); float4 z = select(float4(0), float4(1), float4(2) > 1.0f); o[1] = z.x;",
    ),
    (
        Body,
        "o[tid] = half(1.5h) * 2.0h + as_type<float>(0x3f800000u);",
    ),
    (
        Body,
        "device const float4* v4 = (device const float4*)o; device const float4* w4 = reinterpret_cast<device const float4*>(o); o[0] = v4[0].x + w4[1].y;",
    ),
    // Structures that hold pointers, read from device memory.
    (
        Body,
        "const Row row = rows[tid]; const uint4 w = row.words[g.x]; o[0] = float(row.scales[0]) * float(w.x & 15u);",
    ),
    (Body, "o[0] = float(rows[1].words[2].y);"),
    // Numbers of 16 bits.
    (
        Body,
        "bo[tid] = bfloat(o[tid]); bo[0] = bo[1] * bo[2]; bo[1] += bo[2]; float f = bo[3] + 1.0f; o[0] = f;",
    ),
    (
        Body,
        "bfloat4 v = b4[0] * bfloat(2.0f) + b4[1]; o[0] = dot(float4(v), float4(b4[2]));",
    ),
    (
        Body,
        "half x = 1.0f; x = x * 2.0h; float4 v = fma(float4(x), float4(2.0f), float4(1.0f)); o[0] = v.x;",
    ),
    (
        Body,
        "const uchar4 c = as_type<uchar4>(7u); const ushort2 u = as_type<ushort2>(9u); o[0] = c.x + u.y;",
    ),
    (
        Body,
        "float v = 0; for (ushort offset = 16; offset > 0; offset >>= 1) v += simd_shuffle_xor(v, offset); o[0] = v;",
    ),
    (
        Body,
        "o[0] = simd_max(o[0]) + simd_broadcast(o[1], 0) + simd_shuffle_down(o[2], 1) + simd_shuffle(o[3], tid);",
    ),
    (
        Body,
        "o[0] = precise::exp(o[1]) + fast::exp2(o[2]) + rsqrt(o[3]) + metal::log(o[4]) + precise::divide(o[5], o[6]);",
    ),
    (
        Body,
        "simdgroup_bfloat8x8 a, b; simdgroup_float8x8 c = make_filled_simdgroup_matrix<float, 8, 8>(0.0f); simdgroup_load(a, bo, 8, ulong2(0, 0), true); simdgroup_load(b, bo); simdgroup_multiply_accumulate(c, a, b, c);",
    ),
    (
        Body,
        "atomic_fetch_add_explicit(af, 1.0f, memory_order_relaxed); atomic_fetch_max_explicit(&at[0], tid, memory_order_relaxed);",
    ),
    (
        Body,
        "uint seen = 0; while (!atomic_compare_exchange_weak_explicit(au, &seen, seen + 1, memory_order_relaxed, memory_order_relaxed)) {}",
    ),
    (
        Body,
        "if (TAIL) o[0] = GROUP; float local[GROUP / 32]; local[0] = 1; o[1] = local[0];",
    ),
    (
        Body,
        "threadgroup uint local[2], generic; local[tid & 1] = tid; generic = 1; o[0] = local[1] + generic;",
    ),
    (Body, "if (is_function_constant_defined(TAIL)) o[0] = 1;"),
    (
        Body,
        "o[0] = first(h) + first<float>(o); threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);",
    ),
    (
        Body,
        "const float4 v = {1, 2, 3, 4}; o[0] = v.w; o[1] = INFINITY; o[2] = -INFINITY; o[3] = numeric_limits<float>::max();",
    ),
    (
        Body,
        "Counter c = {0}; c.count(); o[0] = c.n; device Counter* d = (device Counter*)o; o[1] = d->get();",
    ),
    (
        Top,
        "constant constexpr float TABLE[2] = {0.5, 1.5}; constant float4 ONES = float4(1.0f);",
    ),
    (
        Top,
        "template <int N> inline float power(float x) { if constexpr (N == 0) return 1; else return x * power<N - 1>(x); } inline float cube(float x) { return power<3>(x); }",
    ),
    (
        Top,
        "template <typename T, int N> kernel void t(device T* x [[buffer(0)]], uint i [[thread_position_in_grid]]) { x[i] = T(N); } template [[host_name(\"t_bf16\")]] kernel void t<bfloat, 2>(device bfloat*, uint); template [[host_name(\"t_f32\")]] [[kernel]] decltype(t<float, 3>) t<float, 3>;",
    ),
    (
        Top,
        "namespace own { inline float fract(float x) { return x - floor(x); } inline float g(float x) { return own::fract(x); } }",
    ),
    (
        Top,
        "inline float4 total(thread float4 (&rows)[2], device const float4 (*more)[2]) { return rows[0] + float4(*more[0]) + more[1][0]; }",
    ),
    (
        Top,
        "[[kernel, max_total_threads_per_threadgroup(64)]] void k2(device float* o [[buffer(0)]]) { o[0] = halve(3); }",
    ),
];

/// What must be refused.
const REFUSED: &[(Place, &str)] = &[
    // Address spaces.
    (Body, "threadgroup float* s = o;"),
    (Body, "device float* q = sh;"),
    (Body, "put(o, 1);"),
    (Body, "sum_of(sh, 3);"),
    (Body, "increase(sh[0]);"),
    (Body, "increase(o[0]);"),
    (Body, "device float* q = (device float*)sh;"),
    (Body, "device float& r = sh[0];"),
    (Body, "device float* q = cf;"),
    (Body, "thread float* px = o;"),
    (Body, "threadgroup float& r = o[0];"),
    (Body, "auto l = o; l = sh;"),
    (Body, "device const uint4* w = rows[0].scales;"),
    (Body, "float* g2 = o;"),
    (Body, "float x = 0; float* px = &x;"),
    (Body, "o[0] = *(float*)(o + 1);"),
    (Top, "inline float f(float* x) { return x[0]; }"),
    (Top, "inline float f(const float& x) { return x; }"),
    (Top, "struct R { float* p; };"),
    (Top, "using Pointer = float*;"),
    (Top, "inline void f() { threadgroup float x[4]; x[0] = 1; }"),
    (Body, "device Counter* d = (device Counter*)o; d->count();"),
    // What cannot be written.
    (Body, "cf[0] = 1;"),
    (Body, "p.n = 3;"),
    (Body, "h[0] = half(1);"),
    (Body, "rows[0].words[0] = uint4(1);"),
    (
        Top,
        "constant uint LIMIT = 3; inline void f() { LIMIT = 4; }",
    ),
    // Matrices and atomics.
    (Body, "simdgroup_half8x8 m; simdgroup_load(m, sh, 8);"),
    (Body, "simdgroup_float8x8 m; simdgroup_store(m, cf, 8);"),
    (Body, "simdgroup_matrix<float, 4, 8> m;"),
    (Body, "simdgroup_matrix<int, 8, 8> m;"),
    (
        Body,
        "atomic_fetch_add_explicit(o, 1.0f, memory_order_relaxed);",
    ),
    (
        Body,
        "uint x = 0; atomic_fetch_add_explicit(&x, 1u, memory_order_relaxed);",
    ),
    (
        Body,
        "atomic_fetch_add_explicit(au, 1u, memory_order_seq_cst);",
    ),
    (Body, "au[0] += 1;"),
    (
        Body,
        "atomic_fetch_max_explicit(af, 1.0f, memory_order_relaxed);",
    ),
    // Vectors and numbers.
    (Body, "float4 v = float4(1, 2, 3);"),
    (Body, "float2 v = float2(float4(1));"),
    (Body, "float4 v = float4(1) + float2(1);"),
    (Body, "half4 v = b4[0];"),
    (Body, "float4 v = h[0] + b4[0];"),
    (Body, "float4 v; v.q = 1;"),
    (Body, "o[0] = as_type<float>(half(1));"),
    (Body, "double d = 1;"),
    (Body, "bo[0] = o[0];"),
    (Body, "bo[0] += o[0];"),
    (Body, "bo[0] = h[0];"),
    (Body, "half x = bo[0];"),
    (Body, "bfloat x = bo[0] * 2.0f;"),
    (Top, "inline bfloat f(float x) { return x; }"),
    (Body, "bo[0] = exp(bo[1]);"),
    (Body, "bo[0] = max(bo[1], bo[2]);"),
    (Body, "o[0] = float(simd_sum(bo[0]));"),
    (Body, "o[0] = max(o[0], h[0]);"),
    (Body, "uint m = min(tid, 3);"),
    (Body, "Q q; q = 3;"),
    (Body, "float x; o[0] = x;"),
    // Names and calls.
    (Body, "uint x = undefined_name;"),
    (Body, "threadgroup_barrier(mem_flags::mem_threadgrp);"),
    (Body, "threadgroup_barrier();"),
    (Body, "float y = simd_sum();"),
    (Body, "float y = rsqrt(4);"),
    (Body, "bool y = simd_shuffle(true, 1);"),
    (Body, "ulong y = simd_sum(ulong(1));"),
    (Body, "float buffer[TAIL ? 4 : 8];"),
    // The language.
    (
        Top,
        "inline int fact(int n) { return n < 2 ? 1 : n * fact(n - 1); }",
    ),
    (
        Top,
        "inline int odd(int n); inline int even(int n) { return n == 0 ? 1 : odd(n - 1); } inline int odd(int n) { return n == 0 ? 0 : even(n - 1); }",
    ),
    (
        Top,
        "struct Walk { int n; int go(int i) { return i == 0 ? n : go(i - 1); } };",
    ),
    (Top, "struct V { virtual void f(); };"),
    (Top, "float g_global = 3;"),
    (Top, "constexpr float LIMIT = 3;"),
    (Top, "struct W { static constexpr int n = 3; };"),
    (Body, "static float calls = 0; calls += 1;"),
    (Body, "threadgroup float start = 1;"),
    (
        Body,
        "auto twice = [](float x) { return x * 2; }; o[0] = twice(1.0f);",
    ),
    (Body, "goto end; end: o[0] = 1;"),
    (Body, "thread float* x = new float; *x = 1;"),
    (Top, "inline void f() { throw 1; }"),
    (Top, "inline float call(float (*f)(float)) { return f(1); }"),
    (Top, "inline float fract(float x) { return x - floor(x); }"),
    (Body, "uint vertex = 3; o[vertex] = 1;"),
    // Kernels.
    (Top, "kernel void k2(float* o [[buffer(0)]]) {}"),
    (
        Top,
        "kernel void k2(device float* o [[buffer(0)]], device float* q [[buffer(0)]]) {}",
    ),
    (Top, "kernel void k2(device float* o [[bufer(0)]]) {}"),
    (
        Top,
        "kernel void k2(device float* o [[buffer(0)]], float3 t [[thread_position_in_grid]]) {}",
    ),
    (
        Top,
        "template <typename T> kernel void t(device T* x [[buffer(0)]]) { x[0] = float4(1).xy; } template [[host_name(\"t\")]] kernel void t<float>(device float*);",
    ),
];

/// The check, or `None` where there is no clang for it.
fn strict() -> Option<StrictCheck> {
    match StrictCheck::find() {
        Ok(check) => Some(check),
        Err(message) if std::env::var_os("LILY_REQUIRE_STRICT").is_some() => panic!("{message}"),
        Err(_) => {
            println!("SKIPPED: no clang for the strict check");
            None
        }
    }
}

fn check(check: &StrictCheck, place: Place, piece: &str) -> Result<(), StrictError> {
    let text = match place {
        Top => source(piece, ""),
        Body => source("", piece),
    };
    let sources = Sources::new().with("test.metal", &text);
    check.check(&sources, "test.metal").map(drop)
}

/// Every message names the line of the piece.
#[test]
fn pieces_are_taken_and_refused_as_in_msl() {
    let Some(strict) = strict() else { return };
    let mut wrong = Vec::new();
    for &(place, piece) in TAKEN {
        if let Err(error) = check(&strict, place, piece) {
            wrong.push(format!("refused: {piece}\n    {error}"));
        }
    }
    for &(place, piece) in REFUSED {
        let line = match place {
            Top => "test.metal:24: error: ",
            Body => "test.metal:33: error: ",
        };
        match check(&strict, place, piece) {
            Err(error) if error.to_string().lines().all(|text| text.starts_with(line)) => {
                println!(
                    "{piece}\n    {}",
                    error.to_string().trim_start_matches(line)
                );
            }
            Err(error) => wrong.push(format!("elsewhere: {piece}\n    {error}")),
            Ok(()) => wrong.push(format!("taken: {piece}")),
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    println!("{} taken, {} refused", TAKEN.len(), REFUSED.len());
}

/// A message is about the header that is at fault, whoever includes it; and a file that does not say `using
/// namespace metal` has none of the library's names.
#[test]
fn messages_name_headers_and_the_library_is_in_its_namespace() {
    let Some(strict) = strict() else { return };
    let kernel = "#include \"tile.h\"\nkernel void a(device float* o [[buffer(0)]]) {\n    o[0] = twice(o[1]);\n}\n";
    let header = "#pragma once\n#include <metal_stdlib>\nusing namespace metal;\ninline float twice(float x) {\n    return BODY;\n}\n";
    let with = |header: &str| {
        let sources = Sources::new()
            .with("a.metal", kernel)
            .with("tile.h", header);
        strict.check(&sources, "a.metal")
    };
    let kernels = with(&header.replace("BODY", "exp(x) * 2.0")).unwrap();
    assert_eq!(kernels[0].name, "a");
    for (body, message) in [
        ("double(x)", "tile.h:5: error: MSL has no double"),
        (
            "exq(x)",
            "tile.h:5: error: use of undeclared identifier 'exq'; did you mean 'exp'?",
        ),
    ] {
        let error = with(&header.replace("BODY", body)).unwrap_err();
        assert_eq!(error.to_string(), message);
    }
    let error = with(
        &header
            .replace("BODY", "exp(x)")
            .replace("using namespace metal;", ""),
    )
    .unwrap_err();
    let message = error.to_string();
    assert!(
        message.starts_with("tile.h:5: error: use of undeclared identifier 'exp'"),
        "{message}"
    );
}

/// Elements of four bits: in a right operand alone, made of a pointer to bytes.
#[test]
fn tensors_of_codes_are_made_of_bytes_and_stand_on_the_right() {
    let Some(strict) = strict() else { return };
    let with = |pointer: &str, operands: &str| {
        let text = format!(
            "#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
using namespace metal;
using namespace mpp::tensor_ops;
using Numbers = tensor<device bfloat, dextents<int32_t, 2>, tensor_inline>;
using Codes = tensor<device uint4b_format, dextents<int32_t, 2>, tensor_inline>;
using Sums = tensor<device float, dextents<int32_t, 2>, tensor_inline>;
kernel void k(device bfloat* x [[buffer(0)]], device uchar* w [[buffer(1)]], device float* o [[buffer(2)]]) {{
    Numbers numbers(x, dextents<int32_t, 2>(64, 16), array<int32_t, 2>{{1, 128}});
    Codes codes({pointer}, dextents<int32_t, 2>(64, 32), array<int32_t, 2>{{1, 128}});
    Sums sums(o, dextents<int32_t, 2>(32, 16));
    matmul2d<matmul2d_descriptor(16, 32, 64, false, true), execution_simdgroup> product;
    product.run({operands}, sums);
}}
"
        );
        let sources = Sources::new().with("test.metal", &text);
        strict.check(&sources, "test.metal").map(drop)
    };
    with("w", "numbers, codes").expect("as it should be");
    for (pointer, operands) in [
        ("x", "numbers, codes"),
        ("(device uint4b_format*)w", "numbers, codes"),
        ("w", "codes, numbers"),
        ("w", "codes, codes"),
    ] {
        assert!(with(pointer, operands).is_err(), "{pointer}, {operands}");
    }
}

/// The files of a folder that end in `.metal` or `.h`; none if there is no such folder.
fn sources_of(folder: &Path) -> Sources {
    let mut sources = Sources::new();
    let entries = fs::read_dir(folder).into_iter().flatten();
    for path in entries.map(|entry| entry.expect("an entry").path()) {
        if path
            .extension()
            .is_some_and(|extension| extension == "metal" || extension == "h")
        {
            let name = path
                .file_name()
                .expect("a name")
                .to_string_lossy()
                .into_owned();
            sources = sources.with(&name, &fs::read_to_string(&path).expect("text"));
        }
    }
    sources
}

/// The kernels of the product, and those of this crate's tests that show what kernels may contain.
#[test]
fn every_kernel_file_passes() {
    let Some(strict) = strict() else { return };
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut checked = 0;
    let mut refused = Vec::new();
    let mut check = |folder: &str, is_wanted: &dyn Fn(&str) -> bool| {
        let sources = sources_of(&here.join(folder));
        for (file, _) in sources.iter().filter(|(name, _)| is_wanted(name)) {
            checked += 1;
            match strict.check(&sources, file) {
                Ok(kernels) => println!("{folder}/{file}: {} kernels", kernels.len()),
                Err(error) => refused.push(format!("{folder}/{file}\n{error}")),
            }
        }
    };
    check("../../kernels", &|name| name.ends_with(".metal"));
    let examples = ["demo.metal", "language.metal", "mpp.metal"];
    check("tests/kernels", &|name| examples.contains(&name));
    assert!(refused.is_empty(), "{}", refused.join("\n"));
    assert!(checked > examples.len(), "no kernels of the product");
}
