//! The operations a plan is made of, with their contracts.
//!
//! Notation: R rows of this run (tokens of one sequence in prefill, one token each of R sessions in
//! decode); H, Nq, Nkv, D, Hk, Hv, Dk, Dv, K, E, k, I, Is, V as in [`ModelConfig`](lily_checkpoint::ModelConfig).
//! Every operation computes in f32 and rounds once, to the element type of the operand it writes.
//! A row's result depends on that row and its past only, at every precision: not on the rows computed with it, nor on
//! how a prompt is cut into chunks. Exception: decode and prefill differ in the last bits, in f32 because decode
//! sums attention by blocks ([`Operation::AttentionPartial`]), in bf16 also because prefill rounds dequantised weights
//! ([`WeightArithmetic::RoundedToBf16`]) and what its longer sequences of steps pass through memory. Sections are those of docs/model.md.

// Shapes stand in brackets and are no links.
#![allow(rustdoc::broken_intra_doc_links)]

use crate::operand::ScratchId;
use lily_checkpoint::WeightId;

/// One output of [`Operation::Projections`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Projection {
    /// `output = x · Wᵀ`.
    Linear {
        /// W [outputs, inputs].
        weight: WeightId,
        /// [R, outputs].
        output: ScratchId,
    },
    /// `output = silu(x · Gᵀ) · (x · Uᵀ)`: gate and up rows of one index are computed together.
    Gated {
        /// G [outputs, inputs].
        gate: WeightId,
        /// U [outputs, inputs].
        up: WeightId,
        /// [R, outputs].
        output: ScratchId,
    },
}

impl Projection {
    /// What it writes.
    pub fn output(&self) -> ScratchId {
        match *self {
            Projection::Linear { output, .. } | Projection::Gated { output, .. } => output,
        }
    }

    /// The weights it reads.
    pub fn weights(&self) -> Vec<WeightId> {
        match *self {
            Projection::Linear { weight, .. } => vec![weight],
            Projection::Gated { gate, up, .. } => vec![gate, up],
        }
    }
}

/// How a product treats quantised weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WeightArithmetic {
    /// `scale · code + bias` enters the product in f32 (decode, and everything at f32 precision).
    Exact,
    /// The dequantised weight is rounded to bfloat16 first, as matrix units take it (bf16 prefill).
    RoundedToBf16,
}

