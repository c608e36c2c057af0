//! The output parser: the format, and what users of such engines reported.

mod common;

use common::{call, fixture, json_lines, weather};
use lily_text::fuzzing;
use lily_text::{
    ChatTemplate, OutputEvent, OutputParser, ParsedOutput, RenderRequest, Tokenizer, parse_output,
};
use serde_json::{Map, Value, json};

const THINKING: &str = "<|im_start|>assistant\n<think>\n";
const NOT_THINKING: &str = "<|im_start|>assistant\n<think>\n\n</think>\n\n";

fn parse(text: &str) -> ParsedOutput {
    let output = parse_output(NOT_THINKING, text, &fuzzing::tools(), false);
    assert_same_in_pieces(NOT_THINKING, text, false, &output);
    output
}

fn parse_cut(text: &str) -> ParsedOutput {
    let output = parse_output(NOT_THINKING, text, &fuzzing::tools(), true);
    assert_same_in_pieces(NOT_THINKING, text, true, &output);
    output
}

fn parse_thinking(text: &str) -> ParsedOutput {
    let output = parse_output(THINKING, text, &fuzzing::tools(), false);
    assert_same_in_pieces(THINKING, text, false, &output);
    output
}

/// Every piece size up to 16, and every single cut.
fn assert_same_in_pieces(prompt: &str, text: &str, truncated: bool, expected: &ParsedOutput) {
    let characters: Vec<String> = text.chars().map(String::from).collect();
    let check = |pieces: &[String]| {
        let mut parser = OutputParser::new(prompt, &fuzzing::tools());
        let mut events: Vec<OutputEvent> =
            pieces.iter().flat_map(|piece| parser.push(piece)).collect();
        events.extend(parser.finish(truncated));
        assert_eq!(&ParsedOutput::from_events(events), expected, "{pieces:?}");
    };
    for size in 1..=16 {
        check(
            &characters
                .chunks(size)
                .map(<[String]>::concat)
                .collect::<Vec<_>>(),
        );
    }
    for cut in 0..=characters.len() {
        check(&[characters[..cut].concat(), characters[cut..].concat()]);
    }
}

/// Names and arguments of the calls.
fn calls(output: &ParsedOutput) -> Vec<(String, Value)> {
    output
        .tool_calls
        .iter()
        .map(|call| (call.name.clone(), Value::Object(call.arguments.clone())))
        .collect()
}

fn weather_in(cities: &[&str]) -> Vec<(String, Value)> {
    cities
        .iter()
        .map(|city| ("get_weather".to_owned(), json!({"city": city})))
        .collect()
}

// Report 1.
#[test]
fn prose_before_a_tool_call_is_content_and_does_not_break_the_call() {
    for gap in ["\n\n", "\n", " ", ""] {
        let output = parse(&format!("I'll check.{gap}{}", weather("Köln")));
        assert_eq!(output.content, "I'll check.");
        assert_eq!(calls(&output), weather_in(&["Köln"]));
        assert!(!output.truncated_call);
    }
}

// Report 2.
#[test]
fn a_missing_newline_between_calls_does_not_swallow_the_later_ones() {
    for gap in ["", "\n", "\n\n", " "] {
        let text = [weather("A"), weather("B"), weather("C")].join(gap);
        let output = parse(&text);
        assert_eq!(calls(&output), weather_in(&["A", "B", "C"]));
        assert_eq!(output.content, "");
    }
    let inline =
        "<tool_call><function=get_weather><parameter=city>A</parameter></function></tool_call>";
    assert_eq!(calls(&parse(&inline.repeat(2))), weather_in(&["A", "A"]));
}

// Report 3. `parse` also cuts the text at every place.
#[test]
fn tags_split_at_any_byte_and_missing_closing_tags_do_not_lose_the_call() {
    let whole = weather("A");
    for missing in [
        "\n</tool_call>",
        "\n</function>\n</tool_call>",
        "\n</parameter>\n</function>\n</tool_call>",
    ] {
        let cut = whole.strip_suffix(missing).unwrap();
        let output = parse(cut);
        assert_eq!(calls(&output), weather_in(&["A"]), "{cut}");
        assert_eq!(
            (output.content.as_str(), output.truncated_call),
            ("", false)
        );
    }
    for missing in [
        "</parameter>\n",
        "</function>\n",
        "\n</tool_call>",
        "</parameter>\n</function>\n",
    ] {
        let two = format!("{}\n{}", whole.replace(missing, ""), weather("B"));
        let output = parse(&two);
        assert_eq!(calls(&output), weather_in(&["A", "B"]), "{two}");
        assert_eq!(output.content, "");
    }
    let parameters = call("get_weather", &[("city", "A"), ("days", "2")]);
    let output = parse(&parameters.replacen("</parameter>\n", "", 1));
    assert_eq!(
        calls(&output),
        [("get_weather".to_owned(), json!({"city": "A", "days": 2}))]
    );
}

