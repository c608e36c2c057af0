//! Kernels compiled for NVIDIA GPUs by NVRTC, for compute capability 9.0; nothing is run. Each test says that it
//! is skipped where there is no NVRTC, and fails instead if `LILY_REQUIRE_NVRTC` is 1.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;
use std::sync::OnceLock;

use lily_msl::nvrtc::{CompileOptions, Compiled, Nvrtc};
use lily_msl::{
    Constant, ConstantValue, KernelSignature, Sources, Target, cuda_source, translate_sources,
};

const ARCHITECTURE: &str = "sm_90";

/// Kernels that may keep something in local memory, by the beginnings of their names, and why.
const USES_LOCAL_MEMORY: [(&str, &str); 3] = [
    (
        "angles",
        "sines of large angles need an array that is indexed at run time",
    ),
    (
        "tensor_",
        "tensor operations are loops here; matrices are multiplied by the kernels of tile.metal",
    ),
    ("packed_", "tensor operations, as above"),
];

/// Numbers as in a model with 35 billion parameters, for function constants of these names.
const MODEL: [(&str, f32); 35] = [
    ("BITS", 4.0),
    ("ROUNDS", 4.0),
    ("SPLIT", 2.0),
    ("BITS_0", 4.0),
    ("BITS_1", 8.0),
    ("BITS_2", 4.0),
    ("BITS_3", 8.0),
    ("BLOCK", 512.0),
    ("BLOCKS", 512.0),
    ("CHOICES", 8.0),
    ("COLUMNS", 2048.0),
    ("EPSILON", 1e-6),
    ("EXPERTS", 256.0),
    ("GATED", 4.0),
    ("HEADS", 16.0),
    ("KEY_HEADS", 16.0),
    ("KEY_VALUE_HEADS", 2.0),
    ("KEY_WIDTH", 128.0),
    ("OUTPUTS", 512.0),
    ("OUTPUTS_0", 8192.0),
    ("OUTPUTS_1", 4096.0),
    ("OUTPUTS_2", 32.0),
    ("OUTPUTS_3", 32.0),
    ("PAIRS_A_ROW", 8.0),
    ("QUERY_HEADS", 16.0),
    ("ROTARY", 64.0),
    ("SHARED_BITS", 8.0),
    ("SHARED_COLUMNS", 512.0),
    ("SIMDGROUPS", 4.0),
    ("STRIDE", 8192.0),
    ("TAPS", 4.0),
    ("UP_BITS", 4.0),
    ("VALUE_HEADS", 32.0),
    ("VALUE_WIDTH", 128.0),
    ("WIDTH", 256.0),
];

fn nvrtc() -> Option<&'static Nvrtc> {
    static FOUND: OnceLock<Result<Nvrtc, String>> = OnceLock::new();
    match FOUND.get_or_init(|| Nvrtc::load().map_err(|error| error.to_string())) {
        Ok(nvrtc) => Some(nvrtc),
        Err(message) => {
            let required = std::env::var_os("LILY_REQUIRE_NVRTC").is_some_and(|value| value == "1");
            assert!(!required, "{message}");
            say(&format!("SKIPPED: {message}"));
            None
        }
    }
}

/// Writes a line that the test runner does not hold back.
fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// The files of a folder.
fn folder(path: &str) -> Sources {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    let mut sources = Sources::new();
    for entry in std::fs::read_dir(&path).into_iter().flatten() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        if name.ends_with(".metal") || name.ends_with(".h") {
            let text = std::fs::read_to_string(entry.path()).unwrap();
            sources = sources.with(&name, &text);
        }
    }
    sources
}

fn signatures(sources: &Sources, file: &str) -> Vec<KernelSignature> {
    match translate_sources(sources, file, Target::Cuda) {
        Ok(translated) => translated.kernels,
        Err(error) => panic!("{error}"),
    }
}

#[track_caller]
fn compile(nvrtc: &Nvrtc, sources: &Sources, file: &str, options: &CompileOptions) -> Compiled {
    let text = match cuda_source(sources, file) {
        Ok(text) => text,
        Err(error) => panic!("{error}"),
    };
    match nvrtc.compile(&text, options) {
        Ok(compiled) => compiled,
        Err(error) => panic!("{file}:\n{error}"),
    }
}

