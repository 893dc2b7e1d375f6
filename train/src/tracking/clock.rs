//! Time as trackers write it: since 1970, and as UTC date and time.

use std::time::{Duration, SystemTime};

use dflash_data::civil_date;

/// Seconds since 1970, not less than 0.
pub fn since_epoch(time: SystemTime) -> Duration {
    time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}

/// Year, month, day, hour, minute and second in UTC.
pub fn utc(time: Duration) -> [u64; 6] {
    let seconds = time.as_secs();
    let (year, month, day) = civil_date(seconds / 86_400);
    [year, month, day, seconds / 3600 % 24, seconds / 60 % 60, seconds % 60]
}

/// `YYYYMMDD_HHMMSS`.
pub fn stamp(time: Duration) -> String {
    let [year, month, day, hour, minute, second] = utc(time);
    format!("{year:04}{month:02}{day:02}_{hour:02}{minute:02}{second:02}")
}

/// `YYYY-MM-DDTHH:MM:SSZ`.
pub fn iso(time: Duration) -> String {
    let [year, month, day, hour, minute, second] = utc(time);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (seconds, expected) in [
            (0, "19700101_000000"),
            (951_782_399, "20000228_235959"),
            (951_782_400, "20000229_000000"),
            (951_868_800, "20000301_000000"),
            (1_796_257_349, "20261203_002229"),
            (4_107_542_400, "21000301_000000"),
        ] {
            assert_eq!(stamp(Duration::from_secs(seconds)), expected);
        }
        assert_eq!(iso(Duration::from_millis(1_796_257_349_486)), "2026-12-03T00:22:29Z");
    }

    /// Every day of four centuries follows the one before: the next day, or the first of the next month or year.
    #[test]
    fn no_day_is_left_out_or_counted_twice() {
        let date = |day: u64| {
            let [year, month, day, ..] = utc(Duration::from_secs(86_400 * day));
            (year, month, day)
        };
        for day in 0..146_097 {
            let ((year, month, of_month), next) = (date(day), date(day + 1));
            let follows = next == (year, month, of_month + 1)
                || next == (year, month + 1, 1) && of_month >= 28
                || next == (year + 1, 1, 1) && (month, of_month) == (12, 31);
            assert!(follows, "{:?} after {:?}", next, (year, month, of_month));
        }
        assert_eq!(date(146_097), (2370, 1, 1));
    }
}
