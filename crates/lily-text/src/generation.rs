//! The sampling defaults of a checkpoint.

use serde_json::{Map, Value};

use crate::GenerationDefaultsError as Error;

/// What `generation_config.json` says; `None` where it says nothing.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct GenerationDefaults {
    /// Tokens that end the output.
    pub eos_token_ids: Vec<u32>,
    /// Token that begins a text, if any is used.
    pub bos_token_id: Option<u32>,
    /// Token for padding.
    pub pad_token_id: Option<u32>,
    /// Whether to sample at all, rather than to take the most likely token.
    pub do_sample: Option<bool>,
    /// Sampling temperature, 0 or more.
    pub temperature: Option<f32>,
    /// Sample among this many tokens; 0 means all.
    pub top_k: Option<u32>,
    /// Sample among the tokens that make up this share, over 0 and up to 1.
    pub top_p: Option<f32>,
    /// Least probability relative to the most likely token, 0 to 1.
    pub min_p: Option<f32>,
    /// Divisor of the logits of tokens seen before, over 0.
    pub repetition_penalty: Option<f32>,
    /// Subtracted from the logits of tokens seen before, -2 to 2.
    pub presence_penalty: Option<f32>,
    /// Subtracted for every earlier occurrence of a token, -2 to 2.
    pub frequency_penalty: Option<f32>,
    /// Most tokens to generate, 1 or more.
    pub max_new_tokens: Option<u32>,
}

impl GenerationDefaults {
    /// Reads the contents of a `generation_config.json`.
    ///
    /// # Errors
    ///
    /// If the file is not a JSON object, or a field that is used here has the
    /// wrong type or is out of bounds; the error names the field.
    pub fn parse(json: &str) -> Result<Self, Error> {
        let object: Map<String, Value> = serde_json::from_str(json)?;
        let fields = Fields(&object);
        Ok(Self {
            eos_token_ids: fields.ids("eos_token_id")?,
            bos_token_id: fields.integer("bos_token_id", 0)?,
            pad_token_id: fields.integer("pad_token_id", 0)?,
            do_sample: fields.boolean("do_sample")?,
            temperature: fields.number("temperature", |value| value >= 0.0, "0 or more")?,
            top_k: fields.integer("top_k", 0)?,
            top_p: fields.number(
                "top_p",
                |value| value > 0.0 && value <= 1.0,
                "over 0 and up to 1",
            )?,
            min_p: fields.number("min_p", |value| (0.0..=1.0).contains(&value), "from 0 to 1")?,
            repetition_penalty: fields.number(
                "repetition_penalty",
                |value| value > 0.0,
                "over 0",
            )?,
            presence_penalty: fields.number("presence_penalty", is_penalty, "from -2 to 2")?,
            frequency_penalty: fields.number("frequency_penalty", is_penalty, "from -2 to 2")?,
            max_new_tokens: fields.integer("max_new_tokens", 1)?,
        })
    }
}

fn is_penalty(value: f64) -> bool {
    (-2.0..=2.0).contains(&value)
}

struct Fields<'a>(&'a Map<String, Value>);

impl Fields<'_> {
    fn get(&self, field: &'static str) -> Option<&Value> {
        self.0.get(field).filter(|value| !value.is_null())
    }

    fn ids(&self, field: &'static str) -> Result<Vec<u32>, Error> {
        let one = |value: &Value| {
            whole_number(value)
                .ok_or_else(|| refuse(field, value, "a token id or a list of token ids"))
        };
        match self.get(field) {
            None => Ok(Vec::new()),
            Some(Value::Array(list)) => list.iter().map(one).collect(),
            Some(value) => Ok(vec![one(value)?]),
        }
    }

    fn integer(&self, field: &'static str, least: u32) -> Result<Option<u32>, Error> {
        self.get(field)
            .map(|value| {
                whole_number(value)
                    .filter(|&number| number >= least)
                    .ok_or_else(|| refuse(field, value, &format!("a whole number from {least} on")))
            })
            .transpose()
    }

    fn number(
        &self,
        field: &'static str,
        accept: impl Fn(f64) -> bool,
        bounds: &str,
    ) -> Result<Option<f32>, Error> {
        self.get(field)
            .map(|value| {
                let number = value
                    .as_f64()
                    .filter(|&number| accept(number))
                    .ok_or_else(|| refuse(field, value, &format!("a number {bounds}")))?;
                // f32 is what sampling computes with, so it must be finite there.
                if number.abs() > f64::from(f32::MAX) {
                    let most = format!("at most {:.1e}, to be finite in f32", f32::MAX);
                    return Err(refuse(field, value, &most));
                }
                Ok(number as f32)
            })
            .transpose()
    }

    fn boolean(&self, field: &'static str) -> Result<Option<bool>, Error> {
        self.get(field)
            .map(|value| {
                value
                    .as_bool()
                    .ok_or_else(|| refuse(field, value, "true or false"))
            })
            .transpose()
    }
}

