//! Addresses beyond 2^32 bytes, and beyond 2^32 elements: what the kernels' headers and some kernels make of large
//! indices, against arithmetic in 128 bits. Memory of so many bytes is mapped and not touched but for a few pages.

mod common;
#[path = "common/kernels.rs"]
mod kernels;

use common::{bytes, bytes_mut};
use kernels::{compile, flag, number, sources};
use lily_msl::{Argument, BuildKind, Constant, Launch, Library};
use memmap2::{MmapMut, MmapOptions};

/// Zeros that take no memory.
fn sparse(length: u128) -> MmapMut {
    let length = usize::try_from(length).unwrap();
    let options = &mut MmapOptions::new();
    options.len(length).no_reserve_swap().map_anon().unwrap()
}

fn library(name: &str, text: &str) -> Library {
    compile(&sources().with(name, text), name, BuildKind::Plain)
}

fn library_of(file: &str) -> Library {
    compile(&sources(), file, BuildKind::Plain)
}

fn addresses() -> Library {
    library("addresses.metal", include_str!("kernels/addresses.metal"))
}

#[track_caller]
fn run(
    library: &Library,
    kernel: &str,
    constants: &[Constant],
    grid: [u32; 3],
    threads: u32,
    arguments: &mut [Argument],
) {
    let launch = Launch::new(grid, [threads, 1, 1]);
    if let Err(error) = library.dispatch(kernel, constants, launch, arguments) {
        panic!("{error}");
    }
}

/// A matrix of several of one shape.
#[derive(Clone, Copy, Debug)]
struct Shape {
    index: u32,
    rows: u32,
    columns: u32,
    bits: u32,
}

impl Shape {
    fn wide(self) -> [u128; 4] {
        [self.index, self.rows, self.columns, self.bits].map(u128::from)
    }

    fn bytes(self) -> u128 {
        let [_, rows, columns, bits] = self.wide();
        let padded = rows.next_multiple_of(4);
        padded * columns * bits / 8 + padded * (columns / 64) * 4
    }

    fn codes(self) -> u128 {
        u128::from(self.index) * self.bytes()
    }

    fn pairs(self) -> u128 {
        let [_, rows, columns, bits] = self.wide();
        self.codes() + rows.next_multiple_of(4) * columns * bits / 8
    }

    /// Where the codes of a row from a column on begin, and a row's pair of a column's group.
    fn row(self, row: u128, column: u128) -> (u128, u128) {
        let [_, _, columns, bits] = self.wide();
        let group = row / 4 * (columns / 64) + column / 64;
        (
            self.codes() + (row * columns + column) * bits / 8,
            self.pairs() + (group * 4 + row % 4) * 4,
        )
    }
}

/// The real model's largest, and what lies on both sides of 2^31 and 2^32 bytes or elements, or far behind.
const SHAPES: [Shape; 8] = [
    // Experts, the head at 4 and 8 bits.
    shape(255, 512, 2_048, 4),
    shape(0, 248_320, 2_048, 4),
    shape(0, 248_320, 2_048, 8),
    // 2^31 elements of 8 bits, and 2^32 of 4.
    shape(1, 1 << 16, 1 << 15, 8),
    shape(1, 1 << 16, 1 << 16, 4),
    // 2^33 of each in one matrix.
    shape(1, 1 << 18, 1 << 15, 8),
    shape(255, 16_383, 4_096, 8),
    shape(4_095, 65, 65_600, 4),
];

const fn shape(index: u32, rows: u32, columns: u32, bits: u32) -> Shape {
    Shape {
        index,
        rows,
        columns,
        bits,
    }
}

#[test]
fn matrices_lie_where_they_should() {
    let places: Vec<u32> = SHAPES
        .iter()
        .flat_map(|s| [s.index, s.rows, s.columns, s.bits, 0, 0, 0, 0])
        .collect();
    let base = [0_u8; 16];
    let mut answers = vec![0_u64; SHAPES.len() * 3];
    let mut arguments = [
        Argument::ReadOnly(&base),
        Argument::ReadOnly(bytes(&places)),
        Argument::Buffer(bytes_mut(&mut answers)),
    ];
    let threads = SHAPES.len() as u32;
    run(
        &addresses(),
        "matrices",
        &[],
        [1; 3],
        threads,
        &mut arguments,
    );
    for (shape, answers) in SHAPES.iter().zip(answers.chunks(3)) {
        let expected = [shape.bytes(), shape.codes(), shape.pairs()];
        assert_eq!(answers.to_vec(), expected.map(|x| x as u64), "{shape:?}");
    }
    assert!(SHAPES.iter().any(|shape| shape.codes() > 1 << 33));
}