/// Compiles each file and holds it to its signatures and to having nothing in local memory; says what each kernel
/// takes.
fn check(sources: &Sources, files: &[&str], values: &dyn Fn(&KernelSignature) -> Vec<Constant>) {
    let Some(nvrtc) = nvrtc() else { return };
    let mut table = String::new();
    let mut failures = String::new();
    for file in files {
        let signatures = signatures(sources, file);
        let mut options = CompileOptions::new(ARCHITECTURE);
        for signature in &signatures {
            for constant in values(signature) {
                if !options.constants.contains(&constant) {
                    options.constants.push(constant);
                }
            }
        }
        let compiled = compile(nvrtc, sources, file, &options);
        assert_eq!(compiled.kernels.len(), signatures.len(), "{file}");
        for signature in &signatures {
            let name = &signature.name;
            let found = compiled.kernels.iter().find(|kernel| kernel.name == *name);
            let kernel = found.unwrap_or_else(|| panic!("{file}: no kernel {name}"));
            assert_eq!(kernel.parameters.len(), parameters_of(signature), "{name}");
            writeln!(
                table,
                "{file:20} {name:24} {:3} registers, {:5} bytes of threadgroup memory, {:3} of local memory",
                kernel.registers, kernel.threadgroup_bytes, kernel.local_bytes
            )
            .unwrap();
            let excused = USES_LOCAL_MEMORY
                .iter()
                .any(|(start, _)| name.starts_with(start));
            if kernel.local_bytes > 0 && !excused {
                writeln!(failures, "{file}: {name}: {kernel:?}").unwrap();
            }
        }
    }
    println!("{table}");
    assert!(
        failures.is_empty(),
        "kernels with local memory:\n{failures}{table}"
    );
}

/// Buffers, and the places of all threadgroup memory but the first.
fn parameters_of(signature: &KernelSignature) -> usize {
    signature.buffers.len() + signature.threadgroup.len().saturating_sub(1)
}

fn unset(_: &KernelSignature) -> Vec<Constant> {
    Vec::new()
}

/// Constants of a model's, and all that choose between two ways set to one of them.
fn model(signature: &KernelSignature, choice: bool) -> Vec<Constant> {
    let value = |name: &str, type_name: &str| {
        if type_name == "bool" {
            return Some(ConstantValue::Bool(choice));
        }
        let (_, number) = MODEL.iter().find(|(known, _)| *known == name)?;
        match type_name {
            "uint" => Some(ConstantValue::UInt(*number as u32)),
            "float" => Some(ConstantValue::Float(*number)),
            _ => None,
        }
    };
    let constants = signature.function_constants.iter();
    constants
        .filter_map(|constant| {
            Some(Constant {
                index: constant.index,
                value: value(&constant.name, &constant.type_name)?,
            })
        })
        .collect()
}

fn metal_files(sources: &Sources) -> Vec<&str> {
    let names = sources.iter().map(|(name, _)| name);
    names.filter(|name| name.ends_with(".metal")).collect()
}

#[test]
fn kernels_of_the_tests_compile() {
    let own = folder("tests/kernels");
    let files = metal_files(&own);
    assert!(files.contains(&"demo.metal") && files.contains(&"surface.metal"));
    // Some include the project's headers.
    let project = folder("../../kernels");
    let sources = project
        .iter()
        .fold(own.clone(), |all, (name, text)| all.with(name, text));
    check(&sources, &files, &unset);
}

#[test]
fn kernels_of_the_project_compile() {
    let sources = folder("../../kernels");
    let files = metal_files(&sources);
    check(&sources, &files, &unset);
}

#[test]
fn kernels_of_the_project_compile_for_a_model() {
    let sources = folder("../../kernels");
    let files = metal_files(&sources);
    check(&sources, &files, &|signature| model(signature, true));
}

#[test]
fn kernels_of_the_project_compile_for_a_model_in_float() {
    let sources = folder("../../kernels");
    let files = metal_files(&sources);
    check(&sources, &files, &|signature| model(signature, false));
}

/// Asserts how many of a kernel's instructions hold a word.
#[track_caller]
fn assert_count(compiled: &Compiled, kernel: &str, word: &str, expected: usize) {
    let ptx = &compiled.ptx;
    let start = ptx.find(&format!(".entry {kernel}(")).expect("the kernel");
    let body = &ptx[start..];
    let end = body.find("\n}").expect("its end");
    let instructions = body[..end].lines().filter(|line| !line.contains(".loc"));
    let instructions: Vec<_> = instructions.collect();
    let found = instructions
        .iter()
        .filter(|line| line.contains(word))
        .count();
    assert_eq!(found, expected, "{word}:\n{}", instructions.join("\n"));
}

#[test]
fn vectors_are_loaded_whole() {
    let Some(nvrtc) = nvrtc() else { return };
    let sources = folder("tests/kernels");
    let options = CompileOptions::new(ARCHITECTURE);
    let compiled = compile(nvrtc, &sources, "counters.metal", &options);
    // What is only read comes through the read-only cache.
    assert_count(&compiled, "copy_wide", "ld.global.nc.v4", 1);
    assert_count(&compiled, "copy_wide", "st.global.v4", 1);
    assert_count(&compiled, "copy_bfloats", "ld.global.nc.v2", 1);
    assert_count(&compiled, "wide_banks", "st.shared.v4", 1);
    let compiled = compile(nvrtc, &sources, "surface.metal", &options);
    // A pointer that was found in a buffer is known to be one to global memory.
    assert_count(&compiled, "gather", "ld.global.v4", 1);
    assert_count(&compiled, "gather", "\tld.v4", 0);
    // Nothing is known of such memory but that: it may change.
    assert_count(&compiled, "rewrite", "ld.global.nc.v4", 0);
}

