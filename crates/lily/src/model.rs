//! Opens a model and a device. The embedded model stands in where none is named.

use crate::args::{DeviceArguments, DeviceChoice, WatchArguments};
use crate::failure::Failure;
use crate::format::counted;
use crate::status::Status;
use crate::without::Without;
use lily_checkpoint::{Checkpoint, CheckpointError, DeclaredModel};
use lily_cpu::{CpuDevice, CpuOptions, Kernels};
use lily_emulated::{Emulated, EmulatedOptions};
use lily_engine::{
    DeviceDescription, Engine, EngineError, EngineOptions, PlanTransform, TextModel,
};
use lily_gpu::{Gpu, GpuDevice, GpuOptions, Switches};
use lily_plan::switches::{self, PlanSwitch};
use lily_plan::{Device, ModelDescription, Plan, route};
use serde::Serialize;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

/// The embedded model's name.
const EMBEDDED_NAME: &str = "lily-tiny";

macro_rules! embedded {
    ($name:literal) => {
        include_bytes!(concat!("../../../models/lily-tiny/", $name))
    };
}

/// The embedded model's configuration.
pub const EMBEDDED_CONFIG: &str = include_str!("../../../models/lily-tiny/config.json");

/// Predictions that other engines recorded of the embedded model.
pub const EMBEDDED_REFERENCE: &str = include_str!("../../../models/lily-tiny/teacher_forced.json");

const EMBEDDED_FILES: [(&str, &[u8]); 5] = [
    ("model.safetensors", embedded!("model.safetensors")),
    ("tokenizer.json", embedded!("tokenizer.json")),
    ("tokenizer_config.json", embedded!("tokenizer_config.json")),
    ("chat_template.jinja", embedded!("chat_template.jinja")),
    (
        "generation_config.json",
        embedded!("generation_config.json"),
    ),
];

/// Most that is read of a file named on the command line.
const MAX_FILE_BYTES: u64 = 64 << 20;

/// Which model a report is about.
#[derive(Clone, Debug, Serialize)]
pub struct ModelName {
    /// Its name: that of its directory.
    pub name: String,
    /// Where it comes from: a path, or `embedded`.
    pub source: String,
    /// A fingerprint of the checkpoint, the same wherever it lies.
    pub identity: String,
}

impl ModelName {
    /// Names a checkpoint opened from `path`.
    pub fn new(path: Option<&Path>, checkpoint: &Checkpoint) -> Self {
        let name = path.map(|path| {
            // A path such as `.` has a name only once it is resolved.
            let full = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
            full.file_name().map_or_else(
                || path.display().to_string(),
                |name| name.display().to_string(),
            )
        });
        ModelName {
            name: name.unwrap_or_else(|| EMBEDDED_NAME.into()),
            source: path.map_or_else(|| "embedded".into(), |path| path.display().to_string()),
            identity: checkpoint.identity(),
        }
    }

    /// Name and source, for people.
    pub fn to_text(&self) -> String {
        format!("{} ({})", self.name, self.source)
    }
}

/// The checkpoint at `path`, or the embedded one.
pub fn open_checkpoint(path: Option<&Path>) -> Result<Checkpoint, Failure> {
    let Some(path) = path else {
        return Ok(Checkpoint::from_memory(EMBEDDED_CONFIG, &EMBEDDED_FILES)?);
    };
    if !path.is_dir() {
        let (what, help) = if path.exists() {
            (
                "is not a directory",
                "name the directory that holds config.json and the weights",
            )
        } else {
            (
                "does not exist",
                "name the directory of a checkpoint in MLX format",
            )
        };
        return Err(Failure::usage(format!("the model {} {what}", path.display())).help(help));
    }
    Checkpoint::open(path).map_err(|error| {
        let weights_are_missing = matches!(error, CheckpointError::MissingFile { .. })
            && path.join("config.json").is_file();
        let failure = Failure::from(error);
        if weights_are_missing {
            failure.help(format!(
                "lily plan {} tells what its config.json alone does",
                path.display()
            ))
        } else {
            failure
        }
    })
}

/// What a `config.json` says, or that of a directory, or the embedded one.
pub fn declared_model(path: Option<&Path>) -> Result<DeclaredModel, Failure> {
    Ok(match path {
        Some(path) => DeclaredModel::read(path)?,
        None => DeclaredModel::parse(EMBEDDED_CONFIG, "config.json of the embedded model")?,
    })
}

/// A device with a model on it.
pub struct OpenedDevice {
    /// Executes plans.
    pub device: Box<dyn Device>,
    /// The model as plans see it.
    pub model: Arc<ModelDescription>,
}

