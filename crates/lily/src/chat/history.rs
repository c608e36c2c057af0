//! Where messages are remembered: a file that only its owner reads.

use crate::args::ChatArguments;
use crate::failure::Failure;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

/// The file, made ready; `None` where messages are not remembered.
pub fn file(arguments: &ChatArguments) -> Result<Option<PathBuf>, Failure> {
    if arguments.no_history {
        return Ok(None);
    }
    let path = match &arguments.history {
        Some(path) => path.clone(),
        None => {
            let Some(directory) = directory() else {
                return Ok(None);
            };
            let failed = |error| unusable(&directory, &error);
            private_directory(&directory).map_err(failed)?;
            directory.join("history")
        }
    };
    private_file(&path).map_err(|error| unusable(&path, &error))?;
    Ok(Some(path))
}

fn unusable(path: &Path, error: &io::Error) -> Failure {
    Failure::usage(format!("the history {} cannot be kept", path.display()))
        .because(error)
        .help("name another file with --history, or give --no-history")
}

/// Where programs keep what should outlast them and is no configuration.
fn directory() -> Option<PathBuf> {
    let home = std::env::home_dir().filter(|home| home.is_absolute());
    if cfg!(target_os = "macos") {
        return home.map(|home| home.join("Library/Application Support/lily"));
    }
    // A relative path there is to be ignored, as the XDG specification has it.
    let named = std::env::var_os("XDG_STATE_HOME").map(PathBuf::from);
    let state = named
        .filter(|path| path.is_absolute())
        .or_else(|| home.map(|home| home.join(".local/state")));
    state.map(|state| state.join("lily"))
}

fn private_directory(path: &Path) -> io::Result<()> {
    let mut builder = DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(path)
}

fn private_file(path: &Path) -> io::Result<()> {
    let mut options = OpenOptions::new();
    options.create(true).append(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let file = options.open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("it is not a file"));
    }
    make_private(&file)
}

/// One that was there may have been open to others.
#[cfg(unix)]
fn make_private(file: &File) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let mut permissions = file.metadata()?.permissions();
    if permissions.mode() & 0o077 != 0 {
        permissions.set_mode(0o600);
        file.set_permissions(permissions)?;
    }
    Ok(())
}

#[cfg(not(unix))]
fn make_private(_: &File) -> io::Result<()> {
    Ok(())
}