#[test]
fn narrow_matrices_are_multiplied_by_tensor_cores() {
    let Some(nvrtc) = nvrtc() else { return };
    let sources = folder("tests/kernels");
    let options = CompileOptions::new(ARCHITECTURE);
    let compiled = compile(nvrtc, &sources, "demo.metal", &options);
    assert_count(&compiled, "gemm_sg", "mma.sync.aligned.m16n8k8", 4);
    // The right matrices are loaded transposed, which is how a tensor core wants them.
    assert_count(&compiled, "gemm_sg", "movmatrix", 0);
    assert_count(&compiled, "gemm_sg", "ld.shared", 4);
    let compiled = compile(nvrtc, &sources, "surface.metal", &options);
    assert_count(&compiled, "product_bfloat", "f32.bf16.bf16.f32", 5);
    assert_count(&compiled, "product_half", "f32.f16.f16.f32", 5);
    assert_count(&compiled, "product_float", "mma.sync", 0);
    // Apple's layout of elements: two words and the left matrix move to the tensor core's, results back.
    let compiled = compile(nvrtc, &sources, "elements.metal", &options);
    assert_count(&compiled, "scaled_product", "shfl.sync.idx", 6);
    assert_count(&compiled, "scaled_product", "mma.sync", 1);
}

#[test]
fn sums_over_a_simdgroup_take_five_shuffles() {
    let Some(nvrtc) = nvrtc() else { return };
    let sources = folder("tests/kernels");
    let mut options = CompileOptions::new(ARCHITECTURE);
    let compiled = compile(nvrtc, &sources, "counters.metal", &options);
    assert_count(&compiled, "row_sum", "shfl.sync.bfly", 5);
    options.partial_simdgroups = true;
    let compiled = compile(nvrtc, &sources, "counters.metal", &options);
    assert_count(&compiled, "row_sum", "shfl.sync.idx", 32);
    for file in ["demo.metal", "surface.metal"] {
        let compiled = compile(nvrtc, &sources, file, &options);
        for kernel in compiled.kernels {
            assert!(
                kernel.local_bytes == 0 || kernel.name == "angles",
                "{kernel:?}"
            );
        }
    }
}

#[test]
fn resources_are_those_of_the_source() {
    let Some(nvrtc) = nvrtc() else { return };
    let sources = folder("tests/kernels");
    let mut options = CompileOptions::new(ARCHITECTURE);
    options.kernel = Some("gather".to_owned());
    let kernels = compile(nvrtc, &sources, "surface.metal", &options).kernels;
    let [gather] = &kernels[..] else {
        panic!("one kernel was asked for: {kernels:?}");
    };
    assert_eq!(gather.max_threads, Some(96));
    assert_eq!(gather.threadgroup_bytes, 0);
    // A table, an output, a step, and where the second piece of threadgroup memory is.
    assert_eq!(gather.parameters, [8, 8, 8, 4]);
    options.by_value = u32::MAX;
    let kernels = compile(nvrtc, &sources, "surface.metal", &options).kernels;
    assert_eq!(kernels[0].parameters, [16, 8, 2, 4]);
    options.by_value = 1 << 2;
    let kernels = compile(nvrtc, &sources, "surface.metal", &options).kernels;
    assert_eq!(kernels[0].parameters, [8, 8, 2, 4]);

    options.kernel = Some("reduce_sum".to_owned());
    let kernels = compile(nvrtc, &sources, "language.metal", &options).kernels;
    assert_eq!(kernels[0].max_threads, Some(256));
    assert_eq!(kernels[0].threadgroup_bytes, 256 * 8);
}

