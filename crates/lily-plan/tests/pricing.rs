//! Prices on machines with one limit at a time, boundaries, memory.

mod common;

use common::{decode, grid, model, prefill};
use lily_plan::{
    Assumptions, BoundaryKind, Machine, MemoryPlan, Operation, Plan, Precision, boundaries,
};

/// A machine that is infinitely fast in every respect.
fn unlimited() -> Machine {
    Machine {
        name: "unlimited".into(),
        bandwidth: f64::INFINITY,
        matrix_flops: f64::INFINITY,
        vector_flops: f64::INFINITY,
        boundary_seconds: 0.0,
        dispatch_seconds: 0.0,
        single_group_seconds: 0.0,
        assumptions: Vec::new(),
    }
}

fn close(found: f64, expected: f64) {
    assert!(
        (found - expected).abs() <= 1e-9 * expected.abs(),
        "{found}, expected {expected}"
    );
}

#[test]
fn each_limit_alone_prices_what_it_limits() {
    let model = model();
    let assumptions = Assumptions::at_context(1_000);
    for plan in [
        decode(&model),
        decode(&model).expanded(),
        prefill(&model, 64),
    ] {
        let totals = plan.totals(&assumptions);
        let seconds = |machine: Machine| plan.price(&machine, &assumptions).seconds;
        close(seconds(unlimited()), 0.0);
        let machine = Machine {
            bandwidth: 1e9,
            ..unlimited()
        };
        close(seconds(machine), totals.work.bytes() as f64 / 1e9);
        let machine = Machine {
            boundary_seconds: 2.0,
            ..unlimited()
        };
        close(seconds(machine), 2.0 * (totals.stages - 1) as f64);
        let machine = Machine {
            dispatch_seconds: 3.0,
            ..unlimited()
        };
        close(
            seconds(machine),
            3.0 * (totals.dispatches - totals.stages) as f64,
        );
        let machine = Machine {
            matrix_flops: 1e9,
            vector_flops: 1e9,
            ..unlimited()
        };
        // Matrix and vector units work side by side within a stage.
        assert!(seconds(machine) <= totals.work.flops as f64 / 1e9 * (1.0 + 1e-9));
    }
}

#[test]
fn matrix_units_take_the_products_of_prefill() {
    let model = model();
    let assumptions = Assumptions::at_context(0);
    let flops = |plan: &Plan, machine: Machine| plan.price(&machine, &assumptions).seconds * 1e9;
    let matrix = || Machine {
        matrix_flops: 1e9,
        ..unlimited()
    };
    let vector = || Machine {
        vector_flops: 1e9,
        ..unlimited()
    };
    let plan = decode(&model);
    close(flops(&plan, matrix()), 0.0);
    close(
        flops(&plan, vector()),
        plan.totals(&assumptions).work.flops as f64,
    );
    let plan = prefill(&model, 64);
    let recurrent = 64.0 * (30 * 7 * 32 * 128 * 128 + 30 * 2 * 8192 * 4) as f64;
    close(flops(&plan, vector()), recurrent);
    close(
        flops(&plan, matrix()),
        plan.totals(&assumptions).work.flops as f64 - recurrent,
    );
}

#[test]
fn single_threadgroups_have_a_least_duration() {
    let model = model();
    let assumptions = Assumptions::at_context(0);
    let machine = Machine {
        single_group_seconds: 1.0,
        ..unlimited()
    };
    // 40 routers and the choice of the token.
    let price = decode(&model).price(&machine, &assumptions);
    close(price.seconds, 41.0);
    close(price.latency_seconds, 41.0);
    // 40 routers, 40 groupings.
    close(
        prefill(&model, 64).price(&machine, &assumptions).seconds,
        80.0,
    );
}

#[test]
fn a_stage_costs_its_longest_part_and_the_parts_add_up() {
    let model = model();
    let assumptions = Assumptions::at_context(4_000);
    for plan in [decode(&model), prefill(&model, 512)] {
        for machine in [
            Machine::m5_max(),
            Machine::h200(),
            Machine::cpu(20e9, 2, 90e9),
        ] {
            let price = plan.price(&machine, &assumptions);
            close(
                price.seconds,
                price.bytes_seconds
                    + price.flops_seconds
                    + price.latency_seconds
                    + price.dispatch_seconds
                    + price.boundary_seconds,
            );
            let totals = plan.totals(&assumptions);
            let moving = totals.work.bytes() as f64 / machine.bandwidth;
            let computing = totals.work.flops as f64 / machine.matrix_flops;
            assert!(price.seconds >= moving.max(computing));
            close(
                price.tokens_per_second_at_most,
                plan.class.rows as f64 / price.seconds,
            );
            assert!(
                price.basis.contains("upper bound") && price.basis.contains("not a measurement")
            );
        }
    }
}

#[test]
fn the_full_models_price_on_an_m5_max() {
    let plan = decode(&model());
    let price = plan.price(&Machine::m5_max(), &Assumptions::at_context(0));
    // 1.806 GB at 614 GB/s, 302 boundaries of 1.39 µs, 41 single threadgroups of 2 µs.
    close((price.seconds * 1e5).round(), 344.0);
    close((price.boundary_seconds * 1e8).round(), 41_978.0);
    assert_eq!(price.tokens_per_second_at_most.round(), 290.0);
}

