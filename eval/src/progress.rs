//! Progress of long work: a bar on a terminal, a plain line now and then elsewhere, nothing when quiet.

use std::io::IsTerminal;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use dflash_data::hub::{Transfer, Watch};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::evaluate::Progress;

/// Pause between two plain lines.
const LINE_EVERY: Duration = Duration::from_secs(10);

/// Shows how far an evaluation has come, on standard error.
pub struct Display {
    label: &'static str,
    bar: Option<ProgressBar>,
    lines: bool,
    last_line: Instant,
}

impl Display {
    /// A display for `total` prompts.
    pub fn new(label: &'static str, total: usize, quiet: bool) -> Self {
        let terminal = std::io::stderr().is_terminal();
        let bar = (terminal && !quiet).then(|| {
            // no colour in the template, so NO_COLOR has nothing left to switch off
            let style = ProgressStyle::with_template("{prefix} [{bar:30}] {pos}/{len} {msg} eta {eta}")
                .unwrap_or_else(|_| ProgressStyle::default_bar());
            let bar = ProgressBar::with_draw_target(Some(total as u64), ProgressDrawTarget::stderr());
            bar.set_style(style.progress_chars("=> "));
            bar.set_prefix(label);
            bar
        });
        Self {
            label,
            bar,
            lines: !terminal && !quiet,
            last_line: Instant::now(),
        }
    }

    /// Shows a new state.
    pub fn update(&mut self, progress: Progress) {
        let length = progress
            .acceptance_length
            .map_or_else(String::new, |length| format!("acceptance length {length:.3}"));
        if let Some(bar) = &self.bar {
            bar.set_message(length.clone());
            bar.set_position(progress.done as u64);
            if progress.done == progress.total {
                bar.finish_and_clear();
            }
        }
        if self.lines && (progress.done == progress.total || self.last_line.elapsed() >= LINE_EVERY) {
            self.last_line = Instant::now();
            let comma = if length.is_empty() { "" } else { ", " };
            eprintln!(
                "{}: {}/{} prompts{comma}{length}",
                self.label, progress.done, progress.total
            );
        }
    }
}

/// Shows how far bytes have come, on standard error: a bar on a terminal, a plain line now and then elsewhere.
pub fn transfer(label: &'static str) -> Watch {
    if std::io::stderr().is_terminal() {
        let style = ProgressStyle::with_template("{prefix} [{bar:30}] {bytes}/{total_bytes} {bytes_per_sec} eta {eta}")
            .unwrap_or_else(|_| ProgressStyle::default_bar());
        let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr());
        bar.set_style(style.progress_chars("=> "));
        bar.set_prefix(label);
        return Box::new(move |Transfer { done, total }| {
            bar.set_length(total);
            bar.set_position(done);
            if done == total {
                bar.finish_and_clear();
            }
        });
    }
    let last = Mutex::new(None::<(Instant, u64)>);
    Box::new(move |Transfer { done, total }| {
        let mut last = last.lock().unwrap_or_else(PoisonError::into_inner);
        // the end is told once, however often it is reached
        let due = match *last {
            None => true,
            Some((when, told)) => told < done && (done == total || when.elapsed() >= LINE_EVERY),
        };
        if due {
            *last = Some((Instant::now(), done));
            eprintln!("{label}: {done}/{total} bytes");
        }
    })
}
