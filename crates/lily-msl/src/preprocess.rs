//! Includes and macros. Includes of the project's own headers are resolved here, from memory; macros and
//! conditions are the C preprocessor's business.

use std::collections::{BTreeMap, BTreeSet};

use crate::compiler;

/// Headers of Apple's, for which the translation includes its own.
const SYSTEM_HEADERS: [&str; 15] = [
    "metal_stdlib",
    "metal_simdgroup",
    "metal_simdgroup_matrix",
    "metal_atomic",
    "metal_math",
    "metal_integer",
    "metal_common",
    "metal_tensor",
    "metal_limits",
    "metal_type_traits",
    "metal_compute",
    "metal_cooperative_tensor",
    "metal_logging",
    "MetalPerformancePrimitives/MetalPerformancePrimitives.h",
    "simd/simd.h",
];

/// Source files by name. A file includes another as `#include "name"`; each is taken once, as if it began
/// with `#pragma once`.
#[derive(Debug, Clone, Default)]
pub struct Sources {
    files: BTreeMap<String, String>,
}

impl Sources {
    /// No files.
    pub fn new() -> Self {
        Self::default()
    }

    /// The same files and one more (or another text for one of them).
    #[must_use]
    pub fn with(mut self, name: &str, text: &str) -> Self {
        self.files.insert(name.to_owned(), text.to_owned());
        self
    }

    /// The text of a file.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.files.get(name).map(String::as_str)
    }

    /// The files in the order of their names.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.files
            .iter()
            .map(|(name, text)| (name.as_str(), text.as_str()))
    }
}

/// One file with everything that it includes, after the preprocessor.
pub(crate) fn preprocess(sources: &Sources, file: &str) -> Result<String, String> {
    let mut text = String::new();
    expand(sources, file, &mut BTreeSet::new(), &mut text)?;
    let arguments = [
        "-E",
        "-x",
        "c++",
        "-undef",
        "-nostdinc",
        "-D__METAL__=1",
        "-D__METAL_VERSION__=400",
        "-D__HAVE_TENSOR__=1",
        "-",
    ];
    compiler::run(arguments, &text)
}

/// Writes a file with its includes in place, and line markers so that messages name the right file.
fn expand<'a>(
    sources: &'a Sources,
    file: &'a str,
    taken: &mut BTreeSet<&'a str>,
    out: &mut String,
) -> Result<(), String> {
    let text = sources
        .get(file)
        .ok_or_else(|| format!("no source file {file:?}"))?;
    taken.insert(file);
    out.push_str(&format!("#line 1 \"{file}\"\n"));
    for (at, line) in text.lines().enumerate() {
        let line_number = at + 1;
        let Some(included) = include_of(line) else {
            if line.trim() != "#pragma once" {
                out.push_str(line);
            }
            out.push('\n');
            continue;
        };
        let unknown = || format!("{file}:{line_number}: error: no header {included}");
        let name = &included[1..included.len() - 1];
        if included.starts_with('<') {
            if !SYSTEM_HEADERS.contains(&name) {
                return Err(unknown());
            }
            out.push('\n');
            continue;
        }
        let (name, _) = sources.files.get_key_value(name).ok_or_else(unknown)?;
        if !taken.contains(name.as_str()) {
            expand(sources, name, taken, out)?;
            out.push_str(&format!("#line {line_number} \"{file}\"\n"));
        }
        out.push('\n');
    }
    Ok(())
}

/// `<name>` or `"name"` of an include line.
fn include_of(line: &str) -> Option<&str> {
    let rest = line.trim_start().strip_prefix('#')?.trim_start();
    let rest = rest.strip_prefix("include")?.trim_start();
    let close = match rest.chars().next()? {
        '<' => '>',
        '"' => '"',
        _ => return None,
    };
    let end = rest[1..].find(close)? + 1;
    Some(&rest[..=end])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_taken_once_and_keep_their_lines() {
        let sources = Sources::new()
            .with("a.h", "#pragma once\n#include \"b.h\"\nint a;\n")
            .with("b.h", "int b;\n")
            .with(
                "k.metal",
                "#include <metal_stdlib>\n#include \"a.h\"\n#include \"b.h\"\nint k;\n",
            );
        let mut text = String::new();
        expand(&sources, "k.metal", &mut BTreeSet::new(), &mut text).unwrap();
        let expected = "#line 1 \"k.metal\"\n\n#line 1 \"a.h\"\n\n#line 1 \"b.h\"\nint b;\n#line 2 \"a.h\"\n\nint a;\n#line 2 \"k.metal\"\n\n\nint k;\n";
        assert_eq!(text, expected);
    }

    #[test]
    fn unknown_headers_are_named() {
        let sources = Sources::new().with("k.metal", "\n#include \"none.h\"\n");
        let error = preprocess(&sources, "k.metal").unwrap_err();
        assert_eq!(error, "k.metal:2: error: no header \"none.h\"");
        let sources = Sources::new().with("k.metal", "#include <vector>\n");
        let error = preprocess(&sources, "k.metal").unwrap_err();
        assert_eq!(error, "k.metal:1: error: no header <vector>");
    }
}
