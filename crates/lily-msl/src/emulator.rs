//! Building kernel files for this machine.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use crate::compiler;
use crate::library::Library;
use crate::native::Loaded;
use crate::preprocess::Sources;
use crate::report::EmulatorError;
use crate::translate::{Target, translate_sources};

/// The headers and sources that are built with every kernel file.
const SHIM: [(&str, &str); 5] = [
    ("msl_cpu.h", include_str!("../shim/msl_cpu.h")),
    ("msl_common.h", include_str!("../shim/msl_common.h")),
    ("msl_vec.h", include_str!("../shim/msl_vec.h")),
    ("msl_rt.cpp", include_str!("../shim/msl_rt.cpp")),
    ("msl_race.cpp", include_str!("../shim/msl_race.cpp")),
];

/// How a kernel file is built.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BuildKind {
    /// Fast. Finds divergence.
    Plain,
    /// Every load and store is checked and counted: finds races, accesses out of bounds, misaligned ones and
    /// reads of threadgroup memory that was never written, and fills [`crate::Report::memory`]. Several times
    /// slower.
    Race,
}

/// Builds kernel files and keeps what it has built in a directory.
#[derive(Debug, Clone)]
pub struct Emulator {
    directory: PathBuf,
}

impl Emulator {
    /// Keeps its files below `directory`, which is made if need be.
    pub fn new(directory: impl Into<PathBuf>) -> Self {
        Self {
            directory: directory.into(),
        }
    }

    /// Keeps its files in Cargo's target directory, if the running program lies in one (as tests do); else
    /// where the system has temporary files.
    pub fn in_target_directory() -> Self {
        let program = std::env::current_exe().unwrap_or_default();
        let target = program
            .ancestors()
            .find(|directory| directory.join("CACHEDIR.TAG").is_file());
        let temporary = std::env::temp_dir();
        Self::new(target.unwrap_or(&temporary).join("lily-msl"))
    }

    /// Translates `file`, compiles it with the system's C++ compiler and loads it.
    pub fn compile(
        &self,
        sources: &Sources,
        file: &str,
        build: BuildKind,
    ) -> Result<Library, EmulatorError> {
        let translated = translate_sources(sources, file, Target::Emulated)?;
        let shim = self.shim_directory()?;
        let kernel_flags: &[&str] = match build {
            BuildKind::Plain => &["-O2"],
            BuildKind::Race => &["-O1", "-gdwarf-4", "-fsanitize=thread", "-DMSL_RACE"],
        };
        let mut objects = vec![self.object(&shim, "kernel", &translated.code, kernel_flags)?];
        let runtime = include_str!("../shim/msl_rt.cpp");
        match build {
            BuildKind::Plain => objects.push(self.object(&shim, "runtime", runtime, &["-O2"])?),
            BuildKind::Race => {
                let checker = include_str!("../shim/msl_race.cpp");
                objects.push(self.object(&shim, "runtime", runtime, &["-O2", "-DMSL_RACE"])?);
                let wrap: &[&str] = if wraps_copies() {
                    &["-O2", "-DMSL_WRAP"]
                } else {
                    &["-O2"]
                };
                objects.push(self.object(&shim, "checker", checker, wrap)?);
            }
        }
        let path = self.link(&objects, build)?;
        let loaded = Loaded::open(&path).map_err(EmulatorError::Load)?;
        Ok(Library::new(loaded, path, translated.kernels, build))
    }

    /// Writes the shim where the compiler can include it.
    fn shim_directory(&self) -> Result<PathBuf, EmulatorError> {
        let directory = self.directory.join(format!("shim-{}", key(&SHIM)));
        if !directory.is_dir() {
            let unfinished = self.unfinished("shim");
            std::fs::create_dir_all(&unfinished).map_err(|error| unusable(&unfinished, &error))?;
            for (name, text) in SHIM {
                let path = unfinished.join(name);
                std::fs::write(&path, text).map_err(|error| unusable(&path, &error))?;
            }
            // Another process may have been faster, with the same files.
            if let Err(error) = std::fs::rename(&unfinished, &directory)
                && !directory.is_dir()
            {
                return Err(unusable(&directory, &error));
            }
        }
        Ok(directory)
    }