#[test]
fn blocks_are_read_where_they_lie() {
    let library = addresses();
    for shape in SHAPES {
        // The last block, the last 32 columns (their second half, of 8 bits).
        let block = shape.rows.div_ceil(4) - 1;
        let (column, part) = (shape.columns - 32, u32::from(shape.bits == 8));
        let mut memory = sparse(shape.codes() + shape.bytes());
        let mut expected = Vec::new();
        let words = |row: u32| [row + 1, row + 11, row + 21, row + 31];
        let mut put = |at: u128, words: &[u32]| {
            memory[usize::try_from(at).unwrap()..][..words.len() * 4].copy_from_slice(bytes(words));
        };
        for row in 0..4 {
            let (codes, pair) = shape.row(u128::from(block * 4 + row), u128::from(column));
            put(codes + u128::from(part) * 16, &words(row));
            put(pair, &[row + 100]);
            expected.extend(words(row));
        }
        expected.extend([100, 101, 102, 103]);
        let place = [
            shape.index,
            shape.rows,
            shape.columns,
            shape.bits,
            block,
            column,
            part,
            0,
        ];
        let mut answers = vec![0_u32; 20];
        let mut arguments = [
            Argument::ReadOnly(&memory),
            Argument::ReadOnly(bytes(&place)),
            Argument::Buffer(bytes_mut(&mut answers)),
        ];
        run(&library, "blocks", &[], [1; 3], 1, &mut arguments);
        assert_eq!(answers, expected, "{shape:?}");
    }
}

#[test]
fn runs_of_tiles_begin_where_they_lie() {
    let library = addresses();
    for shape in SHAPES {
        let other = Shape {
            index: shape.index + 1,
            ..shape
        };
        // The last rows, some of them beyond the end: those are read from the first row, and not used.
        let first = shape.rows - 17;
        let place = [
            shape.index,
            shape.rows,
            shape.columns,
            shape.bits,
            first,
            0,
            0,
            0,
        ];
        let base = [0_u8; 16];
        let mut answers = vec![0_u64; 2 * 128 * 2];
        let mut arguments = [
            Argument::ReadOnly(&base),
            Argument::ReadOnly(bytes(&place)),
            Argument::Buffer(bytes_mut(&mut answers)),
        ];
        run(&library, "runs", &[], [1; 3], 64, &mut arguments);
        // In whatever order threads take them: two runs a row.
        for (gated, found) in answers.chunks(256).enumerate() {
            let mut expected: Vec<[u64; 2]> = Vec::new();
            for row in 0..64_u32 {
                let second = gated == 1 && row >= 32;
                let row = first + if second { row - 32 } else { row };
                let row = if row < shape.rows { row } else { 0 };
                let shape = if second { other } else { shape };
                for half in 0..2_u128 {
                    let (codes, pair) = shape.row(u128::from(row), 0);
                    let codes = codes + half * 4 * u128::from(shape.bits);
                    expected.push([codes as u64, pair as u64]);
                }
            }
            let mut found: Vec<[u64; 2]> = found.chunks(2).map(|pair| [pair[0], pair[1]]).collect();
            expected.sort_unstable();
            found.sort_unstable();
            assert!(found == expected, "{shape:?}, gated {gated}");
        }
    }
}

#[test]
fn elements_lie_where_they_should() {
    let library = addresses();
    // Logits of 8,191 rows are 2,033,989,120; then 2^31, 2^32 and what lies behind.
    let indices: [u64; 5] = [
        8_190 * 248_320,
        (1 << 31) - 64,
        1 << 31,
        1 << 32,
        (1 << 32) + 1_234_568,
    ];
    for (is_bfloat, each) in [(0_u32, 4_usize), (1, 2)] {
        let mut memory = sparse((indices[4] as u128 + 64) * each as u128);
        let encode = |value: f32| match each {
            4 => value.to_le_bytes().to_vec(),
            _ => value.to_le_bytes()[2..].to_vec(),
        };
        for &index in &indices {
            for i in 0..4 {
                let at = (index as usize + i) * each;
                memory[at..][..each].copy_from_slice(&encode(i as f32 + 7.0));
            }
        }
        let mut answers = vec![0.0_f32; indices.len() * 8];
        let mut arguments = [
            Argument::Buffer(&mut memory),
            Argument::ReadOnly(bytes(&indices)),
            Argument::Buffer(bytes_mut(&mut answers)),
            Argument::Bytes(bytes(std::slice::from_ref(&is_bfloat))),
        ];
        let threads = indices.len() as u32;
        run(&library, "elements", &[], [1; 3], threads, &mut arguments);
        for (&index, answers) in indices.iter().zip(answers.chunks(8)) {
            assert_eq!(answers, [7.0, 8.0, 9.0, 10.0, 9.0, 9.0, 9.0, 9.0]);
            let written: Vec<u8> = [1.0, 2.0, 3.0, 4.0, 0.0, 5.0, 0.0]
                .iter()
                .flat_map(|&value| encode(value))
                .collect();
            let at = (index as usize + 4) * each;
            assert_eq!(memory[at..][..written.len()], written, "{index}");
        }
    }
}

