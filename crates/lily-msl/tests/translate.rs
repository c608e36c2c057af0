//! The translator: what it reads off kernels, and what it rejects.

use lily_msl::{AddressSpace, Sources, Target, TranslateError, translate, translate_sources};

const DEMO: &str = include_str!("kernels/demo.metal");

fn rejections(source: &str) -> Vec<String> {
    let source = format!("#include <metal_stdlib>\nusing namespace metal;\n{source}\n");
    match translate(&source, "test.metal", Target::Emulated) {
        Err(TranslateError::Rejected(all)) => all.iter().map(ToString::to_string).collect(),
        Err(other) => panic!("{other}"),
        Ok(_) => Vec::new(),
    }
}

#[track_caller]
fn assert_rejected(source: &str, message: &str) {
    let all = rejections(source);
    assert_eq!(all, [format!("test.metal:3: error: {message}")], "{source}");
}

#[test]
fn signatures_of_the_demonstration_kernels() {
    let translated = translate(DEMO, "demo.metal", Target::Emulated).unwrap();
    let names: Vec<_> = translated
        .kernels
        .iter()
        .map(|kernel| kernel.name.as_str())
        .collect();
    assert_eq!(
        names,
        [
            "q4_gemv_f32_r4",
            "q4_gemv_f16_r4",
            "q4_gemv_bf16_r2",
            "hist_scan",
            "gemm_sg",
            "attn_partial_bf16_128",
            "attn_partial_f16_64",
            "odds"
        ]
    );
    let gemv = &translated.kernels[2];
    assert_eq!(gemv.function, "q4_gemv");
    assert_eq!(gemv.template_arguments, ["bfloat", "2"]);
    let buffers: Vec<_> = gemv
        .buffers
        .iter()
        .map(|buffer| {
            let element = buffer.element.as_str();
            (
                buffer.index,
                buffer.name.as_str(),
                buffer.read_only,
                element,
            )
        })
        .collect();
    assert_eq!(
        buffers,
        [
            (0, "w", true, "uint32_t"),
            (1, "scales", true, "bfloat"),
            (2, "biases", true, "bfloat"),
            (3, "x", true, "bfloat"),
            (4, "y", false, "bfloat"),
            (5, "p", true, "GemvParams"),
            (6, "addend", true, "bfloat"),
        ]
    );
    assert_eq!(gemv.buffers[4].address_space, AddressSpace::Device);
    assert_eq!(gemv.buffers[5].address_space, AddressSpace::Constant);
    let builtins: Vec<_> = gemv
        .builtins
        .iter()
        .map(|builtin| (builtin.attribute.as_str(), builtin.type_name.as_str()))
        .collect();
    assert_eq!(
        builtins,
        [
            ("threadgroup_position_in_grid", "uint3"),
            ("simdgroup_index_in_threadgroup", "uint"),
            ("thread_index_in_simdgroup", "uint"),
        ]
    );
    // FC_HAS_BIAS is read through the constant computed from it.
    let constants: Vec<_> = gemv
        .function_constants
        .iter()
        .map(|constant| {
            let type_name = constant.type_name.as_str();
            (constant.index, constant.name.as_str(), type_name)
        })
        .collect();
    assert_eq!(
        constants,
        [(0, "FC_SG_PER_TG", "uint"), (1, "FC_HAS_BIAS", "bool")]
    );
    let attention = &translated.kernels[5];
    assert_eq!(attention.threadgroup.len(), 1);
    assert_eq!(attention.threadgroup[0].element, "float");
    assert!(attention.function_constants.is_empty());
}

#[test]
fn tensors_are_bindings_of_their_own() {
    let source = include_str!("kernels/mpp.metal");
    let translated = translate(source, "mpp.metal", Target::Emulated).unwrap();
    let handle = &translated.kernels[1];
    assert_eq!(handle.name, "mm_handle");
    assert_eq!(handle.buffers[0].address_space, AddressSpace::Tensor);
    assert!(
        translated
            .code
            .contains("matmul2d<msl_pack(desc), execution_simdgroups<4>>")
    );
}

