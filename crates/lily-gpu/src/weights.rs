//! Weights in the kernels' own layout (kernels/quantised.h), each in a buffer of its own, one copy.

use crate::gpu::Gpu;
use lily_checkpoint::{Checkpoint, DType, Weight, WeightData, WeightFormat, WeightId};
use lily_plan::DeviceError;
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::sync_channel;
use std::thread::available_parallelism;

/// Columns of a quantisation group.
pub const GROUP: usize = 64;
/// Threads that read weights: each holds one, of up to 151 MB in the largest model.
const MOST_READERS: usize = 8;
/// Rows whose scales and biases lie together.
const BLOCK: usize = 4;

/// The weights of one model on a GPU.
pub struct Weights<G: Gpu> {
    buffers: HashMap<WeightId, G::Buffer>,
}

/// Width of a weight's codes, or why its format has no kernel.
fn bits_of(weight: &Weight<'_>) -> Result<u32, String> {
    match weight.format {
        WeightFormat::Affine {
            bits: bits @ (4 | 8),
            group: 64,
            scales: DType::Bf16,
        } => Ok(u32::from(bits)),
        other => Err(other.to_string()),
    }
}

impl<G: Gpu> Weights<G> {
    /// Reads all weights of `checkpoint`; `progress` is told the bytes read so far and in all.
    pub fn load(
        gpu: &G,
        checkpoint: &Checkpoint,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, DeviceError> {
        let specs = checkpoint.config().weights();
        let mut weights = Vec::with_capacity(specs.len());
        for spec in specs {
            let weight = checkpoint
                .weight(spec.id)
                .map_err(|error| DeviceError::Weight {
                    weight: spec.id.to_string(),
                    reason: error.to_string(),
                })?;
            weights.push(weight);
        }
        for weight in &weights {
            if weight.spec.shape.is_linear() {
                bits_of(weight).map_err(|format| DeviceError::Unsupported {
                    device: gpu.describe().device.into(),
                    what: format!("{} stored as {format}", weight.spec.id),
                    reason: "its kernels take affine weights of 4 or 8 bits in groups of 64 with bfloat16 scales; \
                             --device cpu runs every affine format"
                        .into(),
                })?;
            }
        }
        let total: u64 = weights
            .iter()
            .map(|weight| weight.data.bytes() as u64)
            .sum();
        let mut done = 0;
        let mut buffers = HashMap::new();
        // Reading and packing take longer than the copy: several threads do them, a weight each, ahead of the copy by
        // no more than the channel holds.
        let next = AtomicUsize::new(0);
        let (sender, receiver) = sync_channel(1);
        std::thread::scope(|scope| {
            for _ in 0..available_parallelism()
                .map_or(1, usize::from)
                .min(MOST_READERS)
            {
                let (sender, next, weights) = (sender.clone(), &next, &weights);
                scope.spawn(move || {
                    while let Some(weight) = weights.get(next.fetch_add(1, Ordering::Relaxed)) {
                        // The copying side has failed and gone.
                        if sender.send((weight, stored(weight))).is_err() {
                            return;
                        }
                    }
                });
            }
            drop(sender);
            for (weight, bytes) in receiver {
                let buffer = gpu.allocate(bytes.len(), &format!("weight {}", weight.spec.id))?;
                gpu.write(&buffer, 0, &bytes);
                buffers.insert(weight.spec.id, buffer);
                done += weight.data.bytes() as u64;
                progress(done, total);
            }
            Ok(())
        })?;
        Ok(Weights { buffers })
    }

    /// A weight's buffer. Panics for one the model does not have: plans only name those it has.
    pub fn buffer(&self, id: WeightId) -> &G::Buffer {
        &self.buffers[&id]
    }
}

/// A weight's bytes on the GPU: a matrix packed, anything else as f32.
fn stored(weight: &Weight<'_>) -> Vec<u8> {
    if weight.spec.shape.is_linear() {
        return pack(weight).concat();
    }
    weight
        .read_plain()
        .iter()
        .flat_map(|x| x.to_le_bytes())
        .collect()
}

/// Bytes of a matrix (or one expert) in the kernels' layout.
pub fn matrix_bytes(rows: usize, columns: usize, bits: usize) -> usize {
    let padded = rows.next_multiple_of(BLOCK);
    padded * columns * bits / 8 + padded * (columns / GROUP) * 4
}

/// The matrices of a weight (one, or one an expert) in the kernels' layout: codes row by row, then for each four
/// rows and each group the rows' (scale, bias) pairs; rows padded to four with zeros.
fn pack(weight: &Weight<'_>) -> Vec<Vec<u8>> {
    let (all_rows, columns) = (weight.rows(), weight.columns());
    let (experts, rows) = match weight.spec.shape {
        lily_checkpoint::WeightShape::Experts {
            experts, outputs, ..
        } => (experts, outputs),
        _ => (1, all_rows),
    };
    let bits = bits_of(weight).expect("checked by the caller") as usize;
    let (row_bytes, groups) = (columns * bits / 8, columns / GROUP);
    let padded = rows.next_multiple_of(BLOCK);
    let pack_one = |expert: usize| {
        let WeightData::Affine {
            codes,
            scales,
            biases,
        } = weight.row_range(expert * rows..(expert + 1) * rows)
        else {
            unreachable!("its format is affine")
        };
        let mut packed = Vec::with_capacity(matrix_bytes(rows, columns, bits));
        packed.extend_from_slice(codes);
        packed.resize(padded * row_bytes, 0);
        for block in 0..padded / BLOCK {
            for group in 0..groups {
                for row in block * BLOCK..(block + 1) * BLOCK {
                    let at = (row * groups + group) * 2;
                    let pair = if row < rows {
                        [scales[at], scales[at + 1], biases[at], biases[at + 1]]
                    } else {
                        [0; 4]
                    };
                    packed.extend_from_slice(&pair);
                }
            }
        }
        packed
    };
    (0..experts).map(pack_one).collect()
}
