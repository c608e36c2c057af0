//! Kernels: their parameters, what is checked of them, and instantiations.

use crate::lexer::{Kind, Token};
use crate::signature::{AddressSpace, BufferBinding, Builtin, KernelSignature, ThreadgroupBinding};

use super::tokens::{
    is_address_space, line_structure, matching, replace_words, significant, spaced, split_commas,
    type_text, without_attributes,
};
use super::{Instance, Run, Target, Translator};

/// Attributes of parameters that the GPU fills, and how many components each has.
const BUILTINS: [(&str, usize); 14] = [
    ("thread_position_in_grid", 3),
    ("thread_position_in_threadgroup", 3),
    ("threadgroup_position_in_grid", 3),
    ("threads_per_threadgroup", 3),
    ("dispatch_threads_per_threadgroup", 3),
    ("threadgroups_per_grid", 3),
    ("threads_per_grid", 3),
    ("thread_index_in_threadgroup", 1),
    ("thread_index_in_simdgroup", 1),
    ("simdgroup_index_in_threadgroup", 1),
    ("threads_per_simdgroup", 1),
    ("simdgroups_per_threadgroup", 1),
    ("thread_index_in_quadgroup", 1),
    ("quadgroup_index_in_threadgroup", 1),
];

/// The highest index of a buffer on any Apple GPU.
const LAST_BUFFER: u32 = 30;

/// A kernel as it is written.
pub(super) struct Kernel {
    pub parameters: Vec<Parameter>,
    /// Template parameters as text and by name; empty if the kernel is not a template.
    pub template_parameters: Vec<String>,
    pub template_names: Vec<String>,
    /// The most threads of a threadgroup, as it is written.
    pub max_threads: Option<String>,
}

/// How a parameter gets its value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Binding {
    Buffer(u32),
    Threadgroup(u32),
    Builtin(String),
}

pub(super) struct Parameter {
    pub name: String,
    /// Without address space.
    pub type_name: String,
    pub binding: Binding,
    /// Whether nothing can write through the parameter.
    pub read_only: bool,
    space: Option<String>,
    is_tensor: bool,
    condition: Option<String>,
}

impl Parameter {
    /// Whether it is in `constant` memory.
    pub fn is_constant(&self) -> bool {
        self.space.as_deref() == Some("constant")
    }
}

impl Kernel {
    /// Indices of the parameters in threadgroup memory, lowest first.
    pub fn threadgroup_indices(&self) -> Vec<u32> {
        let mut indices: Vec<_> = self
            .parameters
            .iter()
            .filter_map(|parameter| match parameter.binding {
                Binding::Threadgroup(index) => Some(index),
                Binding::Buffer(_) | Binding::Builtin(_) => None,
            })
            .collect();
        indices.sort_unstable();
        indices
    }
}

/// A parameter before its attributes are judged.
struct Parsed {
    first: Token,
    name: String,
    type_tokens: Vec<Token>,
    attributes: Vec<(String, String)>,
}

impl Translator {
    pub(super) fn kernel(&mut self, declaration: &[Token]) -> Run {
        let find = |text: &str, from: usize| {
            (from..declaration.len()).find(|&i| declaration[i].text == text)
        };
        let opened = find("void", 0).and_then(|void| find("(", void));
        let Some(open) = opened else {
            return Err(self.rejection(&declaration[0], "a kernel returns void"));
        };
        let close = self.close(declaration, open, "(", ")")?;
        let head = significant(&declaration[..open]);
        let name = head.last().expect("at least void").text.clone();
        let mut template_parameters = Vec::new();
        if head[0].text == "template" {
            let end = self.close(&head, 1, "<", ">")?;
            template_parameters = split_commas(&head[2..end])
                .iter()
                .map(|p| spaced(p))
                .collect();
        }
        let max_threads = self.max_threads(&head)?;
        let template_names: Vec<String> = template_parameters
            .iter()
            .map(|parameter: &String| {
                let before = parameter.split('=').next().unwrap_or_default();
                before
                    .split_whitespace()
                    .last()
                    .unwrap_or_default()
                    .to_owned()
            })
            .collect();
        let written = split_commas(&declaration[open + 1..close]);
        let parameters = self.parameters(&name, &written)?;
        let is_template = !template_parameters.is_empty();
        if !is_template {
            self.instances.push(Instance {
                host_name: name.clone(),
                function: name.clone(),
                arguments: None,
                line: head[0].line,
                file: head[0].file,
            });
        }
        let mut out = line_structure(&declaration[..open]);
        if is_template {
            let list = template_parameters.join(", ");
            out.push(Token::raw(format!("template <{list}> ")));
        }
        let declared = match self.target {
            // The entry has the kernel's name.
            Target::Cuda => format!("static __forceinline__ void {name}_msl("),
            Target::Emulated | Target::Strict => format!("static inline void {name}("),
        };
        out.push(Token::raw(declared));
        for (position, parameter) in written.iter().enumerate() {
            if position > 0 {
                out.push(Token::raw(","));
            }
            let plain = without_attributes(parameter);
            out.extend(self.body(&plain, false));
        }
        out.push(Token::raw(")"));
        out.extend(self.body(&declaration[close + 1..], true));
        let kernel = Kernel {
            parameters,
            template_parameters,
            template_names,
            max_threads,
        };
        if self.target == Target::Emulated {
            out.push(Token::raw(super::emit::emulated_entry(&name, &kernel)));
        }
        self.kernels.insert(name, kernel);
        Ok(out)
    }

