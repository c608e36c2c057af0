//! Products of many rows on tiles, dense and with experts: what kernels take, and what plain loops in f64 make of it.
#![allow(dead_code, reason = "each test file uses a part")]

use std::sync::OnceLock;

use lily_msl::{Argument, BuildKind, Constant, EmulatorError, Launch, Library, Schedule};

use crate::common::{Format, Random, bytes};
use crate::kernels::{Expected, activations, check, compile, flag, number, output, sources};

pub const SIZES: [usize; 3] = [16, 32, 64];

pub fn plain(file: &'static str) -> &'static Library {
    static BUILT: [OnceLock<Library>; 6] = [const { OnceLock::new() }; 6];
    const FILES: [&str; 6] = [
        "tile.metal",
        "tile_experts.metal",
        "tensor.metal",
        "tensor_experts.metal",
        "tensor_packed.metal",
        "tensor_packed_experts.metal",
    ];
    let index = FILES.iter().position(|name| *name == file).expect("a file");
    BUILT[index].get_or_init(|| compile(&sources(), file, BuildKind::Plain))
}

/// Several matrices of one shape: as kernels read them, and their weights rounded to bfloat. Of 16 bits: bfloats.
pub struct Weights {
    pub stored: Vec<u8>,
    pub values: Vec<f64>,
    /// Not rounded: scale · code + bias, and |scale · code| + |bias|, of which a sum by groups is made.
    pub exact: Vec<[f64; 2]>,
}

impl Weights {
    pub fn new(
        random: &mut Random,
        count: usize,
        outputs: usize,
        columns: usize,
        bits: u32,
    ) -> Self {
        let (mut stored, mut values, mut exact) = (Vec::new(), Vec::new(), Vec::new());
        let (padded, groups) = (outputs.next_multiple_of(4), columns / 64);
        if bits == 16 {
            let weights = activations(random, count * outputs * columns);
            stored.extend(weights.0.iter().flat_map(|half| half.to_le_bytes()));
            values = weights.1;
        }
        for _ in (0..count).filter(|_| bits < 16) {
            let codes: Vec<u32> = (0..padded * columns)
                .map(|_| random.bits() >> (32 - bits))
                .collect();
            for word in codes.chunks(32 / bits as usize) {
                let placed = word.iter().enumerate();
                let word: u32 = placed
                    .map(|(at, code)| code << (at as u32 * bits))
                    .fold(0, |a, b| a | b);
                stored.extend(word.to_le_bytes());
            }
            let pairs: Vec<[u16; 2]> = (0..padded * groups)
                .map(|_| {
                    let scale = random.float() * 2.0 / (1 << bits) as f32;
                    [scale, random.float()].map(|value| Format::Bfloat.encode(value))
                })
                .collect();
            for block in 0..padded / 4 {
                for group in 0..groups {
                    for row in 0..4 {
                        for half in pairs[(block * 4 + row) * groups + group] {
                            stored.extend(half.to_le_bytes());
                        }
                    }
                }
            }
            for row in 0..outputs {
                for column in 0..columns {
                    let pair = pairs[row * groups + column / 64];
                    let [scale, bias] = pair.map(|half| Format::Bfloat.decode(half));
                    let weight = scale * codes[row * columns + column] as f32 + bias;
                    values.push(f64::from(Format::Bfloat.round(weight)));
                    let scaled = f64::from(scale) * f64::from(codes[row * columns + column]);
                    let bias = f64::from(bias);
                    exact.push([scaled + bias, scaled.abs() + bias.abs()]);
                }
            }
        }
        Self {
            stored,
            values,
            exact,
        }
    }
}

impl Weights {
    /// A row times the weight row that begins at `at`.
    fn product(&self, x: &[f64], at: usize, exact: bool) -> Expected {
        if exact {
            return exact_product(x, &self.exact[at..][..x.len()]);
        }
        product(x, &self.values[at..][..x.len()])
    }
}

/// A row times a weight row, summed in float.
pub fn product(x: &[f64], w: &[f64]) -> Expected {
    let terms = || x.iter().zip(w).map(|(a, b)| a * b);
    Expected {
        value: terms().sum(),
        error: terms().map(f64::abs).sum::<f64>() * 16.0 * f64::from(f32::EPSILON) / 2.0,
    }
}

/// The same with weights that are not rounded, scale and bias applied to sums of groups.
pub fn exact_product(x: &[f64], w: &[[f64; 2]]) -> Expected {
    let terms = |of: usize| x.iter().zip(w).map(move |(a, b)| a * b[of]);
    Expected {
        value: terms(0).sum(),
        error: terms(1).map(f64::abs).sum::<f64>() * 16.0 * f64::from(f32::EPSILON) / 2.0,
    }
}

/// silu(gate) · up.
pub fn activation(gate: Expected, up: Expected) -> Expected {
    let silu = gate.value / (1.0 + (-gate.value).exp());
    let value = silu * up.value;
    Expected {
        value,
        // The slope of silu is at most 1.1.
        error: 1.1 * gate.error * up.value.abs() + silu.abs() * up.error + value.abs() * 1e-6,
    }
}

/// A dense product: up to four outputs, one of them perhaps gated.
pub struct Dense {
    pub rows: usize,
    pub columns: usize,
    pub outputs: Vec<(usize, u32, bool)>,
    pub gated: usize,
    pub up_bits: u32,
    pub residual: bool,
    /// Whether weights are not rounded.
    pub exact: bool,
    pub input: (Vec<u16>, Vec<f64>),
    pub weights: Vec<Weights>,
    pub up: Option<Weights>,
    pub addend: Vec<f32>,
}

impl Dense {
    /// `outputs` are counts, bits and whether they are bfloats.
    pub fn new(rows: usize, columns: usize, outputs: &[(usize, u32, bool)]) -> Self {
        let mut random = Random((rows * columns + outputs[0].0) as u64);
        let weights = outputs
            .iter()
            .map(|(count, bits, _)| Weights::new(&mut random, 1, *count, columns, *bits))
            .collect();
        Self {
            rows,
            columns,
            outputs: outputs.to_vec(),
            gated: 4,
            up_bits: 4,
            residual: false,
            exact: false,
            input: activations(&mut random, rows * columns),
            weights,
            up: None,
            addend: random.floats(rows * outputs[0].0),
        }
    }

    pub fn gated(mut self, which: usize, up_bits: u32) -> Self {
        let mut random = Random(77);
        (self.gated, self.up_bits) = (which, up_bits);
        let count = self.outputs[which].0;
        self.up = Some(Weights::new(&mut random, 1, count, self.columns, up_bits));
        self
    }

    pub fn with_residual(mut self) -> Self {
        self.residual = true;
        self
    }

    pub fn run(
        &self,
        library: &Library,
        kernel: &str,
        size: usize,
        extra: &[Constant],
        schedule: Schedule,
    ) -> Result<Vec<Vec<u8>>, EmulatorError> {
        let mut constants = vec![
            number(0, self.columns),
            number(22, self.gated),
            number(23, self.up_bits as usize),
            flag(24, self.residual),
        ];
        let mut tiles = 0;
        for index in 0..4 {
            let (count, bits, bfloat) = self.outputs.get(index).copied().unwrap_or((0, 4, false));
            constants.push(number(10 + index as u32, count));
            constants.push(number(14 + index as u32, bits as usize));
            constants.push(flag(18 + index as u32, bfloat));
            tiles += count.div_ceil(if index == self.gated { 32 } else { 64 });
        }
        constants.extend(extra);
        let mut outputs: Vec<Vec<u8>> = self
            .outputs
            .iter()
            .map(|(count, _, bfloat)| output(if *bfloat { 2 } else { 4 }, self.rows * count))
            .collect();
        let row_count = [self.rows as u32];
        let mut arguments = vec![Argument::ReadOnly(bytes(&self.input.0)), Argument::Unbound];
        for index in 0..4 {
            arguments.push(match self.weights.get(index) {
                Some(weights) => Argument::ReadOnly(&weights.stored),
                None => Argument::Unbound,
            });
        }
        arguments.push(match &self.up {
            Some(up) => Argument::ReadOnly(&up.stored),
            None => Argument::Unbound,
        });
        arguments.push(if self.residual {
            Argument::ReadOnly(bytes(&self.addend))
        } else {
            Argument::Unbound
        });
        let given = outputs.len();
        arguments.extend(outputs.iter_mut().map(|output| Argument::Buffer(output)));
        arguments.extend((given..4).map(|_| Argument::Unbound));
        arguments.push(Argument::Bytes(bytes(&row_count)));
        let threads = if size == 16 { 64 } else { 128 };
        let grid = [self.rows.div_ceil(size) as u32, tiles as u32, 1];
        let launch = Launch::new(grid, [threads, 1, 1]).schedule(schedule);
        library.dispatch(kernel, &constants, launch, &mut arguments)?;
        Ok(outputs)
    }

    pub fn expected(&self, index: usize) -> Vec<Expected> {
        let count = self.outputs[index].0;
        let mut expected = Vec::new();
        for row in 0..self.rows {
            let x = &self.input.1[row * self.columns..][..self.columns];
            for output in 0..count {
                let (at, exact) = (output * self.columns, self.exact);
                let w = |weights: &Weights| weights.product(x, at, exact);
                let mut result = w(&self.weights[index]);
                if let Some(up) = self.up.as_ref().filter(|_| index == self.gated) {
                    result = activation(result, w(up));
                }
                if self.residual && index == 0 {
                    result.value += f64::from(self.addend[row * count + output]);
                }
                expected.push(result);
            }
        }
        expected
    }

    pub fn check(&self, what: &str, outputs: &[Vec<u8>]) {
        for (index, (output, (_, _, bfloat))) in outputs.iter().zip(&self.outputs).enumerate() {
            let what = format!("{what}, {} rows, output {index}", self.rows);
            check(&what, output, *bfloat, &self.expected(index));
        }
    }

    /// All sizes of simdgroup matrices give the same bits; those of tensors are within bounds.
    pub fn test(&self, with_tensors: bool) {
        let order = Schedule::ProgramOrder;
        let mut first: Option<Vec<Vec<u8>>> = None;
        for size in SIZES {
            let kernel = format!("tile_project_{size}");
            let outputs = self
                .run(plain("tile.metal"), &kernel, size, &[], order)
                .unwrap_or_else(|error| panic!("{error}"));
            match &first {
                None => self.check(&kernel, &outputs),
                Some(first) => assert!(*first == outputs, "{kernel} differs from tile_project_16"),
            }
            first.get_or_insert(outputs);
            if with_tensors {
                let kernel = format!("tensor_project_{size}");
                let outputs = self
                    .run(plain("tensor.metal"), &kernel, size, &[], order)
                    .unwrap_or_else(|error| panic!("{error}"));
                self.check(&kernel, &outputs);
            }
        }
    }
}

/// Products of pairs with their experts.
pub struct Experts {
    pub columns: usize,
    pub outputs: usize,
    pub bits: u32,
    pub choices: usize,
    /// Whether each pair has a row of its own.
    pub own_rows: bool,
    pub bfloat: bool,
    /// Whether weights are not rounded.
    pub exact: bool,
    /// Pairs of each expert.
    pub groups: Vec<Vec<u32>>,
    pub input: (Vec<u16>, Vec<f64>),
    pub weights: Weights,
    pub up: Option<(u32, Weights)>,
}

impl Experts {
    /// `sizes` are how many pairs each expert has; which ones is drawn.
    pub fn new(sizes: &[usize], choices: usize, columns: usize, outputs: usize, bits: u32) -> Self {
        let mut random = Random((sizes.len() * outputs + columns) as u64);
        let pairs: usize = sizes.iter().sum();
        let mut order: Vec<u32> = (0..pairs as u32).collect();
        for at in (1..pairs).rev() {
            order.swap(at, random.bits() as usize % (at + 1));
        }
        let mut rest = order.into_iter();
        let groups = sizes
            .iter()
            .map(|size| {
                let mut group: Vec<u32> = rest.by_ref().take(*size).collect();
                group.sort_unstable();
                group
            })
            .collect();
        Self {
            columns,
            outputs,
            bits,
            choices,
            own_rows: false,
            bfloat: false,
            exact: false,
            groups,
            input: activations(&mut random, pairs.div_ceil(choices) * columns),
            weights: Weights::new(&mut random, sizes.len(), outputs, columns, bits),
            up: None,
        }
    }

    pub fn gated(mut self, bits: u32) -> Self {
        let count = self.groups.len();
        let up = Weights::new(&mut Random(5), count, self.outputs, self.columns, bits);
        self.up = Some((bits, up));
        self
    }

    /// Each pair reads its own row; results are bfloats.
    pub fn with_own_rows(mut self) -> Self {
        let pairs: usize = self.groups.iter().map(Vec::len).sum();
        self.own_rows = true;
        self.bfloat = true;
        self.input = activations(&mut Random(6), pairs * self.columns);
        self
    }

    pub fn pairs_a_row(&self) -> usize {
        if self.own_rows { 1 } else { self.choices }
    }

    pub fn run(
        &self,
        library: &Library,
        kernel: &str,
        size: usize,
        schedule: Schedule,
    ) -> Result<Vec<u8>, EmulatorError> {
        let pairs: usize = self.groups.iter().map(Vec::len).sum();
        let experts = self.groups.len();
        let up_bits = self.up.as_ref().map_or(4, |(bits, _)| *bits);
        let constants = [
            number(0, self.columns),
            number(10, self.outputs),
            number(11, experts),
            number(13, self.pairs_a_row()),
            number(14, self.bits as usize),
            flag(15, self.up.is_some()),
            number(16, up_bits as usize),
            flag(17, self.bfloat),
        ];
        let mut grouping = vec![0_u32];
        for group in &self.groups {
            grouping.push(grouping.last().expect("one") + group.len() as u32);
        }
        grouping.extend(self.groups.iter().flatten());
        let mut results = output(if self.bfloat { 2 } else { 4 }, pairs * self.outputs);
        let up = match &self.up {
            Some((_, up)) => Argument::ReadOnly(&up.stored),
            None => Argument::Unbound,
        };
        let mut arguments = [
            Argument::ReadOnly(bytes(&self.input.0)),
            Argument::Unbound,
            Argument::Unbound,
            Argument::ReadOnly(bytes(&grouping)),
            Argument::ReadOnly(&self.weights.stored),
            up,
            Argument::Buffer(&mut results),
        ];
        let width = if self.up.is_some() { 32 } else { 64 };
        let tiles = pairs / size + experts.min(pairs);
        let grid = [self.outputs.div_ceil(width) as u32, tiles as u32, 1];
        let threads = if size == 16 { 64 } else { 128 };
        let launch = Launch::new(grid, [threads, 1, 1]).schedule(schedule);
        library.dispatch(kernel, &constants, launch, &mut arguments)?;
        Ok(results)
    }

    pub fn check(&self, what: &str, output: &[u8]) {
        let pairs: usize = self.groups.iter().map(Vec::len).sum();
        let nothing = Expected {
            value: f64::NAN,
            error: 0.0,
        };
        let mut expected = vec![nothing; pairs * self.outputs];
        for (expert, group) in self.groups.iter().enumerate() {
            for pair in group.iter().map(|pair| *pair as usize) {
                let x = &self.input.1[pair / self.pairs_a_row() * self.columns..][..self.columns];
                for out in 0..self.outputs {
                    let at = (expert * self.outputs + out) * self.columns;
                    let w = |weights: &Weights| weights.product(x, at, self.exact);
                    let mut result = w(&self.weights);
                    if let Some((_, up)) = &self.up {
                        result = activation(result, w(up));
                    }
                    expected[pair * self.outputs + out] = result;
                }
            }
        }
        check(what, output, self.bfloat, &expected);
    }

    pub fn test(&self, with_tensors: bool) {
        let order = Schedule::ProgramOrder;
        let mut first: Option<Vec<u8>> = None;
        for size in SIZES {
            let kernel = format!("tile_experts_{size}");
            let output = self
                .run(plain("tile_experts.metal"), &kernel, size, order)
                .unwrap_or_else(|error| panic!("{error}"));
            match &first {
                None => self.check(&kernel, &output),
                Some(first) => assert!(*first == output, "{kernel} differs from tile_experts_16"),
            }
            first.get_or_insert(output);
            if with_tensors {
                let kernel = format!("tensor_experts_{size}");
                let output = self
                    .run(plain("tensor_experts.metal"), &kernel, size, order)
                    .unwrap_or_else(|error| panic!("{error}"));
                self.check(&kernel, &output);
            }
        }
    }
}
