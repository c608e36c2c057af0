//! Counts of the full model's plans against the figures of docs/model.md, sections 7 and 9.

mod common;

use common::{class, decode, grid, model, prefill};
use lily_checkpoint::{DType, WeightFormat};
use lily_plan::{
    Assumptions, ElementType, ModelDescription, Operation, Phase, Plan, PlanClass, PlanOutput,
    Precision, Routing, Work,
};
use std::sync::Arc;

fn total(plan: &Plan, context: usize) -> Work {
    plan.totals(&Assumptions::at_context(context)).work
}

/// The work of the first step whose operation has this name.
fn first(plan: &Plan, name: &str, context: usize) -> Work {
    let step = plan
        .steps
        .iter()
        .position(|step| step.operation.name() == name)
        .unwrap_or_else(|| panic!("a step {name}"));
    plan.work(step, &Assumptions::at_context(context))
}

#[test]
fn decode_reads_the_weights_of_section_9() {
    let plan = decode(&model());
    // Two fused steps of each layer take the norm before the experts, each work item for itself: the
    // router's and the experts' input.
    let norms_read_again = 40 * 2048 * 2;
    assert_eq!(
        total(&plan, 0).weight_bytes,
        1_669_561_728 + norms_read_again
    );
}

#[test]
fn decode_moves_the_state_of_section_9() {
    let plan = decode(&model());
    let work = total(&plan, 0);
    let (recurrent, histories) = (62_914_560, 1_474_560);
    // Beside them the run's own position: written to the cache, then read like any other.
    let position = 20_480;
    let token = 4;
    assert_eq!(work.state_read, recurrent + histories + position + token);
    assert_eq!(work.state_written, recurrent + histories + position + token);
    assert_eq!(
        work.state_bytes(),
        125_829_120 + 2_949_120 + 2 * position + 2 * token
    );
}

#[test]
fn each_cached_position_adds_its_keys_and_values_once() {
    let model = model();
    for (precision, position) in [(Precision::Bf16, 20_480), (Precision::F32, 40_960)] {
        let plan = Plan::record(
            &model,
            PlanClass {
                context: 262_144,
                ..class(Phase::Decode, precision, 1, PlanOutput::Token)
            },
        );
        let empty = total(&plan, 0);
        for context in [1, 127, 4_096, 262_143] {
            let work = total(&plan, context);
            assert_eq!(
                work.state_read - empty.state_read,
                position * context as u64
            );
            assert_eq!(work.state_written, empty.state_written);
            assert_eq!(work.weight_bytes, empty.weight_bytes);
            // Scores and weighted values of 16 heads in 10 layers.
            assert_eq!(work.flops - empty.flops, 163_840 * context as u64);
        }
    }
}

#[test]
fn precision_widens_activations_and_leaves_the_recurrent_state() {
    let model = model();
    let plan = |precision| {
        Plan::record(
            &model,
            class(Phase::Decode, precision, 1, PlanOutput::Token),
        )
    };
    let (wide, narrow) = (
        total(&plan(Precision::F32), 0),
        total(&plan(Precision::Bf16), 0),
    );
    assert_eq!(wide.state_read - narrow.state_read, 1_474_560 + 20_480);
    assert_eq!(wide.weight_bytes, narrow.weight_bytes);
    assert!(wide.scratch_bytes() > narrow.scratch_bytes());
}

#[test]
fn every_session_brings_its_own_state() {
    let model = model();
    let one = total(&decode(&model), 1_000);
    for rows in [2, 4, 8] {
        let plan = Plan::record(
            &model,
            class(Phase::Decode, Precision::Bf16, rows, PlanOutput::Token),
        );
        let work = total(&plan, 1_000);
        assert_eq!(work.state_read, rows as u64 * one.state_read);
        assert_eq!(work.state_written, rows as u64 * one.state_written);
        assert_eq!(work.scratch_bytes(), rows as u64 * one.scratch_bytes());
        assert_eq!(work.flops, rows as u64 * one.flops);
        // Shared weights once, experts as often as distinct ones are expected.
        assert!(work.weight_bytes < rows as u64 * one.weight_bytes);
        assert!(work.weight_bytes > one.weight_bytes);
    }
}

