//! The forward pass as data: operations with contracts, plans, hazards and stages, fused operations
//! with their meaning, routes, counting and pricing. Knows no device; works from a `config.json` alone.

mod device;
mod expand;
mod model;
mod operand;
mod operation;
mod placement;
mod plan;
mod record;
pub mod route;
mod stages;

pub use device::{
    Device, DeviceDescription, DeviceError, Launch, Observer, Outcome, SessionBytes, SessionState,
};
pub use model::ModelDescription;
pub use operand::{ElementType, Precision, Resource, ScratchId, ScratchSpec, StateCopy, StateSlot};
pub use operation::{Access, Operation, Projection, WeightArithmetic};
pub use placement::Placement;
pub use plan::{Phase, Plan, PlanClass, PlanOutput, Step};
