//! Peak working memory does not depend on the length of the prompt.

mod support;

use lily_engine::{CancelFlag, GenerationRequest, Progress};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};
use support::engine;

/// Counts what is allocated. The KV cache is not: it lies in reserved address ranges.
struct Counting;

static NOW: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: forwards to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let now = NOW.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(now, Ordering::Relaxed);
        // SAFETY: the caller's contract is the system allocator's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's contract is the system allocator's.
        unsafe { System.dealloc(pointer, layout) };
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Peak of everything allocated while a prompt is computed and one token is chosen, beyond what was
/// allocated before.
fn peak(prompt: usize) -> usize {
    let mut engine = engine();
    let tokens = (0..prompt as u32)
        .map(|i| i.wrapping_mul(2_654_435_761) % 4_000)
        .collect();
    let request = GenerationRequest {
        prompt: tokens,
        max_tokens: Some(1),
        ..GenerationRequest::default()
    };
    let generation = engine.start(None, request, CancelFlag::default()).unwrap();
    let before = NOW.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    let mut chunks = 0;
    engine
        .run(generation, |progress| {
            chunks += usize::from(matches!(progress, Progress::Prefilled { .. }))
        })
        .unwrap();
    assert_eq!(chunks, prompt.div_ceil(engine.options().prefill_chunk));
    PEAK.load(Ordering::Relaxed) - before
}

#[test]
fn prompts_of_4000_and_16000_tokens_have_the_same_peak_working_memory() {
    let (short, long) = (peak(4_000), peak(16_000));
    // The token history itself grows: four bytes a token, doubled as a vector grows.
    let history = (16_000 - 4_000) * 4 * 2;
    assert!(
        long <= short + history + 65_536,
        "peak {short} bytes, then {long}"
    );
    assert!(short > 1 << 20, "the counter counts: {short} bytes");
}
