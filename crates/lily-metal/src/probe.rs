//! What multiplies matrices: found out by multiplying some.
//!
//! Kernels of prefill exist on simdgroup matrices and on Metal 4's tensor operations (kernels/tensor.h). Which of them
//! are recorded follows from what the machine says of itself, and that from what is found here.

use lily_gpu::kernels::{
    Bound, Input, Kernel, Memory, Operand, Output, Region, TileExperts, TileProject,
};
use lily_gpu::{Argument, Cost, Dispatch, Gpu};
use lily_plan::DeviceError;

/// A kernel for dense products: host name, file, rows of its tile.
type Tried = (&'static str, &'static str, usize);
/// Those on tensor operations. Products with experts have the same tiles.
const ON_TENSORS: [Tried; 3] = [
    ("tensor_project_16", "tensor.metal", 16),
    ("tensor_project_32", "tensor.metal", 32),
    ("tensor_project_64", "tensor.metal", 64),
];

/// Those on tensor operations that take codes.
const ON_CODES: [Tried; 3] = [
    ("packed_project_16", "tensor_packed.metal", 16),
    ("packed_project_32", "tensor_packed.metal", 32),
    ("packed_project_64", "tensor_packed.metal", 64),
];

// A tile and a bit of each: rows, outputs, and groups of 64 columns that are added to one sum.
const ROWS: usize = 65;
const OUTPUTS: usize = 68;
const COLUMNS: usize = 128;

/// Those for experts, which are made and not run: their tiles are those of dense products.
const EXPERTS_ON_TENSORS: [Tried; 3] = [
    ("tensor_experts_16", "tensor_experts.metal", 16),
    ("tensor_experts_32", "tensor_experts.metal", 32),
    ("tensor_experts_64", "tensor_experts.metal", 64),
];
const EXPERTS_ON_CODES: [Tried; 3] = [
    ("packed_experts_16", "tensor_packed_experts.metal", 16),
    ("packed_experts_32", "tensor_packed_experts.metal", 32),
    ("packed_experts_64", "tensor_packed_experts.metal", 64),
];

/// Runs small products with each size of tile on tensor operations; says what is wrong if anything is. Where all is
/// right, it tells whether all sizes give the same bits: if not, a prompt's last bits depend on how it is cut into
/// chunks.
pub(crate) fn tensors_are_right<G: Gpu>(gpu: &mut G) -> Result<bool, String> {
    all_are_right(gpu, &ON_TENSORS, &EXPERTS_ON_TENSORS)
}

/// The same for tensor operations that take codes of four bits.
pub(crate) fn packed_are_right<G: Gpu>(gpu: &mut G) -> Result<bool, String> {
    all_are_right(gpu, &ON_CODES, &EXPERTS_ON_CODES)
}

fn all_are_right<G: Gpu>(
    gpu: &mut G,
    kernels: &[Tried],
    experts: &[Tried],
) -> Result<bool, String> {
    for tried in kernels {
        for bits in [4, 8] {
            is_right(gpu, *tried, bits)?;
        }
    }
    for &(name, file, _) in experts {
        let bound = Bound {
            name,
            file,
            ..experts_bound()
        };
        let made = gpu.pipeline(&bound, &bound.constants);
        made.map_err(|error| error.to_string())?;
    }
    sizes_agree(gpu, kernels)
}

/// Runs a small product with one kernel and compares its numbers.
fn is_right<G: Gpu>(gpu: &mut G, tried: Tried, bits: u32) -> Result<(), String> {
    let product = Product::of_whole_numbers(bits);
    let results = product.run(gpu, tried).map_err(|error| error.to_string())?;
    let pairs = results.iter().zip(&product.expected).enumerate();
    for (at, (found, expected)) in pairs {
        if found != expected {
            let (row, column) = (at / OUTPUTS, at % OUTPUTS);
            return Err(format!(
                "{} with {bits} bits gave {found} for {expected} in row {row}, column {column}",
                tried.0
            ));
        }
    }
    Ok(())
}

/// Whether kernels give the same bits where sums are rounded.
fn sizes_agree<G: Gpu>(gpu: &mut G, kernels: &[Tried]) -> Result<bool, String> {
    let product = Product::of_fractions();
    let mut results = Vec::new();
    for tried in kernels {
        let result = product
            .run(gpu, *tried)
            .map_err(|error| error.to_string())?;
        results.push(result.into_iter().map(f32::to_bits).collect::<Vec<_>>());
    }
    Ok(results.windows(2).all(|pair| pair[0] == pair[1]))
}

/// A small product: activations, weights and room for the results in one memory.
struct Product {
    memory: Vec<u8>,
    input: Region,
    weights: Region,
    output: Region,
    /// Bits of a code.
    bits: u32,
    expected: Vec<f32>,
}

/// The upper half of a float.
fn half(value: f32) -> [u8; 2] {
    ((value.to_bits() >> 16) as u16).to_le_bytes()
}

