//! A report as text for people: aligned columns, decimal units, layers of one kind folded.

use crate::boundary::state_name;
use crate::cost::{PRICE_BASIS, Price};
use crate::operand::StateSlot;
use crate::report::{OperandReport, PhaseReport, PlanFigures, PlanReport, StepReport};
use crate::units;

/// Characters a line of running text.
const TEXT_WIDTH: usize = 90;

/// Alignment of a column.
#[derive(Clone, Copy, PartialEq)]
enum Align {
    Left,
    Right,
}
use Align::{Left, Right};

impl PlanReport {
    /// The report in brief: totals and prices, the boundaries that remain with their prices, and every
    /// assumption; neither steps, operations nor the boundaries' reasons.
    pub fn to_summary(&self) -> String {
        let phases = [("DECODE", &self.decode), ("PREFILL", &self.prefill)];
        let mut text = self.heading();
        for (title, phase) in phases {
            text.push_str(&format!("\n{title}: {}\n\n", phase.class));
            text.push_str(&self.comparison(phase));
            text.push('\n');
            text.push_str(&self.price_parts(phase));
        }
        text.push_str("\nBOUNDARIES that remain, fused, with their prices\n");
        for (title, phase) in phases {
            text.push_str(&format!("\n{}\n\n", title.to_lowercase()));
            text.push_str(&self.boundaries(&phase.fused, false));
        }
        text.push_str("\nASSUMPTIONS\n\n");
        text.push_str(&counting());
        text.push_str(&self.sources());
        text
    }

    /// The report as text. Layers whose steps are the same are listed once, with how many there are;
    /// `verbose` lists every step with the shapes, types and formats of its operands, and the steps of
    /// the expanded plans too.
    pub fn to_text(&self, verbose: bool) -> String {
        let mut text = self.heading();
        for (title, phase) in [("DECODE", &self.decode), ("PREFILL", &self.prefill)] {
            text.push_str(&format!("\n{title}: {}\n\n", phase.class));
            text.push_str(&self.comparison(phase));
            text.push('\n');
            text.push_str(&counting());
            text.push_str(&self.price_parts(phase));
            text.push_str("\nSteps, fused\n\n");
            text.push_str(&steps(&phase.fused, verbose));
            if verbose {
                text.push_str("\nSteps, expanded\n\n");
                text.push_str(&steps(&phase.expanded, verbose));
            }
            text.push_str("\nBy operation, fused\n\n");
            text.push_str(&operations(&phase.fused));
            text.push_str("\nBoundaries that remain, fused\n\n");
            text.push_str(&self.boundaries(&phase.fused, true));
        }
        text.push_str(&self.sources());
        text
    }

    fn heading(&self) -> String {
        let model = &self.model;
        let memory = &self.memory;
        let rows = [
            (
                "model",
                format!(
                    "{} layers ({} Gated DeltaNet, {} attention), width {}, {} of {} experts a token, \
                     {} vocabulary rows",
                    model.layers,
                    model.layers - model.attention_layers,
                    model.attention_layers,
                    model.hidden_size,
                    model.experts_per_token,
                    model.experts,
                    units::grouped(model.vocab_size as u64),
                ),
            ),
            ("precision", self.precision.clone()),
            (
                "context",
                format!(
                    "{} positions in the cache; uniform routing",
                    units::grouped(self.assumptions.context as u64)
                ),
            ),
            (
                "memory",
                format!(
                    "weights {}, KV cache {} a token, session state {} (both copies), scratch {}",
                    units::bytes(memory.weight_bytes),
                    units::bytes(memory.cache_bytes_per_position),
                    units::bytes(memory.session_fixed_bytes),
                    units::bytes(memory.arena_bytes),
                ),
            ),
        ];
        let rows: Vec<Vec<String>> = rows
            .into_iter()
            .map(|(name, value)| vec![name.to_string(), value])
            .collect();
        table(&[Left, Left], &rows)
    }

