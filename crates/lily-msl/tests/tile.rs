//! Matrix tiles of prefill (kernels/tile.h and what includes it) against plain loops in f64: every size of tile, on
//! simdgroup matrices and on tensor operations, over shapes that straddle the edges of tiles.

mod common;
#[path = "common/kernels.rs"]
mod kernels;
#[path = "common/tiles.rs"]
mod tiles;

use kernels::{compile, number, sources};
use lily_msl::{BuildKind, FaultKind, Schedule, removable_barriers};
use tiles::{Dense, Experts, plain};

/// The function constant that takes barriers away.
const REMOVED: u32 = 63;

#[test]
fn dense_products_over_the_edges_of_tiles() {
    for rows in [1, 15, 16, 17, 33, 64, 65] {
        let outputs = [(130, 4, true), (1, 8, false), (64, 4, false), (63, 8, true)];
        Dense::new(rows, 128, &outputs).test(false);
    }
    for outputs in [1, 63, 64, 65, 130] {
        Dense::new(18, 64, &[(outputs, 4, false)]).test(outputs == 65);
        Dense::new(3, 192, &[(outputs, 8, true)])
            .with_residual()
            .test(outputs == 130);
    }
    Dense::new(17, 2048, &[(33, 4, false)]).test(false);
}

#[test]
fn gated_pairs_and_residuals() {
    // The gated output first, in between and alone; gate and up of different bits.
    Dense::new(33, 128, &[(70, 4, true), (1, 8, false)])
        .gated(0, 4)
        .test(true);
    Dense::new(17, 64, &[(5, 8, false), (96, 4, false), (66, 4, true)])
        .gated(1, 8)
        .test(false);
    Dense::new(65, 64, &[(31, 8, true)])
        .gated(0, 4)
        .with_residual()
        .test(false);
    Dense::new(34, 128, &[(68, 4, false)])
        .with_residual()
        .test(true);
    // Weights that are dequantised already.
    Dense::new(34, 128, &[(67, 16, true), (5, 16, false), (40, 16, false)])
        .gated(1, 16)
        .with_residual()
        .test(true);
}

#[test]
fn a_row_does_not_depend_on_its_neighbours() {
    let all = Dense::new(40, 128, &[(40, 4, false)]);
    let order = Schedule::ProgramOrder;
    let library = plain("tile.metal");
    let together = all
        .run(library, "tile_project_32", 32, &[], order)
        .expect("a result");
    for row in [0, 13, 39] {
        let mut alone = Dense::new(40, 128, &[(40, 4, false)]);
        alone.rows = 1;
        alone.input.0 = all.input.0[row * 128..][..128].to_vec();
        let result = alone
            .run(library, "tile_project_64", 64, &[], order)
            .expect("a result");
        assert_eq!(result[0][..160], together[0][row * 160..][..160]);
    }
}

#[test]
fn experts_with_any_number_of_pairs() {
    // Experts without pairs, with exactly a tile of each size, and with one pair more or less.
    Experts::new(&[0, 16, 1, 0, 32, 15, 17, 0], 3, 64, 66, 4).test(false);
    Experts::new(&[64, 0, 65, 1], 2, 64, 36, 8)
        .gated(4)
        .test(false);
    // All rows to one expert: the first, the last.
    Experts::new(&[33, 0, 0], 1, 128, 63, 4).gated(8).test(true);
    Experts::new(&[0, 0, 0, 0, 130], 1, 64, 20, 4).test(false);
    // Many experts: more than a simdgroup sees at once.
    let mut sizes = vec![0; 70];
    (sizes[31], sizes[32], sizes[69]) = (2, 18, 1);
    Experts::new(&sizes, 1, 64, 4, 4).test(false);
    // The second product: a row for each pair.
    Experts::new(&[5, 0, 19], 2, 128, 65, 4)
        .with_own_rows()
        .test(true);
    Experts::new(&[1], 1, 192, 1, 8).with_own_rows().test(false);
    // Weights that are dequantised already.
    Experts::new(&[3, 0, 18], 2, 128, 37, 16)
        .gated(16)
        .test(true);
    Experts::new(&[17], 1, 64, 66, 16)
        .with_own_rows()
        .test(false);
}

#[test]
fn no_races_and_nothing_out_of_bounds() {
    // Outputs and rows that end within a tile, so that a read behind a matrix would be seen.
    let library = compile(&sources(), "tile_experts.metal", BuildKind::Race);
    for (size, schedule, bits) in [
        (16, Schedule::Shuffled(1), [4, 8]),
        (32, Schedule::ProgramOrder, [4, 8]),
        (32, Schedule::ProgramOrder, [16, 16]),
        (64, Schedule::Shuffled(2), [4, 8]),
    ] {
        let experts = Experts::new(&[0, 17, 1], 2, 128, 37, bits[0]).gated(bits[1]);
        let kernel = format!("tile_experts_{size}");
        match experts.run(&library, &kernel, size, schedule) {
            Ok(output) => experts.check(&kernel, &output),
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn a_removed_barrier_is_found() {
    let all = sources();
    let (mutants, barriers) = removable_barriers(all.get("tile.h").expect("a header"), REMOVED);
    assert_eq!(barriers, 4);
    let library = compile(&all.with("tile.h", &mutants), "tile.metal", BuildKind::Race);
    let dense = Dense::new(17, 128, &[(33, 4, false), (3, 8, true)])
        .gated(0, 4)
        .with_residual();
    for (size, schedule) in [
        (16, Schedule::Shuffled(3)),
        (32, Schedule::Shuffled(4)),
        (64, Schedule::ProgramOrder),
    ] {
        let kernel = format!("tile_project_{size}");
        let run = |removed| {
            dense.run(
                &library,
                &kernel,
                size,
                &[number(REMOVED, removed)],
                schedule,
            )
        };
        match run(barriers as usize) {
            Ok(outputs) => dense.check(&kernel, &outputs),
            Err(error) => panic!("{error}"),
        }
        for removed in 0..barriers as usize {
            let kind = run(removed)
                .err()
                .and_then(|error| error.fault().map(|fault| fault.kind));
            assert!(
                matches!(kind, Some(FaultKind::Race | FaultKind::Uninitialised)),
                "barrier {removed} of {kernel} can go unnoticed: {kind:?}"
            );
        }
    }
}
