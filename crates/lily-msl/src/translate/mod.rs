//! From the Metal Shading Language to C++: kernels and their attributes, instantiations with a host name,
//! threadgroup variables, function constants, address spaces and literals are rewritten; everything else
//! is C++ already and stays as it is, on the line where it was.

mod body;
mod elements;
mod emit;
mod kernel;
mod tokens;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use crate::lexer::{Token, lex};
use crate::preprocess::{Sources, preprocess};
use crate::signature::{FunctionConstant, KernelSignature};

use kernel::Kernel;
use tokens::{
    concat, line_structure, matching, significant, skip, spaced, type_text, without_attributes,
};

/// What the translation is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Target {
    /// C++17 for the emulator.
    Emulated,
    /// CUDA, for a compiler that takes device code by default.
    Cuda,
    /// C++ for OpenCL, in which address spaces are part of types.
    Strict,
}

/// A translated file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Translated {
    /// Source text for the target's compiler; its messages name the lines of the original.
    pub code: String,
    /// The kernels that a host can ask for.
    pub kernels: Vec<KernelSignature>,
}

/// One thing that the translator does not accept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rejection {
    /// The source file.
    pub file: String,
    /// The line in it.
    pub line: u32,
    /// What is wrong.
    pub message: String,
}

impl fmt::Display for Rejection {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}:{}: error: {}", self.file, self.line, self.message)
    }
}

/// Why a file was not translated.
#[derive(Debug, thiserror::Error)]
pub enum TranslateError {
    /// The preprocessor failed, an include is unknown, or there is no compiler.
    #[error("{0}")]
    Preprocess(String),
    /// The translator rejects the file.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))]
    Rejected(Vec<Rejection>),
}

/// Translates one file that includes none of the project's headers.
pub fn translate(source: &str, file: &str, target: Target) -> Result<Translated, TranslateError> {
    translate_sources(&Sources::new().with(file, source), file, target)
}

/// Translates `file`, which may include other files of `sources`.
pub fn translate_sources(
    sources: &Sources,
    file: &str,
    target: Target,
) -> Result<Translated, TranslateError> {
    let text = preprocess(sources, file).map_err(TranslateError::Preprocess)?;
    let lexed = lex(&text, target == Target::Cuda);
    let mut translator = Translator {
        target,
        files: lexed.files,
        kernels: BTreeMap::new(),
        instances: Vec::new(),
        constants: Vec::new(),
        constant_names: BTreeSet::new(),
        type_names: BTreeSet::new(),
        uses: BTreeMap::new(),
        next_slot: 0,
        rejections: Vec::new(),
    };
    if target == Target::Strict {
        translator.find_type_names(&lexed.tokens);
    }
    let out = translator.top(&lexed.tokens).unwrap_or_else(|rejection| {
        translator.rejections.push(rejection);
        Vec::new()
    });
    translator.check_names();
    if !translator.rejections.is_empty() {
        return Err(TranslateError::Rejected(translator.rejections));
    }
    Ok(Translated {
        code: translator.emit(&concat(&out)),
        kernels: translator.signatures(),
    })
}

/// What comes before the parameters. Attributes may have parentheses of their own.
fn head_of(all: &[Token]) -> &[Token] {
    let mut depth = 0;
    for (at, token) in all.iter().enumerate() {
        match token.text.as_str() {
            "[[" => depth += 1,
            "]]" => depth -= 1,
            "(" if depth == 0 => return &all[..at],
            _ => {}
        }
    }
    all
}

