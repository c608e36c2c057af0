//! Which form of a kernel runs: pure functions of shapes, and the thresholds with where they come from.

/// Cores that a grid should fill: the largest Apple GPU of the Max class has 40.
const CORES: usize = 40;
/// Threadgroups a core that hide one another's latency.
const THREADGROUPS_A_CORE: usize = 2;

/// Activation rows that one threadgroup of a matrix-vector product computes together.
pub fn vector_rows(rows: usize) -> usize {
    match rows {
        0 | 1 => 1,
        2 => 2,
        3 | 4 => 4,
        _ => 8,
    }
}

/// Simdgroups of a threadgroup of a matrix-vector product with `blocks` blocks of four weight rows (times `times`
/// for its other grid dimensions): as many as leave two threadgroups a core, since they share their staged
/// activations. By counting; not tuned on a device.
pub fn vector_simdgroups(blocks: usize, times: usize) -> usize {
    [8, 4]
        .into_iter()
        .find(|simdgroups| blocks.div_ceil(*simdgroups) * times >= CORES * THREADGROUPS_A_CORE)
        .unwrap_or(2)
}

/// A form of the matrix path: activation rows of a tile and threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TileForm {
    /// Rows of a tile.
    pub rows: usize,
    /// Threads of its threadgroup (kernels/tile.h).
    pub threads: usize,
}

/// Tiles of 16, 32 and 64 rows.
const TILES: [TileForm; 3] = [
    TileForm {
        rows: 16,
        threads: 64,
    },
    TileForm {
        rows: 32,
        threads: 128,
    },
    TileForm {
        rows: 64,
        threads: 128,
    },
];

/// The tile of a dense product of `rows` rows: the smallest that takes them in one, or the largest.
pub fn dense_tile(rows: usize) -> TileForm {
    TILES
        .into_iter()
        .find(|tile| rows <= tile.rows)
        .unwrap_or(TILES[2])
}

/// The tile of a product of `pairs` pairs with their experts: the largest that an expert fills on average, since the
/// rest of a tile is computed in vain; 16 rows at least. By counting; not tuned on a device.
pub fn expert_tile(pairs: usize, experts: usize) -> TileForm {
    let load = pairs / experts;
    TILES
        .into_iter()
        .rev()
        .find(|tile| load >= tile.rows)
        .unwrap_or(TILES[0])
}

/// Whether Gated DeltaNet may take a run by chunks of 32 tokens on simdgroup matrices instead of row by row. A chunk
/// costs the same however few its rows are: by counting 5,184 multiplications of a lane, and a row of the scan 128 and a
/// sum over lanes. So a run should fill one. Key and value widths are in eights there.
/// By counting the scan is the shorter one for whole chunks, too, unless matrix units are faster than lanes: hence
/// [`Switches::chunked_scan`](crate::Switches::chunked_scan) is off, until it is measured otherwise.
pub fn scans_by_chunks(rows: usize, widths: [usize; 2]) -> bool {
    rows >= 32 && widths.iter().all(|width| width.is_multiple_of(8))
}

/// Query heads of a KV head that are packed into a threadgroup of attention: up to four, which is what its
/// registers and threadgroup memory hold.
pub fn packed_heads(group: usize, packing: bool) -> usize {
    let most = if packing { 4 } else { 1 };
    [4, 2, 1]
        .into_iter()
        .find(|heads| *heads <= most && group.is_multiple_of(*heads))
        .unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_go_into_the_smallest_form_that_holds_them() {
        assert_eq!(
            [1, 2, 3, 4, 5, 8, 9].map(vector_rows),
            [1, 2, 4, 4, 8, 8, 8]
        );
    }

    #[test]
    fn threadgroups_are_large_only_where_there_are_enough() {
        // 80 threadgroups of 8, of 4, and fewer.
        assert_eq!(
            [640, 633, 632, 320, 316].map(|b| vector_simdgroups(b, 1)),
            [8, 8, 4, 4, 2]
        );
        assert_eq!(vector_simdgroups(128, 8), 8);
    }

    #[test]
    fn tiles_follow_rows_and_load() {
        assert_eq!(
            [1, 16, 17, 32, 33, 512].map(|rows| dense_tile(rows).rows),
            [16, 16, 32, 32, 64, 64]
        );
        // 8 choices of 512 rows over 256 experts are 16 each.
        let rows_of = |pairs| expert_tile(pairs, 256).rows;
        assert_eq!(
            [8, 4_096, 8_191, 8_192, 16_383, 16_384].map(rows_of),
            [16, 16, 16, 32, 32, 64]
        );
    }

    #[test]
    fn chunks_need_rows_that_fill_one() {
        assert_eq!(
            [1, 31, 32, 512].map(|rows| scans_by_chunks(rows, [128, 128])),
            [false, false, true, true]
        );
        assert!(!scans_by_chunks(512, [128, 44]) && !scans_by_chunks(512, [20, 48]));
    }

    #[test]
    fn packed_heads_divide_the_group() {
        assert_eq!(
            [8, 4, 6, 3, 1].map(|group| packed_heads(group, true)),
            [4, 4, 2, 1, 1]
        );
        assert_eq!(packed_heads(8, false), 1);
    }
}
