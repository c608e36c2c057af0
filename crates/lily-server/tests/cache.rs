//! What outlasts a server.

mod support;

use lily_engine::DiskOptions;
use lily_server::ServerOptions;
use support::{Server, cached, question};

#[test]
fn a_server_that_starts_again_goes_on_from_what_it_knew() {
    let place = tempfile::TempDir::new().unwrap();
    let directory = place.path().join("prefixes");
    let start = || {
        Server::start(ServerOptions {
            cache: Some(DiskOptions::new(
                directory.clone(),
                1 << 30,
                "lily-tiny".into(),
            )),
            ..ServerOptions::default()
        })
    };
    let figure = |server: &Server, name: &str| -> u64 {
        let metrics = server.get("/metrics").body;
        let mut lines = metrics.lines();
        let line = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("{name}: {metrics}"))
            .parse()
            .unwrap()
    };
    let mut request = question(&format!(
        "{}What is 38 + 47?",
        "A fox and a lantern. ".repeat(60)
    ));
    request["max_tokens"] = 8.into();
    let first = start();
    let expected = first.post(&request).json();
    let tokens = expected["usage"]["prompt_tokens"].as_u64().unwrap();
    assert!(tokens > 300, "{expected}");
    assert_eq!(cached(&expected), 0);
    assert_eq!(figure(&first, "lily_disk_prefixes"), 0);
    // It is written when the server ends.
    drop(first);
    assert_eq!(std::fs::read_dir(&directory).unwrap().count(), 1);

    let second = start();
    assert_eq!(figure(&second, "lily_disk_prefixes"), 1);
    let found = second.post(&request).json();
    assert!(cached(&found) + 16 > tokens - 64, "{found}");
    assert_eq!(found["choices"], expected["choices"]);
    assert_eq!(figure(&second, "lily_disk_reads_total"), 1);
    assert!(figure(&second, "lily_disk_read_bytes_total") > 1_000_000);
    assert_eq!(figure(&second, "lily_prefix_hits_total"), 1);
    assert_eq!(figure(&second, "lily_sessions_parked"), 1);
    assert_eq!(figure(&second, "lily_disk_refused_total"), 0);
}
