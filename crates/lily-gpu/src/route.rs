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
    fn packed_heads_divide_the_group() {
        assert_eq!(
            [8, 4, 6, 3, 1].map(|group| packed_heads(group, true)),
            [4, 4, 2, 1, 1]
        );
        assert_eq!(packed_heads(8, false), 1);
    }
}
