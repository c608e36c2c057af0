//! The inner loops, once for every instruction set. What they compute does not depend on which one runs.

use super::simd::Simd;
use lily_checkpoint::{DType, Weight, WeightData, WeightFormat, bf16_to_f32};
use lily_plan::WeightArithmetic;

/// The instruction set the kernels were chosen for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InstructionSet {
    /// 512-bit vectors.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// 256-bit vectors with fused multiply-add.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// 128-bit vectors of 64-bit Arm.
    #[cfg(target_arch = "aarch64")]
    Neon,
    /// What the compiler makes of plain loops.
    Portable,
}

impl InstructionSet {
    /// The widest that this processor has.
    pub fn detect() -> Self {
        Self::available()[0]
    }

    /// All that this processor has, widest first.
    pub fn available() -> Vec<Self> {
        [
            #[cfg(target_arch = "x86_64")]
            (
                InstructionSet::Avx512,
                is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw"),
            ),
            #[cfg(target_arch = "x86_64")]
            (
                InstructionSet::Avx2,
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            ),
            #[cfg(target_arch = "aarch64")]
            (InstructionSet::Neon, true),
            (InstructionSet::Portable, true),
        ]
        .into_iter()
        .filter_map(|(set, available)| available.then_some(set))
        .collect()
    }

    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx2 => "avx2+fma",
            #[cfg(target_arch = "aarch64")]
            InstructionSet::Neon => "neon",
            InstructionSet::Portable => "portable",
        }
    }
}

