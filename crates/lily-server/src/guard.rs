//! Who may ask. A page in a browser on the same machine may not, by way of a name that its owner points here (DNS
//! rebinding) or of a form: hosts and origins other than the machine itself are refused.

use crate::error::ApiError;
use axum::extract::Request;
use axum::http::{HeaderMap, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use std::net::IpAddr;

/// Refuses requests whose Host is a domain name, or whose Origin is neither this server nor another of this machine.
pub(crate) async fn refuse_foreign_hosts(request: Request, next: Next) -> Response {
    match check(request.headers()) {
        Ok(()) => next.run(request).await,
        Err(refused) => refused.into_response(),
    }
}

fn check(headers: &HeaderMap) -> Result<(), ApiError> {
    let text = |name| {
        headers
            .get(name)
            .map(|value: &header::HeaderValue| value.to_str().unwrap_or("?"))
    };
    if let Some(host) = text(header::HOST)
        && !is_this_machine(host)
    {
        return Err(ApiError::forbidden(
            "requests come by address or as localhost here, not by another name",
        ));
    }
    let Some(origin) = text(header::ORIGIN) else {
        return Ok(());
    };
    let host = origin.split_once("://").map_or("", |(_, host)| host);
    if is_this_machine(host) {
        return Ok(());
    }
    Err(ApiError::forbidden(
        "pages of other sites may not ask this server",
    ))
}

/// Whether a host, with or without port, is an address or `localhost`: names that nobody else can point here.
fn is_this_machine(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_and_localhost_are_this_machine() {
        for host in [
            "127.0.0.1",
            "127.0.0.1:8080",
            "localhost",
            "LOCALHOST:1",
            "[::1]",
            "[::1]:8080",
            "10.0.0.7:80",
        ] {
            assert!(is_this_machine(host), "{host}");
        }
        for host in [
            "",
            "evil.example",
            "localhost.evil.example:8080",
            "127.0.0.1.evil.example",
            "null",
            "[evil]:1",
        ] {
            assert!(!is_this_machine(host), "{host}");
        }
    }
}
