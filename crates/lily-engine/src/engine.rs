//! The engine: one device, one model, its sessions.

use crate::budget::{Budget, MemoryUse, Reservation};
use crate::error::EngineError;
use crate::options::EngineOptions;
use crate::plans::PlanCache;
use crate::session::Session;
use crate::text::TextModel;
use lily_plan::{
    Device, DeviceDescription, Launch, ModelDescription, Outcome, Phase, Plan, PlanClass,
    PlanOutput, StageTiming, route,
};
use std::sync::Arc;

/// Runs one model on one device.
pub struct Engine {
    pub(crate) device: Box<dyn Device>,
    model: Arc<ModelDescription>,
    text: Arc<TextModel>,
    options: EngineOptions,
    context: usize,
    plans: PlanCache,
    budget: Arc<Budget>,
}

impl Engine {
    /// An engine for a device that holds the weights of `model`.
    pub fn new(
        device: Box<dyn Device>,
        model: Arc<ModelDescription>,
        text: Arc<TextModel>,
        options: EngineOptions,
    ) -> Result<Self, EngineError> {
        let longest = model.config.max_positions;
        let context = options.context.unwrap_or(longest);
        if context == 0 || context > longest {
            return Err(EngineError::Context {
                context,
                model: longest,
            });
        }
        let planned = MemoryUse::plan(device.as_ref(), &model, &options);
        if planned.working > planned.limit {
            let MemoryUse { working, limit, .. } = planned;
            return Err(EngineError::WorkingMemoryExceeded {
                needed: working,
                limit,
            });
        }
        let plans = PlanCache::new(model.clone(), options.plan_transform.clone());
        let budget = Budget::new(planned);
        Ok(Engine {
            device,
            model,
            text,
            options,
            context,
            plans,
            budget,
        })
    }

    /// What runs where.
    pub fn device(&self) -> DeviceDescription {
        self.device.describe()
    }

    /// The model as plans see it.
    pub fn model(&self) -> &Arc<ModelDescription> {
        &self.model
    }

    /// Tokenizer, template, defaults.
    pub fn text(&self) -> &Arc<TextModel> {
        &self.text
    }

    /// Whether the device runs plans that sample.
    pub(crate) fn device_can_sample(&self) -> bool {
        self.device.can_sample()
    }

    /// Longest sequence, in tokens.
    pub fn context(&self) -> usize {
        self.context
    }

    /// The options it was set up with.
    pub fn options(&self) -> &EngineOptions {
        &self.options
    }

    /// Where the memory budget stands.
    pub fn memory(&self) -> MemoryUse {
        self.budget.used()
    }

    /// Most tokens that a further session can hold in the memory that is left.
    pub fn largest_session(&self) -> usize {
        let session = self.device.session_bytes(self.options.precision);
        session
            .positions_within(self.memory().free())
            .min(self.context)
    }

    /// The plan that runs a prefill chunk of `rows` tokens.
    pub fn prefill_plan(&mut self, rows: usize, output: PlanOutput) -> Arc<Plan> {
        self.plans.get(
            self.device.as_ref(),
            PlanClass {
                phase: Phase::Prefill,
                precision: self.options.precision,
                rows,
                context: self.context,
                output,
            },
        )
    }

    /// The plan that decodes one token at `position`.
    pub fn decode_plan(&mut self, position: usize, output: PlanOutput) -> Arc<Plan> {
        self.batch_plan(1, position, output)
    }

    /// The plan that decodes a token of each of `rows` sessions ([`route::DECODE_ROWS`]) at `position` or at another of
    /// its band.
    pub(crate) fn batch_plan(
        &mut self,
        rows: usize,
        position: usize,
        output: PlanOutput,
    ) -> Arc<Plan> {
        self.plans.get(
            self.device.as_ref(),
            PlanClass {
                phase: Phase::Decode,
                precision: self.options.precision,
                rows,
                context: route::context_band(position + 1),
                output,
            },
        )
    }

