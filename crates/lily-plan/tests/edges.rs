//! Plans at their edges: cases that a slip of the pen would get wrong and nothing else would show.

mod common;

use common::{class, grid, model};
use lily_plan::{
    ElementType, Operation, Phase, Plan, PlanBuilder, PlanOutput, Precision, Resource, ScratchId,
    WeightArithmetic,
};
use std::collections::BTreeSet;

/// Every scratch value that an operation names is one that it accesses: the operands as they print,
/// against the lists that hazards come from.
#[test]
fn every_operand_is_accessed() {
    let mut seen = BTreeSet::new();
    for plan in grid(&model()) {
        for step in &plan.steps {
            let printed = format!("{:?}", step.operation);
            let named: BTreeSet<usize> = printed
                .split("ScratchId(")
                .skip(1)
                .map(|rest| rest[..rest.find(')').unwrap()].parse().unwrap())
                .collect();
            let access = step.operation.access();
            let accessed: BTreeSet<usize> = access
                .reads
                .iter()
                .chain(&access.writes)
                .filter_map(|resource| match resource {
                    Resource::Scratch(id) => Some(id.index()),
                    Resource::State(_) => None,
                })
                .collect();
            assert!(!named.is_empty());
            assert_eq!(named, accessed, "{}", step.label());
            seen.insert(step.operation.name());
        }
    }
    assert_eq!(seen.len(), 31, "every operation there is: {seen:?}");
}

/// A plan over values of one shape: what `steps` pushes and keeps.
fn small<const N: usize>(
    steps: impl Fn(&mut PlanBuilder, [ScratchId; N]) -> Vec<ScratchId>,
) -> (Plan, [ScratchId; N]) {
    let class = class(Phase::Prefill, Precision::F32, 4, PlanOutput::State);
    let mut builder = PlanBuilder::new(&model(), class);
    let values = std::array::from_fn(|_| builder.scratch("value", 4, 64, ElementType::F32));
    let kept = steps(&mut builder, values);
    (builder.finish(None, kept), values)
}

fn rotate(input: ScratchId, output: ScratchId) -> Operation {
    Operation::Rotate { input, output }
}

fn add(residual: ScratchId, update: ScratchId, output: ScratchId) -> Operation {
    Operation::ResidualAdd {
        residual,
        update,
        output,
    }
}

/// A writer waits for the latest stage that reads, which need not be that of the last step that does.
#[test]
fn overwriting_waits_for_the_latest_reader() {
    let (plan, _) = small(|builder, [a, b, c, d, e]| {
        builder.push(rotate(a, b));
        // `c` is read in stage 1, then in stage 0, then overwritten.
        builder.push(add(b, c, d));
        builder.push(rotate(c, e));
        builder.push(rotate(a, c));
        vec![c, d, e]
    });
    assert_eq!(plan.stages, [vec![0, 2], vec![1], vec![3]]);
}

/// What the caller sets before the run stays as it is until it is read.
#[test]
fn nothing_takes_the_place_of_what_the_caller_sets() {
    let (plan, [.., given, _]) = small(|builder, [a, b, c, given, d]| {
        builder.push(rotate(a, b));
        builder.push(rotate(b, c));
        builder.push(add(c, given, d));
        vec![d]
    });
    let placement = plan.place(ElementType::bytes);
    let range = placement.range(given);
    for (index, offset) in placement.offsets.iter().enumerate() {
        let start = offset.expect("every value is touched");
        let apart = start >= range.end || start + placement.sizes[index] <= range.start;
        assert!(apart || index == given.index(), "value {index}");
    }
}

/// The head takes its weights exactly, in whatever phase and however many rows: scores are those of the
/// logits that are sampled from. Other products of a prefill take weights as matrix units do.
#[test]
fn the_head_is_exact_and_other_products_of_prefill_are_as_matrix_units_take_them() {
    let model = model();
    let arithmetic = |operation: &Operation| match *operation {
        Operation::Projections { arithmetic, .. } => Some(arithmetic),
        _ => None,
    };
    for rows in [1, 7] {
        for (precision, other) in [
            (Precision::Bf16, WeightArithmetic::RoundedToBf16),
            (Precision::F32, WeightArithmetic::Exact),
        ] {
            let class = class(Phase::Prefill, precision, rows, PlanOutput::AllLogits);
            let plan = Plan::record(&model, class);
            let all: Vec<_> = plan
                .steps
                .iter()
                .filter_map(|step| arithmetic(&step.operation))
                .collect();
            let (head, others) = all.split_last().unwrap();
            assert_eq!(*head, WeightArithmetic::Exact);
            assert!(
                others.iter().all(|found| *found == other),
                "{precision}, {rows} rows"
            );
        }
    }
}

/// However many rows a chunk has, the logits are those of the rows that were asked for.
#[test]
fn logits_have_a_row_for_each_that_is_wanted() {
    let model = model();
    for rows in 1..=3 {
        for (output, expected) in [
            (PlanOutput::LastLogits, Some(1)),
            (PlanOutput::AllLogits, Some(rows)),
            (PlanOutput::State, None),
        ] {
            let class = class(Phase::Prefill, Precision::Bf16, rows, output);
            let plan = Plan::record(&model, class);
            assert_eq!(
                plan.logits.map(|id| plan.spec(id).rows),
                expected,
                "{class}"
            );
        }
    }
}
