//! This processor as a machine that plans are priced for.

use lily_plan::Machine;
use std::thread::available_parallelism;

/// This processor with `threads` workers, or one for each core: its bandwidth measured now, its peak
/// taken from its instruction set and clock. The bandwidth is that of all cores, and the text says so.
pub fn this_processor(threads: Option<usize>) -> Machine {
    let cores = available_parallelism().map_or(1, usize::from);
    let threads = threads.unwrap_or(cores);
    let bandwidth = lily_cpu::measure_bandwidth();
    let (lanes, set) = lanes();
    let (clock, source) = clock();
    let peak = threads as f64 * lanes as f64 * UNITS as f64 * 2.0 * clock;
    let fewer = if threads < cores {
        ", whatever --threads says; fewer may reach less"
    } else {
        ""
    };
    let plural = if threads == 1 { "" } else { "s" };
    let mut machine = Machine::cpu(bandwidth, threads, peak);
    // In place of the sentence that would have both numbers measured.
    machine.assumptions.splice(
        0..1,
        [
            format!(
                "bandwidth {:.1} GB/s: measured just now, reading 256 MB with all cores{fewer}",
                bandwidth / 1e9
            ),
            format!(
                "{:.0} GFLOP/s in f32: assumed, {threads} thread{plural} × {lanes} lanes ({set}) × {UNITS} \
                 units × 2 × {:.2} GHz, the clock {source}",
                peak / 1e9,
                clock / 1e9
            ),
        ],
    );
    machine
}

/// Multiply-add units of a core: what most have that run large models. A core with fewer cannot reach
/// the peak, which stays a bound.
const UNITS: usize = 2;

#[cfg(any(target_arch = "x86_64", target_arch = "x86"))]
fn lanes() -> (usize, &'static str) {
    if is_x86_feature_detected!("avx512f") {
        (16, "AVX-512")
    } else if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        (8, "AVX2")
    } else {
        (4, "SSE2")
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "x86")))]
fn lanes() -> (usize, &'static str) {
    (4, "128-bit vectors")
}

/// Clock in Hz, and where it comes from.
fn clock() -> (f64, &'static str) {
    let read = |path| std::fs::read_to_string(path).ok();
    let highest = read("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq")
        .and_then(|text| text.trim().parse::<f64>().ok())
        .map(|kilohertz| kilohertz * 1e3);
    if let Some(clock) = highest.filter(|clock| *clock > 0.0) {
        return (clock, "the system names as the highest");
    }
    let current = read("/proc/cpuinfo").and_then(|text| {
        let line = text.lines().find(|line| line.starts_with("cpu MHz"))?;
        line.split_once(':')?.1.trim().parse::<f64>().ok()
    });
    match current.filter(|megahertz| *megahertz > 0.0) {
        Some(megahertz) => (megahertz * 1e6, "the system names as the present one"),
        None => (3e9, "assumed, for the system names none"),
    }
}
