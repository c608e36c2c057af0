//! Translates the kernels for NVRTC, so that the program needs no other compiler when it runs.

use lily_msl::{AddressSpace, Sources, Target, cuda_source, translate_sources};
use std::fmt::Write;
use std::path::Path;

fn main() {
    let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../kernels");
    println!("cargo::rerun-if-changed={}", kernels.display());
    let mut sources = Sources::new();
    let mut files = Vec::new();
    for entry in std::fs::read_dir(&kernels).expect("the folder of kernels") {
        let path = entry.expect("an entry").path();
        let name = path
            .file_name()
            .expect("a name")
            .to_string_lossy()
            .into_owned();
        println!("cargo::rerun-if-changed={}", path.display());
        sources = sources.with(
            &name,
            &std::fs::read_to_string(&path).expect("a kernel file"),
        );
        // Tensor operations are Apple's own.
        if name.ends_with(".metal") && !name.starts_with("tensor") {
            files.push(name);
        }
    }
    files.sort();
    let directory = std::env::var("OUT_DIR").expect("OUT_DIR");
    let directory = Path::new(&directory);
    let mut texts = String::from(
        "/// Kernel files for NVRTC, by name.\npub const TEXTS: &[(&str, &str)] = &[\n",
    );
    let mut parameters = String::from(
        "/// Each kernel's parameters in order: buffer index, and whether it is a small constant.\n\
         pub const PARAMETERS: &[(&str, &[(u32, bool)])] = &[\n",
    );
    for file in &files {
        let text =
            cuda_source(&sources, file).unwrap_or_else(|error| panic!("kernels/{file}:\n{error}"));
        let path = directory.join(format!("{file}.cu"));
        std::fs::write(&path, text).expect("room");
        writeln!(texts, "    ({file:?}, include_str!({path:?})),").expect("room");
        let translated =
            translate_sources(&sources, file, Target::Cuda).expect("translated before");
        for kernel in &translated.kernels {
            let list: Vec<(u32, bool)> = kernel
                .buffers
                .iter()
                .map(|buffer| (buffer.index, buffer.address_space == AddressSpace::Constant))
                .collect();
            writeln!(parameters, "    ({:?}, &{list:?}),", kernel.name).expect("room");
        }
    }
    texts.push_str("];\n");
    parameters.push_str("];\n");
    std::fs::write(directory.join("kernels.rs"), texts + &parameters).expect("kernels.rs");
}