#[test]
fn keys_and_values_lie_where_they_should() {
    let library = library(
        "cache_addresses.metal",
        include_str!("kernels/cache_addresses.metal"),
    );
    let (heads, width) = (2_u128, 256_u128);
    for is_bfloat in [false, true] {
        let element = if is_bfloat { 2 } else { 4 };
        let layer_bytes = 2 * heads * 256 * width * element;
        // The longest context's last page; the last layer of the real model, and layers beyond 2^31 and 2^32 bytes.
        let mut places: Vec<u32> = Vec::new();
        for layer in [0, 9, 2_048, 4_096, 9_000] {
            for which in 0..2 {
                for position in [0, 255, 256, 262_143] {
                    places.extend([layer, which, 1, position]);
                }
            }
        }
        // Addresses that nothing lies at.
        let pages: Vec<u64> = (0..1_024).map(|page| (page + 1) << 40).collect();
        let table = pages.as_ptr().expose_provenance() as u64;
        let session = [table, 0, 0, 0];
        let mut answers = vec![0_u64; places.len() / 4];
        let threads = answers.len() as u32;
        let mut arguments = [
            Argument::ReadOnly(bytes(&session)),
            Argument::ReadOnly(bytes(&places)),
            Argument::Buffer(bytes_mut(&mut answers)),
        ];
        let constants = [
            number(1, heads as usize),
            number(2, width as usize),
            flag(3, is_bfloat),
        ];
        run(
            &library,
            "cache_places",
            &constants,
            [1; 3],
            threads,
            &mut arguments,
        );
        for (place, &answer) in places.chunks(4).zip(&answers) {
            let [layer, which, head, position] = [0, 1, 2, 3].map(|i| u128::from(place[i]));
            let row = (which * heads + head) * 256 + position % 256;
            let page = (position / 256 + 1) << 40;
            let expected = page + layer * layer_bytes + row * width * element;
            assert_eq!(u128::from(answer), expected, "{place:?}");
        }
    }
}

#[test]
fn rows_of_states_lie_where_they_should() {
    let library = library(
        "state_addresses.metal",
        include_str!("kernels/state_addresses.metal"),
    );
    let (value_width, key_width) = (128_u128, 128_u128);
    // Heads of 64 KiB: 2^31 bytes, 2^32 bytes and 2^32 elements.
    for head in [31_u32, 32_768, 65_536, 262_144, 270_000] {
        let row = 77_u32;
        let at = ((u128::from(head) * value_width + u128::from(row)) * key_width * 4) as usize;
        let mut memory = sparse(at as u128 + 4_096);
        let values: Vec<f32> = (0..128).map(|i| i as f32 + 0.5).collect();
        memory[at..at + 512].copy_from_slice(bytes(&values));
        let mut arguments = [
            Argument::Buffer(&mut memory),
            Argument::Bytes(bytes(std::slice::from_ref(&head))),
            Argument::Bytes(bytes(std::slice::from_ref(&row))),
        ];
        let constants = [number(2, 128), number(3, 128)];
        run(
            &library,
            "state_rows",
            &constants,
            [1; 3],
            32,
            &mut arguments,
        );
        assert!(memory[at + 512..at + 1_024] == *bytes(&values), "{head}");
    }
}

