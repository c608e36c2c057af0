//! What begins with a slash.

use crate::failure::Failure;
use crate::format::pairs;

/// A command, with what stands behind its name.
#[derive(Debug, PartialEq, Eq)]
pub enum Command<'a> {
    /// Lists the commands.
    Help,
    /// Shows the system message, or sets it, or clears it.
    System(Setting<'a>),
    /// Tells whether the model reasons first, or turns that on or off.
    Think(Option<bool>),
    /// Forgets the messages.
    Clear,
    /// Answers the last message again.
    Retry,
    /// Writes the conversation to a file.
    Save(&'a str),
    /// Goes on with the conversation of a file.
    Load(&'a str),
    /// Lists the tools, or reads them from a file, or takes them away.
    Tools(Setting<'a>),
}

/// What becomes of something that can be shown, set and cleared.
#[derive(Debug, PartialEq, Eq)]
pub enum Setting<'a> {
    /// It is shown.
    Show,
    /// It is set.
    Set(&'a str),
    /// It is cleared.
    Clear,
}

impl<'a> Setting<'a> {
    fn new(argument: &'a str) -> Self {
        match argument {
            "" => Setting::Show,
            "off" => Setting::Clear,
            other => Setting::Set(other),
        }
    }
}

/// The command that a line is; `None` for a message.
pub fn parse(line: &str) -> Option<Result<Command<'_>, Failure>> {
    let rest = line.strip_prefix('/')?;
    let (name, argument) = rest
        .split_once(char::is_whitespace)
        .map_or((rest, ""), |(name, argument)| (name, argument.trim()));
    Some(command(name, argument))
}

fn command<'a>(name: &str, argument: &'a str) -> Result<Command<'a>, Failure> {
    let alone = |command| {
        if argument.is_empty() {
            Ok(command)
        } else {
            Err(Failure::usage(format!("/{name} takes nothing behind it")))
        }
    };
    let file = || {
        if argument.is_empty() {
            Err(Failure::usage(format!("/{name} needs a file"))
                .help(format!("/{name} FILE, e.g. /{name} talk.json")))
        } else {
            Ok(argument)
        }
    };
    match name {
        "help" => alone(Command::Help),
        "system" => Ok(Command::System(Setting::new(argument))),
        "think" => match argument {
            "" => Ok(Command::Think(None)),
            "on" => Ok(Command::Think(Some(true))),
            "off" => Ok(Command::Think(Some(false))),
            _ => Err(Failure::usage(format!("/think {argument} is not known"))
                .help("/think on or /think off")),
        },
        "clear" => alone(Command::Clear),
        "retry" => alone(Command::Retry),
        "save" => Ok(Command::Save(file()?)),
        "load" => Ok(Command::Load(file()?)),
        "tools" => Ok(Command::Tools(Setting::new(argument))),
        _ => Err(Failure::usage(format!("/{name} is not a command"))
            .help("/help lists the commands; a message may begin with / behind a space")),
    }
}

/// What `/help` prints.
pub fn help() -> String {
    let rows = [
        ("/help", "this list"),
        (
            "/system [TEXT|off]",
            "show, set or clear the system message",
        ),
        (
            "/think [on|off]",
            "whether the model reasons before it answers",
        ),
        (
            "/clear",
            "forget the messages; the system message and the tools stay",
        ),
        ("/retry", "answer the last message again"),
        (
            "/save FILE",
            "write the conversation to a new file, as JSON",
        ),
        ("/load FILE", "go on with a conversation that was saved"),
        (
            "/tools [FILE|off]",
            "list, read or take away the tools the model may call",
        ),
    ];
    let commands = pairs(&rows.map(|(name, what)| (name, what.to_string())));
    let keys = pairs(
        &[
            ("Ctrl-C", "stops the answer, or empties the line"),
            ("Ctrl-D", "leaves"),
            (
                "Alt-Enter",
                "begins a new line; pasted text keeps its lines",
            ),
            (
                "\"\"\"",
                "before and behind a message holds many lines anywhere",
            ),
        ]
        .map(|(name, what)| (name, what.to_string())),
    );
    format!("{commands}\n{keys}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(line: &str) -> String {
        parse(line).unwrap().unwrap_err().to_text()
    }

    #[test]
    fn commands_are_known_by_name_and_take_what_is_behind() {
        for (line, expected) in [
            ("/help", Command::Help),
            ("/system", Command::System(Setting::Show)),
            (
                "/system  Be brief.\nAlways. ",
                Command::System(Setting::Set("Be brief.\nAlways.")),
            ),
            ("/system off", Command::System(Setting::Clear)),
            ("/think", Command::Think(None)),
            ("/think on", Command::Think(Some(true))),
            ("/think off", Command::Think(Some(false))),
            ("/clear ", Command::Clear),
            ("/retry", Command::Retry),
            ("/save a file.json", Command::Save("a file.json")),
            ("/load\tx", Command::Load("x")),
            ("/tools", Command::Tools(Setting::Show)),
            ("/tools t.json", Command::Tools(Setting::Set("t.json"))),
            ("/tools off", Command::Tools(Setting::Clear)),
        ] {
            assert_eq!(parse(line).unwrap().unwrap(), expected, "{line}");
        }
        assert!(parse("What is 1/2?").is_none());
        assert!(parse(" /etc/hosts is what?").is_none());
    }

    #[test]
    fn what_is_wrong_is_named_with_its_remedy() {
        for (line, named, remedy) in [
            ("/exit", "/exit is not a command", "/help"),
            ("/", "/ is not a command", "/help"),
            ("/thinking on", "/thinking is", "/help"),
            ("/think maybe", "/think maybe", "/think on"),
            ("/save", "/save needs a file", "/save FILE"),
            ("/load  ", "/load needs a file", "/load FILE"),
            ("/clear all", "/clear takes nothing", ""),
        ] {
            let text = refused(line);
            assert!(
                text.contains(named) && text.contains(remedy),
                "{line}: {text}"
            );
        }
    }

    #[test]
    fn help_has_every_command() {
        let help = help();
        for name in [
            "help", "system", "think", "clear", "retry", "save", "load", "tools",
        ] {
            assert!(help.contains(&format!("  /{name}")), "{help}");
            assert!(!matches!(parse(&format!("/{name}")), Some(Err(failure))
                if failure.to_text().contains("not a command")));
        }
    }
}
