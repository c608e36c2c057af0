//! Chains of decode runs, each sent off before the tokens of the one before it were seen: the tokens and the states of
//! runs that wait for one another.

mod common;

use common::{device, device_with};
use lily_checkpoint::Checkpoint;
use lily_emulated::{Emulated, EmulatedOptions};
use lily_gpu::{GpuDevice, Switches};
use lily_plan::{
    Chain, Device, DeviceError, Launch, NO_TOKEN, Phase, Plan, PlanClass, PlanOutput, Precision,
    STOPPED, SamplingRow, SessionState, StateCopy, StateSlot,
};
use lily_sampling::{Sampler, SamplingParameters};
use lily_testing::Synthetic;
use serde_json::json;
use std::sync::Arc;

const VOCABULARY: u32 = 320;

fn checkpoint() -> Arc<Checkpoint> {
    Synthetic::small(json!({ "hidden_size": 128, "vocab_size": VOCABULARY })).open()
}

struct Bench {
    device: GpuDevice<Emulated>,
    sessions: Vec<Box<dyn SessionState>>,
    token_limit: u32,
}

impl Bench {
    /// Sessions that stand behind so many tokens.
    fn new(positions: &[usize]) -> Self {
        let device = device(&checkpoint(), EmulatedOptions::default());
        let mut bench = Bench {
            sessions: Vec::new(),
            device,
            token_limit: VOCABULARY,
        };
        for &position in positions {
            let mut session = bench.device.new_session(Precision::Bf16, 1_024).unwrap();
            session.seek(position).unwrap();
            bench.sessions.push(session);
        }
        bench
    }

    fn plan(&self, output: PlanOutput) -> Arc<Plan> {
        let class = PlanClass {
            phase: Phase::Decode,
            precision: Precision::Bf16,
            rows: self.sessions.len(),
            context: 4_096,
            output,
        };
        Arc::new(Plan::record(self.device.model(), class))
    }

