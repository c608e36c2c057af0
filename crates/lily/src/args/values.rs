//! Values of flags, read with an error that says what was expected.

use std::num::IntErrorKind;
use std::str::FromStr;

/// How many of the likeliest tokens are kept: a number, or all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TopK(pub Option<u32>);

impl FromStr for TopK {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "all" {
            return Ok(TopK(None));
        }
        match text.parse::<u32>() {
            Ok(count) if count > 0 => Ok(TopK(Some(count))),
            Err(error) if *error.kind() == IntErrorKind::PosOverflow => Err(format!(
                "it is too large: a whole number from 1 to {} is needed, or all",
                u32::MAX
            )),
            _ => Err("a whole number of at least 1 is needed, or all".into()),
        }
    }
}

pub fn positive(text: &str) -> Result<usize, String> {
    match text.parse::<usize>() {
        Ok(number) if number > 0 => Ok(number),
        Err(error) if *error.kind() == IntErrorKind::PosOverflow => Err(format!(
            "it is too large: a whole number from 1 to {} is needed",
            usize::MAX
        )),
        _ => Err("a whole number of at least 1 is needed".into()),
    }
}

/// A positive number that costs something for each one: beyond the bound it is a slip.
pub fn positive_up_to<const MOST: usize>(text: &str) -> Result<usize, String> {
    match positive(text) {
        Ok(number) if number <= MOST => Ok(number),
        _ => Err(format!("a whole number from 1 to {MOST} is needed")),
    }
}

/// A number of bytes: `4GiB`, `500MB`, `1.5g`, `1048576`.
pub fn bytes(text: &str) -> Result<u64, String> {
    let digits = text
        .find(|character: char| !character.is_ascii_digit() && character != '.')
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let scale: u64 = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        "t" | "tib" => 1 << 40,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        _ => {
            return Err(format!(
                "the unit {unit:?} is none of B, KiB, MiB, GiB, TiB, kB, MB, GB, TB"
            ));
        }
    };
    let number: f64 = number
        .parse()
        .map_err(|_| "a number of bytes is needed, such as 4GiB or 500MB".to_string())?;
    let count = number * scale as f64;
    // Above 2^63 the number is no amount of memory, and rounding would say nonsense.
    if !(1.0..9.2e18).contains(&count) {
        return Err("at least 1 byte and less than 8 EiB are needed".into());
    }
    Ok(count as u64)
}

/// A text that not every name contains.
pub fn part_of_a_name(text: &str) -> Result<String, String> {
    if text.trim().is_empty() {
        return Err(
            "it is empty, which any kernels would pass: a part of their name is needed".into(),
        );
    }
    Ok(text.into())
}

pub fn logit_bias(text: &str) -> Result<(u32, f32), String> {
    let parsed = text
        .split_once('=')
        .and_then(|(token, value)| Some((token.trim().parse().ok()?, value.trim().parse().ok()?)));
    parsed.ok_or_else(|| "a token id and a number are needed, such as 4057=-100".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_read_with_their_units() {
        for (text, expected) in [
            ("4GiB", 4 << 30),
            ("4g", 4 << 30),
            ("500MB", 500_000_000),
            ("1.5k", 1536),
            ("123", 123),
            ("2 MiB", 2 << 20),
        ] {
            assert_eq!(bytes(text), Ok(expected), "{text}");
        }
        for text in [
            "",
            "GiB",
            "4XB",
            "-1",
            "0",
            "1e3",
            "9999999999TiB",
            "1.2.3",
            "٣",
        ] {
            assert!(bytes(text).is_err(), "{text}");
        }
    }

    #[test]
    fn biases_are_pairs() {
        assert_eq!(logit_bias("5=-1.5"), Ok((5, -1.5)));
        for text in ["5", "5=", "=1", "-5=1", "a=1"] {
            assert!(logit_bias(text).is_err(), "{text}");
        }
    }

    #[test]
    fn top_k_is_a_number_or_all() {
        assert_eq!("all".parse(), Ok(TopK(None)));
        assert_eq!("20".parse(), Ok(TopK(Some(20))));
        assert!("0".parse::<TopK>().is_err());
        let beyond = "4294967296".parse::<TopK>().unwrap_err();
        assert!(beyond.contains("too large") && beyond.contains("4294967295"));
    }
}
