//! Work of a step, cut into items that cores take one by one.

/// A step ready to run: `items` independent pieces.
pub(crate) struct Work<'a> {
    pub items: usize,
    pub run: Box<dyn Fn(usize) + Send + Sync + 'a>,
}

impl<'a> Work<'a> {
    /// `items` pieces, each run by `run(index)`.
    pub fn new(items: usize, run: impl Fn(usize) + Send + Sync + 'a) -> Self {
        Work {
            items,
            run: Box::new(run),
        }
    }

    /// `total` elements in pieces of at most `size`: `run(start, length)`.
    pub fn blocks(
        total: usize,
        size: usize,
        run: impl Fn(usize, usize) + Send + Sync + 'a,
    ) -> Self {
        Work::new(total.div_ceil(size), move |item| {
            let start = item * size;
            run(start, size.min(total - start));
        })
    }
}

thread_local! {
    static BUFFERS: std::cell::RefCell<Vec<Vec<f32>>> = const { std::cell::RefCell::new(Vec::new()) };
}

/// Lends the running thread a buffer of `length` elements, which it keeps for the next item. What it
/// holds is left over from earlier use.
pub(crate) fn with_buffer<R>(length: usize, body: impl FnOnce(&mut [f32]) -> R) -> R {
    let mut buffer = BUFFERS
        .with_borrow_mut(|buffers| buffers.pop())
        .unwrap_or_default();
    if buffer.len() < length {
        buffer.resize(length, 0.0);
    }
    let result = body(&mut buffer[..length]);
    BUFFERS.with_borrow_mut(|buffers| buffers.push(buffer));
    result
}
