//! Numbers for people: decimal units, three significant digits.

/// Bytes, e.g. `1.67 GB`.
pub fn bytes(count: u64) -> String {
    scaled(count as f64, &["B", "kB", "MB", "GB", "TB", "PB"])
}

/// Floating-point operations, e.g. `4.99 GFLOP`.
pub fn flops(count: u64) -> String {
    scaled(
        count as f64,
        &["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"],
    )
}

/// A duration, e.g. `3.43 ms`.
pub fn seconds(duration: f64) -> String {
    scaled(duration * 1e9, &["ns", "µs", "ms", "s"])
}

/// A whole number in groups of three digits, e.g. `262,144`.
pub fn grouped(count: u64) -> String {
    let digits = count.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

fn scaled(mut value: f64, units: &[&str]) -> String {
    let mut unit = 0;
    // What would round to 1000 belongs to the next unit.
    while value >= 999.5 && unit + 1 < units.len() {
        value /= 1000.0;
        unit += 1;
    }
    let decimals = match value {
        _ if unit == 0 && value.fract() == 0.0 => 0,
        ..9.995 => 2,
        ..99.95 => 1,
        _ => 0,
    };
    format!("{value:.decimals$} {}", units[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_significant_digits_and_the_right_unit() {
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(7), "7 B");
        assert_eq!(bytes(999), "999 B");
        assert_eq!(bytes(1_000), "1.00 kB");
        assert_eq!(bytes(9_994), "9.99 kB");
        assert_eq!(bytes(9_996), "10.0 kB");
        assert_eq!(bytes(99_960), "100 kB");
        assert_eq!(bytes(999_600), "1.00 MB");
        assert_eq!(bytes(1_669_725_568), "1.67 GB");
        assert_eq!(flops(4_985_257_984), "4.99 GFLOP");
        assert_eq!(seconds(1.39e-6), "1.39 µs");
        assert_eq!(seconds(0.0034), "3.40 ms");
        assert_eq!(seconds(12.0), "12.0 s");
    }

    #[test]
    fn digits_are_grouped_from_the_right() {
        assert_eq!(grouped(0), "0");
        assert_eq!(grouped(999), "999");
        assert_eq!(grouped(1_000), "1,000");
        assert_eq!(grouped(1_669_725_568), "1,669,725,568");
    }
}
