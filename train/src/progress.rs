//! Progress on stderr: a bar on a terminal, a plain line every few seconds elsewhere, nothing when quiet.
//!
//! No colour is ever written, so `NO_COLOR` holds without being read.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

/// Time between two plain lines.
const LINE_EVERY: Duration = Duration::from_secs(10);

/// How progress is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Display {
    /// A bar that is redrawn.
    Bar,
    /// Lines.
    Lines,
    /// Nothing.
    Quiet,
}

impl Display {
    /// What suits stderr.
    pub fn detect(quiet: bool) -> Self {
        if quiet {
            Self::Quiet
        } else if std::io::stderr().is_terminal() {
            Self::Bar
        } else {
            Self::Lines
        }
    }

    /// Says something that is not progress.
    pub fn note(self, text: &str) {
        if self != Self::Quiet {
            line(text);
        }
    }
}

/// Progress of one stage.
pub struct Stage {
    display: Display,
    label: &'static str,
    total: u64,
    started: Instant,
    start_at: u64,
    last_line: Option<Instant>,
    bar: Option<ProgressBar>,
}

impl Stage {
    /// Starts a stage that has `total` things to do, `done` of them already.
    pub fn start(display: Display, label: &'static str, done: u64, total: u64) -> Self {
        let bar = (display == Display::Bar).then(|| {
            let bar = ProgressBar::new(total).with_position(done);
            let style = ProgressStyle::with_template("{prefix} {wide_bar} {pos}/{len} {msg} [{elapsed}<{eta}]");
            if let Ok(style) = style {
                bar.set_style(style);
            }
            bar.set_prefix(label);
            bar
        });
        Self {
            display,
            label,
            total,
            started: Instant::now(),
            start_at: done,
            last_line: None,
            bar,
        }
    }

    /// Shows that `done` things are done; `message` is only made when it is shown.
    pub fn set(&mut self, done: u64, message: impl FnOnce() -> String) {
        if let Some(bar) = &self.bar {
            bar.set_message(message());
            bar.set_position(done);
        } else if self.display == Display::Lines
            && (done >= self.total || self.last_line.is_none_or(|last| last.elapsed() >= LINE_EVERY))
        {
            self.last_line = Some(Instant::now());
            line(&format!(
                "{} {done}/{} {}{}",
                self.label,
                self.total,
                message(),
                self.eta(done)
            ));
        }
    }

    /// Says something without tearing the bar.
    pub fn note(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| line(text)),
            None => self.display.note(text),
        }
    }

    fn eta(&self, done: u64) -> String {
        let made = done.saturating_sub(self.start_at);
        if made == 0 || done >= self.total {
            return String::new();
        }
        let seconds = self.started.elapsed().as_secs_f64() / made as f64 * (self.total - done) as f64;
        format!(" (about {} left)", duration(seconds))
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.abandon();
        }
    }
}

/// Seconds as people read them.
pub fn duration(seconds: f64) -> String {
    let whole = seconds.round().max(0.0) as u64;
    let (hours, minutes, seconds) = (whole / 3600, whole / 60 % 60, whole % 60);
    match (hours, minutes) {
        (0, 0) => format!("{seconds} s"),
        (0, _) => format!("{minutes} min {seconds:02} s"),
        _ => format!("{hours} h {minutes:02} min"),
    }
}

/// Bytes as people read them.
pub fn bytes(count: f64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = count;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", units[unit])
}

/// Says what must be known, also where progress is quiet. Not while a bar is shown.
pub fn warn(text: &str) {
    line(text);
}

fn line(text: &str) {
    // a closed stderr must not end a training run
    let _closed = writeln!(std::io::stderr(), "{text}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_times_read_naturally() {
        assert_eq!(duration(59.4), "59 s");
        assert_eq!(duration(61.0), "1 min 01 s");
        assert_eq!(duration(3720.0), "1 h 02 min");
        assert_eq!(bytes(1536.0), "1.5 KiB");
        assert_eq!(bytes(5.0 * 1024.0 * 1024.0 * 1024.0), "5.0 GiB");
    }
}
