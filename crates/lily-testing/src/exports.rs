//! Whether a session's bits can be taken out of a device and put back.

use crate::runner::Runner;
use lily_plan::{Device, Phase, PlanOutput, SessionState};
use std::ops::Range;

impl<D: Device> Runner<D> {
    /// Checks that cache and snapshot leave the device and come back with all their bits, in parts that begin and end
    /// anywhere in a page, and that what does not fit is refused.
    ///
    /// # Panics
    /// If they do not, or the device fails.
    pub fn check_exports(&mut self) {
        const LENGTH: usize = 270;
        let vocabulary = self.model.config.vocab_size as u32;
        let prompt: Vec<u32> = (0..LENGTH as u32).map(|i| i * 41 % vocabulary).collect();
        self.session.reset();
        let plan = self.plan(Phase::Prefill, LENGTH, PlanOutput::State);
        self.run(&plan, &prompt);
        let snapshot = self.session.snapshot().expect("room for a snapshot");
        let kept = snapshot.export();
        assert_eq!(kept.len() as u64, snapshot.bytes());
        let export = |session: &dyn SessionState, positions: Range<usize>| {
            session.export_cache(positions).expect("it has them")
        };
        let parts = [0..100, 100..256, 256..256, 256..LENGTH];
        let parts = parts.map(|part| (part.clone(), export(self.session.as_ref(), part)));
        let whole = export(self.session.as_ref(), 0..LENGTH);
        let each = self.device.session_bytes(self.precision).each_position as usize;
        assert_eq!(whole.len(), LENGTH * each);
        let expected = self.feed(&[21, 22, 23]);
        // Behind more tokens a part is what it was.
        assert!(export(self.session.as_ref(), 100..256) == parts[1].1);
        assert!(self.session.export_cache(200..LENGTH + 4).is_err());

        let mut other = self
            .device
            .new_session(self.precision, LENGTH + 7)
            .expect("a session");
        for (positions, bytes) in &parts {
            other
                .import_cache(positions.clone(), bytes)
                .expect("it fits");
        }
        let imported = other
            .import_snapshot(LENGTH, &kept)
            .expect("it is of this model");
        assert_eq!(imported.position(), LENGTH);
        assert!(imported.export() == kept);
        other
            .restore(imported.as_ref())
            .expect("its cache is there");
        assert!(export(other.as_ref(), 0..LENGTH) == whole);
        assert!(!other.step_back(), "nothing before is known");

        // What does not fit is refused, and leaves all as it was.
        assert!(other.import_cache(0..LENGTH, &whole[1..]).is_err());
        assert!(other.import_cache(8..LENGTH + 8, &whole).is_err());
        assert!(other.import_snapshot(LENGTH, &kept[1..]).is_err());
        std::mem::swap(&mut self.session, &mut other);
        assert!(self.feed(&[21, 22, 23]) == expected);
        std::mem::swap(&mut self.session, &mut other);
    }
}