/// An operation with its operands.
#[derive(Clone, Debug, PartialEq)]
pub enum Operation {
    /// `output[r] = dequantised table[token r]`, not rounded further: the residual stream is f32.
    /// Section 5.
    Embed {
        /// [V, H].
        table: WeightId,
        /// [R, H].
        output: ScratchId,
    },
    /// `output = weight · input / sqrt(mean(input²) + eps)` over the H columns of a row. Section 5.
    RmsNorm {
        /// [R, H].
        input: ScratchId,
        /// [H].
        weight: WeightId,
        /// [R, H].
        output: ScratchId,
    },
    /// `output = input · Wᵀ`, accumulated in f32. Section 4.
    Project {
        /// [R, inputs].
        input: ScratchId,
        /// [outputs, inputs].
        weight: WeightId,
        /// [R, outputs].
        output: ScratchId,
        /// Rounding of the dequantised weights.
        arithmetic: WeightArithmetic,
    },
    /// `output = silu(gate) · up`. Section 5.3.
    GatedActivation {
        /// [rows, inner].
        gate: ScratchId,
        /// [rows, inner].
        up: ScratchId,
        /// [rows, inner].
        output: ScratchId,
    },
    /// `output = residual + update`.
    ResidualAdd {
        /// [R, H].
        residual: ScratchId,
        /// [R, H].
        update: ScratchId,
        /// [R, H].
        output: ScratchId,
    },
    /// Depthwise causal convolution over time with silu; the K−1 rows before the run come from the
    /// live history, the last K−1 rows of (history, input) become the next. Section 5.2, step 2.
    Convolve {
        /// Which layer's history.
        layer: u16,
        /// [R, 2·Hk·Dk + Hv·Dv], before convolution.
        input: ScratchId,
        /// [channels, K], the last tap on the current row.
        taps: WeightId,
        /// [R, channels].
        output: ScratchId,
    },
    /// Queries and keys normalised by head (queries also divided by sqrt(Dk)), decay
    /// `g = exp(−exp(A_log) · softplus(a + dt_bias))` and write strength `β = sigmoid(b)`.
    /// Section 5.2, steps 3 and 4.
    DeltaPrepare {
        /// [R, channels]; the value part is not read.
        convolved: ScratchId,
        /// [R, Hv].
        a: ScratchId,
        /// [R, Hv].
        b: ScratchId,
        /// [Hv].
        a_log: WeightId,
        /// [Hv].
        dt_bias: WeightId,
        /// [R, 2·Hk·Dk]: all query heads, then all key heads.
        query_key: ScratchId,
        /// g [R, Hv].
        decay: ScratchId,
        /// β [R, Hv].
        strength: ScratchId,
    },
    /// The gated delta rule over the rows in order, value head h with key head h·Hk/Hv; the state is
    /// f32 throughout: `S ← gS; u = S·k; S ← S + β(v − u)⊗k; y = S·q`. Section 5.2, step 5.
    DeltaScan {
        /// Which layer's state.
        layer: u16,
        /// [R, 2·Hk·Dk].
        query_key: ScratchId,
        /// [R, channels]; only the value part is read.
        convolved: ScratchId,
        /// [R, Hv].
        decay: ScratchId,
        /// [R, Hv].
        strength: ScratchId,
        /// y [R, Hv·Dv].
        output: ScratchId,
    },
    /// `output = rms(input, weight) · silu(gate)`, the norm over each head's Dv. Section 5.2, step 6.
    GatedNorm {
        /// [R, Hv·Dv].
        input: ScratchId,
        /// z [R, Hv·Dv].
        gate: ScratchId,
        /// [Dv].
        weight: WeightId,
        /// [R, Hv·Dv].
        output: ScratchId,
    },
    /// RMS norm of each head's D columns. The heads lie `input columns / heads` apart, so that the
    /// queries of an interleaved query-and-gate row are read in place. Section 5.1, step 2.
    HeadNorm {
        /// [R, heads · (D or 2D)].
        input: ScratchId,
        /// [D].
        weight: WeightId,
        /// [R, heads·D].
        output: ScratchId,
    },
    /// Rotary embedding of the first `rotary_dim` columns of each head at the row's position,
    /// half-split pairing. Frequencies in f64 rounded to f32, angle = f32 product. Section 5.1, step 3.
    Rotate {
        /// [R, heads·D].
        input: ScratchId,
        /// [R, heads·D].
        output: ScratchId,
    },
    /// Appends keys and values to the layer's cache at the rows' positions.
    CacheWrite {
        /// Which layer's cache.
        layer: u16,
        /// [R, Nkv·D], rotated.
        keys: ScratchId,
        /// [R, Nkv·D].
        values: ScratchId,
    },
    /// Causal softmax(q·kᵀ/sqrt(D))·v over the cache up to each row's own position; query head h reads
    /// KV head h·Nkv/Nq. Scores, softmax and sums in f32. Section 5.1, step 4.
    Attention {
        /// Which layer's cache.
        layer: u16,
        /// [R, Nq·D].
        queries: ScratchId,
        /// [R, Nq·D].
        output: ScratchId,
    },
    /// Attention over one block of `block_length` absolute positions at a time: for each row, query
    /// head and block the unnormalised weighted values, the largest score and the sum of weights.
    /// Only blocks that begin at or before the row's position are written. Section 5.1, step 4.
    AttentionPartial {
        /// Which layer's cache.
        layer: u16,
        /// [R, Nq·D].
        queries: ScratchId,
        /// Positions a block.
        block_length: usize,
        /// [R, Nq · blocks · (D + 2)]: D sums, then maximum, then weight.
        output: ScratchId,
    },
    /// The blocks of [`Operation::AttentionPartial`] put together in ascending order.
    AttentionMerge {
        /// [R, Nq · blocks · (D + 2)].
        partials: ScratchId,
        /// Positions a block.
        block_length: usize,
        /// [R, Nq·D].
        output: ScratchId,
    },
    /// `output = input · sigmoid(gate)`, the gate being the second D columns of each head's 2D in
    /// `query_gate`. Section 5.1, step 5.
    OutputGate {
        /// [R, Nq·D].
        input: ScratchId,
        /// [R, Nq·2D].
        query_gate: ScratchId,
        /// [R, Nq·D].
        output: ScratchId,
    },
    /// Softmax over the E logits of a row, the k largest (the lower id wins a tie) in descending
    /// order, their probabilities renormalised to sum 1. Section 5.3, step 1.
    Route {
        /// [R, E].
        logits: ScratchId,
        /// [R, k] u32.
        ids: ScratchId,
        /// [R, k].
        weights: ScratchId,
    },
    /// The (row, choice) pairs in the order of their experts: E+1 offsets, then R·k pair numbers
    /// `row·k + choice`, ascending within an expert.
    GroupExperts {
        /// [R, k].
        ids: ScratchId,
        /// [1, E + 1 + R·k] u32.
        grouping: ScratchId,
    },
    /// For each (row, choice) pair the product with its expert's matrix. Section 5.3, step 2.
    ExpertProject {
        /// [R, inputs] (each row for all its choices) or [R·k, inputs] (one row a pair).
        input: ScratchId,
        /// [R, k].
        ids: ScratchId,
        /// From [`Operation::GroupExperts`]: pairs that share an expert read it once.
        grouping: Option<ScratchId>,
        /// [E, outputs, inputs].
        weight: WeightId,
        /// [R·k, outputs].
        output: ScratchId,
        /// Rounding of the dequantised weights.
        arithmetic: WeightArithmetic,
    },
    /// `output = Σ weight_i · expert_i + sigmoid(shared_gate) · shared`, the sum in order of choice.
    /// Section 5.3, steps 2 and 3.
    Combine {
        /// [R·k, H].
        experts: ScratchId,
        /// [R, k].
        weights: ScratchId,
        /// [R, H].
        shared: ScratchId,
        /// [R, 1], before the sigmoid.
        shared_gate: ScratchId,
        /// [R, H].
        output: ScratchId,
    },
    /// The last row of `input`, where only its logits are wanted.
    SelectLastRow {
        /// [R, H].
        input: ScratchId,
        /// [1, H].
        output: ScratchId,
    },
    /// The id of the largest logit among those that have a token (the lower id wins a tie): what
    /// [`Sample`](Self::Sample) chooses at temperature 0 from logits that nothing changes. Rows that it refuses have
    /// [`NO_TOKEN`](lily_sampling::NO_TOKEN) here too.
    ArgMax {
        /// [R, V].
        logits: ScratchId,
    },
    /// The token that each row's [`SamplingRow`](lily_sampling::SamplingRow) of the launch chooses: the function
    /// [`Chooser::choose`](lily_sampling::Chooser::choose), of which this is a summary.
    ///
    /// 1. Where a logit below the launch's limit of ids is NaN or +∞, or all are −∞, or the mask leaves none that is
    ///    not −∞, the row's token is [`NO_TOKEN`](lily_sampling::NO_TOKEN): the sampler refuses such rows.
    /// 2. In f32, and only for the tokens concerned: bias is added, then the repetition penalty, then presence and
    ///    frequency penalties ([`Adjustment::apply`](lily_sampling::Adjustment::apply)); tokens outside of the mask
    ///    become −∞.
    /// 3. Temperature 0: the largest logit, the lower id of equal ones.
    /// 4. Weights `exp((logit − largest) / temperature)`. Top-k by rank (better logit, then lower id); of what it
    ///    left, the fewest best tokens whose weights sum to at least the share top-p; of those, the ones whose weight
    ///    is at least min-p.
    /// 5. With u = [`uniform`](lily_sampling::uniform)(seed, step), the first token, in ascending order of ids, at
    ///    which the sum of weights exceeds u times their total.
    ///
    /// The reference and the CPU compute weights in f64. Another device may choose differently only where u, the
    /// share or the bar comes as close to a sum of weights as its own weights are inexact.
    Sample {
        /// [R, V].
        logits: ScratchId,
        /// [R, V]: memory to work in. What is left there is the device's own business.
        adjusted: ScratchId,
    },

