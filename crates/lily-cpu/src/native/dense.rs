//! Embedding, norms, products of all rows with one matrix, elementwise operations.

use super::work::{Work, with_buffer};
use super::{InstructionSet, Native};
use crate::context::Rounded;
use lily_checkpoint::WeightId;
use lily_plan::{Projection, ScratchId, WeightArithmetic};
use std::borrow::Cow;

/// Weight rows dequantised at a time: a tile of 16 rows of 2,048 is 128 KiB, which stays in a core's
/// own cache while all rows of the chunk pass over it.
const TILE_ROWS: usize = 16;

/// Elements of an elementwise operation a work item does.
const ELEMENTS: usize = 8_192;

/// Rows that a product reads.
pub(crate) struct Input<'a> {
    pub values: Cow<'a, [f32]>,
    pub columns: usize,
    /// Which rows, in order.
    pub rows: Vec<u32>,
}

impl<'a> Native<'a> {
    /// All rows of a scratch value.
    pub fn input(self, id: ScratchId) -> Input<'a> {
        let values = Cow::Borrowed(self.context.read(id));
        let columns = self.context.columns(id);
        let rows = (0..(values.len() / columns) as u32).collect();
        Input {
            values,
            columns,
            rows,
        }
    }

    /// All rows of a scratch value, normalised if there is a norm. One pass over a few rows: it is done
    /// once here, where a GPU's work items each do it for themselves.
    pub fn normed_input(self, id: ScratchId, norm: Option<WeightId>) -> Input<'a> {
        let mut input = self.input(id);
        if let Some(norm) = norm {
            let weight = self.context.weights.vector(norm);
            let epsilon = self.context.config.rms_norm_eps as f32;
            for row in input.values.to_mut().chunks_mut(input.columns) {
                rms_norm(self.set, row, weight, epsilon);
            }
        }
        input
    }

    pub fn embed(self, table: WeightId, output: ScratchId) -> Work<'a> {
        let table = self.context.weights.matrix(table);
        let (tokens, out) = (self.context.tokens, self.context.output(output));
        Work::new(tokens.len(), move |row| {
            with_buffer(table.columns(), |values| {
                let token = tokens[row] as usize;
                self.set
                    .dequantise(table, token, WeightArithmetic::Exact, values);
                // SAFETY: each item writes its own row.
                unsafe { out.write(row * values.len(), values) };
            });
        })
    }

    pub fn rms_norm(self, input: ScratchId, weight: WeightId, output: ScratchId) -> Work<'a> {
        let columns = self.context.columns(input);
        let (values, weight) = (
            self.context.read(input),
            self.context.weights.vector(weight),
        );
        let out = self.context.output(output);
        let epsilon = self.context.config.rms_norm_eps as f32;
        Work::new(values.len() / columns, move |row| {
            with_buffer(columns, |buffer| {
                buffer.copy_from_slice(&values[row * columns..][..columns]);
                rms_norm(self.set, buffer, weight, epsilon);
                // SAFETY: each item writes its own row.
                unsafe { out.write(row * columns, buffer) };
            });
        })
    }

    /// The product, with the residual added where there is one.
    pub fn project(
        self,
        input: ScratchId,
        weight: WeightId,
        residual: Option<ScratchId>,
        output: ScratchId,
        arithmetic: WeightArithmetic,
    ) -> Work<'a> {
        let input = self.input(input);
        let residual = residual.map(|id| self.context.read(id));
        let (out, outputs) = (self.context.output(output), self.context.columns(output));
        Work::blocks(outputs, TILE_ROWS, move |first, count| {
            let block = (first, count);
            self.products(&input, &input.rows, weight, block, arithmetic, |products| {
                if let Some(residual) = residual {
                    for (row, values) in products.chunks_mut(count).enumerate() {
                        let residual = &residual[row * outputs + first..][..count];
                        values
                            .iter_mut()
                            .zip(residual)
                            .for_each(|(value, x)| *value += x);
                    }
                }
                store_block(out, products, outputs, first, count);
            });
        })
    }

    pub fn projections(
        self,
        input: ScratchId,
        norm: Option<WeightId>,
        projections: &'a [Projection],
        arithmetic: WeightArithmetic,
    ) -> Work<'a> {
        let input = self.normed_input(input, norm);
        let parts: Vec<(usize, usize, usize)> = projections
            .iter()
            .enumerate()
            .flat_map(|(index, projection)| {
                let outputs = self.context.columns(projection.output());
                (0..outputs.div_ceil(TILE_ROWS)).map(move |block| {
                    let first = block * TILE_ROWS;
                    (index, first, TILE_ROWS.min(outputs - first))
                })
            })
            .collect();
        Work::new(parts.len(), move |item| {
            let (index, first, count) = parts[item];
            let projection = &projections[index];
            let out = self.context.output(projection.output());
            let outputs = self.context.columns(projection.output());
            let store = |products: &mut [f32]| store_block(out, products, outputs, first, count);
            let rows = &input.rows;
            match *projection {
                Projection::Linear { weight, .. } => {
                    self.products(&input, rows, weight, (first, count), arithmetic, store);
                }
                Projection::Gated { gate, up, .. } => {
                    self.gated(&input, rows, [gate, up], (first, count), arithmetic, store);
                }
            }
        })
    }

    /// The products of `rows` of the input with rows `first .. first + count` of a matrix, as
    /// [rows, count], given to `body`.
    pub fn products(
        self,
        input: &Input<'_>,
        rows: &[u32],
        weight: WeightId,
        (first, count): (usize, usize),
        arithmetic: WeightArithmetic,
        body: impl FnOnce(&mut [f32]),
    ) {
        let multiply = |tile: &[f32]| {
            with_buffer(rows.len() * count, |products| {
                self.set
                    .products(&input.values, rows, tile, input.columns, products);
                body(products);
            });
        };
        let length = count * input.columns;
        if let Some(values) = self.context.rows_of_weight(self.dequantised, weight) {
            return multiply(&values[first * input.columns..][..length]);
        }
        let matrix = self.context.weights.matrix(weight);
        with_buffer(length, |tile| {
            self.set.dequantise(matrix, first, arithmetic, tile);
            multiply(tile);
        });
    }

    /// A whole matrix, rounded to bfloat16.
    pub fn dequantise(self, weight: WeightId, output: ScratchId) -> Work<'a> {
        let matrix = self.context.weights.matrix(weight);
        let (columns, out) = (matrix.columns(), self.context.output(output));
        Work::blocks(matrix.rows(), TILE_ROWS, move |first, count| {
            with_buffer(count * columns, |tile| {
                let rounded = WeightArithmetic::RoundedToBf16;
                self.set.dequantise(matrix, first, rounded, tile);
                // SAFETY: each item writes its own rows.
                unsafe { out.write(first * columns, tile) };
            });
        })
    }

    /// `silu(x · Gᵀ) · (x · Uᵀ)`, otherwise like [`products`](Self::products).
    pub fn gated(
        self,
        input: &Input<'_>,
        rows: &[u32],
        [gate, up]: [WeightId; 2],
        block: (usize, usize),
        arithmetic: WeightArithmetic,
        body: impl FnOnce(&mut [f32]),
    ) {
        self.products(input, rows, gate, block, arithmetic, |gates| {
            self.products(input, rows, up, block, arithmetic, |ups| {
                for (gate, up) in gates.iter_mut().zip(ups) {
                    *gate = silu(*gate) * *up;
                }
            });
            body(gates);
        });
    }

    pub fn elementwise(
        self,
        output: ScratchId,
        value: impl Fn(usize) -> f32 + Send + Sync + 'a,
    ) -> Work<'a> {
        let out = self.context.output(output);
        let total = self.context.plan.spec(output).elements();
        Work::blocks(total, ELEMENTS, move |start, length| {
            with_buffer(length, |buffer| {
                for (index, element) in buffer.iter_mut().enumerate() {
                    *element = value(start + index);
                }
                // SAFETY: each item writes its own elements.
                unsafe { out.write(start, buffer) };
            });
        })
    }
}

/// Stores `[rows, count]` products in columns `first ..` of an output `outputs` wide.
fn store_block(out: Rounded<'_>, products: &[f32], outputs: usize, first: usize, count: usize) {
    for (row, values) in products.chunks(count).enumerate() {
        // SAFETY: each item owns columns `first .. first + count` of every row.
        unsafe { out.write(row * outputs + first, values) };
    }
}

/// Normalises a row in place: `w · (x / sqrt(mean(x²) + eps))`.
pub(super) fn rms_norm(set: InstructionSet, row: &mut [f32], weight: &[f32], epsilon: f32) {
    let mut squares = [0.0];
    set.products(row, &[0], row, row.len(), &mut squares);
    let scale = 1.0 / (squares[0] / row.len() as f32 + epsilon).sqrt();
    for (x, w) in row.iter_mut().zip(weight) {
        *x = w * (*x * scale);
    }
}

pub(super) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

pub(super) fn silu(x: f32) -> f32 {
    x * sigmoid(x)
}
