//! Sessions, prefill and decode loops, sampling, memory budget. Knows devices by their trait alone, and
//! nothing of command lines or HTTP.

#![forbid(unsafe_code)]

mod batch;
mod budget;
mod decode;
mod engine;
mod error;
mod generation;
mod guide;
mod limits;
mod options;
mod plans;
mod prefix;
mod score;
mod session;
mod text;

pub use budget::MemoryUse;
pub use decode::{Decode, Pace};
pub use engine::Engine;
pub use error::EngineError;
pub use generation::{
    CancelFlag, FinishReason, Finished, Generation, GenerationRequest, Progress, Timings,
    TokenChoice, TokenEvent,
};
pub use guide::{Allowed, Guide, GuideError};
pub use lily_plan::{Device, DeviceDescription, Plan, PlanClass, PlanOutput, Precision};
pub use lily_sampling::{MAXIMUM_ALTERNATIVES, SamplingError, SamplingParameters};
pub use lily_text::{
    Detokenizer, OutputEvent, OutputParser, ParsedOutput, TemplateError, TextError, Tokenizer,
    ToolCall, parse_output,
};
pub use limits::RequestLimits;
pub use options::{EngineOptions, PlanTransform};
pub use score::Score;
pub use session::Session;
pub use text::{Conversation, TextModel};