    // ---- Fused operations: one dispatch each, defined by `expand`. ----
    /// Fused: RMS norm of the input (if any) and several products with it. Each work item normalises
    /// for itself; the normalised row is not rounded and never written.
    Projections {
        /// [R, inputs].
        input: ScratchId,
        /// [inputs].
        norm: Option<WeightId>,
        /// What is computed from it.
        projections: Vec<Projection>,
        /// Rounding of the dequantised weights.
        arithmetic: WeightArithmetic,
    },
    /// Fused: `output = residual + input · Wᵀ`.
    ProjectAdd {
        /// [R, inputs].
        input: ScratchId,
        /// [H, inputs].
        weight: WeightId,
        /// [R, H].
        residual: ScratchId,
        /// [R, H].
        output: ScratchId,
        /// Rounding of the dequantised weights.
        arithmetic: WeightArithmetic,
    },
    /// Fused, one row a session: convolution, preparation, recurrence and gated norm. One work item a
    /// value head; both value heads of a key head convolve its channels, and the lower one writes their
    /// history. Intermediates stay f32.
    DeltaStep {
        /// Which layer's history and state.
        layer: u16,
        /// [R, channels].
        input: ScratchId,
        /// z [R, Hv·Dv].
        gate: ScratchId,
        /// [R, Hv].
        a: ScratchId,
        /// [R, Hv].
        b: ScratchId,
        /// [channels, K].
        taps: WeightId,
        /// [Hv].
        a_log: WeightId,
        /// [Hv].
        dt_bias: WeightId,
        /// [Dv].
        norm: WeightId,
        /// [R, Hv·Dv].
        output: ScratchId,
    },
    /// Fused: query and key norms, rotary embedding, cache write. Intermediates stay f32.
    QueryKeyPrepare {
        /// Which layer's cache.
        layer: u16,
        /// [R, Nq·2D].
        query_gate: ScratchId,
        /// [R, Nkv·D].
        keys: ScratchId,
        /// [R, Nkv·D].
        values: ScratchId,
        /// [D].
        query_norm: WeightId,
        /// [D].
        key_norm: WeightId,
        /// [R, Nq·D].
        queries: ScratchId,
    },
    /// Fused: merge of attention blocks and output gate.
    AttentionMergeGate {
        /// [R, Nq · blocks · (D + 2)].
        partials: ScratchId,
        /// Positions a block.
        block_length: usize,
        /// [R, Nq·2D].
        query_gate: ScratchId,
        /// [R, Nq·D].
        output: ScratchId,
    },
    /// Fused: norm (if any), expert gate and up products, activation.
    ExpertInput {
        /// [R, H].
        input: ScratchId,
        /// [H].
        norm: Option<WeightId>,
        /// [R, k].
        ids: ScratchId,
        /// From [`Operation::GroupExperts`].
        grouping: Option<ScratchId>,
        /// [E, I, H].
        gate: WeightId,
        /// [E, I, H].
        up: WeightId,
        /// [R·k, I].
        output: ScratchId,
        /// Rounding of the dequantised weights.
        arithmetic: WeightArithmetic,
    },
    /// Fused: expert down products, routing weights, shared expert's down product and gate, residual.
    /// Intermediates stay f32.
    ExpertOutput {
        /// [R·k, I].
        activated: ScratchId,
        /// [R, k].
        ids: ScratchId,
        /// [R, k].
        weights: ScratchId,
        /// [E, H, I].
        down: WeightId,
        /// [R, Is].
        shared: ScratchId,
        /// [H, Is].
        shared_down: WeightId,
        /// [R, 1].
        shared_gate: ScratchId,
        /// [R, H].
        residual: ScratchId,
        /// [R, H].
        output: ScratchId,
    },
    /// Fused: combination of the experts and residual.
    CombineAdd {
        /// [R·k, H].
        experts: ScratchId,
        /// [R, k].
        weights: ScratchId,
        /// [R, H].
        shared: ScratchId,
        /// [R, 1].
        shared_gate: ScratchId,
        /// [R, H].
        residual: ScratchId,
        /// [R, H].
        output: ScratchId,
    },

