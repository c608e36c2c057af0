//! Products with dense weights: kernels/vector.metal.

use super::{Recorder, instance};
use crate::kernels::{Input, Output, Project, TileProject};
use crate::route;
use lily_checkpoint::WeightId;
use lily_plan::{DeviceError, Projection, ScratchId, WeightArithmetic};

/// Outputs of one dispatch.
const MOST_OUTPUTS: usize = 4;
/// Outputs of a tile (kernels/tile.h).
pub(super) const TILE_OUTPUTS: usize = 64;

/// The products of a step as kernels take them: by output, and what is gated.
struct Products {
    outputs: [usize; MOST_OUTPUTS],
    bits: [u32; MOST_OUTPUTS],
    bfloat: [bool; MOST_OUTPUTS],
    weights: [Option<Input>; MOST_OUTPUTS],
    results: [Option<Output>; MOST_OUTPUTS],
    /// Which output is gated; `MOST_OUTPUTS` if none is.
    gated: usize,
    up: Option<Input>,
    up_bits: u32,
}

impl Recorder<'_> {
    pub(super) fn projections(
        &mut self,
        input: ScratchId,
        norm: Option<WeightId>,
        projections: &[Projection],
        residual: Option<ScratchId>,
        arithmetic: WeightArithmetic,
    ) -> Result<(), DeviceError> {
        let gated = |projection: &Projection| matches!(projection, Projection::Gated { .. });
        if projections.len() > MOST_OUTPUTS || projections.iter().filter(|p| gated(p)).count() > 1 {
            let what = format!("a step with {} products", projections.len());
            return Err(
                self.unsupported(what, "its kernels compute at most four, one of them gated")
            );
        }
        let products = self.products(projections);
        if let Some(tiles) = self.tiles(input, norm, arithmetic) {
            if norm.is_some() {
                let what = "a norm fused with products of many rows".to_string();
                return Err(self.unsupported(what, "every tile would repeat it"));
            }
            self.tile_projections(tiles, input, &products, residual);
        } else {
            self.vector_projections(input, norm, &products, residual);
        }
        Ok(())
    }

    /// The products of a step as kernels take them.
    fn products(&self, projections: &[Projection]) -> Products {
        let mut products = Products {
            outputs: [0; MOST_OUTPUTS],
            bits: [4; MOST_OUTPUTS],
            bfloat: [false; MOST_OUTPUTS],
            weights: [None; MOST_OUTPUTS],
            results: [None; MOST_OUTPUTS],
            gated: MOST_OUTPUTS,
            up: None,
            up_bits: 4,
        };
        for (index, projection) in projections.iter().enumerate() {
            let weight = match *projection {
                Projection::Linear { weight, .. } => weight,
                Projection::Gated { gate, up, .. } => {
                    products.gated = index;
                    products.up = Some(self.weight(up));
                    products.up_bits = self.bits(up);
                    gate
                }
            };
            let output = projection.output();
            products.outputs[index] = self.columns(output);
            products.bits[index] = self.bits(weight);
            products.bfloat[index] = self.is_bfloat(output);
            products.weights[index] = Some(self.weight(weight));
            products.results[index] = Some(self.output(output));
        }
        products
    }

    fn tile_projections(
        &mut self,
        tiles: &str,
        input: ScratchId,
        products: &Products,
        residual: Option<ScratchId>,
    ) {
        debug_assert!(self.is_bfloat(input), "what matrix units take");
        let rows = self.rows_of(input);
        let form = match self.switches.small_tiles {
            true => route::small_tile(),
            false => route::dense_tile(rows),
        };
        let tile_outputs = |index: usize| {
            let width = if index == products.gated {
                TILE_OUTPUTS / 2
            } else {
                TILE_OUTPUTS
            };
            products.outputs[index].div_ceil(width)
        };
        let output_tiles: usize = (0..MOST_OUTPUTS).map(tile_outputs).sum();
        let kernel = TileProject {
            kernel: instance(
                TileProject::NAMES,
                &format!("{tiles}_project_{}", form.rows),
            ),
            columns: self.columns(input) as u32,
            outputs_0: products.outputs[0] as u32,
            outputs_1: products.outputs[1] as u32,
            outputs_2: products.outputs[2] as u32,
            outputs_3: products.outputs[3] as u32,
            bits_0: products.bits[0],
            bits_1: products.bits[1],
            bits_2: products.bits[2],
            bits_3: products.bits[3],
            bfloat_0: products.bfloat[0],
            bfloat_1: products.bfloat[1],
            bfloat_2: products.bfloat[2],
            bfloat_3: products.bfloat[3],
            gated: products.gated as u32,
            up_bits: products.up_bits,
            has_residual: residual.is_some(),
            input: self.input(input),
            weight_0: products.weights[0].expect("a product"),
            weight_1: products.weights[1],
            weight_2: products.weights[2],
            weight_3: products.weights[3],
            up: products.up,
            residual: residual.map(|id| self.input(id)),
            output_0: products.results[0].expect("a product"),
            output_1: products.results[1],
            output_2: products.results[2],
            output_3: products.results[3],
            row_count: rows as u32,
        };
        let grid = [rows.div_ceil(form.rows), output_tiles, 1];
        self.dispatch(kernel, grid, form.threads);
    }

    fn vector_projections(
        &mut self,
        input: ScratchId,
        norm: Option<WeightId>,
        products: &Products,
        residual: Option<ScratchId>,
    ) {
        let rows = self.rows_of(input);
        let together = route::vector_rows(rows);
        let blocks: usize = products.outputs.iter().map(|count| count.div_ceil(4)).sum();
        let passes = rows.div_ceil(together);
        let columns = self.columns(input);
        let shape = route::vector_shape(columns, blocks, together, 1, self.gpu.cores);
        let kernel = Project {
            kernel: instance(Project::NAMES, &format!("project_{together}")),
            columns: columns as u32,
            input_bfloat: self.is_bfloat(input),
            has_norm: norm.is_some(),
            epsilon: self.epsilon(),
            simdgroups: shape.simdgroups as u32,
            split: shape.split as u32,
            rounds: shape.rounds as u32,
            by_chunk: shape.by_chunk,
            outputs_0: products.outputs[0] as u32,
            outputs_1: products.outputs[1] as u32,
            outputs_2: products.outputs[2] as u32,
            outputs_3: products.outputs[3] as u32,
            bits_0: products.bits[0],
            bits_1: products.bits[1],
            bits_2: products.bits[2],
            bits_3: products.bits[3],
            bfloat_0: products.bfloat[0],
            bfloat_1: products.bfloat[1],
            bfloat_2: products.bfloat[2],
            bfloat_3: products.bfloat[3],
            gated: products.gated as u32,
            up_bits: products.up_bits,
            has_residual: residual.is_some(),
            input: self.input(input),
            norm: norm.map(|id| self.weight(id)),
            weight_0: products.weights[0].expect("a product"),
            weight_1: products.weights[1],
            weight_2: products.weights[2],
            weight_3: products.weights[3],
            up: products.up,
            residual: residual.map(|id| self.input(id)),
            output_0: products.results[0].expect("a product"),
            output_1: products.results[1],
            output_2: products.results[2],
            output_3: products.results[3],
            row_count: rows as u32,
        };
        let grid = [blocks.div_ceil(shape.blocks()), passes, 1];
        self.dispatch(kernel, grid, shape.simdgroups * 32);
    }
}
