//! Products with dense weights: kernels/vector.metal.

use super::Recorder;
use crate::kernels::{Input, Output, Project};
use crate::route;
use lily_checkpoint::WeightId;
use lily_plan::{DeviceError, Projection, ScratchId, WeightArithmetic};

/// Outputs of one dispatch.
const MOST_OUTPUTS: usize = 4;

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
        if self.uses_tiles(arithmetic) {
            let what = "prefill in bf16".to_string();
            return Err(self.unsupported(what, "its matrix path is not there yet"));
        }
        self.vector_projections(input, norm, projections, residual);
        Ok(())
    }

    fn vector_projections(
        &mut self,
        input: ScratchId,
        norm: Option<WeightId>,
        projections: &[Projection],
        residual: Option<ScratchId>,
    ) {
        let columns = self.columns(input);
        let (mut outputs, mut bits, mut bfloat) =
            ([0; MOST_OUTPUTS], [4; MOST_OUTPUTS], [false; MOST_OUTPUTS]);
        let mut weights: [Option<Input>; MOST_OUTPUTS] = [None; MOST_OUTPUTS];
        let mut results: [Option<Output>; MOST_OUTPUTS] = [None; MOST_OUTPUTS];
        let (mut gated, mut up, mut up_bits) = (MOST_OUTPUTS, None, 4);
        for (index, projection) in projections.iter().enumerate() {
            let weight = match *projection {
                Projection::Linear { weight, .. } => weight,
                Projection::Gated {
                    gate, up: other, ..
                } => {
                    gated = index;
                    up = Some(self.weight(other));
                    up_bits = self.bits(other);
                    gate
                }
            };
            outputs[index] = self.columns(projection.output());
            bits[index] = self.bits(weight);
            bfloat[index] = self.is_bfloat(projection.output());
            weights[index] = Some(self.weight(weight));
            results[index] = Some(self.output(projection.output()));
        }
        let rows = self.rows_of(input);
        let together = route::vector_rows(rows);
        let blocks: usize = outputs.iter().map(|count| count.div_ceil(4)).sum();
        let simdgroups = route::vector_simdgroups(blocks, rows.div_ceil(together));
        let kernel = Project {
            kernel: Project::NAMES[together.ilog2() as usize].0,
            columns: columns as u32,
            input_bfloat: self.is_bfloat(input),
            has_norm: norm.is_some(),
            epsilon: self.epsilon(),
            simdgroups: simdgroups as u32,
            outputs_0: outputs[0] as u32,
            outputs_1: outputs[1] as u32,
            outputs_2: outputs[2] as u32,
            outputs_3: outputs[3] as u32,
            bits_0: bits[0],
            bits_1: bits[1],
            bits_2: bits[2],
            bits_3: bits[3],
            bfloat_0: bfloat[0],
            bfloat_1: bfloat[1],
            bfloat_2: bfloat[2],
            bfloat_3: bfloat[3],
            gated: gated as u32,
            up_bits,
            has_residual: residual.is_some(),
            input: self.input(input),
            norm: norm.map(|id| self.weight(id)),
            weight_0: weights[0].expect("a product"),
            weight_1: weights[1],
            weight_2: weights[2],
            weight_3: weights[3],
            up,
            residual: residual.map(|id| self.input(id)),
            output_0: results[0].expect("a product"),
            output_1: results[1],
            output_2: results[2],
            output_3: results[3],
            row_count: rows as u32,
        };
        let grid = [blocks.div_ceil(simdgroups), rows.div_ceil(together), 1];
        self.dispatch(kernel, grid, simdgroups * 32);
    }
}
