//! A weight's stored bytes, and the plain way to read them (docs/model.md, section 4).

use crate::numbers::{bf16_to_f32, f16_to_f32};
use crate::weights::{DType, WeightFormat, WeightSpec};
use std::ops::Range;

/// The bytes of a weight, or of some of its rows. They lie at any alignment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightData<'a> {
    /// Numbers one after the other, little-endian, row by row.
    Plain(&'a [u8]),
    /// Affine quantisation.
    Affine {
        /// Codes: `columns · bits / 8` bytes a row, one little-endian bit stream.
        codes: &'a [u8],
        /// Scales: `columns / group` numbers a row.
        scales: &'a [u8],
        /// Biases: `columns / group` numbers a row.
        biases: &'a [u8],
    },
}

impl WeightData<'_> {
    /// Bytes in all.
    pub fn bytes(&self) -> usize {
        match self {
            WeightData::Plain(numbers) => numbers.len(),
            WeightData::Affine {
                codes,
                scales,
                biases,
            } => codes.len() + scales.len() + biases.len(),
        }
    }
}

/// A weight of the model as it is stored.
#[derive(Clone, Copy, Debug)]
pub struct Weight<'a> {
    /// Which weight, and its logical shape.
    pub spec: WeightSpec,
    /// How its numbers are encoded.
    pub format: WeightFormat,
    /// Its bytes: those of all rows, experts one after the other.
    pub data: WeightData<'a>,
}

impl<'a> Weight<'a> {
    /// Rows of the weight read as one matrix (experts stacked, a vector as one row).
    pub fn rows(&self) -> usize {
        self.spec.shape.rows_and_columns().0
    }

    /// Columns of the weight read as one matrix.
    pub fn columns(&self) -> usize {
        self.spec.shape.rows_and_columns().1
    }

    /// The bytes of one row.
    ///
    /// # Panics
    ///
    /// If there is no such row.
    pub fn row(&self, row: usize) -> WeightData<'a> {
        self.row_range(row..row + 1)
    }

    /// The bytes of consecutive rows, e.g. `expert * outputs..(expert + 1) * outputs`.
    ///
    /// # Panics
    ///
    /// If there are no such rows.
    pub fn row_range(&self, rows: Range<usize>) -> WeightData<'a> {
        let count = self.rows();
        assert!(
            rows.start <= rows.end && rows.end <= count,
            "{}: rows {rows:?} of {count}",
            self.spec.id
        );
        let columns = self.columns();
        let cut = |bytes: &'a [u8], width: usize| &bytes[rows.start * width..rows.end * width];
        match (self.format, self.data) {
            (WeightFormat::Plain(dtype), WeightData::Plain(numbers)) => {
                WeightData::Plain(cut(numbers, columns * dtype.bytes()))
            }
            (
                WeightFormat::Affine {
                    bits,
                    group,
                    scales: dtype,
                },
                WeightData::Affine {
                    codes,
                    scales,
                    biases,
                },
            ) => {
                let numbers = columns / usize::from(group) * dtype.bytes();
                WeightData::Affine {
                    codes: cut(codes, columns * usize::from(bits) / 8),
                    scales: cut(scales, numbers),
                    biases: cut(biases, numbers),
                }
            }
            _ => panic!("{}: the format is not that of the data", self.spec.id),
        }
    }

    /// Writes the numbers of a row to `out`. An affine number is `scale · code + bias` in f32, the product
    /// rounded and then the sum.
    ///
    /// This is the reference: written to be read, not to be fast.
    ///
    /// # Panics
    ///
    /// If there is no such row, or `out` is not as long as a row.
    pub fn dequantise_row(&self, row: usize, out: &mut [f32]) {
        assert_eq!(
            out.len(),
            self.columns(),
            "{}: the length of a row",
            self.spec.id
        );
        match (self.format, self.row(row)) {
            (
                WeightFormat::Affine {
                    bits,
                    group,
                    scales: dtype,
                },
                data,
            ) => {
                let WeightData::Affine {
                    codes,
                    scales,
                    biases,
                } = data
                else {
                    unreachable!()
                };
                let groups = out.chunks_exact_mut(usize::from(group));
                for (index, numbers) in groups.enumerate() {
                    let scale = number_at(scales, dtype, index);
                    let bias = number_at(biases, dtype, index);
                    let first = index * usize::from(group);
                    for (offset, number) in numbers.iter_mut().enumerate() {
                        *number = scale * f32::from(code_at(codes, bits, first + offset)) + bias;
                    }
                }
            }
            (WeightFormat::Plain(dtype), data) => {
                let WeightData::Plain(bytes) = data else {
                    unreachable!()
                };
                for (index, number) in out.iter_mut().enumerate() {
                    *number = number_at(bytes, dtype, index);
                }
            }
        }
    }

    /// All numbers of the weight as f32, row by row: meant for vectors and convolution taps, right for
    /// every weight.
    pub fn read_plain(&self) -> Vec<f32> {
        let columns = self.columns();
        let mut numbers = vec![0.0; self.rows() * columns];
        for (row, out) in numbers.chunks_exact_mut(columns).enumerate() {
            self.dequantise_row(row, out);
        }
        numbers
    }
}

