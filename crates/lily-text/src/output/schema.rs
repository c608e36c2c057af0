//! What a tool's JSON schema says about the type of a parameter.

use serde_json::Value;

/// References and combinations are followed this deep; schemas may refer to
/// themselves.
const MAXIMUM_DEPTH: usize = 16;

/// Branches looked at in one schema, since nested combinations multiply.
const MAXIMUM_BRANCHES: usize = 256;

/// The types a parameter may have.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Expected {
    pub(super) null: bool,
    pub(super) boolean: bool,
    pub(super) integer: bool,
    pub(super) number: bool,
    pub(super) string: bool,
    pub(super) object: bool,
    pub(super) array: bool,
    /// The values allowed, if the schema lists them.
    pub(super) choices: Vec<Value>,
}

impl Expected {
    /// Whether the schema says nothing about the type.
    pub(super) fn is_unknown(&self) -> bool {
        let Self {
            null,
            boolean,
            integer,
            number,
            string,
            object,
            array,
            choices,
        } = self;
        let any = *null || *boolean || *integer || *number || *string || *object || *array;
        !any && choices.is_empty()
    }

    fn add_type(&mut self, name: &str) {
        match name {
            "null" => self.null = true,
            "boolean" | "bool" => self.boolean = true,
            "integer" | "int" => self.integer = true,
            "number" | "float" | "double" => self.number = true,
            "string" | "str" => self.string = true,
            "object" | "dict" => self.object = true,
            "array" | "list" => self.array = true,
            _ => {}
        }
    }
}

/// The declared tools.
#[derive(Debug, Clone, Default)]
pub(super) struct Tools {
    tools: Vec<Tool>,
}

#[derive(Debug, Clone)]
struct Tool {
    name: String,
    parameters: Value,
}

impl Tools {
    /// Reads OpenAI's `tools`; entries that are no functions are skipped. The
    /// form without the `function` wrapper is accepted, too.
    pub(super) fn new(tools: &[Value]) -> Self {
        let tools = tools
            .iter()
            .filter_map(|tool| {
                let function = tool.get("function").unwrap_or(tool);
                Some(Tool {
                    name: function.get("name")?.as_str()?.to_owned(),
                    parameters: function
                        .get("parameters")
                        .or_else(|| function.get("input_schema"))
                        .cloned()
                        .unwrap_or_default(),
                })
            })
            .collect();
        Self { tools }
    }

    fn find(&self, name: &str) -> Option<&Tool> {
        self.tools.iter().find(|tool| tool.name == name)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.tools.is_empty()
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.find(name).is_some()
    }

    /// Whether a parameter is declared; `None` if nothing is known about the
    /// parameters of the tool.
    pub(super) fn has_parameter(&self, tool: &str, parameter: &str) -> Option<bool> {
        let properties = self.find(tool)?.parameters.get("properties")?.as_object()?;
        Some(properties.contains_key(parameter))
    }

    pub(super) fn expected(&self, tool: &str, parameter: &str) -> Expected {
        let mut expected = Expected::default();
        let Some(tool) = self.find(tool) else {
            return expected;
        };
        let root = &tool.parameters;
        let declared = root
            .get("properties")
            .and_then(|properties| properties.get(parameter))
            .or_else(|| root.get("additionalProperties"));
        if let Some(schema) = declared {
            let mut branches = 0;
            collect(schema, root, 0, &mut branches, &mut expected);
        }
        expected
    }
}

fn collect(
    schema: &Value,
    root: &Value,
    depth: usize,
    branches: &mut usize,
    expected: &mut Expected,
) {
    *branches += 1;
    if depth > MAXIMUM_DEPTH || *branches > MAXIMUM_BRANCHES {
        return;
    }
    match schema.get("type") {
        Some(Value::String(name)) => expected.add_type(name),
        Some(Value::Array(names)) => {
            for name in names.iter().filter_map(Value::as_str) {
                expected.add_type(name);
            }
        }
        // Schemas of objects and lists often leave out the type.
        _ if schema.get("properties").is_some() => expected.object = true,
        _ if schema.get("items").is_some() => expected.array = true,
        _ => {}
    }
    if schema.get("nullable") == Some(&Value::Bool(true)) {
        expected.null = true;
    }
    if let Some(values) = schema.get("enum").and_then(Value::as_array) {
        expected.choices.extend(values.iter().cloned());
    }
    if let Some(value) = schema.get("const") {
        expected.choices.push(value.clone());
    }
    for key in ["anyOf", "oneOf", "allOf"] {
        let list = schema.get(key).and_then(Value::as_array);
        for branch in list.into_iter().flatten() {
            collect(branch, root, depth + 1, branches, expected);
        }
    }
    let target = schema
        .get("$ref")
        .and_then(Value::as_str)
        .and_then(|reference| reference.strip_prefix('#'))
        .and_then(|pointer| root.pointer(pointer));
    if let Some(target) = target {
        collect(target, root, depth + 1, branches, expected);
    }
}
