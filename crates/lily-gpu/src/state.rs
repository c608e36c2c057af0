//! Session state on a GPU: pages of KV cache, convolution histories, recurrent states.

use crate::gpu::Gpu;
use lily_checkpoint::{LayerKind, ModelConfig, bf16_to_f32, f32_to_bf16};
use lily_plan::{
    DeviceError, ElementType, Precision, SessionBytes, SessionState, Snapshot, StateCopy,
    StateSlot, check_length, check_positions, own_cache, own_snapshot,
};
use std::any::Any;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Positions of a page (kernels/session.h).
pub const PAGE: usize = 256;

/// Where things lie in a session's buffers.
#[derive(Clone, Debug)]
pub struct StateLayout {
    /// By layer: bytes from the start of a copy to the layer's history and recurrent state; or which
    /// attention layer it is.
    layers: Vec<LayerPlace>,
    /// Bytes of one copy of histories and recurrent states.
    copy_bytes: usize,
    /// Bytes of a page of the cache, all layers.
    page_bytes: usize,
    /// Type of histories and cache.
    element: ElementType,
    key_value_heads: usize,
    head_dim: usize,
    history: usize,
    recurrent: usize,
}

#[derive(Clone, Copy, Debug)]
enum LayerPlace {
    GatedDelta { history: usize, recurrent: usize },
    Attention { index: usize },
}

impl StateLayout {
    /// The layout of a model's sessions at `precision`.
    pub fn new(config: &ModelConfig, precision: Precision) -> Self {
        let element = precision.activation();
        let history = (config.conv_kernel - 1) * config.conv_channels();
        let recurrent = config.linear_value_width() * config.linear_key_dim;
        let (mut copy_bytes, mut attention) = (0, 0);
        let layers = (0..config.layers)
            .map(|layer| match config.layer_kind(layer) {
                LayerKind::GatedDelta => {
                    let place = LayerPlace::GatedDelta {
                        history: copy_bytes,
                        recurrent: copy_bytes + (history * element.bytes()).next_multiple_of(256),
                    };
                    copy_bytes += (history * element.bytes()).next_multiple_of(256)
                        + (recurrent * 4).next_multiple_of(256);
                    place
                }
                LayerKind::Attention => {
                    attention += 1;
                    LayerPlace::Attention {
                        index: attention - 1,
                    }
                }
            })
            .collect();
        let page_bytes = attention * 2 * config.key_value_width() * PAGE * element.bytes();
        StateLayout {
            layers,
            copy_bytes,
            page_bytes,
            element,
            key_value_heads: config.key_value_heads,
            head_dim: config.head_dim,
            history,
            recurrent,
        }
    }

    /// Memory of a session.
    pub fn session_bytes(&self, capacity: usize) -> SessionBytes {
        SessionBytes {
            fixed: (2 * self.copy_bytes + capacity.div_ceil(PAGE) * 8) as u64,
            each_position: (self.page_bytes / PAGE) as u64,
            page_positions: PAGE,
        }
    }

    /// Bytes from the start of a copy to a layer's history and recurrent state.
    pub fn delta(&self, layer: u16) -> (u32, u32) {
        match self.layers[usize::from(layer)] {
            LayerPlace::GatedDelta { history, recurrent } => (history as u32, recurrent as u32),
            LayerPlace::Attention { .. } => {
                unreachable!("a plan gives histories to delta layers")
            }
        }
    }

    /// Which attention layer a layer is.
    pub fn attention(&self, layer: u16) -> u32 {
        match self.layers[usize::from(layer)] {
            LayerPlace::Attention { index } => index as u32,
            LayerPlace::GatedDelta { .. } => {
                unreachable!("a plan gives caches to attention layers")
            }
        }
    }
}

/// The state of one sequence.
pub struct GpuState<G: Gpu> {
    gpu: Arc<Mutex<G>>,
    layout: Arc<StateLayout>,
    precision: Precision,
    /// Two copies of histories and recurrent states, and the table of pages.
    copies: [G::Buffer; 2],
    table: G::Buffer,
    pages: Vec<G::Buffer>,
    position: usize,
    capacity: usize,
    /// Which copy is live.
    parity: usize,
    undoable: Option<usize>,
}

