//! The arena: one allocation that holds the scratch values of a plan. On the CPU every element takes
//! four bytes; a value of type bf16 is stored as the f32 it was rounded to, so that kernels read it
//! without converting.

use lily_plan::{Placement, Plan, ScratchId};
use std::cell::UnsafeCell;
use std::marker::PhantomData;

/// Bytes of an element of any type in the CPU's arena.
pub(crate) const ELEMENT_BYTES: usize = 4;

/// Untyped memory in words. Which part of it belongs to whom at which time is the plan's placement.
pub(crate) struct Arena {
    words: Vec<UnsafeCell<u32>>,
    fill: u32,
}

// SAFETY: the cells are only reached through `ScratchView`, whose users keep to the plan's hazards.
unsafe impl Sync for Arena {}

impl Arena {
    /// An empty arena. Memory that is new holds `fill`: NaN, so that a value read before it was written
    /// shows, or what a test wants it to hold.
    pub fn new(fill: f32) -> Self {
        Arena {
            words: Vec::new(),
            fill: fill.to_bits(),
        }
    }

    /// Grows to hold `bytes`.
    pub fn reserve(&mut self, bytes: usize) {
        let words = bytes.div_ceil(ELEMENT_BYTES);
        if self.words.len() < words {
            self.words.resize_with(words, || UnsafeCell::new(self.fill));
        }
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.words.len() * ELEMENT_BYTES
    }
}

/// The scratch values of one plan in the arena.
#[derive(Clone, Copy)]
pub(crate) struct ScratchView<'a> {
    arena: &'a Arena,
    placement: &'a Placement,
    plan: &'a Plan,
    /// Values behind those of the placement: an expanded step's own.
    extra: Option<(&'a Arena, &'a Placement)>,
}

impl<'a> ScratchView<'a> {
    /// Panics if the arena is too small for the placement.
    pub fn new(arena: &'a Arena, placement: &'a Placement, plan: &'a Plan) -> Self {
        assert!(
            placement.arena_bytes <= arena.bytes(),
            "arena smaller than its placement"
        );
        ScratchView {
            arena,
            placement,
            plan,
            extra: None,
        }
    }

    /// The same values for `plan`, which has more: those lie in `arena` by `placement`.
    pub fn extended<'b>(
        &self,
        plan: &'b Plan,
        arena: &'b Arena,
        placement: &'b Placement,
    ) -> ScratchView<'b>
    where
        'a: 'b,
    {
        ScratchView {
            arena: self.arena,
            placement: self.placement,
            plan,
            extra: Some((arena, placement)),
        }
    }

    fn pointer(&self, id: ScratchId) -> (*mut u32, usize) {
        let (arena, placement) = match self.extra {
            Some(extra) if id.index() >= self.placement.offsets.len() => extra,
            _ => (self.arena, self.placement),
        };
        let start = placement.range(id).start / ELEMENT_BYTES;
        let length = self.plan.spec(id).elements();
        let cells = &arena.words[start..start + length];
        (cells.as_ptr() as *mut u32, length)
    }

    /// A value's elements.
    ///
    /// # Safety
    /// The caller is a step that declares reading `id` (or runs after all steps): no step of the same
    /// stage writes it, nor anything placed over it.
    pub unsafe fn read(&self, id: ScratchId) -> &'a [f32] {
        let (pointer, length) = self.pointer(id);
        // SAFETY: in bounds and aligned by `pointer`; nobody writes meanwhile, by this function's contract.
        unsafe { std::slice::from_raw_parts(pointer.cast(), length) }
    }

    /// A value's elements as integers.
    ///
    /// # Safety
    /// As for [`read`](Self::read).
    pub unsafe fn read_u32(&self, id: ScratchId) -> &'a [u32] {
        let (pointer, length) = self.pointer(id);
        // SAFETY: as in `read`.
        unsafe { std::slice::from_raw_parts(pointer, length) }
    }

    /// Where a step writes a value.
    pub fn output(&self, id: ScratchId) -> Output<'a, f32> {
        let (pointer, length) = self.pointer(id);
        Output {
            pointer: pointer.cast(),
            length,
            lifetime: PhantomData,
        }
    }

    /// Where a step writes integers.
    pub fn output_u32(&self, id: ScratchId) -> Output<'a, u32> {
        let (pointer, length) = self.pointer(id);
        Output {
            pointer,
            length,
            lifetime: PhantomData,
        }
    }
}

/// Memory that the work items of a step write in disjoint parts.
pub(crate) struct Output<'a, T> {
    pointer: *mut T,
    length: usize,
    lifetime: PhantomData<&'a mut [T]>,
}

impl<T> Clone for Output<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Output<'_, T> {}

// SAFETY: access goes through `slice`, whose callers take disjoint ranges.
unsafe impl<T: Send> Send for Output<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Output<'_, T> {}

impl<'a, T> Output<'a, T> {
    /// All of `memory`, to be handed out in parts.
    pub fn of(memory: &'a mut [T]) -> Self {
        Output {
            pointer: memory.as_mut_ptr(),
            length: memory.len(),
            lifetime: PhantomData,
        }
    }

    /// `length` elements from `start`; panics if out of bounds.
    ///
    /// # Safety
    /// The caller owns this range: the step declares writing the value, and no other work item or
    /// reader touches the range while the slice lives.
    pub unsafe fn slice(self, start: usize, length: usize) -> &'a mut [T] {
        assert!(
            start <= self.length && length <= self.length - start,
            "output out of bounds"
        );
        // SAFETY: in bounds by the assertion, exclusive by this function's contract.
        unsafe { std::slice::from_raw_parts_mut(self.pointer.add(start), length) }
    }

    /// `length` elements from `start`, to be read by as many as like; panics if out of bounds.
    ///
    /// # Safety
    /// Nobody writes the range while the slice lives: the step declares reading it and not writing it.
    pub unsafe fn shared(self, start: usize, length: usize) -> &'a [T] {
        assert!(
            start <= self.length && length <= self.length - start,
            "state out of bounds"
        );
        // SAFETY: in bounds by the assertion, not written by this function's contract.
        unsafe { std::slice::from_raw_parts(self.pointer.add(start), length) }
    }

    /// All of it, to be read by as many as like.
    ///
    /// # Safety
    /// As for [`shared`](Self::shared).
    pub unsafe fn all_shared(self) -> &'a [T] {
        // SAFETY: forwarded.
        unsafe { self.shared(0, self.length) }
    }

    /// All of it.
    ///
    /// # Safety
    /// As for [`slice`](Self::slice).
    pub unsafe fn all(self) -> &'a mut [T] {
        // SAFETY: forwarded.
        unsafe { self.slice(0, self.length) }
    }
}
