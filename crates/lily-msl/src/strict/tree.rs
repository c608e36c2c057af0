//! Reads clang's dump of its syntax tree, a line a node.

/// One node.
pub(super) struct Node<'a> {
    /// How deep it lies in the tree.
    pub depth: usize,
    pub kind: &'a str,
    /// Identifies the node, and other nodes name it by that.
    pub address: &'a str,
    /// The declaration that this one declares again.
    pub previous: Option<&'a str>,
    pub place: Option<Place<'a>>,
    /// What stands between the places and the type: a name, and words about a declaration.
    pub words: Vec<&'a str>,
    /// The type as it is written and as it is in full; empty if the node has none.
    pub written: &'a str,
    pub full: &'a str,
    /// What follows the type.
    pub tail: &'a str,
}

/// Where a node comes from: a declaration's name, the start of anything else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place<'a> {
    pub file: &'a str,
    pub line: u32,
}

impl Node<'_> {
    /// Whether `word` stands before or after the type.
    pub fn says(&self, word: &str) -> bool {
        self.words.contains(&word) || self.tail.split(' ').any(|other| other == word)
    }
}

/// The nodes of a dump, in order.
pub(super) fn nodes(dump: &str) -> impl Iterator<Item = Node<'_>> {
    // A place is written relative to the one before it: line and file only where they change.
    let mut last = Place { file: "", line: 0 };
    dump.lines().filter_map(move |line| node(line, &mut last))
}

fn node<'a>(text: &'a str, last: &mut Place<'a>) -> Option<Node<'a>> {
    let start = text.find(|c: char| !matches!(c, '|' | '`' | '-' | ' '))?;
    let text_of_node = &text[start..];
    let type_at = text_of_node.find('\'').unwrap_or(text_of_node.len());
    let (head, rest) = text_of_node.split_at(type_at);
    let mut words = head.split_whitespace();
    let kind = words.next()?;
    let address = words.next().filter(|word| word.starts_with("0x"))?;
    let mut node = Node {
        depth: start / 2,
        kind,
        address,
        previous: None,
        place: None,
        words: Vec::new(),
        written: "",
        full: "",
        tail: "",
    };
    while let Some(word) = words.next() {
        match word {
            "prev" => node.previous = words.next(),
            "parent" => {
                words.next();
            }
            _ => {
                if let Some(place) = place(word, last) {
                    // A declaration's name comes last, everything else has only its extent.
                    if node.place.is_none() || kind.ends_with("Decl") {
                        node.place = Some(place);
                    }
                } else if !matches!(
                    word,
                    "<<invalid" | "<invalid" | "sloc>" | "sloc>>" | "sloc>,"
                ) {
                    node.words.push(word);
                }
            }
        }
    }
    (node.written, node.full, node.tail) = types(rest);
    Some(node)
}

/// `file:line:column`, `line:line:column` or `col:column`, with brackets and commas around.
fn place<'a>(word: &'a str, last: &mut Place<'a>) -> Option<Place<'a>> {
    let word = word.trim_start_matches('<').trim_end_matches(['>', ',']);
    let (before, column) = word.rsplit_once(':')?;
    column.parse::<u32>().ok()?;
    if before != "col" {
        let (file, line) = before.rsplit_once(':')?;
        last.line = line.parse().ok()?;
        if file != "line" {
            last.file = file;
        }
    }
    Some(*last)
}

/// `'written':'full' tail`, where the second may be missing.
pub(super) fn types(text: &str) -> (&str, &str, &str) {
    let quoted = |text: &'_ str| -> Option<usize> { text.strip_prefix('\'')?.find('\'') };
    let Some(length) = quoted(text) else {
        return ("", "", text);
    };
    let (written, rest) = (&text[1..=length], &text[length + 2..]);
    match rest.strip_prefix(':') {
        Some(second) if second.starts_with('\'') => {
            let length = quoted(second).unwrap_or(second.len() - 2);
            (written, &second[1..=length], &second[length + 2..])
        }
        _ => (written, written, rest),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_follow_from_those_before() {
        let dump = "TranslationUnitDecl 0x1 <<invalid sloc>> <invalid sloc>\n\
            |-VarDecl 0x2 <shim.h:1:1, col:9> col:7 g '__global float'\n\
            `-FunctionDecl 0x3 prev 0x2 <k.metal:4:1, line:6:1> line:4:6 used f 'void ()'\n  \
            `-ImplicitCastExpr 0x4 <line:5:3, col:8> 'bfloat':'__bf16' <FloatingCast>\n    \
            `-DeclRefExpr 0x5 <col:3> 'float' lvalue Function 0x3 'f' 'void ()'\n";
        let all: Vec<Node> = nodes(dump).collect();
        let places: Vec<_> = all
            .iter()
            .map(|node| node.place.map(|place| (place.file, place.line)))
            .collect();
        let expected = [
            None,
            Some(("shim.h", 1)),
            Some(("k.metal", 4)),
            Some(("k.metal", 5)),
            Some(("k.metal", 5)),
        ];
        assert_eq!(places, expected);
        assert_eq!(
            all.iter().map(|node| node.depth).collect::<Vec<_>>(),
            [0, 1, 1, 2, 3]
        );
        assert_eq!(all[1].words, ["g"]);
        assert_eq!(all[2].previous, Some("0x2"));
        assert!(all[2].says("used"));
        assert_eq!((all[3].written, all[3].full), ("bfloat", "__bf16"));
        assert_eq!(all[3].tail, " <FloatingCast>");
    }
}
