//! What goes around the translated source: headers before it, entry points and registrations after it.

use super::kernel::{Binding, Kernel, Parameter};
use super::tokens::replace_words;
use super::{Target, Translator};

/// The function through which the emulator enters a kernel.
pub(super) fn emulated_entry(name: &str, kernel: &Kernel) -> String {
    let mut template = String::new();
    let mut arguments = String::new();
    if !kernel.template_parameters.is_empty() {
        template = format!("template <{}> ", kernel.template_parameters.join(", "));
        arguments = format!("<{}>", kernel.template_names.join(", "));
    }
    let values: Vec<_> = kernel
        .parameters
        .iter()
        .map(|parameter| {
            let type_name = &parameter.type_name;
            match &parameter.binding {
                Binding::Buffer(index) => format!("msl::buf<{type_name}>(a_, {index})"),
                Binding::Threadgroup(index) => format!("msl::tgparam<{type_name}>({index})"),
                Binding::Builtin(attribute) => {
                    format!("msl::bi<{type_name}>(msl::bi_{attribute}())")
                }
            }
        })
        .collect();
    format!(
        " {template}MSL_NOSAN static void {name}__msl(const msl::Args& a_) {{ {name}{arguments}({}); }}",
        values.join(", ")
    )
}

impl Translator {
    /// The whole output.
    pub(super) fn emit(&self, body: &str) -> String {
        match self.target {
            Target::Emulated => {
                let registrations = self.instances.iter().enumerate().map(|(number, instance)| {
                    let arguments = instance
                        .arguments
                        .as_ref()
                        .map(|arguments| format!("<{}>", arguments.join(", ")));
                    format!(
                        "static msl::Reg msl_reg_{number}(\"{}\", &{}__msl{});\n",
                        instance.host_name,
                        instance.function,
                        arguments.unwrap_or_default()
                    )
                });
                let registrations: String = registrations.collect();
                format!("#include \"msl_cpu.h\"\nusing namespace metal;\n{body}\n{registrations}")
            }
            // As written, without the library's names brought in: where a file forgets to, that is an error.
            Target::Strict => format!("#include \"msl_strict.h\"\n{body}"),
            Target::Cuda => {
                let entries: String = (0..self.instances.len())
                    .map(|number| self.cuda_entry(number))
                    .collect();
                // Where elements are in a matrix matters to kernels that take them out alone.
                let mut used = self.uses.values();
                let layout = if used.any(|words| words.contains("thread_elements")) {
                    "#define MSL_APPLE_LAYOUT 1\n"
                } else {
                    ""
                };
                format!(
                    "{layout}#include \"msl_cuda.h\"\nnamespace metal {{\n{body}\n#line 1 \"entries\"\n{entries}}}\n"
                )
            }
        }
    }

    /// The function that the driver finds by the kernel's name. See [`crate::cuda`] for what it takes.
    fn cuda_entry(&self, number: usize) -> String {
        let instance = &self.instances[number];
        let kernel = &self.kernels[&instance.function];
        let arguments = instance.arguments.clone().unwrap_or_default();
        let names = kernel.template_names.iter().cloned();
        let replacements: Vec<_> = names.zip(arguments.iter().cloned()).collect();
        let threadgroup = kernel.threadgroup_indices();
        let mut parameters = Vec::new();
        let mut values = Vec::new();
        for parameter in &kernel.parameters {
            let type_name = replace_words(&parameter.type_name, &replacements);
            let name = format!("{}_", parameter.name);
            match &parameter.binding {
                Binding::Buffer(index) => {
                    let (declared, value) = cuda_buffer(*index, &type_name, &name, parameter);
                    parameters.push(declared);
                    values.push(value);
                }
                Binding::Threadgroup(index) => {
                    let offset = if *index == threadgroup[0] {
                        "0".to_owned()
                    } else {
                        format!("msl_offset_{index}")
                    };
                    values.push(format!("({type_name})msl_dynamic_memory({offset})"));
                }
                Binding::Builtin(attribute) => {
                    values.push(format!("msl_bi<{type_name}>(msl_bi_{attribute}())"));
                }
            }
        }
        let offsets = threadgroup.iter().skip(1);
        parameters.extend(offsets.map(|index| format!("unsigned msl_offset_{index}")));
        let arguments = match &instance.arguments {
            Some(arguments) => format!("<{}>", arguments.join(", ")),
            None => String::new(),
        };
        let bounds = kernel.max_threads.as_ref().map(|threads| {
            let threads = replace_words(threads, &replacements);
            format!("__launch_bounds__({threads}) ")
        });
        let name = &instance.host_name;
        format!(
            "#if !defined(MSL_ONLY) || defined(MSL_ONLY_{name})\nextern \"C\" __global__ void {}{name}(\n{}) {{ {}_msl{arguments}({}); }}\n#endif\n",
            bounds.unwrap_or_default(),
            parameters.join(",\n"),
            instance.function,
            values.join(", ")
        )
    }
}

/// A buffer parameter as CUDA declares it, and what the kernel's function is given for it.
///
/// Nothing that a kernel only reads is written by the same dispatch, so such a pointer is `__restrict__`: its loads
/// may go through the read-only cache.
fn cuda_buffer(index: u32, type_name: &str, name: &str, parameter: &Parameter) -> (String, String) {
    let restrict = if parameter.read_only {
        " __restrict__"
    } else {
        ""
    };
    if let Some(referred) = type_name.strip_suffix('&') {
        let pointer = format!("{referred}*{restrict} {name}");
        if !parameter.is_constant() {
            return (pointer, format!("*{name}"));
        }
        let plain = referred.strip_prefix("const ").unwrap_or(referred);
        let plain = plain.strip_suffix(" const").unwrap_or(plain);
        return (
            format!(
                "#if (MSL_BY_VALUE) >> {index} & 1\nconst __grid_constant__ {plain} {name}\n#else\nconst {plain}*{restrict} {name}\n#endif\n"
            ),
            format!("msl_referred<((MSL_BY_VALUE) >> {index} & 1) != 0>::of({name})"),
        );
    }
    match type_name.strip_suffix('*') {
        Some(pointee) => (format!("{pointee}*{restrict} {name}"), name.to_owned()),
        None => (format!("{type_name} {name}"), name.to_owned()),
    }
}