#[test]
fn machines_name_the_source_of_each_number() {
    let has = |machine: &Machine, words: &[&str]| {
        for word in words {
            assert!(
                machine.assumptions.iter().any(|line| line.contains(word)),
                "{}: {word}",
                machine.name
            );
        }
    };
    let numbers = [
        "bandwidth",
        "boundary",
        "further dispatch",
        "single threadgroup",
    ];
    for machine in [
        Machine::m5_max(),
        Machine::h200(),
        Machine::cpu(20e9, 2, 90e9),
    ] {
        has(&machine, &numbers);
    }
    has(
        &Machine::m5_max(),
        &["nothing was measured on Apple hardware", "third party"],
    );
    has(&Machine::h200(), &["measured by us", "data sheet"]);
    has(&Machine::cpu(20e9, 2, 90e9), &["20.0 GB/s and 90 GFLOP/s"]);
    assert_eq!(Machine::cpu(20e9, 1, 45e9).boundary_seconds, 0.0);
}

#[test]
fn boundaries_add_up_to_the_stages() {
    for plan in grid(&model()) {
        let kinds = boundaries(&plan);
        let count: usize = kinds.iter().map(|kind| kind.count).sum();
        assert_eq!(count, plan.stages.len() - 1, "{}", plan.class);
        for kind in &kinds {
            let name = kind.name();
            assert!(!kind.producers.is_empty() && !kind.consumers.is_empty());
            assert!(!kind.resources.is_empty(), "{name}: nothing forces it");
            for part in kind.consumers.iter().chain(&kind.resources) {
                assert!(kind.reason.contains(part), "{name}: {}", kind.reason);
            }
        }
    }
}

#[test]
fn the_boundaries_of_decode() {
    let kinds = boundaries(&decode(&model()));
    let found: Vec<(String, usize)> = kinds.iter().map(|kind| (kind.name(), kind.count)).collect();
    let expected = [
        ("embed → norm-projections", 1),
        ("norm-projections → delta-step", 30),
        ("delta-step → project-add", 30),
        ("project-add → norm-projections", 40),
        ("norm-projections → route", 40),
        ("route → expert-input", 40),
        ("expert-input → expert-output", 40),
        ("expert-output → norm-projections", 40),
        ("norm-projections → query-key-prepare", 10),
        ("query-key-prepare → attention-partial", 10),
        ("attention-partial → attention-merge-gate", 10),
        ("attention-merge-gate → project-add", 10),
        ("norm-projections → arg-max", 1),
    ];
    assert_eq!(
        found,
        expected.map(|(name, count)| (name.to_string(), count))
    );
    let resources = |index: usize| kinds[index].resources.join(" ");
    assert_eq!(resources(1), "qkv z b a");
    assert_eq!(resources(5), "expert-ids");
    assert_eq!(resources(9), "queries key-cache value-cache");
    assert!(
        kinds[1]
            .reason
            .starts_with("delta-step reads qkv, z, b, a: ")
    );
}

#[test]
fn several_steps_of_a_stage_are_named_together() {
    let kinds = boundaries(&prefill(&model(), 64));
    let kind: &BoundaryKind = kinds
        .iter()
        .find(|kind| kind.consumers.len() > 1)
        .expect("route and the shared expert's output stand side by side");
    assert_eq!(kind.name(), "projections → route + project");
    assert_eq!(kind.resources, ["router-logits", "shared-inner"]);
    assert_eq!(kind.count, 40);
}

#[test]
fn overwriting_forces_a_boundary_too() {
    // The cache write of the last attention layer behind the attention that read the cache.
    let expanded = decode(&model()).expanded();
    let find = |wanted: fn(&Operation) -> bool| {
        let step = expanded.steps.iter().find(|step| wanted(&step.operation));
        step.expect("in every decode plan").clone()
    };
    let mut plan = expanded.clone();
    plan.steps = vec![
        find(|operation| matches!(operation, Operation::AttentionPartial { .. })),
        find(|operation| matches!(operation, Operation::CacheWrite { .. })),
    ];
    plan.stages = vec![vec![0], vec![1]];
    let kinds = boundaries(&plan);
    assert_eq!(kinds.len(), 1);
    assert_eq!(kinds[0].resources, ["key-cache", "value-cache"]);
    assert!(
        kinds[0]
            .reason
            .starts_with("cache-write overwrites key-cache, value-cache: ")
    );
}

#[test]
fn memory_of_the_full_model() {
    let model = model();
    let (decode, prefill) = (decode(&model), prefill(&model, 512));
    let memory = MemoryPlan::new(&model, Precision::Bf16, &[&decode, &prefill]);
    assert_eq!(memory.weight_bytes, 19_508_787_456);
    assert_eq!(memory.cache_bytes_per_position, 20_480);
    assert_eq!(memory.session_fixed_bytes, 2 * (62_914_560 + 1_474_560));
    let arena = |plan: &Plan| plan.place(lily_plan::ElementType::bytes).arena_bytes as u64;
    assert!(arena(&prefill) > arena(&decode));
    assert_eq!(memory.arena_bytes, arena(&prefill));
    assert_eq!(
        memory.total_bytes(2, 1_000),
        memory.weight_bytes + memory.arena_bytes + 2 * (memory.session_fixed_bytes + 20_480_000)
    );
    let wide = MemoryPlan::new(&model, Precision::F32, &[]);
    assert_eq!(wide.cache_bytes_per_position, 40_960);
    assert_eq!(wide.session_fixed_bytes, 2 * (62_914_560 + 2 * 1_474_560));
    assert_eq!(wide.arena_bytes, 0);
}