/// The assembler tells the same in words.
#[test]
fn resources_are_those_that_the_assembler_tells() {
    let Some(nvrtc) = nvrtc() else { return };
    // One with an array that is indexed at run time, one that needs more registers than it is allowed.
    let text = "kernel void indexed(device float* x [[buffer(0)]], device uint* n [[buffer(1)]]) {\n\
        float a[40];\n\
        for (uint i = 0; i < n[0]; ++i) a[i] = x[i];\n\
        x[0] = a[n[1]];\n\
        }\n\
        kernel void crowded(device float* x [[buffer(0)]]) {\n\
        float a[60];\n\
        for (uint i = 0; i < 60; ++i) a[i] = x[i];\n\
        threadgroup_barrier(mem_flags::mem_device);\n\
        for (uint i = 0; i < 60; ++i) x[i] = a[59 - i] * a[(i + 7) % 60];\n\
        }\n";
    let sources = Sources::new().with("k.metal", text);
    for name in ["indexed", "crowded"] {
        let mut options = CompileOptions::new(ARCHITECTURE);
        options.kernel = Some(name.to_owned());
        options.further = ["--ptxas-options=-v", "--maxrregcount=32"]
            .map(str::to_owned)
            .to_vec();
        let compiled = compile(nvrtc, &sources, "k.metal", &options);
        let before = |text: &str| -> u32 {
            let end = compiled
                .log
                .find(text)
                .unwrap_or_else(|| panic!("{}", compiled.log));
            let word = compiled.log[..end].split_whitespace().next_back();
            word.expect("a number").parse().expect("a number")
        };
        let kernel = &compiled.kernels[0];
        assert_eq!(
            kernel.local_bytes,
            before("bytes stack frame"),
            "{}",
            compiled.log
        );
        assert_eq!(kernel.registers, before("registers"), "{}", compiled.log);
        assert!(kernel.local_bytes > 0);
        if name == "crowded" {
            assert!(before("bytes spill stores") > 0, "{}", compiled.log);
        }
    }
}

#[test]
fn constants_are_values() {
    let Some(nvrtc) = nvrtc() else { return };
    let text = "constant uint N [[function_constant(3)]];\n\
        constant float F [[function_constant(5)]];\n\
        constant uint PART = is_function_constant_defined(N) ? 1000 / N : 77;\n\
        kernel void k(device float* x [[buffer(0)]]) { x[0] = F + float(PART); }\n";
    let sources = Sources::new().with("k.metal", text);
    let mut options = CompileOptions::new(ARCHITECTURE);
    let ptx = compile(nvrtc, &sources, "k.metal", &options).ptx;
    assert!(ptx.contains(&format!("{}", 77_f32.to_bits())), "{ptx}");
    let float = ConstantValue::Float(0.25);
    let uint = ConstantValue::UInt(8);
    options.constants = vec![
        Constant {
            index: 3,
            value: uint,
        },
        Constant {
            index: 5,
            value: float,
        },
    ];
    let ptx = compile(nvrtc, &sources, "k.metal", &options).ptx;
    assert!(ptx.contains(&format!("{}", 125.25_f32.to_bits())), "{ptx}");
}

#[test]
fn exact_code_is_not_fused() {
    let Some(nvrtc) = nvrtc() else { return };
    let text =
        "kernel void k(device float* x [[buffer(0)]]) { x[0] = (x[1] * x[2] + x[3]) / x[4]; }\n";
    let sources = Sources::new().with("k.metal", text);
    let mut options = CompileOptions::new(ARCHITECTURE);
    let ptx = compile(nvrtc, &sources, "k.metal", &options).ptx;
    assert!(
        ptx.contains("fma.rn.f32") && ptx.contains("div.full.f32"),
        "{ptx}"
    );
    options.exact = true;
    let ptx = compile(nvrtc, &sources, "k.metal", &options).ptx;
    assert!(
        !ptx.contains("fma.rn.f32") && ptx.contains("div.rn.f32"),
        "{ptx}"
    );
}

#[test]
fn messages_name_the_kernel_file() {
    let Some(nvrtc) = nvrtc() else { return };
    let sources = Sources::new()
        .with("part.h", "#pragma once\n\ninline float part(float x) {\n    return y;\n}\n")
        .with(
            "k.metal",
            "#include \"part.h\"\nkernel void k(device float* x [[buffer(0)]]) {\n    x[0] = part(1);\n    x.y = 1;\n}\n",
        );
    let text = cuda_source(&sources, "k.metal").unwrap();
    let error = nvrtc
        .compile(&text, &CompileOptions::new(ARCHITECTURE))
        .unwrap_err();
    let message = error.to_string();
    assert!(message.contains("part.h(4): error"), "{message}");
    assert!(message.contains("k.metal(4): error"), "{message}");
    let options = CompileOptions::new("sm_1");
    let error = nvrtc.compile(&text, &options).unwrap_err().to_string();
    assert!(
        error.contains("invalid value for --gpu-architecture"),
        "{error}"
    );
}

#[test]
fn code_for_later_gpus_is_text() {
    let Some(nvrtc) = nvrtc() else { return };
    let sources = folder("tests/kernels");
    let options = CompileOptions::new("compute_90");
    let compiled = compile(nvrtc, &sources, "demo.metal", &options);
    assert!(compiled.cubin.is_empty() && compiled.kernels.is_empty());
    assert!(compiled.ptx.contains(".target sm_90"), "{}", compiled.ptx);
    say(&format!("{nvrtc:?}"));
}