impl<G: Gpu> GpuState<G> {
    /// An empty session whose cache may grow to `capacity` positions.
    pub fn new(
        gpu: Arc<Mutex<G>>,
        layout: Arc<StateLayout>,
        precision: Precision,
        capacity: usize,
    ) -> Result<Self, DeviceError> {
        let (copies, table) = {
            let machine = lock(&gpu);
            let bytes = layout.copy_bytes.max(1);
            let copy = || machine.allocate(bytes, "a session's recurrent states");
            let table_bytes = capacity.div_ceil(PAGE).max(1) * 8;
            (
                [copy()?, copy()?],
                machine.allocate(table_bytes, "a session's table of pages")?,
            )
        };
        Ok(GpuState {
            gpu,
            layout,
            precision,
            copies,
            table,
            pages: Vec::new(),
            position: 0,
            capacity,
            parity: 0,
            undoable: None,
        })
    }

    /// Takes pages until `positions` fit.
    pub fn reserve(&mut self, positions: usize) -> Result<(), DeviceError> {
        if self.reserved() >= positions {
            return Ok(());
        }
        let mut machine = lock(&self.gpu);
        machine.idle();
        while self.pages.len() * PAGE < positions {
            let page = machine.allocate(self.layout.page_bytes.max(1), "a page of the KV cache")?;
            let address = machine.address(&page);
            machine.write(&self.table, self.pages.len() * 8, &address.to_le_bytes());
            self.pages.push(page);
        }
        Ok(())
    }

    /// What kernels see of it (kernels/session.h, `Session`).
    pub fn describe(&self, gpu: &G, is_stopped: bool) -> [u8; 32] {
        let mut bytes = [0; 32];
        let addresses = [
            gpu.address(&self.table),
            gpu.address(&self.copies[self.parity]),
            gpu.address(&self.copies[1 - self.parity]),
            self.position as u64 | u64::from(is_stopped) << 32,
        ];
        for (to, address) in bytes.chunks_mut(8).zip(addresses) {
            to.copy_from_slice(&address.to_le_bytes());
        }
        bytes
    }

    /// Everything that kernels reach through it.
    pub fn buffers(&self) -> impl Iterator<Item = &G::Buffer> {
        self.copies.iter().chain([&self.table]).chain(&self.pages)
    }

    /// Moves on by `rows`: the next copies become the live ones.
    pub fn commit(&mut self, rows: usize) {
        self.position += rows;
        self.parity = 1 - self.parity;
        self.undoable = Some(rows);
    }

    /// Positions that it has pages for.
    pub fn reserved(&self) -> usize {
        self.pages.len() * PAGE
    }

    /// A run is under way that writes the copy before the live one.
    pub fn keep_going(&mut self) {
        self.undoable = None;
    }

    /// The run under way found the session stopped, and has repeated the last step: the copy before the live one is
    /// what it was.
    pub fn stay(&mut self) {
        self.undoable = Some(1);
    }

    /// The machine, with nothing under way: the copies and pages may be read and written.
    fn idle(&self) -> MutexGuard<'_, G> {
        let mut machine = lock(&self.gpu);
        machine.idle();
        machine
    }

    /// Which buffer a slot's copy lies in, from where, how many elements of which type.
    fn delta_place(&self, slot: StateSlot) -> Option<(&G::Buffer, usize, usize, ElementType)> {
        let (layer, copy, is_history) = match slot {
            StateSlot::ConvolutionHistory(layer, copy) => (layer, copy, true),
            StateSlot::RecurrentState(layer, copy) => (layer, copy, false),
            _ => return None,
        };
        let LayerPlace::GatedDelta { history, recurrent } =
            *self.layout.layers.get(usize::from(layer))?
        else {
            return None;
        };
        let index = match copy {
            StateCopy::Live => self.parity,
            StateCopy::Next => 1 - self.parity,
        };
        Some(if is_history {
            let element = self.layout.element;
            (&self.copies[index], history, self.layout.history, element)
        } else {
            let count = self.layout.recurrent;
            (&self.copies[index], recurrent, count, ElementType::F32)
        })
    }

    /// The parts of the pages that hold some positions, in the order [layers, keys and values, Nkv, positions, D]: page,
    /// byte offset, bytes.
    fn page_parts(&self, positions: Range<usize>) -> Vec<(usize, usize, usize)> {
        let row = self.layout.head_dim * self.layout.element.bytes();
        let planes = self.layout.page_bytes / (PAGE * row);
        let pages = positions.start / PAGE..positions.end.div_ceil(PAGE);
        let parts = |plane: usize| {
            let positions = positions.clone();
            pages.clone().map(move |page| {
                let first = positions.start.max(page * PAGE) - page * PAGE;
                let end = positions.end.min((page + 1) * PAGE) - page * PAGE;
                (page, (plane * PAGE + first) * row, (end - first) * row)
            })
        };
        (0..planes).flat_map(parts).collect()
    }

    /// The runs of a cache's elements that hold tokens, in the order [Nkv, position, D]: page, byte offset,
    /// elements.
    fn cache_runs(&self, slot: StateSlot) -> Vec<(usize, usize, usize)> {
        let (layer, which) = match slot {
            StateSlot::KeyCache(layer) => (layer, 0),
            StateSlot::ValueCache(layer) => (layer, 1),
            _ => return Vec::new(),
        };
        let Some(&LayerPlace::Attention { index }) = self.layout.layers.get(usize::from(layer))
        else {
            return Vec::new();
        };
        let (heads, width) = (self.layout.key_value_heads, self.layout.head_dim);
        let element = self.layout.element.bytes();
        let mut runs = Vec::new();
        for head in 0..heads {
            for page in 0..self.position.div_ceil(PAGE) {
                let positions = (self.position - page * PAGE).min(PAGE);
                let row = ((index * 2 + which) * heads + head) * PAGE;
                runs.push((page, row * width * element, positions * width));
            }
        }
        runs
    }
}

