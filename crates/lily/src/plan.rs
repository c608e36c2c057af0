//! `lily plan`: what a token and a chunk cost, before anything runs.

use crate::args::{MachineChoice, PlanArguments};
use crate::console::Console;
use crate::failure::Failure;
use crate::machine::this_processor;
use crate::model::declared_model;
use lily_plan::{Machine, ModelDescription, PlanReport, route};
use std::path::Path;
use std::sync::Arc;

const LAST_STEP: &str = "Decode ends with arg-max, or with sample in its place; where the host chooses, without that last step.";

const MORE: &str = "\
With --details: steps, operations, and why each boundary must stand. With --steps: every step.
";

/// Runs the subcommand.
pub fn plan(model: Option<&Path>, arguments: &PlanArguments) -> Result<(), Failure> {
    let declared = declared_model(arguments.config.as_deref().or(model))?;
    let longest = declared.config.max_positions;
    let context = arguments.context;
    let room = longest.saturating_sub(context);
    let chunk = arguments
        .chunk
        .unwrap_or(route::PREFILL_CHUNK.min(room).max(1));
    if chunk > room {
        return Err(Failure::usage(format!(
            "--context {context} and --chunk {chunk} make {} tokens: the model was made for {longest} \
             (max_position_embeddings)",
            context.saturating_add(chunk)
        ))
        .help(if room == 0 {
            format!("a context of at most {} can be planned", longest.saturating_sub(1))
        } else {
            format!("a chunk of at most {room} can be planned at this context")
        }));
    }
    let quantization = declared.quantization;
    let description = Arc::new(ModelDescription::new(declared.config, |spec| {
        quantization.format_of(spec)
    }));
    let mut console = Console::new(false);
    console.status().begin("planning");
    let report = PlanReport::new(
        &description,
        arguments.precision.into(),
        context,
        chunk,
        &machines(arguments),
    );
    console.status().end();
    if arguments.json {
        console.print_json(&report)
    } else if arguments.steps || arguments.details {
        console.print(&format!(
            "{}\n{LAST_STEP}\n",
            report.to_text(arguments.steps)
        ))
    } else {
        console.print(&format!("{}\n{LAST_STEP}\n{MORE}", report.to_summary()))
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
