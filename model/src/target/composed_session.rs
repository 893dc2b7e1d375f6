//! One sequence on the composed target. Tensors are immutable, so taking a verify pass back is keeping the old handles.

use candle_core::{Result, Tensor, bail};

use super::composed::{Cache, ComposedTarget, Pending};
use super::{DeltaNetState, Forward, LogitRows, Session, Verified, VerifyStep, check_tokens};

/// One sequence and its caches.
pub(crate) struct ComposedSession<'m> {
    target: &'m ComposedTarget,
    taps: Vec<usize>,
    caches: Vec<Cache>,
    len: usize,
}

impl<'m> ComposedSession<'m> {
    pub(crate) fn new(target: &'m ComposedTarget, taps: &[usize]) -> Result<Self> {
        let caches = target.caches(target.config.layers.len())?;
        Ok(Self {
            target,
            taps: taps.to_vec(),
            caches,
            len: 0,
        })
    }

    fn joined(&self, tapped: &[Tensor], rows: usize) -> Result<Tensor> {
        if tapped.is_empty() {
            return Tensor::zeros((rows, 0), self.target.compute, &self.target.device);
        }
        Tensor::cat(tapped, 1)
    }
}

impl Session for ComposedSession<'_> {
    fn len(&self) -> usize {
        self.len
    }

    fn forward(&mut self, tokens: &[u32], rows: LogitRows) -> Result<Forward> {
        check_tokens(tokens, self.len, &self.target.config.info)?;
        // on a copy of the handles, so that a failing device leaves the session as it was
        let mut caches = self.caches.clone();
        let (hidden, tapped, _) = self.target.run(tokens, &mut caches, self.len, &self.taps)?;
        let logits = match rows {
            LogitRows::None => None,
            LogitRows::Last => Some(self.target.logits(&hidden.narrow(0, tokens.len() - 1, 1)?)?),
            LogitRows::All => Some(self.target.logits(&hidden)?),
        };
        let taps = self.joined(&tapped, tokens.len())?;
        self.caches = caches;
        self.len += tokens.len();
        Ok(Forward { logits, taps })
    }

    fn verify(&mut self, tokens: &[u32]) -> Result<VerifyStep<'_>> {
        check_tokens(tokens, self.len, &self.target.config.info)?;
        let rows = tokens.len();
        let mut caches = self.caches.clone();
        let (hidden, tapped, pending) = self.target.run(tokens, &mut caches, self.len, &self.taps)?;
        let (logits, taps) = (self.target.logits(&hidden)?, self.joined(&tapped, rows)?);
        let pending = ComposedVerified {
            session: self,
            caches,
            pending,
            rows,
        };
        Ok(VerifyStep::new(logits, taps, rows, Box::new(pending)))
    }

    fn delta_net_states(&self) -> Result<Vec<Option<DeltaNetState>>> {
        let state = |cache: &Cache| match cache {
            Cache::Linear { tail, state } => Some(DeltaNetState {
                conv_tail: tail.clone(),
                state: state.clone(),
            }),
            Cache::Full { .. } => None,
        };
        Ok(self.caches.iter().map(state).collect())
    }
}

struct ComposedVerified<'s, 'm> {
    session: &'s mut ComposedSession<'m>,
    /// The caches after all rows.
    caches: Vec<Cache>,
    pending: Vec<Option<Pending>>,
    rows: usize,
}

impl Verified for ComposedVerified<'_, '_> {
    fn commit(mut self: Box<Self>, n: usize) -> Result<()> {
        if n > self.rows {
            bail!("commit of {n} tokens: the verify pass had {}", self.rows)
        }
        if n < self.rows {
            for (cache, pending) in self.caches.iter_mut().zip(&self.pending) {
                if let (Cache::Linear { tail, state }, Some(pending)) = (cache, pending) {
                    *tail = pending.conv_input.narrow(0, n, tail.dim(0)?)?.contiguous()?;
                    *state = pending.fold(n)?;
                }
            }
        }
        // attention rows past the new length stay as scratch, to be overwritten
        self.session.caches = self.caches;
        self.session.len += n;
        Ok(())
    }
}
