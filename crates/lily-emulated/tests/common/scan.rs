//! The delta rule over rows as a plan of its own, on inputs that a test chooses.

use lily_plan::{
    Device, DeviceError, ElementType, Launch, ModelDescription, Observer, Operation, Phase, Plan,
    PlanBuilder, PlanClass, PlanOutput, Precision, ScratchId, SessionState, StateCopy, StateSlot,
};
use serde_json::Value;
use std::ops::Range;
use std::sync::Arc;

/// Inputs of many rows.
pub struct Inputs {
    heads: [usize; 2],
    widths: [usize; 2],
    query_key: Vec<f32>,
    convolved: Vec<f32>,
    /// A number a row and value head, as `strength`.
    pub decay: Vec<f32>,
    pub strength: Vec<f32>,
}

impl Inputs {
    /// Random ones for the shapes in a model's `config.json`: decays from nearly none to nearly all, queries and keys
    /// of the lengths that they have there.
    pub fn random(rows: usize, shapes: &Value, seed: u64) -> Self {
        let number = |name: &str| shapes[name].as_u64().unwrap() as usize;
        let heads = [
            number("linear_num_key_heads"),
            number("linear_num_value_heads"),
        ];
        let widths = [
            number("linear_key_head_dim"),
            number("linear_value_head_dim"),
        ];
        let mut bits = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut random = move || {
            bits ^= bits << 13;
            bits ^= bits >> 7;
            bits ^= bits << 17;
            (bits >> 40) as f32 / (1 << 23) as f32 - 1.0
        };
        let keys = heads[0] * widths[0];
        let channels = 2 * keys + heads[1] * widths[1];
        let mut query_key: Vec<f32> = (0..rows * 2 * keys).map(|_| random()).collect();
        for (index, head) in query_key.chunks_mut(widths[0]).enumerate() {
            let length = head.iter().map(|x| x * x).sum::<f32>().sqrt();
            let is_query = index / heads[0] % 2 == 0;
            let divisor = length
                * if is_query {
                    (widths[0] as f32).sqrt()
                } else {
                    1.0
                };
            head.iter_mut().for_each(|x| *x /= divisor);
        }
        // Exact as bfloats, in either precision.
        let convolved = (0..rows * channels)
            .map(|_| (random() * 64.0).round() / 64.0)
            .collect();
        let decay = (0..rows * heads[1])
            .map(|_| 1.0 - random().abs().powi(4))
            .collect();
        let strength = (0..rows * heads[1]).map(|_| random().abs()).collect();
        Inputs {
            heads,
            widths,
            query_key,
            convolved,
            decay,
            strength,
        }
    }

    /// All keys are the first one.
    pub fn alike(&mut self) {
        let keys = self.heads[0] * self.widths[0];
        let first = self.query_key[keys..2 * keys].to_vec();
        for row in self.query_key.chunks_mut(2 * keys) {
            row[keys..].copy_from_slice(&first);
        }
    }

    /// Every second key points the other way.
    pub fn alternate(&mut self) {
        let keys = self.heads[0] * self.widths[0];
        for row in self.query_key.chunks_mut(2 * keys).step_by(2) {
            row[keys..].iter_mut().for_each(|x| *x = -*x);
        }
    }
}

/// A session that scans.
pub struct Scan<'a> {
    device: &'a mut dyn Device,
    model: Arc<ModelDescription>,
    session: Box<dyn SessionState>,
    precision: Precision,
}

impl<'a> Scan<'a> {
    pub fn new(
        device: &'a mut dyn Device,
        model: &Arc<ModelDescription>,
        precision: Precision,
    ) -> Self {
        Scan {
            session: device.new_session(precision, 1_024).unwrap(),
            device,
            model: model.clone(),
            precision,
        }
    }

    /// Runs these rows of the inputs as one run; returns their outputs.
    pub fn run(&mut self, inputs: &Inputs, rows: Range<usize>) -> Result<Vec<f32>, DeviceError> {
        let class = PlanClass {
            phase: Phase::Prefill,
            precision: self.precision,
            rows: rows.len(),
            context: 4_096,
            output: PlanOutput::State,
        };
        let mut builder = PlanBuilder::new(&self.model, class);
        builder.set_layer(Some(0));
        let (keys, values) = (
            inputs.heads[0] * inputs.widths[0],
            inputs.heads[1] * inputs.widths[1],
        );
        let activation = self.precision.activation();
        let mut preset = Vec::new();
        let mut input = |name, values: &[f32], element| {
            let columns = values.len() / (inputs.decay.len() / inputs.heads[1]);
            let id = builder.scratch(name, rows.len(), columns, element);
            let part = &values[rows.start * columns..rows.end * columns];
            preset.push((id, part.to_vec()));
            id
        };
        let query_key = input("query_key", &inputs.query_key, ElementType::F32);
        let convolved = input("convolved", &inputs.convolved, activation);
        let decay = input("decay", &inputs.decay, ElementType::F32);
        let strength = input("strength", &inputs.strength, ElementType::F32);
        debug_assert_eq!(
            inputs.convolved.len() / (inputs.decay.len() / inputs.heads[1]),
            2 * keys + values
        );
        let output = builder.scratch("output", rows.len(), values, activation);
        builder.push(Operation::DeltaScan {
            layer: 0,
            query_key,
            convolved,
            decay,
            strength,
            output,
        });
        let plan: Arc<Plan> = Arc::new(builder.finish(None, vec![output]));
        let mut look = Look(output, Vec::new());
        self.device.execute(
            &plan,
            Launch {
                tokens: &vec![0; rows.len()],
                sessions: &mut [self.session.as_mut()],
                preset: &preset,
                token_limit: 96,
                sampling: &[],
                observer: Some(&mut look),
            },
        )?;
        Ok(look.1)
    }

    /// The state behind the last run.
    pub fn state(&self) -> Vec<f32> {
        self.session
            .read(StateSlot::RecurrentState(0, StateCopy::Live))
    }
}

struct Look(ScratchId, Vec<f32>);

impl Observer for Look {
    fn after_step(&mut self, _: usize, read: &dyn Fn(ScratchId) -> Vec<f32>) {
        self.1 = read(self.0);
    }
}
