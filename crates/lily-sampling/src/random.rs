//! Random numbers without state: a number is a function of a seed and a position.
//!
//! A generator with state would tie a token to every number drawn before it. With a counter-based one, a
//! step can be repeated, skipped or taken back, and a kernel on another device computes the same number
//! from the same two integers, with 32-bit multiplications only.

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const KEY_INCREMENTS: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: usize = 10;

/// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", 2011): four
/// random words from a counter of four words and a key of two.
#[must_use]
pub fn philox4x32_10(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..ROUNDS {
        let first = u64::from(MULTIPLIERS[0]) * u64::from(counter[0]);
        let second = u64::from(MULTIPLIERS[1]) * u64::from(counter[2]);
        counter = [
            high(second) ^ counter[1] ^ key[0],
            low(second),
            high(first) ^ counter[3] ^ key[1],
            low(first),
        ];
        key[0] = key[0].wrapping_add(KEY_INCREMENTS[0]);
        key[1] = key[1].wrapping_add(KEY_INCREMENTS[1]);
    }
    counter
}

/// The random number of a step: uniform over the multiples of 2^-53 in [0, 1).
///
/// The seed is the key and the step the counter. The first word gives the leading bits, so that a device
/// without 64-bit floating point gets nearly the same number from that word alone.
#[must_use]
pub fn uniform(seed: u64, step: u64) -> f64 {
    let words = philox4x32_10([low(step), high(step), 0, 0], [low(seed), high(seed)]);
    let bits = (u64::from(words[0]) << 32) | u64::from(words[1]);
    // 53 bits are what the format holds: a 64-bit fraction could round up to 1.
    (bits >> 11) as f64 * (1.0 / (1_u64 << 53) as f64)
}

fn low(word: u64) -> u32 {
    word as u32
}

fn high(word: u64) -> u32 {
    (word >> 32) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known answers that the authors publish with Random123 (`kat_vectors`).
    #[test]
    fn philox_gives_the_published_answers() {
        assert_eq!(
            philox4x32_10([0; 4], [0; 2]),
            [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]
        );
        assert_eq!(
            philox4x32_10([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        assert_eq!(
            philox4x32_10(
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0]
            ),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn the_number_of_a_step_is_made_of_the_first_two_words() {
        // From the first published answer: 0x6627e8d5_e169c58d / 2^64, cut to 53 bits.
        let expected = (0x6627_e8d5_e169_c58d_u64 >> 11) as f64 / 9_007_199_254_740_992.0;
        assert_eq!(uniform(0, 0), expected);
        assert!((uniform(0, 0) - 0.399_046).abs() < 1e-6);
    }

    #[test]
    fn all_bits_of_seed_and_step_count() {
        let number = uniform(0, 0);
        for bit in 0..64 {
            assert_ne!(uniform(1 << bit, 0), number, "bit {bit} of the seed");
            assert_ne!(uniform(0, 1 << bit), number, "bit {bit} of the step");
        }
    }

    #[test]
    fn numbers_lie_in_the_unit_interval_and_are_even() {
        let mut buckets = [0_u32; 16];
        for step in 0..16_000 {
            let number = uniform(7, step);
            assert!((0.0..1.0).contains(&number));
            buckets[(number * 16.0) as usize] += 1;
        }
        let statistic: f64 = buckets
            .iter()
            .map(|&count| (f64::from(count) - 1000.0).powi(2) / 1000.0)
            .sum();
        // The 99.9% point of chi-square with 15 degrees of freedom.
        assert!(statistic < 37.7, "chi-square {statistic}");
    }
}
