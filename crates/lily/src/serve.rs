//! `lily serve`: the model for the programs of this machine.

use crate::args::ServeArguments;
use crate::console::Console;
use crate::failure::Failure;
use crate::format::bytes;
use crate::model::{Opened, Opening, on, open};
use lily_engine::{DiskOptions, PlanOutput};
use lily_server::ServerOptions;
use std::net::{SocketAddr, TcpListener};
use std::path::Path;

/// Runs the subcommand.
pub fn serve(model: Option<&Path>, arguments: &ServeArguments) -> Result<(), Failure> {
    let api_keys = api_keys(arguments)?;
    if !arguments.host.is_loopback() && api_keys.is_empty() {
        return Err(Failure::usage(format!(
            "--host {} may be reached by other machines, and no key is set",
            arguments.host
        ))
        .help("set LILY_API_KEY or --api-key-file, or listen to 127.0.0.1 or ::1"));
    }
    // An address that is not to be had is told before a model is read.
    let wanted = SocketAddr::new(arguments.host, arguments.port);
    let failed = |error| Failure::request(format!("cannot serve at {wanted}")).because(&error);
    let listener = TcpListener::bind(wanted).map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    let mut console = Console::new(false);
    let opening = Opening {
        context: arguments.context,
        snapshots: true,
        ..Opening::default()
    };
    let mut opened = open(model, &arguments.device, opening, console.status())?;
    console.status().end();
    introduce(&mut console, &mut opened);
    let cache = arguments.cache.cache_dir.as_ref().map(|directory| {
        let (most_bytes, model) = (arguments.cache.cache_size, opened.name.identity.clone());
        DiskOptions::new(directory.clone(), most_bytes, model)
    });
    if let Some(cache) = &cache {
        console.note(&format!(
            "lily: beginnings of conversations in {}, up to {}",
            cache.directory.display(),
            bytes(cache.most_bytes)
        ));
    }
    let name = arguments.name.as_ref().unwrap_or(&opened.name.name);
    console.note(&format!(
        "lily: listening at http://{address}/v1, as model {name}; a page to chat at http://{address}/"
    ));
    let key = if api_keys.is_empty() {
        ""
    } else {
        " -H \"Authorization: Bearer $LILY_API_KEY\""
    };
    console.note(&format!(
        "lily: try  curl http://{address}/v1/chat/completions -H 'Content-Type: application/json'{key} \\\n            \
         -d '{{\"messages\": [{{\"role\": \"user\", \"content\": \"What is 38 + 47?\"}}]}}'"
    ));
    let options = ServerOptions {
        model: name.clone(),
        most_requests: arguments.most_requests,
        cache,
        api_keys,
        hosts: arguments.access.allow_host.clone(),
        origins: arguments.access.allow_origin.clone(),
        logs_requests: arguments.verbose,
        logs_text: arguments.log_prompts,
        ..ServerOptions::default()
    };
    lily_server::run(listener, opened.engine, options).map_err(failed)
}

/// The keys that requests may bring: those of the file, and that of the environment.
fn api_keys(arguments: &ServeArguments) -> Result<Vec<String>, Failure> {
    let mut keys = Vec::new();
    if let Some(path) = &arguments.access.api_key_file {
        let shown = path.display();
        let text = std::fs::read_to_string(path).map_err(|error| {
            Failure::usage(format!("--api-key-file {shown} cannot be read")).because(&error)
        })?;
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
        keys.extend(lines.map(String::from));
        if keys.is_empty() {
            return Err(Failure::usage(format!("--api-key-file {shown} has no key"))
                .help("write one on a line"));
        }
    }
    keys.extend(
        std::env::var("LILY_API_KEY")
            .ok()
            .filter(|key| !key.is_empty()),
    );
    if keys
        .iter()
        .any(|key| !key.bytes().all(|byte| byte.is_ascii_graphic()))
    {
        return Err(
            Failure::usage("an API key has characters that a header cannot carry")
                .help("letters, digits and punctuation alone, no spaces"),
        );
    }
    Ok(keys)
}

fn introduce(console: &mut Console, opened: &mut Opened) {
    let engine = &mut opened.engine;
    let precision = engine.options().precision;
    console.note(&format!("lily: model {}", opened.name.to_text()));
    console.note(&format!(
        "lily: device {}, {precision}",
        on(&engine.device())
    ));
    console.note(&format!("lily: decode {}", engine.pace(PlanOutput::Token)));
    let memory = engine.memory();
    console.note(&format!(
        "lily: memory {} for work, {} for conversations of up to {} tokens",
        bytes(memory.working),
        bytes(memory.free()),
        engine.context()
    ));
}
