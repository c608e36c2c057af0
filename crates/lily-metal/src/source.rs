//! One text a kernel file. Metal's run-time compiler finds no files, so `#include "…"` is resolved here.

use std::collections::HashSet;

/// The text of `file` with its headers in place, each of them once. `#line` lines keep the compiler's messages at the
/// files as they are. `text_of` gives the files; an error names the one that is missing.
pub(crate) fn inline<'a>(
    file: &str,
    text_of: &dyn Fn(&str) -> Option<&'a str>,
) -> Result<String, String> {
    let mut out = String::new();
    write(file, text_of, &mut HashSet::new(), &mut out)?;
    Ok(out)
}

/// Writes a file. `seen` has the files that stand before it whatever the conditions.
fn write<'a>(
    file: &str,
    text_of: &dyn Fn(&str) -> Option<&'a str>,
    seen: &mut HashSet<String>,
    out: &mut String,
) -> Result<(), String> {
    seen.insert(file.to_string());
    let text = text_of(file).ok_or_else(|| format!("there is no kernels/{file}"))?;
    begin_line(out, 1, file);
    let mut conditions = 0_usize;
    for (index, line) in text.lines().enumerate() {
        let directive = line.trim_start().strip_prefix('#').map(str::trim_start);
        let directive = directive.unwrap_or("");
        if let Some(header) = included(directive) {
            if seen.contains(header) {
                out.push('\n');
                continue;
            }
            // Under a condition it may be left out, and be needed again below: then the guard decides.
            let mut seen_here = seen.clone();
            let guard = guard(header);
            out.push_str(&format!("#ifndef {guard}\n#define {guard}\n"));
            write(header, text_of, &mut seen_here, out)
                .map_err(|error| format!("kernels/{file}, line {}: {error}", index + 1))?;
            out.push_str("#endif\n");
            if conditions == 0 {
                *seen = seen_here;
            }
            begin_line(out, index + 2, file);
            continue;
        }
        if directive.starts_with("if") {
            conditions += 1;
        } else if directive.starts_with("endif") {
            conditions = conditions.saturating_sub(1);
        }
        // Guards take the place of `#pragma once`, of which the compiler would warn in a main file.
        if !directive.starts_with("pragma once") {
            out.push_str(line);
        }
        out.push('\n');
    }
    Ok(())
}

fn begin_line(out: &mut String, line: usize, file: &str) {
    out.push_str(&format!("#line {line} \"kernels/{file}\"\n"));
}

fn guard(header: &str) -> String {
    let plain = header.replace(|c: char| !c.is_ascii_alphanumeric(), "_");
    format!("LILY_HAS_{plain}")
}

/// The file that a directive includes in quotes. The system's own, in angle brackets, stay for the compiler.
fn included(directive: &str) -> Option<&str> {
    let rest = directive.strip_prefix("include")?.trim_start();
    rest.strip_prefix('"')?
        .split_once('"')
        .map(|(file, _)| file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use lily_gpu::kernels::SOURCES;
    use lily_msl::{Sources, Target, translate_sources};

    fn embedded(name: &str) -> Option<&'static str> {
        let found = SOURCES.iter().find(|(file, _)| *file == name);
        found.map(|(_, text)| *text)
    }

    /// Each kernel file of the product, inlined, has the kernels that it has with its headers.
    #[test]
    fn kernels_are_the_same_inlined() {
        let with_headers = SOURCES
            .iter()
            .fold(Sources::new(), |sources, (name, text)| {
                sources.with(name, text)
            });
        for (file, _) in SOURCES.iter().filter(|(file, _)| file.ends_with(".metal")) {
            let text = inline(file, &embedded).expect("all headers are embedded");
            assert!(!text.contains("#include \""), "{file}");
            let alone = Sources::new().with(file, &text);
            let signatures = |sources: &Sources| {
                let translated = translate_sources(sources, file, Target::Emulated);
                let kernels = translated
                    .unwrap_or_else(|error| panic!("{file}: {error}"))
                    .kernels;
                format!("{kernels:?}")
            };
            assert_eq!(signatures(&alone), signatures(&with_headers), "{file}");
        }
    }

    #[test]
    fn each_header_comes_once_and_lines_keep_their_numbers() {
        let text_of = |name: &str| match name {
            "main.metal" => Some("#include \"a.h\"\n#include \"b.h\"\nmain"),
            "a.h" => Some("#pragma once\na"),
            "b.h" => Some("#pragma once\n# include  \"a.h\"\n#include <metal_stdlib>\nb"),
            _ => None,
        };
        assert_eq!(
            inline("main.metal", &text_of).expect("complete"),
            "#line 1 \"kernels/main.metal\"\n\
             #ifndef LILY_HAS_a_h\n#define LILY_HAS_a_h\n\
             #line 1 \"kernels/a.h\"\n\na\n\
             #endif\n\
             #line 2 \"kernels/main.metal\"\n\
             #ifndef LILY_HAS_b_h\n#define LILY_HAS_b_h\n\
             #line 1 \"kernels/b.h\"\n\n\n#include <metal_stdlib>\nb\n\
             #endif\n\
             #line 3 \"kernels/main.metal\"\nmain\n"
        );
    }

    /// A header that one branch includes is there for what follows the branches too.
    #[test]
    fn conditions_do_not_hide_headers() {
        let text_of = |name: &str| match name {
            "main.metal" => Some("#if 0\n#include \"a.h\"\n#endif\n#include \"a.h\"\n"),
            "a.h" => Some("a"),
            _ => None,
        };
        let text = inline("main.metal", &text_of).expect("complete");
        assert_eq!(text.matches("#line 1 \"kernels/a.h\"\na\n").count(), 2);
        assert_eq!(text.matches("#ifndef LILY_HAS_a_h\n").count(), 2);
    }

    #[test]
    fn what_is_missing_is_named() {
        let text_of = |name: &str| (name == "main.metal").then_some("\n#include \"gone.h\"\n");
        assert_eq!(
            inline("main.metal", &text_of),
            Err("kernels/main.metal, line 2: there is no kernels/gone.h".into())
        );
        assert!(inline("other.metal", &text_of).is_err());
    }
}
