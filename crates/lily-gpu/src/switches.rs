//! Mechanisms that can be turned off, one by one, to see what each is worth. Results are equal either way.

/// What runs as designed, and what is turned off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Switches {
    /// Query heads of a KV head are packed into a threadgroup, so that a cache row is read once for them.
    pub packed_heads: bool,
    /// The device waits for each dispatch before the next, as if every step depended on the one before.
    pub serial_encoding: bool,
}

impl Default for Switches {
    fn default() -> Self {
        Switches {
            packed_heads: true,
            serial_encoding: false,
        }
    }
}
