//! SIGINT and SIGTERM: at once where everything on disk is whole at any moment, after saving where work would be lost.
//!
//! Loading, capturing, evaluating and planning write only files that appear whole, so a signal ends them where they
//! stand. Answering prompts and training hold unsaved work: they take a [`Deferred`], see the flag at the next token
//! or step, save and leave. A second signal ends the process at once in any case.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use anyhow::{Context, Result};
use candle_core::Tensor;
use dflash_model::target::{DeltaNetState, Forward, LogitRows, Session, Target, TargetHead, TargetInfo, VerifyStep};
use signal_hook::consts::{SIGINT, SIGTERM};

/// The signal that has arrived, if any. Cloned handles share it.
#[derive(Debug, Clone, Default)]
pub struct StopFlag {
    signal: Arc<AtomicUsize>,
    /// Whether the next signal ends the process in its handler.
    at_once: Arc<AtomicBool>,
}

impl StopFlag {
    /// Listens to SIGINT and SIGTERM, which end the process at once until someone calls [`StopFlag::defer`].
    pub fn listen() -> Result<Self> {
        let flag = Self::default();
        flag.at_once.store(true, Ordering::SeqCst);
        for signal in [SIGINT, SIGTERM] {
            // order matters: the immediate exit looks at the state from before this signal
            signal_hook::flag::register_conditional_shutdown(signal, exit_code(signal), Arc::clone(&flag.at_once))
                .and_then(|_| signal_hook::flag::register(signal, Arc::clone(&flag.at_once)))
                .and_then(|_| signal_hook::flag::register_usize(signal, Arc::clone(&flag.signal), signal as usize))
                .context("installing signal handlers")?;
        }
        Ok(flag)
    }

    /// Lets the first signal only set the flag, for as long as the result lives: the caller looks at it and saves.
    pub fn defer(&self) -> Deferred<'_> {
        self.at_once.store(false, Ordering::SeqCst);
        Deferred(self)
    }

    /// Exit code of the signal that has arrived.
    pub fn exit_code(&self) -> Option<i32> {
        match self.signal.load(Ordering::SeqCst) {
            0 => None,
            signal => Some(exit_code(signal as i32)),
        }
    }

    /// Sets the flag as if `signal` had arrived.
    pub fn raise(&self, signal: i32) {
        self.signal.store(signal as usize, Ordering::SeqCst);
    }
}

/// While it lives, a signal waits for someone to look at the flag.
#[must_use]
pub struct Deferred<'s>(&'s StopFlag);

impl Drop for Deferred<'_> {
    fn drop(&mut self) {
        self.0.at_once.store(true, Ordering::SeqCst);
    }
}

fn exit_code(signal: i32) -> i32 {
    128 + signal
}

/// A target that refuses its next pass once a signal has come: whoever decodes with it stops at the next token.
pub struct Interruptible {
    target: Arc<dyn Target>,
    stop: StopFlag,
}

impl Interruptible {
    /// `target`, watched.
    pub fn new(target: Arc<dyn Target>, stop: StopFlag) -> Self {
        Self { target, stop }
    }
}

impl Target for Interruptible {
    fn info(&self) -> &TargetInfo {
        self.target.info()
    }

    fn head(&self) -> &TargetHead {
        self.target.head()
    }

    fn session(&self, taps: &[usize]) -> candle_core::Result<Box<dyn Session + '_>> {
        Ok(Box::new(Watched {
            session: self.target.session(taps)?,
            stop: &self.stop,
        }))
    }

    fn taps(&self, tokens: &[u32], taps: &[usize]) -> candle_core::Result<Tensor> {
        go_on(&self.stop)?;
        self.target.taps(tokens, taps)
    }
}

/// A session of an [`Interruptible`].
struct Watched<'t> {
    session: Box<dyn Session + 't>,
    stop: &'t StopFlag,
}

impl Session for Watched<'_> {
    fn len(&self) -> usize {
        self.session.len()
    }

    fn forward(&mut self, tokens: &[u32], rows: LogitRows) -> candle_core::Result<Forward> {
        go_on(self.stop)?;
        self.session.forward(tokens, rows)
    }

    fn verify(&mut self, tokens: &[u32]) -> candle_core::Result<VerifyStep<'_>> {
        go_on(self.stop)?;
        self.session.verify(tokens)
    }

    fn delta_net_states(&self) -> candle_core::Result<Vec<Option<DeltaNetState>>> {
        self.session.delta_net_states()
    }
}

fn go_on(stop: &StopFlag) -> candle_core::Result<()> {
    match stop.exit_code() {
        None => Ok(()),
        Some(_) => candle_core::bail!("interrupted by a signal"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dflash_eval::scripted_target::ScriptedTarget;

    #[test]
    fn a_raised_flag_stops_the_next_pass_of_any_kind_and_no_earlier_one() {
        let stop = StopFlag::default();
        let target = Interruptible::new(Arc::new(ScriptedTarget::new(1, 50, 40).unwrap()), stop.clone());
        let mut session = target.session(&[]).unwrap();
        session.forward(&[1, 2], LogitRows::Last).unwrap();
        drop(session.verify(&[3]).unwrap());
        stop.raise(SIGTERM);
        assert_eq!(stop.exit_code(), Some(143));
        assert!(session.forward(&[3], LogitRows::Last).is_err());
        assert!(session.verify(&[3]).is_err());
        assert_eq!(session.len(), 2);
        assert!(target.taps(&[1, 2], &[0]).is_err());
    }
}
