//! Recording: the forward pass of docs/model.md, section 5, written down once for each phase.

use crate::builder::PlanBuilder;
use crate::model::ModelDescription;
use crate::operand::{ElementType, Precision, ScratchId};
use crate::operation::{Operation, Projection, WeightArithmetic};
use crate::plan::{Phase, Plan, PlanClass, PlanOutput};
use crate::route;
use lily_checkpoint::{LayerKind, WeightId, WeightRole};
use std::sync::Arc;

impl Plan {
    /// Records the forward pass of `model` for `class`, fused.
    pub fn record(model: &Arc<ModelDescription>, class: PlanClass) -> Plan {
        let mut recorder = Recorder {
            arithmetic: match (class.phase, class.precision) {
                (Phase::Prefill, Precision::Bf16) => WeightArithmetic::RoundedToBf16,
                _ => WeightArithmetic::Exact,
            },
            builder: PlanBuilder::new(model, class),
        };
        let logits = recorder.forward();
        recorder.builder.finish(logits, Vec::new())
    }
}

struct Recorder {
    builder: PlanBuilder,
    arithmetic: WeightArithmetic,
}

/// What the mixture of experts is made from: routing, and the shared expert's part.
struct Routed {
    ids: ScratchId,
    weights: ScratchId,
    shared: ScratchId,
    shared_gate: ScratchId,
}

impl Recorder {
    fn forward(&mut self) -> Option<ScratchId> {
        let table = WeightId::global(WeightRole::Embedding);
        let output = self.stream("embedded");
        self.push(Operation::Embed { table, output });
        let mut residual = output;
        for layer in 0..self.builder.model.config.layers {
            self.builder.set_layer(Some(layer));
            residual = match self.builder.model.config.layer_kind(layer) {
                LayerKind::GatedDelta => self.gated_delta(layer, residual),
                LayerKind::Attention => self.attention(layer, residual),
            };
            residual = match self.builder.class.phase {
                Phase::Prefill => self.experts_prefill(layer, residual),
                Phase::Decode => self.experts_decode(layer, residual),
            };
        }
        self.builder.set_layer(None);
        self.head(residual)
    }

    fn gated_delta(&mut self, layer: usize, residual: ScratchId) -> ScratchId {
        let config = self.builder.model.config.clone();
        let weight = |role| WeightId::in_layer(layer, role);
        let rows = self.builder.class.rows;
        let mixed = self.activation("qkv", rows, config.conv_channels());
        let gate = self.activation("z", rows, config.linear_value_width());
        let b = self.float("b", rows, config.linear_value_heads);
        let a = self.float("a", rows, config.linear_value_heads);
        self.norm_and_project(
            residual,
            weight(WeightRole::InputNorm),
            vec![
                linear(weight(WeightRole::DeltaQkv), mixed),
                linear(weight(WeightRole::DeltaZ), gate),
                linear(weight(WeightRole::DeltaB), b),
                linear(weight(WeightRole::DeltaA), a),
            ],
        );
        let output = self.activation("mixed", rows, config.linear_value_width());
        let step = Operation::DeltaStep {
            layer: layer as u16,
            input: mixed,
            gate,
            a,
            b,
            taps: weight(WeightRole::DeltaConv),
            a_log: weight(WeightRole::DeltaALog),
            dt_bias: weight(WeightRole::DeltaDtBias),
            norm: weight(WeightRole::DeltaNorm),
            output,
        };
        match self.builder.class.phase {
            Phase::Decode => self.push(step),
            // Over many rows the parts want shapes of their own, and what passes between them through
            // memory is rounded like every activation.
            Phase::Prefill => {
                for mut part in step.expand(&self.builder.model.clone(), &mut self.builder.scratch)
                {
                    if let Operation::Convolve { output, .. }
                    | Operation::DeltaScan { output, .. } = &mut part
                    {
                        let element = self.builder.class.precision.activation();
                        self.builder.scratch.specs[output.index()].element = element;
                    }
                    self.push(part);
                }
            }
        }
        self.project_add(output, weight(WeightRole::DeltaOut), residual)
    }