/// Kernels that find rows themselves, at rows beyond 2^32 elements.
#[test]
fn rows_lie_where_they_should() {
    let vocabulary = 1_500_000_000_u32;
    let mut logits = sparse(4 * u128::from(vocabulary) * 4);
    for row in 0..4 {
        let at = (row * vocabulary as usize + 700 + row) * 4;
        logits[at..at + 4].copy_from_slice(&1.0_f32.to_le_bytes());
    }
    // kernels/turn.h: the limit stands behind eight sessions of 32 bytes.
    let (mut table, mut tokens, mut chosen) = ([0_u32; 384], [0_u32; 4], [0_u32; 4]);
    table[64] = 1_000;
    let mut arguments = [
        Argument::ReadOnly(&logits),
        Argument::Buffer(bytes_mut(&mut table)),
        Argument::Buffer(bytes_mut(&mut tokens)),
        Argument::Buffer(bytes_mut(&mut chosen)),
    ];
    let library = library_of("routing.metal");
    let constants = [number(2, vocabulary as usize), flag(60, true)];
    run(
        &library,
        "arg_max",
        &constants,
        [4, 1, 1],
        1_024,
        &mut arguments,
    );
    assert_eq!(chosen, [700, 701, 702, 703]);

    let library = library_of("elementwise.metal");
    let (row, mut selected) = (3_u32, vec![0.0_f32; 1_024]);
    let mut arguments = [
        Argument::ReadOnly(&logits),
        Argument::Buffer(bytes_mut(&mut selected)),
        Argument::Bytes(bytes(std::slice::from_ref(&row))),
    ];
    let constants = [
        number(0, vocabulary as usize),
        flag(1, false),
        flag(2, false),
    ];
    run(
        &library,
        "select_row",
        &constants,
        [1; 3],
        256,
        &mut arguments,
    );
    let expected: Vec<f32> = (0..1_024)
        .map(|at| f32::from(u8::from(at == 703)))
        .collect();
    assert_eq!(selected, expected);

    // The last row of a table of 4 GiB of codes and more.
    let table = shape(0, (1 << 22) + 1, 2_048, 4);
    let mut memory = sparse(table.bytes());
    let token = table.rows - 1;
    for column in (0..2_048).step_by(64) {
        let (codes, pair) = table.row(u128::from(token), column);
        memory[codes as usize..][..32].fill(0x21);
        // 2.0 and 0.5.
        memory[pair as usize..][..4].copy_from_slice(bytes(&[0x4000_u16, 0x3f00]));
    }
    let (tokens, mut output) = ([token], vec![0.0_f32; 2_048]);
    let mut arguments = [
        Argument::ReadOnly(bytes(&tokens)),
        Argument::ReadOnly(&memory),
        Argument::Buffer(bytes_mut(&mut output)),
        Argument::Bytes(bytes(std::slice::from_ref(&table.rows))),
    ];
    let constants = [number(0, 2_048), flag(2, false), number(3, 4)];
    run(&library, "embed", &constants, [8, 1, 1], 64, &mut arguments);
    let expected: Vec<f32> = (0..2_048).map(|at| [2.5, 4.5][at % 2]).collect();
    assert_eq!(output, expected);
}

/// Numbers of rows, pairs and so on: the most that there are of each.
const MOST: [(&str, u64); 6] = [
    ("row", 8_191),
    ("token", 8_191),
    ("row_count", 8_191),
    ("pair", 8 * 8_191),
    ("row_index", 8_191),
    ("head_count", 8_191 * 32),
];

/// What a row is multiplied with where the product is a `uint`: the most there is of it.
const FACTORS: [(&str, u64); 8] = [
    ("VALUE_HEADS", 32),
    ("CHOICES", 8),
    ("GROUP_HEADS", 8),
    // In threadgroup memory, rows of a tile.
    ("TILE", 16),
    ("KEY_WIDTH", 128),
    ("M", 64),
    ("VECTORS", 8),
    ("SIMDGROUPS", 32),
];

/// Products of a row and a number of elements are 64 bits wide, but for those whose factors are known to be small.
#[test]
fn products_of_rows_are_wide_or_small() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../kernels");
    let mut seen = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let text = std::fs::read_to_string(&path).unwrap();
        for (number, line) in text.lines().enumerate() {
            let code = line.split("//").next().unwrap();
            let mut words = code.split_whitespace().peekable();
            let mut before = "";
            while let Some(word) = words.next() {
                if word != "*" {
                    before = word;
                    continue;
                }
                let left = before.rsplit(['(', '[', ',']).next().unwrap();
                let is_wide =
                    before.contains("(ulong)") || text.contains(&format!("ulong {left} ="));
                let Some((_, most)) = MOST.iter().find(|(name, _)| *name == left) else {
                    continue;
                };
                let factor = words.peek().copied().unwrap_or_default();
                let factor = factor.trim_end_matches([')', ']', ';', ',']);
                let factor = factor.split([')', ']', ';', ',']).next().unwrap();
                if is_wide || !factor.starts_with(|first: char| first.is_ascii_uppercase()) {
                    continue;
                }
                seen += 1;
                let place = format!("{}:{}", path.display(), number + 1);
                let known = FACTORS.iter().find(|(name, _)| *name == factor);
                let (_, largest) = known.unwrap_or_else(|| {
                    panic!("{place}: {left} * {factor} is a uint; how large can it be?")
                });
                assert!(most * largest < 1 << 32, "{place}: {left} * {factor}");
            }
        }
    }
    assert!(seen >= 8, "{seen}");
}
