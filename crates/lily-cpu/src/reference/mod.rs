//! The reference: every unfused operation as plain loops, written to be read next to docs/model.md.
//! Sums are taken in f64 and every result is rounded once, to f32 and then to the operand's type, so
//! the reference is the exact result at the declared rounding points, to an ulp. It knows no fused operation: those run as the
//! sequence they stand for.

mod attention;
mod experts;
mod magnitude;
mod mixing;

pub(crate) use magnitude::product_magnitudes;

use crate::arena::{Arena, ELEMENT_BYTES};
use crate::context::{Context, round_to};
use crate::sample::{arg_max, sample};
use lily_plan::{Operation, ScratchId, WeightArithmetic};

/// Runs one step of the context's plan, as the sequence it stands for.
pub(crate) fn run_step(context: &Context<'_>, step: usize) {
    let plan = context.plan.expanded_step(step);
    let mut placement = plan.place(|_| ELEMENT_BYTES);
    // The plan's own values stay where they are.
    placement.offsets[..context.plan.scratch.len()].fill(None);
    let mut arena = Arena::new(f32::NAN);
    arena.reserve(placement.arena_bytes);
    let scratch = context.scratch.extended(&plan, &arena, &placement);
    let context = Context {
        plan: &plan,
        scratch,
        ..*context
    };
    for step in &plan.steps {
        run(&step.operation, &context);
    }
}

/// Runs one unfused operation.
fn run(operation: &Operation, context: &Context<'_>) {
    match *operation {
        Operation::Embed { table, output } => embed(context, table, output),
        Operation::RmsNorm {
            input,
            weight,
            output,
        } => {
            let columns = context.columns(input);
            let weight = context.weights.vector(weight);
            store_rows(
                context,
                output,
                context
                    .read(input)
                    .chunks(columns)
                    .map(|row| rms_norm(row, weight, context.config.rms_norm_eps)),
            );
        }
        Operation::Project {
            input,
            weight,
            output,
            arithmetic,
        } => {
            let columns = context.columns(input);
            let inputs = context.read(input);
            let matrix = Matrix::new(context, weight, arithmetic);
            let rows = inputs
                .chunks(columns)
                .map(|row| matrix.multiply(row, 0, matrix.rows()));
            store_rows(context, output, rows);
        }
        Operation::GatedActivation { gate, up, output } => {
            let values = context.read(gate).iter().zip(context.read(up));
            store(
                context,
                output,
                values.map(|(&gate, &up)| silu(gate.into()) * f64::from(up)),
            );
        }
        Operation::ResidualAdd {
            residual,
            update,
            output,
        } => {
            let values = context.read(residual).iter().zip(context.read(update));
            store(
                context,
                output,
                values.map(|(&a, &b)| f64::from(a) + f64::from(b)),
            );
        }
        Operation::SelectLastRow { input, output } => {
            let columns = context.columns(input);
            let rows = context.read(input);
            store(
                context,
                output,
                rows[rows.len() - columns..].iter().map(|&x| f64::from(x)),
            );
        }
        Operation::ArgMax { logits } => arg_max(context, logits),
        Operation::Sample { logits, .. } => sample(context, logits),
        Operation::Convolve {
            layer,
            input,
            taps,
            output,
        } => {
            mixing::convolve(context, layer, input, taps, output);
        }
        Operation::DeltaPrepare {
            convolved,
            a,
            b,
            a_log,
            dt_bias,
            query_key,
            decay,
            strength,
        } => {
            mixing::prepare_queries_and_keys(context, convolved, query_key);
            mixing::prepare_decay(context, a, a_log, dt_bias, decay);
            store(
                context,
                strength,
                context.read(b).iter().map(|&b| sigmoid(b.into())),
            );
        }
        Operation::DeltaScan {
            layer,
            query_key,
            convolved,
            decay,
            strength,
            output,
        } => {
            mixing::scan(
                context,
                layer,
                [query_key, convolved, decay, strength],
                output,
            );
        }
        Operation::GatedNorm {
            input,
            gate,
            weight,
            output,
        } => {
            mixing::gated_norm(context, input, gate, weight, output);
        }
        Operation::HeadNorm {
            input,
            weight,
            output,
        } => {
            attention::head_norm(context, input, weight, output);
        }
        Operation::Rotate { input, output } => attention::rotate(context, input, output),
        Operation::CacheWrite {
            layer,
            keys,
            values,
        } => {
            attention::cache_write(context, layer, keys, values);
        }
        Operation::Attention {
            layer,
            queries,
            output,
        } => {
            attention::attend(context, layer, queries, output);
        }
        Operation::AttentionPartial {
            layer,
            queries,
            block_length,
            output,
        } => {
            attention::partial(context, layer, queries, block_length, output);
        }
        Operation::AttentionMerge {
            partials,
            block_length,
            output,
        } => {
            attention::merge(context, partials, block_length, output);
        }
        Operation::OutputGate {
            input,
            query_gate,
            output,
        } => {
            attention::output_gate(context, input, query_gate, output);
        }
        Operation::Route {
            logits,
            ids,
            weights,
        } => experts::route(context, logits, ids, weights),
        Operation::GroupExperts { ids, grouping } => experts::group(context, ids, grouping),
        Operation::ExpertProject {
            input,
            ids,
            weight,
            output,
            arithmetic,
            grouping: _,
        } => {
            experts::project(context, input, ids, weight, output, arithmetic);
        }
        Operation::Combine {
            experts,
            weights,
            shared,
            shared_gate,
            output,
        } => {
            experts::combine(context, experts, weights, shared, shared_gate, output);
        }
        Operation::Dequantise { weight, output, .. } => dequantise(context, weight, output),
        Operation::WithDequantised {
            ref product,
            ref matrices,
        } => {
            let context = Context {
                dequantised: matrices,
                ..*context
            };
            run(product, &context);
        }
        Operation::Projections { .. }
        | Operation::ProjectAdd { .. }
        | Operation::DeltaStep { .. }
        | Operation::QueryKeyPrepare { .. }
        | Operation::AttentionMergeGate { .. }
        | Operation::ExpertInput { .. }
        | Operation::ExpertOutput { .. }
        | Operation::CombineAdd { .. } => {
            unreachable!("the reference runs {} expanded", operation.name())
        }
    }
}