#[test]
fn each_target_has_its_own_words() {
    let emulated = translate(DEMO, "demo.metal", Target::Emulated)
        .unwrap()
        .code;
    assert!(emulated.starts_with("#include \"msl_cpu.h\""));
    assert!(emulated.contains("#line 1 \"demo.metal\""));
    assert!(!emulated.contains("device const"));
    let cuda = translate(DEMO, "demo.metal", Target::Cuda).unwrap().code;
    assert!(
        cuda.contains(
            "extern \"C\" __global__ void hist_scan(\nconst uint* __restrict__ keys_,\natomic_uint* total_,"
        ),
        "{cuda}"
    );
    assert!(cuda.contains("#pragma unroll"));
    let strict = translate(DEMO, "demo.metal", Target::Strict).unwrap().code;
    assert!(strict.contains("__global const uint32_t*"));
    assert!(strict.contains("msl_mk<float4>(xa)"));
    assert!(strict.contains("msl_mk<VE>(0.0f)"));
}

#[test]
fn lines_stay_where_they_were() {
    for target in [Target::Emulated, Target::Cuda, Target::Strict] {
        let code = translate(DEMO, "demo.metal", target).unwrap().code;
        // Follow the markers to the line that a compiler would name.
        let mut line = 0;
        let mut found = 0;
        for text in code.lines() {
            line += 1;
            if let Some(marker) = text.strip_prefix("#line ") {
                line = marker.split(' ').next().unwrap().parse::<usize>().unwrap() - 1;
                continue;
            }
            for word in [
                "fast::exp2(s - mn)",
                "popcount(uint(",
                "simd_prefix_exclusive_sum(c)",
            ] {
                if text.contains(word) {
                    found += 1;
                    let original = DEMO.lines().nth(line - 1).unwrap();
                    assert!(
                        original.contains(word),
                        "{target:?}, line {line}: {original}"
                    );
                }
            }
        }
        assert_eq!(found, 3);
    }
}

#[test]
fn headers_are_shared_from_memory() {
    let sources = Sources::new()
        .with("tile.h", "#pragma once\n#define TILE 16\ninline float twice(float x) { return x * 2.0; }\n")
        .with(
            "a.metal",
            "#include \"tile.h\"\nkernel void a(device float* o [[buffer(0)]], uint t [[thread_position_in_grid]]) {\n    o[t] = twice(TILE);\n}\n",
        );
    let translated = translate_sources(&sources, "a.metal", Target::Emulated).unwrap();
    assert_eq!(translated.kernels[0].name, "a");
    assert!(translated.code.contains("#line 1 \"tile.h\""));
    assert!(translated.code.contains("return x * 2.0f;"));
    // What a header does wrong is reported in the header.
    let sources = sources.with("tile.h", "\n\nkernel void b(device float* o) {}\n");
    let error = translate_sources(&sources, "a.metal", Target::Emulated).unwrap_err();
    assert!(
        error.to_string().starts_with("tile.h:3: error: kernel b"),
        "{error}"
    );
}

#[test]
fn attributes_are_checked() {
    assert_rejected(
        "kernel void k(device float* o [[buffer(0)]], uint t [[thread_index]]) {}",
        "kernel k: unknown attribute [[thread_index]]",
    );
    assert_rejected(
        "kernel void k(device float* o [[buffer(0)]], device float* p [[buffer(0)]]) {}",
        "kernel k: buffer(0) bound twice (o, p)",
    );
    assert_rejected(
        "kernel void k(device float* o [[buffer(31)]]) {}",
        "kernel k: buffer index 31 of o is over 30",
    );
    assert_rejected(
        "kernel void k(device float* o) {}",
        "kernel k: parameter o needs exactly one attribute",
    );
    assert_rejected(
        "kernel void k(device float* o [[buffer(N)]]) {}",
        "kernel k: buffer(N) of o is not a number",
    );
}

#[test]
fn builtins_have_their_types() {
    assert_rejected(
        "kernel void k(device float* o [[buffer(0)]], float t [[thread_position_in_grid]]) {}",
        "kernel k: thread_position_in_grid must be uint or ushort (or a vector of them), not float",
    );
    assert_rejected(
        "kernel void k(device float* o [[buffer(0)]], uint2 t [[thread_index_in_simdgroup]]) {}",
        "kernel k: thread_index_in_simdgroup is a scalar, not uint2",
    );
}

