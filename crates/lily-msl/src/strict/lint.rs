//! What C++ for OpenCL takes and MSL does not, read off clang's syntax tree.

use std::collections::{BTreeMap, BTreeSet};

use crate::translate::Rejection;

use super::tree::{Node, Place, nodes, types};

/// Keywords of MSL's that mean nothing to clang, nor to the translator.
const KEYWORDS: [&str; 5] = [
    "vertex",
    "fragment",
    "ray_data",
    "object_data",
    "threadgroup_imageblock",
];

const NO_SPACE: &str = "a pointer or a reference without an address space";

/// Everything that is found, in the order of the tree.
pub(super) fn lint(dump: &str, is_ours: &dyn Fn(&str) -> bool) -> Vec<Rejection> {
    let mut lint = Lint::default();
    let mut skipped: Option<usize> = None;
    for node in nodes(dump) {
        if skipped.is_some_and(|depth| node.depth > depth) {
            continue;
        }
        skipped = None;
        while lint
            .open
            .last()
            .is_some_and(|open| open.depth >= node.depth)
        {
            lint.open.pop();
        }
        if is_made_by_the_compiler(&node) {
            skipped = Some(node.depth);
            continue;
        }
        if let Some(place) = node.place {
            if is_ours(place.file) {
                lint.node(&node, place);
            } else if node.kind == "FunctionDecl" {
                lint.library.extend(node.words.last());
            }
        }
        lint.enter(&node);
    }
    lint.recursion();
    lint.found
}

/// Implicit and defaulted members, whose references are in no address space by design.
fn is_made_by_the_compiler(node: &Node) -> bool {
    let member = matches!(
        node.kind,
        "CXXConstructorDecl" | "CXXMethodDecl" | "CXXDestructorDecl" | "CXXConversionDecl"
    );
    node.kind.ends_with("Decl") && node.says("implicit") || member && node.says("default")
}

/// A declaration that is open where the walk stands.
struct Open<'a> {
    depth: usize,
    kind: &'a str,
    address: &'a str,
}

#[derive(Default)]
struct Lint<'a> {
    open: Vec<Open<'a>>,
    found: Vec<Rejection>,
    /// For each function the functions that it calls, by the address of their first declarations.
    calls: BTreeMap<&'a str, BTreeSet<&'a str>>,
    /// Names and places of our own functions.
    functions: BTreeMap<&'a str, (&'a str, Place<'a>)>,
    /// Names of the library's functions.
    library: BTreeSet<&'a str>,
    /// First declarations of those that are declared again.
    first: BTreeMap<&'a str, &'a str>,
    /// The depth of a call's callee, if the next node is the object that a method is called on; and of that
    /// object's conversion, if the one after it tells where the object lies.
    object_of: Option<usize>,
    converted: Option<usize>,
}

impl<'a> Lint<'a> {
    fn enter(&mut self, node: &Node<'a>) {
        if !node.kind.ends_with("Decl") {
            return;
        }
        if let Some(previous) = node.previous {
            self.first.insert(node.address, self.first_of(previous));
        }
        self.open.push(Open {
            depth: node.depth,
            kind: node.kind,
            address: node.address,
        });
    }

