//! `lily serve` as people start and end it.
#![cfg(unix)]

mod support;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use support::{command, lily};

#[test]
fn it_says_where_it_listens_answers_and_ends_when_asked() {
    let mut child = command(&["serve", "--port", "0", "--name", "mine"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = BufReader::new(child.stderr.take().unwrap()).lines();
    let mut before = Vec::new();
    let address = loop {
        let line = said.next().expect("it listens").unwrap();
        if let Some(rest) = line.strip_prefix("lily: listening at http://") {
            assert!(rest.ends_with("/v1, as model mine"), "{rest}");
            break rest.split('/').next().unwrap().to_string();
        }
        before.push(line);
    };
    let before = before.join("\n");
    for told in ["model lily-tiny", "device ", "decode ", "memory "] {
        assert!(before.contains(&format!("lily: {told}")), "{before}");
    }
    // The line it says to try: its body, and its address.
    let curl = [said.next().unwrap().unwrap(), said.next().unwrap().unwrap()].join("");
    assert!(
        curl.contains(&format!("http://{address}/v1/chat/completions")),
        "{curl}"
    );
    let body = curl.split("-d '").nth(1).unwrap().trim_end_matches('\'');
    let mut stream = TcpStream::connect(&address).unwrap();
    let request = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(request.as_bytes()).unwrap();
    let mut reply = String::new();
    stream.read_to_string(&mut reply).unwrap();
    assert!(reply.starts_with("HTTP/1.1 200"), "{reply}");
    assert!(
        reply.contains("\"model\":\"mine\"") && reply.contains("85"),
        "{reply}"
    );

    let ended = Command::new("kill")
        .args(["-TERM", &child.id().to_string()])
        .status();
    assert!(ended.unwrap().success());
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn an_address_that_is_taken_or_open_to_others_is_refused() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    lily(&["serve", "--port", &port]).failed(1, "cannot serve at 127.0.0.1:");
    lily(&["serve", "--host", "0.0.0.0"]).failed(2, "not authenticated");
    lily(&["serve", "--host", "nowhere"]).failed(2, "--host");
}
