//! Holds the host to the kernels: from each kernel's signature it makes a structure with one field for each
//! buffer and function constant, so that a binding that is missing, misnamed or of the wrong kind does not compile.

use lily_msl::{AddressSpace, KernelSignature, Sources, Target, translate_sources};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};

fn main() {
    let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../kernels");
    println!("cargo::rerun-if-changed={}", kernels.display());
    let mut files: Vec<PathBuf> = std::fs::read_dir(&kernels)
        .expect("the folder of kernels")
        .map(|entry| entry.expect("an entry").path())
        .collect();
    files.sort();
    let mut sources = Sources::new();
    let mut embedded = String::from("/// Kernel files and their headers, by name.\n");
    embedded.push_str("pub const SOURCES: &[(&str, &str)] = &[\n");
    for path in &files {
        let name = path.file_name().expect("a name").to_string_lossy();
        let text = std::fs::read_to_string(path).expect("a kernel file");
        println!("cargo::rerun-if-changed={}", path.display());
        writeln!(embedded, "    ({name:?}, include_str!({path:?})),").expect("room");
        sources = sources.with(&name, &text);
    }
    embedded.push_str("];\n");
    let mut out = embedded;
    // By function: a function may be in two files, which make it for different matrix units.
    let mut functions: BTreeMap<String, Vec<(String, KernelSignature)>> = BTreeMap::new();
    for path in &files {
        let file = path.file_name().expect("a name").to_string_lossy();
        if !file.ends_with(".metal") {
            continue;
        }
        let translated = match translate_sources(&sources, &file, Target::Emulated) {
            Ok(translated) => translated,
            Err(error) => panic!("kernels/{file} is not what the host can bind:\n{error}"),
        };
        for kernel in translated.kernels {
            let instances = functions.entry(kernel.function.clone()).or_default();
            instances.push((file.to_string(), kernel));
        }
    }
    for (function, instances) in &functions {
        write_kernel(&mut out, function, instances);
    }
    let path = Path::new(&std::env::var("OUT_DIR").expect("OUT_DIR")).join("bindings.rs");
    std::fs::write(path, out).expect("bindings.rs");
}

fn write_kernel(out: &mut String, function: &str, instances: &[(String, KernelSignature)]) {
    let signature = &instances[0].1;
    let type_name = camel_case(function);
    let mut fields = String::new();
    let mut constants = String::new();
    let mut bindings = String::new();
    let mut indices = String::new();
    for constant in &signature.function_constants {
        let field = constant.name.to_lowercase();
        let (rust, variant) = match constant.type_name.as_str() {
            "uint" => ("u32", "UInt"),
            "bool" => ("bool", "Bool"),
            "float" => ("f32", "Float"),
            "int" => ("i32", "Int"),
            other => panic!("{function}: function constant {field} of type {other}"),
        };
        let index = constant.index;
        writeln!(
            fields,
            "    /// Function constant {}.\n    pub {field}: {rust},",
            constant.name
        )
        .expect("room");
        writeln!(
            constants,
            "            Constant {{ index: {index}, value: ConstantValue::{variant}(self.{field}) }},"
        )
        .expect("room");
    }
    for buffer in &signature.buffers {
        let field = &buffer.name;
        let index = buffer.index;
        let element = buffer.element.trim_start_matches("const ").trim();
        let (rust, made) = match (buffer.address_space, buffer.read_only) {
            (AddressSpace::Constant, _) => match element {
                "uint" => ("u32", format!("Operand::Word(self.{field})")),
                other => panic!("{function}: constant buffer {field} of type {other}"),
            },
            (AddressSpace::Device, true) => ("Input", format!("Operand::Input(self.{field})")),
            (AddressSpace::Device, false) => ("Output", format!("Operand::Output(self.{field})")),
            (AddressSpace::Tensor, _) => panic!("{function}: tensors are made in kernels"),
        };
        let (rust, made) = if buffer.condition.is_some() {
            let variant = made.split('(').next().expect("a name").to_string();
            (
                format!("Option<{rust}>"),
                format!("self.{field}.map_or(Operand::None, {variant})"),
            )
        } else {
            (rust.to_string(), made)
        };
        writeln!(fields, "    /// Buffer {index}.\n    pub {field}: {rust},").expect("room");
        if rust == "u32" {
            writeln!(
                indices,
                "    /// Index of `{field}`.\n    pub const {}_INDEX: usize = {index};",
                field.to_uppercase()
            )
            .expect("room");
        }
        writeln!(bindings, "        operands[{index}] = {made};").expect("room");
    }
    let count = signature
        .buffers
        .iter()
        .map(|buffer| buffer.index + 1)
        .max()
        .unwrap_or(0);
    assert!(
        signature.threadgroup.is_empty(),
        "{function}: threadgroup memory is declared in kernels"
    );
    let names: Vec<(&str, &str)> = instances
        .iter()
        .map(|(file, kernel)| (kernel.name.as_str(), file.as_str()))
        .collect();
    let (name_field, name) = if names.len() == 1 {
        (String::new(), format!("{:?}", names[0].0))
    } else {
        for (_, other) in instances {
            let same = other.buffers.len() == signature.buffers.len()
                && other.function_constants == signature.function_constants;
            assert!(same, "{function}: its instances differ in what they bind");
        }
        (
            "    /// Which instance: one of `NAMES`.\n    pub kernel: &'static str,\n".to_string(),
            "self.kernel".to_string(),
        )
    };
    let file = names[0].1;
    write!(
        out,
        r#"
/// `{function}` of kernels/{file}; its contract is there.
#[derive(Clone, Copy, Debug)]
pub struct {type_name} {{
{name_field}{fields}}}

impl {type_name} {{
    /// Host names, each with its file.
    pub const NAMES: &'static [(&'static str, &'static str)] = &{names:?};
{indices}}}

impl Kernel for {type_name} {{
    fn bind(self) -> Bound {{
        let name: &'static str = {name};
        let instance = Self::NAMES.iter().find(|(known, _)| *known == name);
        let (_, file) = instance.unwrap_or_else(|| panic!("{function} has no instance {{name}}"));
        let constants = vec![
{constants}        ];
        let mut operands = vec![Operand::None; {count}];
{bindings}        Bound {{ file, name, constants, operands }}
    }}
}}
"#
    )
    .expect("room");
}

fn camel_case(name: &str) -> String {
    name.split('_')
        .map(|part| part[..1].to_uppercase() + &part[1..])
        .collect()
}