    /// A session for up to `positions` tokens, its memory reserved.
    pub fn open_session(&self, positions: usize) -> Result<Session, EngineError> {
        let precision = self.options.precision;
        let needed = self
            .device
            .session_bytes(precision)
            .for_positions(positions);
        let reservation = self.reserve(needed, positions)?;
        let state = self.device.new_session(precision, positions)?;
        Ok(Session {
            tokens: Vec::new(),
            state,
            underway: None,
            kept: Vec::new(),
            _reservation: reservation,
        })
    }

    /// Sets memory aside for something that concerns `positions` tokens.
    pub(crate) fn reserve(
        &self,
        needed: u64,
        positions: usize,
    ) -> Result<Reservation, EngineError> {
        self.budget.reserve(needed).map_err(|free| {
            let limit = self.budget.used().limit;
            EngineError::MemoryExceeded {
                positions,
                needed,
                free,
                limit,
            }
        })
    }

    /// Sets aside what `plan` takes beyond the working memory of every request.
    pub(crate) fn reserve_working(&self, plan: &Plan) -> Result<Reservation, EngineError> {
        let beyond = self
            .device
            .working_bytes(plan)
            .saturating_sub(self.memory().working);
        self.reserve(beyond, plan.class.rows)
    }

    /// Runs the next chunk of `tokens` (which continue the session): from where the session stands to
    /// the next multiple of the chunk length, or to the end. Returns how many tokens that was and, with
    /// the end reached, what `output` asks for.
    pub fn prefill_chunk(
        &mut self,
        session: &mut Session,
        tokens: &[u32],
        output: PlanOutput,
    ) -> Result<(usize, Outcome), EngineError> {
        let chunk = self.options.prefill_chunk;
        self.prefill_chunk_of(session, tokens, chunk, output)
    }

    /// [`prefill_chunk`](Self::prefill_chunk) on a grid of its own.
    pub(crate) fn prefill_chunk_of(
        &mut self,
        session: &mut Session,
        tokens: &[u32],
        chunk: usize,
        output: PlanOutput,
    ) -> Result<(usize, Outcome), EngineError> {
        let position = session.tokens.len();
        let end = position + tokens.len();
        let stop = route::chunk_end(position, end, chunk);
        let rows = stop - position;
        let output = match output {
            PlanOutput::AllLogits => PlanOutput::AllLogits,
            output if stop == end => output,
            _ => PlanOutput::State,
        };
        let plan = self.prefill_plan(rows, output);
        let outcome = self.launch(&plan, session, &tokens[..rows])?;
        Ok((rows, outcome))
    }

    /// Decodes one token: its state is added, and `output` says what comes back.
    pub fn decode(
        &mut self,
        session: &mut Session,
        token: u32,
        output: PlanOutput,
    ) -> Result<Outcome, EngineError> {
        let plan = self.decode_plan(session.tokens.len(), output);
        self.launch(&plan, session, &[token])
    }

    fn launch(
        &mut self,
        plan: &Arc<Plan>,
        session: &mut Session,
        tokens: &[u32],
    ) -> Result<Outcome, EngineError> {
        session.settle();
        let launch = Launch {
            tokens,
            sessions: &mut [session.state.as_mut()],
            preset: &[],
            token_limit: self.token_limit(),
            sampling: &[],
            observer: None,
        };
        let outcome = self.device.execute(plan, launch)?;
        session.tokens.extend_from_slice(tokens);
        Ok(outcome)
    }

    /// What the device's own clock says of the work since this was last asked, where the device was opened to tell.
    pub fn take_timings(&mut self) -> Vec<StageTiming> {
        self.device.take_timings()
    }

    /// Ids at and above this are never chosen.
    pub fn token_limit(&self) -> u32 {
        self.text.token_limit(self.model.config.vocab_size)
    }
}
