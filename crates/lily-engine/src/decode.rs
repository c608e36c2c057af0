//! Token by token: each step begun before the last token was seen, where the device can do that.

use crate::engine::Engine;
use crate::error::EngineError;
use crate::session::Session;
use lily_plan::{
    Chain, Device, DeviceError, Launch, NO_TOKEN, Outcome, Plan, PlanOutput, RunAhead, STOPPED,
    SamplingRow, SessionState,
};
use std::fmt;
use std::sync::Arc;

/// How one token after another is decoded.
#[derive(Clone, Copy, Debug)]
pub struct Decode<'a> {
    /// What a step leaves.
    pub output: PlanOutput,
    /// What a [`PlanOutput::Sampled`] step chooses by.
    pub sampling: SamplingRow<'a>,
    /// Tokens behind which no further step is wanted.
    pub stops: &'a [u32],
    /// Whether the token that this step chooses will be decoded next, in the same way, as far as anyone knows: by the
    /// sampling row with that token accepted.
    pub goes_on: bool,
}

/// Whether decode steps are sent off before the token they begin with was seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    /// They are.
    Ahead,
    /// The token goes through the host, for this reason.
    TokenByToken(&'static str),
}

impl fmt::Display for Pace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Pace::Ahead => f.write_str("each step sent off before the last token was seen"),
            Pace::TokenByToken(reason) => write!(f, "through the host token by token: {reason}"),
        }
    }
}

/// A session's part in runs that a device has been sent. The others of the chain have theirs: it goes on where all of
/// them are decoded together once more, and with the last of them it goes.
pub(crate) struct Underway {
    chain: Arc<Chain>,
    /// The session's row, and how many there are.
    row: usize,
    rows: usize,
    /// What the run under way decodes; nothing where the text ended before it.
    next: Option<Next>,
}

/// A session with the token that is decoded next.
pub(crate) struct DecodeRow<'a> {
    pub session: &'a mut Session,
    pub token: u32,
    pub decode: Decode<'a>,
}

/// A step as far as the device has made it up by itself.
#[derive(PartialEq)]
struct Next {
    token: u32,
    output: PlanOutput,
    /// Number of the draw, where there is one.
    draw: Option<u64>,
    /// A mask is the host's to say: no step ahead has one.
    is_masked: bool,
}

impl Next {
    fn of(token: u32, decode: &Decode<'_>) -> Self {
        Next {
            token,
            output: decode.output,
            draw: (decode.output == PlanOutput::Sampled).then_some(decode.sampling.step),
            is_masked: decode.sampling.allowed.is_some(),
        }
    }

    /// What follows this step if it has chosen `token`.
    fn then(self, token: u32, stops: &[u32]) -> Option<Self> {
        (token != NO_TOKEN && !stops.contains(&token)).then_some(Next {
            token,
            output: self.output,
            draw: self.draw.map(|draw| draw + 1),
            is_masked: false,
        })
    }
}

/// The device's chains, for whoever has one or has asked [`Engine::pace`].
fn chains(device: &mut dyn Device) -> &mut dyn RunAhead {
    let Ok(chains) = device.run_ahead() else {
        unreachable!("what a device can do does not change");
    };
    chains
}

impl Engine {
    /// How steps that leave `output` are sent off.
    pub fn pace(&mut self, output: PlanOutput) -> Pace {
        match output {
            PlanOutput::Token | PlanOutput::Sampled => match self.device.run_ahead() {
                Ok(_) => Pace::Ahead,
                Err(reason) => Pace::TokenByToken(reason),
            },
            _ => Pace::TokenByToken("the host chooses"),
        }
    }

    /// Decodes `token`, as [`decode`](Self::decode) does, and sends the next step off with it where
    /// [`pace`](Self::pace) says so.
    ///
    /// # Errors
    /// As [`decode`](Self::decode). Where a run has failed that was sent off, the session is empty afterwards.
    pub fn decode_next(
        &mut self,
        session: &mut Session,
        token: u32,
        decode: &Decode<'_>,
    ) -> Result<Outcome, EngineError> {
        let decode = *decode;
        let row = DecodeRow {
            session,
            token,
            decode,
        };
        Ok(self.decode_together(&mut [row], decode.output)?)
    }

