//! The strict check: what a compiler for the Metal Shading Language would refuse, as far as clang can tell.
//!
//! clang has a mode, C++ for OpenCL, in which address spaces are part of types, vectors have swizzles and there is
//! a 16-bit `half`: MSL's own type system but for the names. `shim/msl_strict.h` declares MSL's library for
//! it. What that mode takes and MSL does not is then found in clang's syntax tree (`lint`).
//!
//! # Where it is stricter than MSL
//!
//! - A structure is not copied out of constant memory as a whole (`P q = p;`): read its members.
//! - `const thread T&` does not take a temporary value: pass by value.
//! - A scalar in arithmetic with a vector has no wider type than the vector's elements: `uchar4(v) & uchar(15)`.
//! - Vectors are converted by constructors alone: no `(float4)h`, no `static_cast<float4>(h)`.
//! - The library's functions of floats, and those of a simdgroup, take no `bfloat`: which of them do depends on the
//!   version of Apple's library.
//! - No lambdas, and no constants at program scope without `constant`.

mod diagnostics;
mod lint;
mod tree;

use std::ffi::{OsStr, OsString};

use crate::compiler;
use crate::preprocess::Sources;
use crate::signature::KernelSignature;
use crate::translate::{Rejection, Target, TranslateError, translate_sources};

/// The name under which clang knows the shim.
const SHIM: &str = "msl_strict.h";

/// The first version of clang whose C++ for OpenCL does all that is needed here.
const LEAST_VERSION: u32 = 19;

const ARGUMENTS: [&str; 22] = [
    "-x",
    "clcpp",
    "-cl-std=clc++2021",
    "-cl-no-stdinc",
    "-cl-single-precision-constant",
    // Any target will do, as long as its long has 64 bits: nothing is generated.
    "--target=x86_64-linux-gnu",
    "-fsyntax-only",
    "-fno-color-diagnostics",
    "-fno-caret-diagnostics",
    "-ferror-limit=40",
    "-Wall",
    "-Werror",
    "-Wno-unused",
    "-Wno-unknown-pragmas",
    // A header of kernels has functions that one of its users needs and another does not.
    "-Wno-unneeded-internal-declaration",
    // `constant const T&`, which MSL takes.
    "-Wno-duplicate-decl-specifier",
    // Constants of the host's, declared here and defined when a pipeline is made.
    "-Wno-undefined-internal",
    "-Wno-undefined-inline",
    "-Wno-missing-braces",
    "-Xclang",
    "-ast-dump",
    "-",
];

/// A clang that checks kernel files.
#[derive(Debug, Clone)]
pub struct StrictCheck {
    clang: OsString,
}

/// Why a file did not pass.
#[derive(Debug, thiserror::Error)]
pub enum StrictError {
    /// It was not even translated.
    #[error(transparent)]
    Translate(#[from] TranslateError),
    /// It is not MSL, or outside the part of it that is checked.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))]
    Refused(Vec<Rejection>),
    /// clang could not be run, or did not do what was expected of it.
    #[error("{0}")]
    Compiler(String),
}

impl StrictCheck {
    /// With the clang that `LILY_CLANG` names, else with the newest that is found under its usual names; else what
    /// to install, in words.
    pub fn find() -> Result<Self, String> {
        let named = std::env::var_os("LILY_CLANG").filter(|name| !name.is_empty());
        let usual = ["clang-22", "clang-21", "clang-20", "clang-19", "clang"];
        let names = match named {
            Some(name) => vec![name],
            None => usual.map(OsString::from).to_vec(),
        };
        let clang = names
            .iter()
            .find(|name| version(name).is_some_and(|version| version >= LEAST_VERSION));
        match clang {
            Some(clang) => Ok(Self {
                clang: clang.clone(),
            }),
            None => Err(format!(
                "no clang {LEAST_VERSION} or later for the strict check: tried {names:?}. Debian has clang-19 and \
                 clang-22; the PyPI package ziglang has one as `python3 -m ziglang clang`; LILY_CLANG names another"
            )),
        }
    }

    /// Checks `file`, which may include other files of `sources`, and all of its kernels and their instances.
    pub fn check(
        &self,
        sources: &Sources,
        file: &str,
    ) -> Result<Vec<KernelSignature>, StrictError> {
        let translated = translate_sources(sources, file, Target::Strict)?;
        let body = translated
            .code
            .strip_prefix("#include \"msl_strict.h\"\n")
            .expect("the translation starts with its header");
        // Written out as an include of a system header, so that its own warnings do not count.
        let shim = include_str!("../../shim/msl_strict.h");
        let source = format!("# 1 \"{SHIM}\" 1 3\n{shim}\n# 1 \"{file}\" 2\n{body}");
        let output = compiler::run_command(&self.clang, ARGUMENTS, &source)
            .map_err(StrictError::Compiler)?;
        let messages = String::from_utf8_lossy(&output.stderr);
        let is_ours = |name: &str| sources.get(name).is_some();
        let mut refused = diagnostics::errors(&messages, &is_ours);
        if refused.is_empty() && !output.status.success() {
            return Err(StrictError::Compiler(messages.into_owned()));
        }
        if refused.is_empty() {
            refused = lint::lint(&String::from_utf8_lossy(&output.stdout), &is_ours);
        }
        if refused.is_empty() {
            Ok(translated.kernels)
        } else {
            Err(StrictError::Refused(refused))
        }
    }
}

/// The major version of a clang, if `name` is one. Apple counts its own otherwise.
fn version(name: &OsStr) -> Option<u32> {
    let output = compiler::run_command(name, ["--version"], "").ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() || text.starts_with("Apple") {
        return None;
    }
    let (_, version) = text.split_once("clang version ")?;
    version.split('.').next()?.parse().ok()
}

/// Types in clang's words, in those of MSL.
fn in_msl_words(text: &str) -> String {
    let mut text = text.to_owned();
    for (opencl, msl) in [
        // Where a pointer itself lies is not written in MSL.
        ("*__private", "*"),
        ("&__private", "&"),
        ("const __constant", "constant"),
        ("__constant", "constant"),
        ("__global", "device"),
        ("__local", "threadgroup"),
        ("__private", "thread"),
        ("__generic ", ""),
        ("__bf16", "bfloat"),
    ] {
        text = text.replace(opencl, msl);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_are_named_as_in_msl() {
        let clang = "cannot initialize '__local float *__private' with '__global float *__private'";
        let msl = "cannot initialize 'threadgroup float *' with 'device float *'";
        assert_eq!(in_msl_words(clang), msl);
    }

    #[test]
    fn what_is_no_clang_has_no_version() {
        assert_eq!(version(OsStr::new("no-such-compiler")), None);
        assert_eq!(version(OsStr::new("true")), None);
    }
}
