//! Sampling parameters as the kernel reads them: kernels/sampling.h.

use lily_plan::SamplingRow;

/// Words of a row's parameters.
const ROW_WORDS: usize = 20;
/// Words of a change of one logit.
const ADJUSTMENT_WORDS: usize = 4;

const IS_GREEDY: u32 = 1;
const HAS_SHARE: u32 = 2;
const HAS_MASK: u32 = 4;
const HAS_PENALTIES: u32 = 8;
const HAS_BIAS: u32 = 1;
const IN_HISTORY: u32 = 2;
const HISTORY_SHIFT: u32 = 2;

/// Tokens that the device can add to a row's history by itself.
const FURTHER_TOKENS: usize = 64;

/// Runs that can follow one another by what was written for the first: the device knows penalties by
/// [`FURTHER_TOKENS`], and no mask but the first.
pub(crate) fn most_runs(sampling: &[SamplingRow<'_>]) -> usize {
    let of = |row: &SamplingRow<'_>| match row {
        row if row.allowed.is_some() => 1,
        row if row.parameters.has_penalties() => FURTHER_TOKENS,
        _ => usize::MAX,
    };
    sampling.iter().map(of).min().unwrap_or(usize::MAX)
}

/// Bytes of `rows` rows without changes of single logits and masks.
pub(crate) fn least_bytes(rows: usize) -> usize {
    rows * ROW_WORDS * 4
}

/// A launch's parameters for a plan of `rows` rows: all rows', then all changes of logits, then all masks.
pub(crate) fn encode(sampling: &[SamplingRow<'_>], rows: usize) -> Vec<u8> {
    let mut words = vec![0; rows * ROW_WORDS];
    for index in 0..rows {
        let row = sampling.get(index).copied().unwrap_or_default();
        let adjustments = words.len();
        for adjustment in row.adjustments() {
            words.extend([
                adjustment.token,
                adjustment.bias.unwrap_or(0.0).to_bits(),
                adjustment.subtracted.unwrap_or(0.0).to_bits(),
                adjustment.bias.map_or(0, |_| HAS_BIAS)
                    | adjustment.subtracted.map_or(0, |_| IN_HISTORY)
                    | adjustment.count << HISTORY_SHIFT,
            ]);
        }
        let count = (words.len() - adjustments) / ADJUSTMENT_WORDS;
        if row.parameters.has_penalties() {
            words.resize(words.len() + FURTHER_TOKENS * ADJUSTMENT_WORDS, 0);
        }
        let mask = words.len();
        words.extend(row.allowed.unwrap_or(&[]));
        // Changes of logits are read four words at once.
        words.resize(words.len().next_multiple_of(4), 0);
        let header = header(&row, [adjustments, count, mask]);
        words[index * ROW_WORDS..][..ROW_WORDS].copy_from_slice(&header);
    }
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// `SamplingRow` of kernels/sampling.h.
fn header(row: &SamplingRow<'_>, places: [usize; 3]) -> [u32; ROW_WORDS] {
    let parameters = row.parameters;
    let is_greedy = parameters.temperature == 0.0;
    let scale = if is_greedy {
        1.0
    } else {
        // Beyond that every logit but the best has weight 0.
        (std::f64::consts::LOG2_E / f64::from(parameters.temperature)).min(f64::from(f32::MAX))
    };
    let scale_high = scale as f32;
    let scale_low = (scale - f64::from(scale_high)) as f32;
    let share = f64::from(parameters.top_p) * 2.0_f64.powi(64);
    let most_power = if parameters.min_p > 0.0 {
        -f64::from(parameters.min_p).log2() * 2.0_f64.powi(32)
    } else {
        f64::INFINITY
    };
    let mut flags = 0;
    for (is_set, flag) in [
        (is_greedy, IS_GREEDY),
        (parameters.top_p < 1.0, HAS_SHARE),
        (row.allowed.is_some(), HAS_MASK),
        (parameters.has_penalties(), HAS_PENALTIES),
    ] {
        flags |= if is_set { flag } else { 0 };
    }
    // As casts do: to the nearest that there is.
    let [share_low, share_high] = halves(share as u64);
    let [power_low, power_high] = halves(most_power as u64);
    let [seed_low, seed_high] = halves(parameters.seed);
    let [step_low, step_high] = halves(row.step);
    let [adjustments, count, mask] = places.map(|place| place as u32);
    [
        scale_high.to_bits(),
        scale_low.to_bits(),
        parameters.repetition_penalty.to_bits(),
        flags,
        parameters.top_k.unwrap_or(0),
        0,
        share_low,
        share_high,
        power_low,
        power_high,
        seed_low,
        seed_high,
        step_low,
        step_high,
        adjustments,
        count,
        mask,
        parameters.presence_penalty.to_bits(),
        parameters.frequency_penalty.to_bits(),
        0,
    ]
}

fn halves(number: u64) -> [u32; 2] {
    [number as u32, (number >> 32) as u32]
}
