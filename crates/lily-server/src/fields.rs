//! The fields of a request's body, each read with its type and range, and named where it is wrong.

use crate::error::ApiError;
use serde_json::{Map, Value};

/// A JSON object of a request.
pub(crate) struct Fields<'a> {
    object: &'a Map<String, Value>,
    /// Where it stands in the body, ending with a dot; nothing for the body itself.
    path: &'static str,
}

impl<'a> Fields<'a> {
    /// The body itself.
    pub fn of(body: &'a Value) -> Result<Self, ApiError> {
        let object = body.as_object();
        let object = object.ok_or_else(|| ApiError::invalid("the body must be a JSON object"))?;
        Ok(Fields { object, path: "" })
    }

    /// The object in a field. `path` is the field's name with a dot.
    pub fn object(&self, name: &str, path: &'static str) -> Result<Option<Fields<'a>>, ApiError> {
        let read = |value: &'a Value| value.as_object().map(|object| Fields { object, path });
        self.read(name, "an object", read)
    }

    /// The value of a field; none where it is missing or null.
    pub fn value(&self, name: &str) -> Option<&'a Value> {
        self.object.get(name).filter(|value| !value.is_null())
    }

    /// The names of all fields.
    pub fn names(&self) -> impl Iterator<Item = &'a str> + use<'a> {
        self.object.keys().map(String::as_str)
    }

    fn read<T>(
        &self,
        name: &str,
        what: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        let Some(value) = self.value(name) else {
            return Ok(None);
        };
        match read(value) {
            Some(read) => Ok(Some(read)),
            None => Err(self.wrong(name, what)),
        }
    }

    /// The error of a field that is not `what` it must be.
    pub fn wrong(&self, name: &str, what: &str) -> ApiError {
        let name = format!("{}{name}", self.path);
        ApiError::invalid(format!("{name} must be {what}")).of(name)
    }

    /// The error of a field that asks for what there is not.
    pub fn unsupported(&self, name: &str, instead: &str) -> ApiError {
        let name = format!("{}{name}", self.path);
        ApiError::invalid(format!("{name} is not supported: {instead}"))
            .of(name)
            .with_code("unsupported_parameter")
    }

    pub fn boolean(&self, name: &str) -> Result<Option<bool>, ApiError> {
        self.read(name, "true or false", Value::as_bool)
    }

    pub fn text(&self, name: &str) -> Result<Option<&'a str>, ApiError> {
        self.read(name, "a string", Value::as_str)
    }

    pub fn number(&self, name: &str) -> Result<Option<f32>, ApiError> {
        self.read(name, "a number", |value| {
            value.as_f64().map(|number| number as f32)
        })
    }

    /// A whole number of at least `least`.
    pub fn count(&self, name: &str, least: u64) -> Result<Option<u64>, ApiError> {
        let what = format!("a whole number of at least {least}");
        self.read(name, &what, |value| {
            value.as_u64().filter(|count| *count >= least)
        })
    }

    pub fn array(&self, name: &str) -> Result<Option<&'a [Value]>, ApiError> {
        self.read(name, "an array", |value| {
            value.as_array().map(Vec::as_slice)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn each_mistake_names_its_field() {
        let body = json!({"a": 1.5, "b": "x", "c": [1], "d": -1, "e": null, "f": {"g": 0}});
        let fields = Fields::of(&body).unwrap();
        assert_eq!(fields.number("a").unwrap(), Some(1.5));
        assert_eq!(fields.text("b").unwrap(), Some("x"));
        assert_eq!(fields.array("c").unwrap().unwrap().len(), 1);
        assert_eq!(fields.boolean("e").unwrap(), None);
        assert_eq!(fields.boolean("z").unwrap(), None);
        let inner = fields.object("f", "f.").unwrap().unwrap();
        assert_eq!(inner.count("g", 0).unwrap(), Some(0));
        for (error, param, said) in [
            (fields.boolean("a").unwrap_err(), "a", "true or false"),
            (fields.text("c").unwrap_err(), "c", "a string"),
            (fields.number("b").unwrap_err(), "b", "a number"),
            (
                fields.count("a", 0).unwrap_err(),
                "a",
                "a whole number of at least 0",
            ),
            (
                fields.count("d", 1).unwrap_err(),
                "d",
                "a whole number of at least 1",
            ),
            (fields.array("f").unwrap_err(), "f", "an array"),
            (
                inner.count("g", 1).unwrap_err(),
                "f.g",
                "a whole number of at least 1",
            ),
        ] {
            let told = error.to_json();
            assert_eq!(told["error"]["param"], param);
            assert!(
                told["error"]["message"].as_str().unwrap().contains(said),
                "{told}"
            );
        }
        assert!(Fields::of(&json!([])).is_err());
    }
}