// Report 4; the whole table is tested with the typing itself.
#[test]
fn integers_written_as_3_0_and_python_literals_are_typed_by_the_schema() {
    let output = parse(&call(
        "get_weather",
        &[
            ("city", "42"),
            ("days", "3.0"),
            ("share", "0.5"),
            ("exact", "True"),
            ("options", "{'a': None, 'b': [True]}"),
            ("list", "[1, \"x\"]"),
            ("any", "null"),
            ("unknown", "7"),
        ],
    ));
    assert_eq!(
        calls(&output)[0].1,
        json!({
            "city": "42", "days": 3, "share": 0.5, "exact": true,
            "options": {"a": null, "b": [true]}, "list": [1, "x"], "any": null, "unknown": "7",
        })
    );
    let output = parse(&call("no_such_tool", &[("x", "7")]));
    assert_eq!(
        calls(&output),
        [("no_such_tool".to_owned(), json!({"x": "7"}))]
    );
}

// Report 5.
#[test]
fn markup_truncated_at_the_token_limit_does_not_leak_into_content() {
    let text = format!(
        "Sure.\n\n{}",
        call("get_weather", &[("city", "Köln"), ("days", "2")])
    );
    let closed = text.find("</function>").unwrap() + "</function>".len();
    for cut in 0..text.len() {
        if !text.is_char_boundary(cut) {
            continue;
        }
        let output = parse_output(NOT_THINKING, &text[..cut], &fuzzing::tools(), true);
        let expected = &"Sure."[..cut.min(5)];
        let begun = cut.saturating_sub("Sure.\n\n".len());
        // A single `<` may be prose.
        if begun == 1 {
            assert_eq!(output.content, "Sure.\n\n<");
            continue;
        }
        let content = output.content.trim_end();
        assert_eq!(content, expected, "{:?}", &text[..cut]);
        assert_eq!(
            output.tool_calls.len(),
            usize::from(cut >= closed),
            "{:?}",
            &text[..cut]
        );
        assert_eq!(
            output.truncated_call,
            begun > 1 && cut < closed,
            "{:?}",
            &text[..cut]
        );
    }
    let output = parse_cut("<tool_call>\n<function=get_weather>\n<parameter=city>\nKö");
    assert_eq!((calls(&output).len(), output.truncated_call), (0, true));
}

// Report 11.
#[test]
fn the_template_opens_think_itself_and_reasoning_does_not_leak_into_content() {
    let output = parse_thinking("Let me think.\n\nYes.\n</think>\n\nHello!");
    assert_eq!(output.reasoning, "Let me think.\n\nYes.");
    assert_eq!(output.content, "Hello!");
    // The same text after a prompt that closed the reasoning is an answer.
    let output = parse("Let me think.");
    assert_eq!(
        (output.reasoning.as_str(), output.content.as_str()),
        ("", "Let me think.")
    );
    // The prompt as templates render it, and tails of it.
    for (prompt, reasoning) in [
        (
            "<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n",
            false,
        ),
        (
            "<|im_start|>user\n</think><|im_end|>\n<|im_start|>assistant\n<think>\n",
            true,
        ),
        ("<|im_start|>assistant\n<think>\npartly thought", true),
        ("<|im_start|>user\n<think><|im_end|>\n", false),
        ("<think>\n", true),
        ("<think>\n\n</think>\n\n", false),
        ("", false),
        ("x", false),
    ] {
        let output = parse_output(prompt, "a", &[], false);
        assert_eq!(output.reasoning == "a", reasoning, "{prompt}");
    }
}

// Report 17.
#[test]
fn stray_tokens_after_the_end_of_reasoning_do_not_spoil_json() {
    for text in [
        "plan\n</think>\n\n</think>\n\n{\"a\": 1}",
        "plan\n</think>\n<think>\n</think>\n\n{\"a\": 1}",
        "<think>\nplan\n</think>\n\n{\"a\": 1}",
        "plan</think>{\"a\": 1}",
    ] {
        let output = parse_thinking(text);
        assert_eq!(output.reasoning, "plan", "{text}");
        assert_eq!(
            serde_json::from_str::<Value>(&output.content).unwrap(),
            json!({"a": 1})
        );
    }
}

