//! `strftime_now` for templates that print the date. Times are UTC, so that a
//! prompt does not depend on where the engine runs.

use std::time::{SystemTime, UNIX_EPOCH};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = [
    "Sunday",
    "Monday",
    "Tuesday",
    "Wednesday",
    "Thursday",
    "Friday",
    "Saturday",
];

/// A time in the calendar.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Moment {
    year: i64,
    month: usize,
    day: u32,
    day_of_year: u32,
    weekday: usize,
    second_of_day: u32,
}

impl Moment {
    pub(super) fn now() -> Self {
        let seconds = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |elapsed| elapsed.as_secs());
        Self::from_unix(seconds)
    }

    pub(super) fn from_unix(seconds: u64) -> Self {
        let mut days = seconds / 86_400;
        let weekday = ((days + 4) % 7) as usize;
        // Whole cycles of 400 years first, so that the loop below is short.
        let mut year = 1970 + 400 * (days / 146_097) as i64;
        days %= 146_097;
        while days >= days_in_year(year) {
            days -= days_in_year(year);
            year += 1;
        }
        let day_of_year = days as u32 + 1;
        let mut month = 0;
        while days >= days_in_month(year, month) {
            days -= days_in_month(year, month);
            month += 1;
        }
        Self {
            year,
            month,
            day: days as u32 + 1,
            day_of_year,
            weekday,
            second_of_day: (seconds % 86_400) as u32,
        }
    }
}

fn is_leap(year: i64) -> bool {
    year % 4 == 0 && (year % 100 != 0 || year % 400 == 0)
}

fn days_in_year(year: i64) -> u64 {
    if is_leap(year) { 366 } else { 365 }
}

fn days_in_month(year: i64, month: usize) -> u64 {
    match month {
        1 if is_leap(year) => 29,
        1 => 28,
        3 | 5 | 8 | 10 => 30,
        _ => 31,
    }
}

/// Formats a time as C's `strftime` does; directives that are not known here
/// stay as they are.
pub(super) fn format(pattern: &str, moment: Moment) -> String {
    let hour = moment.second_of_day / 3600;
    let minute = moment.second_of_day / 60 % 60;
    let second = moment.second_of_day % 60;
    let hour12 = match hour % 12 {
        0 => 12,
        other => other,
    };
    let month_number = moment.month + 1;
    let month = MONTHS.get(moment.month).copied().unwrap_or_default();
    let weekday = DAYS.get(moment.weekday).copied().unwrap_or_default();
    let mut output = String::new();
    let mut characters = pattern.chars().peekable();
    while let Some(character) = characters.next() {
        if character != '%' {
            output.push(character);
            continue;
        }
        // `%-d` is `%d` without padding.
        let unpadded = characters.next_if_eq(&'-').is_some();
        let pad = |value: u32, width: usize| {
            let width = if unpadded { 0 } else { width };
            format!("{value:0width$}")
        };
        let text = match characters.next() {
            Some('Y') => moment.year.to_string(),
            Some('y') => pad((moment.year % 100) as u32, 2),
            Some('m') => pad(month_number as u32, 2),
            Some('d') => pad(moment.day, 2),
            Some('e') => format!("{:>2}", moment.day),
            Some('j') => pad(moment.day_of_year, 3),
            Some('B') => month.to_owned(),
            Some('b' | 'h') => month[..3].to_owned(),
            Some('A') => weekday.to_owned(),
            Some('a') => weekday[..3].to_owned(),
            Some('H') => pad(hour, 2),
            Some('I') => pad(hour12, 2),
            Some('M') => pad(minute, 2),
            Some('S') => pad(second, 2),
            Some('p') => (if hour < 12 { "AM" } else { "PM" }).to_owned(),
            Some('Z') => "UTC".to_owned(),
            Some('z') => "+0000".to_owned(),
            Some('F') => format!("{}-{month_number:02}-{:02}", moment.year, moment.day),
            Some('T') => format!("{hour:02}:{minute:02}:{second:02}"),
            Some('%') => "%".to_owned(),
            Some(other) => format!("%{}{other}", if unpadded { "-" } else { "" }),
            None => "%".to_owned(),
        };
        output.push_str(&text);
    }
    output
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_like_strftime() {
        let moment = Moment::from_unix(1_709_210_096);
        assert_eq!(
            format(
                "%A, %d %B %Y %H:%M:%S (%j %-m %I%p %b %a %y %F %T) 100%% %Q %",
                moment
            ),
            "Thursday, 29 February 2024 12:34:56 (060 2 12PM Feb Thu 24 2024-02-29 12:34:56) 100% %Q %"
        );
        assert_eq!(format("%F", Moment::from_unix(0)), "1970-01-01");
        assert_eq!(format("%F", Moment::from_unix(4_133_980_799)), "2100-12-31");
        assert_eq!(Moment::from_unix(u64::MAX).month, 10);
    }
}
