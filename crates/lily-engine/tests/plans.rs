//! What is printed is what runs: the plans that the engine executes are those that recording gives for the
//! same class, and every one of their steps matters.

mod support;

use lily_cpu::CpuOptions;
use lily_engine::{Engine, GenerationRequest, Plan, PlanOutput, SamplingParameters};
use lily_plan::{ModelDescription, Phase, PlanReport};
use std::sync::{Arc, Mutex};
use support::{answer, engine, engine_on, engine_with, question};

/// An engine whose memory begins as zeros (so that what a missing step leaves unwritten is a number),
/// and whose plans go through `change`.
fn changed(change: impl Fn(Plan) -> Plan + Send + Sync + 'static) -> Engine {
    let zeros = CpuOptions {
        fill: 0.0,
        ..CpuOptions::default()
    };
    engine_on(&zeros, |options| {
        options.plan_transform = Some(Arc::new(change));
        options.prefill_chunk = 16;
    })
}

/// What the engine does for a short answer: prefill in two chunks, then decode. Tokens and their
/// log-probabilities; `None` where the run fails.
fn outcome(engine: &mut Engine) -> Option<Vec<(u32, Option<f32>)>> {
    let prompt = question(engine, "What is the capital of Norway?");
    assert!(prompt.len() > 16 && prompt.len() < 32);
    let sampling = SamplingParameters {
        logprobs: Some(0),
        ..SamplingParameters::default()
    };
    let request = GenerationRequest {
        prompt,
        sampling,
        max_tokens: Some(4),
        stop_ids: Some(Vec::new()),
        ..GenerationRequest::default()
    };
    let answer = answer(engine, request).ok()?;
    Some(
        answer
            .tokens
            .iter()
            .map(|event| (event.token, event.logprob))
            .collect(),
    )
}

#[test]
fn dropping_any_step_of_a_plan_that_runs_changes_the_answer() {
    let seen: Arc<Mutex<Vec<Plan>>> = Arc::default();
    let recorder = seen.clone();
    let mut engine = changed(move |plan| {
        recorder.lock().unwrap().push(plan.clone());
        plan
    });
    let expected = outcome(&mut engine).unwrap();
    let mut plans = seen.lock().unwrap().clone();
    plans.retain(|plan| match (plan.class.phase, plan.class.output) {
        // Those that ran, not those that only sized the memory.
        (Phase::Prefill, PlanOutput::State) => plan.class.rows == 16,
        (Phase::Prefill, _) => plan.class.rows < 16,
        (Phase::Decode, output) => output == PlanOutput::AllLogits,
    });
    assert_eq!(plans.len(), 3);
    for plan in plans {
        for step in 0..plan.steps.len() {
            let class = plan.class;
            let label = plan.steps[step].label();
            // What is left in memory where expert numbers should be may be none: that shows as a panic.
            let numbers = label.ends_with("route") || label.ends_with("group-experts");
            let found = std::panic::catch_unwind(move || {
                outcome(&mut changed(move |plan| {
                    if plan.class == class {
                        plan.without_step(step)
                    } else {
                        plan
                    }
                }))
            });
            match found {
                Ok(found) => assert_ne!(found.as_ref(), Some(&expected), "{class}: {label}"),
                Err(_) => assert!(numbers, "{class}: a panic without {label}"),
            }
        }
    }
}

#[test]
fn the_step_that_chooses_the_token_matters() {
    let run = |drop_last: bool| {
        let mut engine = changed(move |plan| {
            let last = plan.steps.len() - 1;
            if drop_last && plan.chooses_token() {
                plan.without_step(last)
            } else {
                plan
            }
        });
        let mut session = engine.open_session(8).unwrap();
        engine
            .decode(&mut session, 5, PlanOutput::Token)
            .unwrap()
            .tokens
    };
    assert_eq!(run(false).len(), 1);
    assert!(run(true).is_empty());
}

/// `lily plan` prints a report of plans recorded from the model's description; the engine runs plans
/// recorded from the same.
#[test]
fn the_plans_that_run_are_the_plans_that_are_printed() {
    let mut engine = engine();
    let model: Arc<ModelDescription> = engine.model().clone();
    let rows = engine.options().prefill_chunk;
    let report = PlanReport::new(&model, engine.options().precision, 0, rows, &[]);
    let report = serde_json::to_value(&report).unwrap();
    let printed = |phase: &str| -> Vec<String> {
        let steps = report[phase]["fused"]["steps"].as_array().unwrap();
        steps
            .iter()
            .map(|step| step["operation"].as_str().unwrap().to_string())
            .collect()
    };
    let run = |plan: Arc<Plan>| -> Vec<String> {
        plan.steps
            .iter()
            .map(|step| step.operation.name().to_string())
            .collect()
    };
    assert_eq!(
        run(engine.decode_plan(0, PlanOutput::Token)),
        printed("decode")
    );
    assert_eq!(
        run(engine.prefill_plan(rows, PlanOutput::LastLogits)),
        printed("prefill")
    );
}

/// Fusion is a matter of speed: expanded plans give the same answer.
#[test]
fn expanded_plans_give_the_same_answer() {
    let expanded = |options: &mut lily_engine::EngineOptions| {
        options.plan_transform = Some(Arc::new(|plan: Plan| plan.expanded()));
    };
    let [fused, unfused] = [engine(), engine_with(expanded)].map(|mut engine| {
        let prompt = question(&engine, "What is the capital of Norway?");
        answer(
            &mut engine,
            GenerationRequest {
                prompt,
                ..GenerationRequest::default()
            },
        )
        .unwrap()
        .text
    });
    assert_eq!(fused, "The capital of Norway is Oslo.");
    assert_eq!(unfused, fused);
}
