//! Small plans on the emulated device, on inputs that a test chooses: held against the reference, and every byte of
//! memory that is not theirs to write held against what was there before.

use lily_checkpoint::{Checkpoint, bf16_to_f32};
use lily_cpu::{CpuDevice, CpuOptions, Kernels};
use lily_emulated::{Emulated, EmulatedOptions};
use lily_gpu::{Argument, Gpu, GpuDevice, Stage};
use lily_msl::{BuildKind, SharedBuffer};
use lily_plan::{
    Device, DeviceError, ElementType, Launch, ModelDescription, Phase, Plan, PlanBuilder,
    PlanClass, PlanOutput, Precision, Resource, ScratchId, SessionState,
};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

/// What stands where no kernel has a business.
const UNTOUCHED: u8 = 0x5a;
/// What stands in outputs before: NaN, and no number of an expert.
const UNWRITTEN: u8 = 0xff;

/// Numbers from -1 to 1, the same on every run.
pub fn random(count: usize, seed: u64) -> Vec<f32> {
    let mut bits = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        bits ^= bits << 13;
        bits ^= bits >> 7;
        bits ^= bits << 17;
        (bits >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// A plan being made, with what its inputs hold.
pub struct Inputs {
    pub builder: PlanBuilder,
    preset: Vec<(ScratchId, Vec<f32>)>,
}

impl Inputs {
    /// For `rows` rows of one session.
    pub fn new(model: &Arc<ModelDescription>, precision: Precision, rows: usize) -> Self {
        let class = PlanClass {
            phase: Phase::Prefill,
            precision,
            rows,
            context: 4_096,
            output: PlanOutput::State,
        };
        let mut builder = PlanBuilder::new(model, class);
        builder.set_layer(Some(0));
        Inputs {
            builder,
            preset: Vec::new(),
        }
    }

    /// A value of random numbers.
    pub fn random(&mut self, rows: usize, columns: usize, element: ElementType) -> ScratchId {
        let seed = self.preset.len() as u64 + 1;
        let mut values = random(rows * columns, seed);
        if element == ElementType::Bf16 {
            // What the type can hold.
            for value in &mut values {
                *value = f32::from_bits(value.to_bits() & 0xffff_0000);
            }
        }
        self.given(rows, columns, element, values)
    }

    /// A value of these numbers.
    pub fn given(
        &mut self,
        rows: usize,
        columns: usize,
        element: ElementType,
        values: Vec<f32>,
    ) -> ScratchId {
        let id = self.builder.scratch("input", rows, columns, element);
        self.preset.push((id, values));
        id
    }

    pub fn output(&mut self, rows: usize, columns: usize, element: ElementType) -> ScratchId {
        self.builder.scratch("output", rows, columns, element)
    }

    /// The plan, and what is set before it runs.
    pub fn finish(self, outputs: &[ScratchId]) -> (Arc<Plan>, Vec<(ScratchId, Vec<f32>)>) {
        let plan = Arc::new(self.builder.finish(None, outputs.to_vec()));
        assert_eq!(plan.steps.len(), 1);
        (plan, self.preset)
    }
}

/// A model on the reference and on the emulated device.
pub struct Alone {
    pub model: Arc<ModelDescription>,
    reference: CpuDevice,
    device: GpuDevice<Emulated>,
}

impl Alone {
    /// `raced`: on the build that finds races and what lies outside of buffers, and takes its time.
    pub fn new(checkpoint: &Arc<Checkpoint>, raced: bool) -> Self {
        let options = CpuOptions {
            kernels: Kernels::Reference,
            ..CpuOptions::default()
        };
        let build = if raced {
            BuildKind::Race
        } else {
            BuildKind::Plain
        };
        let options_of_device = EmulatedOptions {
            build,
            ..EmulatedOptions::default()
        };
        let device = super::device(checkpoint, options_of_device);
        Alone {
            model: device.model().clone(),
            reference: CpuDevice::new(checkpoint.clone(), &options).unwrap(),
            device,
        }
    }

    /// Runs a plan of one step on both; the largest difference relative to its bound. Panics where it is above 1, and
    /// where memory beside the outputs was written.
    #[track_caller]
    pub fn check(&mut self, what: &str, inputs: Inputs, outputs: &[ScratchId]) -> f64 {
        let (plan, preset) = inputs.finish(outputs);
        let tokens = vec![0; plan.class.rows];
        let launch = |sessions| Launch {
            tokens: &tokens,
            sessions,
            preset: &preset,
            token_limit: 1,
            sampling: &[],
            observer: None,
        };
        let precision = plan.class.precision;
        let new = |device: &dyn Device| -> Box<dyn SessionState> {
            device.new_session(precision, tokens.len()).unwrap()
        };
        let mut session = new(&self.reference);
        let mut expected = Vec::new();
        let sessions: &mut [&mut dyn SessionState] = &mut [session.as_mut()];
        self.reference
            .reference_steps(&plan, launch(sessions), |step| expected.push(step))
            .unwrap();

        let mut session = new(&self.device);
        let sessions: &mut [&mut dyn SessionState] = &mut [session.as_mut()];
        let found = self
            .device
            .with_stages(&plan, launch(sessions), |gpu, stages| {
                let memory = run_guarded(what, gpu, stages)?;
                let place = plan.place(ElementType::bytes);
                let read = |id: ScratchId| {
                    let spec = plan.spec(id);
                    let start = place.range(id).start;
                    decode(&memory[start..start + spec.bytes()], spec.element)
                };
                Ok(outputs
                    .iter()
                    .map(|&id| (id, read(id)))
                    .collect::<HashMap<_, _>>())
            })
            .unwrap_or_else(|error| panic!("{what}: {error}"));
        let [expected] = &expected[..] else {
            panic!("one step")
        };
        let found: Vec<Vec<f32>> = expected
            .outputs
            .iter()
            .map(|output| match output.resource {
                Resource::Scratch(id) => found[&id].clone(),
                Resource::State(_) => unreachable!("these steps write no state"),
            })
            .collect();
        let difference = expected.difference(&found);
        assert!(difference.excess <= 1.0, "{what}: {difference:?}");
        difference.excess
    }
}

/// Runs stages whose outputs all lie in one buffer; returns what it holds afterwards.
fn run_guarded(
    what: &str,
    gpu: &mut Emulated,
    stages: &[Stage<'_, Emulated>],
) -> Result<Vec<u8>, DeviceError> {
    let mut written: Vec<Range<usize>> = Vec::new();
    let mut read: Vec<(u64, Range<usize>)> = Vec::new();
    let mut arena: Option<&SharedBuffer> = None;
    for argument in stages
        .iter()
        .flatten()
        .flat_map(|dispatch| &dispatch.arguments)
    {
        let Argument::Buffer {
            buffer,
            offset,
            bytes,
            written: is_written,
        } = argument
        else {
            continue;
        };
        if *is_written {
            assert!(arena.is_none_or(|arena| arena.address() == buffer.address()));
            arena = Some(buffer);
            written.push(*offset..offset + bytes);
        } else {
            read.push((buffer.address(), *offset..offset.saturating_add(*bytes)));
        }
    }
    let arena = arena.expect("an output");
    read.retain(|(address, _)| *address == arena.address());
    let mut before = vec![0; arena.len()];
    gpu.read(arena, 0, &mut before);
    let within =
        |ranges: &[Range<usize>], at: usize| ranges.iter().any(|range| range.contains(&at));
    let read: Vec<Range<usize>> = read.into_iter().map(|(_, range)| range).collect();
    // The last bytes are the emulated device's own guard.
    let end = arena.len() - 256;
    for (at, byte) in before[..end].iter_mut().enumerate() {
        if within(&written, at) {
            *byte = UNWRITTEN;
        } else if !within(&read, at) {
            *byte = UNTOUCHED;
        }
    }
    gpu.write(arena, 0, &before);
    gpu.submit(None, stages)?;
    gpu.wait()?;
    let mut after = vec![0; arena.len()];
    gpu.read(arena, 0, &mut after);
    let changed = (0..arena.len()).find(|&at| before[at] != after[at] && !within(&written, at));
    assert_eq!(changed, None, "{what}: byte written beside {written:?}");
    Ok(after)
}

fn decode(bytes: &[u8], element: ElementType) -> Vec<f32> {
    let words = |b: &[u8]| [b[0], b[1], b[2], b[3]];
    match element {
        ElementType::F32 => bytes
            .chunks(4)
            .map(|b| f32::from_le_bytes(words(b)))
            .collect(),
        ElementType::Bf16 => bytes
            .chunks(2)
            .map(|b| bf16_to_f32(u16::from_le_bytes([b[0], b[1]])))
            .collect(),
        ElementType::U32 => bytes
            .chunks(4)
            .map(|b| u32::from_le_bytes(words(b)) as f32)
            .collect(),
    }
}
