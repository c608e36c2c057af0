//! Properties that every plan has, checked over plans of all shapes with means of their own: nothing
//! here calls what computes stages or placements.

mod common;

use common::{class, decode, grid, model};
use lily_checkpoint::{WeightId, WeightRole};
use lily_plan::{
    Access, ElementType, Operation, Phase, Plan, PlanOutput, Precision, Resource, ScratchId,
    StateSlot,
};
use std::collections::{HashMap, HashSet};

fn accesses(plan: &Plan) -> Vec<Access> {
    plan.steps
        .iter()
        .map(|step| step.operation.access())
        .collect()
}

fn meets(a: &[Resource], b: &[Resource]) -> bool {
    a.iter().any(|resource| b.contains(resource))
}

/// Whether one of two steps writes what the other touches.
fn hazard(a: &Access, b: &Access) -> bool {
    meets(&a.writes, &b.reads) || meets(&a.reads, &b.writes) || meets(&a.writes, &b.writes)
}

/// The stage of each step, from the plan's lists; every step must be in exactly one.
fn stage_of(plan: &Plan) -> Vec<usize> {
    let mut stages = vec![None; plan.steps.len()];
    for (stage, steps) in plan.stages.iter().enumerate() {
        assert!(!steps.is_empty(), "{}: stage {stage} is empty", plan.class);
        for &step in steps {
            assert_eq!(
                stages[step].replace(stage),
                None,
                "{}: step {step}",
                plan.class
            );
        }
    }
    stages
        .into_iter()
        .map(|stage| stage.expect("every step has a stage"))
        .collect()
}

#[test]
fn scratch_is_written_once_and_before_it_is_read() {
    for plan in grid(&model()) {
        let mut written: HashSet<ScratchId> = HashSet::new();
        for (step, access) in plan.steps.iter().zip(accesses(&plan)) {
            for resource in access.reads {
                if let Resource::Scratch(id) = resource {
                    assert!(
                        written.contains(&id),
                        "{}: {} reads {:?} before it is written",
                        plan.class,
                        step.label(),
                        plan.spec(id)
                    );
                }
            }
            for resource in access.writes {
                if let Resource::Scratch(id) = resource {
                    assert!(
                        written.insert(id),
                        "{}: {} writes {:?} again",
                        plan.class,
                        step.label(),
                        plan.spec(id)
                    );
                }
            }
        }
        let wants_logits = matches!(
            plan.class.output,
            PlanOutput::LastLogits | PlanOutput::AllLogits
        );
        assert_eq!(plan.logits.is_some(), wants_logits);
        if let Some(logits) = plan.logits {
            assert!(written.contains(&logits));
        }
        assert_eq!(plan.chooses_token(), plan.class.output == PlanOutput::Token);
    }
}

#[test]
fn a_step_is_one_dispatch() {
    for plan in grid(&model()) {
        for (step, access) in plan.steps.iter().zip(accesses(&plan)) {
            assert!(
                !meets(&access.reads, &access.writes),
                "{}: {} reads what it writes",
                plan.class,
                step.label()
            );
        }
    }
}

#[test]
fn stages_are_free_of_hazards_and_as_early_as_possible() {
    for plan in grid(&model()) {
        let stages = stage_of(&plan);
        let accesses = accesses(&plan);
        let mut earliest = vec![0; stages.len()];
        for later in 0..stages.len() {
            for earlier in 0..later {
                if hazard(&accesses[earlier], &accesses[later]) {
                    assert_ne!(
                        stages[earlier],
                        stages[later],
                        "{}: {} and {} share a stage",
                        plan.class,
                        plan.steps[earlier].label(),
                        plan.steps[later].label()
                    );
                    earliest[later] = earliest[later].max(earliest[earlier] + 1);
                }
            }
        }
        assert_eq!(stages, earliest, "{}", plan.class);
    }
}

#[test]
fn values_alive_together_do_not_overlap() {
    for plan in grid(&model()) {
        for element_bytes in [|_: ElementType| 4, ElementType::bytes] {
            let placement = plan.place(element_bytes);
            let mut alive: Vec<(ScratchId, usize, usize)> = Vec::new();
            let mut lifetimes: HashMap<ScratchId, (usize, usize)> = HashMap::new();
            for (step, access) in stage_of(&plan).into_iter().zip(accesses(&plan)) {
                for resource in access.reads.into_iter().chain(access.writes) {
                    if let Resource::Scratch(id) = resource {
                        let life = lifetimes.entry(id).or_insert((step, step));
                        *life = (life.0.min(step), life.1.max(step));
                    }
                }
            }
            alive.extend(lifetimes.iter().map(|(&id, &(first, last))| {
                // The caller reads the logits when everything has run.
                let last = if plan.logits == Some(id) {
                    plan.stages.len()
                } else {
                    last
                };
                (id, first, last)
            }));
            for (index, &(id, first, last)) in alive.iter().enumerate() {
                let range = placement.range(id);
                assert!(range.end <= placement.arena_bytes);
                let spec = plan.spec(id);
                assert!(range.len() >= spec.elements() * element_bytes(spec.element));
                for &(other, other_first, other_last) in &alive[..index] {
                    let other_range = placement.range(other);
                    let together = first <= other_last && other_first <= last;
                    let overlap = range.start < other_range.end && other_range.start < range.end;
                    assert!(
                        !(together && overlap),
                        "{}: {:?} and {:?} share memory",
                        plan.class,
                        plan.spec(id),
                        plan.spec(other)
                    );
                }
            }
        }
    }
}

