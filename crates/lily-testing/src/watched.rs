//! A device that tells what was asked of it, and does some of it wrong.

use lily_plan::{
    Chain, Device, DeviceDescription, DeviceError, Launch, Outcome, Phase, Plan, Precision,
    RunAhead, SessionBytes, SessionState, StateCopy, StateSlot,
};
use std::sync::{Arc, Mutex};

/// What was asked of a device.
#[derive(Debug, Default)]
pub struct Seen {
    /// Rows of each decode step that was executed.
    pub executed: Vec<usize>,
    /// Of each chain that was begun.
    pub begun: Vec<usize>,
    /// Of each run that followed another.
    pub followed: Vec<usize>,
}

/// A device that is looked at and interfered with.
pub struct Watched<D> {
    /// The device.
    pub device: D,
    /// What was asked of it.
    pub seen: Arc<Mutex<Seen>>,
    /// A session whose decode, or chain, begins with this token holds no numbers from there on.
    pub poison: Option<u32>,
    /// Decode steps of so many rows fail.
    pub failing: Option<usize>,
}

impl<D: Device> Watched<D> {
    /// A device that is looked at.
    pub fn new(device: D) -> Self {
        Watched {
            device,
            seen: Arc::default(),
            poison: None,
            failing: None,
        }
    }

    fn spoil(&self, launch: &mut Launch<'_>) -> Result<(), DeviceError> {
        for (token, session) in launch.tokens.iter().zip(launch.sessions.iter_mut()) {
            if Some(*token) == self.poison {
                let slot = StateSlot::RecurrentState(0, StateCopy::Live);
                let values = session.read(slot);
                session.write(slot, &vec![f32::NAN; values.len()])?;
            }
        }
        Ok(())
    }

    fn see(&self, note: impl FnOnce(&mut Seen)) {
        note(&mut self.seen.lock().expect("no test failed while it held this"));
    }

    fn chains(&mut self) -> &mut dyn RunAhead {
        self.device.run_ahead().expect("asked for before")
    }
}

impl<D: Device> Device for Watched<D> {
    fn describe(&self) -> DeviceDescription {
        self.device.describe()
    }
    fn available_memory(&self) -> Option<u64> {
        self.device.available_memory()
    }
    fn session_bytes(&self, precision: Precision) -> SessionBytes {
        self.device.session_bytes(precision)
    }
    fn working_bytes(&self, plan: &Plan) -> u64 {
        self.device.working_bytes(plan)
    }
    fn most_decode_rows(&self) -> usize {
        self.device.most_decode_rows()
    }
    fn can_sample(&self) -> bool {
        self.device.can_sample()
    }
    fn new_session(
        &self,
        precision: Precision,
        capacity: usize,
    ) -> Result<Box<dyn SessionState>, DeviceError> {
        self.device.new_session(precision, capacity)
    }
    fn execute(
        &mut self,
        plan: &Arc<Plan>,
        mut launch: Launch<'_>,
    ) -> Result<Outcome, DeviceError> {
        let rows = plan.class.rows;
        if plan.class.phase == Phase::Decode {
            self.see(|seen| seen.executed.push(rows));
            if self.failing == Some(rows) {
                return Err(DeviceError::Failed("as it was told to".into()));
            }
            self.spoil(&mut launch)?;
        }
        self.device.execute(plan, launch)
    }
    fn run_ahead(&mut self) -> Result<&mut dyn RunAhead, &'static str> {
        self.device.run_ahead()?;
        Ok(self)
    }
}

impl<D: Device> RunAhead for Watched<D> {
    fn begin(
        &mut self,
        plan: &Arc<Plan>,
        mut launch: Launch<'_>,
        stops: &[&[u32]],
    ) -> Result<Chain, DeviceError> {
        self.see(|seen| seen.begun.push(plan.class.rows));
        self.spoil(&mut launch)?;
        self.chains().begin(plan, launch, stops)
    }
    fn follow(
        &mut self,
        chain: &Chain,
        sessions: &mut [&mut dyn SessionState],
    ) -> Result<bool, DeviceError> {
        let follows = self.chains().follow(chain, sessions)?;
        if follows {
            self.see(|seen| seen.followed.push(sessions.len()));
        }
        Ok(follows)
    }
    fn collect(
        &mut self,
        chain: &Chain,
        sessions: &mut [&mut dyn SessionState],
    ) -> Result<Vec<u32>, DeviceError> {
        self.chains().collect(chain, sessions)
    }
}
