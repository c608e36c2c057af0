//! Plans by class: recorded once, replayed.

use crate::options::PlanTransform;
use lily_plan::{Device, ModelDescription, Plan, PlanClass};
use std::collections::VecDeque;
use std::sync::Arc;

/// Records a plan as it will run.
pub(crate) fn record(
    device: &dyn Device,
    model: &Arc<ModelDescription>,
    class: PlanClass,
    transform: Option<&PlanTransform>,
) -> Plan {
    let plan = Plan::record(model, class);
    device.suit(match transform {
        Some(transform) => transform(plan),
        None => plan,
    })
}

/// The plans used lately. Decode and whole chunks keep theirs; the many lengths a last chunk can have
/// pass through.
pub(crate) struct PlanCache {
    model: Arc<ModelDescription>,
    transform: Option<PlanTransform>,
    plans: VecDeque<Arc<Plan>>,
}

impl PlanCache {
    const ENTRIES: usize = 16;

    pub fn new(model: Arc<ModelDescription>, transform: Option<PlanTransform>) -> Self {
        PlanCache {
            model,
            transform,
            plans: VecDeque::new(),
        }
    }

    pub fn get(&mut self, device: &dyn Device, class: PlanClass) -> Arc<Plan> {
        let known = self.plans.iter().position(|plan| plan.class == class);
        let plan = match known.and_then(|index| self.plans.remove(index)) {
            Some(plan) => plan,
            None => Arc::new(record(device, &self.model, class, self.transform.as_ref())),
        };
        self.plans.push_front(plan.clone());
        self.plans.truncate(Self::ENTRIES);
        plan
    }
}
