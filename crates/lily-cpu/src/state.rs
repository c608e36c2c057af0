//! Session state on the CPU: KV cache, convolution histories, recurrent states.
//!
//! A cache lives in a reserved address range of its own, as long as it may ever become; the system
//! gives it pages as it grows, so nothing is copied and nothing is taken before it is needed.

use crate::arena::Output;
use lily_checkpoint::{LayerKind, ModelConfig, bf16_to_f32, f32_to_bf16};
use lily_plan::{
    DeviceError, Precision, SessionBytes, SessionState, Snapshot, StateCopy, StateSlot,
    check_length, check_positions, own_cache, own_snapshot,
};
use memmap2::{MmapMut, MmapOptions};
use std::any::Any;
use std::ops::Range;

/// Positions that are accounted for together: 256 positions of one KV head are at least one 4 KiB page
/// in every supported shape.
pub(crate) const PAGE_POSITIONS: usize = 256;

/// The state of one sequence.
pub(crate) struct CpuState {
    layers: Vec<LayerState>,
    position: usize,
    capacity: usize,
    precision: Precision,
    /// KV heads and their width.
    cache_shape: (usize, usize),
    /// Which of the two copies is live.
    parity: usize,
    /// Rows of the last run, while it can be taken back.
    undoable: Option<usize>,
    /// Positions the cache has ever reached: what is resident.
    touched: usize,
    bytes: SessionBytes,
}

enum LayerState {
    GatedDelta {
        history: [Vec<f32>; 2],
        recurrent: [Vec<f32>; 2],
    },
    Attention {
        keys: MmapMut,
        values: MmapMut,
    },
}

/// Memory of a session of `config` on this device.
pub(crate) fn session_bytes(config: &ModelConfig, precision: Precision) -> SessionBytes {
    let (history, recurrent) = delta_elements(config);
    let attention = config.attention_layers();
    SessionBytes {
        fixed: ((config.layers - attention) * 2 * (history + recurrent) * 4) as u64,
        each_position: (attention * 2 * config.key_value_width() * precision.activation().bytes())
            as u64,
        page_positions: PAGE_POSITIONS,
    }
}

fn delta_elements(config: &ModelConfig) -> (usize, usize) {
    (
        (config.conv_kernel - 1) * config.conv_channels(),
        config.linear_value_width() * config.linear_key_dim,
    )
}

impl CpuState {
    pub fn new(
        config: &ModelConfig,
        precision: Precision,
        capacity: usize,
    ) -> Result<Self, DeviceError> {
        let (history, recurrent) = delta_elements(config);
        let cache_bytes = capacity * config.key_value_width() * precision.activation().bytes();
        let reserve = || {
            MmapOptions::new()
                .len(cache_bytes.max(1))
                .no_reserve_swap()
                .map_anon()
                .map_err(|error| DeviceError::OutOfMemory {
                    what: format!("address range of a KV cache for {capacity} positions"),
                    bytes: cache_bytes as u64,
                    reason: error.to_string(),
                })
        };
        let layers = (0..config.layers)
            .map(|layer| {
                Ok(match config.layer_kind(layer) {
                    LayerKind::GatedDelta => LayerState::GatedDelta {
                        history: [vec![0.0; history], vec![0.0; history]],
                        recurrent: [vec![0.0; recurrent], vec![0.0; recurrent]],
                    },
                    LayerKind::Attention => LayerState::Attention {
                        keys: reserve()?,
                        values: reserve()?,
                    },
                })
            })
            .collect::<Result<_, DeviceError>>()?;
        let bytes = session_bytes(config, precision);
        Ok(CpuState {
            layers,
            position: 0,
            capacity,
            precision,
            cache_shape: (config.key_value_heads, config.head_dim),
            parity: 0,
            undoable: None,
            touched: 0,
            bytes,
        })
    }

