//! The command line's grammar.

mod chat;
mod device;
mod manual;
mod serve;
mod values;

pub use chat::ChatArguments;
pub use device::{DeviceArguments, DeviceChoice, PrecisionChoice, WatchArguments, switches};
pub use manual::{CompletionsArguments, ManArguments};
pub use serve::ServeArguments;
pub use values::TopK;

use clap::{Args, Parser, Subcommand, ValueEnum};
use std::path::PathBuf;
use values::{logit_bias, part_of_a_name, positive, positive_up_to};

const EXIT_CODES: &str = "\
Exit codes:
  0    it worked
  1    the request failed: refused, too little memory, a device at fault, a check missed
  2    wrong usage or configuration: a bad flag, a missing file, a checkpoint that is not sound
  130  interrupted";

const EXAMPLES: &str = "\
Examples:
  lily run \"What is the capital of Norway?\"
  lily run --model ~/models/Qwen3.6-35B-A3B-4bit \"Explain mixture-of-experts models\"
  lily chat --model ~/models/Qwen3.6-35B-A3B-4bit
  lily serve --model ~/models/Qwen3.6-35B-A3B-4bit
  lily inspect ~/models/Qwen3.6-35B-A3B-4bit
  lily plan fixtures/qwen3.6-35b-a3b/config.json    (the file is in a clone of Lily)
  lily bench --prefill 128,512 --decode 64
  lily verify";

/// An inference engine for Qwen3.5 and Qwen3.6 mixture-of-experts models.
///
/// Without --model, the small model that is part of this program answers: lily-tiny, of the same
/// architecture. It exercises the engine and knows only what it was trained on: capitals, chemical
/// symbols, sums of two-digit numbers, spelling, greetings, short stories, small JSON, finding a value
/// in a text. Outside of that it talks nonsense.
#[derive(Debug, Parser)]
#[command(name = "lily", version, after_help = format!("{EXAMPLES}\n\n{EXIT_CODES}"))]
#[command(arg_required_else_help = true, max_term_width = 100)]
pub struct Arguments {
    /// Directory of a checkpoint in MLX format [default: the model embedded in this program]
    #[arg(long, global = true, value_name = "PATH")]
    pub model: Option<PathBuf>,
    /// What to do
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands. Each is described by its arguments: a doc comment on a variant would replace both
/// their texts, the long one by nothing.
#[derive(Debug, Subcommand)]
pub enum Command {
    Run(Box<RunArguments>),
    Chat(Box<ChatArguments>),
    Serve(ServeArguments),
    Plan(PlanArguments),
    Inspect(InspectArguments),
    Bench(BenchArguments),
    Verify(VerifyArguments),
    Completions(CompletionsArguments),
    Man(ManArguments),
}

/// Arguments of `lily run`.
#[derive(Debug, Args)]
#[command(
    about = "Answer a prompt",
    long_about = "Answer a prompt. The answer's content goes to standard output as it is made, and nothing \
                  else does; tool calls are one JSON object a line there. Reasoning goes to standard error, \
                  if that is a terminal. An answer that --max-tokens ends while it still reasons has no \
                  content: a note on standard error says so, and the status is 0.",
    after_help = format!("\
Examples:
  lily run \"What is the capital of Norway?\"
  echo \"What is 17 + 25?\" | lily run --no-thinking
  lily run --seed 7 --temperature 0.8 \"Tell me a story about a fox and a lantern.\"
  lily run --json --logprobs 3 --greedy \"Hello!\"
  lily run --greedy --tools models/lily-tiny/tools.json \"Set a timer for 5 minutes.\"
  lily run --raw --max-tokens 40 \"Once upon a time\"

The tools of the example are in a clone of Lily: models/lily-tiny/tools.json

{EXIT_CODES}")
)]
pub struct RunArguments {
    /// The prompt; standard input, less the newline at its end, if there is none or it is -
    #[arg(value_name = "PROMPT")]
    pub prompt: Vec<String>,
    /// A system message
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// A whole conversation: a JSON array of messages in OpenAI's form (- is standard input)
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prompt", "system", "raw"])]
    pub messages: Option<PathBuf>,
    /// Tools the model may call: a JSON array in OpenAI's form
    #[arg(long, value_name = "FILE", conflicts_with = "raw")]
    pub tools: Option<PathBuf>,
    /// Go on with the prompt as plain text, without the chat template; standard input is taken as it is
    #[arg(long, conflicts_with_all = ["system", "no_thinking"])]
    pub raw: bool,
    /// Answer at once, without reasoning first
    #[arg(long)]
    pub no_thinking: bool,
    /// Most tokens of the answer, its reasoning included [default: 32768, or what fits the context and
    /// the memory]
    #[arg(long, value_name = "N", value_parser = positive)]
    pub max_tokens: Option<usize>,
    /// Longest prompt and answer together [default: what the model was made for]
    #[arg(long, value_name = "TOKENS", value_parser = positive)]
    pub context: Option<usize>,
    /// Text that ends the answer and is not part of it, in the reasoning too; may be repeated
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
    /// How tokens are chosen
    #[command(flatten)]
    pub sampling: SamplingArguments,
    /// How and where to run
    #[command(flatten)]
    pub device: DeviceArguments,
    /// What is printed
    #[command(flatten)]
    pub output: RunOutputArguments,
}

