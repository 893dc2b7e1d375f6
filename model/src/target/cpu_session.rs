//! One sequence on the CPU target: caches, plain steps, and the verify transaction.
//!
//! A verify pass writes nothing that outlives it: gated-delta-net layers work on a copy of S and leave their writes in a
//! stash, attention rows lie past the session's length. [`Verified::commit`] folds the first n writes into S, takes
//! rows [n, n + taps - 1) of the convolution input as the new tail and moves the length.

use candle_core::{Device, Result, Tensor, bail};

use super::cpu::{Cache, CpuTarget, Pending, segments};
use super::{DeltaNetState, Forward, LogitRows, Session, Verified, VerifyStep, check_tokens, delta};

/// One sequence and its caches.
pub(crate) struct CpuSession<'m> {
    target: &'m CpuTarget,
    taps: Vec<usize>,
    caches: Vec<Cache>,
    len: usize,
}

impl<'m> CpuSession<'m> {
    pub(crate) fn new(target: &'m CpuTarget, taps: &[usize]) -> Self {
        let caches = target.caches(target.config.layers.len());
        Self {
            target,
            taps: taps.to_vec(),
            caches,
            len: 0,
        }
    }
}

impl Session for CpuSession<'_> {
    fn len(&self) -> usize {
        self.len
    }

    fn forward(&mut self, tokens: &[u32], rows: LogitRows) -> Result<Forward> {
        let info = &self.target.config.info;
        check_tokens(tokens, self.len, info)?;
        let mut tapped = Vec::with_capacity(tokens.len() * self.taps.len() * info.hidden_size);
        let mut hidden = Vec::new();
        for piece in segments(tokens) {
            let pass = self
                .target
                .run(piece, &mut self.caches, self.len, &self.taps, &mut tapped, true)?;
            self.len += piece.len();
            match rows {
                LogitRows::None => {}
                LogitRows::Last => hidden = pass.hidden[pass.hidden.len() - info.hidden_size..].to_vec(),
                LogitRows::All => hidden.extend_from_slice(&pass.hidden),
            }
        }
        let logits = match rows {
            LogitRows::None => None,
            LogitRows::Last | LogitRows::All => Some(self.target.logits(&hidden)?),
        };
        Ok(Forward {
            logits,
            taps: self.target.tap_tensor(tapped, tokens.len())?,
        })
    }

    fn verify(&mut self, tokens: &[u32]) -> Result<VerifyStep<'_>> {
        check_tokens(tokens, self.len, &self.target.config.info)?;
        let rows = tokens.len();
        let mut tapped = Vec::new();
        let pass = self
            .target
            .run(tokens, &mut self.caches, self.len, &self.taps, &mut tapped, false)?;
        let logits: Tensor = self.target.logits(&pass.hidden)?;
        let taps = self.target.tap_tensor(tapped, rows)?;
        let pending = CpuVerified {
            session: self,
            pending: pass.pending,
            rows,
        };
        Ok(VerifyStep::new(logits, taps, rows, Box::new(pending)))
    }

    fn delta_net_states(&self) -> Result<Vec<Option<DeltaNetState>>> {
        let tensor = |values: &[f32], shape: &[usize]| Tensor::from_slice(values, shape, &Device::Cpu);
        let state = |cache: &Cache| match (cache, &self.target.config.linear) {
            (Cache::Linear { tail, state }, Some(shape)) => Ok(Some(DeltaNetState {
                conv_tail: tensor(tail, &[shape.conv_width - 1, shape.conv_channels()])?,
                state: tensor(state, &[shape.value_heads, shape.key_dim, shape.value_dim])?,
            })),
            _ => Ok(None),
        };
        self.caches.iter().map(state).collect()
    }
}

struct CpuVerified<'s, 'm> {
    session: &'s mut CpuSession<'m>,
    pending: Vec<Option<Pending>>,
    rows: usize,
}

impl Verified for CpuVerified<'_, '_> {
    fn commit(self: Box<Self>, n: usize) -> Result<()> {
        if n > self.rows {
            bail!("commit of {n} tokens: the verify pass had {}", self.rows)
        }
        let Some(shape) = &self.session.target.config.linear else {
            self.session.len += n;
            return Ok(());
        };
        for (cache, pending) in self.session.caches.iter_mut().zip(self.pending) {
            if let (Cache::Linear { tail, state }, Some(pending)) = (cache, pending) {
                if n == self.rows {
                    *state = pending.state;
                } else {
                    delta::fold(shape, &pending.stash, n, state);
                }
                let (from, len) = (n * shape.conv_channels(), tail.len());
                tail.copy_from_slice(&pending.conv_input[from..from + len]);
            }
        }
        self.session.len += n;
        Ok(())
    }
}
