//! Shared by the tests of the project's own kernels (kernels/*.metal).
#![allow(dead_code, reason = "each test file uses a part")]

use std::path::Path;

use lily_msl::{BuildKind, Constant, ConstantValue, Emulator, Library, Sources};

use crate::common::{Format, Random};

/// What stands behind each output.
pub const SENTINEL: u8 = 0xa5;

/// All kernel files and their headers.
pub fn sources() -> Sources {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../kernels");
    let mut sources = Sources::new();
    for entry in std::fs::read_dir(folder).expect("the folder of kernels") {
        let path = entry.expect("an entry").path();
        let name = path.file_name().expect("a name").to_string_lossy();
        let text = std::fs::read_to_string(&path).expect("a kernel file");
        sources = sources.with(&name, &text);
    }
    sources
}

#[track_caller]
pub fn compile(sources: &Sources, file: &str, build: BuildKind) -> Library {
    match Emulator::in_target_directory().compile(sources, file, build) {
        Ok(library) => library,
        Err(error) => panic!("{error}"),
    }
}

pub fn number(index: u32, value: usize) -> Constant {
    Constant {
        index,
        value: ConstantValue::UInt(value as u32),
    }
}

pub fn flag(index: u32, value: bool) -> Constant {
    Constant {
        index,
        value: ConstantValue::Bool(value),
    }
}

/// An output of `count` elements and the sentinel behind it.
pub fn output(element_bytes: usize, count: usize) -> Vec<u8> {
    vec![SENTINEL; element_bytes * count + 64]
}

/// Bfloats as they are stored, and their values.
pub fn activations(random: &mut Random, count: usize) -> (Vec<u16>, Vec<f64>) {
    let stored = Format::Bfloat.encode_all(&random.floats(count));
    let values = stored
        .iter()
        .map(|bits| f64::from(Format::Bfloat.decode(*bits)))
        .collect();
    (stored, values)
}

/// A number and how far a kernel's may be from it before rounding.
#[derive(Clone, Copy)]
pub struct Expected {
    pub value: f64,
    pub error: f64,
}

/// Holds an output and what lies behind it against what is expected.
#[track_caller]
pub fn check(what: &str, output: &[u8], bfloat: bool, expected: &[Expected]) {
    let bytes_each = if bfloat { 2 } else { 4 };
    let (numbers, behind) = output.split_at(expected.len() * bytes_each);
    assert!(
        behind.iter().all(|byte| *byte == SENTINEL),
        "{what}: written behind the output"
    );
    for (at, (number, expected)) in numbers.chunks(bytes_each).zip(expected).enumerate() {
        let value = if bfloat {
            Format::Bfloat.decode(u16::from_ne_bytes([number[0], number[1]]))
        } else {
            f32::from_ne_bytes([number[0], number[1], number[2], number[3]])
        };
        // Half a step of a bfloat is at most 2^-8 of it.
        let rounding = expected.value.abs() * if bfloat { 1.001 / 256.0 } else { 1e-7 };
        let error = (f64::from(value) - expected.value).abs();
        assert!(
            error <= expected.error + rounding,
            "{what}, element {at}: {value} for {}, bound {}",
            expected.value,
            expected.error + rounding
        );
    }
}
