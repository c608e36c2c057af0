//! Routes: which shape of work runs, decided by pure functions of what is known when a plan is
//! recorded. The thresholds live here, with where they came from.

/// Contexts up to each bound share a decode plan, with the block length of its partial attention.
///
/// Blocks are what a decode step's attention is spread over: short enough that each context of a band gives several
/// threadgroups a core (33 blocks of two KV heads and two packs of query heads are 132), long enough that the partial
/// results are few: with the dimensions of Qwen3.6-35B-A3B in bf16 they are 6.3 %, 3.2 % and 0.8 % of the cache bytes
/// that they stand for (and are read once more). Chosen by counting. On an H200, blocks of 4,096 in the longest band
/// gave a context of 32,769 tokens 36 threadgroups, and a token took 7.2 ms where one at 16,384 took 3.6.
const CONTEXT_BANDS: [(usize, usize); 3] = [(4_096, 128), (32_768, 256), (262_144, 1_024)];

/// Sessions that one decode plan serves.
pub const DECODE_ROWS: [usize; 4] = [1, 2, 4, 8];

/// The most of [`DECODE_ROWS`].
pub const MOST_DECODE_ROWS: usize = 8;

/// Tokens of a prefill chunk unless told otherwise: long enough that dequantising a weight tile is
/// shared by hundreds of rows, short enough that the chunk's activations stay in cache on a CPU.
pub const PREFILL_CHUNK: usize = 512;

/// The upper end of the band that a context of `tokens` positions falls in.
pub fn context_band(tokens: usize) -> usize {
    CONTEXT_BANDS
        .iter()
        .map(|&(bound, _)| bound)
        .find(|&bound| tokens <= bound)
        .unwrap_or_else(|| tokens.next_power_of_two())
}

/// Positions a block of partial attention in a plan for contexts up to `context`.
pub fn attention_block_length(context: usize) -> usize {
    CONTEXT_BANDS
        .iter()
        .find(|&&(bound, _)| context <= bound)
        .map_or(context.div_ceil(64), |&(_, length)| length)
}

/// The plan class for `rows` decoding sessions: the smallest that holds them.
pub fn decode_rows(rows: usize) -> Option<usize> {
    DECODE_ROWS.into_iter().find(|&class| rows <= class)
}

/// Where the prefill chunk that begins at `position` ends: at the next multiple of `chunk`, or at
/// `end`. The grid is absolute, so segmentation does not depend on what was cached.
pub fn chunk_end(position: usize, end: usize, chunk: usize) -> usize {
    ((position / chunk + 1) * chunk).min(end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bands_and_blocks_change_exactly_at_their_bounds() {
        assert_eq!([1, 4_096].map(context_band), [4_096; 2]);
        assert_eq!([4_097, 32_768].map(context_band), [32_768; 2]);
        assert_eq!([32_769, 262_144].map(context_band), [262_144; 2]);
        assert_eq!(context_band(262_145), 524_288);
        assert_eq!([4_096, 4_097].map(attention_block_length), [128, 256]);
        assert_eq!([32_768, 32_769].map(attention_block_length), [256, 1_024]);
        assert_eq!(attention_block_length(524_288), 8_192);
    }

    #[test]
    fn decode_classes_hold_their_rows() {
        assert_eq!(
            [1, 2, 3, 4, 5, 8].map(decode_rows),
            [1, 2, 4, 4, 8, 8].map(Some)
        );
        assert_eq!(decode_rows(9), None);
    }

    #[test]
    fn the_chunk_grid_is_absolute() {
        assert_eq!(chunk_end(0, 1_000, 512), 512);
        assert_eq!(chunk_end(512, 1_000, 512), 1_000);
        assert_eq!(chunk_end(100, 1_000, 512), 512);
        assert_eq!(chunk_end(511, 1_000, 512), 512);
        assert_eq!(chunk_end(3, 7, 512), 7);
    }
}
