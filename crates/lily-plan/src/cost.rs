//! Pricing: what a plan's count costs on a machine, as a lower bound of its time. Nothing here is a
//! measurement of a plan: a price says what would remain if every kernel ran at the machine's limits.

use crate::count::Assumptions;
use crate::model::ModelDescription;
use crate::operand::{ElementType, Precision};
use crate::operation::Operation;
use crate::plan::{Phase, Plan};
use serde::Serialize;

/// The limits of a machine that plans are priced for.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Machine {
    /// What it is called, e.g. `M5 Max`.
    pub name: String,
    /// Memory bandwidth, bytes/s.
    pub bandwidth: f64,
    /// Peak of its matrix units at bf16 inputs and f32 sums, FLOP/s: products and attention of prefill.
    pub matrix_flops: f64,
    /// Peak of its vector units in f32, FLOP/s: everything else.
    pub vector_flops: f64,
    /// Cost of one boundary between stages, seconds.
    pub boundary_seconds: f64,
    /// Cost of each dispatch of a stage beyond its first, seconds.
    pub dispatch_seconds: f64,
    /// Least duration, in seconds, of a stage with a step that runs in a single threadgroup (route,
    /// group-experts, arg-max, sample).
    pub single_group_seconds: f64,
    /// Where each of the numbers comes from, one sentence a number.
    pub assumptions: Vec<String>,
}

impl Machine {
    /// Apple M5 Max with the 40-core GPU. Nothing was measured on Apple hardware here: every number is
    /// public, a third party's, or an assumption that says so.
    pub fn m5_max() -> Self {
        Machine {
            name: "M5 Max".into(),
            bandwidth: 614e9,
            matrix_flops: 57e12,
            vector_flops: 40.0 * 128.0 * 2.0 * 1.619e9,
            boundary_seconds: 1.39e-6,
            dispatch_seconds: 0.0,
            single_group_seconds: 2e-6,
            assumptions: [
                "nothing was measured on Apple hardware: public and third-party figures only",
                "bandwidth 614 GB/s: Apple's figure for the 40-core GPU, as public specifications repeat it",
                "matrix units 57 TFLOP/s: third party, the highest rate published for a 4-bit 32-row tile \
                 (splish); another measures about 50 and a clock that sags with heat",
                "vector units 16.6 TFLOP/s: 40 cores × 128 lanes × 2 × 1.619 GHz, the clock from a third \
                 party, the lanes as public for earlier generations",
                "boundary 1.39 µs: third party, 1.38–1.40 µs between dispatches on an M5 Pro (lithos)",
                "further dispatch of a stage 0: no figure is published; zero keeps the price a lower bound",
                "single threadgroup 2 µs: assumed, no figure is published",
            ]
            .map(String::from)
            .to_vec(),
        }
    }

    /// NVIDIA H200.
    pub fn h200() -> Self {
        Machine {
            name: "H200".into(),
            bandwidth: 4.3e12,
            matrix_flops: 790e12,
            vector_flops: 67e12,
            boundary_seconds: 0.88e-6,
            dispatch_seconds: 1.0e-6,
            single_group_seconds: 1.36e-6,
            assumptions: [
                "bandwidth 4.3 TB/s: measured by us, by copy (the data sheet says 4.8)",
                "matrix units 790 TFLOP/s: measured by us, a large bf16 product",
                "vector units 67 TFLOP/s: the data sheet's f32 figure",
                "boundary 0.88 µs: measured by us, each of 500 dependent sums of a row in one graph \
                 (lily-cuda's example measure, latency)",
                "further dispatch of a stage 1.0 µs: measured by us in the same way with two side by side, which a \
                 graph of one stream runs one after the other",
                "single threadgroup 1.36 µs: measured by us, each of 500 choices among 16 experts",
            ]
            .map(String::from)
            .to_vec(),
        }
    }

    /// A processor of `cores` cores with the `bandwidth` (bytes/s) and `flops` (FLOP/s in f32, all cores
    /// together) that the caller measured on it.
    pub fn cpu(bandwidth: f64, cores: usize, flops: f64) -> Self {
        // One worker has nobody to wait for.
        let boundary_seconds = if cores > 1 { 5e-6 } else { 0.0 };
        let plural = if cores == 1 { "" } else { "s" };
        Machine {
            name: "CPU".into(),
            bandwidth,
            matrix_flops: flops,
            vector_flops: flops,
            boundary_seconds,
            dispatch_seconds: 0.0,
            single_group_seconds: 1e-6,
            assumptions: vec![
                format!(
                    "bandwidth {:.1} GB/s and {:.0} GFLOP/s in f32 of {cores} core{plural}: measured by the caller",
                    bandwidth / 1e9,
                    flops / 1e9
                ),
                format!(
                    "boundary {} µs: assumed for waking and joining a pool of threads",
                    boundary_seconds * 1e6
                ),
                "further dispatch of a stage 0: workers take the next step's items without waiting"
                    .into(),
                "single threadgroup 1 µs: assumed for a few hundred values on one core".into(),
            ],
        }
    }
}

/// What kind of number the rate of a [`Price`] is, wherever one is shown.
pub const PRICE_BASIS: &str =
    "upper bound by counting, under the machine's assumptions; not a measurement";