// Report 19.
#[test]
fn reasoning_that_uses_up_the_budget_is_reasoning_and_content_is_empty() {
    for text in ["I think and", "I think and\n", "I think and\n</thi"] {
        let output = parse_output(THINKING, text, &[], true);
        assert_eq!(output.reasoning, "I think and");
        assert_eq!(output.content, "");
        assert_same_in_pieces(THINKING, text, true, &output);
    }
    let mut parser = OutputParser::new(THINKING, &[]);
    let _ = parser.push("x");
    assert!(parser.is_reasoning());
    let _ = parser.push("</think>");
    assert!(!parser.is_reasoning());
}

#[test]
fn values_may_contain_any_text() {
    for value in [
        "a < b && c > d",
        "<html>\n</html>",
        "</",
        "<",
        "<tool_call>",
        "see <tool_call> and </tool_call> here",
        "<function=x>",
        "</function> is a tag",
        "</parameter> is one, too",
        "a\n</parameter>\nb",
        "<parameter=city> in a line",
        "first\n<parameter=other>\nnot declared",
        "<think>\nhm\n</think>",
        "  indented\n\n",
        "\n",
        "",
        "Ünïcödé 🙂",
    ] {
        let output = parse(&call("write_file", &[("path", "f.txt"), ("text", value)]));
        let expected = json!({"path": "f.txt", "text": value});
        assert_eq!(
            calls(&output),
            [("write_file".to_owned(), expected)],
            "{value:?}"
        );
        assert_eq!(
            (output.content.as_str(), output.truncated_call),
            ("", false)
        );
    }
}

#[test]
fn prose_with_angle_brackets_is_unchanged() {
    for text in [
        "a < b",
        "a <",
        "x <- y <= z << 1",
        "use `<tool_call>` for that",
        "the tags <think> and </think>, and </tool_call>",
        "<b>bold</b> <tool>",
        "<function=x> is no call",
        "Hello\n",
        "    indented code\n\n    more",
        "<tool_",
        "a</",
    ] {
        let output = parse(text);
        if text == "<tool_" {
            // Half a tag at the end is dropped.
            assert_eq!(output.content, "");
        } else {
            assert_eq!(output.content, text);
        }
        assert_eq!(output.tool_calls, []);
    }
    assert_eq!(parse("\n\n    code").content, "    code");
}

#[test]
fn malformed_calls_are_dropped_and_reported() {
    for text in [
        "<tool_call>\n</tool_call>",
        "<tool_call>\n<function=>\n</function>\n</tool_call>",
        "<tool_call>\nget_weather(city)\n</tool_call>",
        "<tool_call>\n{\"name\": 3}\n</tool_call>",
        "<tool_call>\n<parameter=city>\nA\n</parameter>\n</tool_call>",
    ] {
        let output = parse(&format!("Hm.\n{text}\n{}", weather("B")));
        assert_eq!(output.content, "Hm.", "{text}");
        assert_eq!(calls(&output), weather_in(&["B"]), "{text}");
        assert!(output.truncated_call);
    }
}

#[test]
fn calls_in_other_clothes_are_understood() {
    let json =
        "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"A\"}}\n</tool_call>";
    assert_eq!(calls(&parse(json)), weather_in(&["A"]));
    let bare = "Sure.\n<function=get_weather>\n<parameter=city>\nA\n</parameter>\n</function>\n</tool_call>";
    let output = parse(bare);
    assert_eq!(
        (output.content.as_str(), calls(&output)),
        ("Sure.", weather_in(&["A"]))
    );
    let empty = parse("<tool_call>\n<function=now>\n</function>\n</tool_call>");
    assert_eq!(calls(&empty), [("now".to_owned(), json!({}))]);
    // Reasoning that is not closed before the call.
    let output = parse_thinking(&format!("I need the weather.\n{}", weather("A")));
    assert_eq!(output.reasoning, "I need the weather.");
    assert_eq!(calls(&output), weather_in(&["A"]));
    let output = parse_thinking(
        "I could use <tool_call> or\n<tool_call>\n<function=nothing>\n</think>\n\nNo.",
    );
    assert_eq!(output.content, "No.");
    assert_eq!(output.tool_calls, []);
}

#[test]
fn text_around_calls_keeps_together() {
    let output = parse(&format!("One.\n\n{}\n\nTwo.\n", weather("A")));
    assert_eq!(output.content, "One.\n\nTwo.");
    let output = parse(&format!("{}\n", weather("A")));
    assert_eq!(output.content, "");
    // Without tools, the request may want the markup as it is.
    let mut parser = OutputParser::new(NOT_THINKING, &[]).with_tool_calls(false);
    let mut events = parser.push(&weather("A"));
    events.extend(parser.finish(false));
    assert_eq!(ParsedOutput::from_events(events).content, weather("A"));
}

