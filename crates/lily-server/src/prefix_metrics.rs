//! Figures of what later prompts go on from.

use lily_engine::PrefixFigures;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use std::sync::atomic::Ordering;

/// Where things stand, by name.
type Level = (&'static str, &'static str, fn(&PrefixFigures) -> u64);

const LEVELS: [Level; 6] = [
    (
        "sessions_parked",
        "Sessions kept for their conversation's next turn",
        |figures| figures.parked as u64,
    ),
    (
        "sessions_parked_bytes",
        "Memory of parked sessions, snapshots left out",
        |figures| figures.parked_bytes,
    ),
    (
        "snapshots",
        "States that parked sessions can go back to",
        |figures| figures.snapshots as u64,
    ),
    (
        "snapshots_bytes",
        "Memory of the snapshots of parked sessions",
        |figures| figures.snapshot_bytes,
    ),
    (
        "disk_prefixes",
        "Files in the cache's directory",
        |figures| figures.disk.files as u64,
    ),
    (
        "disk_prefixes_bytes",
        "Bytes of the files in the cache's directory",
        |figures| figures.disk.bytes,
    ),
];

const COUNTS: [Level; 8] = [
    (
        "prefix_hits",
        "Prompts that went on from what was computed before",
        |figures| figures.hits,
    ),
    (
        "sessions_evicted",
        "Parked sessions that went for others",
        |figures| figures.evictions,
    ),
    (
        "disk_reads",
        "Prompts that went on from a file",
        |figures| figures.disk.reads,
    ),
    ("disk_read_bytes", "Bytes read from files", |figures| {
        figures.disk.read_bytes
    }),
    ("disk_writes", "Files written", |figures| {
        figures.disk.writes
    }),
    (
        "disk_written_bytes",
        "Bytes of the files written",
        |figures| figures.disk.written_bytes,
    ),
    (
        "disk_removed",
        "Files removed to make room, or for longer ones",
        |figures| figures.disk.removed,
    ),
    (
        "disk_refused",
        "Files that were not what they should be",
        |figures| figures.disk.refused,
    ),
];

#[derive(Default)]
pub(crate) struct PrefixMetrics {
    levels: [Gauge; LEVELS.len()],
    counts: [Counter; COUNTS.len()],
}

impl PrefixMetrics {
    pub fn register(&self, registry: &mut Registry) {
        for ((name, help, _), gauge) in LEVELS.into_iter().zip(&self.levels) {
            registry.register(name, help, gauge.clone());
        }
        for ((name, help, _), counter) in COUNTS.into_iter().zip(&self.counts) {
            registry.register(name, help, counter.clone());
        }
    }

    pub fn set(&self, figures: &PrefixFigures) {
        for ((_, _, value), gauge) in LEVELS.into_iter().zip(&self.levels) {
            gauge.set(i64::try_from(value(figures)).unwrap_or(i64::MAX));
        }
        for ((_, _, value), counter) in COUNTS.into_iter().zip(&self.counts) {
            // The engine counts; here it is only shown.
            counter.inner().store(value(figures), Ordering::Relaxed);
        }
    }
}