/// The device asked for, or why there is none; never another one.
pub fn open_device(
    checkpoint: Arc<Checkpoint>,
    arguments: &DeviceArguments,
    watch: &WatchArguments,
    status: &Status,
) -> Result<OpenedDevice, Failure> {
    let choice = match arguments.device {
        DeviceChoice::Auto if cfg!(target_os = "macos") => DeviceChoice::Metal,
        DeviceChoice::Auto => DeviceChoice::Cpu,
        other => other,
    };
    if watch.gpu_trace.is_some() && choice != DeviceChoice::Metal {
        return Err(Failure::usage("--gpu-trace is for --device metal"));
    }
    if watch.stage_times && !matches!(choice, DeviceChoice::Metal | DeviceChoice::Cuda) {
        return Err(
            Failure::usage("--stage-times is for GPUs, which have a clock of their own")
                .help("give --device metal or cuda"),
        );
    }
    let (_, on_device) = turned_off(arguments);
    let mut switches = Switches::default();
    for name in &on_device {
        switches.turn_off(name);
    }
    if arguments
        .switch_off
        .iter()
        .any(|name| name == "fused-dequantisation")
    {
        // Whole matrices are dequantised: there are no codes left to take.
        switches.turn_off("packed-codes");
    }
    let on_processor = matches!(choice, DeviceChoice::Cpu | DeviceChoice::Reference);
    if let (true, Some(name)) = (on_processor, on_device.first()) {
        return Err(
            Failure::usage(format!("--switch-off {name} is for GPU devices"))
                .help("give --device metal, cuda or emulated"),
        );
    }
    let failed = |error| Failure::request_of(&error);
    match choice {
        DeviceChoice::Emulated => open_gpu(
            Emulated::new(EmulatedOptions::default()),
            &checkpoint,
            switches,
            status,
        ),
        #[cfg(target_os = "linux")]
        DeviceChoice::Cuda => {
            let gpu = lily_cuda::Cuda::open(lily_cuda::CudaOptions {
                stage_timing: watch.stage_times,
                ..lily_cuda::CudaOptions::default()
            })
            .map_err(failed)?;
            open_gpu(gpu, &checkpoint, switches, status)
        }
        #[cfg(target_os = "macos")]
        DeviceChoice::Metal => {
            let gpu = lily_metal::open(lily_metal::MetalOptions {
                capture: watch.gpu_trace.clone(),
                stage_timing: watch.stage_times,
            })
            .map_err(failed)?;
            open_gpu(gpu, &checkpoint, switches, status)
        }
        #[cfg(not(target_os = "linux"))]
        DeviceChoice::Cuda => Err(absent("cuda", "Linux")),
        #[cfg(not(target_os = "macos"))]
        DeviceChoice::Metal => Err(absent("metal", "macOS")),
        DeviceChoice::Auto | DeviceChoice::Cpu | DeviceChoice::Reference => {
            let options = CpuOptions {
                kernels: if choice == DeviceChoice::Reference {
                    Kernels::Reference
                } else {
                    Kernels::Native
                },
                threads: arguments.threads,
                ..CpuOptions::default()
            };
            let device = CpuDevice::new(checkpoint, &options).map_err(failed)?;
            Ok(OpenedDevice {
                model: device.model().clone(),
                device: Box::new(device),
            })
        }
    }
}

/// What `--switch-off` names: mechanisms of plans, and names of mechanisms of devices. The command line knew them all.
fn turned_off(arguments: &DeviceArguments) -> (Vec<&'static PlanSwitch>, Vec<&str>) {
    let names = arguments.switch_off.iter().map(String::as_str);
    let (of_plans, of_devices): (Vec<&str>, Vec<&str>) =
        names.partition(|name| switches::find(name).is_some());
    let found = of_plans.into_iter().filter_map(switches::find);
    (found.collect(), of_devices)
}

/// What is done to plans before they run.
fn plan_transform(arguments: &DeviceArguments) -> Option<PlanTransform> {
    let (switches, _) = turned_off(arguments);
    if switches.is_empty() {
        return None;
    }
    Some(Arc::new(move |plan: Plan| {
        switches
            .iter()
            .fold(plan, |plan, switch| (switch.without)(&plan))
    }))
}

fn open_gpu<G: Gpu + 'static>(
    gpu: G,
    checkpoint: &Checkpoint,
    switches: Switches,
    status: &Status,
) -> Result<OpenedDevice, Failure> {
    let options = GpuOptions { switches };
    status.begin("reading the weights");
    let mut progress = |done, total| status.advance_bytes(done, total);
    let device = GpuDevice::new(gpu, checkpoint, options, &mut progress)
        .map_err(|error| Failure::request_of(&error))?;
    Ok(OpenedDevice {
        model: device.model().clone(),
        device: Box::new(device),
    })
}

