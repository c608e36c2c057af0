//! What the machine's memory delivers, for pricing plans on it.

use rayon::prelude::*;
use std::hint::black_box;
use std::time::Instant;

/// Bytes a second that all cores together read from memory: the best of a few passes over a buffer
/// larger than any cache. Takes some tens of milliseconds.
pub fn measure_bandwidth() -> f64 {
    const BYTES: usize = 256 << 20;
    let memory = vec![1u64; BYTES / 8];
    let mut best: f64 = 0.0;
    for _ in 0..4 {
        let start = Instant::now();
        let sum: u64 = memory
            .par_chunks(1 << 17)
            .map(|part| part.iter().fold(0u64, |sum, &word| sum.wrapping_add(word)))
            .reduce(|| 0, u64::wrapping_add);
        black_box(sum);
        best = best.max(BYTES as f64 / start.elapsed().as_secs_f64());
    }
    best
}
