//! Operations as dispatches: which kernel, in which form, bound to what, on which grid.

mod attention;
mod delta;
mod dense;
mod elementwise;
mod experts;
pub mod launch;
mod sampling;

use crate::gpu::{Cost, Divisible, GpuDescription, MatrixUnits};
pub use sampling::MOST_SAMPLED_TOKENS;

use crate::kernels::{Bound, Input, Kernel, Memory, Output, Region};
use crate::state::StateLayout;
use crate::switches::Switches;
use lily_checkpoint::{ModelConfig, WeightFormat, WeightId};
use lily_plan::{
    Assumptions, DeviceError, ElementType, Operation, Phase, Placement, Plan, ScratchId,
    WeightArithmetic,
};

/// A dispatch of a recorded plan.
#[derive(Clone, Debug)]
pub struct Recorded {
    /// The kernel with its operands.
    pub bound: Bound,
    /// Threadgroups.
    pub grid: [u32; 3],
    /// Threads of a threadgroup.
    pub threads: u32,
    /// The plan's step it belongs to.
    pub step: usize,
    /// Whether it reaches the sessions' memory.
    pub reaches_sessions: bool,
    /// What it costs in an empty context, and for each position before the run.
    pub cost: [Cost; 2],
    /// How its grid can be cut.
    pub divisible: Option<Divisible>,
}

/// A plan as dispatches: stage by stage, each stage's dispatches independent of one another.
#[derive(Clone, Debug)]
pub struct Recording {
    /// Dispatches by stage of the plan.
    pub stages: Vec<Vec<Recorded>>,
    /// Where scratch values lie in the arena.
    pub placement: Placement,
}

impl Recording {
    /// Dispatches in all.
    pub fn dispatches(&self) -> usize {
        self.stages.iter().map(Vec::len).sum()
    }
}

/// Records `plan` as dispatches.
pub fn record(
    plan: &Plan,
    layout: &StateLayout,
    switches: &Switches,
    gpu: &GpuDescription,
) -> Result<Recording, DeviceError> {
    let placement = plan.place(ElementType::bytes);
    let mut recorder = Recorder {
        plan,
        config: &plan.model.config,
        placement: &placement,
        layout,
        switches,
        gpu,
        step: 0,
        dequantised: Vec::new(),
        out: Vec::new(),
    };
    let mut stages = Vec::with_capacity(plan.stages.len());
    for steps in &plan.stages {
        for &step in steps {
            let before = recorder.out.len();
            recorder.step = step;
            recorder.operation(&plan.steps[step].operation)?;
            let these = &mut recorder.out[before..];
            let cost = cost(plan, step, these.len());
            these.iter_mut().for_each(|recorded| recorded.cost = cost);
        }
        stages.push(std::mem::take(&mut recorder.out));
    }
    Ok(Recording { stages, placement })
}

/// What each of the `count` dispatches of a step costs in an empty context, and for each position before the run.
fn cost(plan: &Plan, step: usize, count: usize) -> [Cost; 2] {
    const FAR: usize = 4_096;
    let [near, far] = [0, FAR].map(|context| {
        let work = plan.work(step, &Assumptions::at_context(context));
        [work.flops, work.bytes()].map(|number| number as f64 / count as f64)
    });
    let of = |[operations, bytes]: [f64; 2]| Cost { operations, bytes };
    let each = |index: usize| (far[index] - near[index]) / FAR as f64;
    [of(near), of([each(0), each(1)])]
}

/// The instance of a kernel with this host name.
fn instance(names: &'static [(&'static str, &'static str)], wanted: &str) -> &'static str {
    let found = names.iter().find(|(name, _)| *name == wanted);
    found.unwrap_or_else(|| panic!("no instance {wanted}")).0
}

struct Recorder<'a> {
    plan: &'a Plan,
    config: &'a ModelConfig,
    placement: &'a Placement,
    layout: &'a StateLayout,
    switches: &'a Switches,
    gpu: &'a GpuDescription,
    step: usize,
    /// Weights that the product being recorded finds dequantised.
    dequantised: Vec<(WeightId, ScratchId)>,
    out: Vec<Recorded>,
}

