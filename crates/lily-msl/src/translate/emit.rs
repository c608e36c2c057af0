//! What goes around the translated source: headers before it, entry points and registrations after it.

use super::kernel::{Binding, Kernel};
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
                format!("#include \"msl_cuda.h\"\nnamespace metal {{\n{body}\n{entries}}}\n")
            }
        }
    }

    fn cuda_entry(&self, number: usize) -> String {
        let instance = &self.instances[number];
        let kernel = &self.kernels[&instance.function];
        let arguments = instance.arguments.clone().unwrap_or_default();
        let names = kernel.template_names.iter().cloned();
        let replacements: Vec<_> = names.zip(arguments.iter().cloned()).collect();
        let mut parameters = Vec::new();
        let mut values = Vec::new();
        for parameter in &kernel.parameters {
            let type_name = replace_words(&parameter.type_name, &replacements);
            let name = &parameter.name;
            match &parameter.binding {
                Binding::Buffer(_) => match type_name.strip_suffix('&') {
                    Some(referred) => {
                        parameters.push(format!("{referred}* {name}_"));
                        values.push(format!("*{name}_"));
                    }
                    None => {
                        parameters.push(format!("{type_name} {name}_"));
                        values.push(format!("{name}_"));
                    }
                },
                Binding::Threadgroup(index) => {
                    values.push(format!("({type_name})msl_dynamic_smem({index})"));
                }
                Binding::Builtin(attribute) => {
                    values.push(format!("msl_bi<{type_name}>(msl_bi_{attribute}())"));
                }
            }
        }
        let arguments = match &instance.arguments {
            Some(arguments) => format!("<{}>", arguments.join(", ")),
            None => String::new(),
        };
        format!(
            "extern \"C\" __global__ void {}({}) {{ {}{arguments}({}); }}\n",
            instance.host_name,
            parameters.join(", "),
            instance.function,
            values.join(", ")
        )
    }
}