#[test]
fn sharing_memory_adds_no_stage() {
    for plan in grid(&model()) {
        let placement = plan.place(ElementType::bytes);
        let accesses = accesses(&plan);
        // Hazards again, with ranges of the arena in the place of values, in the order in which stages
        // run. Each granule of 256 bytes remembers the last stage that wrote and that touched it.
        let mut last_write = vec![None::<usize>; placement.arena_bytes / 256];
        let mut last_touch = last_write.clone();
        let granules = |resource: &Resource| match resource {
            Resource::Scratch(id) => {
                let range = placement.range(*id);
                range.start / 256..range.end / 256
            }
            Resource::State(_) => 0..0,
        };
        for (stage, steps) in plan.stages.iter().enumerate() {
            // What a stage reads must be complete, what it writes idle, before the stage begins.
            for &step in steps {
                for granule in accesses[step].reads.iter().flat_map(granules) {
                    assert!(last_write[granule] < Some(stage), "{}", plan.class);
                    last_touch[granule] = Some(stage);
                }
            }
            for &step in steps {
                for granule in accesses[step].writes.iter().flat_map(granules) {
                    assert!(
                        last_touch[granule] < Some(stage),
                        "{}: {} would need a barrier more",
                        plan.class,
                        plan.steps[step].label()
                    );
                    last_write[granule] = Some(stage);
                    last_touch[granule] = Some(stage);
                }
            }
        }
        let apart: usize = plan.scratch.iter().map(|spec| spec.bytes()).sum();
        assert!(placement.arena_bytes < apart / 4, "{}", plan.class);
    }
}

/// Slots of session state that a plan writes, sorted.
fn state_written(plan: &Plan) -> Vec<StateSlot> {
    let mut slots: Vec<StateSlot> = accesses(plan)
        .into_iter()
        .flat_map(|access| access.writes)
        .filter_map(|resource| match resource {
            Resource::State(slot) => Some(slot),
            Resource::Scratch(_) => None,
        })
        .collect();
    slots.sort();
    slots
}

#[test]
fn expansion_leaves_no_fused_operation_and_writes_the_same_state() {
    for pair in grid(&model()).chunks(2) {
        let (fused, expanded) = (&pair[0], &pair[1]);
        assert!(fused.steps.iter().any(|step| step.operation.is_fused()));
        assert!(!expanded.steps.iter().any(|step| step.operation.is_fused()));
        assert_eq!(state_written(fused), state_written(expanded));
        assert_eq!(fused.logits, expanded.logits);
        // Values of the fused plan keep their ids.
        assert_eq!(fused.scratch, expanded.scratch[..fused.scratch.len()]);
        assert_eq!(expanded.expanded().steps, expanded.steps);
        assert_eq!(fused.expanded_where(|_| false).steps, fused.steps);
    }
}

#[test]
fn every_state_of_the_model_is_written_once() {
    for plan in grid(&model()) {
        let slots = state_written(&plan);
        let distinct: HashSet<StateSlot> = slots.iter().copied().collect();
        assert_eq!(slots.len(), distinct.len(), "{}", plan.class);
        let token = usize::from(plan.chooses_token());
        // Two slots a layer: history and recurrent state, or keys and values.
        assert_eq!(slots.len(), 2 * 40 + token, "{}", plan.class);
    }
}

#[test]
fn a_plan_for_the_state_alone_ends_with_the_last_cache_write() {
    let model = model();
    let class = class(Phase::Prefill, Precision::Bf16, 512, PlanOutput::State);
    let plan = Plan::record(&model, class);
    let last = plan.steps.last().expect("steps");
    assert!(matches!(
        last.operation,
        Operation::QueryKeyPrepare { layer: 39, .. }
    ));
    let expanded = plan.expanded();
    let last = expanded.steps.last().expect("steps");
    assert!(matches!(
        last.operation,
        Operation::CacheWrite { layer: 39, .. }
    ));
    // Unfused, the queries of the last layer are not even computed.
    let query = WeightId::in_layer(39, WeightRole::Query);
    let reads_query = |plan: &Plan| {
        accesses(plan)
            .iter()
            .any(|access| access.weights.contains(&query))
    };
    assert!(reads_query(&plan));
    assert!(!reads_query(&expanded));
}

