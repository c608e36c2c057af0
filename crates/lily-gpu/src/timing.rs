//! What a GPU's clock says of the work that was waited for.

use lily_plan::StageTiming;

/// Times by label, in the order in which labels came. Labels are made of kernels' names, so there are only so many.
#[derive(Clone, Debug, Default)]
pub struct Timings(Vec<StageTiming>);

impl Timings {
    /// Adds one run.
    pub fn add(&mut self, label: &str, microseconds: f64) {
        self.add_all(label, 1, microseconds);
    }

    /// Adds `runs` that took so long together.
    pub fn add_all(&mut self, label: &str, runs: u64, microseconds: f64) {
        if let Some(timing) = self.0.iter_mut().find(|timing| timing.label == label) {
            timing.runs += runs;
            timing.microseconds += microseconds;
        } else {
            self.0.push(StageTiming {
                label: label.to_string(),
                runs,
                microseconds,
            });
        }
    }

    /// All so far; empty from then on.
    pub fn take(&mut self) -> Vec<StageTiming> {
        std::mem::take(&mut self.0)
    }
}

/// The label of a stage: its kernels, each once, with how many dispatches it has.
pub fn stage_label<'a>(kernels: impl Iterator<Item = &'a str>) -> String {
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
pub fn batch_label<'a>(mut kernels: impl DoubleEndedIterator<Item = &'a str>) -> String {
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
        timings.add("b", 0.5e6);
        timings.add("a", 0.25e6);
        timings.add("b", 0.5e6);
        timings.add("c", 0.0);
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
