//! Stop strings in streamed text.

/// Watches streamed text for stop strings.
///
/// The text ends before the stop string that is complete first, wherever the
/// stream is cut into pieces. If several are complete at the same character,
/// the longest counts, so that no part of it is ever shown. Text is held back
/// only while it could still be the beginning of a stop string.
#[derive(Debug, Clone)]
pub struct StopMatcher {
    stops: Vec<String>,
    held: String,
    stopped: bool,
}

/// What came out of [`StopMatcher::push`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StopStep {
    /// Text that is certainly before any stop string.
    pub text: String,
    /// The stop string that ended the text, in the push that completed it.
    pub stop: Option<String>,
}

impl StopMatcher {
    /// A matcher for these stop strings; empty ones are ignored.
    #[must_use]
    pub fn new<S: Into<String>>(stops: impl IntoIterator<Item = S>) -> Self {
        Self {
            stops: stops
                .into_iter()
                .map(Into::into)
                .filter(|stop| !stop.is_empty())
                .collect(),
            held: String::new(),
            stopped: false,
        }
    }

    /// Takes the next piece of text. After a stop string all text is dropped.
    #[must_use = "the text is not returned again"]
    pub fn push(&mut self, text: &str) -> StopStep {
        if self.stopped {
            return StopStep {
                text: String::new(),
                stop: None,
            };
        }
        let mut buffer = std::mem::take(&mut self.held);
        buffer.push_str(text);
        if let Some((start, stop)) = self.first_match(&buffer) {
            self.stopped = true;
            buffer.truncate(start);
            return StopStep {
                text: buffer,
                stop: Some(stop),
            };
        }
        self.held = buffer.split_off(self.start_of_possible_stop(&buffer));
        StopStep {
            text: buffer,
            stop: None,
        }
    }

    /// Ends the stream: returns the text held back, which is no stop string.
    #[must_use = "the text is not returned again"]
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Whether a stop string was found.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.stopped
    }

    fn first_match(&self, buffer: &str) -> Option<(usize, String)> {
        self.stops
            .iter()
            .filter_map(|stop| Some((buffer.find(stop.as_str())?, stop)))
            .min_by_key(|&(start, stop)| (start + stop.len(), start))
            .map(|(start, stop)| (start, stop.clone()))
    }

    fn start_of_possible_stop(&self, buffer: &str) -> usize {
        let longest = self.stops.iter().map(String::len).max().unwrap_or(0);
        let earliest = buffer.len().saturating_sub(longest.saturating_sub(1));
        (earliest..buffer.len())
            .filter(|&start| buffer.is_char_boundary(start))
            .find(|&start| {
                self.stops
                    .iter()
                    .any(|stop| stop.starts_with(&buffer[start..]))
            })
            .unwrap_or(buffer.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn whole(stops: &[String], text: &str) -> (String, Option<String>) {
        // Tried at every end, as a reader of the whole text would.
        for end in 0..=text.len() {
            if !text.is_char_boundary(end) {
                continue;
            }
            let found = stops
                .iter()
                .filter(|stop| !stop.is_empty() && text[..end].ends_with(stop.as_str()))
                .max_by_key(|stop| stop.len());
            if let Some(stop) = found {
                return (text[..end - stop.len()].to_owned(), Some(stop.clone()));
            }
        }
        (text.to_owned(), None)
    }

    fn streamed(stops: &[String], pieces: &[String]) -> (String, Option<String>) {
        let mut matcher = StopMatcher::new(stops.to_vec());
        let mut text = String::new();
        let mut stop = None;
        for piece in pieces {
            let step = matcher.push(piece);
            text.push_str(&step.text);
            stop = stop.or(step.stop);
        }
        text.push_str(&matcher.finish());
        (text, stop)
    }

    #[test]
    fn holds_back_only_what_may_become_a_stop_string() {
        let mut matcher = StopMatcher::new(["END", "\n\n"]);
        assert_eq!(matcher.push("abc E").text, "abc ");
        assert_eq!(matcher.push("x").text, "Ex");
        assert_eq!(matcher.push("\n").text, "");
        let step = matcher.push("\nmore");
        assert_eq!(
            (step.text.as_str(), step.stop.as_deref()),
            ("", Some("\n\n"))
        );
        assert!(matcher.is_stopped());
        assert_eq!(matcher.push("more").text, "");
        assert_eq!(matcher.finish(), "");
    }

    #[test]
    fn an_unfinished_stop_string_comes_out_at_the_end() {
        let mut matcher = StopMatcher::new(["</s>"]);
        assert_eq!(matcher.push("a</s").text, "a");
        assert_eq!(matcher.finish(), "</s");
    }

    #[test]
    fn the_stop_string_that_is_complete_first_wins() {
        let stops = ["abcd".to_owned(), "bc".to_owned()];
        let expected = ("a".to_owned(), Some("bc".to_owned()));
        assert_eq!(streamed(&stops, &["abcd".to_owned()]), expected);
        assert_eq!(
            streamed(&stops, &["abc".to_owned(), "d".to_owned()]),
            expected
        );
        let stops = ["bc".to_owned(), "abc".to_owned()];
        assert_eq!(
            streamed(&stops, &["xab".to_owned(), "c".to_owned()]),
            ("x".to_owned(), Some("abc".to_owned()))
        );
    }

    proptest! {
        #[test]
        fn streamed_equals_whole(
            stops in prop::collection::vec("[abé]{0,4}", 0..4),
            pieces in prop::collection::vec("[abcé🙂]{0,5}", 0..12),
        ) {
            let text = pieces.concat();
            prop_assert_eq!(streamed(&stops, &pieces), whole(&stops, &text));
        }
    }
}