#[test]
fn arguments_stream_a_parameter_at_a_time() {
    let text = call("get_weather", &[("city", "A\"B"), ("days", "2")]);
    let mut parser = OutputParser::new(NOT_THINKING, &fuzzing::tools());
    let mut events = Vec::new();
    for character in text.chars() {
        events.extend(parser.push(&character.to_string()));
    }
    events.extend(parser.finish(false));
    let fragment = |json_fragment: &str| OutputEvent::ToolCallArguments {
        index: 0,
        json_fragment: json_fragment.to_owned(),
    };
    assert_eq!(
        events,
        [
            OutputEvent::ToolCallStarted {
                index: 0,
                name: "get_weather".to_owned()
            },
            fragment("{\"city\":\"A\\\"B\""),
            fragment(",\"days\":2"),
            fragment("}"),
            OutputEvent::ToolCallFinished { index: 0 },
        ]
    );
}

/// What the embedded model says comes back when its parsed form is rendered.
#[test]
fn parsed_output_renders_to_the_same_text() {
    let template = ChatTemplate::new(fixture("models/lily-tiny/chat_template.jinja")).unwrap();
    let tokenizer = fixture("models/lily-tiny/tokenizer.json");
    let tokenizer = Tokenizer::from_bytes(tokenizer.as_bytes()).unwrap();
    let mut with_calls = 0;
    for case in json_lines("models/lily-tiny/expected.jsonl") {
        let ids: Vec<u32> = serde_json::from_value(case["prompt_ids"].clone()).unwrap();
        let prompt = &tokenizer.decode(&ids);
        let text = case["text"].as_str().unwrap();
        let text = text.strip_suffix("<|im_end|>").unwrap_or(text);
        let tools = case["tools"].as_array().cloned().unwrap_or_default();
        let output = parse_output(prompt, text, &tools, false);
        assert_same_as(prompt, text, &tools, &output);
        assert!(!output.truncated_call);
        with_calls += usize::from(!output.tool_calls.is_empty());
        let calls: Vec<Value> = output
            .tool_calls
            .iter()
            .map(|call| json!({"function": {"name": call.name, "arguments": call.arguments}}))
            .collect();
        let mut messages = case["messages"].as_array().unwrap().clone();
        messages.push(json!({
            "role": "assistant",
            "content": output.content,
            "reasoning_content": output.reasoning,
            "tool_calls": calls,
        }));
        let rendered = template
            .render(&RenderRequest {
                messages: &messages,
                tools: case["tools"].as_array().map(Vec::as_slice),
                add_generation_prompt: false,
                variables: &Map::new(),
            })
            .unwrap();
        assert_eq!(
            rendered,
            format!("{prompt}{text}<|im_end|>\n"),
            "{}",
            case["id"]
        );
    }
    assert!(with_calls >= 6);
}

fn assert_same_as(prompt: &str, text: &str, tools: &[Value], expected: &ParsedOutput) {
    let mut parser = OutputParser::new(prompt, tools);
    let mut events = Vec::new();
    for character in text.chars() {
        events.extend(parser.push(&character.to_string()));
    }
    events.extend(parser.finish(false));
    assert_eq!(&ParsedOutput::from_events(events), expected);
}

/// A megabyte with many tags takes time in proportion to its length.
#[test]
fn long_outputs_are_read_in_linear_time() {
    let value = "if a < b && c </ d <tool_call> </param \n".repeat(25_000);
    let text = call("write_file", &[("text", &value)]);
    let begin = std::time::Instant::now();
    let mut parser = OutputParser::new(NOT_THINKING, &fuzzing::tools());
    let mut events = Vec::new();
    for piece in text.split_inclusive(' ') {
        events.extend(parser.push(piece));
    }
    events.extend(parser.finish(false));
    let output = ParsedOutput::from_events(events);
    assert_eq!(output.tool_calls[0].arguments["text"], value);
    let whole = parse_output(NOT_THINKING, &text.repeat(3), &fuzzing::tools(), false);
    assert_eq!(whole.tool_calls.len(), 3);
    assert_eq!(
        parse_output("", &"<a ".repeat(300_000), &[], false)
            .content
            .len(),
        900_000
    );
    assert!(begin.elapsed().as_secs() < 20, "{:?}", begin.elapsed());
}
