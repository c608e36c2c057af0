//! Who may ask. A page in a browser on the same machine may not, by way of a name that its owner points here (DNS
//! rebinding) or of a form: hosts and origins other than the machine itself are refused, but for those that are named.
//! Where keys are set, requests bring one.

use crate::Shared;
use crate::error::ApiError;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use std::net::IpAddr;
use std::sync::Arc;
use subtle::ConstantTimeEq;
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

/// What stands for any origin.
const ANY: &str = "*";

/// Refuses requests whose Host is another name than this machine's, or whose Origin is neither this server, nor another
/// of this machine, nor allowed.
pub(crate) async fn refuse_foreign_hosts(
    State(shared): State<Arc<Shared>>,
    request: Request,
    next: Next,
) -> Response {
    let options = &shared.options;
    match check(request.headers(), &options.hosts, &options.origins) {
        Ok(()) => next.run(request).await,
        Err(refused) => refused.into_response(),
    }
}

fn check(headers: &HeaderMap, hosts: &[String], origins: &[String]) -> Result<(), ApiError> {
    let text = |name| {
        headers
            .get(name)
            .map(|value: &HeaderValue| value.to_str().unwrap_or("?"))
    };
    let is_known = |host: &str| {
        let name = name_of(host);
        is_this_machine(name) || hosts.iter().any(|known| known.eq_ignore_ascii_case(name))
    };
    if let Some(host) = text(header::HOST)
        && !is_known(host)
    {
        return Err(ApiError::forbidden(
            "requests come by address or as localhost here; another name has to be given as --allow-host",
        ));
    }
    let Some(origin) = text(header::ORIGIN) else {
        return Ok(());
    };
    let host = origin.split_once("://").map_or("", |(_, host)| host);
    // Anybody's page may come from an address: only this machine's own, and that which is asked, are this server's.
    let is_own = text(header::HOST) == Some(host) || is_loopback(name_of(host));
    let is_named = hosts
        .iter()
        .any(|known| known.eq_ignore_ascii_case(name_of(host)));
    if is_own || is_named || origins.iter().any(|known| known == ANY || known == origin) {
        return Ok(());
    }
    Err(ApiError::forbidden(
        "pages of other sites may not ask this server; a site has to be given as --allow-origin",
    ))
}

/// The name of a host with or without port.
fn name_of(host: &str) -> &str {
    match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    }
}

/// Whether a name is this machine's to itself.
fn is_loopback(name: &str) -> bool {
    let address = name.parse::<IpAddr>();
    name.eq_ignore_ascii_case("localhost") || address.is_ok_and(|address| address.is_loopback())
}

/// Whether a name is an address or `localhost`: names that nobody else can point here.
fn is_this_machine(name: &str) -> bool {
    name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok()
}

/// Lets the pages of allowed origins read answers; without any, browsers let nobody.
pub(crate) fn cors(origins: &[String]) -> CorsLayer {
    let layer = CorsLayer::new();
    if origins.is_empty() {
        return layer;
    }
    let allowed = if origins.iter().any(|origin| origin == ANY) {
        AllowOrigin::any()
    } else {
        let values = origins.iter();
        AllowOrigin::list(values.filter_map(|origin| HeaderValue::from_str(origin).ok()))
    };
    layer
        .allow_origin(allowed)
        .allow_methods([Method::GET, Method::POST])
        // SDKs bring headers of their own.
        .allow_headers(AllowHeaders::mirror_request())
}

/// Refuses requests without one of the keys, where there are keys.
pub(crate) async fn require_key(
    State(shared): State<Arc<Shared>>,
    request: Request,
    next: Next,
) -> Response {
    let keys = &shared.options.api_keys;
    if keys.is_empty() || is_among(bearer(request.headers()), keys) {
        return next.run(request).await;
    }
    ApiError::unauthorized().into_response()
}

fn bearer(headers: &HeaderMap) -> Option<&[u8]> {
    let value = headers.get(header::AUTHORIZATION)?.as_bytes();
    let (scheme, key) = value.split_at_checked("Bearer ".len())?;
    scheme.eq_ignore_ascii_case(b"Bearer ").then_some(key)
}

/// How long this takes tells nothing of the keys but their lengths.
fn is_among(given: Option<&[u8]>, keys: &[String]) -> bool {
    let given = given.unwrap_or_default();
    let same = keys.iter().map(|key| key.as_bytes().ct_eq(given));
    same.fold(subtle::Choice::from(0), |any, same| any | same)
        .into()
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
            assert!(is_this_machine(name_of(host)), "{host}");
        }
        for host in [
            "",
            "evil.example",
            "localhost.evil.example:8080",
            "127.0.0.1.evil.example",
            "null",
            "[evil]:1",
        ] {
            assert!(!is_this_machine(name_of(host)), "{host}");
        }
    }

    #[test]
    fn hosts_and_origins_are_allowed_by_name_alone() {
        let headers = |host: &str, origin: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::HOST, host.parse().unwrap());
            headers.insert(header::ORIGIN, origin.parse().unwrap());
            headers
        };
        let (hosts, origins) = (
            ["mac.local".to_string()],
            ["https://app.example".to_string()],
        );
        for (host, origin, is_allowed) in [
            ("localhost:8080", "http://localhost:3000", true),
            ("mac.local:8080", "http://MAC.local:8080", true),
            ("localhost", "https://app.example", true),
            ("localhost", "https://app.example.evil.example", false),
            ("localhost", "http://app.example", false),
            ("localhost", "null", false),
            ("localhost", "http://203.0.113.5", false),
            ("203.0.113.5:80", "http://203.0.113.5:80", true),
            ("localhost:80", "http://127.0.0.1:3000", true),
            ("other.local", "http://localhost", false),
        ] {
            let result = check(&headers(host, origin), &hosts, &origins);
            assert_eq!(result.is_ok(), is_allowed, "{host} {origin}");
        }
        assert!(
            check(
                &headers("localhost", "https://any.example"),
                &[],
                &["*".into()]
            )
            .is_ok()
        );
    }

    #[test]
    fn a_key_is_one_of_the_keys_as_a_whole() {
        let keys = ["first".to_string(), "second".to_string()];
        let given = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::AUTHORIZATION, value.parse().unwrap());
            is_among(bearer(&headers), &keys)
        };
        assert!(given("Bearer second") && given("bearer first"));
        for wrong in [
            "Bearer secon",
            "Bearer secondd",
            "Bearer ",
            "second",
            "Basic second",
            "",
        ] {
            assert!(!given(wrong), "{wrong}");
        }
        assert!(!is_among(None, &keys));
    }
}
