//! What the GPU's clock says of the work that was waited for.

/// How long the GPU took for command buffers of one label.
#[derive(Clone, Debug, PartialEq)]
pub struct Timing {
    /// The kernels, in their order: of a stage where stages are timed, otherwise the first and last of the command
    /// buffer.
    pub label: String,
    /// How often it ran.
    pub runs: u64,
    /// Microseconds in all, from the GPU's beginning to its end of each command buffer. In that is what a command
    /// buffer costs by itself, so the sum over stages is more than an untimed run takes.
    pub microseconds: f64,
}

/// Times by label, in the order in which labels came. Labels are made of kernels' names, so there are only so many.
#[derive(Debug, Default)]
pub(crate) struct Timings(Vec<Timing>);

impl Timings {
    /// Adds one run that took from `begin` to `end` in seconds. Metal gives zeros for what never ran.
    pub fn add(&mut self, label: &str, begin: f64, end: f64) {
        let microseconds = if begin > 0.0 && end > begin {
            (end - begin) * 1e6
        } else {
            0.0
        };
        if let Some(timing) = self.0.iter_mut().find(|timing| timing.label == label) {
            timing.runs += 1;
            timing.microseconds += microseconds;
        } else {
            self.0.push(Timing {
                label: label.to_string(),
                runs: 1,
                microseconds,
            });
        }
    }

    /// All so far; empty from then on.
    pub fn take(&mut self) -> Vec<Timing> {
        std::mem::take(&mut self.0)
    }
}

/// The label of a stage: its kernels, each once, with how many dispatches it has.
pub(crate) fn stage_label<'a>(kernels: impl Iterator<Item = &'a str>) -> String {
    let mut counts: Vec<(&str, usize)> = Vec::new();
    for kernel in kernels {
        match counts.iter_mut().find(|(known, _)| *known == kernel) {
            Some((_, count)) => *count += 1,
            None => counts.push((kernel, 1)),
        }
    }
    let parts = counts.iter().map(|(kernel, count)| match count {
        1 => (*kernel).to_string(),
        _ => format!("{count} {kernel}"),
    });
    parts.collect::<Vec<_>>().join(" + ")
}

/// The label of a command buffer of several stages: its first and its last kernel.
pub(crate) fn batch_label<'a>(mut kernels: impl DoubleEndedIterator<Item = &'a str>) -> String {
    match (kernels.next(), kernels.next_back()) {
        (Some(first), Some(last)) => format!("{first} … {last}"),
        (Some(only), None) => only.to_string(),
        _ => "nothing".to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_a_label_add_up_in_order_of_appearance() {
        let mut timings = Timings::default();
        timings.add("b", 1.0, 1.5);
        timings.add("a", 2.0, 2.25);
        timings.add("b", 3.0, 3.5);
        timings.add("c", 0.0, 0.0);
        let found = timings.take();
        let expected = [("b", 2, 1e6), ("a", 1, 250_000.0), ("c", 1, 0.0)];
        assert_eq!(found.len(), 3);
        for (timing, (label, runs, microseconds)) in found.iter().zip(expected) {
            assert_eq!((timing.label.as_str(), timing.runs), (label, runs));
            assert!(
                (timing.microseconds - microseconds).abs() < 1e-6,
                "{timing:?}"
            );
        }
        assert!(timings.take().is_empty());
    }

    #[test]
    fn labels_name_the_kernels() {
        assert_eq!(
            stage_label(["project_1", "route", "project_1"].into_iter()),
            "2 project_1 + route"
        );
        assert_eq!(
            batch_label(["embed", "add", "route"].into_iter()),
            "embed … route"
        );
        assert_eq!(batch_label(["embed"].into_iter()), "embed");
        assert_eq!(batch_label([].into_iter()), "nothing");
    }
}