    /// What kernels see of the state during one run.
    pub fn view(&mut self, config: &ModelConfig) -> StateView<'_> {
        let precision = self.precision;
        let parity = self.parity;
        fn copies(both: &mut [Vec<f32>; 2], parity: usize) -> [Output<'_, f32>; 2] {
            let [first, second] = both;
            let copies = [Output::of(first), Output::of(second)];
            [copies[parity], copies[1 - parity]]
        }
        let layers = self
            .layers
            .iter_mut()
            .map(|layer| match layer {
                LayerState::GatedDelta { history, recurrent } => LayerView::GatedDelta {
                    history: copies(history, parity),
                    recurrent: copies(recurrent, parity),
                },
                LayerState::Attention { keys, values } => LayerView::Attention {
                    keys: CacheView::new(keys, config, self.capacity, precision),
                    values: CacheView::new(values, config, self.capacity, precision),
                },
            })
            .collect();
        StateView {
            layers,
            position: self.position,
        }
    }

    fn layer(&self, slot: StateSlot) -> Option<&LayerState> {
        self.layers.get(usize::from(layer_of(slot)?))
    }

    fn layer_mut(&mut self, slot: StateSlot) -> Option<&mut LayerState> {
        self.layers.get_mut(usize::from(layer_of(slot)?))
    }

    fn index(&self, copy: StateCopy) -> usize {
        match copy {
            StateCopy::Live => self.parity,
            StateCopy::Next => 1 - self.parity,
        }
    }

    /// The elements of a cache that hold tokens, head by head.
    fn cache_rows(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let (heads, width) = self.cache_shape;
        let (capacity, position) = (self.capacity, self.position);
        (0..heads).map(move |head| {
            let start = head * capacity * width;
            start..start + position * width
        })
    }

    /// The bytes of a cache that hold some positions, head by head.
    fn byte_rows(&self, positions: Range<usize>) -> Vec<Range<usize>> {
        let (heads, width) = self.cache_shape;
        let row = width * self.precision.activation().bytes();
        let rows = |head| {
            let start = head * self.capacity;
            (start + positions.start) * row..(start + positions.end) * row
        };
        (0..heads).map(rows).collect()
    }

    /// Bytes of a position in all caches.
    fn position_bytes(&self) -> usize {
        self.bytes.each_position as usize
    }

    /// Moves on by `rows`: the next copies become the live ones.
    pub fn commit(&mut self, rows: usize) {
        self.position += rows;
        self.touched = self.touched.max(self.position);
        self.parity = 1 - self.parity;
        self.undoable = Some(rows);
    }
}

/// Live copies of histories and recurrent states, layer by layer.
struct CpuSnapshot {
    position: usize,
    layers: Vec<[Vec<f32>; 2]>,
}

impl Snapshot for CpuSnapshot {
    fn position(&self) -> usize {
        self.position
    }

    fn bytes(&self) -> u64 {
        let elements = self.layers.iter().flatten().map(Vec::len);
        4 * elements.sum::<usize>() as u64
    }

