//! Kernels of the kinds that the engine needs, against scalar references, in program order, under shuffled
//! schedules and in the race build.

mod common;

use std::sync::OnceLock;

use common::{Format, Random, bytes, bytes_mut, compile};
use lily_msl::{Argument, BuildKind, Constant, ConstantValue, Launch, Library, Report, Schedule};

const DEMO: &str = include_str!("kernels/demo.metal");

/// A build of the demonstration kernels and a schedule.
#[derive(Clone, Copy)]
struct Way {
    library: &'static Library,
    schedule: Schedule,
}

impl Way {
    fn all() -> Vec<Self> {
        static PLAIN: OnceLock<Library> = OnceLock::new();
        static RACE: OnceLock<Library> = OnceLock::new();
        let plain = PLAIN.get_or_init(|| compile(DEMO, "demo.metal", BuildKind::Plain));
        let race = RACE.get_or_init(|| compile(DEMO, "demo.metal", BuildKind::Race));
        let way = |library, schedule| Self { library, schedule };
        vec![
            way(plain, Schedule::ProgramOrder),
            way(plain, Schedule::Shuffled(0)),
            way(plain, Schedule::Shuffled(7)),
            way(race, Schedule::ProgramOrder),
            way(race, Schedule::Shuffled(3)),
        ]
    }

    #[track_caller]
    fn run(
        self,
        kernel: &str,
        constants: &[Constant],
        grid: [u32; 2],
        threads: u32,
        arguments: &mut [Argument],
    ) -> Report {
        let launch = Launch::new([grid[0], grid[1], 1], [threads, 1, 1]).schedule(self.schedule);
        match self.library.dispatch(kernel, constants, launch, arguments) {
            Ok(report) => report,
            Err(error) => panic!("{error}"),
        }
    }
}

fn matrix_vector(
    way: Way,
    kernel: &str,
    [rows, cols]: [usize; 2],
    format: Option<Format>,
    [per_simdgroup, simdgroups]: [u32; 2],
    with_bias: bool,
) {
    let mut random = Random(1);
    let weights: Vec<u32> = (0..rows * cols / 8).map(|_| random.bits()).collect();
    let groups = rows * cols / 64;
    let scales = Format::Bfloat.encode_all(
        &random
            .floats(groups)
            .iter()
            .map(|x| x * 0.1)
            .collect::<Vec<_>>(),
    );
    let biases = Format::Bfloat.encode_all(&random.floats(groups));
    let round = |values: Vec<f32>| match format {
        Some(format) => values.iter().map(|value| format.round(*value)).collect(),
        None => values,
    };
    let (x, addend) = (round(random.floats(cols)), round(random.floats(rows)));
    let stored = |values: &[f32]| match format {
        Some(format) => bytes(&format.encode_all(values)).to_vec(),
        None => bytes(values).to_vec(),
    };
    let (x_bytes, addend_bytes) = (stored(&x), stored(&addend));
    let mut y_bytes = stored(&vec![0.0; rows]);
    let mut parameters = Vec::new();
    parameters.extend((rows as u32).to_ne_bytes());
    parameters.extend((cols as u32).to_ne_bytes());
    parameters.extend(0.5_f32.to_ne_bytes());
    let mut constants = vec![Constant {
        index: 0,
        value: ConstantValue::UInt(simdgroups),
    }];
    if with_bias {
        constants.push(Constant {
            index: 1,
            value: ConstantValue::Bool(true),
        });
    }
    let threadgroups = (rows as u32).div_ceil(per_simdgroup * simdgroups);
    way.run(
        kernel,
        &constants,
        [threadgroups, 1],
        32 * simdgroups,
        &mut [
            Argument::ReadOnly(bytes(&weights)),
            Argument::ReadOnly(bytes(&scales)),
            Argument::ReadOnly(bytes(&biases)),
            Argument::ReadOnly(&x_bytes),
            Argument::Buffer(&mut y_bytes),
            Argument::Bytes(&parameters),
            Argument::ReadOnly(&addend_bytes),
        ],
    );
    let y: Vec<f32> = match format {
        Some(format) => y_bytes
            .chunks(2)
            .map(|b| format.decode(u16::from_ne_bytes([b[0], b[1]])))
            .collect(),
        None => y_bytes
            .chunks(4)
            .map(|b| f32::from_ne_bytes([b[0], b[1], b[2], b[3]]))
            .collect(),
    };
    let tolerance = match format {
        None => 1e-5,
        Some(Format::Half) => 1e-3,
        Some(Format::Bfloat) => 4e-3,
    };
    for row in 0..rows {
        let (mut sum, mut magnitude) = (0.0_f64, 0.0);
        for col in 0..cols {
            let code = weights[row * cols / 8 + col / 8] >> (col % 8 * 4) & 15;
            let group = row * cols / 64 + col / 64;
            let scale = f64::from(Format::Bfloat.decode(scales[group]));
            let bias = f64::from(Format::Bfloat.decode(biases[group]));
            let term = (f64::from(code) * scale + bias) * f64::from(x[col]);
            sum += term;
            magnitude += term.abs();
        }
        if with_bias {
            sum += f64::from(addend[row]);
        }
        let error = (f64::from(y[row]) - sum * 0.5).abs();
        assert!(
            error <= tolerance * (magnitude + 1.0),
            "{kernel}, row {row}: {} for {}",
            y[row],
            sum * 0.5
        );
    }
}