/// The price of a plan on a machine: a lower bound of its duration, by what bounds its stages.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Price {
    /// The whole, the sum of the parts below, in seconds.
    pub seconds: f64,
    /// Stages bound by bytes / bandwidth.
    pub bytes_seconds: f64,
    /// Stages bound by FLOPs / peak.
    pub flops_seconds: f64,
    /// Stages bound by the latency of a single threadgroup.
    pub latency_seconds: f64,
    /// Dispatches beyond the first of their stage.
    pub dispatch_seconds: f64,
    /// Boundaries between stages.
    pub boundary_seconds: f64,
    /// Tokens/s that this duration would mean, over all rows of the plan: **an upper bound by
    /// counting**, never a measurement.
    pub tokens_per_second_at_most: f64,
    /// Says so in data: [`PRICE_BASIS`].
    pub basis: &'static str,
}

impl Plan {
    /// What the plan costs on `machine`: Σ over stages of the longest of bytes / bandwidth, FLOPs / peak
    /// and single-threadgroup latency, further dispatches, and a boundary between each two stages.
    ///
    /// All bytes of the count move at the machine's bandwidth. For scratch that is pessimistic wherever
    /// the arena stays in a cache; in decode it is below 1 % of the bytes.
    pub fn price(&self, machine: &Machine, assumptions: &Assumptions) -> Price {
        let (mut bytes_seconds, mut flops_seconds, mut latency_seconds) = (0.0, 0.0, 0.0);
        let mut dispatch_seconds = 0.0;
        for stage in &self.stages {
            let (mut bytes, mut matrix, mut vector) = (0, 0, 0);
            let mut latency: f64 = 0.0;
            for &step in stage {
                let work = self.work(step, assumptions);
                bytes += work.bytes();
                if self.uses_matrix_units(step) {
                    matrix += work.flops;
                } else {
                    vector += work.flops;
                }
                if self.steps[step].operation.is_single_group() {
                    latency = machine.single_group_seconds;
                }
            }
            let moving = bytes as f64 / machine.bandwidth;
            let computing =
                (matrix as f64 / machine.matrix_flops).max(vector as f64 / machine.vector_flops);
            if latency >= moving && latency >= computing {
                latency_seconds += latency;
            } else if moving >= computing {
                bytes_seconds += moving;
            } else {
                flops_seconds += computing;
            }
            dispatch_seconds += (stage.len() - 1) as f64 * machine.dispatch_seconds;
        }
        let boundary_seconds =
            self.stages.len().saturating_sub(1) as f64 * machine.boundary_seconds;
        let seconds =
            bytes_seconds + flops_seconds + latency_seconds + dispatch_seconds + boundary_seconds;
        Price {
            seconds,
            bytes_seconds,
            flops_seconds,
            latency_seconds,
            dispatch_seconds,
            boundary_seconds,
            tokens_per_second_at_most: self.class.rows as f64 / seconds,
            basis: PRICE_BASIS,
        }
    }

    /// Whether a step's operations can run on matrix units: products and attention over many rows.
    fn uses_matrix_units(&self, step: usize) -> bool {
        self.class.phase == Phase::Prefill
            && matches!(
                self.steps[step].operation,
                Operation::Project { .. }
                    | Operation::Projections { .. }
                    | Operation::ProjectAdd { .. }
                    | Operation::ExpertProject { .. }
                    | Operation::ExpertInput { .. }
                    | Operation::ExpertOutput { .. }
                    | Operation::Attention { .. }
            )
    }
}

impl Operation {
    /// Whether the operation runs in a single threadgroup (for each row), so that latency and not
    /// throughput decides its duration.
    pub fn is_single_group(&self) -> bool {
        matches!(
            self,
            Operation::Route { .. }
                | Operation::GroupExperts { .. }
                | Operation::ArgMax { .. }
                | Operation::Sample { .. }
        )
    }
}

/// Memory that a model and its plans take, before any of it is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryPlan {
    /// All weights in their stored formats, bytes.
    pub weight_bytes: u64,
    /// KV cache, bytes a position of a session.
    pub cache_bytes_per_position: u64,
    /// Recurrent states and convolution histories, both alternating copies, bytes a session.
    pub session_fixed_bytes: u64,
    /// Scratch, bytes: the largest arena of the plans, which never run at the same time.
    pub arena_bytes: u64,
}

impl MemoryPlan {
    /// Memory of `model` at `precision` when `plans` are the ones that run.
    pub fn new(model: &ModelDescription, precision: Precision, plans: &[&Plan]) -> Self {
        let config = &model.config;
        let attention_layers = config.attention_layers();
        let delta_layers = config.layers - attention_layers;
        let activation = precision.activation().bytes();
        let history = (config.conv_kernel - 1) * config.conv_channels() * activation;
        let state = config.linear_value_width() * config.linear_key_dim * ElementType::F32.bytes();
        MemoryPlan {
            weight_bytes: model.total_bytes(),
            cache_bytes_per_position: (attention_layers * 2 * config.key_value_width() * activation)
                as u64,
            session_fixed_bytes: (2 * delta_layers * (history + state)) as u64,
            arena_bytes: plans
                .iter()
                .map(|plan| plan.place(ElementType::bytes).arena_bytes as u64)
                .max()
                .unwrap_or(0),
        }
    }

    /// Bytes in all with `sessions` sessions of `positions` positions each.
    pub fn total_bytes(&self, sessions: u64, positions: u64) -> u64 {
        let session = self.session_fixed_bytes + positions * self.cache_bytes_per_position;
        self.weight_bytes + self.arena_bytes + sessions * session
    }
}
