//! How large the terms of products are: for each output of an operation that multiplies by a matrix, the
//! sum of |a||b| over its terms. Error bounds are made from it, not from the size of a result in which terms may
//! have cancelled.

use super::{Matrix, rms_norm, sigmoid};
use crate::context::Context;
use lily_checkpoint::WeightId;
use lily_plan::{Operation, Projection, ScratchId};

/// Magnitudes of the outputs of a step with products; `None` for other steps.
pub(crate) fn product_magnitudes(
    context: &Context<'_>,
    operation: &Operation,
) -> Option<Vec<(ScratchId, Vec<f64>)>> {
    let magnitudes = match *operation {
        Operation::Project {
            input,
            weight,
            output,
            ..
        } => {
            vec![(
                output,
                products(context, &rows(context, input, None), weight),
            )]
        }
        Operation::ProjectAdd {
            input,
            weight,
            residual,
            output,
            ..
        } => {
            let update = products(context, &rows(context, input, None), weight);
            vec![(output, add(update, context.read(residual)))]
        }
        Operation::Projections {
            input,
            norm,
            ref projections,
            ..
        } => {
            let rows = rows(context, input, norm);
            let each = |projection: &Projection| match *projection {
                Projection::Linear { weight, output } => (output, products(context, &rows, weight)),
                Projection::Gated { gate, up, output } => (
                    output,
                    gated(products(context, &rows, gate), products(context, &rows, up)),
                ),
            };
            projections.iter().map(each).collect()
        }
        Operation::ExpertProject {
            input,
            ids,
            weight,
            output,
            ..
        } => {
            let rows = rows(context, input, None);
            vec![(output, expert_products(context, &rows, ids, weight))]
        }
        Operation::ExpertInput {
            input,
            norm,
            ids,
            gate,
            up,
            output,
            ..
        } => {
            let rows = rows(context, input, norm);
            let [gate, up] = [gate, up].map(|weight| expert_products(context, &rows, ids, weight));
            vec![(output, gated(gate, up))]
        }
        Operation::ExpertOutput {
            activated,
            ids,
            weights,
            down,
            shared,
            shared_down,
            shared_gate,
            residual,
            output,
        } => {
            let experts = expert_products(context, &rows(context, activated, None), ids, down);
            let shared = products(context, &rows(context, shared, None), shared_down);
            let combined = combine(context, &experts, weights, &shared, shared_gate);
            vec![(output, add(combined, context.read(residual)))]
        }
        Operation::WithDequantised { ref product, .. } => {
            return product_magnitudes(context, product);
        }
        _ => return None,
    };
    Some(magnitudes)
}

/// The rows of a value, normalised where there is a norm, without sign.
fn rows(context: &Context<'_>, input: ScratchId, norm: Option<WeightId>) -> Vec<Vec<f64>> {
    let rows = context.read(input).chunks(context.columns(input));
    let epsilon = context.config.rms_norm_eps;
    rows.map(|row| match norm {
        Some(weight) => rms_norm(row, context.weights.vector(weight), epsilon),
        None => row.iter().map(|&x| f64::from(x)).collect(),
    })
    .map(|row: Vec<f64>| row.into_iter().map(f64::abs).collect())
    .collect()
}

/// `|x| · |W|ᵀ` with `count` rows of W from `first` on.
fn multiply(matrix: &Matrix<'_>, x: &[f64], first: usize, count: usize) -> Vec<f64> {
    let mut row = vec![0.0; matrix.weight.columns()];
    (first..first + count)
        .map(|index| {
            matrix.weight.dequantise_row(index, &mut row);
            row.iter()
                .zip(x)
                .map(|(&w, &x)| f64::from(w.abs()) * x)
                .sum()
        })
        .collect()
}

fn products(context: &Context<'_>, rows: &[Vec<f64>], weight: WeightId) -> Vec<f64> {
    let matrix = Matrix::new(context, weight, lily_plan::WeightArithmetic::Exact);
    rows.iter()
        .flat_map(|row| multiply(&matrix, row, 0, matrix.rows()))
        .collect()
}

fn expert_products(
    context: &Context<'_>,
    rows: &[Vec<f64>],
    ids: ScratchId,
    weight: WeightId,
) -> Vec<f64> {
    let matrix = Matrix::new(context, weight, lily_plan::WeightArithmetic::Exact);
    let (outputs, _) = context.plan.model.dimensions(weight);
    let ids = context.read_u32(ids);
    let shared_by = ids.len() / rows.len();
    let product = |(pair, &expert): (usize, &u32)| {
        multiply(
            &matrix,
            &rows[pair / shared_by],
            expert as usize * outputs,
            outputs,
        )
    };
    ids.iter().enumerate().flat_map(product).collect()
}

/// Of `silu(gate) · up`: silu grows by at most 1.1 for each unit of its argument.
fn gated(gate: Vec<f64>, up: Vec<f64>) -> Vec<f64> {
    gate.iter()
        .zip(up)
        .map(|(gate, up)| 2.2 * gate * up)
        .collect()
}

fn add(update: Vec<f64>, residual: &[f32]) -> Vec<f64> {
    update
        .iter()
        .zip(residual)
        .map(|(a, &b)| a + f64::from(b.abs()))
        .collect()
}

fn combine(
    context: &Context<'_>,
    experts: &[f64],
    weights: ScratchId,
    shared: &[f64],
    shared_gate: ScratchId,
) -> Vec<f64> {
    let hidden = shared.len() / context.rows();
    let choices = context.config.experts_per_token;
    let (weights, gate) = (context.read(weights), context.read(shared_gate));
    (0..shared.len())
        .map(|at| {
            let (row, column) = (at / hidden, at % hidden);
            let routed: f64 = (row * choices..(row + 1) * choices)
                .map(|pair| f64::from(weights[pair]) * experts[pair * hidden + column])
                .sum();
            routed + sigmoid(gate[row].into()) * shared[at]
        })
        .collect()
}