    fn export(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.bytes() as usize);
        for values in self.layers.iter().flatten() {
            bytes.extend_from_slice(bytemuck::cast_slice(values));
        }
        bytes
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl SessionState for CpuState {
    fn position(&self) -> usize {
        self.position
    }

    fn precision(&self) -> Precision {
        self.precision
    }

    fn capacity(&self) -> usize {
        self.capacity
    }

    fn step_back(&mut self) -> bool {
        let Some(rows) = self.undoable.take() else {
            return false;
        };
        self.position -= rows;
        self.parity = 1 - self.parity;
        true
    }

    fn read(&self, slot: StateSlot) -> Vec<f32> {
        match (slot, self.layer(slot)) {
            (
                StateSlot::ConvolutionHistory(_, copy),
                Some(LayerState::GatedDelta { history, .. }),
            ) => history[self.index(copy)].clone(),
            (
                StateSlot::RecurrentState(_, copy),
                Some(LayerState::GatedDelta { recurrent, .. }),
            ) => recurrent[self.index(copy)].clone(),
            (StateSlot::KeyCache(_), Some(LayerState::Attention { keys: memory, .. }))
            | (StateSlot::ValueCache(_), Some(LayerState::Attention { values: memory, .. })) => {
                self.cache_rows()
                    .flat_map(|rows| match self.precision {
                        Precision::F32 => memory[rows.start * 4..rows.end * 4]
                            .chunks_exact(4)
                            .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                            .collect::<Vec<_>>(),
                        Precision::Bf16 => memory[rows.start * 2..rows.end * 2]
                            .chunks_exact(2)
                            .map(|b| bf16_to_f32(u16::from_le_bytes([b[0], b[1]])))
                            .collect(),
                    })
                    .collect()
            }
            _ => Vec::new(),
        }
    }

    fn write(&mut self, slot: StateSlot, values: &[f32]) -> Result<(), DeviceError> {
        let expected = self.read(slot).len();
        if values.len() != expected {
            return Err(DeviceError::Launch(format!(
                "{} values for {slot:?}, which has {expected}",
                values.len()
            )));
        }
        let rows: Vec<_> = self.cache_rows().collect();
        let (precision, live) = (self.precision, self.index(StateCopy::Live));
        let next = 1 - live;
        let copy_index = |copy| if copy == StateCopy::Live { live } else { next };
        match (slot, self.layer_mut(slot)) {
            (
                StateSlot::ConvolutionHistory(_, copy),
                Some(LayerState::GatedDelta { history, .. }),
            ) => {
                history[copy_index(copy)].copy_from_slice(values);
            }
            (
                StateSlot::RecurrentState(_, copy),
                Some(LayerState::GatedDelta { recurrent, .. }),
            ) => {
                recurrent[copy_index(copy)].copy_from_slice(values);
            }
            (StateSlot::KeyCache(_), Some(LayerState::Attention { keys: memory, .. }))
            | (StateSlot::ValueCache(_), Some(LayerState::Attention { values: memory, .. })) => {
                for (&value, at) in values.iter().zip(rows.into_iter().flatten()) {
                    match precision {
                        Precision::F32 => {
                            memory[at * 4..][..4].copy_from_slice(&value.to_le_bytes())
                        }
                        Precision::Bf16 => {
                            memory[at * 2..][..2]
                                .copy_from_slice(&f32_to_bf16(value).to_le_bytes());
                        }
                    }
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn seek(&mut self, position: usize) -> Result<(), DeviceError> {
        if position > self.capacity {
            let capacity = self.capacity;
            return Err(DeviceError::Launch(format!(
                "position {position} of a session made for {capacity}"
            )));
        }
        self.position = position;
        self.touched = self.touched.max(position);
        self.undoable = None;
        Ok(())
    }

    fn snapshot(&self) -> Result<Box<dyn Snapshot>, DeviceError> {
        let live = |layer: &LayerState| match layer {
            LayerState::GatedDelta { history, recurrent } => {
                Some([history[self.parity].clone(), recurrent[self.parity].clone()])
            }
            LayerState::Attention { .. } => None,
        };
        Ok(Box::new(CpuSnapshot {
            position: self.position,
            layers: self.layers.iter().filter_map(live).collect(),
        }))
    }

    fn restore(&mut self, snapshot: &dyn Snapshot) -> Result<(), DeviceError> {
        let kept: &CpuSnapshot = own_snapshot(snapshot, self)?;
        let parity = self.parity;
        let live = self.layers.iter_mut().filter_map(|layer| match layer {
            LayerState::GatedDelta { history, recurrent } => {
                Some([&mut history[parity], &mut recurrent[parity]])
            }
            LayerState::Attention { .. } => None,
        });
        let live: Vec<_> = live.collect();
        let lengths = |layers: &mut dyn Iterator<Item = usize>| layers.collect::<Vec<_>>();
        let theirs = lengths(&mut kept.layers.iter().flatten().map(Vec::len));
        if theirs != lengths(&mut live.iter().flatten().map(|values| values.len())) {
            return Err(DeviceError::Launch("a snapshot of another model".into()));
        }
        for (to, from) in live.into_iter().flatten().zip(kept.layers.iter().flatten()) {
            to.copy_from_slice(from);
        }
        self.seek(kept.position)
    }

    fn copy_cache(
        &mut self,
        from: &mut dyn SessionState,
        positions: usize,
    ) -> Result<(), DeviceError> {
        let from: &mut CpuState = own_cache(from, self, positions)?;
        if self.cache_shape != from.cache_shape || self.layers.len() != from.layers.len() {
            return Err(DeviceError::Launch("a session of another model".into()));
        }
        let (heads, width) = self.cache_shape;
        let row = width * self.precision.activation().bytes();
        let (to_head, from_head) = (self.capacity * row, from.capacity * row);
        for (to, from) in self.layers.iter_mut().zip(&from.layers) {
            let (
                LayerState::Attention { keys, values },
                LayerState::Attention {
                    keys: their_keys,
                    values: their_values,
                },
            ) = (to, from)
            else {
                continue;
            };
            for (to, from) in [(keys, their_keys), (values, their_values)] {
                for head in 0..heads {
                    to[head * to_head..][..positions * row]
                        .copy_from_slice(&from[head * from_head..][..positions * row]);
                }
            }
        }
        self.touched = self.touched.max(positions);
        self.undoable = None;
        Ok(())
    }

    fn export_cache(&self, positions: Range<usize>) -> Result<Vec<u8>, DeviceError> {
        check_positions(&positions, self.position)?;
        let rows = self.byte_rows(positions.clone());
        let mut bytes = Vec::with_capacity(self.position_bytes() * positions.len());
        for layer in &self.layers {
            if let LayerState::Attention { keys, values } = layer {
                for memory in [keys, values] {
                    rows.iter()
                        .for_each(|rows| bytes.extend_from_slice(&memory[rows.clone()]));
                }
            }
        }
        Ok(bytes)
    }

    fn import_cache(&mut self, positions: Range<usize>, bytes: &[u8]) -> Result<(), DeviceError> {
        check_positions(&positions, self.capacity)?;
        let expected = self.position_bytes() * positions.len();
        check_length("positions of a cache", bytes, expected)?;
        let rows = self.byte_rows(positions.clone());
        let mut rest = bytes;
        for layer in &mut self.layers {
            if let LayerState::Attention { keys, values } = layer {
                for memory in [keys, values] {
                    for rows in &rows {
                        let (these, others) = rest.split_at(rows.len());
                        memory[rows.clone()].copy_from_slice(these);
                        rest = others;
                    }
                }
            }
        }
        self.touched = self.touched.max(positions.end);
        self.undoable = None;
        Ok(())
    }

    fn import_snapshot(
        &self,
        position: usize,
        bytes: &[u8],
    ) -> Result<Box<dyn Snapshot>, DeviceError> {
        let lengths = self.layers.iter().filter_map(|layer| match layer {
            LayerState::GatedDelta { history, recurrent } => {
                Some([history[0].len(), recurrent[0].len()])
            }
            LayerState::Attention { .. } => None,
        });
        let lengths: Vec<_> = lengths.collect();
        let elements: usize = lengths.iter().flatten().sum();
        check_length("a snapshot", bytes, elements * size_of::<f32>())?;
        let mut rest = bytes;
        let mut take = |length: usize| {
            let (these, others) = rest.split_at(length * size_of::<f32>());
            rest = others;
            // A copy, as the bytes need not be aligned.
            let mut values = vec![0.0f32; length];
            bytemuck::cast_slice_mut(&mut values).copy_from_slice(these);
            values
        };
        Ok(Box::new(CpuSnapshot {
            position,
            layers: lengths
                .into_iter()
                .map(|both| both.map(&mut take))
                .collect(),
        }))
    }

    fn reset(&mut self) {
        for layer in &mut self.layers {
            if let LayerState::GatedDelta { history, recurrent } = layer {
                history[0].fill(0.0);
                recurrent[0].fill(0.0);
            }
        }
        self.position = 0;
        self.parity = 0;
        self.undoable = None;
    }

    fn resident_bytes(&self) -> u64 {
        self.bytes.for_positions(self.touched)
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }
}

/// A session as the kernels of one run see it.
pub(crate) struct StateView<'a> {
    layers: Vec<LayerView<'a>>,
    /// Position of the run's first row.
    pub position: usize,
}

enum LayerView<'a> {
    GatedDelta {
        history: [Output<'a, f32>; 2],
        recurrent: [Output<'a, f32>; 2],
    },
    Attention {
        keys: CacheView<'a>,
        values: CacheView<'a>,
    },
}

/// Index of the live copy in the pairs below.
pub(crate) const LIVE: usize = 0;
/// Index of the next copy.
pub(crate) const NEXT: usize = 1;

impl<'a> StateView<'a> {
    /// The last K−1 inputs of the layer's convolution, [K−1, channels]: live and next.
    pub fn history(&self, layer: u16) -> [Output<'a, f32>; 2] {
        match &self.layers[usize::from(layer)] {
            LayerView::GatedDelta { history, .. } => *history,
            LayerView::Attention { .. } => unreachable!("a plan gives histories to delta layers"),
        }
    }

    /// The layer's recurrent state, [Hv, Dv, Dk]: live and next.
    pub fn recurrent(&self, layer: u16) -> [Output<'a, f32>; 2] {
        match &self.layers[usize::from(layer)] {
            LayerView::GatedDelta { recurrent, .. } => *recurrent,
            LayerView::Attention { .. } => unreachable!("a plan gives states to delta layers"),
        }
    }

    /// The layer's keys and values.
    pub fn cache(&self, layer: u16) -> [&CacheView<'a>; 2] {
        match &self.layers[usize::from(layer)] {
            LayerView::Attention { keys, values } => [keys, values],
            LayerView::GatedDelta { .. } => unreachable!("a plan gives caches to attention layers"),
        }
    }
}

/// Keys or values of one layer: [Nkv, capacity, D].
pub(crate) struct CacheView<'a> {
    memory: CacheMemory<'a>,
    capacity: usize,
    head_dim: usize,
}

enum CacheMemory<'a> {
    F32(Output<'a, f32>),
    Bf16(Output<'a, u16>),
}

impl<'a> CacheView<'a> {
    fn new(
        memory: &'a mut MmapMut,
        config: &ModelConfig,
        capacity: usize,
        precision: Precision,
    ) -> Self {
        // A mapping begins on a page, so the casts are aligned.
        let memory = match precision {
            Precision::F32 => CacheMemory::F32(Output::of(whole_elements(memory))),
            Precision::Bf16 => CacheMemory::Bf16(Output::of(whole_elements(memory))),
        };
        CacheView {
            memory,
            capacity,
            head_dim: config.head_dim,
        }
    }

    /// Stores one position of one KV head, rounded to the cache's type.
    ///
    /// # Safety
    /// The caller's step declares writing this cache, and no other work item writes this row.
    pub unsafe fn write(&self, head: usize, position: usize, row: &[f32]) {
        let start = (head * self.capacity + position) * self.head_dim;
        match &self.memory {
            CacheMemory::F32(memory) => {
                // SAFETY: exclusive by this function's contract.
                unsafe { memory.slice(start, self.head_dim) }.copy_from_slice(row);
            }
            CacheMemory::Bf16(memory) => {
                // SAFETY: exclusive by this function's contract.
                let stored = unsafe { memory.slice(start, self.head_dim) };
                for (stored, &value) in stored.iter_mut().zip(row) {
                    *stored = f32_to_bf16(value);
                }
            }
        }
    }

    /// Copies `out.len() / D` positions of one KV head from `position` on.
    ///
    /// # Safety
    /// The caller's step declares reading this cache: nobody writes meanwhile.
    pub unsafe fn read(&self, head: usize, position: usize, out: &mut [f32]) {
        let start = (head * self.capacity + position) * self.head_dim;
        match &self.memory {
            CacheMemory::F32(memory) => {
                // SAFETY: no writer by this function's contract.
                out.copy_from_slice(unsafe { memory.shared(start, out.len()) });
            }
            CacheMemory::Bf16(memory) => {
                // SAFETY: no writer by this function's contract.
                let stored = unsafe { memory.shared(start, out.len()) };
                for (out, &stored) in out.iter_mut().zip(stored.iter()) {
                    *out = bf16_to_f32(stored);
                }
            }
        }
    }
}

fn whole_elements<T: bytemuck::AnyBitPattern + bytemuck::NoUninit>(bytes: &mut [u8]) -> &mut [T] {
    let whole = bytes.len() / size_of::<T>() * size_of::<T>();
    bytemuck::cast_slice_mut(&mut bytes[..whole])
}

fn layer_of(slot: StateSlot) -> Option<u16> {
    match slot {
        StateSlot::Tokens | StateSlot::NextToken => None,
        StateSlot::KeyCache(layer)
        | StateSlot::ValueCache(layer)
        | StateSlot::ConvolutionHistory(layer, _)
        | StateSlot::RecurrentState(layer, _) => Some(layer),
    }
}