fn absent(device: &str, system: &str) -> Failure {
    Failure::usage(format!("the device {device} is for {system} alone"))
        .help("--device cpu runs everywhere")
}

/// Tokens of a prefill chunk.
pub fn chunk_of(arguments: &DeviceArguments) -> usize {
    arguments.chunk.unwrap_or(route::PREFILL_CHUNK)
}

/// A model on a device, ready to run.
pub struct Opened {
    /// Runs it.
    pub engine: Engine,
    /// What it is.
    pub name: ModelName,
}

/// What is asked of a model beside the device it runs on.
#[derive(Default)]
pub struct Opening {
    /// Longest sequence, if it is to be shorter than what the model was made for.
    pub context: Option<usize>,
    /// A closer look at the device.
    pub watch: WatchArguments,
    /// Whether later prompts go on from what earlier ones had computed.
    pub snapshots: bool,
}

/// Opens the model at `path` (or the embedded one) on the device asked for. `status` is told how far it is.
pub fn open(
    path: Option<&Path>,
    arguments: &DeviceArguments,
    opening: Opening,
    status: &Status,
) -> Result<Opened, Failure> {
    status.begin("opening the model");
    let Opening {
        context,
        watch,
        snapshots,
    } = opening;
    let checkpoint = Arc::new(open_checkpoint(path)?);
    let name = ModelName::new(path, &checkpoint);
    let OpenedDevice { device, model } =
        open_device(checkpoint.clone(), arguments, &watch, status)?;
    let device: Box<dyn Device> = match arguments.switch_off.as_slice() {
        [] => device,
        names => Box::new(Without {
            device,
            names: names.to_vec(),
        }),
    };
    let text = Arc::new(TextModel::load(&checkpoint).map_err(|error| text_failure(error, path))?);
    let precision = arguments.precision.into();
    let options = EngineOptions {
        precision,
        prefill_chunk: chunk_of(arguments),
        context,
        memory_limit: arguments.memory,
        snapshots,
        plan_transform: plan_transform(arguments),
    };
    let engine = Engine::new(device, model, text, options)?;
    Ok(Opened { engine, name })
}

/// A failure of the text side, its file named once and in full; `path` is the checkpoint's directory.
pub fn text_failure(error: EngineError, path: Option<&Path>) -> Failure {
    let EngineError::TextFile { file, reason } = &error else {
        return error.into();
    };
    let directory = path.map_or_else(
        || format!("the embedded model {EMBEDDED_NAME}"),
        |path| path.display().to_string(),
    );
    // What could not be read at all is told with its path already.
    if reason.starts_with(&directory) {
        return Failure::usage(reason.as_str());
    }
    match path {
        // Not all that fails is one file: a chat template comes from either of two.
        Some(path) if file.contains('.') => {
            Failure::usage(format!("{}: {reason}", path.join(file).display()))
        }
        _ => Failure::usage(format!("{directory}: {file}: {reason}")),
    }
}

/// Device, hardware and kernels, for people.
pub fn on(device: &DeviceDescription) -> String {
    let reason = match device.reason.as_str() {
        "" => String::new(),
        reason => format!(" ({reason})"),
    };
    format!(
        "{} ({}), kernels {}{reason}, {}",
        device.device,
        device.hardware,
        device.kernels,
        counted(device.workers, "worker"),
    )
}

/// What is read from `path`, for messages: `the tools tools.json`, `the tools in standard input`.
pub fn named(path: &Path, what: &str) -> String {
    if path == Path::new("-") {
        format!("{what} in standard input")
    } else {
        format!("{what} {}", path.display())
    }
}

/// The text of a file named on the command line; `-` is standard input.
pub fn read_text(path: &Path, what: &str) -> Result<String, Failure> {
    let name = named(path, what);
    let read = |reader: &mut dyn Read| {
        let mut bytes = Vec::new();
        reader
            .take(MAX_FILE_BYTES + 1)
            .read_to_end(&mut bytes)
            .map(|_| bytes)
    };
    let bytes = if path == Path::new("-") {
        read(&mut std::io::stdin().lock())
    } else {
        std::fs::File::open(path).and_then(|mut file| read(&mut file))
    }
    .map_err(|error| Failure::usage(format!("{name} cannot be read")).because(&error))?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        let limit = MAX_FILE_BYTES >> 20;
        return Err(Failure::usage(format!("{name} has more than {limit} MiB")));
    }
    String::from_utf8(bytes).map_err(|error| {
        Failure::usage(format!("{name} is not UTF-8 text")).because(&error.utf8_error())
    })
}
