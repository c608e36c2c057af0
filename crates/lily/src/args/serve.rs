//! Arguments of `lily serve`.

use super::values::{bytes, positive, positive_up_to};
use super::{DeviceArguments, EXIT_CODES};
use clap::Args;
use std::net::IpAddr;
use std::path::PathBuf;

/// Arguments of `lily serve`.
#[derive(Debug, Args)]
#[command(
    about = "Serve the programs of this machine, with OpenAI's API",
    long_about = "Serve the programs of this machine, with OpenAI's API: chat completions, streaming and not, with \
                  reasoning, tool calls and structured output, plain completions, and a page to chat at. Requests are \
                  answered side by side. The server listens to this machine alone, unless it is given a key and another \
                  address. Ctrl-C ends it.",
    after_help = format!("\
Examples:
  lily serve
  lily serve --port 9000 --context 32768
  lily serve --cache-dir ~/.cache/lily
  LILY_API_KEY=secret lily serve --host 0.0.0.0

{EXIT_CODES}")
)]
pub struct ServeArguments {
    /// Where to listen: an address of this machine; one that others reach wants a key
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    pub host: IpAddr,
    /// Port; 0 takes one that is free
    #[arg(long, default_value = "8080")]
    pub port: u16,
    /// The model's name for clients [default: that of its directory]
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// Longest conversation, in tokens [default: what the model was made for]
    #[arg(long, value_name = "TOKENS", value_parser = positive)]
    pub context: Option<usize>,
    /// Requests that are answered or wait; one more is told to come back later
    #[arg(long, value_name = "N", default_value = "64", value_parser = positive_up_to::<10_000>)]
    pub most_requests: usize,
    /// What outlasts the server
    #[command(flatten)]
    pub cache: CacheArguments,
    /// Who may ask
    #[command(flatten)]
    pub access: AccessArguments,
    /// Tell of each request on standard error: route, status, time
    #[arg(long, short, help_heading = "Log")]
    pub verbose: bool,
    /// Write prompts to standard error, as the model sees them
    #[arg(long, help_heading = "Log")]
    pub log_prompts: bool,
    /// How and where to run
    #[command(flatten)]
    pub device: DeviceArguments,
}

/// What outlasts `lily serve`.
#[derive(Debug, Args)]
#[command(next_help_heading = "Cache")]
pub struct CacheArguments {
    /// Directory where beginnings of conversations outlast the server: a prompt that begins as one did goes on from there.
    /// It holds what people wrote, and is made for this user alone
    #[arg(long, value_name = "DIRECTORY")]
    pub cache_dir: Option<PathBuf>,
    /// Most bytes of its files, such as 16GiB or 500MB: those used longest ago go
    #[arg(long, value_name = "BYTES", value_parser = bytes, default_value = "16GiB", requires = "cache_dir")]
    pub cache_size: u64,
}

/// Who may ask `lily serve`.
#[derive(Debug, Args)]
#[command(next_help_heading = "Access")]
pub struct AccessArguments {
    /// File with the keys that requests may bring as bearer tokens, one a line; LILY_API_KEY is another [default: none is
    /// asked for]
    #[arg(long, value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
    /// A name of this machine, beside its addresses and localhost; may be repeated
    #[arg(long, value_name = "NAME")]
    pub allow_host: Vec<String>,
    /// A site whose pages may ask
    #[arg(
        long,
        value_name = "ORIGIN",
        help = "A site whose pages may ask, such as https://app.example; * is any; may be repeated"
    )]
    pub allow_origin: Vec<String>,
}
