//! Sixteen lanes of f32 on whatever the processor has. Every implementation keeps lane `j` for the
//! elements `j, j + 16, …` and adds lanes in one fixed order, so a sum does not depend on the instruction set (as long
//! as it has a fused multiply-add) nor on how many rows are computed together.

/// A set of vector instructions.
pub(super) trait Simd: Copy {
    /// Sixteen lanes.
    type Lanes: Copy;

    /// # Safety
    /// Of every function here: the processor has the instructions, and pointers are good for 16 elements.
    unsafe fn splat(value: f32) -> Self::Lanes;
    unsafe fn load(from: *const f32) -> Self::Lanes;
    unsafe fn store(to: *mut f32, lanes: Self::Lanes);
    /// a · b + c, rounded once where the processor can.
    unsafe fn multiply_add(a: Self::Lanes, b: Self::Lanes, c: Self::Lanes) -> Self::Lanes;
    unsafe fn multiply(a: Self::Lanes, b: Self::Lanes) -> Self::Lanes;

    /// The sum of the lanes: halves onto halves.
    #[inline(always)]
    unsafe fn sum(lanes: Self::Lanes) -> f32 {
        let mut values = [0.0; 16];
        // SAFETY: `values` has sixteen elements.
        unsafe { Self::store(values.as_mut_ptr(), lanes) };
        let mut width = 8;
        while width > 0 {
            for lane in 0..width {
                values[lane] += values[lane + width];
            }
            width /= 2;
        }
        values[0]
    }
}

/// Any processor.
#[derive(Clone, Copy)]
pub(super) struct Portable;

impl Simd for Portable {
    type Lanes = [f32; 16];

    #[inline(always)]
    unsafe fn splat(value: f32) -> [f32; 16] {
        [value; 16]
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> [f32; 16] {
        // SAFETY: good for sixteen elements by the trait's contract.
        unsafe { from.cast::<[f32; 16]>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, lanes: [f32; 16]) {
        // SAFETY: good for sixteen elements by the trait's contract.
        unsafe { to.cast::<[f32; 16]>().write_unaligned(lanes) };
    }

    #[inline(always)]
    unsafe fn multiply_add(a: [f32; 16], b: [f32; 16], c: [f32; 16]) -> [f32; 16] {
        std::array::from_fn(|lane| a[lane] * b[lane] + c[lane])
    }

    #[inline(always)]
    unsafe fn multiply(a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        std::array::from_fn(|lane| a[lane] * b[lane])
    }
}

/// AVX2 with FMA: two registers of eight.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(super) struct Avx2;

#[cfg(target_arch = "x86_64")]
impl Simd for Avx2 {
    type Lanes = [std::arch::x86_64::__m256; 2];

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self::Lanes {
        // SAFETY: the processor has AVX by the trait's contract.
        unsafe { [std::arch::x86_64::_mm256_set1_ps(value); 2] }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self::Lanes {
        use std::arch::x86_64::_mm256_loadu_ps;
        // SAFETY: instructions and pointer by the trait's contract.
        unsafe { [_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))] }
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, lanes: Self::Lanes) {
        use std::arch::x86_64::_mm256_storeu_ps;
        // SAFETY: instructions and pointer by the trait's contract.
        unsafe {
            _mm256_storeu_ps(to, lanes[0]);
            _mm256_storeu_ps(to.add(8), lanes[1]);
        }
    }

    #[inline(always)]
    unsafe fn multiply_add(a: Self::Lanes, b: Self::Lanes, c: Self::Lanes) -> Self::Lanes {
        use std::arch::x86_64::_mm256_fmadd_ps;
        // SAFETY: the processor has FMA by the trait's contract.
        unsafe {
            [
                _mm256_fmadd_ps(a[0], b[0], c[0]),
                _mm256_fmadd_ps(a[1], b[1], c[1]),
            ]
        }
    }

    #[inline(always)]
    unsafe fn multiply(a: Self::Lanes, b: Self::Lanes) -> Self::Lanes {
        use std::arch::x86_64::_mm256_mul_ps;
        // SAFETY: the processor has AVX by the trait's contract.
        unsafe { [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])] }
    }
}

/// AVX-512: one register.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(super) struct Avx512;

#[cfg(target_arch = "x86_64")]
impl Simd for Avx512 {
    type Lanes = std::arch::x86_64::__m512;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self::Lanes {
        // SAFETY: the processor has AVX-512 by the trait's contract.
        unsafe { std::arch::x86_64::_mm512_set1_ps(value) }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self::Lanes {
        // SAFETY: instructions and pointer by the trait's contract.
        unsafe { std::arch::x86_64::_mm512_loadu_ps(from) }
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, lanes: Self::Lanes) {
        // SAFETY: instructions and pointer by the trait's contract.
        unsafe { std::arch::x86_64::_mm512_storeu_ps(to, lanes) };
    }

    #[inline(always)]
    unsafe fn multiply_add(a: Self::Lanes, b: Self::Lanes, c: Self::Lanes) -> Self::Lanes {
        // SAFETY: the processor has AVX-512 by the trait's contract.
        unsafe { std::arch::x86_64::_mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    unsafe fn multiply(a: Self::Lanes, b: Self::Lanes) -> Self::Lanes {
        // SAFETY: the processor has AVX-512 by the trait's contract.
        unsafe { std::arch::x86_64::_mm512_mul_ps(a, b) }
    }
}

/// NEON: four registers of four.
#[cfg(target_arch = "aarch64")]
#[derive(Clone, Copy)]
pub(super) struct Neon;

#[cfg(target_arch = "aarch64")]
impl Simd for Neon {
    type Lanes = [std::arch::aarch64::float32x4_t; 4];

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self::Lanes {
        // SAFETY: every aarch64 processor has NEON.
        unsafe { [std::arch::aarch64::vdupq_n_f32(value); 4] }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self::Lanes {
        use std::arch::aarch64::vld1q_f32;
        // SAFETY: every aarch64 processor has NEON; the pointer by the trait's contract.
        unsafe {
            [
                vld1q_f32(from),
                vld1q_f32(from.add(4)),
                vld1q_f32(from.add(8)),
                vld1q_f32(from.add(12)),
            ]
        }
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, lanes: Self::Lanes) {
        for (index, lane) in lanes.into_iter().enumerate() {
            // SAFETY: every aarch64 processor has NEON; the pointer by the trait's contract.
            unsafe { std::arch::aarch64::vst1q_f32(to.add(4 * index), lane) };
        }
    }

    #[inline(always)]
    unsafe fn multiply_add(a: Self::Lanes, b: Self::Lanes, c: Self::Lanes) -> Self::Lanes {
        // SAFETY: every aarch64 processor has NEON.
        unsafe {
            [
                std::arch::aarch64::vfmaq_f32(c[0], a[0], b[0]),
                std::arch::aarch64::vfmaq_f32(c[1], a[1], b[1]),
                std::arch::aarch64::vfmaq_f32(c[2], a[2], b[2]),
                std::arch::aarch64::vfmaq_f32(c[3], a[3], b[3]),
            ]
        }
    }

    #[inline(always)]
    unsafe fn multiply(a: Self::Lanes, b: Self::Lanes) -> Self::Lanes {
        // SAFETY: every aarch64 processor has NEON.
        unsafe {
            [
                std::arch::aarch64::vmulq_f32(a[0], b[0]),
                std::arch::aarch64::vmulq_f32(a[1], b[1]),
                std::arch::aarch64::vmulq_f32(a[2], b[2]),
                std::arch::aarch64::vmulq_f32(a[3], b[3]),
            ]
        }
    }
}
