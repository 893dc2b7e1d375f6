//! A target without weights: the next token is a hash of the whole prefix. For tests of everything above `model`.
//!
//! It keeps two caches as a hybrid target does: the list of tokens (attention, cut by length) and a folded state
//! (recurrent, cannot be cut). Logits depend on both, so a rollback that forgets either changes the text. Taps tell
//! where they come from: row of tap i at position p is `[i, p, token, state mod 2^16]`.

use candle_core::{DType, Device, Result, Tensor, bail};
use dflash_model::{Forward, LogitRows, Session, Target, TargetHead, TargetInfo, Verified, VerifyStep};

use crate::random::mix;

/// Numbers in one tap row of one layer.
const HIDDEN: usize = 4;
/// Spread of logits by default: 24 random bits, of which no two are equal in practice.
const WIDE: f32 = 16_777_216.;

/// A way to be wrong that real targets have shown; lossless checks must catch each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// A commit keeps the recurrent state of all verified rows.
    StaleState,
    /// A commit keeps the attention rows of all verified rows.
    UncutCache,
}

/// A deterministic target over a small vocabulary.
#[derive(Debug)]
pub struct ScriptedTarget {
    info: TargetInfo,
    head: TargetHead,
    seed: u64,
    /// Logits lie in [0, spread).
    spread: f32,
    fault: Option<Fault>,
}

impl ScriptedTarget {
    /// A target of 8 layers over `vocab_size` tokens whose text is a function of `seed` and the prompt.
    pub fn new(seed: u64, vocab_size: usize, max_positions: usize) -> Result<Self> {
        let embed = Tensor::zeros((vocab_size, HIDDEN), DType::F32, &Device::Cpu)?;
        Ok(Self {
            info: TargetInfo {
                model_type: "scripted".into(),
                hidden_size: HIDDEN,
                intermediate_size: HIDDEN,
                num_layers: 8,
                vocab_size,
                max_positions,
                rope_theta: 1e7,
                rms_norm_eps: 1e-6,
                tied: true,
            },
            head: TargetHead {
                embed: embed.clone(),
                head: embed,
            },
            seed,
            spread: WIDE,
            fault: None,
        })
    }

    /// The same target with logits in [0, `spread`): a small spread gives every token a fair chance when sampled.
    #[must_use]
    pub fn with_spread(self, spread: f32) -> Self {
        Self { spread, ..self }
    }

    /// The same target with a broken rollback.
    #[must_use]
    pub fn with_fault(self, fault: Fault) -> Self {
        Self {
            fault: Some(fault),
            ..self
        }
    }
}

impl Target for ScriptedTarget {
    fn info(&self) -> &TargetInfo {
        &self.info
    }

    fn head(&self) -> &TargetHead {
        &self.head
    }

    fn session(&self, taps: &[usize]) -> Result<Box<dyn Session + '_>> {
        let ascending = taps.windows(2).all(|pair| pair[0] < pair[1]);
        if !ascending || taps.iter().any(|&tap| tap >= self.info.num_layers - 1) {
            bail!(
                "taps {taps:?}: expected strictly increasing ids below {}",
                self.info.num_layers - 1
            )
        }
        Ok(Box::new(ScriptedTargetSession {
            target: self,
            taps: taps.to_vec(),
            tokens: Vec::new(),
            state: mix(self.seed),
        }))
    }

    fn taps(&self, tokens: &[u32], taps: &[usize]) -> Result<Tensor> {
        Ok(self.session(taps)?.forward(tokens, LogitRows::None)?.taps)
    }
}

struct ScriptedTargetSession<'t> {
    target: &'t ScriptedTarget,
    taps: Vec<usize>,
    tokens: Vec<u32>,
    state: u64,
}

impl ScriptedTargetSession<'_> {
    /// States after each of `tokens`, their logits [T, V] and taps [T, n_taps * H].
    fn run(&self, tokens: &[u32]) -> Result<(Vec<u64>, Tensor, Tensor)> {
        let (info, spread) = (&self.target.info, self.target.spread);
        if tokens.is_empty() || self.tokens.len() + tokens.len() > info.max_positions {
            bail!(
                "{} tokens after {}: expected at least one and no position past {}",
                tokens.len(),
                self.tokens.len(),
                info.max_positions
            )
        }
        let (mut state, mut states) = (self.state, Vec::new());
        let (mut logits, mut taps) = (Vec::new(), Vec::new());
        for (row, &token) in tokens.iter().enumerate() {
            if token as usize >= info.vocab_size {
                bail!("token {token}: the vocabulary has {}", info.vocab_size)
            }
            state = mix(state ^ u64::from(token));
            states.push(state);
            let position = self.tokens.len() + row;
            for id in 0..info.vocab_size as u64 {
                let word = mix(state ^ mix(position as u64) ^ (id << 32)) >> 40;
                logits.push(word as f32 * (spread / WIDE));
            }
            for &tap in &self.taps {
                taps.extend([tap as f32, position as f32, token as f32, (state & 0xFFFF) as f32]);
            }
        }
        let shape = |width| (tokens.len(), width);
        let logits = Tensor::from_vec(logits, shape(info.vocab_size), &Device::Cpu)?;
        let taps = Tensor::from_vec(taps, shape(self.taps.len() * HIDDEN), &Device::Cpu)?;
        Ok((states, logits, taps))
    }
}

impl Session for ScriptedTargetSession<'_> {
    fn len(&self) -> usize {
        self.tokens.len()
    }

    fn forward(&mut self, tokens: &[u32], rows: LogitRows) -> Result<Forward> {
        let (states, logits, taps) = self.run(tokens)?;
        self.state = states[states.len() - 1];
        self.tokens.extend(tokens);
        let logits = match rows {
            LogitRows::None => None,
            LogitRows::Last => Some(logits.narrow(0, tokens.len() - 1, 1)?),
            LogitRows::All => Some(logits),
        };
        Ok(Forward { logits, taps })
    }

    fn verify(&mut self, tokens: &[u32]) -> Result<VerifyStep<'_>> {
        let (states, logits, taps) = self.run(tokens)?;
        let pending = Pending {
            tokens: tokens.to_vec(),
            states,
            fault: self.target.fault,
            cached_tokens: &mut self.tokens,
            cached_state: &mut self.state,
        };
        Ok(VerifyStep::new(logits, taps, tokens.len(), Box::new(pending)))
    }
}

struct Pending<'s> {
    tokens: Vec<u32>,
    states: Vec<u64>,
    fault: Option<Fault>,
    cached_tokens: &'s mut Vec<u32>,
    cached_state: &'s mut u64,
}

impl Verified for Pending<'_> {
    fn commit(self: Box<Self>, n: usize) -> Result<()> {
        let kept = |fault| {
            if self.fault == Some(fault) {
                self.tokens.len()
            } else {
                n
            }
        };
        self.cached_tokens.extend(&self.tokens[..kept(Fault::UncutCache)]);
        if let Some(last) = kept(Fault::StaleState).checked_sub(1) {
            *self.cached_state = self.states[last];
        }
        Ok(())
    }
}