/// From −8 to 7, without a pattern that a misplaced block could hide in.
fn number(row: usize, column: usize, salt: u32) -> i32 {
    let mixed = (row as u32 * 131 + column as u32 * 7 + salt).wrapping_mul(0x9e37_79b1);
    (mixed >> 28) as i32 - 8
}

impl Product {
    /// Every sum of small whole numbers is exact in float, in any order, so results must be equal.
    fn of_whole_numbers(bits: u32) -> Self {
        let mut product = Self::new(bits, |number, _| number as f32, (1.0, -8.0));
        let sums = (0..ROWS * OUTPUTS).map(|index| {
            let (row, output) = (index / OUTPUTS, index % OUTPUTS);
            let terms = (0..COLUMNS).map(|c| number(row, c, 1) * number(output, c, 2));
            terms.sum::<i32>() as f32
        });
        product.expected = sums.collect();
        product
    }

    /// Activations of many sizes: sums depend on their order.
    fn of_fractions() -> Self {
        let sizes = |number: i32, column: usize| number as f32 * 1.7_f32.powi(column as i32 % 11);
        Self::new(4, sizes, (0.013, -0.1))
    }

    fn new(bits: u32, activation: impl Fn(i32, usize) -> f32, (scale, bias): (f32, f32)) -> Self {
        let mut memory = Vec::new();
        let input = place(&mut memory, |memory| {
            for index in 0..ROWS * COLUMNS {
                let (row, column) = (index / COLUMNS, index % COLUMNS);
                memory.extend(half(activation(number(row, column, 1), column)));
            }
        });
        // kernels/quantised.h: codes row by row, the first in the lowest bits; then (scale, bias).
        let weights = place(&mut memory, |memory| {
            let code = |index| (number(index / COLUMNS, index % COLUMNS, 2) + 8) as u8;
            if bits == 8 {
                memory.extend((0..OUTPUTS * COLUMNS).map(code));
            } else {
                let pairs = (0..OUTPUTS * COLUMNS).step_by(2);
                memory.extend(pairs.map(|index| code(index) | code(index + 1) << 4));
            }
            for _ in 0..OUTPUTS * COLUMNS / 64 {
                memory.extend(half(scale));
                memory.extend(half(bias));
            }
        });
        let output = place(&mut memory, |memory| {
            memory.resize(memory.len() + ROWS * OUTPUTS * 4, 0xff);
        });
        Product {
            memory,
            input,
            weights,
            output,
            bits,
            expected: Vec::new(),
        }
    }

    fn run<G: Gpu>(&self, gpu: &mut G, (name, file, size): Tried) -> Result<Vec<f32>, DeviceError> {
        let bound = Bound {
            name,
            file,
            ..self.bound()
        };
        let buffer = gpu.allocate(self.memory.len(), "a small product")?;
        gpu.write(&buffer, 0, &self.memory);
        let part = |region: &Region, written: bool| Argument::Buffer {
            buffer: &buffer,
            offset: region.offset,
            bytes: region.bytes,
            written,
        };
        let arguments = bound.operands.iter().map(|operand| match operand {
            Operand::None => Argument::None,
            Operand::Input(Input(region)) => part(region, false),
            Operand::Output(Output(region)) => part(region, true),
            Operand::Word(word) => Argument::Word(*word),
        });
        let pipeline = gpu.pipeline(&bound, &bound.constants)?;
        let dispatch = Dispatch {
            pipeline: &pipeline,
            arguments: arguments.collect(),
            grid: [ROWS.div_ceil(size) as u32, OUTPUTS.div_ceil(64) as u32, 1],
            // kernels/tile.h, kernels/tensor.h.
            threads: if size < 32 { 64 } else { 128 },
            reached: &[],
            cost: Cost::default(),
            divisible: None,
        };
        gpu.submit(None, &[vec![dispatch]])?;
        gpu.wait()?;
        let mut bytes = vec![0; self.output.bytes];
        gpu.read(&buffer, self.output.offset, &mut bytes);
        let words = bytes.chunks_exact(4);
        Ok(words
            .map(|word| f32::from_le_bytes([word[0], word[1], word[2], word[3]]))
            .collect())
    }

    fn bound(&self) -> Bound {
        let project = TileProject {
            kernel: TileProject::NAMES[0].0,
            columns: COLUMNS as u32,
            outputs_0: OUTPUTS as u32,
            outputs_1: 0,
            outputs_2: 0,
            outputs_3: 0,
            bits_0: self.bits,
            bits_1: 4,
            bits_2: 4,
            bits_3: 4,
            bfloat_0: false,
            bfloat_1: false,
            bfloat_2: false,
            bfloat_3: false,
            gated: 4,
            up_bits: 4,
            has_residual: false,
            input: Input(self.input),
            weight_0: Input(self.weights),
            weight_1: None,
            weight_2: None,
            weight_3: None,
            up: None,
            residual: None,
            output_0: Output(self.output),
            output_1: None,
            output_2: None,
            output_3: None,
            row_count: ROWS as u32,
        };
        project.bind()
    }
}