impl Recorder<'_> {
    fn operation(&mut self, operation: &Operation) -> Result<(), DeviceError> {
        match *operation {
            Operation::Embed { table, output } => self.embed(table, output),
            Operation::RmsNorm {
                input,
                weight,
                output,
            } => self.rms_norm(input, weight, output),
            Operation::GatedActivation { gate, up, output } => {
                self.gated_activation(gate, up, output);
            }
            Operation::ResidualAdd {
                residual,
                update,
                output,
            } => self.residual_add(residual, update, output),
            Operation::SelectLastRow { input, output } => self.select_last_row(input, output),
            Operation::ArgMax { logits } => self.arg_max(logits),
            Operation::Sample { logits, adjusted } => self.sample(logits, adjusted)?,
            Operation::Project {
                input,
                weight,
                output,
                arithmetic,
            } => {
                let one = [lily_plan::Projection::Linear { weight, output }];
                self.projections(input, None, &one, None, arithmetic)?;
            }
            Operation::ProjectAdd {
                input,
                weight,
                residual,
                output,
                arithmetic,
            } => {
                let one = [lily_plan::Projection::Linear { weight, output }];
                self.projections(input, None, &one, Some(residual), arithmetic)?;
            }
            Operation::Projections {
                input,
                norm,
                ref projections,
                arithmetic,
            } => self.projections(input, norm, projections, None, arithmetic)?,
            Operation::Route {
                logits,
                ids,
                weights,
            } => self.route(logits, ids, weights)?,
            Operation::GroupExperts { ids, grouping } => self.group_experts(ids, grouping)?,
            Operation::ExpertProject {
                input,
                ids,
                grouping,
                weight,
                output,
                arithmetic,
            } => {
                self.project_experts(
                    input,
                    None,
                    (ids, grouping),
                    [weight, weight],
                    output,
                    arithmetic,
                )?;
            }
            Operation::ExpertInput {
                input,
                norm,
                ids,
                grouping,
                gate,
                up,
                output,
                arithmetic,
            } => {
                self.project_experts(input, norm, (ids, grouping), [gate, up], output, arithmetic)?;
            }
            Operation::ExpertOutput { .. } => self.expert_output(operation),
            Operation::Combine {
                experts,
                weights,
                shared,
                shared_gate,
                output,
            } => self.combine([experts, weights, shared, shared_gate], None, output),
            Operation::CombineAdd {
                experts,
                weights,
                shared,
                shared_gate,
                residual,
                output,
            } => self.combine(
                [experts, weights, shared, shared_gate],
                Some(residual),
                output,
            ),
            Operation::Convolve {
                layer,
                input,
                taps,
                output,
            } => self.convolve(layer, input, taps, output),
            Operation::DeltaPrepare { .. } => self.delta_prepare(operation),
            Operation::DeltaScan {
                layer,
                query_key,
                convolved,
                decay,
                strength,
                output,
            } => self.delta_scan(layer, [query_key, convolved, decay, strength], output),
            Operation::GatedNorm {
                input,
                gate,
                weight,
                output,
            } => self.gated_norm(input, gate, weight, output),
            Operation::DeltaStep { .. } => self.delta_step(operation),
            Operation::HeadNorm {
                input,
                weight,
                output,
            } => self.head_norm(input, weight, output),
            Operation::Rotate { input, output } => self.rotate(input, output),
            Operation::CacheWrite {
                layer,
                keys,
                values,
            } => self.cache_write(layer, keys, values),
            Operation::QueryKeyPrepare { .. } => self.query_key_prepare(operation),
            Operation::Attention {
                layer,
                queries,
                output,
            } => self.attention(layer, queries, output),
            Operation::AttentionPartial {
                layer,
                queries,
                block_length,
                output,
            } => self.attention_partial(layer, queries, block_length, output),
            Operation::AttentionMerge {
                partials,
                block_length,
                output,
            } => self.merge_blocks(partials, block_length, None, output),
            Operation::AttentionMergeGate {
                partials,
                block_length,
                query_gate,
                output,
            } => self.merge_blocks(partials, block_length, Some(query_gate), output),
            Operation::OutputGate {
                input,
                query_gate,
                output,
            } => self.output_gate(input, query_gate, output),
            Operation::Dequantise { weight, output, .. } => self.dequantise(weight, output),
            Operation::WithDequantised {
                ref product,
                ref matrices,
            } => {
                self.dequantised.clone_from(matrices);
                self.operation(product)?;
                self.dequantised.clear();
            }
        }
        Ok(())
    }

    /// Adds a dispatch.
    fn dispatch(&mut self, kernel: impl Kernel, grid: [usize; 3], threads: usize) {
        self.add(kernel, grid, threads, false);
    }

    /// Adds a dispatch of a kernel that reaches the sessions' memory.
    fn dispatch_on_sessions(&mut self, kernel: impl Kernel, grid: [usize; 3], threads: usize) {
        self.add(kernel, grid, threads, true);
    }

    fn add(
        &mut self,
        kernel: impl Kernel,
        grid: [usize; 3],
        threads: usize,
        reaches_sessions: bool,
    ) {
        self.out.push(Recorded {
            bound: kernel.bind(),
            grid: grid
                .map(|size| u32::try_from(size).expect("plans are bounded by the model's sizes")),
            threads: threads as u32,
            step: self.step,
            reaches_sessions,
            cost: [Cost::default(); 2],
            divisible: None,
        });
    }

    /// The last dispatch can be cut along an axis of its grid: the word at index `first` says where a part begins.
    fn divisible(&mut self, axis: usize, first: usize) {
        let last = self.out.last_mut().expect("a dispatch");
        last.divisible = Some(Divisible { axis, first });
    }

    fn region(&self, id: ScratchId) -> Region {
        Region {
            memory: Memory::Arena,
            offset: self.placement.range(id).start,
            bytes: self.plan.spec(id).bytes(),
        }
    }

    fn input(&self, id: ScratchId) -> Input {
        Input(self.region(id))
    }

    fn output(&self, id: ScratchId) -> Output {
        Output(self.region(id))
    }

    /// Where the product being recorded finds a weight dequantised.
    fn dequantised(&self, id: WeightId) -> Option<ScratchId> {
        let mut all = self.dequantised.iter();
        all.find(|(weight, _)| *weight == id)
            .map(|(_, value)| *value)
    }

    /// A weight whole; its buffer knows its length.
    fn weight(&self, id: WeightId) -> Input {
        if let Some(value) = self.dequantised(id) {
            return self.input(value);
        }
        Input(Region {
            memory: Memory::Weight(id),
            offset: 0,
            bytes: usize::MAX,
        })
    }

    fn launch(&self, offset: usize, bytes: usize) -> Region {
        Region {
            memory: Memory::Launch,
            offset,
            bytes,
        }
    }

    fn sessions(&self) -> Input {
        Input(self.launch(
            launch::SESSIONS,
            launch::MOST_SESSIONS * launch::SESSION_BYTES,
        ))
    }

    /// Sessions and all else that a row's turn changes.
    fn table(&self) -> Output {
        Output(self.launch(0, launch::TOKENS))
    }

    /// The tokens of the run behind this one: in the place of this run's.
    fn next_tokens(&self) -> Output {
        Output(self.launch(launch::TOKENS, self.rows() * 4))
    }

    fn chosen(&self) -> Output {
        let (rows, chosen) = (self.rows(), self.plan.chosen_rows());
        Output(self.launch(launch::chosen(rows, 0), launch::chosen_bytes(chosen)))
    }

    fn frequencies(&self) -> Input {
        Input(Region {
            memory: Memory::Frequencies,
            offset: 0,
            bytes: usize::MAX,
        })
    }

    fn is_bfloat(&self, id: ScratchId) -> bool {
        self.plan.spec(id).element == ElementType::Bf16
    }

    fn columns(&self, id: ScratchId) -> usize {
        self.plan.spec(id).columns
    }

    fn rows_of(&self, id: ScratchId) -> usize {
        self.plan.spec(id).rows
    }

    fn rows(&self) -> usize {
        self.plan.class.rows
    }

    fn is_sequence(&self) -> bool {
        self.plan.class.phase == Phase::Prefill
    }

    fn is_bfloat_plan(&self) -> bool {
        self.plan.class.precision.activation() == ElementType::Bf16
    }

    fn epsilon(&self) -> f32 {
        self.config.rms_norm_eps as f32
    }

    /// Width of a matrix's codes (loading has refused what is not affine), or of bfloats.
    fn bits(&self, id: WeightId) -> u32 {
        if self.dequantised(id).is_some() {
            return 16;
        }
        match self.plan.model.format(id) {
            WeightFormat::Affine { bits, .. } => u32::from(bits),
            WeightFormat::Plain(_) => unreachable!("refused when weights were loaded"),
        }
    }

    fn units(&self) -> MatrixUnits {
        self.switches.units(self.gpu.matrix_units)
    }

    /// What tiles a product of many rows takes: the first word of its kernels' names. None where weights are exact,
    /// unless the machine's tensor operations apply scale and bias to sums of a group.
    fn tiles(
        &self,
        input: ScratchId,
        norm: Option<WeightId>,
        arithmetic: WeightArithmetic,
    ) -> Option<&'static str> {
        let exact = arithmetic == WeightArithmetic::Exact;
        let packed = self.units() == MatrixUnits::PackedTensorOperations
            && self.is_sequence()
            && self.is_bfloat(input)
            && norm.is_none();
        match self.units() {
            _ if exact => packed.then_some("packed"),
            MatrixUnits::TensorOperations | MatrixUnits::PackedTensorOperations => Some("tensor"),
            MatrixUnits::SimdgroupMatrices | MatrixUnits::SixteenBitMatrices => Some("tile"),
        }
    }

    fn unsupported(&self, what: String, reason: &str) -> DeviceError {
        DeviceError::Unsupported {
            device: self.gpu.device.into(),
            what,
            reason: reason.into(),
        }
    }
}