    /// The value of `max_total_threads_per_threadgroup`.
    fn max_threads(&self, head: &[Token]) -> Result<Option<String>, super::Rejection> {
        let attribute = |token: &Token| token.text == "max_total_threads_per_threadgroup";
        let Some(at) = head[..head.len() - 1].iter().position(attribute) else {
            return Ok(None);
        };
        let close = self.close(head, at + 1, "(", ")")?;
        Ok(Some(spaced(&head[at + 2..close])))
    }

    /// Reads a kernel's parameters and rejects what cannot be bound.
    fn parameters(
        &mut self,
        kernel: &str,
        written: &[Vec<Token>],
    ) -> Result<Vec<Parameter>, super::Rejection> {
        let mut parameters: Vec<Parameter> = Vec::new();
        for tokens in written {
            let Some(parsed) = parse(tokens) else {
                let at = significant(tokens);
                let message = format!("kernel {kernel}: a parameter needs a type and a name");
                return Err(self.rejection(&at[0], message));
            };
            let judged = self.judge(&parsed, &parameters);
            match judged {
                Ok(parameter) => parameters.push(parameter),
                Err(message) => {
                    self.reject(&parsed.first, format!("kernel {kernel}: {message}"));
                }
            }
        }
        Ok(parameters)
    }

    fn judge(&self, parsed: &Parsed, before: &[Parameter]) -> Result<Parameter, String> {
        let name = &parsed.name;
        let is_condition = |(attribute, _): &&(String, String)| attribute == "function_constant";
        let bindings: Vec<_> = parsed
            .attributes
            .iter()
            .filter(|attribute| !is_condition(attribute))
            .collect();
        let [(attribute, value)] = bindings[..] else {
            return Err(format!("parameter {name} needs exactly one attribute"));
        };
        let space = parsed
            .type_tokens
            .iter()
            .find(|token| is_address_space(token))
            .map(|token| token.text.clone());
        let indirection = parsed
            .type_tokens
            .iter()
            .position(|token| matches!(token.text.as_str(), "*" | "&"));
        let is_tensor = parsed.type_tokens[0].text == "tensor";
        let type_name = type_text(&parsed.type_tokens);
        let index = || {
            value
                .parse::<u32>()
                .map_err(|_| format!("{attribute}({value}) of {name} is not a number"))
        };
        let binding = match attribute.as_str() {
            "buffer" => {
                let index = index()?;
                let same = |other: &&Parameter| other.binding == Binding::Buffer(index);
                if let Some(other) = before.iter().find(same) {
                    return Err(format!(
                        "buffer({index}) bound twice ({}, {name})",
                        other.name
                    ));
                }
                if index > LAST_BUFFER {
                    return Err(format!(
                        "buffer index {index} of {name} is over {LAST_BUFFER}"
                    ));
                }
                if !is_tensor {
                    if indirection.is_none() {
                        return Err(format!(
                            "buffer parameter {name} must be a pointer or a reference"
                        ));
                    }
                    if !matches!(space.as_deref(), Some("device" | "constant")) {
                        return Err(format!(
                            "buffer parameter {name} must be in device or constant"
                        ));
                    }
                }
                Binding::Buffer(index)
            }
            "threadgroup" => {
                if space.as_deref() != Some("threadgroup") || indirection.is_none() {
                    return Err(format!("{name} must be a threadgroup pointer"));
                }
                Binding::Threadgroup(index()?)
            }
            _ => {
                let Some((_, width)) = BUILTINS.iter().find(|(builtin, _)| builtin == attribute)
                else {
                    return Err(format!("unknown attribute [[{attribute}]]"));
                };
                let plain = type_name.strip_prefix("const ").unwrap_or(&type_name);
                let components = match plain {
                    "uint" | "ushort" | "uint32_t" | "uint16_t" => 1,
                    "uint2" | "ushort2" => 2,
                    "uint3" | "ushort3" => 3,
                    _ => {
                        return Err(format!(
                            "{attribute} must be uint or ushort (or a vector of them), not {plain}"
                        ));
                    }
                };
                if components > *width {
                    return Err(format!("{attribute} is a scalar, not {plain}"));
                }
                Binding::Builtin(attribute.clone())
            }
        };
        let pointee = &parsed.type_tokens[..indirection.unwrap_or(parsed.type_tokens.len())];
        let read_only = space.as_deref() == Some("constant")
            || pointee.iter().any(|token| token.text == "const");
        Ok(Parameter {
            name: name.clone(),
            type_name,
            binding,
            space,
            read_only,
            is_tensor,
            condition: parsed
                .attributes
                .iter()
                .find(is_condition)
                .map(|(_, value)| value.clone()),
        })
    }

