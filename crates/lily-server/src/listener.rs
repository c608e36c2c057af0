//! Connections: taken, bounded, ended.

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use std::future::Future;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio_io_timeout::TimeoutStream;

/// Most connections at a time; one more waits to be taken.
const MOST_CONNECTIONS: usize = 1_024;
/// Most headers of a request, and bytes of them together with its first line.
const MOST_HEADERS: usize = 128;
const MOST_HEADER_BYTES: usize = 64 << 10;
/// Longest that the headers of a request may take to arrive.
const LONGEST_HEADERS: Duration = Duration::from_secs(30);
/// Longest that a reader may take nothing at all of what is there for it.
const LONGEST_STALL: Duration = Duration::from_secs(300);
/// Longest that what is being answered may take to its end once the server stops.
const LONGEST_ENDING: Duration = Duration::from_secs(10);

/// Answers at `listener` until `shutdown` is done, and then what is being answered.
///
/// # Errors
/// Where the listener fails for good.
pub(crate) async fn serve(
    listener: TcpListener,
    router: Router,
    shutdown: impl Future<Output = ()>,
) -> io::Result<()> {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(LONGEST_HEADERS)
        .max_headers(MOST_HEADERS)
        .max_header_size(MOST_HEADER_BYTES);
    let connections = Arc::new(Semaphore::new(MOST_CONNECTIONS));
    let graceful = GracefulShutdown::new();
    let mut shutdown = std::pin::pin!(shutdown);
    loop {
        let taken = async {
            let permit = connections.clone().acquire_owned().await;
            (permit, listener.accept().await)
        };
        let (permit, accepted) = tokio::select! {
            taken = taken => taken,
            () = &mut shutdown => break,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            // The connection's own fault, or too many files: the next may do better.
            Err(_) => {
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        // A token is a small packet, and is to leave at once.
        let _ = stream.set_nodelay(true);
        let mut stream = TimeoutStream::new(stream);
        stream.set_write_timeout(Some(LONGEST_STALL));
        let stream = Box::pin(stream);
        let service = TowerToHyperService::new(router.clone());
        let connection = http.serve_connection(TokioIo::new(stream), service);
        let connection = graceful.watch(connection);
        tokio::spawn(async move {
            // A client's mistake on the wire is answered by hyper, and concerns nobody else.
            let _ = connection.await;
            drop(permit);
        });
    }
    drop(listener);
    // A reader that does not read does not hold up the end.
    let _ = tokio::time::timeout(LONGEST_ENDING, graceful.shutdown()).await;
    Ok(())
}