    /// [`decode_next`](Self::decode_next) for several sessions, as one batch: as many as a plan has rows, in one band of
    /// contexts, by a plan that leaves `output` of each.
    ///
    /// # Errors
    /// Where the device fails; then all of them are lost.
    pub(crate) fn decode_together(
        &mut self,
        rows: &mut [DecodeRow<'_>],
        output: PlanOutput,
    ) -> Result<Outcome, DeviceError> {
        for row in rows.iter_mut() {
            row.decode.output = output;
        }
        let outcome = if self.pace(output) == Pace::Ahead {
            Outcome {
                logits: Vec::new(),
                tokens: self.decode_ahead(rows)?,
            }
        } else {
            self.begin(rows, |device, plan, launch| device.execute(plan, launch))?
        };
        rows.iter_mut()
            .for_each(|row| row.session.tokens.push(row.token));
        Ok(outcome)
    }

    fn decode_ahead(&mut self, rows: &mut [DecodeRow<'_>]) -> Result<Vec<u32>, DeviceError> {
        let chain = match known_chain(rows) {
            Some(chain) => chain,
            None => {
                let stops: Vec<&[u32]> = rows.iter().map(|row| row.decode.stops).collect();
                let chain = self.begin(rows, |device, plan, launch| {
                    chains(device).begin(plan, launch, &stops)
                })?;
                Arc::new(chain)
            }
        };
        let device = chains(self.device.as_mut());
        let goes_on = rows.iter().all(|row| row.decode.goes_on);
        let sessions = &mut states(rows);
        let mut sent = || {
            let mut follows = goes_on && device.follow(&chain, sessions)?;
            let tokens = device.collect(&chain, sessions)?;
            if follows && tokens.contains(&NO_TOKEN) {
                // That row's step will be taken back. It can be, since its session stops before the run that follows;
                // what the others have of that run is decoded anew.
                let further = device.collect(&chain, sessions)?;
                let moved = sessions.iter_mut().zip(further);
                for (session, _) in moved.filter(|(_, token)| *token != STOPPED) {
                    let is_back = session.step_back();
                    assert!(is_back, "a run that was just collected can be taken back");
                }
                follows = false;
            }
            Ok((follows, tokens))
        };
        let (follows, tokens) = match sent() {
            Ok(sent) => sent,
            Err(error) => {
                // A run has failed that may have written the sessions' states.
                rows.iter_mut().for_each(|row| row.session.reset());
                return Err(error);
            }
        };
        if follows {
            let count = rows.len();
            for (index, (row, &chosen)) in rows.iter_mut().zip(&tokens).enumerate() {
                row.session.underway = Some(Underway {
                    chain: chain.clone(),
                    row: index,
                    rows: count,
                    next: Next::of(row.token, &row.decode).then(chosen, row.decode.stops),
                });
            }
        }
        Ok(tokens)
    }

    /// Has the device begin with a step of these sessions.
    fn begin<T>(
        &mut self,
        rows: &mut [DecodeRow<'_>],
        begin: impl FnOnce(&mut dyn Device, &Arc<Plan>, Launch<'_>) -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        let positions = rows.iter().map(|row| row.session.tokens.len());
        let furthest = positions.max().unwrap_or(0);
        let plan = self.batch_plan(rows.len(), furthest, rows[0].decode.output);
        let token_limit = self.token_limit();
        let tokens: Vec<u32> = rows.iter().map(|row| row.token).collect();
        let sampling: Vec<SamplingRow<'_>> = rows.iter().map(|row| row.decode.sampling).collect();
        rows.iter_mut().for_each(|row| row.session.settle());
        let launch = Launch {
            tokens: &tokens,
            sessions: &mut states(rows),
            preset: &[],
            token_limit,
            sampling: &sampling,
            observer: None,
        };
        begin(self.device.as_mut(), &plan, launch)
    }

    /// Takes the step that decoded the session's last token back.
    pub(crate) fn take_back(&mut self, session: &mut Session) {
        let is_back = session.state.step_back();
        assert!(is_back, "nothing ran behind the step");
        session.tokens.pop();
    }
}

/// The sessions as a launch takes them.
fn states<'a>(rows: &'a mut [DecodeRow<'_>]) -> Vec<&'a mut dyn SessionState> {
    let mut states: Vec<&mut dyn SessionState> = Vec::with_capacity(rows.len());
    for row in rows {
        states.push(row.session.state.as_mut());
    }
    states
}

/// The chain whose run under way is this very step of these very sessions. Whatever they had, they have no more.
fn known_chain(rows: &mut [DecodeRow<'_>]) -> Option<Arc<Chain>> {
    let count = rows.len();
    let mut chain = None;
    let mut is_known = true;
    for (index, row) in rows.iter_mut().enumerate() {
        let step = Next::of(row.token, &row.decode);
        let known = row.session.underway.take().filter(|known| {
            (known.row, known.rows) == (index, count)
                && known.next.as_ref() == Some(&step)
                && chain
                    .as_ref()
                    .is_none_or(|chain| Arc::ptr_eq(chain, &known.chain))
        });
        is_known &= known.is_some();
        chain = known.map(|known| known.chain).or(chain);
    }
    chain.filter(|_| is_known)
}
