//! Numbers and tables for people.

pub use lily_plan::units::{bytes, grouped};
use std::time::Duration;

/// A count of something, e.g. `1 token`, `2 tokens`.
pub fn counted(count: usize, one: &str) -> String {
    let plural = if count == 1 { "" } else { "s" };
    format!("{} {one}{plural}", grouped(count as u64))
}

/// A rate, with as many digits as mean something.
pub fn rate(value: f64) -> String {
    let decimals = match value {
        ..9.995 => 2,
        ..99.95 => 1,
        _ => 0,
    };
    format!("{value:.decimals$}")
}

/// How many of them a second, if there were any and it took any time.
pub fn per_second(count: usize, time: Duration) -> Option<f64> {
    let seconds = time.as_secs_f64();
    (count > 0 && seconds > 0.0).then(|| count as f64 / seconds)
}

/// Rows as aligned columns, indented by two: the first column to the left, the last as it comes, those
/// between to the right.
pub fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let mut widths = vec![0; columns];
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut text = String::new();
    for row in rows {
        let mut line = String::from("  ");
        for (column, cell) in row.iter().enumerate() {
            let padding = " ".repeat(widths[column] - cell.chars().count());
            if column == 0 {
                line.extend([cell.as_str(), &padding]);
            } else if column + 1 == columns {
                line.extend(["  ", cell]);
            } else {
                line.extend(["  ", &padding, cell]);
            }
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

/// Names and values as two columns.
pub fn pairs(rows: &[(&str, String)]) -> String {
    let rows: Vec<Vec<String>> = rows
        .iter()
        .map(|(name, value)| vec![name.to_string(), value.clone()])
        .collect();
    table(&rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_and_rates() {
        assert_eq!(counted(1, "token"), "1 token");
        assert_eq!(counted(1_000, "token"), "1,000 tokens");
        assert_eq!(
            (rate(3.456), rate(34.56), rate(345.6)),
            ("3.46".into(), "34.6".into(), "346".into())
        );
    }

    #[test]
    fn columns_are_aligned() {
        let rows = [
            vec!["a".into(), "1".into(), "x".into()],
            vec!["bb".into(), "22".into(), "yy".into()],
        ];
        assert_eq!(table(&rows), "  a    1  x\n  bb  22  yy\n");
        assert_eq!(table(&[]), "");
    }
}
