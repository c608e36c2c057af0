//! What tells of the command line itself: completions and manual pages.

mod support;

use support::lily;

const COMMANDS: [&str; 9] = [
    "run",
    "chat",
    "serve",
    "plan",
    "inspect",
    "bench",
    "verify",
    "completions",
    "man",
];

#[test]
fn completions_have_every_command_and_its_flags() {
    for (shell, part) in [
        ("bash", "            lily,{})"),
        ("zsh", "({})\n"),
        ("fish", " -a \"{}\" -d "),
    ] {
        let script = lily(&["completions", shell]).worked().output;
        for name in COMMANDS {
            let part = part.replace("{}", name);
            assert!(script.contains(&part), "{shell} {name}");
        }
        assert!(script.contains("no-history"), "{shell}");
    }
    lily(&["completions", "cobol"]).failed(2, "cobol");
    lily(&["completions"]).failed(2, "SHELL");
}

#[test]
fn the_manual_is_one_page_or_one_for_each_command() {
    let page = lily(&["man"]).worked().output;
    assert!(page.contains(".TH lily 1"), "{page}");
    for name in COMMANDS {
        assert!(page.contains(&format!("lily\\-{name}(1)")), "{name}");
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_str().unwrap();
    let ran = lily(&["man", "--directory", path]).worked();
    assert_eq!(ran.output, "");
    for name in COMMANDS {
        let page = directory.path().join(format!("lily-{name}.1"));
        let page = std::fs::read_to_string(page).unwrap();
        assert!(page.contains(&format!("lily\\-{name}")), "{name}");
    }
    assert!(directory.path().join("lily.1").is_file());
    let nowhere = directory.path().join("nowhere");
    lily(&["man", "--directory", nowhere.to_str().unwrap()]).failed(1, "nowhere");
}
