//! Token by token: each step begun before the last token was seen, where the device can do that.

use crate::engine::Engine;
use crate::error::EngineError;
use crate::session::Session;
use lily_plan::{Chain, Launch, Outcome, PlanOutput, STOPPED, SamplingRow};
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
    output: PlanOutput,
    /// The token that the run under way decodes.
    token: u32,
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
    /// [`pace`](Self::pace) says so: there the outcome has no logits.
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
        let tokens = self.decode_ahead(session, token, decode);
        if tokens.is_err() {
            session.reset();
        }
        let tokens = tokens?;
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
        let known = session
            .underway
            .take_if(|known| (known.token, known.output) == (token, decode.output));
        let chain = match known {
            Some(known) => known.chain,
            None => self.begin(session, token, decode)?,
        };
        let Ok(device) = self.device.run_ahead() else {
            unreachable!("it could when the chain was begun");
        };
        let sessions = &mut [session.state.as_mut()];
        let follows = decode.goes_on && device.follow(&chain, sessions)?;
        let tokens = device.collect(&chain, sessions)?;
        session.tokens.push(token);
        if follows {
            session.underway = Some(Underway {
                chain,
                output: decode.output,
                token: tokens[0],
            });
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
        let Ok(device) = self.device.run_ahead() else {
            unreachable!("asked for by the caller");
        };
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
        let Ok(device) = self.device.run_ahead() else {
            unreachable!("it could when the chain was begun");
        };
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
