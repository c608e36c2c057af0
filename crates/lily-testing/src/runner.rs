//! A plain way to run a model: one session on any device.

use crate::fixtures::arg_max;
use lily_plan::{
    Device, Launch, ModelDescription, Outcome, Phase, Plan, PlanClass, PlanOutput, Precision,
    SamplingRow, SessionState, StateCopy, StateSlot, route,
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

    /// Checks that the session goes back to where a snapshot was taken, over a page of the cache, and that another
    /// goes on from there with what it copies.
    pub fn check_snapshots(&mut self) {
        let vocabulary = self.model.config.vocab_size as u32;
        let prompt: Vec<u32> = (0..270).map(|i| i * 37 % vocabulary).collect();
        self.session.reset();
        self.prefill(&prompt, 64);
        let kept = self.session.snapshot().expect("room for a snapshot");
        assert_eq!(kept.position(), 270);
        let bytes = self.device.session_bytes(self.precision);
        assert!(kept.bytes() > 0 && kept.bytes() <= bytes.fixed / 2);
        let expected = self.feed(&[11, 12, 13]);
        self.prefill_more(&prompt[..100]);
        // More than one run back, and twice.
        for _ in 0..2 {
            self.session
                .restore(kept.as_ref())
                .expect("its own snapshot");
            assert_eq!(self.session.position(), 270);
            assert!(!self.session.step_back(), "nothing before is known");
            assert!(self.feed(&[11, 12, 13]) == expected);
        }
        // A longer session, which stood elsewhere, and this one behind it, which is as it was.
        let new = |capacity| {
            self.device
                .new_session(self.precision, capacity)
                .expect("a session")
        };
        let (mut other, mut short) = (new(1_000), new(269));
        std::mem::swap(&mut self.session, &mut other);
        self.prefill(&prompt[..7], 64);
        self.session
            .copy_cache(other.as_mut(), 270)
            .expect("a copy");
        self.session
            .restore(kept.as_ref())
            .expect("its cache is there");
        assert!(self.feed(&[11, 12, 13]) == expected);
        std::mem::swap(&mut self.session, &mut other);
        assert_eq!(self.session.position(), 273);
        self.session
            .restore(kept.as_ref())
            .expect("its own snapshot");
        assert!(self.feed(&[11, 12, 13]) == expected);
        // What does not fit is refused, and leaves all as it was.
        assert!(
            other.copy_cache(self.session.as_mut(), 274).is_err(),
            "it has 273"
        );
        assert!(short.copy_cache(self.session.as_mut(), 270).is_err());
        assert!(short.restore(kept.as_ref()).is_err());
        assert_eq!((short.position(), other.position()), (0, 273));
        let unlike = match self.precision {
            Precision::F32 => Precision::Bf16,
            Precision::Bf16 => Precision::F32,
        };
        let mut unlike = self.device.new_session(unlike, 400).expect("a session");
        assert!(unlike.copy_cache(self.session.as_mut(), 10).is_err());
    }

    /// Checks that decode of so many sessions together (of eight in all), each at a position of its own, leaves of each
    /// what it leaves alone, bit for bit: logits, tokens, states. Greedy rows are among those that a plan samples for.
    pub fn check_rows(&mut self, counts: &[usize]) {
        let alone = self.decode_rows(1);
        for &together in counts {
            let found = self.decode_rows(together);
            for (row, (found, expected)) in found.iter().zip(&alone).enumerate() {
                let precision = self.precision;
                assert!(
                    found == expected,
                    "{precision}: session {row} is not among {together} what it is alone"
                );
            }
        }
    }

    /// Decode steps of eight sessions, `together` of them in a plan: the bits that are left of each.
    fn decode_rows(&mut self, together: usize) -> Vec<Vec<u32>> {
        const COUNT: usize = 8;
        let vocabulary = self.model.config.vocab_size as u32;
        let mut sessions = Vec::new();
        for row in 0..COUNT as u32 {
            let session = self.device.new_session(self.precision, 400);
            let mut session = session.expect("a session");
            std::mem::swap(&mut self.session, &mut session);
            // 1, 4, 13 and so on, up to 148: two blocks of attention.
            let prompt: Vec<u32> = (0..1 + 3 * row * row)
                .map(|i| (i * 37 + row * 11) % vocabulary)
                .collect();
            self.prefill_more(&prompt);
            std::mem::swap(&mut self.session, &mut session);
            sessions.push(session);
        }
        let greedy = SamplingRow::default();
        let mut warm = greedy.parameters.clone();
        warm.temperature = 1.0;
        let outputs = [
            PlanOutput::AllLogits,
            PlanOutput::Token,
            PlanOutput::Sampled,
        ];
        let mut left = vec![Vec::new(); COUNT];
        for (step, output) in outputs.into_iter().enumerate() {
            let plan = self.plan(Phase::Decode, together, output);
            let tokens: Vec<u32> = (0..COUNT)
                .map(|row| (step * 7 + row * 13) as u32 % vocabulary)
                .collect();
            // Every third row is greedy; of the others each has numbers of its own.
            let sampling: Vec<SamplingRow<'_>> = (0..COUNT)
                .map(|row| SamplingRow {
                    parameters: if row % 3 == 0 {
                        greedy.parameters
                    } else {
                        &warm
                    },
                    step: row as u64,
                    ..greedy
                })
                .collect();
            for first in (0..COUNT).step_by(together) {
                let rows = first..first + together;
                let mut states: Vec<&mut dyn SessionState> = Vec::new();
                for session in &mut sessions[rows.clone()] {
                    states.push(session.as_mut());
                }
                let launch = Launch {
                    tokens: &tokens[rows.clone()],
                    sessions: &mut states,
                    preset: &[],
                    token_limit: u32::MAX,
                    sampling: &sampling[rows.clone()],
                    observer: None,
                };
                let outcome = self.device.execute(&plan, launch).expect("the plan runs");
                let each = outcome.logits.len() / together;
                for (index, row) in rows.enumerate() {
                    let logits = &outcome.logits[index * each..][..each];
                    left[row].extend(logits.iter().map(|logit| logit.to_bits()));
                    left[row].extend(outcome.tokens.get(index));
                }
            }
        }
        for (left, session) in left.iter_mut().zip(&sessions) {
            for layer in 0..self.model.config.layers as u16 {
                for slot in [
                    StateSlot::RecurrentState(layer, StateCopy::Live),
                    StateSlot::ConvolutionHistory(layer, StateCopy::Live),
                    StateSlot::KeyCache(layer),
                    StateSlot::ValueCache(layer),
                ] {
                    let values = session.read(slot);
                    left.extend(values.into_iter().map(f32::to_bits));
                }
            }
        }
        left
    }

    /// Goes on with a prompt.
    fn prefill_more(&mut self, tokens: &[u32]) {
        let plan = self.plan(Phase::Prefill, tokens.len(), PlanOutput::State);
        self.run(&plan, tokens);
    }
}
