//! Kernels with barriers that can be taken away, to see whether that is noticed.

/// The calls that order threads.
const BARRIERS: [&str; 2] = ["threadgroup_barrier", "simdgroup_barrier"];

/// The text of a kernel file with every barrier made conditional, and how many there are. Barrier `n` (from
/// 0, in the order of the text) does nothing if the function constant `index` is `n`; it must be set, to the
/// number of barriers for the unchanged kernels. So one build serves all mutants.
///
/// The file must not use `index` itself, and a barrier must be a statement of its own.
pub fn removable_barriers(source: &str, index: u32) -> (String, u32) {
    let mut out = format!("constant uint REMOVED_BARRIER [[function_constant({index})]];\n");
    let mut count = 0;
    for (number, line) in source.lines().enumerate() {
        if number == 0 {
            out += "#line 1\n";
        }
        let code = line.split("//").next().unwrap_or(line);
        let mut rest = 0;
        let mut starts: Vec<_> = BARRIERS
            .iter()
            .flat_map(|name| code.match_indices(name).map(|(at, _)| at))
            .collect();
        starts.sort_unstable();
        for at in starts {
            out += &line[rest..at];
            out += &format!("if (REMOVED_BARRIER != {count}) ");
            rest = at;
            count += 1;
        }
        out += &line[rest..];
        out.push('\n');
    }
    (out, count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn barriers_are_numbered_in_order() {
        let source =
            "a; threadgroup_barrier(x); simdgroup_barrier(y);\n// threadgroup_barrier\nb;\n";
        let (text, count) = removable_barriers(source, 9);
        assert_eq!(count, 2);
        let expected = "constant uint REMOVED_BARRIER [[function_constant(9)]];\n#line 1\na; if (REMOVED_BARRIER != 0) threadgroup_barrier(x); if (REMOVED_BARRIER != 1) simdgroup_barrier(y);\n// threadgroup_barrier\nb;\n";
        assert_eq!(text, expected);
    }
}