/// The machine, whoever used it last.
pub(crate) fn lock<G>(gpu: &Mutex<G>) -> MutexGuard<'_, G> {
    gpu.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Elements as f32.
pub(crate) fn decode(bytes: &[u8], element: ElementType) -> Vec<f32> {
    match element {
        ElementType::Bf16 => bytes
            .chunks_exact(2)
            .map(|b| bf16_to_f32(u16::from_le_bytes([b[0], b[1]])))
            .collect(),
        ElementType::F32 => bytes
            .chunks_exact(4)
            .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
            .collect(),
        ElementType::U32 => bytes
            .chunks_exact(4)
            .map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]) as f32)
            .collect(),
    }
}

/// f32 as elements, rounded.
pub(crate) fn encode(values: &[f32], element: ElementType) -> Vec<u8> {
    let bytes = |value: &f32| -> Vec<u8> {
        match element {
            ElementType::Bf16 => f32_to_bf16(*value).to_le_bytes().to_vec(),
            ElementType::F32 => value.to_le_bytes().to_vec(),
            ElementType::U32 => (*value as u32).to_le_bytes().to_vec(),
        }
    };
    values.iter().flat_map(bytes).collect()
}

/// The live copy of histories and recurrent states.
struct GpuSnapshot<G: Gpu> {
    gpu: Arc<Mutex<G>>,
    layout: Arc<StateLayout>,
    position: usize,
    copy: G::Buffer,
}