#[test]
fn uniform_routing_expects_distinct_experts() {
    let distinct = |rows| Routing::Uniform.distinct_experts(256, 8, rows);
    assert_eq!(distinct(1), 8.0);
    assert_eq!(distinct(2), 15.75);
    assert!((distinct(8) - 57.4).abs() < 0.05, "{}", distinct(8));
    assert!((distinct(512) - 256.0).abs() < 0.01);
    assert_eq!(Routing::Uniform.distinct_experts(8, 8, 1), 8.0);
}

#[test]
fn a_chunk_reads_the_weights_of_section_9() {
    let model = model();
    for (rows, gigabytes) in [(16, 8.3), (64, 16.9), (128, 18.9), (512, 19.2)] {
        let found = total(&prefill(&model, rows), 0).weight_bytes as f64 / 1e9;
        assert!(
            (found - gigabytes).abs() < 0.06,
            "{rows} rows: {found} GB, expected {gigabytes}"
        );
    }
}

#[test]
fn a_prefill_token_computes_what_section_9_says() {
    let model = model();
    for rows in [1, 64, 512] {
        let all = class(Phase::Prefill, Precision::Bf16, rows, PlanOutput::AllLogits);
        let plan = Plan::record(&model, all);
        let rows = rows as u64;
        for context in [0, 8_192] {
            // Row r of the chunk attends to the context and to r + 1 positions of the chunk.
            let attention = 163_840 * (rows * context as u64 + (1..=rows).sum::<u64>());
            let head = rows * 2 * 248_320 * 2048;
            let layers = total(&plan, context).flops - attention - head;
            let each = layers as f64 / rows as f64;
            assert!((each / 4.99e9 - 1.0).abs() < 0.01, "{each}");
            // The same by the parts of the list.
            let projections = 30 * 2 * 2048 * (8192 + 4096 + 32 + 32 + 4096);
            let attention = 10 * 2 * 2048 * (8192 + 512 + 512 + 4096);
            let (routed, shared) = (40 * 8 * 3 * 2 * 2048 * 512, 40 * 3 * 2 * 2048 * 512);
            let routers = 40 * 2 * 2048 * (256 + 1);
            let (recurrence, convolution) = (30 * 7 * 32 * 128 * 128, 30 * 2 * 8192 * 4);
            let parts =
                projections + attention + routed + shared + routers + recurrence + convolution;
            assert_eq!(layers, rows * parts);
        }
    }
}

#[test]
fn only_the_last_row_pays_for_its_logits() {
    let model = model();
    let flops = |output| {
        let class = class(Phase::Prefill, Precision::Bf16, 64, output);
        total(&Plan::record(&model, class), 0).flops
    };
    let (last, all) = (flops(PlanOutput::LastLogits), flops(PlanOutput::AllLogits));
    assert_eq!(all - last, 63 * 2 * 248_320 * 2048);
}

#[test]
fn dispatches_and_stages_of_the_full_model() {
    let model = model();
    let counts = |plan: &Plan| {
        let totals = plan.totals(&Assumptions::at_context(0));
        (totals.dispatches, totals.stages)
    };
    let decode = decode(&model);
    assert!(decode.steps.len() <= 340);
    // Embedding, 30 × 3 + 10 × 5 steps of mixers, 40 × 4 of experts, head, choice: a chain.
    assert_eq!(counts(&decode), (303, 303));
    assert_eq!(counts(&decode.expanded()), (1_074, 664));
    let prefill = prefill(&model, 512);
    assert_eq!(counts(&prefill), (593, 553));
    assert_eq!(counts(&prefill.expanded()), (1_064, 694));
}

#[test]
fn attention_blocks_count_once_they_hold_a_position() {
    let plan = decode(&model());
    let block = 16 * 258 * 4;
    for (context, blocks) in [(0, 1), (127, 1), (128, 2), (4_095, 32)] {
        let partial = first(&plan, "attention-partial", context);
        assert_eq!(partial.scratch_written, blocks * block);
        assert_eq!(partial.work_items_hint, 2 * blocks);
        let merge = first(&plan, "attention-merge-gate", context);
        // The partial results and the gate half of each head.
        assert_eq!(merge.scratch_read, blocks * block + 16 * 256 * 2);
    }
    // What the comment at the bands of the routes claims of the longest context of each.
    for (context, per_mille) in [(4_096, 63), (32_768, 31), (262_144, 8)] {
        let plan = Plan::record(
            &plan.model,
            PlanClass {
                context,
                ..plan.class
            },
        );
        let partial = first(&plan, "attention-partial", context - 1);
        assert_eq!(
            (1000.0 * partial.scratch_written as f64 / partial.state_read as f64).round() as u64,
            per_mille
        );
    }
}