/// Products of gate and up with experts of four bits, as plans have them.
fn experts_bound() -> Bound {
    let somewhere = Region {
        memory: Memory::Arena,
        offset: 0,
        bytes: 0,
    };
    let experts = TileExperts {
        kernel: TileExperts::NAMES[0].0,
        columns: COLUMNS as u32,
        outputs: OUTPUTS as u32,
        experts: 4,
        pairs_a_row: 2,
        bits: 4,
        has_up: true,
        up_bits: 4,
        output_bfloat: true,
        input: Input(somewhere),
        grouping: Input(somewhere),
        weight: Input(somewhere),
        up: Some(Input(somewhere)),
        output: Output(somewhere),
    };
    experts.bind()
}

/// Where in `memory` lies what `fill` adds to it.
fn place(memory: &mut Vec<u8>, fill: impl FnOnce(&mut Vec<u8>)) -> Region {
    memory.resize(memory.len().next_multiple_of(256), 0);
    let offset = memory.len();
    fill(memory);
    Region {
        memory: Memory::Arena,
        offset,
        bytes: memory.len() - offset,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lily_emulated::{Emulated, EmulatedOptions};
    use lily_gpu::kernels::SOURCES;
    use lily_msl::Sources;

    fn kernels() -> Sources {
        SOURCES
            .iter()
            .fold(Sources::new(), |all, (name, text)| all.with(name, text))
    }

    const ON_MATRICES: [Tried; 3] = [
        ("tile_project_16", "tile.metal", 16),
        ("tile_project_32", "tile.metal", 32),
        ("tile_project_64", "tile.metal", 64),
    ];

    /// The numbers are right, and both kinds of kernels have them.
    #[test]
    fn the_small_products_are_what_the_kernels_compute() {
        let mut gpu = Emulated::new(EmulatedOptions::default());
        for tried in ON_MATRICES {
            for bits in [4, 8] {
                is_right(&mut gpu, tried, bits).expect("simdgroup matrices are right");
            }
        }
        assert_eq!(sizes_agree(&mut gpu, &ON_MATRICES), Ok(true));
        tensors_are_right(&mut gpu).expect("tensor operations are right");
        packed_are_right(&mut gpu).expect("those on codes are right");
    }

    /// Columns added the other way round.
    #[test]
    fn sums_in_another_order_are_noticed() {
        let (_, text) = SOURCES
            .iter()
            .find(|(name, _)| *name == "tile.h")
            .expect("a file");
        let forwards =
            "for (uint eighth = 0; eighth < 8; ++eighth) {\n            simdgroup_bfloat8x8";
        assert!(text.contains(forwards));
        let backwards = "for (uint eighth = 8; eighth-- > 0;) {\n            simdgroup_bfloat8x8";
        let text = text.replace(forwards, backwards);
        let files = kernels().with("tile.h", &text);
        let mut gpu = Emulated::with_sources(files, EmulatedOptions::default());
        is_right(&mut gpu, ON_MATRICES[0], 4).expect("whole numbers do not notice");
        let backwards = Product::of_fractions().run(&mut gpu, ON_MATRICES[0]);
        let mut gpu = Emulated::new(EmulatedOptions::default());
        let forwards = Product::of_fractions().run(&mut gpu, ON_MATRICES[0]);
        assert_ne!(backwards.expect("it runs"), forwards.expect("it runs"));
    }

    /// A kernel that forgets the steps before the last, as Metal's default mode would.
    #[test]
    fn wrong_numbers_are_noticed() {
        let text = kernels();
        let (_, broken) = SOURCES
            .iter()
            .find(|(name, _)| *name == "tensor.h")
            .expect("a file");
        let broken = broken.replace("mode::multiply_accumulate", "mode::multiply");
        let text = text.with("tensor.h", &broken);
        let mut gpu = Emulated::with_sources(text, EmulatedOptions::default());
        let error = tensors_are_right(&mut gpu).expect_err("it forgets");
        assert!(
            error.starts_with("tensor_project_16 with 4 bits gave "),
            "{error}"
        );
        packed_are_right(&mut gpu).expect("another file");
        // Half of each scale.
        let text = kernels();
        let (_, broken) = SOURCES
            .iter()
            .find(|(name, _)| *name == "tensor_packed.h")
            .expect("a file");
        let scale = "unpack_bfloats(";
        assert!(broken.contains(scale));
        let broken = broken.replacen(scale, "0.5f * unpack_bfloats(", 1);
        let text = text.with("tensor_packed.h", &broken);
        let mut gpu = Emulated::with_sources(text, EmulatedOptions::default());
        let error = packed_are_right(&mut gpu).expect_err("half of the scale");
        assert!(
            error.starts_with("packed_project_16 with 4 bits gave "),
            "{error}"
        );
    }
}
