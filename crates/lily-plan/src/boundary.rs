//! The boundaries between stages that remain, folded by kind: what stands before what, and why.

use crate::access::Access;
use crate::operand::{Resource, StateSlot};
use crate::operation::Operation;
use crate::plan::Plan;
use serde::Serialize;
use std::collections::BTreeSet;

/// A kind of boundary between two consecutive stages, and how often a plan has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BoundaryKind {
    /// Operations before the boundary that something after it depends on.
    pub producers: Vec<&'static str>,
    /// Operations right after the boundary; each depends on a producer.
    pub consumers: Vec<&'static str>,
    /// The scratch values and state slots that force the boundary, from the hazards between the two
    /// stages.
    pub resources: Vec<&'static str>,
    /// How many boundaries of the plan are of this kind.
    pub count: usize,
    /// Why it must stand, in a sentence.
    pub reason: String,
}

impl BoundaryKind {
    /// Producers and consumers, e.g. `norm-projections → delta-step`.
    pub fn name(&self) -> String {
        format!(
            "{} → {}",
            self.producers.join(" + "),
            self.consumers.join(" + ")
        )
    }
}

/// How a later step depends on an earlier one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Dependence {
    /// It reads what the earlier one wrote.
    Reads,
    /// It overwrites what the earlier one read or wrote.
    Overwrites,
}

/// The boundaries of a plan by kind, in the order in which they first occur. Their counts add up to one
/// less than the plan's stages.
pub fn boundaries(plan: &Plan) -> Vec<BoundaryKind> {
    let accesses: Vec<Access> = plan
        .steps
        .iter()
        .map(|step| step.operation.access())
        .collect();
    let mut kinds: Vec<BoundaryKind> = Vec::new();
    for pair in plan.stages.windows(2) {
        let kind = between(plan, &accesses, &pair[0], &pair[1]);
        let known = kinds.iter_mut().find(|known| {
            known.producers == kind.producers
                && known.consumers == kind.consumers
                && known.resources == kind.resources
        });
        match known {
            Some(known) => known.count += 1,
            None => kinds.push(kind),
        }
    }
    kinds
}

fn between(plan: &Plan, accesses: &[Access], before: &[usize], after: &[usize]) -> BoundaryKind {
    let name = |step: usize| plan.steps[step].operation.name();
    let (mut producers, mut consumers) = (Vec::new(), Vec::new());
    let (mut resources, mut clauses) = (Vec::new(), Vec::new());
    for &later in after {
        let mut forced: BTreeSet<(Dependence, Resource)> = BTreeSet::new();
        for &earlier in before {
            let dependences = dependences(&accesses[earlier], &accesses[later]);
            if !dependences.is_empty() {
                push_new(&mut producers, name(earlier));
                forced.extend(dependences);
            }
        }
        push_new(&mut consumers, name(later));
        let mut clause = name(later).to_string();
        for (dependence, verb) in [
            (Dependence::Reads, " reads "),
            (Dependence::Overwrites, " overwrites "),
        ] {
            let mut names = Vec::new();
            for (_, resource) in forced.iter().filter(|(kind, _)| *kind == dependence) {
                push_new(&mut names, resource_name(plan, *resource));
            }
            if !names.is_empty() {
                clause.push_str(verb);
                clause.push_str(&names.join(", "));
            }
            for name in names {
                push_new(&mut resources, name);
            }
        }
        clause.push_str(": ");
        clause.push_str(why(&plan.steps[later].operation));
        push_new(&mut clauses, clause);
    }
    BoundaryKind {
        producers,
        consumers,
        resources,
        count: 1,
        reason: clauses.join("; "),
    }
}

fn push_new<T: PartialEq>(list: &mut Vec<T>, item: T) {
    if !list.contains(&item) {
        list.push(item);
    }
}

fn dependences(earlier: &Access, later: &Access) -> Vec<(Dependence, Resource)> {
    let shared = |dependence, theirs: &[Resource], ours: &[Resource]| {
        ours.iter()
            .filter(|resource| theirs.contains(resource))
            .map(|resource| (dependence, *resource))
            .collect::<Vec<_>>()
    };
    [
        shared(Dependence::Reads, &earlier.writes, &later.reads),
        shared(Dependence::Overwrites, &earlier.writes, &later.writes),
        shared(Dependence::Overwrites, &earlier.reads, &later.writes),
    ]
    .concat()
}

