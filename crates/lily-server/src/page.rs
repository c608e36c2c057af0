//! The chat page at `/`: four small files in the program itself, for people who want to try the model and have no
//! client at hand. It asks this server as any client does, and no other.

use axum::Router;
use axum::http::{HeaderName, header};
use axum::response::IntoResponse;
use axum::routing::get;

const HTML: &str = include_str!("page/index.html");
const CSS: &str = include_str!("page/page.css");
const JS: &str = include_str!("page/page.js");
const ICON: &str = include_str!("page/icon.svg");

/// What the page may do: load its own files and ask its own server. A model's answer that got markup past the page
/// would find nothing to run and nowhere to send what it read.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'; \
                      require-trusted-types-for 'script'; trusted-types 'none'";

/// The addresses of the page's files.
pub(crate) fn routes<S: Clone + Send + Sync + 'static>() -> Router<S> {
    Router::new()
        .route("/", get(async || file("text/html; charset=utf-8", HTML)))
        .route(
            "/page.css",
            get(async || file("text/css; charset=utf-8", CSS)),
        )
        .route(
            "/page.js",
            get(async || file("text/javascript; charset=utf-8", JS)),
        )
        .route("/icon.svg", get(async || file("image/svg+xml", ICON)))
}

fn file(kind: &'static str, content: &'static str) -> impl IntoResponse {
    let headers: [(HeaderName, &str); 8] = [
        (header::CONTENT_TYPE, kind),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        // For browsers that do not know frame-ancestors.
        (header::X_FRAME_OPTIONS, "DENY"),
        (header::REFERRER_POLICY, "no-referrer"),
        (
            HeaderName::from_static("cross-origin-opener-policy"),
            "same-origin",
        ),
        (
            HeaderName::from_static("cross-origin-resource-policy"),
            "same-origin",
        ),
        // A newer program brings a newer page.
        (header::CACHE_CONTROL, "no-cache"),
    ];
    (headers, content)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_stays_small() {
        let bytes = HTML.len() + CSS.len() + JS.len() + ICON.len();
        assert!(bytes < 40_000, "{bytes}");
    }

    #[test]
    fn the_page_keeps_to_its_policy() {
        // Nothing inline, which the policy would keep from running, and nothing from elsewhere.
        for inline in [
            "<style",
            "style=",
            "<script>",
            "onclick=",
            "javascript:",
            "://",
        ] {
            assert!(!HTML.contains(inline), "{inline}");
        }
        // Nothing by which a text could become markup.
        for markup in [
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "://",
        ] {
            let code = JS.lines().filter(|line| !line.starts_with("//"));
            assert!(!code.collect::<String>().contains(markup), "{markup}");
        }
    }

    #[test]
    fn every_file_comes_with_the_policy() {
        let response = file("text/css; charset=utf-8", CSS).into_response();
        let header = |name: &str| response.headers()[name].to_str().unwrap();
        assert_eq!(header("content-type"), "text/css; charset=utf-8");
        assert!(header("content-security-policy").starts_with("default-src 'none';"));
        assert!(header("content-security-policy").contains("frame-ancestors 'none'"));
        assert_eq!(header("x-content-type-options"), "nosniff");
        assert_eq!(header("x-frame-options"), "DENY");
        assert_eq!(header("cache-control"), "no-cache");
    }
}