#[test]
fn partial_reads_are_those_of_the_contracts() {
    let model = model();
    let plan = prefill(&model, 7);
    let (rows, half) = (7, 7 * 4096 * 2);
    let heads = rows * 32 * 4;
    // Queries and keys, a and b; then queries and keys in f32, the values, decay and strength.
    assert_eq!(
        first(&plan, "delta-prepare", 0).scratch_read,
        half + 2 * heads
    );
    assert_eq!(
        first(&plan, "delta-scan", 0).scratch_read,
        2 * half + half + 2 * heads
    );
    // Queries of the interleaved row, keys and values; then its gates.
    assert_eq!(
        first(&plan, "query-key-prepare", 0).scratch_read,
        half + 2 * rows * 512 * 2
    );
    assert_eq!(first(&plan, "output-gate", 0).scratch_read, 2 * half);
    assert_eq!(first(&plan.expanded(), "head-norm", 0).scratch_read, half);
    assert_eq!(first(&plan, "select-last-row", 0).scratch_read, 2048 * 4);
    // A chunk's attention reads the cache once, its own positions included.
    assert_eq!(first(&plan, "attention", 100).state_read, 107 * 2048);
}

#[test]
fn the_embedding_costs_its_rows_and_a_tied_head_all_of_them() {
    let config = lily_checkpoint::ModelConfig {
        tie_word_embeddings: true,
        ..common::declared().config
    };
    let tied = Arc::new(ModelDescription::new(config, |_| {
        WeightFormat::Plain(DType::Bf16)
    }));
    let plan = prefill(&tied, 7);
    assert_eq!(first(&plan, "embed", 0).weight_bytes, 7 * 2048 * 2);
    let norm = 2048 * 2;
    assert_eq!(
        first(&plan, "norm-projections", 0).weight_bytes,
        248_320 * 2048 * 2 + norm
    );
}

#[test]
fn grids_have_a_work_item_for_each_independent_result() {
    let plan = decode(&model());
    let items = |name| first(&plan, name, 0).work_items_hint;
    assert_eq!(items("norm-projections"), 8192 + 4096 + 32 + 32);
    assert_eq!(items("delta-step"), 32);
    assert_eq!(items("expert-input"), 8 * 512);
    assert_eq!(items("expert-output"), 2048);
    assert_eq!(items("query-key-prepare"), 16 + 2 + 2);
    assert_eq!(items("route"), 1);
    let plan = prefill(&plan.model, 64);
    assert_eq!(first(&plan, "delta-scan", 0).work_items_hint, 32);
    assert_eq!(first(&plan, "group-experts", 0).work_items_hint, 1);
    assert_eq!(first(&plan, "rms-norm", 0).work_items_hint, 64);
}

#[test]
fn fusion_changes_scratch_and_nothing_else() {
    let plans = grid(&model());
    for pair in plans.chunks(2) {
        let (fused, expanded) = (&pair[0], &pair[1]);
        if fused.class.output == PlanOutput::State {
            // Expansion lets go of queries that the last layer's cache write does not need.
            continue;
        }
        let (a, b) = (total(fused, 500), total(expanded, 500));
        assert_eq!(a.weight_bytes, b.weight_bytes, "{}", fused.class);
        assert_eq!(
            (a.state_read, a.state_written),
            (b.state_read, b.state_written),
            "{}",
            fused.class
        );
        assert_eq!(a.flops, b.flops, "{}", fused.class);
        assert!(a.scratch_bytes() < b.scratch_bytes(), "{}", fused.class);
    }
}

#[test]
fn scratch_is_counted_by_element_type() {
    let plan = decode(&model());
    let route = plan
        .steps
        .iter()
        .find(|step| matches!(step.operation, Operation::Route { .. }))
        .expect("a router");
    let Operation::Route {
        logits,
        ids,
        weights,
    } = route.operation
    else {
        unreachable!()
    };
    assert_eq!(plan.spec(ids).element, ElementType::U32);
    let work = first(&plan, "route", 0);
    assert_eq!(work.scratch_read, plan.spec(logits).bytes() as u64);
    assert_eq!(work.scratch_read, 256 * 4);
    assert_eq!(
        work.scratch_written,
        (plan.spec(ids).bytes() + plan.spec(weights).bytes()) as u64
    );
    assert_eq!(first(&plan, "expert-input", 0).scratch_written, 8 * 512 * 2);
}
