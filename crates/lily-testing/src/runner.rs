//! A plain way to run a model: one session on any device.

use crate::fixtures::arg_max;
use lily_plan::{
    Device, Launch, ModelDescription, Outcome, Phase, Plan, PlanClass, PlanOutput, Precision,
    SessionState, route,
};
use std::sync::Arc;

/// A model on a device with one session.
pub struct Runner<D: Device> {
    /// The device.
    pub device: D,
    /// The model it holds.
    pub model: Arc<ModelDescription>,
    /// The session.
    pub session: Box<dyn SessionState>,
    /// Arithmetic of the plans.
    pub precision: Precision,
    /// Whether plans are expanded before they run.
    pub expanded: bool,
}

impl<D: Device> Runner<D> {
    /// A session of at most 4,096 positions.
    ///
    /// # Panics
    /// Here and below, if the device fails.
    pub fn new(device: D, model: Arc<ModelDescription>, precision: Precision) -> Self {
        let capacity = model.config.max_positions.min(4_096);
        let session = device.new_session(precision, capacity).expect("a session");
        Runner {
            device,
            model,
            session,
            precision,
            expanded: false,
        }
    }

    /// The plan that runs next.
    pub fn plan(&self, phase: Phase, rows: usize, output: PlanOutput) -> Arc<Plan> {
        let context = match phase {
            Phase::Prefill => self.model.config.max_positions,
            Phase::Decode => route::context_band(self.session.position() + 1),
        };
        let class = PlanClass {
            phase,
            precision: self.precision,
            rows,
            context,
            output,
        };
        let plan = Plan::record(&self.model, class);
        Arc::new(if self.expanded { plan.expanded() } else { plan })
    }

    /// Runs a plan on the session.
    pub fn run(&mut self, plan: &Arc<Plan>, tokens: &[u32]) -> Outcome {
        let launch = Launch {
            tokens,
            sessions: &mut [self.session.as_mut()],
            preset: &[],
            token_limit: u32::MAX,
            sampling: &[],
            observer: None,
        };
        self.device.execute(plan, launch).expect("the plan runs")
    }

    /// Prefills in chunks on the grid; logits of every row.
    pub fn prefill(&mut self, tokens: &[u32], chunk: usize) -> Vec<f32> {
        let mut logits = Vec::new();
        let mut done = 0;
        while done < tokens.len() {
            let end = route::chunk_end(done, tokens.len(), chunk);
            let plan = self.plan(Phase::Prefill, end - done, PlanOutput::AllLogits);
            logits.extend(self.run(&plan, &tokens[done..end]).logits);
            done = end;
        }
        logits
    }

    /// Decodes the given tokens one by one; the logits after each.
    pub fn feed(&mut self, tokens: &[u32]) -> Vec<f32> {
        let plan = self.plan(Phase::Decode, 1, PlanOutput::AllLogits);
        tokens
            .iter()
            .flat_map(|&token| self.run(&plan, &[token]).logits)
            .collect()
    }

    /// Decodes greedily, `first` and what follows, `count` tokens in all, and the logits that chose the
    /// last.
    pub fn greedy(&mut self, first: u32, count: usize) -> (Vec<u32>, Vec<f32>) {
        let plan = self.plan(Phase::Decode, 1, PlanOutput::Token);
        let mut tokens = vec![first];
        while tokens.len() + 1 < count {
            tokens.extend(self.run(&plan, &tokens[tokens.len() - 1..]).tokens);
        }
        let logits = self.feed(&tokens[tokens.len() - 1..]);
        tokens.push(arg_max(&logits));
        (tokens, logits)
    }

    /// [`greedy`](Self::greedy) with each run sent off before the token of the one before it was seen.
    pub fn greedy_ahead(&mut self, first: u32, count: usize) -> Vec<u32> {
        let plan = self.plan(Phase::Decode, 1, PlanOutput::Token);
        let ahead = self.device.run_ahead().expect("a device that runs ahead");
        let mut tokens = vec![first];
        while tokens.len() < count {
            let launch = Launch {
                tokens: &tokens[tokens.len() - 1..],
                sessions: &mut [self.session.as_mut()],
                preset: &[],
                token_limit: u32::MAX,
                sampling: &[],
                observer: None,
            };
            let chain = ahead.begin(&plan, launch, &[]).expect("a run");
            let sessions = &mut [self.session.as_mut()];
            let mut underway = 1;
            while underway > 0 {
                let goes_on = tokens.len() + underway < count;
                if goes_on && ahead.follow(&chain, sessions).expect("another") {
                    underway += 1;
                }
                tokens.extend(ahead.collect(&chain, sessions).expect("the plan runs"));
                underway -= 1;
            }
        }
        tokens
    }
}
