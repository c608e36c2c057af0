//! The tokens that a draw may choose from, and the filters that shorten them.

/// Keys are summed and drawn in blocks of this many, so that a draw walks one block and not all of them.
const BLOCK: usize = 1024;
/// Passes over all logits look at this many at once, to skip those that hold nothing good enough.
const CHUNK: usize = 16;
/// A selection by mass sorts when this few keys are left to decide between.
const SORTED_TAIL: usize = 64;
/// Top-p without top-k looks for its tokens among this many best ones, then among more, then among all.
/// Peaked distributions, the usual ones, end in the first list, which one cheap pass fills.
const NUCLEUS_LISTS: [usize; 2] = [256, 8192];
/// Above this length a pass over all logits orders a list by token faster than sorting does.
const SORTABLE: usize = 16_384;

/// The running list of candidates, with the scale that turns a logit into a weight.
///
/// A candidate is one integer: the logit's bits, turned so that better logits make smaller integers, above
/// the token. Comparing two integers is then the whole ranking: better logit first, and among equal ones
/// the lower token. No two candidates are equal, so every selection has one right answer.
#[derive(Debug, Clone, Default)]
pub(crate) struct Candidates {
    keys: Vec<u64>,
    block_masses: Vec<f64>,
}

/// The weights of a temperature-scaled distribution, relative to the best logit, whose weight is 1.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scale {
    best: f64,
    inverse_temperature: f64,
}

impl Scale {
    pub(crate) fn new(best: f32, temperature: f32) -> Self {
        Self {
            best: f64::from(best),
            inverse_temperature: 1.0 / f64::from(temperature),
        }
    }

    /// The weight of a logit: 1 for the best, 0 for an excluded one.
    pub(crate) fn weight(self, logit: f32) -> f64 {
        self.weights([logit])[0]
    }

    #[inline]
    fn weights<const LANES: usize>(self, logits: [f32; LANES]) -> [f64; LANES] {
        exponentials(logits.map(|logit| (f64::from(logit) - self.best) * self.inverse_temperature))
    }

    /// The sum of the weights of logits.
    pub(crate) fn mass(self, logits: &[f32]) -> f64 {
        self.sum_of_weights(logits, |logit| logit)
    }

    fn mass_of_keys(self, keys: &[u64]) -> f64 {
        self.sum_of_weights(keys, logit_of)
    }

    /// A sum in eight interleaved parts: it rounds less than a running sum, and the compiler may use vector
    /// instructions, which the order of a running sum forbids. The order is the same on every machine.
    #[inline]
    fn sum_of_weights<Item: Copy>(self, items: &[Item], logit: impl Fn(Item) -> f32) -> f64 {
        let mut lanes = [0.0; 8];
        let (chunks, rest) = items.as_chunks::<8>();
        for chunk in chunks {
            let weights = self.weights(chunk.map(&logit));
            for (lane, weight) in lanes.iter_mut().zip(weights) {
                *lane += weight;
            }
        }
        for (lane, &item) in lanes.iter_mut().zip(rest) {
            *lane += self.weight(logit(item));
        }
        lanes.iter().sum()
    }
}

