//! A device that says which mechanisms were turned off: figures made without one are never shown as those with it.

use lily_plan::{
    Device, DeviceDescription, DeviceError, Launch, Outcome, Plan, Precision, RunAhead,
    SessionBytes, SessionState, StageTiming,
};
use std::sync::Arc;

/// A device with mechanisms turned off.
pub struct Without {
    /// What executes.
    pub device: Box<dyn Device>,
    /// Their names.
    pub names: Vec<String>,
}

impl Device for Without {
    fn describe(&self) -> DeviceDescription {
        let mut description = self.device.describe();
        description.kernels += &format!("; without {}", self.names.join(", "));
        description
    }

    fn available_memory(&self) -> Option<u64> {
        self.device.available_memory()
    }

    fn most_decode_rows(&self) -> usize {
        self.device.most_decode_rows()
    }

    fn can_sample(&self) -> bool {
        self.device.can_sample()
    }

    fn session_bytes(&self, precision: Precision) -> SessionBytes {
        self.device.session_bytes(precision)
    }

    fn working_bytes(&self, plan: &Plan) -> u64 {
        self.device.working_bytes(plan)
    }

    fn new_session(
        &self,
        precision: Precision,
        capacity: usize,
    ) -> Result<Box<dyn SessionState>, DeviceError> {
        self.device.new_session(precision, capacity)
    }

    fn suit(&self, plan: Plan) -> Plan {
        self.device.suit(plan)
    }

    fn take_timings(&mut self) -> Vec<StageTiming> {
        self.device.take_timings()
    }

    fn run_ahead(&mut self) -> Result<&mut dyn RunAhead, &'static str> {
        self.device.run_ahead()
    }
    fn execute(&mut self, plan: &Arc<Plan>, launch: Launch<'_>) -> Result<Outcome, DeviceError> {
        self.device.execute(plan, launch)
    }
}
