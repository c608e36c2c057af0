//! Where and how to run: the flags that commands share.

use super::values::{bytes, positive_up_to};
use clap::builder::PossibleValue;
use clap::{Args, ValueEnum};
use lily_engine::Precision;
use lily_gpu::Switches;
use std::path::PathBuf;

/// Where models can run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DeviceChoice {
    /// Metal on a Mac, the processor elsewhere
    Auto,
    /// The processor, with vector instructions and all cores
    Cpu,
    /// The processor, with the plain loops that everything is compared with; very slow
    Reference,
    /// An Apple GPU
    Metal,
    /// An NVIDIA GPU: needs its driver and NVRTC, and some tens of seconds to compile kernels
    Cuda,
    /// The GPU kernels, emulated on the processor: needs a C++ compiler; very slow
    Emulated,
}

/// Arithmetic, by its name on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PrecisionChoice {
    /// Activations rounded to bfloat16, sums in f32
    Bf16,
    /// Everything in f32
    F32,
}

impl From<PrecisionChoice> for Precision {
    fn from(choice: PrecisionChoice) -> Self {
        match choice {
            PrecisionChoice::Bf16 => Precision::Bf16,
            PrecisionChoice::F32 => Precision::F32,
        }
    }
}

/// How and where to run.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Device")]
pub struct DeviceArguments {
    /// Where to run; a device that is not there is an error, never replaced by another
    #[arg(long, value_enum, default_value = "auto")]
    pub device: DeviceChoice,
    /// Arithmetic
    #[arg(long, value_enum, default_value = "bf16")]
    pub precision: PrecisionChoice,
    /// Threads of the processor [default: all cores]
    #[arg(long, value_name = "N", value_parser = positive_up_to::<1024>)]
    pub threads: Option<usize>,
    /// Memory that sessions and working memory may take, such as 4GiB or 500MB [default: most of
    /// what is free]
    #[arg(long, value_name = "BYTES", value_parser = bytes)]
    pub memory: Option<u64>,
    /// Tokens of a prefill chunk [default: 512]
    #[arg(long, value_name = "TOKENS", value_parser = positive_up_to::<65_536>)]
    pub chunk: Option<usize>,
    /// Turn off a mechanism of plans or of the GPU devices, to see what it is worth; may be given several times
    #[arg(long = "switch-off", value_name = "NAME", value_parser = switch())]
    pub switch_off: Vec<String>,
}

/// A closer look at a GPU.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "A closer look")]
pub struct WatchArguments {
    /// Time each stage by the GPU's own clock, and print a table (metal, cuda). Stages are sent off one by one for that, so
    /// that everything takes longer
    #[arg(long)]
    pub stage_times: bool,
    /// Write the first work to this .gputrace document, for Xcode (metal, with METAL_CAPTURE_ENABLED=1 in the environment)
    #[arg(long, value_name = "FILE")]
    pub gpu_trace: Option<PathBuf>,
}

/// The mechanisms that can be turned off: names, and what they do.
pub fn switches() -> impl Iterator<Item = (&'static str, &'static str)> {
    let plans = lily_plan::switches::ALL.iter();
    let devices = Switches::ALL.iter();
    let names = plans.map(|switch| (switch.name, switch.what));
    names.chain(devices.map(|switch| (switch.name, switch.what)))
}

fn switch() -> clap::builder::PossibleValuesParser {
    let values = switches().map(|(name, what)| PossibleValue::new(name).help(what));
    values.collect::<Vec<_>>().into()
}
