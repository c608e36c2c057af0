//! What is printed is what runs: the plans that the engine executes are those that recording gives for the
//! same class, and every one of their steps matters.

mod support;

use lily_cpu::CpuOptions;
use lily_engine::{
    Engine, EngineError, GenerationRequest, Plan, PlanOutput, SamplingError, SamplingParameters,
};
use lily_plan::{Assumptions, ModelDescription, Phase, PlanFigures, PlanReport};
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
/// log-probabilities; `None` where logits were no numbers, which is refused.
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
    let answer = match answer(engine, request) {
        Ok(answer) => answer,
        Err(EngineError::Sampling(SamplingError::NotFinite { .. })) => return None,
        Err(error) => panic!("{error}"),
    };
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
        (Phase::Decode, output) => output == PlanOutput::AllLogits && plan.class.rows == 1,
    });
    assert_eq!(plans.len(), 3);
    let (mut changed_answers, mut refused) = (0, 0);
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
                Ok(Some(found)) => {
                    assert_ne!(found, expected, "{class}: {label}");
                    changed_answers += 1;
                }
                Ok(None) => refused += 1,
                Err(_) => assert!(numbers, "{class}: a panic without {label}"),
            }
        }
    }
    // Nearly all of them: the run goes on with what is left in memory, and says something else.
    assert!(
        changed_answers > 20 * refused,
        "{changed_answers} changed, {refused} refused"
    );
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

/// `lily plan` prints a report of plans recorded from the model's description. What the engine ran, as it
/// came past on its way to the device, is the same to the last operand, shape and byte. Where the host
/// chooses the token, decode is that plan without its last step, the choice.
#[test]
fn the_plans_that_run_are_the_plans_that_are_printed() {
    let seen: Arc<Mutex<Vec<Plan>>> = Arc::default();
    let recorder = seen.clone();
    let mut engine = engine_with(|options| {
        options.plan_transform = Some(Arc::new(move |plan: Plan| {
            recorder.lock().unwrap().push(plan.clone());
            plan
        }));
    });
    let prompt = question(&engine, "What is the capital of Norway?");
    let rows = prompt.len();
    let model: Arc<ModelDescription> = engine.model().clone();
    let report = PlanReport::new(&model, engine.options().precision, 0, rows, &[]);
    let report = serde_json::to_value(&report).unwrap();
    for logprobs in [None, Some(0)] {
        let sampling = SamplingParameters {
            logprobs,
            ..SamplingParameters::default()
        };
        let prompt = prompt.clone();
        let request = GenerationRequest {
            prompt,
            sampling,
            ..GenerationRequest::default()
        };
        answer(&mut engine, request).unwrap();
    }
    let seen = seen.lock().unwrap();
    let of = |phase: Phase, output: PlanOutput| {
        let mut plans = seen.iter().filter(|plan| {
            let class = plan.class;
            // Not those that only sized the memory.
            let ran = class.rows == rows || class.context == 4_096;
            class.phase == phase && class.output == output && ran
        });
        let plan = plans.next().expect("it ran");
        assert!(plans.next().is_none(), "recorded once, replayed");
        let figures = PlanFigures::new(plan, &Assumptions::at_context(0), &[]);
        serde_json::to_value(&figures).unwrap()
    };
    assert_eq!(
        of(Phase::Decode, PlanOutput::Token),
        report["decode"]["fused"]
    );
    assert_eq!(
        of(Phase::Prefill, PlanOutput::LastLogits),
        report["prefill"]["fused"]
    );
    let sampled = of(Phase::Decode, PlanOutput::AllLogits);
    let steps = report["decode"]["fused"]["steps"].as_array().unwrap();
    assert_eq!(
        sampled["steps"].as_array().unwrap()[..],
        steps[..steps.len() - 1]
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