/// How `lily run` and `lily chat` choose tokens.
#[derive(Debug, Args)]
#[command(
    next_help_heading = "Sampling (by default the checkpoint's own, from generation_config.json)"
)]
pub struct SamplingArguments {
    /// Always the likeliest token
    #[arg(long, conflicts_with_all = ["temperature", "top_k", "top_p", "min_p"])]
    pub greedy: bool,
    /// Divides the logits: 0 is greedy, at most 100
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    pub temperature: Option<f32>,
    /// Keep this many of the likeliest tokens, or all
    #[arg(long, value_name = "K", allow_negative_numbers = true)]
    pub top_k: Option<TopK>,
    /// Keep the likeliest tokens that make up this share, over 0 and up to 1
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub top_p: Option<f32>,
    /// Keep tokens at least this many times as likely as the likeliest, from 0 and below 1
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub min_p: Option<f32>,
    /// For tokens seen in prompt or answer: positive logits are divided by it, negative ones multiplied;
    /// 1 is none
    #[arg(long, value_name = "R", allow_negative_numbers = true)]
    pub repetition_penalty: Option<f32>,
    /// Subtracted from the logits of tokens the answer has, from -2 to 2
    #[arg(long, value_name = "R", allow_negative_numbers = true)]
    pub presence_penalty: Option<f32>,
    /// Subtracted for each time the answer has the token, from -2 to 2
    #[arg(long, value_name = "R", allow_negative_numbers = true)]
    pub frequency_penalty: Option<f32>,
    /// Added to one token's logit, from -100 to 100; may be repeated
    #[arg(long, value_name = "ID=VALUE", value_parser = logit_bias)]
    pub logit_bias: Vec<(u32, f32)>,
    /// Makes the answer repeatable [default: a new one each time, which lily run shows with --json and
    /// --verbose]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub seed: Option<u64>,
    /// Choose tokens on the processor even where the device could, from the logits of each step
    #[arg(long)]
    pub host_sampling: bool,
}

/// What `lily run` prints.
#[derive(Debug, Args)]
#[command(next_help_heading = "Output")]
pub struct RunOutputArguments {
    /// One JSON object with everything, once the answer is complete
    #[arg(long)]
    pub json: bool,
    /// The token ids of prompt and answer too
    #[arg(long, requires = "json")]
    pub ids: bool,
    /// Report log-probabilities, with N alternatives for each token (0 to 20)
    #[arg(long, value_name = "N", requires = "json")]
    pub logprobs: Option<u32>,
    /// Whether reasoning is printed on standard error; auto: if that is a terminal
    #[arg(long, value_enum, default_value = "auto", value_name = "WHEN")]
    pub reasoning: ReasoningChoice,
    /// Tell device, kernels, sampling, token counts and speed on standard error
    #[arg(long, short)]
    pub verbose: bool,
    /// Nothing on standard error but errors; not with --reasoning show
    #[arg(long, short, conflicts_with = "verbose")]
    pub quiet: bool,
}

