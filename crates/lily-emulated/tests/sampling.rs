//! The sampling kernel on the emulated device against the host's sampler: the same token, or a random number within
//! 1e-5 of the boundary between the two.

mod common;

use common::device;
use lily_checkpoint::Checkpoint;
use lily_emulated::{Emulated, EmulatedOptions};
use lily_gpu::kernels::{Constant, ConstantValue, SOURCES};
use lily_gpu::{GpuDevice, GpuOptions};
use lily_msl::{BuildKind, Schedule, Sources, removable_barriers};
use lily_plan::{
    Device, DeviceError, ElementType, Launch, NO_TOKEN, Operation, Phase, Plan, PlanBuilder,
    PlanClass, PlanOutput, Precision, SamplingRow, SessionState,
};
use lily_sampling::{Sampler, SamplingParameters, uniform};
use lily_testing::Synthetic;
use serde_json::json;
use std::sync::Arc;

fn checkpoint() -> Arc<Checkpoint> {
    Synthetic::small(json!({ "hidden_size": 128, "vocab_size": 320 })).open()
}

/// A device, and plans of nothing but sampling for it.
struct Bench {
    device: GpuDevice<Emulated>,
    sessions: Vec<Box<dyn SessionState>>,
    plans: Vec<(usize, usize, Arc<Plan>, lily_plan::ScratchId)>,
}

impl Bench {
    fn new(options: EmulatedOptions) -> Self {
        Self::on(device(&checkpoint(), options))
    }

    fn on(device: GpuDevice<Emulated>) -> Self {
        let sessions = (0..8)
            .map(|_| device.new_session(Precision::F32, 16).unwrap())
            .collect();
        Bench {
            device,
            sessions,
            plans: Vec::new(),
        }
    }

    fn plan(&mut self, rows: usize, columns: usize) -> (Arc<Plan>, lily_plan::ScratchId) {
        let known = self
            .plans
            .iter()
            .find(|plan| (plan.0, plan.1) == (rows, columns));
        if let Some((_, _, plan, logits)) = known {
            return (plan.clone(), *logits);
        }
        let class = PlanClass {
            phase: Phase::Decode,
            precision: Precision::F32,
            rows,
            context: 4_096,
            output: PlanOutput::Sampled,
        };
        let mut builder = PlanBuilder::new(self.device.model(), class);
        let logits = builder.scratch("logits", rows, columns, ElementType::F32);
        let adjusted = builder.scratch("adjusted", rows, columns, ElementType::F32);
        builder.push(Operation::Sample { logits, adjusted });
        let plan = Arc::new(builder.finish(None, Vec::new()));
        self.plans.push((rows, columns, plan.clone(), logits));
        (plan, logits)
    }

