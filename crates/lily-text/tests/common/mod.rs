//! Files of the repository that tests compare with.
#![allow(dead_code, reason = "every test binary uses some of these")]

use std::path::PathBuf;

use serde_json::Value;

/// The path of a file, given relative to the root of the repository.
pub fn path(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .join(name)
}

/// A text file of the repository.
pub fn fixture(name: &str) -> String {
    std::fs::read_to_string(path(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// The objects of a file with one JSON object a line.
pub fn json_lines(name: &str) -> Vec<Value> {
    fixture(name)
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

/// A tool call as the model writes it.
pub fn call(name: &str, parameters: &[(&str, &str)]) -> String {
    let mut text = format!("<tool_call>\n<function={name}>\n");
    for (key, value) in parameters {
        text.push_str(&format!("<parameter={key}>\n{value}\n</parameter>\n"));
    }
    text + "</function>\n</tool_call>"
}

/// A call of `get_weather`.
pub fn weather(city: &str) -> String {
    call("get_weather", &[("city", city)])
}
