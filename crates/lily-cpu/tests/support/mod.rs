//! What the tests of this crate share: fixtures, goldens, and a plain way to run a model.
#![allow(dead_code)]

use lily_checkpoint::{Checkpoint, parse_header};
use lily_cpu::{CpuDevice, CpuOptions};
use lily_plan::{
    Device, Launch, ModelDescription, Outcome, Phase, Plan, PlanClass, PlanOutput, Precision,
    SessionState, route,
};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The repository's root.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Where a fixture lies: in the repository, or below the directory that `LILY_FIXTURES` names (for those
/// too large for the repository). `None`, with a line that says so, if it is in neither.
pub fn fixture(name: &str) -> Option<PathBuf> {
    let inside = root().join("fixtures").join(name);
    let outside = std::env::var_os("LILY_FIXTURES").map(|folder| Path::new(&folder).join(name));
    let found = [Some(inside), outside]
        .into_iter()
        .flatten()
        .find(|path| path.exists());
    if found.is_none() {
        eprintln!("SKIPPED {name}: not in the repository; set LILY_FIXTURES to a folder with it");
    }
    found
}

/// Tensors of a small safetensors file as f32.
pub fn read_tensors(path: &Path) -> HashMap<String, (Vec<usize>, Vec<f32>)> {
    let bytes = std::fs::read(path).unwrap();
    let header_length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + header_length]).unwrap();
    // The engine's own parser must agree that the file is sound.
    parse_header(&bytes[..8 + header_length], bytes.len() as u64, "golden").unwrap();
    let data = &bytes[8 + header_length..];
    let mut tensors = HashMap::new();
    for (name, tensor) in header.as_object().unwrap() {
        if name == "__metadata__" {
            continue;
        }
        let numbers = |key: &str| -> Vec<usize> {
            tensor[key]
                .as_array()
                .unwrap()
                .iter()
                .map(|n| n.as_u64().unwrap() as usize)
                .collect()
        };
        let offsets = numbers("data_offsets");
        let words = data[offsets[0]..offsets[1]].chunks_exact(4);
        let values = match tensor["dtype"].as_str().unwrap() {
            "F32" => words
                .map(|w| f32::from_le_bytes(w.try_into().unwrap()))
                .collect(),
            "I32" => words
                .map(|w| i32::from_le_bytes(w.try_into().unwrap()) as f32)
                .collect(),
            _ => continue,
        };
        tensors.insert(name.clone(), (numbers("shape"), values));
    }
    tensors
}

/// A model on the CPU device with one session.
pub struct Runner {
    pub device: CpuDevice,
    pub session: Box<dyn SessionState>,
    pub precision: Precision,
    pub expanded: bool,
}

impl Runner {
    pub fn open(directory: &Path, precision: Precision, options: &CpuOptions) -> Self {
        let checkpoint = Arc::new(Checkpoint::open(directory).unwrap());
        let device = CpuDevice::new(checkpoint, options).unwrap();
        let session = device.new_session(precision, 4_096).unwrap();
        Runner {
            device,
            session,
            precision,
            expanded: false,
        }
    }

    pub fn model(&self) -> &Arc<ModelDescription> {
        self.device.model()
    }

    pub fn plan(&self, phase: Phase, rows: usize, output: PlanOutput) -> Arc<Plan> {
        let context = match phase {
            Phase::Prefill => self.model().config.max_positions,
            Phase::Decode => route::context_band(self.session.position() + 1),
        };
        let class = PlanClass {
            phase,
            precision: self.precision,
            rows,
            context,
            output,
        };
        let plan = Plan::record(self.model(), class);
        Arc::new(if self.expanded { plan.expanded() } else { plan })
    }

    pub fn run(&mut self, plan: &Arc<Plan>, tokens: &[u32]) -> Outcome {
        let launch = Launch {
            tokens,
            sessions: &mut [self.session.as_mut()],
            preset: &[],
            token_limit: u32::MAX,
            observer: None,
        };
        self.device.execute(plan, launch).unwrap()
    }

    /// Prefills in chunks on the grid; logits of every row.
    pub fn prefill(&mut self, tokens: &[u32], chunk: usize) -> Vec<f32> {
        let mut logits = Vec::new();
        let mut done = 0;
        while done < tokens.len() {
            let end = route::chunk_end(done, tokens.len(), chunk);
            let plan = self.plan(Phase::Prefill, end - done, PlanOutput::AllLogits);
            logits.extend(self.run(&plan, &tokens[done..end]).logits);
            done = end;
        }
        logits
    }

    /// Decodes the given tokens one by one; the logits after each.
    pub fn feed(&mut self, tokens: &[u32]) -> Vec<f32> {
        let plan = self.plan(Phase::Decode, 1, PlanOutput::Token);
        tokens
            .iter()
            .flat_map(|&token| self.run(&plan, &[token]).logits)
            .collect()
    }

    /// Decodes greedily from `first` on: the tokens chosen, and the logits that chose the last.
    pub fn greedy(&mut self, mut token: u32, count: usize) -> (Vec<u32>, Vec<f32>) {
        let plan = self.plan(Phase::Decode, 1, PlanOutput::Token);
        let mut tokens = vec![token];
        let mut logits = Vec::new();
        while tokens.len() < count {
            let outcome = self.run(&plan, &[token]);
            token = outcome.tokens[0];
            logits = outcome.logits;
            tokens.push(token);
        }
        (tokens, logits)
    }
}

/// The position of the largest value.
pub fn arg_max(values: &[f32]) -> u32 {
    (0..values.len())
        .rev()
        .max_by(|&a, &b| values[a].total_cmp(&values[b]))
        .unwrap() as u32
}

/// Root mean square of the difference relative to that of `expected`, and the largest difference.
pub fn distance(found: &[f32], expected: &[f32]) -> (f64, f64) {
    assert_eq!(found.len(), expected.len());
    let mut difference = 0.0;
    let mut total = 0.0;
    let mut largest: f64 = 0.0;
    for (&a, &b) in found.iter().zip(expected) {
        let d = f64::from(a) - f64::from(b);
        assert!(d.is_finite(), "a value is not finite");
        difference += d * d;
        total += f64::from(b) * f64::from(b);
        largest = largest.max(d.abs());
    }
    ((difference / total).sqrt(), largest)
}
