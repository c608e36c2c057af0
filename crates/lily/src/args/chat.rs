//! Arguments of `lily chat`.

use super::values::positive;
use super::{DeviceArguments, EXIT_CODES, ReasoningChoice, SamplingArguments};
use clap::Args;
use std::path::PathBuf;

/// Arguments of `lily chat`.
#[derive(Debug, Args)]
#[command(
    about = "Talk with the model",
    long_about = "Talk with the model, turn by turn. What earlier turns have computed is kept, so that a turn \
                  reads little more than what is new. Lines that begin with / are commands: /help lists them. \
                  Alt-Enter begins a new line, pasted text keeps its lines, and \"\"\" before and behind a message \
                  holds many lines anywhere. Ctrl-C stops the answer, Ctrl-D leaves. Where standard input is no \
                  terminal, its lines are taken one by one, and the first failure ends it. Answers go to standard \
                  output, all else to standard error.",
    after_help = format!("\
Examples:
  lily chat
  lily chat --model ~/models/Qwen3.6-35B-A3B-4bit --system \"Answer briefly.\"
  lily chat --greedy --no-thinking --tools models/lily-tiny/tools.json
  printf 'What is 38 + 47?\\n/retry\\n' | lily chat

Messages are remembered for the arrow keys, in a file that only you can read:
~/.local/state/lily/history ($XDG_STATE_HOME/lily/history), on a Mac
~/Library/Application Support/lily/history

{EXIT_CODES}")
)]
pub struct ChatArguments {
    /// A system message; /system changes it
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Tools the model may call: a JSON array in OpenAI's form; you are asked for their results
    #[arg(long, value_name = "FILE")]
    pub tools: Option<PathBuf>,
    /// Answer at once, without reasoning first; /think changes it
    #[arg(long)]
    pub no_thinking: bool,
    /// Most tokens of an answer, its reasoning included [default: 32768, or what fits the context and
    /// the memory]
    #[arg(long, value_name = "N", value_parser = positive)]
    pub max_tokens: Option<usize>,
    /// Longest conversation, in tokens [default: what the model was made for]
    #[arg(long, value_name = "TOKENS", value_parser = positive)]
    pub context: Option<usize>,
    /// Text that ends an answer and is not part of it, in the reasoning too; may be repeated
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
    /// Whether reasoning is printed on standard error; auto: if that is a terminal
    #[arg(long, value_enum, default_value = "auto", value_name = "WHEN")]
    pub reasoning: ReasoningChoice,
    /// Remember messages in this file
    #[arg(long, value_name = "FILE")]
    pub history: Option<PathBuf>,
    /// Remember no messages
    #[arg(long, conflicts_with = "history")]
    pub no_history: bool,
    /// How tokens are chosen
    #[command(flatten)]
    pub sampling: SamplingArguments,
    /// How and where to run
    #[command(flatten)]
    pub device: DeviceArguments,
}