fn resource_name(plan: &Plan, resource: Resource) -> &'static str {
    match resource {
        Resource::Scratch(id) => plan.spec(id).name,
        Resource::State(slot) => state_name(slot),
    }
}

/// A state slot's name, without its layer.
pub(crate) fn state_name(slot: StateSlot) -> &'static str {
    match slot {
        StateSlot::Tokens => "tokens",
        StateSlot::NextToken => "next-token",
        StateSlot::KeyCache(_) => "key-cache",
        StateSlot::ValueCache(_) => "value-cache",
        StateSlot::ConvolutionHistory(..) => "convolution-history",
        StateSlot::RecurrentState(..) => "recurrent-state",
    }
}

/// Why an operation cannot begin on a part of its operands as soon as that part is there: the part of
/// the reason that hazards do not tell.
fn why(operation: &Operation) -> &'static str {
    match operation {
        Operation::Embed { .. } => "the token chooses the row",
        Operation::RmsNorm { .. } | Operation::Projections { norm: Some(_), .. } => {
            "a norm needs its whole row before any of it can be scaled, and many work items wrote the row"
        }
        Operation::Project { .. }
        | Operation::ProjectAdd { .. }
        | Operation::Projections { norm: None, .. } => {
            "each output sums over the whole input row, which many work items wrote"
        }
        Operation::ExpertInput { .. } => "which experts are read depends on the finished choice",
        Operation::ExpertProject { .. } => {
            "each output sums over a whole input row of an expert that the finished choice names"
        }
        Operation::ExpertOutput { .. } => {
            "each output sums over the whole inner rows of its experts, which many work items wrote"
        }
        Operation::Convolve { .. } => {
            "each channel needs its inputs of all rows; a step of its own only where rows are many or \
             the plan is unfused"
        }
        Operation::DeltaPrepare { .. } => {
            "a head's length is the norm of all its columns; a step of its own only where rows are many \
             or the plan is unfused"
        }
        Operation::DeltaScan { .. } => {
            "a head's recurrence needs its whole query, key and value, row after row; a step of its own \
             only where rows are many or the plan is unfused"
        }
        Operation::DeltaStep { .. } => {
            "a head's recurrence needs its whole query, key and value, rows of the product that other \
             work items wrote"
        }
        Operation::GatedNorm { .. } => {
            "a head's norm needs all its columns; a step of its own only where rows are many or the \
             plan is unfused"
        }
        Operation::HeadNorm { .. } => {
            "a head's norm needs all its columns; a step of its own only in an unfused plan"
        }
        Operation::QueryKeyPrepare { .. } => {
            "a head's norm needs all its columns, which many work items wrote"
        }
        Operation::Attention { .. } | Operation::AttentionPartial { .. } => {
            "a query meets every key up to its own position, those of this run among them"
        }
        Operation::AttentionMerge { .. } | Operation::AttentionMergeGate { .. } => {
            "the softmax's largest score is known only once every block has been seen"
        }
        Operation::Route { .. } => "softmax and top-k need the logits of all experts",
        Operation::GroupExperts { .. } => "the offsets of an expert count the choices of all rows",
        Operation::Combine { .. } | Operation::CombineAdd { .. } => {
            "a row's sum needs the outputs of all its experts, written by work items grouped by expert"
        }
        Operation::SelectLastRow { .. } => "it copies a finished row",
        Operation::Dequantise { .. } => {
            "the order alone: all weights dequantised at once would not fit in memory"
        }
        Operation::WithDequantised { product, .. } => why(product),
        Operation::ArgMax { .. } => "the largest logit is known only once all are there",
        Operation::Sample { .. } => {
            "a share of the probabilities is known only once all logits are there"
        }
        Operation::GatedActivation { .. }
        | Operation::ResidualAdd { .. }
        | Operation::Rotate { .. }
        | Operation::CacheWrite { .. }
        | Operation::OutputGate { .. } => {
            "element by element, so nothing forces it but that the plan has it as a step of its own"
        }
    }
}