    /// `template [[host_name("x")]] kernel void name<args>(...);`
    pub(super) fn instantiation(&mut self, declaration: &[Token], all: &[Token]) -> Run {
        let found = (0..all.len().saturating_sub(1))
            .find(|&i| all[i + 1].text == "<" && self.kernels.contains_key(&all[i].text));
        let Some(at) = found else {
            return Ok(self.body(declaration, false));
        };
        let function = all[at].text.clone();
        let end = self.close(all, at + 1, "<", ">")?;
        let arguments: Vec<String> = split_commas(&all[at + 2..end])
            .iter()
            .map(|a| spaced(a))
            .collect();
        let host_name: String = all
            .iter()
            .skip_while(|token| token.text != "host_name")
            .skip(2)
            .take_while(|token| token.kind == Kind::Text)
            .map(|token| token.text.trim_matches('"'))
            .collect();
        if host_name.is_empty() {
            self.reject(
                &all[0],
                format!("instantiation of {function} has no host_name"),
            );
        }
        let names = self.kernels[&function].template_names.len();
        if arguments.len() != names {
            let message = format!("{function} takes {names} template arguments");
            self.reject(&all[0], message);
        }
        self.instances.push(Instance {
            host_name,
            function: function.clone(),
            arguments: Some(arguments),
            line: all[0].line,
            file: all[0].file,
        });
        let mut out = Vec::new();
        if self.target == Target::Strict {
            let arguments = spaced(&self.body(&all[at + 2..end], false));
            let whole = format!("{function}<{arguments}>");
            out.push(Token::raw(format!("template decltype({whole}) {whole};")));
        }
        out.extend(line_structure(declaration));
        Ok(out)
    }

    /// What a host has to know of each kernel.
    pub(super) fn signatures(&self) -> Vec<KernelSignature> {
        let signature = |instance: &Instance| {
            let kernel = &self.kernels[&instance.function];
            let arguments = instance.arguments.clone().unwrap_or_default();
            let names = kernel.template_names.iter().cloned();
            let replacements: Vec<_> = names.zip(arguments.iter().cloned()).collect();
            let mut signature = KernelSignature {
                name: instance.host_name.clone(),
                function: instance.function.clone(),
                template_arguments: arguments,
                buffers: Vec::new(),
                threadgroup: Vec::new(),
                builtins: Vec::new(),
                function_constants: self.constants_of(&instance.function),
            };
            for parameter in &kernel.parameters {
                let name = parameter.name.clone();
                let element = || element(parameter, &replacements);
                match &parameter.binding {
                    Binding::Buffer(index) => signature.buffers.push(BufferBinding {
                        index: *index,
                        name,
                        address_space: match parameter.space.as_deref() {
                            _ if parameter.is_tensor => AddressSpace::Tensor,
                            Some("constant") => AddressSpace::Constant,
                            _ => AddressSpace::Device,
                        },
                        read_only: parameter.read_only,
                        element: element(),
                        condition: parameter.condition.clone(),
                    }),
                    Binding::Threadgroup(index) => {
                        signature.threadgroup.push(ThreadgroupBinding {
                            index: *index,
                            name,
                            element: element(),
                        });
                    }
                    Binding::Builtin(attribute) => signature.builtins.push(Builtin {
                        name,
                        attribute: attribute.clone(),
                        type_name: parameter.type_name.clone(),
                    }),
                }
            }
            signature
        };
        self.instances.iter().map(signature).collect()
    }
}

/// The type that a parameter points to.
fn element(parameter: &Parameter, replacements: &[(String, String)]) -> String {
    let mut text = parameter.type_name.as_str();
    if !parameter.is_tensor {
        text = text.split(['*', '&']).next().unwrap_or(text);
        text = text.strip_prefix("const ").unwrap_or(text);
        text = text.strip_suffix(" const").unwrap_or(text);
    }
    replace_words(text, replacements)
}

/// Splits a parameter into type, name and attributes.
fn parse(tokens: &[Token]) -> Option<Parsed> {
    let all = significant(tokens);
    let mut attributes = Vec::new();
    let mut rest = Vec::new();
    let mut at = 0;
    while at < all.len() {
        if all[at].text != "[[" {
            rest.push(all[at].clone());
            at += 1;
            continue;
        }
        let end = matching(&all, at, "[[", "]]")?;
        for attribute in split_commas(&all[at + 1..end]) {
            let value = match attribute.len() {
                0..=2 => String::new(),
                length => spaced(&attribute[2..length - 1]),
            };
            attributes.push((attribute.first()?.text.clone(), value));
        }
        at = end + 1;
    }
    // `T name[]` is `T* name`.
    if rest.last()?.text == "]" {
        let bracket = rest.iter().position(|token| token.text == "[")?;
        let name = rest[bracket.checked_sub(1)?].clone();
        let mut star = name.clone();
        star.kind = Kind::Operator;
        star.text = "*".to_owned();
        rest.truncate(bracket - 1);
        rest.extend([star, name]);
    }
    let name = rest.pop()?;
    (name.kind == Kind::Word && !rest.is_empty()).then(|| Parsed {
        first: all[0].clone(),
        name: name.text,
        type_tokens: rest,
        attributes,
    })
}