    fn attention(&mut self, layer: usize, residual: ScratchId) -> ScratchId {
        let config = self.builder.model.config.clone();
        let weight = |role| WeightId::in_layer(layer, role);
        let rows = self.builder.class.rows;
        let (wide, narrow) = (config.attention_width(), config.key_value_width());
        let query_gate = self.activation("query-gate", rows, 2 * wide);
        let keys = self.activation("keys", rows, narrow);
        let values = self.activation("values", rows, narrow);
        self.norm_and_project(
            residual,
            weight(WeightRole::InputNorm),
            vec![
                linear(weight(WeightRole::Query), query_gate),
                linear(weight(WeightRole::Key), keys),
                linear(weight(WeightRole::Value), values),
            ],
        );
        let queries = self.activation("queries", rows, wide);
        self.push(Operation::QueryKeyPrepare {
            layer: layer as u16,
            query_gate,
            keys,
            values,
            query_norm: weight(WeightRole::QueryNorm),
            key_norm: weight(WeightRole::KeyNorm),
            queries,
        });
        let gated = self.activation("gated", rows, wide);
        match self.builder.class.phase {
            Phase::Prefill => {
                let output = self.activation("attended", rows, wide);
                self.push(Operation::Attention {
                    layer: layer as u16,
                    queries,
                    output,
                });
                self.push(Operation::OutputGate {
                    input: output,
                    query_gate,
                    output: gated,
                });
            }
            Phase::Decode => {
                let block_length = route::attention_block_length(self.builder.class.context);
                let blocks = self.builder.class.context.div_ceil(block_length);
                let columns = config.attention_heads * blocks * (config.head_dim + 2);
                let partials = self.float("partials", rows, columns);
                self.push(Operation::AttentionPartial {
                    layer: layer as u16,
                    queries,
                    block_length,
                    output: partials,
                });
                self.push(Operation::AttentionMergeGate {
                    partials,
                    block_length,
                    query_gate,
                    output: gated,
                });
            }
        }
        self.project_add(gated, weight(WeightRole::AttentionOut), residual)
    }

    /// Router, shared expert's inner part and scalar gate, and the choice of experts.
    fn route(&mut self, layer: usize, input: ScratchId, norm: Option<WeightId>) -> Routed {
        let config = self.builder.model.config.clone();
        let weight = |role| WeightId::in_layer(layer, role);
        let rows = self.builder.class.rows;
        let logits = self.float("router-logits", rows, config.experts);
        let shared_gate = self.float("shared-gate", rows, 1);
        let shared = self.activation("shared-inner", rows, config.shared_intermediate);
        let projections = vec![
            linear(weight(WeightRole::Router), logits),
            linear(weight(WeightRole::SharedGate), shared_gate),
            Projection::Gated {
                gate: weight(WeightRole::SharedGateProjection),
                up: weight(WeightRole::SharedUp),
                output: shared,
            },
        ];
        self.push(Operation::Projections {
            input,
            norm,
            projections,
            arithmetic: self.arithmetic,
        });
        let ids = self.builder.scratch(
            "expert-ids",
            rows,
            config.experts_per_token,
            ElementType::U32,
        );
        let weights = self.float("expert-weights", rows, config.experts_per_token);
        self.push(Operation::Route {
            logits,
            ids,
            weights,
        });
        Routed {
            ids,
            weights,
            shared,
            shared_gate,
        }
    }

    fn experts_decode(&mut self, layer: usize, residual: ScratchId) -> ScratchId {
        let config = self.builder.model.config.clone();
        let weight = |role| WeightId::in_layer(layer, role);
        let norm = Some(weight(WeightRole::PostNorm));
        let Routed {
            ids,
            weights,
            shared,
            shared_gate,
        } = self.route(layer, residual, norm);
        let pairs = self.builder.class.rows * config.experts_per_token;
        let activated = self.activation("expert-inner", pairs, config.expert_intermediate);
        self.push(Operation::ExpertInput {
            input: residual,
            norm,
            ids,
            grouping: None,
            gate: weight(WeightRole::ExpertGateProjection),
            up: weight(WeightRole::ExpertUp),
            output: activated,
            arithmetic: self.arithmetic,
        });
        let output = self.stream("residual");
        self.push(Operation::ExpertOutput {
            activated,
            ids,
            weights,
            down: weight(WeightRole::ExpertDown),
            shared,
            shared_down: weight(WeightRole::SharedDown),
            shared_gate,
            residual,
            output,
        });
        output
    }

