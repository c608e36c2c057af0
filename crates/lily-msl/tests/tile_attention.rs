//! Attention of prefill on matrices (kernels/tile_attention.metal) against plain loops in f64.

mod common;
#[path = "common/kernels.rs"]
mod kernels;

use std::sync::OnceLock;

use common::{Format, Random, bytes};
use kernels::{Expected, activations, check, compile, flag, number, output, sources};
use lily_msl::{
    Argument, BuildKind, Constant, EmulatorError, FaultKind, Launch, Library, Schedule,
    SharedBuffer, removable_barriers,
};

const PAGE: usize = 256;
/// Attention layers in the cache, and the one that is read.
const LAYERS: usize = 2;
const LAYER: usize = 1;
const REMOVED: u32 = 63;
const KERNELS: [&str; 2] = ["tile_attend_split", "tile_attend_float"];
const FILE: &str = "tile_attention.metal";

fn plain() -> &'static Library {
    static BUILT: OnceLock<Library> = OnceLock::new();
    BUILT.get_or_init(|| compile(&sources(), FILE, BuildKind::Plain))
}

/// The numbers of heads, and their width.
#[derive(Clone, Copy)]
struct Shape {
    query_heads: usize,
    key_heads: usize,
    width: usize,
}

impl Shape {
    fn group(self) -> usize {
        self.query_heads / self.key_heads
    }
}

/// A session's last rows, with all keys and values up to them in its cache.
struct Prompt {
    shape: Shape,
    /// Position of the first row.
    position: usize,
    rows: usize,
    queries: (Vec<u16>, Vec<f64>),
    /// Keys and values by position and KV head.
    keys: Vec<f64>,
    values: Vec<f64>,
    pages: Vec<SharedBuffer>,
}

impl Prompt {
    /// `sharpness` stretches the scores, so that the largest ones change along the way.
    fn new(shape: Shape, position: usize, rows: usize, sharpness: f32) -> Self {
        let Shape {
            query_heads,
            key_heads,
            width,
        } = shape;
        let mut random = Random((position * 31 + rows + width) as u64);
        let count = (position + rows) * key_heads * width;
        let stretched: Vec<f32> = random.floats(rows * query_heads * width);
        let stretched: Vec<f32> = stretched.iter().map(|x| x * sharpness).collect();
        let queries = Format::Bfloat.encode_all(&stretched);
        let query_values = queries
            .iter()
            .map(|bits| f64::from(Format::Bfloat.decode(*bits)))
            .collect();
        let (keys, values) = (
            activations(&mut random, count),
            activations(&mut random, count),
        );
        // Whatever nobody has written is no number.
        let layer_bytes = 2 * key_heads * PAGE * width * 2;
        let pages: Vec<SharedBuffer> = (0..(position + rows).div_ceil(PAGE))
            .map(|_| {
                let page = SharedBuffer::new(LAYERS * layer_bytes);
                page.write(0, &[0xff].repeat(LAYERS * layer_bytes));
                page
            })
            .collect();
        for at in 0..position + rows {
            for head in 0..key_heads {
                for (which, all) in [&keys.0, &values.0].into_iter().enumerate() {
                    let offset = LAYER * layer_bytes
                        + ((which * key_heads + head) * PAGE + at % PAGE) * width * 2;
                    let row = &all[(at * key_heads + head) * width..][..width];
                    pages[at / PAGE].write(offset, bytes(row));
                }
            }
        }
        Self {
            shape,
            position,
            rows,
            queries: (queries, query_values),
            keys: keys.1,
            values: values.1,
            pages,
        }
    }

    /// Rows `from` to `from + rows` of the prompt in one dispatch.
    fn run(
        &self,
        library: &Library,
        kernel: &str,
        [from, rows]: [usize; 2],
        extra: &[Constant],
        schedule: Schedule,
    ) -> Result<Vec<u8>, EmulatorError> {
        let Shape {
            query_heads,
            key_heads,
            width,
        } = self.shape;
        let mut constants = vec![
            number(0, query_heads),
            number(1, key_heads),
            number(2, width),
            flag(3, true),
        ];
        constants.extend(extra);
        let table = SharedBuffer::new(self.pages.len() * 8);
        let addresses: Vec<u64> = self.pages.iter().map(SharedBuffer::address).collect();
        table.write(0, bytes(&addresses));
        let mut session = Vec::new();
        for address in [table.address(), 0, 0] {
            session.extend(address.to_ne_bytes());
        }
        session.extend(((self.position + from) as u32).to_ne_bytes());
        session.extend([0; 4]);
        let row_width = query_heads * width;
        let mut results = output(2, rows * row_width);
        let (layer, row_count) = ([LAYER as u32], [rows as u32]);
        let mut arguments = vec![
            Argument::ReadOnly(&session),
            Argument::ReadOnly(bytes(
                &self.queries.0[from * row_width..][..rows * row_width],
            )),
            Argument::Buffer(&mut results),
            Argument::Bytes(bytes(&layer)),
            Argument::Bytes(bytes(&row_count)),
            Argument::Bytes(bytes(&[0_u32])),
            Argument::Resident(&table),
        ];
        arguments.extend(self.pages.iter().map(Argument::Resident));
        let tiles = (rows * self.shape.group()).div_ceil(32);
        let launch = Launch::new([tiles as u32, key_heads as u32, 1], [128, 1, 1]);
        library.dispatch(
            kernel,
            &constants,
            launch.schedule(schedule),
            &mut arguments,
        )?;
        Ok(results)
    }

