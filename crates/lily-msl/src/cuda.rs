//! Kernels for NVIDIA GPUs.
//!
//! [`source`] gives one text with everything in it, to be compiled when the program runs: it needs NVRTC (see
//! [`crate::nvrtc`]) and no other compiler, and a build script can make it. A simdgroup is a warp.
//!
//! # What a host has to know
//!
//! - A kernel's entry has its host name, as a C function.
//! - Its parameters are the buffers, in the order in which the kernel declares them (that of
//!   [`KernelSignature::buffers`](crate::KernelSignature::buffers)): a device address for a pointer or a
//!   reference, zero if the buffer is left out by a function constant; a tensor is passed by value. A
//!   `constant T&` whose index is in [`CompileOptions::by_value`](crate::nvrtc::CompileOptions::by_value) is passed
//!   by value too: it then lies in constant memory, as small arguments should.
//! - After them comes, for each `[[threadgroup(n)]]` parameter but the one with the lowest index, the byte offset of
//!   its memory, 32 bits; [`threadgroup_layout`] computes them, and the launch's bytes of dynamic shared memory.
//! - Builtins come from the launch: threadgroups are blocks, threads are threads. A grid has at most 65,535
//!   threadgroups in its second and third dimension.
//! - Memory that a kernel only reads (`const` or `constant`) must not be written by the same dispatch.
//! - Unless compiled for [partial simdgroups](crate::nvrtc::CompileOptions::partial_simdgroups), a simdgroup that
//!   calls a simdgroup function is whole: the threadgroup's size is a multiple of 32 and no lane has returned. The
//!   emulator counts what breaks this ([`Report::partial_simdgroup_operations`](crate::Report::partial_simdgroup_operations)).
//!
//! # How results differ from the emulator's
//!
//! Products and sums are fused, division and functions are within 2 units in the last place, and products of
//! 16-bit matrices are summed in the tensor core's order. Compiled with
//! [`CompileOptions::exact`](crate::nvrtc::CompileOptions::exact), only functions and such matrices differ.

use crate::preprocess::Sources;
use crate::translate::{Target, TranslateError, translate_sources};

/// The headers that a translation includes, in the order in which they first do.
const HEADERS: [(&str, &str); 4] = [
    ("msl_cuda.h", include_str!("../shim/msl_cuda.h")),
    ("msl_vec.h", include_str!("../shim/msl_vec.h")),
    ("msl_common.h", include_str!("../shim/msl_common.h")),
    (
        "msl_cuda_matrix.h",
        include_str!("../shim/msl_cuda_matrix.h"),
    ),
];

/// Translates `file` for CUDA into one text that includes nothing.
pub fn source(sources: &Sources, file: &str) -> Result<String, TranslateError> {
    let translated = translate_sources(sources, file, Target::Cuda)?;
    let mut out = String::new();
    inline_headers(&translated.code, "translation", &mut out);
    Ok(out)
}

/// Writes a text with the shim's headers in place of the lines that include them.
fn inline_headers(text: &str, name: &str, out: &mut String) {
    out.push_str(&format!("#line 1 \"{name}\"\n"));
    for (at, line) in text.lines().enumerate() {
        let included = line
            .strip_prefix("#include \"")
            .and_then(|rest| rest.strip_suffix('"'))
            .and_then(|included| HEADERS.iter().find(|(header, _)| *header == included));
        if let Some((header, text)) = included {
            inline_headers(text, header, out);
            out.push_str(&format!("#line {} \"{name}\"\n", at + 2));
        } else {
            if line != "#pragma once" {
                out.push_str(line);
            }
            out.push('\n');
        }
    }
}

/// Where each `[[threadgroup(n)]]` parameter's memory starts, and the bytes of all: `bytes[n]` are what parameter n
/// needs.
pub fn threadgroup_layout(bytes: &[u32]) -> (Vec<u32>, u32) {
    let mut end = 0_u32;
    let offset = |bytes: &u32| {
        let start = end.next_multiple_of(16);
        end = start + bytes;
        start
    };
    let offsets = bytes.iter().map(offset).collect();
    (offsets, end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threadgroup_memory_is_laid_out_as_the_emulator_does() {
        assert_eq!(threadgroup_layout(&[]), (vec![], 0));
        assert_eq!(threadgroup_layout(&[20, 3, 8]), (vec![0, 32, 48], 56));
    }

    #[test]
    fn a_source_is_complete() {
        let kernel = "kernel void k(device float* o [[buffer(0)]]) {\n    o[0] = 1;\n}\n";
        let sources = Sources::new().with("k.metal", kernel);
        let text = source(&sources, "k.metal").unwrap();
        assert!(!text.contains("#include"), "{text}");
        assert!(!text.contains("#pragma once"), "{text}");
        for (header, _) in HEADERS {
            assert_eq!(text.matches(&format!("#line 1 \"{header}\"")).count(), 1);
        }
        assert!(text.contains("\n#line 1 \"k.metal\"\n"));
    }
}
