//! Building plans step by step: what recording uses, and what tests and tools make small plans with.

use crate::expand::ScratchTable;
use crate::model::ModelDescription;
use crate::operand::{ElementType, ScratchId};
use crate::operation::Operation;
use crate::plan::{Plan, PlanClass, Step};
use std::sync::Arc;

/// A plan under construction.
#[derive(Clone, Debug)]
pub struct PlanBuilder {
    /// The model whose weights the steps name.
    pub model: Arc<ModelDescription>,
    /// What the plan is for.
    pub class: PlanClass,
    pub(crate) scratch: ScratchTable,
    pub(crate) steps: Vec<Step>,
}

impl PlanBuilder {
    /// An empty plan.
    pub fn new(model: &Arc<ModelDescription>, class: PlanClass) -> Self {
        let (scratch, steps) = (ScratchTable::default(), Vec::new());
        PlanBuilder {
            model: model.clone(),
            class,
            scratch,
            steps,
        }
    }

    /// The layer that the values and steps added from here on belong to.
    pub fn set_layer(&mut self, layer: Option<usize>) {
        self.scratch.layer = layer.map(|layer| layer as u16);
    }

    /// Adds a scratch value of [rows, columns].
    pub fn scratch(
        &mut self,
        name: &'static str,
        rows: usize,
        columns: usize,
        element: ElementType,
    ) -> ScratchId {
        self.scratch.add(name, rows, columns, element)
    }

    /// Adds a step.
    pub fn push(&mut self, operation: Operation) {
        self.steps.push(Step {
            operation,
            layer: self.scratch.layer,
        });
    }

    /// The plan. `logits` and `kept` are what the caller reads when it has run; steps that contribute to
    /// none of them and to no state are dropped.
    pub fn finish(self, logits: Option<ScratchId>, kept: Vec<ScratchId>) -> Plan {
        Plan::finish(
            self.class,
            self.model,
            self.steps,
            self.scratch,
            logits,
            kept,
        )
    }
}