/// Writes a whole value, rounding once.
fn store(context: &Context<'_>, output: ScratchId, values: impl Iterator<Item = f64>) {
    let element = context.element(output);
    // SAFETY: the reference runs one step at a time on one thread, and this step writes `output`.
    let out = unsafe { context.output(output).memory.all() };
    let mut written = 0;
    for (out, value) in out.iter_mut().zip(values) {
        *out = round_to(element, value as f32);
        written += 1;
    }
    assert_eq!(
        written,
        out.len(),
        "{}: every element is written",
        context.plan.spec(output).name
    );
}

fn store_rows(context: &Context<'_>, output: ScratchId, rows: impl Iterator<Item = Vec<f64>>) {
    store(context, output, rows.flatten());
}

fn embed(context: &Context<'_>, table: lily_checkpoint::WeightId, output: ScratchId) {
    let table = context.weights.matrix(table);
    let mut row = vec![0.0; table.columns()];
    let rows = context.tokens.iter().map(|&token| {
        table.dequantise_row(token as usize, &mut row);
        row.iter().map(|&value| f64::from(value)).collect()
    });
    store_rows(context, output, rows);
}

fn dequantise(context: &Context<'_>, weight: lily_checkpoint::WeightId, output: ScratchId) {
    let matrix = Matrix::new(context, weight, WeightArithmetic::RoundedToBf16);
    let mut row = vec![0.0; matrix.weight.columns()];
    let rows = (0..matrix.rows()).map(|index| {
        matrix.read_row(index, &mut row);
        row.iter().map(|&value| f64::from(value)).collect()
    });
    store_rows(context, output, rows);
}

/// A weight matrix with its rounding.
struct Matrix<'a> {
    weight: &'a lily_checkpoint::Weight<'a>,
    arithmetic: WeightArithmetic,
    /// Its rows, if an earlier step has dequantised them.
    dequantised: Option<&'a [f32]>,
}

impl<'a> Matrix<'a> {
    fn new(
        context: &'a Context<'_>,
        weight: lily_checkpoint::WeightId,
        arithmetic: WeightArithmetic,
    ) -> Self {
        Matrix {
            weight: context.weights.matrix(weight),
            arithmetic,
            dequantised: context.rows_of_weight(context.dequantised, weight),
        }
    }

    /// Row `index` as it is multiplied.
    fn read_row(&self, index: usize, row: &mut [f32]) {
        if let Some(values) = self.dequantised {
            return row.copy_from_slice(&values[index * row.len()..][..row.len()]);
        }
        self.weight.dequantise_row(index, row);
        if self.arithmetic == WeightArithmetic::RoundedToBf16 {
            row.iter_mut()
                .for_each(|w| *w = crate::context::round_to_bf16(*w));
        }
    }

    fn rows(&self) -> usize {
        self.weight.rows()
    }

    /// `x · Wᵀ` with `count` rows of W from `first` on.
    fn multiply(&self, x: &[f32], first: usize, count: usize) -> Vec<f64> {
        let mut row = vec![0.0; self.weight.columns()];
        (first..first + count)
            .map(|index| {
                self.read_row(index, &mut row);
                row.iter()
                    .zip(x)
                    .map(|(&w, &x)| f64::from(w) * f64::from(x))
                    .sum()
            })
            .collect()
    }
}

/// Section 5: `w · x / sqrt(mean(x²) + eps)`.
fn rms_norm(row: &[f32], weight: &[f32], epsilon: f64) -> Vec<f64> {
    let mean = row
        .iter()
        .map(|&x| f64::from(x) * f64::from(x))
        .sum::<f64>()
        / row.len() as f64;
    let scale = 1.0 / (mean + epsilon).sqrt();
    row.iter()
        .zip(weight)
        .map(|(&x, &w)| f64::from(w) * (f64::from(x) * scale))
        .collect()
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn silu(x: f64) -> f64 {
    x * sigmoid(x)
}
