//! Mechanisms that can be turned off, one by one, to see what each is worth. Results are equal either way but
//! where a switch says otherwise.

use crate::gpu::MatrixUnits;

/// What runs as designed, and what is turned off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Switches {
    /// Query heads of a KV head are packed into a threadgroup, so that a cache row is read once for them.
    pub packed_heads: bool,
    /// Decode's attention loads a lane's columns of a cache row at once, side by side with those of the other lanes.
    pub coalesced_cache: bool,
    /// The device waits for each dispatch before the next, as if every step depended on the one before.
    pub serial_encoding: bool,
    /// After each choice of experts the device stops, and the CPU reads the choice and writes it back: what engines pay
    /// whose CPU launches the experts' products.
    pub routing_through_cpu: bool,
    /// A decoded token goes through the CPU before the next step is sent off.
    pub token_through_cpu: bool,
    /// Gated DeltaNet takes runs of 32 rows and more by chunks on simdgroup matrices, instead of row by row. Its results
    /// differ from the scan's in the last bits.
    pub chunked_scan: bool,
    /// The scan of Gated DeltaNet writes its state to memory and reads it again every 64 rows.
    pub blockwise_scan: bool,
    /// Products of many rows run on Metal 4's tensor operations where the GPU has them; otherwise on simdgroup matrices.
    /// Results may differ in the last bits.
    pub tensor_operations: bool,
    /// Tensor operations take codes of four bits as they are where the GPU can do that; otherwise weights are rounded to
    /// bfloat first, and results are those of another rounding.
    pub packed_codes: bool,
    /// Products of many rows take 16 rows a threadgroup, however many there are. On tensor operations results may differ
    /// in the last bits.
    pub small_tiles: bool,
}

/// A switch as people know it.
#[derive(Clone, Copy, Debug)]
pub struct Switch {
    /// Its name on the command line.
    pub name: &'static str,
    /// The mechanism that it turns off.
    pub what: &'static str,
    turn_off: fn(&mut Switches),
}

impl Switches {
    /// Everything as designed.
    pub const DESIGNED: Switches = Switches {
        packed_heads: true,
        coalesced_cache: true,
        serial_encoding: false,
        routing_through_cpu: false,
        token_through_cpu: false,
        chunked_scan: false,
        blockwise_scan: false,
        tensor_operations: true,
        packed_codes: true,
        small_tiles: false,
    };

    /// All of them.
    pub const ALL: &[Switch] = &[
        Switch {
            name: "packed-heads",
            what: "query heads of a KV head read the cache together",
            turn_off: |switches| switches.packed_heads = false,
        },
        Switch {
            name: "coalesced-cache",
            what: "decode's attention loads cache rows in lines of memory, not column by column",
            turn_off: |switches| switches.coalesced_cache = false,
        },
        Switch {
            name: "concurrent-encoding",
            what: "barriers stand between stages only, not between all dispatches",
            turn_off: |switches| switches.serial_encoding = true,
        },
        Switch {
            name: "resident-routing",
            what: "the CPU does not wait for the experts that were chosen",
            turn_off: |switches| switches.routing_through_cpu = true,
        },
        Switch {
            name: "run-ahead",
            what: "a decode step is sent off before the CPU has seen the token it begins with",
            turn_off: |switches| switches.token_through_cpu = true,
        },
        Switch {
            name: "register-scan",
            what: "the recurrent state stays in registers through a prompt's chunk",
            turn_off: |switches| switches.blockwise_scan = true,
        },
        Switch {
            name: "tensor-operations",
            what: "a prompt's products run on Metal 4's tensor operations where there are any; the last bits may differ",
            turn_off: |switches| switches.tensor_operations = false,
        },
        Switch {
            name: "packed-codes",
            what: "tensor operations take weights of four bits as they are, where they can; off, weights are rounded first",
            turn_off: |switches| switches.packed_codes = false,
        },
        Switch {
            name: "tile-sizes",
            what: "products of many rows take tiles of 16, 32 or 64 rows by their number",
            turn_off: |switches| switches.small_tiles = true,
        },
    ];

    /// What multiplies matrices on a machine that has these units.
    pub fn units(&self, found: MatrixUnits) -> MatrixUnits {
        match found {
            MatrixUnits::TensorOperations | MatrixUnits::PackedTensorOperations
                if !self.tensor_operations =>
            {
                MatrixUnits::SimdgroupMatrices
            }
            MatrixUnits::PackedTensorOperations if !self.packed_codes => {
                MatrixUnits::TensorOperations
            }
            found => found,
        }
    }

    /// Turns the mechanism of this name off; false if there is none.
    pub fn turn_off(&mut self, name: &str) -> bool {
        let found = Self::ALL.iter().find(|switch| switch.name == name);
        if let Some(switch) = found {
            (switch.turn_off)(self);
        }
        found.is_some()
    }
}

impl Default for Switches {
    fn default() -> Self {
        Self::DESIGNED
    }
}