#[test]
fn quantised_matrix_vector_products() {
    let (half, bfloat) = (Some(Format::Half), Some(Format::Bfloat));
    for way in Way::all() {
        matrix_vector(way, "q4_gemv_f32_r4", [37, 256], None, [4, 2], true);
        matrix_vector(way, "q4_gemv_f16_r4", [64, 512], half, [4, 2], false);
        matrix_vector(way, "q4_gemv_bf16_r2", [64, 256], bfloat, [2, 8], true);
    }
}

#[test]
fn histogram_and_scan() {
    let (count, groups) = (5000, 3);
    let mut random = Random(2);
    let keys: Vec<u32> = (0..count).map(|_| random.bits() % 1000).collect();
    for way in Way::all() {
        let (mut total, mut offsets) = (vec![0_u32; 256], vec![0_u32; groups * 256]);
        way.run(
            "hist_scan",
            &[],
            [groups as u32, 1],
            256,
            &mut [
                Argument::ReadOnly(bytes(&keys)),
                Argument::Buffer(bytes_mut(&mut total)),
                Argument::Buffer(bytes_mut(&mut offsets)),
                Argument::Bytes(bytes(&[count as u32])),
            ],
        );
        let mut expected = vec![0; 256];
        for group in 0..groups {
            let mut bins = [0; 256];
            for first in (group * 256..count).step_by(groups * 256) {
                for key in &keys[first..(first + 256).min(count)] {
                    bins[(key & 255) as usize] += 1;
                }
            }
            let mut before = 0;
            for bin in 0..256 {
                assert_eq!(offsets[group * 256 + bin], before);
                before += bins[bin];
                expected[bin] += bins[bin];
            }
        }
        assert_eq!(total, expected);
    }
}

#[test]
fn matrix_product_of_simdgroup_matrices() {
    let (m, n, k) = (64, 64, 96);
    let mut random = Random(3);
    let a = Format::Half.encode_all(&random.floats(m * k));
    let b = Format::Half.encode_all(&random.floats(n * k));
    let value = |bits: u16| f64::from(Format::Half.decode(bits));
    for way in Way::all() {
        let mut c = vec![-9.0_f32; m * n];
        way.run(
            "gemm_sg",
            &[],
            [n as u32 / 32, m as u32 / 32],
            128,
            &mut [
                Argument::ReadOnly(bytes(&a)),
                Argument::ReadOnly(bytes(&b)),
                Argument::Buffer(bytes_mut(&mut c)),
                Argument::Bytes(bytes(&[m as u32, n as u32, k as u32])),
            ],
        );
        for row in 0..m {
            for col in 0..n {
                let terms = (0..k).map(|i| value(a[row * k + i]) * value(b[col * k + i]));
                let error = (terms.sum::<f64>() - f64::from(c[row * n + col])).abs();
                assert!(error < 1e-3, "row {row}, column {col}: off by {error}");
            }
        }
    }
}

