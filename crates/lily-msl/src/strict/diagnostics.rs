//! Reads clang's messages.

use crate::translate::Rejection;

use super::in_msl_words;

/// One message of clang's: `file:line:column: severity: text`.
struct Message<'a> {
    file: &'a str,
    line: u32,
    severity: &'a str,
    text: &'a str,
}

/// The errors in a text of messages. One inside the shim (a failed assertion of it, say) is reported where the
/// kernel called for it, which the notes after it tell.
pub(super) fn errors(text: &str, is_ours: &dyn Fn(&str) -> bool) -> Vec<Rejection> {
    let messages: Vec<Message> = text.lines().filter_map(parse).collect();
    let mut found = Vec::new();
    for (at, message) in messages.iter().enumerate() {
        if !matches!(message.severity, "error" | "fatal error") {
            continue;
        }
        let notes = || {
            messages[at + 1..]
                .iter()
                .take_while(|message| message.severity == "note")
        };
        let place = if is_ours(message.file) {
            message
        } else {
            let caller = notes().find(|note| is_ours(note.file));
            caller.unwrap_or(message)
        };
        let mut text = message.text.to_owned();
        if text.starts_with("static assertion failed")
            && let Some((_, meaning)) = text.rsplit_once(": ")
        {
            text = meaning.to_owned();
        }
        // Why no function of the library fits.
        if let Some(note) = notes().find(|note| note.text.starts_with("candidate")) {
            text = format!("{text} ({})", note.text);
        }
        let rejection = Rejection {
            file: place.file.to_owned(),
            line: place.line,
            message: in_msl_words(&text),
        };
        if !found.contains(&rejection) {
            found.push(rejection);
        }
    }
    found
}

fn parse(line: &str) -> Option<Message<'_>> {
    let severity_at = [": error: ", ": fatal error: ", ": note: ", ": warning: "]
        .iter()
        .filter_map(|mark| line.find(mark))
        .min()?;
    let (place, rest) = (&line[..severity_at], &line[severity_at + 2..]);
    let (severity, text) = rest.split_once(": ")?;
    let mut parts = place.rsplitn(3, ':');
    let (_column, line) = (parts.next()?, parts.next()?);
    Some(Message {
        file: parts.next()?,
        line: line.parse().ok()?,
        severity,
        text,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_in_the_shim_is_reported_where_it_was_called_for() {
        let text = [
            "msl_strict.h:5:1: error: static assertion failed due to requirement 'a == b': sizes",
            "k.metal:7:3: note: in instantiation of function template specialization",
            "k.metal:9:2: error: use of '__local int'",
            "2 errors generated.",
        ]
        .join("\n");
        let found = errors(&text, &|name| name == "k.metal");
        let found: Vec<_> = found.iter().map(ToString::to_string).collect();
        assert_eq!(
            found,
            [
                "k.metal:7: error: sizes",
                "k.metal:9: error: use of 'threadgroup int'",
            ]
        );
    }
}