/// Whether reasoning is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ReasoningChoice {
    /// If standard error is a terminal
    Auto,
    /// Always
    Show,
    /// Never
    Hide,
}

/// Arguments of `lily plan`.
#[derive(Debug, Args)]
#[command(
    about = "Show what one token and one prompt chunk cost, from a config.json alone",
    long_about = "Show the plan of one decoded token and of one prefill chunk: stages, dispatches, bytes and \
                  floating-point operations, fused and expanded, priced for named machines; then the \
                  boundaries that remain, with their prices. Works from a config.json alone. Prices are \
                  bounds by counting, never measurements; every assumption is printed. The decoded token \
                  is the likeliest, chosen on the device; where it is sampled, the same plan ends with sample \
                  in place of arg-max, and where the host chooses, it has neither.",
    after_help = format!("\
Examples, from a clone of Lily:
  lily plan fixtures/qwen3.6-35b-a3b/config.json
  lily plan --context 32768 --machine m5-max fixtures/qwen3.6-35b-a3b/config.json
  lily plan --details fixtures/qwen3.6-35b-a3b/config.json
  lily plan --json fixtures/qwen3.6-35b-a3b/config.json | jq .decode.fused.dispatches

{EXIT_CODES}")
)]
pub struct PlanArguments {
    /// A config.json, or a directory that has one [default: --model, or the embedded model's]
    #[arg(value_name = "CONFIG_OR_DIRECTORY")]
    pub config: Option<PathBuf>,
    /// Tokens already in the cache
    #[arg(long, value_name = "TOKENS", default_value = "0")]
    pub context: usize,
    /// Tokens of the prefill chunk, which begins at --context [default: 512, or what is left of what the
    /// model was made for]
    #[arg(long, visible_alias = "rows", value_name = "TOKENS", value_parser = positive_up_to::<65_536>)]
    pub chunk: Option<usize>,
    /// Arithmetic
    #[arg(long, value_enum, default_value = "bf16")]
    pub precision: PrecisionChoice,
    /// Price for this machine only; may be repeated
    #[arg(long, value_enum, value_name = "NAME")]
    pub machine: Vec<MachineChoice>,
    /// Threads of this processor, where it is priced [default: all cores]
    #[arg(long, value_name = "N", value_parser = positive_up_to::<1024>)]
    pub threads: Option<usize>,
    /// Also list the steps of each kind of layer, the operations, and why each boundary must stand
    #[arg(long)]
    pub details: bool,
    /// The same with every step and the shapes and formats of its operands
    #[arg(long)]
    pub steps: bool,
    /// As JSON
    #[arg(long)]
    pub json: bool,
}

/// Machines that plans are priced for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum MachineChoice {
    /// Apple M5 Max, 40-core GPU, from public figures
    M5Max,
    /// NVIDIA H200
    H200,
    /// This processor, its bandwidth measured just then
    Cpu,
}

/// Arguments of `lily inspect`.
#[derive(Debug, Args)]
#[command(
    about = "Show what a checkpoint is, what memory it takes and what speed to expect here",
    long_about = "Show a checkpoint's files, tensors, formats and configuration, the memory that a model and \
                  its sessions take, the longest context that fits, and the speed that counting allows here. \
                  On the processor it reads headers only, whatever the size; a GPU gets the weights, to see that \
                  they fit.",
    after_help = format!("\
Examples:
  lily inspect
  lily inspect ~/models/Qwen3.6-35B-A3B-4bit
  lily inspect --json ~/models/Qwen3.6-35B-A3B-4bit | jq .memory

{EXIT_CODES}")
)]
pub struct InspectArguments {
    /// Directory of a checkpoint [default: --model, or the embedded model]
    #[arg(value_name = "DIRECTORY")]
    pub path: Option<PathBuf>,
    /// Tokens in the cache, for the expected speed
    #[arg(long, value_name = "TOKENS", default_value = "0")]
    pub context: usize,
    /// As JSON
    #[arg(long)]
    pub json: bool,
    /// How and where it would run
    #[command(flatten)]
    pub device: DeviceArguments,
}