#[test]
fn buffers_need_an_address_space() {
    assert_rejected(
        "kernel void k(float* o [[buffer(0)]]) {}",
        "kernel k: buffer parameter o must be in device or constant",
    );
    assert_rejected(
        "kernel void k(float o [[buffer(0)]]) {}",
        "kernel k: buffer parameter o must be a pointer or a reference",
    );
    assert_rejected(
        "kernel void k(device float* o [[threadgroup(0)]]) {}",
        "kernel k: o must be a threadgroup pointer",
    );
}

#[test]
fn instantiations_and_names_are_checked() {
    assert_rejected(
        "template <typename T> kernel void k(device T* o [[buffer(0)]]) {} template kernel void k<float>(device float*);",
        "instantiation of k has no host_name",
    );
    assert_rejected(
        "template <typename T> kernel void k(device T* o [[buffer(0)]]) {} template [[host_name(\"x\")]] kernel void k<float, 2>(device float*);",
        "k takes 1 template arguments",
    );
    assert_rejected(
        "kernel void k(device float* o [[buffer(0)]]) {} template <int N> kernel void t(device float* o [[buffer(0)]]) {} template [[host_name(\"k\")]] kernel void t<1>(device float*);",
        "two kernels named k",
    );
    assert_rejected(
        "constant uint A [[function_constant(0)]]; constant uint B [[function_constant(0)]];",
        "function constant 0 is A and B",
    );
    assert_rejected(
        "kernel uint k(device float* o [[buffer(0)]]) { return 0; }",
        "a kernel returns void",
    );
}

fn cuda(source: &str) -> String {
    let source = format!("using namespace metal;\n{source}\n");
    translate(&source, "test.metal", Target::Cuda).unwrap().code
}

#[test]
fn entries_for_cuda_take_what_a_host_can_give() {
    let code = cuda(
        "struct P { uint n; };\ntemplate <int N> [[max_total_threads_per_threadgroup(N * 32)]] kernel void k(\n\
         device float* y [[buffer(1)]], threadgroup float* late [[threadgroup(2)]], constant P& p [[buffer(0)]],\n\
         threadgroup half* early [[threadgroup(1)]], constant float* x [[buffer(4)]], uint i [[thread_index_in_threadgroup]])\n\
         { y[i] = x[i] * p.n; }\ntemplate [[host_name(\"k_4\")]] kernel decltype(k<4>) k<4>;",
    );
    let entry = &code[code.find("#line 1 \"entries\"").unwrap()..];
    let expected = "#line 1 \"entries\"\n#if !defined(MSL_ONLY) || defined(MSL_ONLY_k_4)\n\
        extern \"C\" __global__ void __launch_bounds__(4 * 32) k_4(\n\
        float* y_,\n\
        #if (MSL_BY_VALUE) >> 0 & 1\nconst __grid_constant__ P p_\n#else\nconst P* __restrict__ p_\n#endif\n,\n\
        float* __restrict__ x_,\n\
        unsigned msl_offset_2) { k_msl<4>(y_, (float*)msl_dynamic_memory(msl_offset_2), \
        msl_referred<((MSL_BY_VALUE) >> 0 & 1) != 0>::of(p_), (half*)msl_dynamic_memory(0), x_, \
        msl_bi<uint>(msl_bi_thread_index_in_threadgroup())); }\n#endif\n}\n";
    assert_eq!(entry, expected);
}

#[test]
fn matrices_that_are_taken_apart_keep_apples_layout_on_cuda() {
    let whole = cuda("kernel void k(device float* o [[buffer(0)]]) { simdgroup_float8x8 m; }");
    assert!(!whole.contains("MSL_APPLE_LAYOUT"));
    let apart = cuda(
        "inline float2 part(thread simdgroup_float8x8& m) { return m.thread_elements(); }\n\
         kernel void k(device float* o [[buffer(0)]]) { simdgroup_float8x8 m; o[0] = part(m).x; }",
    );
    assert!(apart.starts_with("#define MSL_APPLE_LAYOUT 1\n"));
}

#[test]
fn cuda_finds_kernels_by_names_of_functions() {
    let source = "template <int N> kernel void k(device float* o [[buffer(0)]]) {}\n\
        template [[host_name(\"k-1\")]] kernel decltype(k<1>) k<1>;\n";
    assert!(translate(source, "test.metal", Target::Emulated).is_ok());
    let error = translate(source, "test.metal", Target::Cuda).unwrap_err();
    assert_eq!(
        error.to_string(),
        "test.metal:2: error: kernel name \"k-1\" is no identifier"
    );
}