    /// The result, with the error that scores and weights summed in float may have.
    fn expected(&self) -> Vec<Expected> {
        const EPSILON: f64 = f32::EPSILON as f64 / 2.0;
        let Shape {
            query_heads,
            key_heads,
            width,
        } = self.shape;
        let mut expected = Vec::new();
        for row in 0..self.rows {
            for head in 0..query_heads {
                let q = &self.queries.1[(row * query_heads + head) * width..][..width];
                let at =
                    |position: usize| (position * key_heads + head / self.shape.group()) * width;
                let scale = (width as f64).sqrt().recip();
                let mut scores = Vec::new();
                let mut spread = 0.0_f64;
                for position in 0..=self.position + row {
                    let terms = || {
                        let k = &self.keys[at(position)..][..width];
                        q.iter().zip(k).map(|(a, b)| a * b * scale)
                    };
                    scores.push(terms().sum::<f64>());
                    // Of a score, and so relative of its weight.
                    spread = spread.max(terms().map(f64::abs).sum::<f64>() * 16.0 * EPSILON);
                }
                let most = scores.iter().copied().fold(f64::MIN, f64::max);
                let weights: Vec<f64> = scores.iter().map(|score| (score - most).exp()).collect();
                let total: f64 = weights.iter().sum();
                // Two bfloats of a weight hold it to 2^-17; sums of it and of the values are float.
                let relative = 2.0 * spread + 1.0 / 131_072.0 + 32.0 * EPSILON;
                for column in 0..width {
                    let terms = || {
                        let weighted = weights.iter().enumerate();
                        weighted.map(|(position, p)| p * self.values[at(position) + column] / total)
                    };
                    expected.push(Expected {
                        value: terms().sum(),
                        error: terms().map(f64::abs).sum::<f64>() * relative,
                    });
                }
            }
        }
        expected
    }

    fn test(&self) {
        let expected = self.expected();
        for kernel in KERNELS {
            let all = [0, self.rows];
            let what = format!("{kernel}, {} rows at {}", self.rows, self.position);
            match self.run(plain(), kernel, all, &[], Schedule::ProgramOrder) {
                Ok(results) => check(&what, &results, true, &expected),
                Err(error) => panic!("{what}: {error}"),
            }
        }
    }
}

fn shape(query_heads: usize, key_heads: usize, width: usize) -> Shape {
    Shape {
        query_heads,
        key_heads,
        width,
    }
}

#[test]
fn rows_and_positions_over_the_edges_of_tiles() {
    // Tiles of 64 positions in blocks of 8, pages of 256; 32 queries a threadgroup.
    for (position, rows) in [(0, 1), (0, 17), (7, 1), (8, 2), (63, 1), (64, 16), (60, 9)] {
        Prompt::new(shape(4, 2, 64), position, rows, 2.0).test();
    }
    Prompt::new(shape(4, 2, 64), 250, 12, 2.0).test();
    Prompt::new(shape(4, 2, 64), 511, 2, 2.0).test();
}

#[test]
fn heads_of_every_shape() {
    // The model's, with five rows in threadgroups of four.
    Prompt::new(shape(16, 2, 256), 61, 5, 2.0).test();
    // A row's heads in two threadgroups; a KV head each; widths of one block and of five blocks a simdgroup.
    Prompt::new(shape(6, 2, 32), 20, 12, 2.0).test();
    Prompt::new(shape(2, 2, 160), 3, 35, 2.0).test();
    Prompt::new(shape(40, 1, 32), 70, 3, 2.0).test();
}

#[test]
fn scores_that_run_away() {
    // Scores of hundreds: a query's largest one changes by far more than the slack, in both directions.
    for sharpness in [40.0, 400.0] {
        Prompt::new(shape(4, 2, 64), 180, 18, sharpness).test();
    }
}

#[test]
fn a_row_does_not_depend_on_its_chunk() {
    let prompt = Prompt::new(shape(8, 2, 64), 55, 21, 20.0);
    let order = Schedule::ProgramOrder;
    let row_bytes = 8 * 64 * 2;
    for kernel in KERNELS {
        let run = |part| {
            prompt
                .run(plain(), kernel, part, &[], order)
                .expect("a result")
        };
        let whole = run([0, 21]);
        for [from, rows] in [[0, 1], [0, 9], [9, 12], [8, 1], [20, 1]] {
            let part = run([from, rows]);
            let same = whole[from * row_bytes..][..rows * row_bytes] == part[..rows * row_bytes];
            assert!(same, "{kernel}: rows {from} to {}", from + rows);
        }
    }
}

#[test]
fn a_removed_barrier_is_found() {
    let all = sources();
    let (mutants, barriers) = removable_barriers(all.get(FILE).expect("the kernel"), REMOVED);
    assert_eq!(barriers, 9);
    let library = compile(&all.with(FILE, &mutants), FILE, BuildKind::Race);
    // Two tiles of positions, the last ones not eight; more queries than a band.
    let prompt = Prompt::new(shape(4, 2, 64), 60, 7, 40.0);
    let expected = prompt.expected();
    let run = |kernel, removed, schedule| {
        let constant = number(REMOVED, removed);
        prompt.run(&library, kernel, [0, 7], &[constant], schedule)
    };
    let mut unnoticed: Vec<usize> = (0..barriers as usize).collect();
    for (kernel, schedule) in [
        ("tile_attend_split", Schedule::Shuffled(1)),
        ("tile_attend_float", Schedule::ProgramOrder),
    ] {
        match run(kernel, barriers as usize, schedule) {
            Ok(results) => check(kernel, &results, true, &expected),
            Err(error) => panic!("{error}"),
        }
        unnoticed.retain(|removed| {
            let error = run(kernel, *removed, schedule).err();
            let kind = error.and_then(|error| error.fault().map(|fault| fault.kind));
            !matches!(kind, Some(FaultKind::Race | FaultKind::Uninitialised))
        });
    }
    assert!(
        unnoticed.is_empty(),
        "barriers {unnoticed:?} can go unnoticed"
    );
}
