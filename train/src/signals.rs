//! SIGINT and SIGTERM as a flag: the loop finishes its step, saves and leaves with 130 or 143.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use anyhow::{Context, Result};
use signal_hook::consts::{SIGINT, SIGTERM};

/// The signal that has arrived, if any. Cloned handles share it.
#[derive(Debug, Clone, Default)]
pub struct StopFlag(Arc<AtomicUsize>);

impl StopFlag {
    /// Listens to SIGINT and SIGTERM. A second signal ends the process at once.
    pub fn listen() -> Result<Self> {
        let flag = Self::default();
        let second = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM] {
            // order matters: the immediate exit looks at the state that the first signal left
            signal_hook::flag::register_conditional_shutdown(signal, exit_code(signal), Arc::clone(&second))
                .and_then(|_| signal_hook::flag::register(signal, Arc::clone(&second)))
                .and_then(|_| signal_hook::flag::register_usize(signal, Arc::clone(&flag.0), signal as usize))
                .context("installing signal handlers")?;
        }
        Ok(flag)
    }

    /// Exit code of the signal that has arrived.
    pub fn exit_code(&self) -> Option<i32> {
        match self.0.load(Ordering::SeqCst) {
            0 => None,
            signal => Some(exit_code(signal as i32)),
        }
    }

    /// Sets the flag as if `signal` had arrived.
    pub fn raise(&self, signal: i32) {
        self.0.store(signal as usize, Ordering::SeqCst);
    }
}

fn exit_code(signal: i32) -> i32 {
    128 + signal
}
