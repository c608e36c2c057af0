//! `lily plan`: what a token and a chunk cost, before anything runs.

use crate::args::{MachineChoice, PlanArguments};
use crate::console::Console;
use crate::failure::Failure;
use crate::machine::this_processor;
use crate::model::declared_model;
use lily_plan::{Machine, ModelDescription, PlanReport, route};
use std::path::Path;
use std::sync::Arc;

const MORE: &str = "\
With --details: steps, operations, and why each boundary must stand. With --steps: every step.
";

/// Runs the subcommand.
pub fn plan(model: Option<&Path>, arguments: &PlanArguments) -> Result<(), Failure> {
    let declared = declared_model(arguments.config.as_deref().or(model))?;
    let longest = declared.config.max_positions;
    let chunk = arguments.chunk.unwrap_or(route::PREFILL_CHUNK.min(longest));
    if chunk > longest || arguments.context >= longest {
        return Err(Failure::usage(format!(
            "--context {} and --chunk {chunk}: the model was made for {longest} tokens",
            arguments.context
        ))
        .help(format!(
            "a context below {longest} and a chunk of at most {longest} can be planned"
        )));
    }
    let quantization = declared.quantization;
    let description = Arc::new(ModelDescription::new(declared.config, |spec| {
        quantization.format_of(spec)
    }));
    let report = PlanReport::new(
        &description,
        arguments.precision.into(),
        arguments.context,
        chunk,
        &machines(arguments),
    );
    let mut console = Console::new(false);
    if arguments.json {
        console.print_json(&report)
    } else if arguments.steps || arguments.details {
        console.print(&report.to_text(arguments.steps))
    } else {
        console.print(&format!("{}\n{MORE}", report.to_summary()))
    }
}

fn machines(arguments: &PlanArguments) -> Vec<Machine> {
    let all = [
        MachineChoice::M5Max,
        MachineChoice::H200,
        MachineChoice::Cpu,
    ];
    all.into_iter()
        .filter(|choice| arguments.machine.is_empty() || arguments.machine.contains(choice))
        .map(|choice| match choice {
            MachineChoice::M5Max => Machine::m5_max(),
            MachineChoice::H200 => Machine::h200(),
            MachineChoice::Cpu => this_processor(arguments.threads),
        })
        .collect()
}
