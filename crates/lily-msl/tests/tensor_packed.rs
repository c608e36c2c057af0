//! Tiles whose tensor operations take the weights' codes as they are (kernels/tensor_packed.h) against plain loops in
//! f64: weights are exact, and both widths of codes and every size of tile are tried, over the edges of tiles.

mod common;
#[path = "common/kernels.rs"]
mod kernels;
#[path = "common/tiles.rs"]
mod tiles;

use kernels::{compile, number, sources};
use lily_msl::{BuildKind, FaultKind, Schedule, removable_barriers};
use tiles::{Dense, Experts, SIZES, plain};

/// The function constant that takes barriers away.
const REMOVED: u32 = 63;

/// Every size of tile: right, and here (where a product's columns are summed in one order) the same to the bit.
fn check_dense(mut dense: Dense) {
    dense.exact = true;
    let mut first: Option<Vec<Vec<u8>>> = None;
    for size in SIZES {
        let kernel = format!("packed_project_{size}");
        let library = plain("tensor_packed.metal");
        let outputs = dense
            .run(library, &kernel, size, &[], Schedule::ProgramOrder)
            .unwrap_or_else(|error| panic!("{error}"));
        dense.check(&kernel, &outputs);
        assert!(first.as_ref().is_none_or(|first| *first == outputs));
        first.get_or_insert(outputs);
    }
}

fn check_experts(mut experts: Experts) {
    experts.exact = true;
    for size in SIZES {
        let kernel = format!("packed_experts_{size}");
        let library = plain("tensor_packed_experts.metal");
        let output = experts
            .run(library, &kernel, size, Schedule::ProgramOrder)
            .unwrap_or_else(|error| panic!("{error}"));
        experts.check(&kernel, &output);
    }
}

#[test]
fn dense_products_over_the_edges_of_tiles() {
    for rows in [1, 16, 17, 65] {
        let outputs = [(130, 4, true), (1, 8, false), (64, 4, false), (33, 8, true)];
        check_dense(Dense::new(rows, 128, &outputs));
    }
    for outputs in [1, 31, 32, 33, 65] {
        check_dense(Dense::new(18, 64, &[(outputs, 4, false)]));
        check_dense(Dense::new(3, 192, &[(outputs, 8, true)]).with_residual());
    }
    check_dense(Dense::new(17, 2048, &[(33, 4, false)]));
}

#[test]
fn gated_pairs_of_any_widths() {
    let one = [(70, 4, true), (1, 8, false)];
    check_dense(Dense::new(33, 128, &one).gated(0, 4));
    check_dense(Dense::new(5, 128, &one).gated(0, 8));
    let other = [(5, 8, false), (96, 8, false), (66, 4, true)];
    check_dense(Dense::new(17, 64, &other).gated(1, 4));
    check_dense(Dense::new(2, 64, &other).gated(1, 8));
}

#[test]
fn experts_with_any_number_of_pairs() {
    check_experts(Experts::new(&[0, 16, 1, 0, 33, 15], 3, 64, 66, 4));
    check_experts(Experts::new(&[65, 0, 1], 2, 64, 36, 8).gated(4));
    check_experts(Experts::new(&[5, 0, 19], 2, 128, 65, 4).with_own_rows());
}

/// The weights are not those of the other tiles: these are rounded to bfloat.
#[test]
fn weights_are_not_rounded() {
    let dense = Dense::new(16, 2048, &[(32, 4, false)]);
    let run = |file, kernel| {
        let run = dense.run(plain(file), kernel, 16, &[], Schedule::ProgramOrder);
        run.unwrap_or_else(|error| panic!("{error}"))
    };
    let packed = run("tensor_packed.metal", "packed_project_16");
    let rounded = run("tensor.metal", "tensor_project_16");
    assert!(packed != rounded);
    let held = std::panic::catch_unwind(|| dense.check("packed", &packed));
    assert!(held.is_err(), "within the bounds of rounded weights");
}

#[test]
fn no_races_and_a_removed_barrier_is_found() {
    let all = sources();
    let text = all.get("tensor_packed.h").expect("a header");
    let (mutants, barriers) = removable_barriers(text, REMOVED);
    assert_eq!(barriers, 4);
    let changed = all.with("tensor_packed.h", &mutants);
    let library = compile(&changed, "tensor_packed.metal", BuildKind::Race);
    let mut dense = Dense::new(17, 128, &[(33, 4, false), (3, 8, true)]).gated(0, 8);
    dense.exact = true;
    for (size, schedule) in [(16, Schedule::Shuffled(3)), (32, Schedule::ProgramOrder)] {
        let kernel = format!("packed_project_{size}");
        let run = |removed| {
            let removed = [number(REMOVED, removed)];
            dense.run(&library, &kernel, size, &removed, schedule)
        };
        match run(barriers as usize) {
            Ok(outputs) => dense.check(&kernel, &outputs),
            Err(error) => panic!("{error}"),
        }
        for removed in 0..barriers as usize {
            let kind = run(removed)
                .err()
                .and_then(|error| error.fault().map(|fault| fault.kind));
            let found = matches!(kind, Some(FaultKind::Race | FaultKind::Uninitialised));
            // The second stands before a product, and the emulator's products wait for all threads by themselves.
            assert_eq!(found, removed != 1, "barrier {removed} of {kernel}");
        }
    }
}
