//! Token by token: each step begun before the last token was seen, where the device can do that.

use crate::engine::Engine;
use crate::error::EngineError;
use crate::session::Session;
use lily_plan::{
    Chain, Device, DeviceError, Launch, NO_TOKEN, Outcome, PlanOutput, RunAhead, STOPPED,
    SamplingRow,
};
use std::fmt;

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

/// Runs that a device has been sent for a session.
pub(crate) struct Underway {
    chain: Chain,
    /// What the run under way decodes; nothing where the text ended before it.
    next: Option<Next>,
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
        if self.pace(decode.output) != Pace::Ahead {
            let Decode {
                output, sampling, ..
            } = *decode;
            return self.decode_with(session, token, output, &[sampling]);
        }
        let tokens = self.decode_ahead(session, token, decode)?;
        Ok(Outcome {
            logits: Vec::new(),
            tokens,
        })
    }

    fn decode_ahead(
        &mut self,
        session: &mut Session,
        token: u32,
        decode: &Decode<'_>,
    ) -> Result<Vec<u32>, EngineError> {
        let step = Next::of(token, decode);
        let is_next = |known: &mut Underway| known.next.as_ref() == Some(&step);
        let chain = match session.underway.take_if(is_next) {
            Some(known) => known.chain,
            None => self.begin(session, token, decode)?,
        };
        let device = chains(self.device.as_mut());
        let sessions = &mut [session.state.as_mut()];
        let mut sent = || {
            let follows = decode.goes_on && device.follow(&chain, sessions)?;
            Ok::<_, DeviceError>((follows, device.collect(&chain, sessions)?))
        };
        let (follows, tokens) = match sent() {
            Ok(sent) => sent,
            Err(error) => {
                // A run has failed that may have written the session's states.
                session.reset();
                return Err(error.into());
            }
        };
        session.tokens.push(token);
        if follows {
            let next = step.then(tokens[0], decode.stops);
            session.underway = Some(Underway { chain, next });
        }
        Ok(tokens)
    }

    fn begin(
        &mut self,
        session: &mut Session,
        token: u32,
        decode: &Decode<'_>,
    ) -> Result<Chain, EngineError> {
        self.settle(session)?;
        let plan = self.decode_plan(session.tokens.len(), decode.output);
        let launch = Launch {
            tokens: &[token],
            sessions: &mut [session.state.as_mut()],
            preset: &[],
            token_limit: self.token_limit(),
            sampling: &[decode.sampling],
            observer: None,
        };
        let device = chains(self.device.as_mut());
        Ok(device.begin(&plan, launch, &[decode.stops])?)
    }

    /// Takes the step that decoded the session's last token back.
    pub(crate) fn take_back(&mut self, session: &mut Session) -> Result<(), EngineError> {
        self.settle(session)?;
        let is_back = session.state.step_back();
        assert!(is_back, "nothing ran behind the step");
        session.tokens.pop();
        Ok(())
    }

    /// Takes back what was sent off ahead and is not wanted.
    pub(crate) fn settle(&mut self, session: &mut Session) -> Result<(), EngineError> {
        let Some(underway) = session.underway.take() else {
            return Ok(());
        };
        let device = chains(self.device.as_mut());
        match device.collect(&underway.chain, &mut [session.state.as_mut()]) {
            Ok(tokens) if tokens[0] == STOPPED => Ok(()),
            Ok(_) => {
                let is_back = session.state.step_back();
                assert!(is_back, "a run that was just collected can be taken back");
                Ok(())
            }
            Err(error) => {
                session.reset();
                Err(error.into())
            }
        }
    }
}