    /// Totals and prices, fused beside expanded.
    fn comparison(&self, phase: &PhaseReport) -> String {
        let plans = [&phase.fused, &phase.expanded];
        let mut rows = vec![strings(["", "fused", "expanded"])];
        let mut add = |name: &str, value: &dyn Fn(&PlanFigures) -> String| {
            rows.push(vec![name.to_string(), value(plans[0]), value(plans[1])]);
        };
        add("dispatches", &|plan| units::grouped(plan.dispatches as u64));
        add("stages", &|plan| units::grouped(plan.stages as u64));
        add("weights read", &|plan| units::bytes(plan.bytes.weights));
        add("state moved", &|plan| units::bytes(plan.bytes.state));
        add("scratch moved", &|plan| units::bytes(plan.bytes.scratch));
        add("bytes in all", &|plan| units::bytes(plan.bytes.total));
        add("computed", &|plan| units::flops(plan.flops));
        add("scratch arena", &|plan| units::bytes(plan.arena_bytes));
        for (index, machine) in self.machines.iter().enumerate() {
            add(&format!("{}, at least", machine.name), &|plan| {
                units::seconds(plan.price.0[index].1.seconds)
            });
            add(&format!("{}, at most", machine.name), &|plan| {
                let rate = plan.price.0[index].1.tokens_per_second_at_most;
                // Tenths tell slow machines apart and mean nothing on fast ones.
                let decimals = usize::from(rate < 100.0);
                format!("{rate:.decimals$} tok/s")
            });
        }
        table(&[Left, Right, Right], &rows)
    }

    /// What each machine's price of the fused plan is made of.
    fn price_parts(&self, phase: &PhaseReport) -> String {
        let mut text = String::new();
        for (index, machine) in self.machines.iter().enumerate() {
            let price = &phase.fused.price.0[index].1;
            text.push_str(&format!("  {}, fused: {}\n", machine.name, parts(price)));
        }
        text
    }

    /// The boundaries by kind, with what they cost in all, and if wanted why they must stand.
    fn boundaries(&self, plan: &PlanFigures, reasons: bool) -> String {
        let mut header = vec!["count".to_string()];
        header.extend(self.machines.iter().map(|machine| machine.name.clone()));
        header.push("boundary".into());
        let mut align = vec![Right; header.len()];
        align[header.len() - 1] = Left;
        let mut rows = vec![header];
        for boundary in &plan.boundaries {
            let mut row = vec![boundary.kind.count.to_string()];
            row.extend(
                boundary
                    .seconds
                    .0
                    .iter()
                    .map(|(_, all)| units::seconds(*all)),
            );
            row.push(boundary.name.clone());
            rows.push(row);
            if !reasons {
                continue;
            }
            for line in wrapped(&boundary.kind.reason, TEXT_WIDTH) {
                let mut reason = vec![String::new(); self.machines.len() + 1];
                reason.push(format!("  {line}"));
                rows.push(reason);
            }
        }
        table(&align, &rows)
    }

    fn sources(&self) -> String {
        let mut text = String::new();
        for machine in &self.machines {
            text.push_str(&format!("\n{}\n\n", machine.name));
            for assumption in &machine.assumptions {
                for (index, line) in wrapped(assumption, TEXT_WIDTH).iter().enumerate() {
                    let mark = if index == 0 { "- " } else { "  " };
                    text.push_str(&format!("  {mark}{line}\n"));
                }
            }
        }
        text
    }
}

/// What all counts and prices have in common.
fn counting() -> String {
    format!(
        "  Times and rates: {PRICE_BASIS}.\n  Scratch counts as memory traffic, though caches hold much of \
         it.\n"
    )
}

/// What a price is made of, largest part first.
fn parts(price: &Price) -> String {
    let mut parts = [
        ("bytes", price.bytes_seconds),
        ("computation", price.flops_seconds),
        ("single-threadgroup latency", price.latency_seconds),
        ("further dispatches", price.dispatch_seconds),
        ("boundaries", price.boundary_seconds),
    ];
    parts.sort_by(|a, b| b.1.total_cmp(&a.1));
    let parts: Vec<String> = parts
        .iter()
        .filter(|(_, seconds)| *seconds > 0.0)
        .map(|(name, seconds)| format!("{name} {}", units::seconds(*seconds)))
        .collect();
    parts.join(" + ")
}