#[test]
fn no_step_is_dead() {
    for plan in grid(&model()) {
        let mut wanted: HashSet<ScratchId> = plan.logits.into_iter().collect();
        for (step, access) in plan.steps.iter().zip(accesses(&plan)).rev() {
            assert!(
                access.writes.iter().any(|resource| match resource {
                    Resource::Scratch(id) => wanted.contains(id),
                    Resource::State(_) => true,
                }),
                "{}: nobody needs {}",
                plan.class,
                step.label()
            );
            for resource in access.reads {
                if let Resource::Scratch(id) = resource {
                    wanted.insert(id);
                }
            }
        }
    }
}

#[test]
fn decode_reads_every_weight_as_often_as_it_needs() {
    let model = model();
    let plan = decode(&model);
    for plan in [plan.expanded(), plan] {
        let mut reads: HashMap<WeightId, usize> = HashMap::new();
        for access in accesses(&plan) {
            for weight in access.weights {
                *reads.entry(weight).or_default() += 1;
            }
        }
        for spec in model.config.weights() {
            // The router's and the experts' steps both begin with the norm before the experts.
            let expected = match spec.id.role {
                WeightRole::PostNorm => 2,
                _ => 1,
            };
            assert_eq!(reads.remove(&spec.id), Some(expected), "{}", spec.id);
        }
        assert!(reads.is_empty(), "not of the model: {reads:?}");
    }
}

#[test]
fn layers_are_labelled_and_follow_one_another() {
    for plan in grid(&model()) {
        let layers: Vec<u16> = plan.steps.iter().filter_map(|step| step.layer).collect();
        assert!(layers.is_sorted(), "{}", plan.class);
        for step in &plan.steps {
            for weight in step.operation.access().weights {
                assert_eq!(weight.layer, step.layer, "{}", step.label());
            }
        }
    }
}

/// The plan of a sampled token is that of the likeliest with another last step, and hands out no logits.
#[test]
fn a_sampled_token_takes_one_step_in_place_of_arg_max() {
    let model = model();
    let plan = |output| {
        let class = lily_plan::PlanClass {
            output,
            ..decode(&model).class
        };
        Plan::record(&model, class)
    };
    let (sampled, likeliest) = (plan(PlanOutput::Sampled), plan(PlanOutput::Token));
    assert_eq!(sampled.steps.len(), likeliest.steps.len());
    assert_eq!(sampled.stages, likeliest.stages);
    let last = sampled.steps.len() - 1;
    assert_eq!(sampled.steps[..last], likeliest.steps[..last]);
    assert_eq!(sampled.steps[last].label(), "sample");
    assert!(sampled.samples() && !likeliest.samples());
    assert!(sampled.chooses_token() && sampled.logits.is_none());
    // What is read and written is the same: the working memory is touched only where parameters ask for it.
    let work = |plan: &Plan| plan.work(last, &lily_plan::Assumptions::at_context(0));
    assert_eq!(work(&sampled), work(&likeliest));
    let operation = &sampled.steps[last].operation;
    assert!(operation.is_single_group());
}

#[test]
fn overwriting_waits_for_readers_and_writers() {
    // Real plans write every resource once, before it is read; these steps overwrite.
    let expanded = decode(&model()).expanded();
    let find = |wanted: fn(&Operation) -> bool| {
        let step = expanded.steps.iter().find(|step| wanted(&step.operation));
        step.expect("in every decode plan").clone()
    };
    let attention = find(|operation| matches!(operation, Operation::AttentionPartial { .. }));
    let write = find(|operation| matches!(operation, Operation::CacheWrite { .. }));
    let choice = find(|operation| matches!(operation, Operation::ArgMax { .. }));
    let mut plan = expanded.clone();
    plan.steps = vec![
        choice.clone(),
        attention.clone(),
        write,
        attention,
        choice.clone(),
        choice,
    ];
    // Dropping the first step computes the stages of the others anew: a read, a write after it, a read
    // after that; independently of them two writes of one slot.
    let plan = plan.without_step(0);
    assert_eq!(plan.stages, [vec![0, 3], vec![1, 4], vec![2]]);
}

#[test]
fn nothing_takes_the_place_of_what_the_caller_reads() {
    let mut plan = decode(&model());
    let shares = |plan: &Plan, id: ScratchId| {
        let placement = plan.place(ElementType::bytes);
        let range = placement.range(id);
        accesses(plan)
            .iter()
            .flat_map(|access| &access.writes)
            .filter_map(|resource| match resource {
                Resource::Scratch(other) if *other != id => Some(placement.range(*other)),
                _ => None,
            })
            .any(|other| range.start < other.end && other.start < range.end)
    };
    let Operation::Embed { output, .. } = plan.steps[0].operation else {
        panic!("a plan begins with the embedding")
    };
    assert!(shares(&plan, output));
    // Were the embedding what the caller asks for, it would have to stay to the end.
    plan.logits = Some(output);
    assert!(!shares(&plan, output));
}
