//! Mechanisms that can be turned off, one by one, to see what each is worth. Results are equal either way but
//! where a switch says otherwise.

/// What runs as designed, and what is turned off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Switches {
    /// Query heads of a KV head are packed into a threadgroup, so that a cache row is read once for them.
    pub packed_heads: bool,
    /// The device waits for each dispatch before the next, as if every step depended on the one before.
    pub serial_encoding: bool,
    /// After each choice of experts the device stops, and the CPU reads the choice and writes it back: what engines pay
    /// whose CPU launches the experts' products.
    pub routing_through_cpu: bool,
    /// Gated DeltaNet takes runs of 32 rows and more by chunks on simdgroup matrices, instead of row by row. Its results
    /// differ from the scan's in the last bits.
    pub chunked_scan: bool,
    /// The scan of Gated DeltaNet writes its state to memory and reads it again every 64 rows.
    pub blockwise_scan: bool,
    /// Products of many rows take 16 rows a threadgroup, however many there are. On tensor operations results may differ
    /// in the last bits.
    pub small_tiles: bool,
}

impl Switches {
    /// Names of the switches on the command line, what each turns off, and how.
    pub const ALL: &[(&str, &str, fn(&mut Switches))] = &[
        (
            "packed-heads",
            "query heads of a KV head read the cache together",
            |switches| switches.packed_heads = false,
        ),
        (
            "concurrent-encoding",
            "barriers stand between stages only, not between all dispatches",
            |switches| switches.serial_encoding = true,
        ),
        (
            "resident-routing",
            "the CPU does not wait for the experts that were chosen",
            |switches| switches.routing_through_cpu = true,
        ),
        (
            "register-scan",
            "the recurrent state stays in registers through a prompt's chunk",
            |switches| switches.blockwise_scan = true,
        ),
    ];

    /// Turns the mechanism of this name off; false if there is none.
    pub fn turn_off(&mut self, name: &str) -> bool {
        let found = Self::ALL.iter().find(|(known, _, _)| *known == name);
        if let Some((_, _, turn_off)) = found {
            turn_off(self);
        }
        found.is_some()
    }
}

impl Default for Switches {
    fn default() -> Self {
        Switches {
            packed_heads: true,
            serial_encoding: false,
            routing_through_cpu: false,
            chunked_scan: false,
            blockwise_scan: false,
            small_tiles: false,
        }
    }
}
