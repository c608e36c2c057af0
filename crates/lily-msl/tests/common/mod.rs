//! Shared by the tests of the emulator.
#![allow(dead_code, reason = "each test file uses a part")]

use lily_msl::{BuildKind, Emulator, Library, Sources};

/// Builds one kernel file, or fails with the compiler's messages.
#[track_caller]
pub fn compile(source: &str, file: &str, build: BuildKind) -> Library {
    let sources = Sources::new().with(file, source);
    match Emulator::in_target_directory().compile(&sources, file, build) {
        Ok(library) => library,
        Err(error) => panic!("{error}"),
    }
}

pub fn bytes<T: bytemuck::NoUninit>(values: &[T]) -> &[u8] {
    bytemuck::cast_slice(values)
}

pub fn bytes_mut<T: bytemuck::NoUninit + bytemuck::AnyBitPattern>(values: &mut [T]) -> &mut [u8] {
    bytemuck::cast_slice_mut(values)
}

/// Pseudo-random numbers, the same on every run.
pub struct Random(pub u64);

impl Random {
    pub fn bits(&mut self) -> u32 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 32) as u32
    }

    /// From -1 to 1.
    pub fn float(&mut self) -> f32 {
        self.bits() as f32 / (u32::MAX as f32 / 2.0) - 1.0
    }

    pub fn floats(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.float()).collect()
    }
}

/// A 16-bit format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    Half,
    Bfloat,
}

impl Format {
    pub fn encode(self, value: f32) -> u16 {
        let bits = value.to_bits();
        if self == Self::Bfloat {
            return ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16;
        }
        let sign = (bits >> 16) as u16 & 0x8000;
        let magnitude = bits & 0x7fff_ffff;
        if magnitude < 0x3880_0000 {
            let scaled = f32::from_bits(magnitude) * 16_777_216.0;
            return sign | scaled.round_ties_even() as u16;
        }
        let rest = magnitude - 0x3800_0000;
        sign | ((rest + 0xfff + ((rest >> 13) & 1)) >> 13) as u16
    }

    pub fn decode(self, bits: u16) -> f32 {
        if self == Self::Bfloat {
            return f32::from_bits(u32::from(bits) << 16);
        }
        let sign = if bits & 0x8000 == 0 { 1.0 } else { -1.0 };
        let (exponent, mantissa) = (u32::from(bits >> 10) & 31, u32::from(bits) & 1023);
        if exponent == 0 {
            return sign * mantissa as f32 / 16_777_216.0;
        }
        sign * f32::from_bits((exponent + 112) << 23 | mantissa << 13)
    }

    pub fn round(self, value: f32) -> f32 {
        self.decode(self.encode(value))
    }

    pub fn encode_all(self, values: &[f32]) -> Vec<u16> {
        values.iter().map(|value| self.encode(*value)).collect()
    }
}