fn attention(way: Way, kernel: &str, dim: usize, format: Format) {
    let (heads, kv_heads, positions, splits) = (4, 2, 77, 3);
    let mut random = Random(4);
    let mut wide = |count| {
        format.encode_all(
            &random
                .floats(count)
                .iter()
                .map(|x| x * 3.0)
                .collect::<Vec<_>>(),
        )
    };
    let (q, k) = (wide(heads * dim), wide(positions * kv_heads * dim));
    let v = format.encode_all(&random.floats(positions * kv_heads * dim));
    let (mut partial, mut sums) = (
        vec![0.0_f32; heads * splits * dim],
        vec![0.0_f32; heads * splits * 2],
    );
    let scale = 1.0 / (dim as f32).sqrt();
    let mut parameters = Vec::new();
    for number in [dim, positions, splits, heads / kv_heads, kv_heads * dim] {
        parameters.extend((number as u32).to_ne_bytes());
    }
    parameters.extend(scale.to_ne_bytes());
    way.run(
        kernel,
        &[],
        [heads as u32, splits as u32],
        128,
        &mut [
            Argument::ReadOnly(bytes(&q)),
            Argument::ReadOnly(bytes(&k)),
            Argument::ReadOnly(bytes(&v)),
            Argument::Buffer(bytes_mut(&mut partial)),
            Argument::Buffer(bytes_mut(&mut sums)),
            Argument::Bytes(&parameters),
            Argument::Threadgroup((4 * dim + 8) * 4),
        ],
    );
    let value = |bits: u16| f64::from(format.decode(bits));
    for head in 0..heads {
        let at = |position: usize| (position * kv_heads + head / (heads / kv_heads)) * dim;
        let scores: Vec<f64> = (0..positions)
            .map(|t| {
                (0..dim)
                    .map(|d| value(q[head * dim + d]) * value(k[at(t) + d]))
                    .sum::<f64>()
                    * f64::from(scale)
            })
            .collect();
        let most = scores.iter().copied().fold(f64::MIN, f64::max);
        let total: f64 = scores.iter().map(|score| (score - most).exp()).sum();
        let pairs: Vec<_> = (0..splits)
            .map(|i| &sums[(head * splits + i) * 2..][..2])
            .collect();
        let largest = pairs.iter().map(|pair| pair[0]).fold(f32::MIN, f32::max);
        let weight = |i: usize| f64::from(pairs[i][0] - largest).exp2();
        let denominator: f64 = (0..splits)
            .map(|i| weight(i) * f64::from(pairs[i][1]))
            .sum();
        for d in 0..dim {
            let expected: f64 = (0..positions)
                .map(|t| (scores[t] - most).exp() * value(v[at(t) + d]))
                .sum::<f64>()
                / total;
            let actual: f64 = (0..splits)
                .map(|i| weight(i) * f64::from(partial[(head * splits + i) * dim + d]))
                .sum::<f64>()
                / denominator;
            assert!(
                (expected - actual).abs() < 1e-4,
                "{kernel}: {actual} for {expected}"
            );
        }
    }
}

#[test]
fn attention_over_splits() {
    for way in Way::all() {
        attention(way, "attn_partial_bf16_128", 128, Format::Bfloat);
        attention(way, "attn_partial_f16_64", 64, Format::Half);
    }
}

#[test]
fn odds_and_ends() {
    let a = Random(5).floats(256);
    let table = [0.0, 0.25, 0.5, 1.0];
    for way in Way::all() {
        let mut a_out = a.clone();
        let (mut counter, mut u) = ([0.0_f32], vec![0_u32; 64]);
        let (mut b, mut h) = (vec![0_u16; 256], vec![0_u16; 256]);
        way.run(
            "odds",
            &[],
            [2, 1],
            32,
            &mut [
                Argument::Buffer(bytes_mut(&mut a_out)),
                Argument::Buffer(bytes_mut(&mut counter)),
                Argument::Buffer(bytes_mut(&mut u)),
                Argument::Buffer(bytes_mut(&mut b)),
                Argument::Buffer(bytes_mut(&mut h)),
            ],
        );
        assert_eq!(counter, [64.0]);
        let round = |value| Format::Bfloat.round(value);
        for i in 0..64 {
            let x = &a[i * 4..][..4];
            let v = [x[1], x[0], x[2] + 1.0, x[3] + 2.0];
            for e in 0..4 {
                let selected = if v[e] > 0.5 { v[3 - e] } else { v[e] };
                let expected = round(round(round(selected) * 0.5) + table[i & 3]);
                assert_eq!(Format::Bfloat.decode(b[i * 4 + e]), expected);
            }
        }
    }
}