    fn with<T>(
        &mut self,
        tokens: &[u32],
        sampling: &[SamplingRow<'_>],
        run: impl FnOnce(&mut GpuDevice<Emulated>, Launch<'_>) -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        let mut sessions: Vec<&mut dyn SessionState> = Vec::new();
        for session in &mut self.sessions {
            sessions.push(session.as_mut());
        }
        let launch = Launch {
            tokens,
            sessions: &mut sessions,
            preset: &[],
            token_limit: self.token_limit,
            sampling,
            observer: None,
        };
        run(&mut self.device, launch)
    }

    fn execute(
        &mut self,
        plan: &Arc<Plan>,
        tokens: &[u32],
        sampling: &[SamplingRow<'_>],
    ) -> Vec<u32> {
        let run =
            |device: &mut GpuDevice<Emulated>, launch: Launch<'_>| device.execute(plan, launch);
        self.with(tokens, sampling, run).unwrap().tokens
    }

    fn begin(
        &mut self,
        plan: &Arc<Plan>,
        tokens: &[u32],
        sampling: &[SamplingRow<'_>],
        stops: &[&[u32]],
    ) -> Chain {
        self.with(tokens, sampling, |device, launch| {
            device.run_ahead().unwrap().begin(plan, launch, stops)
        })
        .unwrap()
    }

    fn follow(&mut self, chain: &Chain) -> bool {
        self.with(&[], &[], |device, launch| {
            device.run_ahead().unwrap().follow(chain, launch.sessions)
        })
        .unwrap()
    }

    fn collect(&mut self, chain: &Chain) -> Vec<u32> {
        self.try_to_collect(chain).unwrap()
    }

    fn try_to_collect(&mut self, chain: &Chain) -> Result<Vec<u32>, DeviceError> {
        self.with(&[], &[], |device, launch| {
            device.run_ahead().unwrap().collect(chain, launch.sessions)
        })
    }

    /// All that a session holds.
    fn state(&self, session: usize) -> (usize, Vec<Vec<f32>>) {
        let session = &self.sessions[session];
        let slots = [
            StateSlot::ConvolutionHistory(0, StateCopy::Live),
            StateSlot::RecurrentState(0, StateCopy::Live),
            StateSlot::KeyCache(1),
            StateSlot::ValueCache(1),
        ];
        (
            session.position(),
            slots.map(|slot| session.read(slot)).to_vec(),
        )
    }
}

/// `count` tokens of one session, each run waiting for the one before, and what the session holds then.
fn one_by_one(
    position: usize,
    first: u32,
    count: usize,
    parameters: &SamplingParameters,
) -> (Vec<u32>, (usize, Vec<Vec<f32>>)) {
    let mut bench = Bench::new(&[position]);
    let plan = bench.plan(PlanOutput::Sampled);
    let mut sampler = sampler(parameters);
    let mut tokens = vec![first];
    while tokens.len() <= count {
        let token = tokens[tokens.len() - 1];
        let chosen = bench.execute(&plan, &[token], &[sampler.row(None)])[0];
        sampler.accept(chosen);
        tokens.push(chosen);
    }
    (tokens.split_off(1), bench.state(0))
}

fn sampler(parameters: &SamplingParameters) -> Sampler {
    Sampler::new(parameters.clone(), VOCABULARY, VOCABULARY, &[1, 2, 3, 2]).unwrap()
}

fn mixtures() -> Vec<SamplingParameters> {
    let warm = SamplingParameters {
        temperature: 1.0,
        seed: 5,
        ..SamplingParameters::default()
    };
    vec![
        SamplingParameters::default(),
        SamplingParameters {
            top_p: 0.9,
            top_k: Some(50),
            ..warm.clone()
        },
        // Few tokens to choose from, so that they come again: their penalties grow on the device.
        SamplingParameters {
            top_k: Some(3),
            repetition_penalty: 1.2,
            presence_penalty: 0.3,
            frequency_penalty: 0.4,
            logit_bias: (0..12).map(|token| (token, 4.0)).collect(),
            ..warm
        },
    ]
}

/// Across the end of a page of the cache: there the chain ends, and another begins.
#[test]
fn a_chain_leaves_what_single_runs_leave() {
    const COUNT: usize = 20;
    for parameters in mixtures() {
        let (expected, state) = one_by_one(246, 7, COUNT, &parameters);
        let mut bench = Bench::new(&[246]);
        let plan = bench.plan(PlanOutput::Sampled);
        let mut sampler = sampler(&parameters);
        let mut found = Vec::new();
        let mut chains = 0;
        while found.len() < COUNT {
            let token = found.last().copied().unwrap_or(7);
            let chain = bench.begin(&plan, &[token], &[sampler.row(None)], &[]);
            chains += 1;
            let mut underway = 1;
            while underway > 0 {
                if found.len() + underway < COUNT && bench.follow(&chain) {
                    underway += 1;
                    assert!(!bench.follow(&chain), "two are under way");
                }
                let token = bench.collect(&chain)[0];
                underway -= 1;
                sampler.accept(token);
                found.push(token);
            }
            assert!(bench.try_to_collect(&chain).is_err());
        }
        assert_eq!(found, expected, "{parameters:?}");
        assert_eq!(chains, 2);
        assert!(bench.state(0) == state, "{parameters:?}");
        let again = found[5..].iter().any(|token| found[..5].contains(token));
        assert!(
            again || !parameters.has_penalties(),
            "penalties of tokens that came before"
        );
    }
}

/// More tokens than a chain can add to a history by itself.
#[test]
fn a_chain_ends_where_its_history_has_no_room() {
    let parameters = &mixtures()[2];
    let mut bench = Bench::new(&[0]);
    let plan = bench.plan(PlanOutput::Sampled);
    let chain = bench.begin(&plan, &[1], &[sampler(parameters).row(None)], &[]);
    let mut runs = 1;
    while bench.follow(&chain) {
        runs += 1;
        bench.collect(&chain);
    }
    assert_eq!(runs, 64);
    let (expected, _) = one_by_one(0, 1, 64, parameters);
    assert_eq!(bench.collect(&chain)[0], expected[63]);
}

#[test]
fn a_mask_is_good_for_one_run() {
    let mut bench = Bench::new(&[0]);
    let plan = bench.plan(PlanOutput::Sampled);
    let sampler = sampler(&mixtures()[1]);
    let mut allowed = vec![0; VOCABULARY.div_ceil(32) as usize];
    allowed[1] = 1 << 9;
    let chain = bench.begin(&plan, &[1], &[sampler.row(Some(&allowed))], &[]);
    assert!(!bench.follow(&chain));
    assert_eq!(bench.collect(&chain), [41]);
}

/// One row's text ends, the others go on; a run behind the end changes nothing, and can be followed.
#[test]
fn a_stop_holds_one_session_and_no_other() {
    let positions = [0, 9, 40, 100];
    let first = [3, 4, 5, 6];
    let mut bench = Bench::new(&positions);
    let plan = bench.plan(PlanOutput::Token);
    let mut rounds = vec![first.to_vec()];
    let mut states = vec![[0, 1, 2, 3].map(|row| bench.state(row))];
    for round in 0..5 {
        let chosen = bench.execute(&plan, &rounds[round], &[]);
        rounds.push(chosen);
        states.push([0, 1, 2, 3].map(|row| bench.state(row)));
    }

    let mut bench = Bench::new(&positions);
    let stops = [rounds[2][1]];
    assert!(rounds[1][1] != stops[0], "the second step chooses it first");
    // Beyond what the device knows there may be more.
    let many: Vec<u32> = (1_000..1_030).chain([rounds[1][0]]).collect();
    let chain = bench.begin(&plan, &first, &[], &[&many, &stops, &[]]);
    for (round, expected) in rounds.iter().enumerate().skip(1) {
        let follows = round < 5 && bench.follow(&chain);
        assert_eq!(follows, round < 5);
        let mut expected = expected.clone();
        if round > 2 {
            expected[1] = STOPPED;
        }
        assert_eq!(bench.collect(&chain), expected);
    }
    let behind = |runs: usize, row: usize| &states[runs][row];
    for row in 0..positions.len() {
        let runs = if row == 1 { 2 } else { 5 };
        assert!(&bench.state(row) == behind(runs, row), "row {row}");
        // The step that came to the stop can still be taken back.
        assert!(bench.sessions[row].step_back());
        assert!(&bench.state(row) == behind(runs - 1, row), "row {row}");
        assert!(!bench.sessions[row].step_back());
    }
}

#[test]
fn nothing_follows_where_nothing_can_be_chosen() {
    let mut bench = Bench::new(&[30]);
    bench.token_limit = 0;
    let before = bench.state(0);
    for output in [PlanOutput::Token, PlanOutput::Sampled] {
        let plan = bench.plan(output);
        let chain = bench.begin(&plan, &[8], &[], &[]);
        assert!(bench.follow(&chain));
        assert_eq!(bench.collect(&chain), [NO_TOKEN]);
        assert!(bench.follow(&chain));
        assert_eq!(bench.collect(&chain), [STOPPED]);
        assert_eq!(bench.collect(&chain), [STOPPED]);
        assert!(bench.sessions[0].step_back());
        assert!(bench.state(0) == before);
    }
}

/// What the host stops, it finds as the run before left it.
#[test]
fn a_run_that_is_not_wanted_is_taken_back() {
    let (expected, state) = one_by_one(5, 7, 2, &SamplingParameters::default());
    let mut bench = Bench::new(&[5]);
    let plan = bench.plan(PlanOutput::Token);
    let chain = bench.begin(&plan, &[7], &[], &[]);
    for expected in &expected {
        assert!(bench.follow(&chain));
        assert_eq!(bench.collect(&chain), [*expected]);
        assert!(!bench.sessions[0].step_back(), "another run is under way");
    }
    bench.collect(&chain);
    assert!(bench.sessions[0].step_back());
    assert!(bench.state(0) == state);
}

/// Other work goes behind the runs under way, and their tokens stay to be collected.
#[test]
fn chains_and_single_runs_take_turns() {
    let greedy = SamplingParameters::default();
    let (expected, state) = one_by_one(5, 7, 3, &greedy);
    let (others, other_state) = one_by_one(60, 11, 3, &greedy);
    let mut bench = Bench::new(&[5]);
    let mut other = Bench::new(&[]);
    let plan = bench.plan(PlanOutput::Token);
    let mut session = bench.device.new_session(Precision::Bf16, 1_024).unwrap();
    session.seek(60).unwrap();
    other.sessions.push(session);

    let chain = bench.begin(&plan, &[7], &[], &[]);
    assert!(bench.follow(&chain));
    // The other session on the same device.
    std::mem::swap(&mut bench.sessions, &mut other.sessions);
    let behind = bench.begin(&plan, &[11], &[], &[]);
    assert!(bench.follow(&behind));
    std::mem::swap(&mut bench.sessions, &mut other.sessions);
    assert!(!bench.follow(&chain), "it is not the one that runs");
    assert_eq!(bench.collect(&chain), [expected[0]]);
    assert_eq!(bench.collect(&chain), [expected[1]]);
    assert!(bench.try_to_collect(&chain).is_err());
    assert_eq!(bench.execute(&plan, &[expected[1]], &[]), [expected[2]]);
    assert!(bench.state(0) == state);
    std::mem::swap(&mut bench.sessions, &mut other.sessions);
    assert_eq!(bench.collect(&behind), [others[0]]);
    assert_eq!(bench.collect(&behind), [others[1]]);
    assert_eq!(bench.execute(&plan, &[others[1]], &[]), [others[2]]);
    assert!(bench.state(0) == other_state);
}

/// Runs that nobody collects: their session is emptied, or goes, and so may the whole device.
#[test]
fn chains_may_be_left_alone() {
    let (expected, _) = one_by_one(0, 7, 1, &SamplingParameters::default());
    let mut bench = Bench::new(&[0]);
    let plan = bench.plan(PlanOutput::Token);
    let chain = bench.begin(&plan, &[9], &[], &[]);
    assert!(bench.follow(&chain));
    bench.sessions[0].reset();
    drop(chain);
    assert_eq!(bench.execute(&plan, &[7], &[]), expected);
    let chain = bench.begin(&plan, &[9], &[], &[]);
    bench.sessions[0] = bench.device.new_session(Precision::Bf16, 64).unwrap();
    drop(chain);
    assert_eq!(bench.execute(&plan, &[7], &[]), expected);
    let _chain = bench.begin(&plan, &[9], &[], &[]);
}

/// A run that nobody collects is as if taken back, whether its chain is dropped or a session goes on otherwise.
#[test]
fn what_is_not_collected_has_not_been() {
    let greedy = SamplingParameters::default();
    let (expected, state) = one_by_one(5, 7, 3, &greedy);
    for is_dropped in [true, false] {
        let mut bench = Bench::new(&[5, 60]);
        let plan = bench.plan(PlanOutput::Token);
        let chain = bench.begin(&plan, &[7, 11], &[], &[]);
        assert!(bench.follow(&chain));
        assert_eq!(bench.collect(&chain)[0], expected[0]);
        let kept = (!is_dropped).then_some(chain);
        // The other session goes, with the run under way.
        bench.sessions.pop();
        assert!(!bench.sessions[0].step_back(), "nothing before is known");
        let plan = bench.plan(PlanOutput::Token);
        for step in 0..2 {
            let found = bench.execute(&plan, &[expected[step]], &[]);
            assert_eq!(found, [expected[step + 1]]);
        }
        assert!(bench.state(0) == state);
        drop(kept);
    }
}

#[test]
fn what_makes_no_chain_is_refused_by_name() {
    let mut bench = Bench::new(&[0]);
    for output in [PlanOutput::AllLogits, PlanOutput::State] {
        let plan = bench.plan(output);
        let run = |device: &mut GpuDevice<Emulated>, launch: Launch<'_>| {
            device.run_ahead().unwrap().begin(&plan, launch, &[])
        };
        let error = bench.with(&[1], &[], run).unwrap_err().to_string();
        assert!(error.contains("choose tokens"), "{error}");
    }
    let plan = bench.plan(PlanOutput::Token);
    let chain = bench.begin(&plan, &[1], &[], &[]);
    let session = bench.device.new_session(Precision::Bf16, 64).unwrap();
    bench.sessions.push(session);
    assert!(!bench.follow(&chain));
    let error = bench.try_to_collect(&chain).unwrap_err().to_string();
    assert!(error.contains("2 sessions for a chain of 1"), "{error}");
    for (name, reason) in [
        ("run-ahead", "switched off"),
        ("resident-routing", "experts"),
    ] {
        let mut switches = Switches::default();
        assert!(switches.turn_off(name));
        let mut device = device_with(&checkpoint(), EmulatedOptions::default(), switches);
        let found = device.run_ahead().err().unwrap();
        assert!(found.contains(reason), "{found}");
    }
}