    // ---- Dequantisation as a step of its own: what plans have where its fusion is switched off. ----
    /// `output = scale · code + bias`, rounded to bfloat16 as [`WeightArithmetic::RoundedToBf16`] rounds it: a whole
    /// matrix, all experts of it where there are several.
    Dequantise {
        /// [outputs, inputs] or [E, outputs, inputs].
        weight: WeightId,
        /// What must be there before: no value of it is used. It has the step wait until its product is near, since
        /// otherwise every weight of the model would be dequantised at once, in the first stage.
        after: ScratchId,
        /// [outputs, inputs] or [E·outputs, inputs] bf16.
        output: ScratchId,
    },
    /// A product (fused or not) that reads `matrices` as [`Operation::Dequantise`] has left them, instead of the
    /// quantised weights. Results are the same to the last bit.
    WithDequantised {
        /// The product, with [`WeightArithmetic::RoundedToBf16`].
        product: Box<Operation>,
        /// Which of its weights, and where they are.
        matrices: Vec<(WeightId, ScratchId)>,
    },
}

impl Operation {
    /// The operation's name, as plans print it.
    pub fn name(&self) -> &'static str {
        match self {
            Operation::Embed { .. } => "embed",
            Operation::RmsNorm { .. } => "rms-norm",
            Operation::Project { .. } => "project",
            Operation::GatedActivation { .. } => "gated-activation",
            Operation::ResidualAdd { .. } => "residual-add",
            Operation::Convolve { .. } => "convolve",
            Operation::DeltaPrepare { .. } => "delta-prepare",
            Operation::DeltaScan { .. } => "delta-scan",
            Operation::GatedNorm { .. } => "gated-norm",
            Operation::HeadNorm { .. } => "head-norm",
            Operation::Rotate { .. } => "rotate",
            Operation::CacheWrite { .. } => "cache-write",
            Operation::Attention { .. } => "attention",
            Operation::AttentionPartial { .. } => "attention-partial",
            Operation::AttentionMerge { .. } => "attention-merge",
            Operation::OutputGate { .. } => "output-gate",
            Operation::Route { .. } => "route",
            Operation::GroupExperts { .. } => "group-experts",
            Operation::ExpertProject { .. } => "expert-project",
            Operation::Combine { .. } => "combine",
            Operation::SelectLastRow { .. } => "select-last-row",
            Operation::ArgMax { .. } => "arg-max",
            Operation::Sample { .. } => "sample",
            Operation::Projections { norm: Some(_), .. } => "norm-projections",
            Operation::Projections { norm: None, .. } => "projections",
            Operation::ProjectAdd { .. } => "project-add",
            Operation::DeltaStep { .. } => "delta-step",
            Operation::QueryKeyPrepare { .. } => "query-key-prepare",
            Operation::AttentionMergeGate { .. } => "attention-merge-gate",
            Operation::ExpertInput { .. } => "expert-input",
            Operation::ExpertOutput { .. } => "expert-output",
            Operation::CombineAdd { .. } => "combine-add",
            Operation::Dequantise { .. } => "dequantise",
            Operation::WithDequantised { product, .. } => match product.name() {
                "project" => "dequantised-project",
                "project-add" => "dequantised-project-add",
                "projections" => "dequantised-projections",
                "norm-projections" => "dequantised-norm-projections",
                "expert-project" => "dequantised-expert-project",
                "expert-input" => "dequantised-expert-input",
                other => unreachable!("{other} is no product of many rows"),
            },
        }
    }

    /// The product of [`Operation::WithDequantised`]; the operation itself where it is another.
    pub fn product(&self) -> &Operation {
        match self {
            Operation::WithDequantised { product, .. } => product,
            other => other,
        }
    }

    /// How a product treats its weights; `None` for what is no product.
    pub fn arithmetic(&self) -> Option<WeightArithmetic> {
        match *self.product() {
            Operation::Project { arithmetic, .. }
            | Operation::ProjectAdd { arithmetic, .. }
            | Operation::Projections { arithmetic, .. }
            | Operation::ExpertProject { arithmetic, .. }
            | Operation::ExpertInput { arithmetic, .. } => Some(arithmetic),
            Operation::ExpertOutput { .. } => Some(WeightArithmetic::Exact),
            _ => None,
        }
    }
}
