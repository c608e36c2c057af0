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
    if !arguments.host.is_loopback() {
        return Err(Failure::usage(format!(
            "--host {} may be reached by other machines, and requests are not authenticated",
            arguments.host
        ))
        .help("give 127.0.0.1 or ::1"));
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
    let cache = arguments.cache_dir.as_ref().map(|directory| {
        DiskOptions::new(
            directory.clone(),
            arguments.cache_size,
            opened.name.identity.clone(),
        )
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
        "lily: listening at http://{address}/v1, as model {name}"
    ));
    console.note(&format!(
        "lily: try  curl http://{address}/v1/chat/completions -H 'Content-Type: application/json' \\\n            \
         -d '{{\"messages\": [{{\"role\": \"user\", \"content\": \"What is 38 + 47?\"}}]}}'"
    ));
    let options = ServerOptions {
        model: name.clone(),
        most_requests: arguments.most_requests,
        cache,
        ..ServerOptions::default()
    };
    lily_server::run(listener, opened.engine, options).map_err(failed)
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