fn steps(plan: &PlanFigures, verbose: bool) -> String {
    if verbose {
        return every_step(plan);
    }
    let header = [
        "", "weights", "state", "scratch", "computed", "items", "operands",
    ];
    let align = [Left, Right, Right, Right, Right, Right, Left];
    let mut rows = vec![strings(header)];
    for fold in folds(&plan.steps) {
        let name = match fold.steps[0].layer {
            Some(_) => format!("{} × {}", layer_name(fold.steps), fold.count),
            None if fold.steps[0].index == 0 => "before the layers".into(),
            None => "after the layers".into(),
        };
        rows.push(vec![name]);
        for step in fold.steps {
            let mut row = vec![format!("  {}", step.operation)];
            row.extend(numbers(step));
            row.push(names(step));
            rows.push(row);
        }
    }
    table(&align, &rows)
}

fn operations(plan: &PlanFigures) -> String {
    let mut rows = vec![strings([
        "",
        "dispatches",
        "weights",
        "state",
        "scratch",
        "in all",
        "share",
        "computed",
    ])];
    let mut operations: Vec<_> = plan.operations.iter().collect();
    operations.sort_by_key(|operation| std::cmp::Reverse(operation.bytes.total));
    for operation in operations {
        let share = 100.0 * operation.bytes.total as f64 / plan.bytes.total as f64;
        rows.push(vec![
            operation.operation.to_string(),
            operation.dispatches.to_string(),
            or_dash(units::bytes(operation.bytes.weights)),
            or_dash(units::bytes(operation.bytes.state)),
            or_dash(units::bytes(operation.bytes.scratch)),
            or_dash(units::bytes(operation.bytes.total)),
            format!("{share:.1} %"),
            or_dash(units::flops(operation.flops)),
        ]);
    }
    let mut align = [Right; 8];
    align[0] = Left;
    table(&align, &rows)
}

fn every_step(plan: &PlanFigures) -> String {
    let header = [
        "step",
        "stage",
        "layer",
        "operation",
        "weights",
        "state",
        "scratch",
        "computed",
        "items",
        "operands",
    ];
    let align = [
        Right, Right, Right, Left, Right, Right, Right, Right, Right, Left,
    ];
    let mut rows = vec![strings(header)];
    for step in &plan.steps {
        let mut row = vec![
            step.index.to_string(),
            step.stage.to_string(),
            step.layer.map_or("–".into(), |layer| layer.to_string()),
            step.operation.to_string(),
        ];
        row.extend(numbers(step));
        row.push(operands(step));
        rows.push(row);
    }
    table(&align, &rows)
}

fn numbers(step: &StepReport) -> [String; 5] {
    [
        or_dash(units::bytes(step.bytes.weights)),
        or_dash(units::bytes(step.bytes.state)),
        or_dash(units::bytes(step.bytes.scratch)),
        or_dash(units::flops(step.flops)),
        units::grouped(step.work_items_hint),
    ]
}

/// A step's operands by name; state that it both reads and writes comes last, once.
fn names(step: &StepReport) -> String {
    // No scratch value is on both sides, though two of them may have one name (`residual`).
    let updated = |operand: &OperandReport| {
        let same = |other: &OperandReport| other.name == operand.name;
        operand.state && step.reads.iter().any(same) && step.writes.iter().any(same)
    };
    let list = |operands: &[OperandReport], wanted: bool| {
        let names: Vec<&str> = operands
            .iter()
            .filter(|operand| updated(operand) == wanted)
            .map(|operand| operand.name)
            .collect();
        names.join(", ")
    };
    let mut text = format!(
        "{} → {}",
        list(&step.reads, false),
        list(&step.writes, false)
    );
    let updates = list(&step.writes, true);
    if !updates.is_empty() {
        text.push_str(&format!("; updates {updates}"));
    }
    text
}