/// Compiles a generic kernel for each instruction set and makes the method that picks one.
macro_rules! kernels {
    ($($(#[$doc:meta])* fn $name:ident($($argument:ident: $kind:ty),* $(,)?) = $generic:ident;)*) => {
        impl InstructionSet {
            $(
                $(#[$doc])*
                pub(super) fn $name(self, $($argument: $kind),*) {
                    match self {
                        #[cfg(target_arch = "x86_64")]
                        InstructionSet::Avx512 => {
                            #[target_feature(enable = "avx512f,avx512bw,avx2,fma")]
                            fn run($($argument: $kind),*) {
                                // SAFETY: this function has the instructions.
                                unsafe { $generic::<super::simd::Avx512, 4, 4>($($argument),*) }
                            }
                            // SAFETY: `detect` found the instructions.
                            unsafe { run($($argument),*) }
                        }
                        #[cfg(target_arch = "x86_64")]
                        InstructionSet::Avx2 => {
                            #[target_feature(enable = "avx2,fma")]
                            fn run($($argument: $kind),*) {
                                // SAFETY: this function has the instructions.
                                unsafe { $generic::<super::simd::Avx2, 2, 2>($($argument),*) }
                            }
                            // SAFETY: `detect` found the instructions.
                            unsafe { run($($argument),*) }
                        }
                        #[cfg(target_arch = "aarch64")]
                        InstructionSet::Neon => {
                            // SAFETY: every aarch64 processor has NEON.
                            unsafe { $generic::<super::simd::Neon, 2, 2>($($argument),*) }
                        }
                        InstructionSet::Portable => {
                            // SAFETY: needs no instructions of its own.
                            unsafe { $generic::<super::simd::Portable, 1, 2>($($argument),*) }
                        }
                    }
                }
            )*
        }
    };
}

kernels! {
    /// `out[i · n + j] = x[rows[i]] · w[j]`, with `x` in rows of `k` and `w` holding `n` rows of `k`.
    fn products(x: &[f32], rows: &[u32], w: &[f32], k: usize, out: &mut [f32]) = products_in;
    /// `sums[i] += Σ_t p[i · length + t] · values[t]`, with `values` in rows of `width` and as many rows
    /// of `p` as of `sums`, in order of t.
    fn weighted_rows(p: &[f32], values: &[f32], width: usize, sums: &mut [f32]) = weighted_rows_in;
    /// One token of the gated delta rule for some rows of a head's state (each as wide as `key`):
    /// `S ← gS; u = S·k; S ← S + β(v − u)k; y = S·q`.
    fn delta_rows(
        state: &mut [f32],
        query: &[f32],
        key: &[f32],
        values: &[f32],
        gate_and_strength: (f32, f32),
        y: &mut [f32],
    ) = delta_rows_in;
    /// Rows `first .. first + out.len() / columns` of a weight as f32.
    fn dequantise(
        weight: &Weight<'_>,
        first: usize,
        arithmetic: WeightArithmetic,
        out: &mut [f32],
    ) = dequantise_in;
}

/// The dot product of `k` elements; lanes first, the tail one by one behind them.
#[inline(always)]
unsafe fn dots<S: Simd, const M: usize, const N: usize>(
    x: [*const f32; M],
    w: [*const f32; N],
    k: usize,
) -> [[f32; N]; M] {
    // SAFETY: the pointers are good for `k` elements, by the caller.
    unsafe {
        let mut sums = [[S::splat(0.0); N]; M];
        let mut at = 0;
        while at + 16 <= k {
            let columns: [S::Lanes; N] = std::array::from_fn(|j| S::load(w[j].add(at)));
            for i in 0..M {
                let row = S::load(x[i].add(at));
                for j in 0..N {
                    sums[i][j] = S::multiply_add(row, columns[j], sums[i][j]);
                }
            }
            at += 16;
        }
        let mut result = [[0.0; N]; M];
        for i in 0..M {
            for j in 0..N {
                let mut sum = S::sum(sums[i][j]);
                for tail in at..k {
                    sum += *x[i].add(tail) * *w[j].add(tail);
                }
                result[i][j] = sum;
            }
        }
        result
    }
}

#[inline(always)]
unsafe fn products_in<S: Simd, const M: usize, const N: usize>(
    x: &[f32],
    rows: &[u32],
    w: &[f32],
    k: usize,
    out: &mut [f32],
) {
    let n = w.len() / k;
    assert!(
        w.len() == n * k && out.len() == rows.len() * n,
        "products: shapes"
    );
    assert!(
        rows.iter().all(|&row| (row as usize + 1) * k <= x.len()),
        "products: row"
    );
    let pointer = |row: u32| x[row as usize * k..].as_ptr();
    let mut j = 0;
    // Columns outside, so that a few rows of `w` stay in the first cache while all of `x` passes.
    while j < n {
        let wide = n - j >= N;
        let step = if wide { N } else { 1 };
        let columns: [*const f32; N] =
            std::array::from_fn(|c| w[(j + c.min(step - 1)) * k..].as_ptr());
        let mut i = 0;
        while i < rows.len() {
            let tall = rows.len() - i >= M;
            // SAFETY: each pointer is good for `k` elements by the assertions above.
            unsafe {
                if wide && tall {
                    let block =
                        dots::<S, M, N>(std::array::from_fn(|r| pointer(rows[i + r])), columns, k);
                    for (r, values) in block.iter().enumerate() {
                        out[(i + r) * n + j..][..N].copy_from_slice(values);
                    }
                    i += M;
                } else if wide {
                    let [values] = dots::<S, 1, N>([pointer(rows[i])], columns, k);
                    out[i * n + j..][..N].copy_from_slice(&values);
                    i += 1;
                } else {
                    let [[value]] = dots::<S, 1, 1>([pointer(rows[i])], [columns[0]], k);
                    out[i * n + j] = value;
                    i += 1;
                }
            }
        }
        j += step;
    }
}

#[inline(always)]
unsafe fn weighted_rows_in<S: Simd, const M: usize, const N: usize>(
    p: &[f32],
    values: &[f32],
    width: usize,
    sums: &mut [f32],
) {
    let length = values.len() / width;
    let count = sums.len() / width;
    assert!(
        values.len() == length * width && sums.len() == count * width,
        "weighted rows: width"
    );
    assert!(p.len() == count * length, "weighted rows: weights");
    let whole = width / 16 * 16;
    let mut i = 0;
    while i < count {
        let tall = count - i >= M;
        let height = if tall { M } else { 1 };
        let mut at = 0;
        while at < whole {
            // SAFETY: `at + 16 <= width`, rows `i .. i + height` exist.
            unsafe {
                if tall {
                    add_weighted::<S, M>(p, values, width, length, i, at, sums);
                } else {
                    add_weighted::<S, 1>(p, values, width, length, i, at, sums);
                }
            }
            at += 16;
        }
        for row in i..i + height {
            for column in whole..width {
                for t in 0..length {
                    sums[row * width + column] += p[row * length + t] * values[t * width + column];
                }
            }
        }
        i += height;
    }
}

/// Sixteen columns of `M` rows of [`weighted_rows_in`].
#[inline(always)]
unsafe fn add_weighted<S: Simd, const M: usize>(
    p: &[f32],
    values: &[f32],
    width: usize,
    length: usize,
    row: usize,
    column: usize,
    sums: &mut [f32],
) {
    // SAFETY: the caller keeps rows and columns in bounds.
    unsafe {
        let p: [*const f32; M] = std::array::from_fn(|r| p.as_ptr().add((row + r) * length));
        let sums: [*mut f32; M] =
            std::array::from_fn(|r| sums.as_mut_ptr().add((row + r) * width + column));
        let mut lanes: [S::Lanes; M] = std::array::from_fn(|r| S::load(sums[r]));
        for t in 0..length {
            let value = S::load(values.as_ptr().add(t * width + column));
            for r in 0..M {
                lanes[r] = S::multiply_add(S::splat(*p[r].add(t)), value, lanes[r]);
            }
        }
        for r in 0..M {
            S::store(sums[r], lanes[r]);
        }
    }
}

#[inline(always)]
unsafe fn delta_rows_in<S: Simd, const M: usize, const N: usize>(
    state: &mut [f32],
    query: &[f32],
    key: &[f32],
    values: &[f32],
    (gate, strength): (f32, f32),
    y: &mut [f32],
) {
    let width = key.len();
    assert!(
        query.len() == width && state.len() == values.len() * width,
        "delta rows: shapes"
    );
    assert!(
        y.len() == values.len() && width.is_multiple_of(16),
        "delta rows: shapes"
    );
    for (index, state) in state.chunks_exact_mut(width).enumerate() {
        // SAFETY: every offset below `width`, a multiple of 16, is in bounds.
        unsafe {
            let g = S::splat(gate);
            let mut u = S::splat(0.0);
            for at in (0..width).step_by(16) {
                let decayed = S::multiply(g, S::load(state.as_ptr().add(at)));
                S::store(state.as_mut_ptr().add(at), decayed);
                u = S::multiply_add(decayed, S::load(key.as_ptr().add(at)), u);
            }
            let delta = S::splat(strength * (values[index] - S::sum(u)));
            let mut sum = S::splat(0.0);
            for at in (0..width).step_by(16) {
                let old = S::load(state.as_ptr().add(at));
                let updated = S::multiply_add(delta, S::load(key.as_ptr().add(at)), old);
                S::store(state.as_mut_ptr().add(at), updated);
                sum = S::multiply_add(updated, S::load(query.as_ptr().add(at)), sum);
            }
            y[index] = S::sum(sum);
        }
    }
}

/// The common widths unrolled by group; the rest by the checkpoint's own plain loop.
#[inline(always)]
unsafe fn dequantise_in<S: Simd, const M: usize, const N: usize>(
    weight: &Weight<'_>,
    first: usize,
    arithmetic: WeightArithmetic,
    out: &mut [f32],
) {
    let columns = weight.columns();
    let rows = out.len() / columns;
    assert_eq!(out.len(), rows * columns, "dequantise: whole rows");
    match (weight.format, weight.row_range(first..first + rows)) {
        (
            WeightFormat::Affine {
                bits: bits @ (4 | 8),
                group,
                scales: DType::Bf16,
            },
            WeightData::Affine {
                codes,
                scales,
                biases,
            },
        ) => {
            let group = usize::from(group);
            let groups = out
                .chunks_exact_mut(group)
                .zip(codes.chunks_exact(group * usize::from(bits) / 8));
            let factors = scales.chunks_exact(2).zip(biases.chunks_exact(2));
            for ((out, codes), (scale, bias)) in groups.zip(factors) {
                let scale = bf16_to_f32(u16::from_le_bytes([scale[0], scale[1]]));
                let bias = bf16_to_f32(u16::from_le_bytes([bias[0], bias[1]]));
                if bits == 4 {
                    for (out, &code) in out.chunks_exact_mut(2).zip(codes) {
                        out[0] = scale * f32::from(code & 15) + bias;
                        out[1] = scale * f32::from(code >> 4) + bias;
                    }
                } else {
                    for (out, &code) in out.iter_mut().zip(codes) {
                        *out = scale * f32::from(code) + bias;
                    }
                }
            }
        }
        _ => {
            for (row, out) in out.chunks_exact_mut(columns).enumerate() {
                weight.dequantise_row(first + row, out);
            }
        }
    }
    if arithmetic == WeightArithmetic::RoundedToBf16 {
        for value in out {
            *value = crate::context::round_to_bf16(*value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(seed: u32, count: usize) -> Vec<f32> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..count).map(|_| next()).collect()
    }

    /// Instruction sets with a fused multiply-add: they must not differ by a bit.
    fn fused() -> Vec<InstructionSet> {
        let mut sets = InstructionSet::available();
        sets.retain(|&set| set != InstructionSet::Portable);
        sets
    }

    /// Rows, columns and depths around the tiles of every instruction set: sums do not depend on how
    /// many rows are computed together, nor on the instruction set.
    #[test]
    fn a_product_does_not_depend_on_its_company() {
        for k in [1, 15, 16, 17, 32, 100] {
            for n in 1..=9 {
                let x = values(1, 11 * k);
                let w = values(2, n * k);
                let rows: Vec<u32> = vec![10, 0, 3, 3, 7, 1, 2, 9, 8];
                for count in 1..=rows.len() {
                    let run = |set: InstructionSet, rows: &[u32]| {
                        let mut out = vec![f32::NAN; rows.len() * n];
                        set.products(&x, rows, &w, k, &mut out);
                        out
                    };
                    for set in InstructionSet::available() {
                        let together = run(set, &rows[..count]);
                        let alone: Vec<f32> = rows[..count]
                            .iter()
                            .flat_map(|&row| run(set, &[row]))
                            .collect();
                        assert_eq!(together, alone, "{set:?}, k {k}, n {n}, {count} rows");
                        for (at, &found) in together.iter().enumerate() {
                            let row = &x[rows[at / n] as usize * k..][..k];
                            let exact: f64 = row
                                .iter()
                                .zip(&w[at % n * k..])
                                .map(|(&a, &b)| f64::from(a) * f64::from(b))
                                .sum();
                            assert!((f64::from(found) - exact).abs() < 1e-5, "{set:?}");
                        }
                    }
                    let results: Vec<_> = fused()
                        .into_iter()
                        .map(|set| run(set, &rows[..count]))
                        .collect();
                    assert!(results.windows(2).all(|pair| pair[0] == pair[1]));
                }
            }
        }
    }

    #[test]
    fn weighted_rows_are_sums_in_order() {
        for width in [1, 15, 16, 33, 64] {
            for count in 1..=9 {
                for length in [0, 1, 5] {
                    let p = values(3, count * length);
                    let v = values(4, length * width);
                    let start = values(5, count * width);
                    for set in InstructionSet::available() {
                        let mut sums = start.clone();
                        set.weighted_rows(&p, &v, width, &mut sums);
                        for (at, &sum) in sums.iter().enumerate() {
                            let exact: f64 = (0..length)
                                .map(|t| {
                                    f64::from(p[at / width * length + t])
                                        * f64::from(v[t * width + at % width])
                                })
                                .sum();
                            let exact = exact + f64::from(start[at]);
                            assert!((f64::from(sum) - exact).abs() < 1e-5, "{set:?}");
                        }
                    }
                }
            }
        }
    }
}