impl Candidates {
    /// The tokens and logits of the list.
    pub(crate) fn iter(&self) -> impl ExactSizeIterator<Item = (u32, f32)> + '_ {
        self.keys.iter().map(|&key| (token_of(key), logit_of(key)))
    }

    /// Takes every token whose logit is not negative infinity, in ascending order.
    pub(crate) fn take_all(&mut self, logits: &[f32]) {
        self.take_above(logits, f32::NEG_INFINITY);
    }

    /// Takes every token whose logit is above a bar, in ascending order.
    fn take_above(&mut self, logits: &[f32], bar: f32) {
        self.keys.clear();
        for (first, chunk) in (0_u32..).step_by(CHUNK).zip(logits.chunks(CHUNK)) {
            // Where the bar is high, nearly every chunk fails this test, and it has no branch inside.
            if chunk.iter().fold(false, |any, &logit| any | (logit > bar)) {
                self.push_above(first, chunk, bar);
            }
        }
    }

    fn push_above(&mut self, first: u32, chunk: &[f32], bar: f32) {
        for (token, &logit) in (first..).zip(chunk) {
            if logit > bar {
                self.keys.push(key_of(logit, token));
            }
        }
    }

    /// Takes the `count` best tokens, or all if there are fewer, in no particular order.
    pub(crate) fn take_best(&mut self, logits: &[f32], count: usize) {
        if count >= logits.len() {
            return self.take_all(logits);
        }
        self.keys.clear();
        if count == 0 {
            return;
        }
        // The list may grow to twice the count before it is cut back, so that a cut, which is linear in the
        // list, is paid for by as many tokens taken: the pass stays linear even when logits ascend.
        let full = (2 * count).max(BLOCK);
        // Tokens come in ascending order, so one that only equals the last of `count` better or equal ones
        // already loses to it: it must be strictly above the bar.
        let mut bar = f32::NEG_INFINITY;
        for (first, chunk) in (0_u32..).step_by(CHUNK).zip(logits.chunks(CHUNK)) {
            if !chunk.iter().fold(false, |any, &logit| any | (logit > bar)) {
                continue;
            }
            self.push_above(first, chunk, bar);
            if self.keys.len() >= full {
                self.cut_to_best(count);
                bar = logit_of(self.keys[count - 1]);
            }
        }
        self.cut_to_best(count);
    }

    /// Keeps the best `count` keys; the last of them is then the worst.
    fn cut_to_best(&mut self, count: usize) {
        if self.keys.len() > count {
            self.keys.select_nth_unstable(count - 1);
            self.keys.truncate(count);
        }
    }

    /// Top-p over the list as it stands, as after top-k.
    pub(crate) fn keep_share(&mut self, share: f64, scale: Scale) {
        let total = scale.mass_of_keys(&self.keys);
        self.keep_mass(share * total, scale);
    }

    /// Top-p over all logits: fills the list with the fewest best tokens that hold the share.
    pub(crate) fn take_share(&mut self, logits: &[f32], share: f64, scale: Scale) {
        let target = share * scale.mass(logits);
        for count in NUCLEUS_LISTS {
            if count >= logits.len() {
                break;
            }
            self.take_best(logits, count);
            if scale.mass_of_keys(&self.keys) >= target {
                return self.keep_mass(target, scale);
            }
        }
        self.take_all(logits);
        self.keep_mass(target, scale);
    }

    /// Keeps the fewest best keys whose mass reaches the target, and at least one: a selection like
    /// quickselect, with mass in the place of rank. Each round halves the undecided range, so all rounds
    /// together cost as much as the first two.
    fn keep_mass(&mut self, target: f64, scale: Scale) {
        // Everything before `start` is kept, everything from `end` on is not needed.
        let (mut start, mut end) = (0, self.keys.len());
        let mut mass = 0.0;
        while end - start > SORTED_TAIL {
            let half = (end - start) / 2;
            self.keys[start..end].select_nth_unstable(half - 1);
            let better = scale.mass_of_keys(&self.keys[start..start + half]);
            if mass + better >= target {
                end = start + half;
            } else {
                mass += better;
                start += half;
            }
        }
        self.keys[start..end].sort_unstable();
        let mut kept = start;
        while kept < end {
            mass += scale.weight(logit_of(self.keys[kept]));
            kept += 1;
            if mass >= target {
                break;
            }
        }
        self.keys.truncate(kept);
    }

    /// Takes every token that min-p may keep: most are out by so much that a comparison of logits shows it.
    /// About the rest the weight decides, in [`keep_above_part`](Self::keep_above_part).
    pub(crate) fn take_near_best(&mut self, logits: &[f32], part_of_best: f64, scale: Scale) {
        let bar = scale.best + part_of_best.ln() / scale.inverse_temperature;
        // Far more than rounding could amount to.
        let margin = 1e-3 * (1.0 + bar.abs() + scale.best.abs());
        self.take_above(logits, (bar - margin) as f32);
    }

    /// Min-p: keeps the keys whose weight is at least the given part of the best one's.
    pub(crate) fn keep_above_part(&mut self, part_of_best: f64, scale: Scale) {
        self.keys
            .retain(|&key| scale.weight(logit_of(key)) >= part_of_best);
    }

    /// Orders the list by token: the order in which a draw walks it must depend on which tokens are left,
    /// and not on how a selection happened to leave them. The logits are those that the list was taken from.
    pub(crate) fn order_by_token(&mut self, logits: &[f32]) {
        if self
            .keys
            .is_sorted_by(|&left, &right| token_of(left) < token_of(right))
        {
            return;
        }
        if self.keys.len() <= SORTABLE {
            self.keys.sort_unstable_by_key(|&key| token_of(key));
        } else if let Some(&worst) = self.keys.iter().max() {
            // Filters keep the head of the ranking, so the worst key says which tokens are in.
            self.take_all(logits);
            self.keys.retain(|&key| key <= worst);
        }
    }

    /// Orders the list by rank: best first.
    pub(crate) fn order_by_rank(&mut self) {
        self.keys.sort_unstable();
    }

    /// The sum of the list's weights.
    pub(crate) fn total(&self, scale: Scale) -> f64 {
        scale.mass_of_keys(&self.keys)
    }

    /// The token at which the running sum of weights passes the given part of the total, `part` in [0, 1).
    /// `None` for an empty list.
    pub(crate) fn draw(&mut self, part: f64, scale: Scale) -> Option<u32> {
        self.block_masses.clear();
        self.block_masses.extend(
            self.keys
                .chunks(BLOCK)
                .map(|block| scale.mass_of_keys(block)),
        );
        let target = part * self.block_masses.iter().sum::<f64>();
        // Strictly above, here and below: a token of weight 0 must not be drawn, even by a part of 0. Where
        // rounding keeps a sum from passing the target, the last token of positive weight is the one.
        let mut before = 0.0;
        let mut found = None;
        for (block, &mass) in self.keys.chunks(BLOCK).zip(&self.block_masses) {
            if mass > 0.0 {
                found = Some((block, before));
            }
            before += mass;
            if before > target {
                break;
            }
        }
        let (block, mut sum) = found?;
        let mut token = None;
        for &key in block {
            let weight = scale.weight(logit_of(key));
            if weight > 0.0 {
                token = Some(token_of(key));
            }
            sum += weight;
            if sum > target {
                break;
            }
        }
        token
    }
}