/// Code `index` of a row's bit stream: bits [index · bits, (index + 1) · bits), lowest first.
fn code_at(codes: &[u8], bits: u8, index: usize) -> u8 {
    let first = index * usize::from(bits);
    let (byte, shift) = (first / 8, first % 8);
    // A code of up to eight bits touches two bytes at most; the last one of a row may end in its first.
    let next = codes.get(byte + 1).copied().unwrap_or(0);
    let window = u16::from_le_bytes([codes[byte], next]) >> shift;
    (window & ((1 << bits) - 1)) as u8
}

/// Number `index` of an array at any alignment.
fn number_at(bytes: &[u8], dtype: DType, index: usize) -> f32 {
    let at = |byte: usize| bytes[index * dtype.bytes() + byte];
    match dtype {
        DType::Bf16 => bf16_to_f32(u16::from_le_bytes([at(0), at(1)])),
        DType::F16 => f16_to_f32(u16::from_le_bytes([at(0), at(1)])),
        DType::F32 => f32::from_le_bytes([at(0), at(1), at(2), at(3)]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::weights::{WeightId, WeightRole, WeightShape};

    #[test]
    fn codes_of_every_width_are_read_back_from_one_bit_stream() {
        for bits in [2u8, 3, 4, 5, 6, 8] {
            let count = 64usize;
            let code = |index: usize| (index * 37 + 11) as u64 & ((1 << bits) - 1);
            // Packed bit by bit, which is the definition.
            let mut stream = vec![0u8; count * usize::from(bits) / 8];
            for bit in 0..count * usize::from(bits) {
                let set = code(bit / usize::from(bits)) >> (bit % usize::from(bits)) & 1;
                stream[bit / 8] |= (set as u8) << (bit % 8);
            }
            for index in 0..count {
                let found = code_at(&stream, bits, index);
                assert_eq!(u64::from(found), code(index), "{bits} bits, code {index}");
            }
        }
    }

    #[test]
    fn an_experts_rows_lie_one_after_the_other() {
        let bytes: Vec<u8> = (0..2 * 3 * 4 * 2).collect();
        let weight = Weight {
            spec: WeightSpec {
                id: WeightId::in_layer(0, WeightRole::ExpertUp),
                shape: WeightShape::Experts {
                    experts: 2,
                    outputs: 3,
                    inputs: 4,
                },
            },
            format: WeightFormat::Plain(DType::Bf16),
            data: WeightData::Plain(&bytes),
        };
        assert_eq!((weight.rows(), weight.columns()), (6, 4));
        assert_eq!(weight.row(4), WeightData::Plain(&bytes[32..40]));
        assert_eq!(weight.row_range(3..6), WeightData::Plain(&bytes[24..48]));
        assert_eq!(weight.row_range(6..6).bytes(), 0);
        let past = std::panic::catch_unwind(|| weight.row(6).bytes());
        assert!(past.is_err(), "a row past the end must not be read");
    }
}