/// Arguments of `lily bench`.
#[derive(Debug, Args)]
#[command(
    about = "Measure prefill and decode",
    long_about = "Measure prefill and decode at given lengths: one warm-up, then repetitions of all cases in \
                  alternating order; median, least and most. Prompts are synthetic and nothing is sampled: \
                  decode goes on with the token the device itself chooses. Long contexts take minutes: each \
                  run first fills the cache that far, off the clock.",
    after_help = format!("\
Examples:
  lily bench
  lily bench --prefill 128,512 --decode 64 --context 0,2048
  lily bench --require-kernels native --json > bench.json

{EXIT_CODES}")
)]
pub struct BenchArguments {
    /// Prompt lengths to prefill
    #[arg(
        long,
        value_name = "TOKENS",
        value_delimiter = ',',
        default_value = "128,512"
    )]
    #[arg(value_parser = positive)]
    pub prefill: Vec<usize>,
    /// Tokens to decode
    #[arg(
        long,
        value_name = "TOKENS",
        value_delimiter = ',',
        default_value = "64"
    )]
    #[arg(value_parser = positive)]
    pub decode: Vec<usize>,
    /// Tokens already in the cache when the clock starts; each case runs at each of them, and thousands
    /// take minutes
    #[arg(
        long,
        value_name = "TOKENS",
        value_delimiter = ',',
        default_value = "0"
    )]
    pub context: Vec<usize>,
    /// How often each case is measured, after one warm-up
    #[arg(long, value_name = "N", default_value = "5", value_parser = positive_up_to::<10_000>)]
    pub repetitions: usize,
    /// Fail unless the kernels that run have this in their name
    #[arg(long, value_name = "TEXT", value_parser = part_of_a_name)]
    pub require_kernels: Option<String>,
    /// Only print the names that --switch-off takes, one a line
    #[arg(long)]
    pub list_switches: bool,
    /// What the GPU's own clock is to tell
    #[command(flatten)]
    pub watch: WatchArguments,
    /// As JSON
    #[arg(long)]
    pub json: bool,
    /// How and where to run
    #[command(flatten)]
    pub device: DeviceArguments,
}

/// Arguments of `lily verify`.
#[derive(Debug, Args)]
#[command(
    about = "Compare the model's predictions with recorded ones",
    long_about = "Read a recorded text and compare what the model predicts at each position with a recording \
                  of the same model in another engine: likeliest token, log-probability of the true token, \
                  perplexity. The text is read as a prompt is: prefill plans run, decode plans do not. Fails \
                  if a threshold is missed.",
    after_help = format!("\
A reference is a JSON object with input_ids, target_ids and a record such as
  \"float32\": {{\"top1\": [...], \"target_logprobs\": [...], \"perplexity\": 1.909}}

Examples:
  lily verify
  lily verify --precision f32 --json
  lily verify --model DIRECTORY --reference recorded.json --max-perplexity-difference 0.02

{EXIT_CODES}")
)]
pub struct VerifyArguments {
    /// The recording [default: that of the embedded model, for the embedded model]
    #[arg(long, value_name = "FILE")]
    pub reference: Option<PathBuf>,
    /// Which record of it to compare with
    #[arg(long, value_name = "NAME", default_value = "float32")]
    pub record: String,
    /// Most that the perplexities may differ [default: 0.015 for the embedded recording]
    #[arg(long, value_name = "D")]
    pub max_perplexity_difference: Option<f64>,
    /// Fewest positions whose likeliest token agrees [default: 183 of 192 for the embedded recording]
    #[arg(long, value_name = "N")]
    pub min_top1: Option<usize>,
    /// As JSON
    #[arg(long)]
    pub json: bool,
    /// How and where to run
    #[command(flatten)]
    pub device: DeviceArguments,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_grammar_is_consistent() {
        Arguments::command().debug_assert();
    }
}
