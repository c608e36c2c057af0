//! The forward pass as data: operations with contracts, plans, hazards and stages, fused operations
//! with their meaning, routes, counting and pricing. Knows no device; works from a `config.json` alone.

#![forbid(unsafe_code)]

mod access;
mod ahead;
mod boundary;
mod builder;
mod cost;
mod count;
mod device;
mod expand;
mod model;
mod operand;
mod operation;
mod placement;
mod plan;
mod record;
mod report;
mod report_text;
pub mod route;
mod stages;
pub mod switches;
pub mod units;

pub use access::Access;
pub use ahead::{Chain, ChainReference, RunAhead, STOPPED};
pub use boundary::{BoundaryKind, boundaries};
pub use builder::PlanBuilder;
pub use cost::{Machine, MemoryPlan, PRICE_BASIS, Price};
pub use count::{Assumptions, Routing, Totals, Work};
pub use device::{
    Device, DeviceDescription, DeviceError, Launch, Observer, Outcome, SessionBytes, SessionState,
    Snapshot, StageTiming, check_length, check_positions, own_cache, own_snapshot, own_state,
};
pub use lily_sampling::{NO_TOKEN, SamplingRow};
pub use model::ModelDescription;
pub use operand::{ElementType, Precision, Resource, ScratchId, ScratchSpec, StateCopy, StateSlot};
pub use operation::{Operation, Projection, WeightArithmetic};
pub use placement::Placement;
pub use plan::{Phase, Plan, PlanClass, PlanOutput, Step};
pub use report::{
    BoundaryReport, ByMachine, BytesReport, ModelSummary, OperandReport, OperationReport,
    PhaseReport, PlanFigures, PlanReport, StepReport, WeightReport,
};