/// Some files write whole numbers as `20.0`.
fn whole_number(value: &Value) -> Option<u32> {
    if let Some(number) = value.as_u64() {
        return u32::try_from(number).ok();
    }
    let number = value.as_f64()?;
    (number.fract() == 0.0 && (0.0..=f64::from(u32::MAX)).contains(&number))
        .then_some(number as u32)
}

fn refuse(field: &'static str, value: &Value, expected: &str) -> Error {
    let mut shown = value.to_string();
    if shown.len() > 60 {
        let end = (0..=60).rev().find(|&end| shown.is_char_boundary(end));
        shown.truncate(end.unwrap_or(0));
        shown.push('…');
    }
    Error::Field {
        field,
        reason: format!("must be {expected}, not {shown}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_the_checkpoint_ships() {
        let defaults = GenerationDefaults::parse(
            r#"{"bos_token_id": 248044, "do_sample": true, "eos_token_id": [248046, 248044],
                "pad_token_id": 248044, "temperature": 1.0, "top_k": 20, "top_p": 0.95,
                "transformers_version": "5.0"}"#,
        )
        .unwrap();
        assert_eq!(defaults.eos_token_ids, [248046, 248044]);
        assert_eq!(defaults.temperature, Some(1.0));
        assert_eq!(defaults.top_k, Some(20));
        assert_eq!(defaults.top_p, Some(0.95));
        assert_eq!(defaults.min_p, None);
    }

    #[test]
    fn one_eos_id_is_a_list_of_one() {
        let defaults = GenerationDefaults::parse(r#"{"eos_token_id": 7, "min_p": null}"#).unwrap();
        assert_eq!(defaults.eos_token_ids, [7]);
        assert_eq!(
            GenerationDefaults::parse("{}").unwrap(),
            GenerationDefaults::default()
        );
    }

    #[test]
    fn errors_name_the_field() {
        for (json, field) in [
            (r#"{"eos_token_id": [1, -1]}"#, "eos_token_id"),
            (r#"{"eos_token_id": "x"}"#, "eos_token_id"),
            (r#"{"bos_token_id": 4294967296}"#, "bos_token_id"),
            (r#"{"temperature": -0.1}"#, "temperature"),
            (r#"{"temperature": 1e300}"#, "temperature"),
            (r#"{"top_k": 1.5}"#, "top_k"),
            (r#"{"top_p": 0}"#, "top_p"),
            (r#"{"top_p": 1.01}"#, "top_p"),
            (r#"{"min_p": "0.1"}"#, "min_p"),
            (r#"{"repetition_penalty": 0}"#, "repetition_penalty"),
            (r#"{"presence_penalty": 3}"#, "presence_penalty"),
            (r#"{"frequency_penalty": -3}"#, "frequency_penalty"),
            (r#"{"max_new_tokens": 0}"#, "max_new_tokens"),
            (r#"{"do_sample": 1}"#, "do_sample"),
        ] {
            match GenerationDefaults::parse(json) {
                Err(Error::Field { field: named, .. }) => assert_eq!(named, field, "{json}"),
                other => panic!("{json}: {other:?}"),
            }
        }
        let told = |json: &str| GenerationDefaults::parse(json).unwrap_err().to_string();
        assert_eq!(
            told(r#"{"temperature": -1}"#),
            "temperature must be a number 0 or more, not -1"
        );
        assert_eq!(
            told(r#"{"temperature": 1e300}"#),
            "temperature must be at most 3.4e38, to be finite in f32, not 1e+300"
        );
        assert!(matches!(
            GenerationDefaults::parse("[]"),
            Err(Error::Json(_))
        ));
    }
}
