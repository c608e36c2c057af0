//! Which form of a kernel runs: pure functions of shapes, and the thresholds with where they come from.

/// Cores where a machine does not tell: those of the largest Apple GPU of the Max class.
const CORES: usize = 40;
/// Columns that a simdgroup takes at once (kernels/quantised.h, CHUNK).
const CHUNK: usize = 1_024;

/// Activation rows that one threadgroup of a matrix-vector product computes together.
pub fn vector_rows(rows: usize) -> usize {
    match rows {
        0 | 1 => 1,
        2 => 2,
        3 | 4 => 4,
        _ => 8,
    }
}

/// The shape of a threadgroup of a matrix-vector product (kernels/vector.h).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VectorShape {
    /// Simdgroups.
    pub simdgroups: usize,
    /// Simdgroups that share the columns of four weight rows.
    pub split: usize,
    /// Sets of blocks that it goes through.
    pub rounds: usize,
    /// Whether sums are reduced chunk by chunk, as where chunks are shared out.
    pub by_chunk: bool,
}

impl VectorShape {
    /// Blocks of four weight rows that a threadgroup computes.
    pub fn blocks(&self) -> usize {
        self.simdgroups / self.split * self.rounds
    }
}

/// The shape for `blocks` blocks of four weight rows of `columns` columns (`times` over: for each choice of an
/// expert), with `rows` activation rows together, on `cores` cores.
///
/// One row: eight simdgroups of a block each where that leaves two threadgroups a core, in as many rounds (8 at most)
/// as leave four a core, since they share what is staged; else four. Where even four leave fewer than one and a half
/// a core, simdgroups share the columns of a block. On an H200 with its 132, sharing out took 12 % from the attention
/// output's product (512 blocks of 4,096 columns) and 24 % from the router's (193 of 2,048), and cost 23 % in the
/// experts' (1,024), 27 % in the projections of Gated DeltaNet (3,088) and as much in the head (62,080).
pub fn vector_shape(
    columns: usize,
    blocks: usize,
    rows: usize,
    times: usize,
    cores: usize,
) -> VectorShape {
    let cores = cores.max(CORES);
    let chunks = columns.div_ceil(CHUNK).clamp(1, 4).next_power_of_two();
    let shared_out = columns > 4 * CHUNK || blocks.div_ceil(4) * times < cores + cores / 2;
    let split = if shared_out && rows == 1 { chunks } else { 1 };
    let with = |simdgroups, rounds| VectorShape {
        simdgroups,
        split,
        rounds,
        by_chunk: shared_out,
    };
    let threadgroups = |shape: VectorShape| blocks.div_ceil(shape.blocks()) * times;
    if threadgroups(with(8, 1)) < 2 * cores {
        return with(4, 1);
    }
    let most = if rows == 1 && split == 1 { 8 } else { 1 };
    let rounds = [8, 4, 2].into_iter().filter(|rounds| *rounds <= most);
    let mut shapes = rounds.map(|rounds| with(8, rounds));
    let many = shapes.find(|shape| threadgroups(*shape) >= 4 * cores);
    many.unwrap_or(with(8, 1))
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

/// Tiles of 16 rows, whatever there is to do.
pub fn small_tile() -> TileForm {
    TILES[0]
}

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
    fn columns_are_shared_out_where_blocks_are_few() {
        let shape = |columns, blocks| {
            let shape = vector_shape(columns, blocks, 1, 1, 0);
            (shape.simdgroups, shape.split, shape.rounds)
        };
        // On 40 cores: 59 threadgroups of four blocks, 60; 79 of eight, 80; then enough for two, four and eight rounds.
        let blocks = [236, 237, 632, 633, 2_545, 5_089, 10_177];
        let expected = [
            (4, 2, 1),
            (4, 1, 1),
            (4, 1, 1),
            (8, 1, 1),
            (8, 1, 2),
            (8, 1, 4),
            (8, 1, 8),
        ];
        assert_eq!(blocks.map(|count| shape(2_048, count)), expected);
        assert_eq!(
            [64, 1_024, 1_088, 4_096].map(|columns| shape(columns, 200).1),
            [1, 1, 2, 4]
        );
        assert_eq!(shape(9_000, 60_000).1, 4);
        // As measured: 132 cores.
        let of = |columns, blocks, times| vector_shape(columns, blocks, 1, times, 132).split;
        assert_eq!(
            [
                of(4_096, 512, 1),
                of(2_048, 193, 1),
                of(2_048, 128, 8),
                of(2_048, 3_088, 1)
            ],
            [4, 2, 1, 1]
        );
        // Several rows: no rounds, and sums in the same order as one row's.
        let rows = |blocks| vector_shape(2_048, blocks, 8, 1, 0);
        assert_eq!(
            [rows(236), rows(62_080)].map(|shape| (shape.split, shape.rounds)),
            [(1, 1); 2]
        );
        assert_eq!(
            [rows(236), rows(62_080)].map(|shape| shape.by_chunk),
            [true, false]
        );
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