    /// The tokens chosen from rows of logits.
    fn choose(&mut self, rows: &[&[f32]], limit: u32, sampling: &[SamplingRow<'_>]) -> Vec<u32> {
        self.try_to_choose(rows, limit, sampling).unwrap()
    }

    fn try_to_choose(
        &mut self,
        rows: &[&[f32]],
        limit: u32,
        sampling: &[SamplingRow<'_>],
    ) -> Result<Vec<u32>, DeviceError> {
        let (plan, logits) = self.plan(rows.len(), rows[0].len());
        let mut borrowed: Vec<&mut dyn SessionState> = Vec::new();
        for session in &mut self.sessions[..rows.len()] {
            borrowed.push(session.as_mut());
        }
        let launch = Launch {
            tokens: &vec![0; rows.len()],
            sessions: &mut borrowed,
            preset: &[(logits, rows.concat())],
            token_limit: limit,
            sampling,
            observer: None,
        };
        let outcome = self.device.execute(&plan, launch)?;
        for session in &mut self.sessions[..rows.len()] {
            assert!(session.step_back());
        }
        Ok(outcome.tokens)
    }
}

/// How many draws were compared, and how many differed because the random number lay on a boundary.
#[derive(Debug, Default)]
struct Tally {
    drawn: usize,
    on_a_boundary: usize,
}

impl Tally {
    /// Holds a chosen token to what the sampler chooses.
    #[track_caller]
    fn compare(
        &mut self,
        sampler: &mut Sampler,
        logits: &[f32],
        allowed: Option<&[u32]>,
        found: u32,
    ) {
        self.drawn += 1;
        let expected = match sampler.sample(logits, allowed) {
            Ok(sampled) => sampled.token,
            Err(_) => NO_TOKEN,
        };
        if found == expected {
            return;
        }
        let parameters = sampler.parameters().clone();
        let u = uniform(parameters.seed, sampler.step());
        // Between the sums before and behind its own weight a token is chosen.
        let mut sum = 0.0;
        let mut nearest = f64::INFINITY;
        for (token, probability) in sampler.distribution(logits, allowed).unwrap() {
            let part = sum..sum + probability;
            sum = part.end;
            if token == found {
                nearest = (part.start - u).abs().min((part.end - u).abs());
            }
        }
        assert!(
            nearest < 1e-5,
            "token {found} instead of {expected}, {nearest} from it, at step {} of {parameters:?}",
            sampler.step()
        );
        self.on_a_boundary += 1;
    }
}

/// Logits about 20 wide, most of them low, from a grid where `grid` says so: then equal ones are common.
fn noise(count: usize, seed: u64, grid: Option<f32>) -> Vec<f32> {
    (0..count as u64)
        .map(|at| {
            let value = (uniform(seed, at).powi(3) * 20.0 - 8.0) as f32;
            grid.map_or(value, |grid| (value / grid).floor() * grid)
        })
        .collect()
}

fn warm() -> SamplingParameters {
    SamplingParameters {
        temperature: 1.0,
        ..SamplingParameters::default()
    }
}

/// Every filter alone and with others.
fn mixtures() -> Vec<SamplingParameters> {
    let with = |change: &dyn Fn(&mut SamplingParameters)| {
        let mut parameters = warm();
        change(&mut parameters);
        parameters
    };
    vec![
        SamplingParameters::default(),
        warm(),
        with(&|p| p.temperature = 0.3),
        with(&|p| p.temperature = 3.0),
        with(&|p| p.top_k = Some(1)),
        with(&|p| p.top_k = Some(20)),
        with(&|p| p.top_k = Some(600)),
        with(&|p| p.top_p = 0.95),
        with(&|p| p.top_p = 0.3),
        with(&|p| p.top_p = 1e-30),
        with(&|p| p.min_p = 0.05),
        with(&|p| (p.top_k, p.top_p) = (Some(20), 0.95)),
        with(&|p| (p.top_k, p.top_p, p.min_p) = (Some(40), 0.9, 0.02)),
        with(&|p| (p.temperature, p.top_p) = (5.0, 0.999)),
        with(&|p| {
            (p.temperature, p.top_k, p.top_p) = (0.6, Some(20), 0.95);
            (
                p.repetition_penalty,
                p.presence_penalty,
                p.frequency_penalty,
            ) = (1.3, 0.7, 0.4);
        }),
        with(&|p| {
            p.logit_bias = vec![(0, 5.0), (7, -100.0), (64, 100.0), (300, 3.5)];
            (p.top_p, p.repetition_penalty) = (0.9, 0.8);
        }),
    ]
}

/// Samplers for the mixtures, each with a seed of its own.
fn samplers(vocabulary: usize, limit: u32, prompt: &[u32]) -> Vec<Sampler> {
    let mixtures = mixtures().into_iter().enumerate();
    mixtures
        .map(|(index, parameters)| {
            let parameters = SamplingParameters {
                seed: 0x1234_5678_9abc_def0 + index as u64,
                ..parameters
            };
            Sampler::new(parameters, vocabulary as u32, limit, prompt).unwrap()
        })
        .collect()
}

/// Draws with every mixture, eight rows at a time, and accepts what was drawn.
fn draw_with_all(bench: &mut Bench, vocabulary: usize, rounds: usize, tally: &mut Tally) {
    let limit = vocabulary as u32 - 3;
    let mut samplers = samplers(vocabulary, limit, &[1, 2, 3, 64]);
    for round in 0..rounds {
        let grid = [None, Some(0.25)][round % 2];
        for (group, samplers) in samplers.chunks_mut(8).enumerate() {
            let rows: Vec<Vec<f32>> = (0..samplers.len())
                .map(|row| noise(vocabulary, (round * 100 + group * 10 + row) as u64, grid))
                .collect();
            let borrowed: Vec<&[f32]> = rows.iter().map(Vec::as_slice).collect();
            let sampling: Vec<SamplingRow<'_>> =
                samplers.iter().map(|sampler| sampler.row(None)).collect();
            let chosen = bench.choose(&borrowed, limit, &sampling);
            for ((sampler, logits), found) in samplers.iter_mut().zip(&rows).zip(chosen) {
                tally.compare(sampler, logits, None, found);
                sampler.accept(found);
            }
        }
    }
}

#[test]
fn tokens_are_those_of_the_sampler() {
    let mut bench = Bench::new(EmulatedOptions::default());
    let mut tally = Tally::default();
    draw_with_all(&mut bench, 320, 20, &mut tally);
    draw_with_all(&mut bench, 4_096, 10, &mut tally);
    println!("{tally:?}");
    assert_eq!(tally.drawn, 480);
    assert!(tally.on_a_boundary <= 1, "{tally:?}");
}

/// The vocabulary of the real model, where lists are short, and where they do not suffice.
#[test]
fn tokens_of_a_large_vocabulary_are_those_of_the_sampler() {
    let mut bench = Bench::new(EmulatedOptions::default());
    let mut tally = Tally::default();
    draw_with_all(&mut bench, 248_320, 2, &mut tally);
    println!("{tally:?}");
    assert!(tally.on_a_boundary <= 1, "{tally:?}");
}

/// Equal logits by the thousand, more than the list of good tokens holds; then ids alone decide.
#[test]
fn among_equal_logits_the_lower_ids_are_kept() {
    let mut bench = Bench::new(EmulatedOptions::default());
    let mut tally = Tally::default();
    // 2,048 is as many as the list holds.
    for vocabulary in [300, 2_048, 5_000] {
        let mut logits = vec![1.5; vocabulary];
        logits[..vocabulary / 3].fill(-2.0);
        logits[vocabulary / 2..vocabulary / 2 + 9].fill(2.5);
        for (top_k, top_p, min_p) in [
            (None, 1.0, 0.0),
            (Some(1), 1.0, 0.0),
            (Some(9), 1.0, 0.0),
            (Some(10), 1.0, 0.0),
            (Some(37), 0.7, 0.0),
            // All that top-k left of the equal ones, and no other.
            (Some(12), 1.0 - f32::EPSILON / 2.0, 0.0),
            (Some(vocabulary as u32 - 1), 1.0, 0.0),
            (Some(1_000_000), 0.99, 0.0),
            (None, 0.01, 0.0),
            (None, 0.5, 0.3),
            (None, 1.0, 0.3),
            (None, 1.0, 0.5),
            (None, 0.999, 0.0),
        ] {
            let parameters = SamplingParameters {
                top_k,
                top_p,
                min_p,
                seed: 77,
                ..warm()
            };
            let size = vocabulary as u32;
            let mut sampler = Sampler::new(parameters, size, size, &[]).unwrap();
            for _ in 0..12 {
                let found = bench.choose(&[&logits], size, &[sampler.row(None)])[0];
                tally.compare(&mut sampler, &logits, None, found);
                sampler.accept(found);
            }
        }
    }
    println!("{tally:?}");
    assert!(tally.on_a_boundary <= 1, "{tally:?}");
}

/// Two tokens, and logits such that the boundary between them is as close to the random number as logits can put it.
/// Here the device is held to 2e-9: weights in f32 would be wrong.
#[test]
fn draws_are_right_to_a_few_billionths() {
    let mut bench = Bench::new(EmulatedOptions::default());
    let (mut drawn, mut left_out) = (0, 0);
    for temperature in [1.0_f32, 0.7, 3.3] {
        let parameters = SamplingParameters {
            temperature,
            seed: 99,
            ..warm()
        };
        for step in 0..40 {
            let u = uniform(99, step);
            let difference = f64::from(temperature) * (u / (1.0 - u)).ln();
            for units in [-3_i32, -1, 0, 1, 3] {
                let first = difference as f32;
                let first = f32::from_bits(first.to_bits().wrapping_add_signed(units));
                let mut logits = vec![f32::NEG_INFINITY; 320];
                (logits[10], logits[20]) = (first, 0.0);
                let row = SamplingRow {
                    parameters: &parameters,
                    step,
                    ..SamplingRow::default()
                };
                let found = bench.choose(&[&logits], 320, &[row])[0];
                let share = 1.0 / (1.0 + (-f64::from(first) / f64::from(temperature)).exp());
                if (share - u).abs() < 2e-9 {
                    left_out += 1;
                    continue;
                }
                drawn += 1;
                let expected = if share > u { 10 } else { 20 };
                assert_eq!(found, expected, "{share} {u}");
            }
        }
    }
    println!("{drawn} draws, {left_out} closer than 2e-9");
    assert!(drawn > 300);
}

/// Parameters as far as they go, logits of every size, zeros of both signs.
#[test]
fn extremes_are_those_of_the_sampler() {
    let mut bench = Bench::new(EmulatedOptions::default());
    let mut tally = Tally::default();
    let size = 320;
    let shapes: [Box<dyn Fn(usize) -> f32>; 6] = [
        Box::new(|at| if at % 3 == 0 { -0.0 } else { 0.0 }),
        Box::new(|at| if at % 2 == 0 { 3e38 } else { -3e38 }),
        Box::new(|at| if at == 200 { -1e30 } else { f32::NEG_INFINITY }),
        Box::new(|at| 1e-3 * at as f32),
        Box::new(|at| 1e6 + at as f32),
        Box::new(|at| -80.0 * (at % 7) as f32),
    ];
    for shape in shapes {
        let logits: Vec<f32> = (0..size).map(shape).collect();
        for temperature in [1e-38, 1e-6, 1.0, 100.0] {
            for (repetition_penalty, presence_penalty) in [(1.0, 0.0), (1e30, 2.0), (1e-30, -2.0)] {
                for top_p in [1.0, 0.9, f32::MIN_POSITIVE, 1.0 - f32::EPSILON / 2.0] {
                    let parameters = SamplingParameters {
                        temperature,
                        repetition_penalty,
                        presence_penalty,
                        top_p,
                        top_k: match top_p {
                            1.0 => Some(7),
                            0.9 => Some(u32::MAX),
                            _ => None,
                        },
                        min_p: if top_p == 1.0 { 1e-30 } else { 0.0 },
                        logit_bias: vec![(5, 100.0)],
                        seed: u64::MAX,
                        ..warm()
                    };
                    let prompt = [5, 6, 200, 201];
                    let mut sampler = Sampler::new(parameters, 320, 320, &prompt).unwrap();
                    sampler.accept(6);
                    let found = bench.choose(&[&logits], 320, &[sampler.row(None)])[0];
                    tally.compare(&mut sampler, &logits, None, found);
                }
            }
        }
    }
    println!("{tally:?}");
    assert!(tally.on_a_boundary <= 1, "{tally:?}");
}

#[test]
fn masks_are_those_of_the_sampler() {
    let mut bench = Bench::new(EmulatedOptions::default());
    let mut tally = Tally::default();
    let vocabulary = 4_000_usize;
    for (mut sampler, seed) in samplers(vocabulary, 3_999, &[1, 2, 64])
        .into_iter()
        .zip(0..)
    {
        let logits = noise(vocabulary, seed, Some(0.125));
        let one = 1 + (uniform(seed, 1 << 40) * 3_000.0) as usize;
        let masks: [Vec<u32>; 4] = [
            (0..125).map(|word| 0x9249_2492 << (word % 3)).collect(),
            (0..125)
                .map(|word| if word == one / 32 { 1 << (one % 32) } else { 0 })
                .collect(),
            vec![0; 125],
            vec![u32::MAX; 125],
        ];
        for mask in &masks {
            let row = sampler.row(Some(mask));
            let found = bench.choose(&[&logits], 3_999, &[row])[0];
            tally.compare(&mut sampler, &logits, Some(mask), found);
        }
    }
    println!("{tally:?}");
    assert!(tally.on_a_boundary <= 1, "{tally:?}");
}

#[test]
fn what_the_sampler_refuses_has_no_token() {
    let mut bench = Bench::new(EmulatedOptions::default());
    let good = noise(320, 1, None);
    for parameters in mixtures() {
        let row = SamplingRow {
            parameters: &parameters,
            ..SamplingRow::default()
        };
        for broken in [f32::NAN, -f32::NAN, f32::INFINITY] {
            let mut logits = good.clone();
            logits[317] = broken;
            let rows = [&logits[..], &good[..]];
            let chosen = bench.choose(&rows, 320, &[row, row]);
            assert_eq!(chosen[0], NO_TOKEN, "{broken}");
            assert_ne!(chosen[1], NO_TOKEN, "{broken}");
            // Behind the limit it is nobody's.
            assert_ne!(bench.choose(&[&logits], 317, &[row])[0], NO_TOKEN);
        }
        assert_eq!(
            bench.choose(&[&[f32::NEG_INFINITY; 320]], 320, &[row])[0],
            NO_TOKEN
        );
        assert_eq!(bench.choose(&[&good], 0, &[row])[0], NO_TOKEN);
    }
}

/// Rows do not depend on those beside them, nor on the order in which threads run.
#[test]
fn a_row_has_its_token_alone_together_and_in_any_order_of_threads() {
    let rows: Vec<Vec<f32>> = (0..8).map(|seed| noise(3_000, seed, Some(0.5))).collect();
    let borrowed: Vec<&[f32]> = rows.iter().map(Vec::as_slice).collect();
    let all = mixtures();
    let row = |index: usize, step| SamplingRow {
        parameters: &all[index],
        step,
        history: &[(3, 0), (9, 4), (300, 1)],
        allowed: None,
    };
    let mut expected: Option<Vec<u32>> = None;
    for schedule in [
        Schedule::ProgramOrder,
        Schedule::Shuffled(1),
        Schedule::Shuffled(2),
    ] {
        let mut bench = Bench::new(EmulatedOptions {
            schedule,
            ..EmulatedOptions::default()
        });
        let mut chosen = Vec::new();
        for step in 0..6 {
            for first in [0, 8] {
                let sampling: Vec<_> = (first..first + 8).map(|index| row(index, step)).collect();
                let together = bench.choose(&borrowed, 3_000, &sampling);
                for (index, logits) in borrowed.iter().enumerate() {
                    let alone = bench.choose(&[logits], 3_000, &sampling[index..=index]);
                    assert_eq!(alone[0], together[index]);
                }
                let two = bench.choose(&borrowed[3..5], 3_000, &sampling[3..5]);
                assert_eq!(two, together[3..5]);
                chosen.extend(together);
            }
        }
        match &expected {
            Some(expected) => assert_eq!(&chosen, expected, "{schedule:?}"),
            None => expected = Some(chosen),
        }
    }
}

/// Whole decode plans of two sessions: what the device samples is what the sampler chooses from its logits.
#[test]
fn decode_plans_end_with_the_token_of_the_sampler() {
    let mut device = device(&checkpoint(), EmulatedOptions::default());
    let mut sessions: Vec<Box<dyn SessionState>> = (0..2)
        .map(|_| device.new_session(Precision::F32, 64).unwrap())
        .collect();
    let plan = |output| {
        let class = PlanClass {
            phase: Phase::Decode,
            precision: Precision::F32,
            rows: 2,
            context: 4_096,
            output,
        };
        Arc::new(Plan::record(device.model(), class))
    };
    let (sampled, logits) = (plan(PlanOutput::Sampled), plan(PlanOutput::AllLogits));
    let mut samplers: Vec<Sampler> = samplers(320, 310, &[4]).drain(13..15).collect();
    let mut tokens = vec![4, 9];
    for _ in 0..8 {
        let mut run =
            |sessions: &mut [Box<dyn SessionState>], plan, sampling: &[SamplingRow<'_>]| {
                let mut borrowed: Vec<&mut dyn SessionState> = Vec::new();
                for session in sessions {
                    borrowed.push(session.as_mut());
                }
                let launch = Launch {
                    tokens: &tokens,
                    sessions: &mut borrowed,
                    preset: &[],
                    token_limit: 310,
                    sampling,
                    observer: None,
                };
                device.execute(plan, launch).unwrap()
            };
        let outcome = run(&mut sessions, &logits, &[]);
        for session in &mut sessions {
            assert!(session.step_back());
        }
        let rows: Vec<SamplingRow<'_>> = samplers.iter().map(|sampler| sampler.row(None)).collect();
        let chosen = run(&mut sessions, &sampled, &rows);
        assert!(chosen.logits.is_empty());
        let mut tally = Tally::default();
        for ((sampler, logits), &found) in samplers
            .iter_mut()
            .zip(outcome.logits.chunks(320))
            .zip(&chosen.tokens)
        {
            tally.compare(sampler, logits, None, found);
            sampler.accept(found);
        }
        tokens = chosen.tokens;
    }
}

/// Every way through the kernel: greedy, the list, all logits, changes of logits, masks.
fn run_every_way(gpu: Emulated) -> Result<(), DeviceError> {
    let device = GpuDevice::new(gpu, &checkpoint(), GpuOptions::default(), &mut |_, _| {})?;
    let mut bench = Bench::on(device);
    let mask = [0xffff_0f0f; 80];
    let history: Vec<(u32, u32)> = (0..1_100).map(|at| (at * 7 % 2_500, at % 3)).collect();
    let all = mixtures();
    for (index, is_equal, is_masked) in [
        (0, false, false),
        (5, false, false),
        (6, false, false),
        (7, false, true),
        (12, false, true),
        (13, true, false),
        (14, false, false),
        (15, false, true),
        (5, true, false),
    ] {
        let logits = if is_equal {
            vec![0.5; 2_500]
        } else {
            noise(2_500, index as u64, Some(0.01))
        };
        let row = SamplingRow {
            parameters: &all[index],
            step: 3,
            history: &history,
            allowed: is_masked.then_some(&mask),
        };
        bench.try_to_choose(&[&logits, &logits], 2_500, &[row, row])?;
    }
    Ok(())
}

fn race(schedule: Schedule) -> EmulatedOptions {
    EmulatedOptions {
        build: BuildKind::Race,
        schedule,
        ..EmulatedOptions::default()
    }
}

#[test]
fn the_kernel_has_no_race_and_stays_in_its_buffers() {
    for schedule in [Schedule::ProgramOrder, Schedule::Shuffled(5)] {
        run_every_way(Emulated::new(race(schedule))).unwrap();
    }
}

/// Index of the function constant that says which barrier is gone.
const REMOVED: u32 = 63;

#[test]
fn a_barrier_taken_away_is_missed() {
    let all = SOURCES
        .iter()
        .fold(Sources::new(), |sources, (name, text)| {
            sources.with(name, text)
        });
    let mut unnoticed = Vec::new();
    let mut mutants = 0;
    for (name, text) in SOURCES
        .iter()
        .filter(|(name, _)| name.starts_with("sampling"))
    {
        let (removable, count) = removable_barriers(text, REMOVED);
        for barrier in 0..count {
            mutants += 1;
            let options = EmulatedOptions {
                further_constant: Some(Constant {
                    index: REMOVED,
                    value: ConstantValue::UInt(barrier),
                }),
                ..race(Schedule::ProgramOrder)
            };
            let gpu = Emulated::with_sources(all.clone().with(name, &removable), options);
            if run_every_way(gpu).is_ok() {
                unnoticed.push(format!("{name}: barrier {barrier}"));
            }
        }
    }
    assert!(unnoticed.is_empty(), "of {mutants}: {unnoticed:?}");
    println!("{mutants} barriers taken away one by one, each missed");
}