impl<G: Gpu + 'static> Snapshot for GpuSnapshot<G> {
    fn position(&self) -> usize {
        self.position
    }

    fn bytes(&self) -> u64 {
        self.layout.copy_bytes as u64
    }

    fn export(&self) -> Vec<u8> {
        let mut machine = lock(&self.gpu);
        machine.idle();
        let mut bytes = vec![0; self.layout.copy_bytes];
        machine.read(&self.copy, 0, &mut bytes);
        bytes
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl<G: Gpu> Drop for GpuState<G> {
    fn drop(&mut self) {
        // A run may be under way that nobody collects.
        drop(self.idle());
    }
}

impl<G: Gpu + 'static> SessionState for GpuState<G> {
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
        let machine = self.idle();
        if let Some((buffer, offset, elements, element)) = self.delta_place(slot) {
            let mut bytes = vec![0; elements * element.bytes()];
            machine.read(buffer, offset, &mut bytes);
            return decode(&bytes, element);
        }
        let element = self.layout.element;
        let mut values = Vec::new();
        for (page, offset, elements) in self.cache_runs(slot) {
            let mut bytes = vec![0; elements * element.bytes()];
            machine.read(&self.pages[page], offset, &mut bytes);
            values.extend(decode(&bytes, element));
        }
        values
    }

    fn write(&mut self, slot: StateSlot, values: &[f32]) -> Result<(), DeviceError> {
        let machine = self.idle();
        let refuse = |expected: usize| {
            DeviceError::Launch(format!(
                "{} values for {slot:?}, which has {expected}",
                values.len()
            ))
        };
        if let Some((buffer, offset, elements, element)) = self.delta_place(slot) {
            if values.len() != elements {
                return Err(refuse(elements));
            }
            machine.write(buffer, offset, &encode(values, element));
            return Ok(());
        }
        let runs = self.cache_runs(slot);
        let expected = runs.iter().map(|(_, _, elements)| elements).sum();
        if values.len() != expected {
            return Err(refuse(expected));
        }
        let mut rest = values;
        for (page, offset, elements) in runs {
            let (these, others) = rest.split_at(elements);
            machine.write(
                &self.pages[page],
                offset,
                &encode(these, self.layout.element),
            );
            rest = others;
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
        self.reserve(position)?;
        self.position = position;
        self.undoable = None;
        Ok(())
    }

    fn snapshot(&self) -> Result<Box<dyn Snapshot>, DeviceError> {
        let machine = self.idle();
        let bytes = self.layout.copy_bytes;
        let copy = machine.allocate(bytes.max(1), "a snapshot of recurrent states")?;
        machine.copy((&self.copies[self.parity], 0), (&copy, 0), bytes);
        Ok(Box::new(GpuSnapshot::<G> {
            gpu: self.gpu.clone(),
            layout: self.layout.clone(),
            position: self.position,
            copy,
        }))
    }

    fn restore(&mut self, snapshot: &dyn Snapshot) -> Result<(), DeviceError> {
        let kept: &GpuSnapshot<G> = own_snapshot(snapshot, self)?;
        if !Arc::ptr_eq(&kept.layout, &self.layout) {
            let reason = "a snapshot of another model or precision";
            return Err(DeviceError::Launch(reason.into()));
        }
        self.seek(kept.position)?;
        let live = &self.copies[self.parity];
        self.idle()
            .copy((&kept.copy, 0), (live, 0), self.layout.copy_bytes);
        Ok(())
    }

    fn copy_cache(
        &mut self,
        from: &mut dyn SessionState,
        positions: usize,
    ) -> Result<(), DeviceError> {
        let from: &mut GpuState<G> = own_cache(from, self, positions)?;
        if !Arc::ptr_eq(&from.layout, &self.layout) {
            return Err(DeviceError::Launch("a session of another model".into()));
        }
        self.reserve(positions)?;
        let count = positions.div_ceil(PAGE);
        let machine = self.idle();
        for (from, to) in from.pages.iter().zip(&self.pages).take(count) {
            machine.copy((from, 0), (to, 0), self.layout.page_bytes);
        }
        drop(machine);
        self.undoable = None;
        Ok(())
    }

    fn export_cache(&self, positions: Range<usize>) -> Result<Vec<u8>, DeviceError> {
        check_positions(&positions, self.position)?;
        let machine = self.idle();
        let mut bytes = vec![0; positions.len() * (self.layout.page_bytes / PAGE)];
        let mut rest = bytes.as_mut_slice();
        for (page, offset, length) in self.page_parts(positions) {
            let (these, others) = rest.split_at_mut(length);
            machine.read(&self.pages[page], offset, these);
            rest = others;
        }
        Ok(bytes)
    }

    fn import_cache(&mut self, positions: Range<usize>, bytes: &[u8]) -> Result<(), DeviceError> {
        check_positions(&positions, self.capacity)?;
        let expected = positions.len() * (self.layout.page_bytes / PAGE);
        check_length("positions of a cache", bytes, expected)?;
        self.reserve(positions.end)?;
        let machine = self.idle();
        let mut rest = bytes;
        for (page, offset, length) in self.page_parts(positions) {
            let (these, others) = rest.split_at(length);
            machine.write(&self.pages[page], offset, these);
            rest = others;
        }
        drop(machine);
        self.undoable = None;
        Ok(())
    }

    fn import_snapshot(
        &self,
        position: usize,
        bytes: &[u8],
    ) -> Result<Box<dyn Snapshot>, DeviceError> {
        check_length("a snapshot", bytes, self.layout.copy_bytes)?;
        let machine = self.idle();
        let copy = machine.allocate(bytes.len().max(1), "a snapshot of recurrent states")?;
        machine.write(&copy, 0, bytes);
        drop(machine);
        Ok(Box::new(GpuSnapshot::<G> {
            gpu: self.gpu.clone(),
            layout: self.layout.clone(),
            position,
            copy,
        }))
    }

    fn reset(&mut self) {
        let zeros = vec![0; self.layout.copy_bytes];
        self.idle().write(&self.copies[0], 0, &zeros);
        self.position = 0;
        self.parity = 0;
        self.undoable = None;
    }

    fn resident_bytes(&self) -> u64 {
        let bytes = self.layout.session_bytes(self.capacity);
        bytes.for_positions(self.pages.len() * PAGE)
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }
}