    fn experts_prefill(&mut self, layer: usize, residual: ScratchId) -> ScratchId {
        let config = self.builder.model.config.clone();
        let weight = |role| WeightId::in_layer(layer, role);
        let rows = self.builder.class.rows;
        let normed = self.norm(residual, weight(WeightRole::PostNorm));
        let Routed {
            ids,
            weights,
            shared,
            shared_gate,
        } = self.route(layer, normed, None);
        let pairs = rows * config.experts_per_token;
        let grouping =
            self.builder
                .scratch("grouping", 1, config.experts + 1 + pairs, ElementType::U32);
        self.push(Operation::GroupExperts { ids, grouping });
        let activated = self.activation("expert-inner", pairs, config.expert_intermediate);
        self.push(Operation::ExpertInput {
            input: normed,
            norm: None,
            ids,
            grouping: Some(grouping),
            gate: weight(WeightRole::ExpertGateProjection),
            up: weight(WeightRole::ExpertUp),
            output: activated,
            arithmetic: self.arithmetic,
        });
        let experts = self.activation("expert-outputs", pairs, config.hidden_size);
        self.push(Operation::ExpertProject {
            input: activated,
            ids,
            grouping: Some(grouping),
            weight: weight(WeightRole::ExpertDown),
            output: experts,
            arithmetic: self.arithmetic,
        });
        let shared_output = self.activation("shared-output", rows, config.hidden_size);
        self.push(Operation::Project {
            input: shared,
            weight: weight(WeightRole::SharedDown),
            output: shared_output,
            arithmetic: self.arithmetic,
        });
        let output = self.stream("residual");
        self.push(Operation::CombineAdd {
            experts,
            weights,
            shared: shared_output,
            shared_gate,
            residual,
            output,
        });
        output
    }

    fn head(&mut self, residual: ScratchId) -> Option<ScratchId> {
        let config = self.builder.model.config.clone();
        let (input, rows) = match self.builder.class.output {
            PlanOutput::State => return None,
            PlanOutput::LastLogits if self.builder.class.rows > 1 => {
                let output = self.float("last-row", 1, config.hidden_size);
                self.push(Operation::SelectLastRow {
                    input: residual,
                    output,
                });
                (output, 1)
            }
            _ => (residual, self.builder.class.rows),
        };
        let logits = self.float("logits", rows, config.vocab_size);
        // Exact in prefill too: a prompt's first token is chosen as every other, and scores are those of the
        // logits that are sampled from.
        let arithmetic = WeightArithmetic::Exact;
        self.push(Operation::Projections {
            input,
            norm: Some(WeightId::global(WeightRole::FinalNorm)),
            projections: vec![linear(self.builder.model.head(), logits)],
            arithmetic,
        });
        match self.builder.class.output {
            PlanOutput::Token => {
                self.push(Operation::ArgMax { logits });
                return None;
            }
            PlanOutput::Sampled => {
                let adjusted = self.float("adjusted", rows, config.vocab_size);
                self.push(Operation::Sample { logits, adjusted });
                return None;
            }
            PlanOutput::State | PlanOutput::LastLogits | PlanOutput::AllLogits => {}
        }
        Some(logits)
    }

    /// Decode: norm and products in one step. Prefill: the norm is a step of its own, since every tile
    /// of the product would repeat it.
    fn norm_and_project(&mut self, input: ScratchId, norm: WeightId, projections: Vec<Projection>) {
        let arithmetic = self.arithmetic;
        let (input, norm) = match self.builder.class.phase {
            Phase::Decode => (input, Some(norm)),
            Phase::Prefill => (self.norm(input, norm), None),
        };
        self.push(Operation::Projections {
            input,
            norm,
            projections,
            arithmetic,
        });
    }

    fn norm(&mut self, input: ScratchId, weight: WeightId) -> ScratchId {
        let output = self.activation(
            "normed",
            self.builder.class.rows,
            self.builder.model.config.hidden_size,
        );
        self.push(Operation::RmsNorm {
            input,
            weight,
            output,
        });
        output
    }

    fn project_add(
        &mut self,
        input: ScratchId,
        weight: WeightId,
        residual: ScratchId,
    ) -> ScratchId {
        let output = self.stream("residual");
        let arithmetic = self.arithmetic;
        self.push(Operation::ProjectAdd {
            input,
            weight,
            residual,
            output,
            arithmetic,
        });
        output
    }

    /// A value of the residual stream: [R, H], f32 at every precision.
    fn stream(&mut self, name: &'static str) -> ScratchId {
        self.float(
            name,
            self.builder.class.rows,
            self.builder.model.config.hidden_size,
        )
    }

    fn activation(&mut self, name: &'static str, rows: usize, columns: usize) -> ScratchId {
        self.builder.scratch(
            name,
            rows,
            columns,
            self.builder.class.precision.activation(),
        )
    }

    fn float(&mut self, name: &'static str, rows: usize, columns: usize) -> ScratchId {
        self.builder.scratch(name, rows, columns, ElementType::F32)
    }

    fn push(&mut self, operation: Operation) {
        self.builder.push(operation);
    }
}

fn linear(weight: WeightId, output: ScratchId) -> Projection {
    Projection::Linear { weight, output }
}