    /// The innermost function that is open.
    fn function(&self) -> Option<&'a str> {
        let open = self.open.iter().rev().find(|open| is_function(open.kind))?;
        Some(self.first_of(open.address))
    }

    /// The first declaration of what is declared at `address`.
    fn first_of(&self, address: &'a str) -> &'a str {
        self.first.get(address).copied().unwrap_or(address)
    }

    fn report(&mut self, place: Place, message: impl Into<String>) {
        let rejection = Rejection {
            file: place.file.to_owned(),
            line: place.line,
            message: message.into(),
        };
        if !self.found.contains(&rejection) {
            self.found.push(rejection);
        }
    }

    fn node(&mut self, node: &Node<'a>, place: Place<'a>) {
        let mut types = words(node.written).chain(words(node.full));
        if types.any(|word| word == "double") {
            self.report(place, "MSL has no double");
        }
        let name = node.words.last().copied().unwrap_or_default();
        if node.kind.ends_with("Decl") && KEYWORDS.contains(&name) {
            self.report(place, format!("{name} is a keyword of MSL"));
        }
        match node.kind {
            "VarDecl" | "ParmVarDecl" | "FieldDecl" | "TypedefDecl" | "TypeAliasDecl" => {
                if node.full.contains("__generic") || node.written.contains("__generic") {
                    self.report(place, NO_SPACE);
                }
                if node.kind == "VarDecl" {
                    self.variable(node, place);
                }
            }
            kind if is_function(kind) => self.declared(node, place, name),
            "CStyleCastExpr"
            | "CXXReinterpretCastExpr"
            | "CXXStaticCastExpr"
            | "CXXFunctionalCastExpr"
                if node.full.contains("__generic") =>
            {
                self.report(place, "a cast to a pointer without an address space");
            }
            "LambdaExpr" => self.report(
                place,
                "a lambda: versions of MSL differ on them, write a function",
            ),
            "GotoStmt" | "IndirectGotoStmt" => self.report(place, "MSL has no goto"),
            "GCCAsmStmt" => self.report(place, "MSL has no assembly"),
            _ => {}
        }
        self.bfloat(node, place);
        self.object(node, place);
        self.call(node);
    }

    /// A function and its result; its parameters have nodes of their own.
    fn declared(&mut self, node: &Node<'a>, place: Place<'a>, name: &'a str) {
        let result = node.written.split('(').next().unwrap_or_default();
        if result.contains("__generic") {
            self.report(place, NO_SPACE);
        }
        // Apple's are no templates: where both fit, neither is better.
        let inside =
            |open: &Open| open.kind != "TranslationUnitDecl" && open.kind != "FunctionTemplateDecl";
        if self.library.contains(name) && !self.open.iter().any(inside) {
            self.report(place, format!("{name} is a function of the library"));
        }
        let first = self.first_of(node.previous.unwrap_or(node.address));
        self.functions.insert(first, (name, place));
    }

    /// Variables that live longer than a thread must be constants.
    fn variable(&mut self, node: &Node<'a>, place: Place<'a>) {
        let of_function = self.function().is_some();
        if of_function && !node.says("static") && !node.says("extern") {
            return;
        }
        if !is_constant(node.full) {
            let name = node.words.last().copied().unwrap_or_default();
            let message = format!("{name} outlives its function, so it must be in constant memory");
            self.report(place, message);
        }
    }

    /// Nothing becomes a bfloat by itself.
    fn bfloat(&mut self, node: &Node<'a>, place: Place<'a>) {
        let is_bfloat = |full: &str| words(full).last() == Some("__bf16");
        let implicit = node.kind == "ImplicitCastExpr"
            && (node.says("<FloatingCast>") || node.says("<IntegralToFloating>"))
            && !node.says("part_of_explicit_cast")
            && is_bfloat(node.full);
        let compound = node.kind == "CompoundAssignOperator"
            && is_bfloat(node.full)
            && node
                .tail
                .split_once("ComputeResultTy=")
                .is_some_and(|(_, result)| !is_bfloat(types(result).1));
        if implicit || compound {
            self.report(
                place,
                "no number becomes a bfloat by itself: write bfloat(...)",
            );
        }
    }

    /// A method that names no address space works on objects in thread memory.
    fn object(&mut self, node: &Node<'a>, place: Place<'a>) {
        let elsewhere = |full: &str| {
            let plain = without_arguments(full);
            let spaces = ["__global", "__local", "__constant"];
            spaces.iter().any(|space| plain.contains(space))
        };
        if let Some(depth) = self.converted.take()
            && node.depth == depth + 1
            && elsewhere(node.full)
        {
            self.report(
                place,
                "a method without an address space, of an object that is not in thread memory",
            );
        }
        if let Some(depth) = self.object_of.take()
            && node.depth == depth + 1
            && node.says("<AddressSpaceConversion>")
        {
            self.converted = Some(node.depth);
        }
        if node.kind == "MemberExpr" && node.full == "<bound member function type>" {
            self.object_of = Some(node.depth);
        }
    }

    /// A reference to a function, which is a call: MSL has no pointers to functions.
    fn call(&mut self, node: &Node<'a>) {
        let Some(caller) = self.function() else {
            return;
        };
        let mut after = node.tail.split(' ').skip_while(|word| match node.kind {
            "DeclRefExpr" => !matches!(*word, "Function" | "CXXMethod"),
            "MemberExpr" => !word.starts_with(['.', '-']),
            _ => true,
        });
        let callee = after.nth(1).filter(|word| word.starts_with("0x"));
        if let Some(callee) = callee {
            let first = self.first_of(callee);
            self.calls.entry(caller).or_default().insert(first);
        }
    }

    /// Functions that come back to themselves.
    fn recursion(&mut self) {
        let functions: Vec<_> = self
            .functions
            .iter()
            .map(|(at, what)| (*at, *what))
            .collect();
        for (start, (name, place)) in functions {
            let mut seen = BTreeSet::new();
            let mut open: Vec<&str> = self
                .calls
                .get(start)
                .into_iter()
                .flatten()
                .copied()
                .collect();
            while let Some(next) = open.pop() {
                if seen.insert(next) {
                    open.extend(self.calls.get(next).into_iter().flatten());
                }
            }
            if seen.contains(start) {
                self.report(place, format!("MSL has no recursion: {name} calls itself"));
            }
        }
    }
}

fn is_function(kind: &str) -> bool {
    matches!(
        kind,
        "FunctionDecl"
            | "CXXMethodDecl"
            | "CXXConstructorDecl"
            | "CXXConversionDecl"
            | "CXXDestructorDecl"
    )
}

/// A type without the arguments of its templates.
fn without_arguments(full: &str) -> String {
    let mut depth = 0;
    full.chars()
        .filter(|c| {
            depth += i32::from(*c == '<');
            let outside = depth == 0;
            depth -= i32::from(*c == '>');
            outside
        })
        .collect()
}

/// Whether a variable of this type itself lies in constant memory: of a pointer, what follows the last star tells.
fn is_constant(full: &str) -> bool {
    let plain = without_arguments(full);
    let space = plain.rsplit(['*', '&']).next();
    space.is_some_and(|space| space.contains("__constant"))
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
        .filter(|word| !word.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variable_lies_where_its_type_says_not_what_it_points_to() {
        for (full, expected) in [
            ("const __constant float[4]", true),
            ("const __constant Map<float *>", true),
            ("const __constant float *const __constant", true),
            ("const __constant float *__global", false),
            ("__global float", false),
        ] {
            assert_eq!(is_constant(full), expected, "{full}");
        }
    }
}
