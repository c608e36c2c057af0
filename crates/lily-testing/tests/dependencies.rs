//! Who may know whom. Arrows point down only: the plan knows no device, a device nothing of sessions, text
//! or the command line, the engine no particular device.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

/// Each crate of the workspace and the crates of the workspace that it may depend on.
const ALLOWED: [(&str, &[&str]); 15] = [
    ("lily-checkpoint", &[]),
    ("lily-text", &[]),
    ("lily-sampling", &[]),
    ("lily-plan", &["lily-checkpoint", "lily-sampling"]),
    (
        "lily-cpu",
        &["lily-checkpoint", "lily-plan", "lily-sampling"],
    ),
    (
        "lily-engine",
        &["lily-checkpoint", "lily-plan", "lily-sampling", "lily-text"],
    ),
    // HTTP knows the engine, and nothing below it.
    ("lily-server", &["lily-engine", "lily-constraint"]),
    // Grammars know tokens and text, and the engine's side of it.
    ("lily-constraint", &["lily-engine"]),
    // The command line puts engine and device together.
    (
        "lily",
        &[
            "lily-checkpoint",
            "lily-plan",
            "lily-cpu",
            "lily-cuda",
            "lily-emulated",
            "lily-engine",
            "lily-gpu",
            "lily-metal",
            "lily-server",
            "lily-text",
        ],
    ),
    // The interface of GPUs and everything they share; holds its bindings to the kernels when it is built.
    ("lily-gpu", &["lily-checkpoint", "lily-plan", "lily-msl"]),
    // Empty outside of macOS.
    ("lily-metal", &["lily-plan", "lily-gpu"]),
    // NVRTC is found by lily-msl; translation is done when it is built.
    ("lily-cuda", &["lily-plan", "lily-gpu", "lily-msl"]),
    // For development: the emulator behind the interface of GPUs.
    ("lily-emulated", &["lily-plan", "lily-gpu", "lily-msl"]),
    // For development, and when things are built: it proves kernels, and nothing of it is in the product.
    ("lily-msl", &[]),
    // For tests alone.
    ("lily-testing", &["lily-checkpoint", "lily-plan"]),
];

#[test]
fn dependencies_point_down() {
    let output = Command::new(env!("CARGO"))
        .args([
            "metadata",
            "--no-deps",
            "--offline",
            "--format-version",
            "1",
        ])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo runs");
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let allowed: BTreeMap<&str, BTreeSet<&str>> = ALLOWED
        .iter()
        .map(|(name, below)| (*name, below.iter().copied().collect()))
        .collect();
    let packages = metadata["packages"].as_array().expect("packages");
    assert_eq!(
        packages.len(),
        ALLOWED.len(),
        "a crate that this table does not know"
    );
    for package in packages {
        let name = package["name"].as_str().expect("a name");
        let below = allowed
            .get(name)
            .unwrap_or_else(|| panic!("{name} is not in the table"));
        for dependency in package["dependencies"].as_array().expect("dependencies") {
            let depends_on = dependency["name"].as_str().expect("a name");
            // Tests may use more.
            if dependency["kind"] == "dev" || !depends_on.starts_with("lily") {
                continue;
            }
            assert!(
                below.contains(depends_on),
                "{name} may not depend on {depends_on}"
            );
        }
    }
}

#[test]
fn the_readme_knows_every_crate() {
    let readme = std::fs::read_to_string(lily_testing::repository("README.md")).expect("a README");
    let table = readme
        .lines()
        .skip_while(|line| !line.starts_with("| crate |"))
        .skip(2)
        .take_while(|line| line.starts_with('|'));
    let mut told: Vec<&str> = table
        .filter_map(|row| row.split('|').nth(1))
        .flat_map(|cell| cell.split(','))
        .map(|name| name.trim().trim_matches('`'))
        .collect();
    let mut crates: Vec<&str> = ALLOWED.iter().map(|(name, _)| *name).collect();
    told.sort_unstable();
    crates.sort_unstable();
    assert_eq!(told, crates);
}
