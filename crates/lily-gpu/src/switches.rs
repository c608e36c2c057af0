//! Mechanisms that can be turned off, one by one, to see what each is worth. Results are equal either way but
//! where a switch says otherwise.

/// What runs as designed, and what is turned off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Switches {
    /// Query heads of a KV head are packed into a threadgroup, so that a cache row is read once for them.
    pub packed_heads: bool,
    /// The device waits for each dispatch before the next, as if every step depended on the one before.
    pub serial_encoding: bool,
    /// Gated DeltaNet takes runs of 32 rows and more by chunks on simdgroup matrices, instead of row by row. Its results
    /// differ from the scan's in the last bits.
    pub chunked_scan: bool,
    /// The scan of Gated DeltaNet writes its state to memory and reads it again every 64 rows.
    pub blockwise_scan: bool,
}

impl Default for Switches {
    fn default() -> Self {
        Switches {
            packed_heads: true,
            serial_encoding: false,
            chunked_scan: false,
            blockwise_scan: false,
        }
    }
}