    /// Compiles one source, unless that has been done before.
    fn object(
        &self,
        shim: &Path,
        name: &str,
        source: &str,
        flags: &[&str],
    ) -> Result<PathBuf, EmulatorError> {
        let mut all = vec![
            "-x",
            "c++",
            "-std=c++17",
            "-w",
            "-fPIC",
            "-fvisibility=hidden",
            // The same results on every machine: products and sums are not fused unless the kernel says so.
            "-ffp-contract=off",
            // Kernels read arrays of scalars as vectors and the other way round.
            "-fno-strict-aliasing",
        ];
        all.extend(machine_flags());
        all.extend(flags);
        if flags.contains(&"-fsanitize=thread") && compiler_version().contains("clang") {
            // Else a load just before a store to the same address would go unseen.
            all.extend(["-mllvm", "-tsan-instrument-read-before-write=1"]);
        }
        let path = self.directory.join(format!(
            "{name}-{}.o",
            key(&(source, &all, SHIM, compiler_version()))
        ));
        let turn = turn_of(&path);
        let _turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
        if path.is_file() {
            return Ok(path);
        }
        let unfinished = self.unfinished("o");
        let mut arguments: Vec<PathBuf> = all.iter().map(PathBuf::from).collect();
        arguments.extend(["-c", "-", "-I"].map(PathBuf::from));
        arguments.push(shim.to_owned());
        arguments.push("-o".into());
        arguments.push(unfinished.clone());
        compiler::run(&arguments, source).map_err(EmulatorError::Compile)?;
        std::fs::rename(&unfinished, &path).map_err(|error| unusable(&path, &error))?;
        Ok(path)
    }

    fn link(&self, objects: &[PathBuf], build: BuildKind) -> Result<PathBuf, EmulatorError> {
        let path = self.directory.join(format!("library-{}.so", key(&objects)));
        let turn = turn_of(&path);
        let _turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
        if path.is_file() {
            return Ok(path);
        }
        let unfinished = self.unfinished("so");
        let mut arguments: Vec<PathBuf> = vec!["-shared".into(), "-o".into(), unfinished.clone()];
        arguments.extend(objects.iter().cloned());
        if cfg!(target_os = "linux") {
            arguments.extend(["-Wl,-Bsymbolic", "-ldl", "-lpthread"].map(PathBuf::from));
        }
        if build == BuildKind::Race && wraps_copies() {
            arguments.push("-Wl,--wrap=memcpy,--wrap=memmove,--wrap=memset".into());
        }
        compiler::run(&arguments, "").map_err(EmulatorError::Compile)?;
        std::fs::rename(&unfinished, &path).map_err(|error| unusable(&path, &error))?;
        Ok(path)
    }

    /// A name that no other thread or process uses.
    fn unfinished(&self, ending: &str) -> PathBuf {
        static COUNTER: AtomicU64 = AtomicU64::new(0);
        let number = COUNTER.fetch_add(1, Ordering::Relaxed);
        let process = std::process::id();
        self.directory
            .join(format!("unfinished-{process}-{number}.{ending}"))
    }
}

/// Whoever holds it makes the file; other threads of this process wait for it instead of doing the same work.
fn turn_of(path: &Path) -> Arc<Mutex<()>> {
    static TURNS: OnceLock<Mutex<HashMap<PathBuf, Arc<Mutex<()>>>>> = OnceLock::new();
    let turns = TURNS.get_or_init(Mutex::default);
    let mut turns = turns.lock().unwrap_or_else(PoisonError::into_inner);
    turns.entry(path.to_owned()).or_default().clone()
}

fn unusable(path: &Path, error: &std::io::Error) -> EmulatorError {
    EmulatorError::Load(format!("{}: {error}", path.display()))
}

fn key(value: &impl Hash) -> String {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    format!("{:016x}", hasher.finish())
}

/// Instructions for 16-bit floats and fused products, where the processor has them.
fn machine_flags() -> Vec<&'static str> {
    #[cfg(target_arch = "x86_64")]
    {
        let has_all = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
            && is_x86_feature_detected!("bmi2")
            && is_x86_feature_detected!("movbe")
            && is_x86_feature_detected!("lzcnt");
        if has_all {
            return vec!["-march=x86-64-v3"];
        }
    }
    Vec::new()
}

/// Whether copies become calls of the C library, which the checker has to see.
fn wraps_copies() -> bool {
    cfg!(target_os = "linux") && compiler_version().contains("clang")
}

/// What the compiler says of itself: another one builds afresh.
fn compiler_version() -> &'static str {
    static VERSION: OnceLock<String> = OnceLock::new();
    VERSION.get_or_init(|| compiler::run(["--version"], "").unwrap_or_default())
}

/// The line of a kernel file that the code at `offset` of a library comes from: the innermost one that is not
/// the shim's.
pub(crate) fn place(library: &Path, offset: u64) -> Option<String> {
    // The address is where the call returns to; the call is just before it.
    let address = format!("{:#x}", offset.checked_sub(1)?);
    let output = Command::new("addr2line")
        .arg("-i")
        .arg("-e")
        .arg(library)
        .arg(address)
        .output()
        .ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let mut lines = text.lines().map(|line| {
        let line = line.split(" (").next().unwrap_or(line);
        // Sources come from memory: the compiler puts its own directory before their names.
        line.rsplit('/').next().unwrap_or(line)
    });
    let found = lines.find(|line| !line.starts_with("msl_") && !line.starts_with('?'))?;
    Some(found.to_owned())
}
