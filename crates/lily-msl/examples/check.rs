//! Translates and builds kernel files: `cargo run -p lily-msl --example check -- kernels/*.metal`.
use lily_msl::{BuildKind, Emulator, Sources};
use std::path::Path;

fn main() {
    let emulator = Emulator::in_target_directory();
    let mut failed = false;
    for file in std::env::args().skip(1) {
        let path = Path::new(&file);
        let mut sources = Sources::new();
        for entry in std::fs::read_dir(path.parent().expect("a folder")).expect("a folder") {
            let entry = entry.expect("an entry").path();
            let name = entry
                .file_name()
                .expect("a name")
                .to_string_lossy()
                .into_owned();
            sources = sources.with(&name, &std::fs::read_to_string(&entry).expect("text"));
        }
        let name = path.file_name().expect("a name").to_string_lossy();
        match emulator.compile(&sources, &name, BuildKind::Plain) {
            Ok(library) => println!("{file}: {} kernels", library.kernels().len()),
            Err(error) => {
                failed = true;
                println!("{file}:\n{error}");
            }
        }
    }
    assert!(!failed, "not all files were built");
}