fn key_of(logit: f32, token: u32) -> u64 {
    // Adding zero makes the two zeros one, which would else rank apart.
    let bits = (logit + 0.0).to_bits();
    // Integers ordered as the numbers are, then complemented: negative numbers' bits descend.
    let descending = if bits >> 31 == 0 {
        !(bits | 0x8000_0000)
    } else {
        bits
    };
    (u64::from(descending) << 32) | u64::from(token)
}

fn token_of(key: u64) -> u32 {
    key as u32
}

#[inline]
fn logit_of(key: u64) -> f32 {
    let descending = (key >> 32) as u32;
    f32::from_bits(if descending >> 31 == 0 {
        !descending & 0x7fff_ffff
    } else {
        descending
    })
}

/// e to the powers of numbers that are not positive, to a few units in the last place; 0 below -708, where
/// results leave the normal range.
///
/// The standard library's function is the platform's: its last bit differs between systems, and with it,
/// now and then, a token. This one has the same result everywhere. It has no branch or call, and takes each
/// step for all lanes before the next, so that a sum over the vocabulary is computed with vector instructions.
#[inline]
fn exponentials<const LANES: usize>(powers: [f64; LANES]) -> [f64; LANES] {
    const LOWEST: f64 = -708.0;
    // Adding 1.5 * 2^52 rounds to a whole number and leaves it in the low bits.
    const ROUNDER: f64 = 6_755_399_441_055_744.0;
    // ln 2 in two parts: products of the first with the whole numbers that occur here are exact.
    const LN_2_HIGH: f64 = 6.931_471_803_691_238e-1;
    const LN_2_LOW: f64 = 1.908_214_929_270_587_7e-10;
    // 1/13!, 1/12!, ..., 1/1!, 1/0!: for arguments within half of ln 2 the next term is below the rounding.
    const COEFFICIENTS: [f64; 14] = [
        1.0 / 6_227_020_800.0,
        1.0 / 479_001_600.0,
        1.0 / 39_916_800.0,
        1.0 / 3_628_800.0,
        1.0 / 362_880.0,
        1.0 / 40_320.0,
        1.0 / 5_040.0,
        1.0 / 720.0,
        1.0 / 120.0,
        1.0 / 24.0,
        1.0 / 6.0,
        0.5,
        1.0,
        1.0,
    ];
    let clamped = powers.map(|power| if power < LOWEST { LOWEST } else { power });
    let rounded = clamped.map(|power| power * std::f64::consts::LOG2_E + ROUNDER);
    let mut rest = [0.0; LANES];
    for lane in 0..LANES {
        let twos = rounded[lane] - ROUNDER;
        rest[lane] = clamped[lane] - twos * LN_2_HIGH - twos * LN_2_LOW;
    }
    let mut polynomial = [COEFFICIENTS[0]; LANES];
    for coefficient in &COEFFICIENTS[1..] {
        for lane in 0..LANES {
            polynomial[lane] = polynomial[lane] * rest[lane] + coefficient;
        }
    }
    let mut results = [0.0; LANES];
    for lane in 0..LANES {
        let power_of_two = f64::from_bits((rounded[lane].to_bits() << 52).wrapping_add(1023 << 52));
        let in_range = if powers[lane] < LOWEST {
            0.0
        } else {
            power_of_two
        };
        results[lane] = polynomial[lane] * in_range;
    }
    results
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::uniform;

    fn tokens(candidates: &Candidates) -> Vec<u32> {
        candidates.iter().map(|(token, _)| token).collect()
    }

    /// Logits from a coarse grid, so that equal ones are common.
    fn logits(count: usize, seed: u64) -> Vec<f32> {
        (0..count as u64)
            .map(|step| (uniform(seed, step) * 400.0).floor() as f32 / 16.0 - 12.0)
            .collect()
    }

    fn ranking(logits: &[f32]) -> Vec<u32> {
        let mut order: Vec<u32> = (0..logits.len() as u32).collect();
        // A stable sort: equal logits stay in the order of tokens.
        order.sort_by(|&left, &right| {
            logits[right as usize]
                .partial_cmp(&logits[left as usize])
                .unwrap()
        });
        order
    }

    #[test]
    fn keys_rank_better_logits_and_then_lower_tokens_first() {
        let ranked = [
            (f32::MAX, 9),
            (1.5, 0),
            (1.5, 1),
            (0.0, 2),
            (-0.0, 3),
            (0.0, 4),
            (-1e-40, 0),
            (-1.5, 0),
            (f32::MIN, 0),
            (f32::NEG_INFINITY, 0),
        ];
        for pair in ranked.windows(2) {
            assert!(key_of(pair[0].0, pair[0].1) < key_of(pair[1].0, pair[1].1));
        }
        for (logit, token) in ranked {
            let key = key_of(logit, token);
            assert_eq!((logit_of(key), token_of(key)), (logit, token));
        }
    }

    #[test]
    fn the_exponential_agrees_with_the_standard_library() {
        let one = |power| exponentials([power])[0];
        assert_eq!(one(0.0), 1.0);
        assert_eq!(one(-708.1), 0.0);
        assert_eq!(one(f64::NEG_INFINITY), 0.0);
        for step in 0..200_000 {
            let power = -708.0 * uniform(1, step).powi(3);
            let expected = power.exp();
            let error = (one(power) - expected).abs() / expected;
            assert!(error < 1e-15, "e^{power}: relative error {error}");
        }
    }

    #[test]
    fn the_best_are_the_head_of_a_sorted_ranking() {
        for (count, seed) in [(1_usize, 1), (17, 2), (4096, 3), (50_000, 4)] {
            let logits = logits(count, seed);
            let ranking = ranking(&logits);
            for best in [0, 1, 2, 20, 500, 1024, 3000, count - 1, count, count + 1] {
                let mut candidates = Candidates::default();
                candidates.take_best(&logits, best);
                candidates.order_by_rank();
                assert_eq!(tokens(&candidates), ranking[..best.min(count)]);
            }
        }
    }

    #[test]
    fn the_best_of_ascending_logits_are_the_last() {
        let logits: Vec<f32> = (0..20_000).map(|token| token as f32).collect();
        let mut candidates = Candidates::default();
        candidates.take_best(&logits, 3);
        candidates.order_by_rank();
        assert_eq!(tokens(&candidates), [19_999, 19_998, 19_997]);
    }

    /// Whatever list the search ends in, the short one, the longer one or all tokens, the result is the
    /// shortest head of the ranking that holds the share, ordered by token.
    #[test]
    fn a_share_is_the_shortest_head_that_holds_it() {
        let logits = logits(60_000, 5);
        let ranking = ranking(&logits);
        let best = logits[ranking[0] as usize];
        let mut lengths = Vec::new();
        for temperature in [0.05, 1.0, 3.0, 100.0] {
            let scale = Scale::new(best, temperature);
            let total: f64 = logits.iter().map(|&logit| scale.weight(logit)).sum();
            for share in [0.1, 0.5, 0.9, 0.999] {
                let mut head = 0;
                let mut sum = 0.0;
                while sum < share * total {
                    sum += scale.weight(logits[ranking[head] as usize]);
                    head += 1;
                }
                let mut expected = ranking[..head].to_vec();
                expected.sort_unstable();
                let mut candidates = Candidates::default();
                candidates.take_share(&logits, share, scale);
                candidates.order_by_token(&logits);
                assert_eq!(
                    tokens(&candidates),
                    expected,
                    "temperature {temperature}, share {share}"
                );
                lengths.push(head);
            }
        }
        // The cases reach all three lists and both ways of ordering by token.
        assert!(lengths.iter().any(|&length| length < 256));
        assert!(lengths.iter().any(|&length| (257..8192).contains(&length)));
        assert!(lengths.iter().any(|&length| length > SORTABLE));
    }

    #[test]
    fn a_draw_ends_at_tokens_of_positive_weight_whatever_the_number() {
        // The middle token underflows to weight 0, and so does a whole block before and after.
        let mut logits = vec![-1e6_f32; 3 * BLOCK];
        logits[BLOCK + 5] = 1.0;
        logits[BLOCK + 9] = 1.0;
        let mut candidates = Candidates::default();
        candidates.take_all(&logits);
        let scale = Scale::new(1.0, 1.0);
        let first = Some(BLOCK as u32 + 5);
        let last = Some(BLOCK as u32 + 9);
        assert_eq!(candidates.draw(0.0, scale), first);
        assert_eq!(candidates.draw(0.499, scale), first);
        assert_eq!(candidates.draw(0.5, scale), last);
        // The greatest number below 1, and 1 itself, which stands for a sum that rounding kept short.
        assert_eq!(candidates.draw(1.0 - f64::EPSILON / 2.0, scale), last);
        assert_eq!(candidates.draw(1.0, scale), last);
        assert_eq!(Candidates::default().draw(0.5, scale), None);
    }
}