/// A step's operands with shapes, types and formats.
fn operands(step: &StepReport) -> String {
    let typed = |operands: &[OperandReport]| {
        let operands: Vec<String> = operands
            .iter()
            .map(|operand| format!("{} {:?} {}", operand.name, operand.shape, operand.element))
            .collect();
        operands.join(", ")
    };
    let mut text = format!("{} → {}", typed(&step.reads), typed(&step.writes));
    for (index, weight) in step.weights.iter().enumerate() {
        text.push_str(if index == 0 { "; weights " } else { ", " });
        text.push_str(&format!(
            "{} {:?} {}",
            weight.name, weight.shape, weight.format
        ));
    }
    text
}

/// The kind of a layer, told by the state that its steps write.
fn layer_name(steps: &[StepReport]) -> &'static str {
    let mut written = steps.iter().flat_map(|step| &step.writes);
    if written.any(|operand| operand.name == state_name(StateSlot::KeyCache(0))) {
        "attention layer"
    } else {
        "Gated DeltaNet layer"
    }
}

/// Consecutive steps of one layer, and how many layers have the same.
struct Fold<'a> {
    steps: &'a [StepReport],
    count: usize,
}

fn folds(steps: &[StepReport]) -> Vec<Fold<'_>> {
    let mut folds: Vec<Fold<'_>> = Vec::new();
    for steps in steps.chunk_by(|a, b| a.layer == b.layer) {
        match folds.iter_mut().find(|fold| same(fold.steps, steps)) {
            Some(fold) => {
                // The latest stands for all: the very first layer's input has a name of its own.
                fold.steps = steps;
                fold.count += 1;
            }
            None => folds.push(Fold { steps, count: 1 }),
        }
    }
    folds
}

/// Whether two layers do the same with operands of the same shapes, types and formats.
fn same(some: &[StepReport], others: &[StepReport]) -> bool {
    let formats = |step: &StepReport| -> Vec<(Vec<usize>, String)> {
        step.weights
            .iter()
            .map(|weight| (weight.shape.clone(), weight.format.clone()))
            .collect()
    };
    some.len() == others.len()
        && some[0].layer.is_some() == others[0].layer.is_some()
        && some.iter().zip(others).all(|(a, b)| {
            // The first layer's input is the embedding and has another name than a later one's.
            let shapes = |operands: &[OperandReport]| -> Vec<(Vec<usize>, String)> {
                operands
                    .iter()
                    .map(|operand| (operand.shape.clone(), operand.element.clone()))
                    .collect()
            };
            a.operation == b.operation
                && a.bytes == b.bytes
                && a.flops == b.flops
                && shapes(&a.reads) == shapes(&b.reads)
                && shapes(&a.writes) == shapes(&b.writes)
                && formats(a) == formats(b)
        })
}

/// Text in lines of at most `width` characters, broken between words.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let line = lines.last_mut().expect("at least one line");
        if line.is_empty() {
            line.push_str(word);
        } else if line.chars().count() + 1 + word.chars().count() <= width {
            line.push(' ');
            line.push_str(word);
        } else {
            lines.push(word.to_string());
        }
    }
    lines
}

fn strings<const N: usize>(row: [&str; N]) -> Vec<String> {
    row.map(String::from).to_vec()
}

/// Rows as aligned columns, indented by two. A row of one cell is a heading and widens no column, nor
/// does the last column.
fn table(align: &[Align], rows: &[Vec<String>]) -> String {
    let mut widths = vec![0; align.len()];
    for row in rows.iter().filter(|row| row.len() > 1) {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut text = String::new();
    for row in rows {
        let mut line = String::from(" ");
        for (column, cell) in row.iter().enumerate() {
            let padding = " ".repeat(widths[column].saturating_sub(cell.chars().count()));
            line.push_str(if column == 0 { " " } else { "  " });
            match align[column] {
                Left => line.extend([cell.as_str(), &padding]),
                Right => line.extend([padding.as_str(), cell]),
            }
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

/// A dash instead of nothing, so that what is there stands out.
fn or_dash(amount: String) -> String {
    if amount.starts_with("0 ") {
        "–".into()
    } else {
        amount
    }
}