fn is_identifier(name: &str) -> bool {
    name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

/// A kernel under the name that a host uses.
struct Instance {
    host_name: String,
    function: String,
    /// Template arguments as written, if the kernel is a template.
    arguments: Option<Vec<String>>,
    line: u32,
    file: usize,
}

struct Translator {
    target: Target,
    files: Vec<String>,
    kernels: BTreeMap<String, Kernel>,
    instances: Vec<Instance>,
    constants: Vec<FunctionConstant>,
    /// Function constants, and constants computed from them.
    constant_names: BTreeSet<String>,
    /// Names that may stand for a vector type (strict target only).
    type_names: BTreeSet<String>,
    /// For each declaration at the top level, the words in it.
    uses: BTreeMap<String, BTreeSet<String>>,
    next_slot: u32,
    rejections: Vec<Rejection>,
}

type Run = Result<Vec<Token>, Rejection>;

impl Translator {
    fn rejection(&self, at: &Token, message: impl Into<String>) -> Rejection {
        Rejection {
            file: self.files[at.file].clone(),
            line: at.line,
            message: message.into(),
        }
    }

    fn reject(&mut self, at: &Token, message: impl Into<String>) {
        let rejection = self.rejection(at, message);
        self.rejections.push(rejection);
    }

    /// `matching`, or a rejection.
    fn close(
        &self,
        tokens: &[Token],
        at: usize,
        open: &str,
        close: &str,
    ) -> Result<usize, Rejection> {
        matching(tokens, at, open, close)
            .ok_or_else(|| self.rejection(&tokens[at], format!("unbalanced {open}")))
    }

    fn find_type_names(&mut self, all: &[Token]) {
        let words = significant(all);
        for three in words.windows(3) {
            let [first, second, third] = three else {
                continue;
            };
            let parameter = matches!(first.text.as_str(), "typename" | "class");
            let alias = first.text == "using" && third.text == "=";
            if parameter || alias {
                self.type_names.insert(second.text.clone());
            }
        }
    }

    /// Host names must be told apart, and be names.
    fn check_names(&mut self) {
        let mut seen = BTreeSet::new();
        let mut bad = Vec::new();
        for instance in &self.instances {
            if !seen.insert(&instance.host_name) {
                bad.push(Rejection {
                    file: self.files[instance.file].clone(),
                    line: instance.line,
                    message: format!("two kernels named {}", instance.host_name),
                });
            }
            // The driver finds a kernel by the name of a C function.
            if self.target == Target::Cuda && !is_identifier(&instance.host_name) {
                bad.push(Rejection {
                    file: self.files[instance.file].clone(),
                    line: instance.line,
                    message: format!("kernel name {:?} is no identifier", instance.host_name),
                });
            }
        }
        self.rejections.extend(bad);
    }

    /// Walks the declarations of a file, stepping into namespaces.
    fn top(&mut self, all: &[Token]) -> Run {
        let mut out = Vec::new();
        let mut at = 0;
        while at < all.len() {
            let token = &all[at];
            if !token.is_significant() || token.text == "}" {
                out.push(token.clone());
                at += 1;
                continue;
            }
            if token.text == "namespace" {
                while at < all.len() {
                    out.push(all[at].clone());
                    at += 1;
                    if matches!(all[at - 1].text.as_str(), "{" | ";") {
                        break;
                    }
                }
                continue;
            }
            let end = self.declaration_end(all, at)?;
            let declaration = &all[at..end];
            self.note_uses(declaration);
            out.extend(self.declaration(declaration)?);
            at = end;
        }
        Ok(out)
    }

    /// One past the declaration that starts at `start`: it ends at `;` or at the `}` of its body.
    fn declaration_end(&self, all: &[Token], start: usize) -> Result<usize, Rejection> {
        let mut depth = 0;
        let mut at = start;
        while at < all.len() {
            match all[at].text.as_str() {
                "(" | "[" | "[[" => depth += 1,
                ")" | "]" | "]]" => depth -= 1,
                ";" if depth == 0 => return Ok(at + 1),
                "{" if depth == 0 => {
                    let end = self.close(all, at, "{", "}")?;
                    let next = skip(all, end + 1);
                    let before = significant(&all[start..at]);
                    let initialiser = before.last().is_some_and(|token| token.text == "=");
                    let is_type = matches!(
                        before.first().map(|token| token.text.as_str()),
                        Some("struct" | "class" | "union" | "enum")
                    );
                    if next < all.len() && all[next].text == ";" {
                        return Ok(next + 1);
                    }
                    if initialiser || is_type {
                        let semicolon = (end..all.len()).find(|&i| all[i].text == ";");
                        return Ok(semicolon.unwrap_or(end) + 1);
                    }
                    return Ok(end + 1);
                }
                _ => {}
            }
            at += 1;
        }
        Ok(all.len())
    }

    /// Remembers which words a declaration holds, under its name.
    fn note_uses(&mut self, declaration: &[Token]) {
        let all = significant(declaration);
        let mut at = 0;
        if all[0].text == "template" && all.get(1).is_some_and(|token| token.text == "<") {
            at = matching(&all, 1, "<", ">").map_or(0, |end| end + 1);
        }
        let body = without_attributes(&all[at..]);
        let is_type = body
            .first()
            .is_some_and(|token| matches!(token.text.as_str(), "struct" | "class" | "union"));
        let name = if is_type {
            body.get(1)
        } else {
            body.iter()
                .position(|token| matches!(token.text.as_str(), "(" | "=" | "[" | ";"))
                .and_then(|end| body[..end].last())
        };
        if let Some(name) = name {
            let words = all.iter().map(|token| token.text.clone());
            self.uses
                .entry(name.text.clone())
                .or_default()
                .extend(words);
        }
    }

    /// Function constants that `function` reads, itself or through what it calls.
    fn constants_of(&self, function: &str) -> Vec<FunctionConstant> {
        let mut seen = BTreeSet::new();
        let mut open = vec![function];
        while let Some(name) = open.pop() {
            if !seen.insert(name) {
                continue;
            }
            if let Some(words) = self.uses.get(name) {
                open.extend(words.iter().map(String::as_str));
            }
        }
        let mut used: Vec<_> = self
            .constants
            .iter()
            .filter(|constant| seen.contains(constant.name.as_str()))
            .cloned()
            .collect();
        used.sort_by_key(|constant| constant.index);
        used
    }

    fn declaration(&mut self, declaration: &[Token]) -> Run {
        let all = significant(declaration);
        let position = |text: &str| all.iter().position(|token| token.text == text);
        let head = head_of(&all);
        let first = all[0].text.as_str();
        if first == "using" && position("namespace").is_some() {
            return Ok(self.body(declaration, false));
        }
        if first == "template" && all.get(1).is_some_and(|token| token.text != "<") {
            return self.instantiation(declaration, &all);
        }
        if head.iter().any(|token| token.text == "kernel") {
            return self.kernel(declaration);
        }
        if position("function_constant").is_some() {
            return self.function_constant(declaration, &all);
        }
        let is_constant = position("=").is_some_and(|equals| {
            let before = &all[..equals];
            before.iter().take(4).any(|token| token.text == "constant")
                && before.iter().all(|token| token.text != "(")
        });
        if is_constant && !matches!(first, "template" | "struct" | "using") {
            return Ok(self.global_constant(declaration, &all));
        }
        Ok(self.body(declaration, false))
    }

    /// `constant T NAME [[function_constant(n)]];`
    fn function_constant(&mut self, declaration: &[Token], all: &[Token]) -> Run {
        let malformed = || self.rejection(&all[0], "malformed function constant");
        let bracket = all
            .iter()
            .position(|token| token.text == "[[")
            .filter(|&at| at > 1)
            .ok_or_else(malformed)?;
        let name = all[bracket - 1].text.clone();
        let type_name = type_text(&all[..bracket - 1]);
        let index: u32 = all
            .get(bracket + 3)
            .and_then(|token| token.text.parse().ok())
            .ok_or_else(malformed)?;
        if let Some(other) = self.constants.iter().find(|other| other.index == index) {
            let message = format!("function constant {index} is {} and {name}", other.name);
            self.reject(&all[0], message);
        }
        self.constants.push(FunctionConstant {
            index,
            name: name.clone(),
            type_name: type_name.clone(),
        });
        self.constant_names.insert(name.clone());
        let line = all[0].line;
        let text = match self.target {
            Target::Emulated => format!(
                "static {type_name} {name}; static bool {name}_fc_defined; static msl::FcReg {name}_fc_reg({index}, &{name}, sizeof({name}), &{name}_fc_defined);"
            ),
            Target::Cuda => format!(
                "\n#ifdef MSL_FC_{index}\nconstexpr {type_name} {name} = MSL_FC_{index}; constexpr bool {name}_fc_defined = true;\n#else\nconstexpr {type_name} {name} = {type_name}(); constexpr bool {name}_fc_defined = false;\n#endif\n#line {line}\n"
            ),
            Target::Strict => format!(
                "extern const __constant {type_name} {name}; static const __constant bool {name}_fc_defined = true;"
            ),
        };
        let mut out = vec![Token::raw(text)];
        out.extend(line_structure(declaration));
        Ok(out)
    }

    /// `constant T NAME = value;`, perhaps computed from function constants.
    fn global_constant(&mut self, declaration: &[Token], all: &[Token]) -> Vec<Token> {
        let qualifier =
            |token: &Token| matches!(token.text.as_str(), "constexpr" | "const" | "static");
        let equals = all
            .iter()
            .position(|token| token.text == "=")
            .expect("an initialiser");
        let name = all[equals - 1].text.clone();
        let value = &all[equals + 1..all.len() - 1];
        let derived = value
            .iter()
            .any(|token| self.constant_names.contains(&token.text));
        if derived && self.target != Target::Strict && name != "]" {
            self.constant_names.insert(name.clone());
            let kept: Vec<_> = all[..equals - 1]
                .iter()
                .filter(|token| !qualifier(token))
                .cloned()
                .collect();
            let type_name = type_text(&kept);
            let value = spaced(&self.body(value, false));
            let line = all[0].line;
            // The value is known only once the constants are set, so each use computes it.
            let text = format!(
                "\nstatic inline {type_name} {name}_fn() {{ return {value}; }}\n#define {name} ({name}_fn())\n#line {line}\n"
            );
            let mut out = vec![Token::raw(text)];
            out.extend(line_structure(declaration));
            return out;
        }
        let without = |drop: &dyn Fn(&Token) -> bool| -> Vec<Token> {
            declaration
                .iter()
                .filter(|token| !drop(token))
                .cloned()
                .collect()
        };
        let array = name == "]";
        let is_constexpr = all.iter().any(|token| token.text == "constexpr");
        let prefix = match self.target {
            Target::Strict => return self.body(declaration, false),
            Target::Emulated => "static const ",
            Target::Cuda if is_constexpr || !array => "static constexpr ",
            Target::Cuda => "__constant__ const ",
        };
        let mut out = vec![Token::raw(prefix)];
        out.extend(self.body(&without(&qualifier), false));
        out
    }
}
