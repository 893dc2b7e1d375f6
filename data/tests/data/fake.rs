//! A target whose taps are a hash of the prefix, so that every position, layer and token matters.

use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::{DType, Device, Result, Tensor, bail};
use dflash_data::{Example, Identity, Stream};
use dflash_model::{Session, Target, TargetHead, TargetInfo};

pub(crate) const HIDDEN: usize = 6;
pub(crate) const LAYERS: usize = 8;
pub(crate) const VOCABULARY: usize = 97;

pub(crate) struct FakeTarget {
    info: TargetInfo,
    head: TargetHead,
    salt: u64,
    /// Forward passes that still succeed.
    pub(crate) passes_left: AtomicUsize,
    /// Token whose taps in layer 3 are infinite.
    pub(crate) poison: Option<u32>,
}

impl FakeTarget {
    pub(crate) fn new(salt: u64) -> Self {
        let embed = Tensor::zeros((VOCABULARY, HIDDEN), DType::F32, &Device::Cpu).unwrap();
        Self {
            info: TargetInfo {
                model_type: "fake".to_owned(),
                hidden_size: HIDDEN,
                intermediate_size: 4 * HIDDEN,
                num_layers: LAYERS,
                vocab_size: VOCABULARY,
                max_positions: 512,
                rope_theta: 1e4,
                rms_norm_eps: 1e-6,
                tied: true,
            },
            head: TargetHead {
                head: embed.clone(),
                embed,
            },
            salt,
            passes_left: AtomicUsize::new(usize::MAX),
            poison: None,
        }
    }
}

impl Target for FakeTarget {
    fn info(&self) -> &TargetInfo {
        &self.info
    }

    fn head(&self) -> &TargetHead {
        &self.head
    }

    fn session(&self, _taps: &[usize]) -> Result<Box<dyn Session + '_>> {
        bail!("the data room never decodes")
    }

    fn taps(&self, tokens: &[u32], taps: &[usize]) -> Result<Tensor> {
        if self.passes_left.fetch_sub(1, Ordering::SeqCst) == 0 {
            bail!("the power went out")
        }
        let mut values = Vec::new();
        let mut prefix = self.salt;
        for (position, &token) in tokens.iter().enumerate() {
            prefix = Stream::new(&[prefix, u64::from(token)]).next_u64();
            for &layer in taps {
                let mut stream = Stream::new(&[prefix, layer as u64]);
                for column in 0..HIDDEN {
                    let value = (stream.uniform() * 8.0 - 4.0) as f32;
                    let poisoned = self.poison == Some(token) && layer == 3 && column == 2 && position > 0;
                    values.push(if poisoned { f32::INFINITY } else { value });
                }
            }
        }
        Tensor::from_vec(values, (tokens.len(), taps.len() * HIDDEN), &Device::Cpu)
    }
}

pub(crate) fn identity(layers: &[usize]) -> Identity {
    Identity {
        target: "target-a".to_owned(),
        tokenizer: "tokenizer-a".to_owned(),
        template: "template-a".to_owned(),
        thinking: Some(false),
        layers: layers.to_vec(),
        hidden_size: HIDDEN,
    }
}

/// Examples of 5 to 40 tokens: a prompt and a response.
pub(crate) fn examples(count: usize, seed: u64) -> Vec<Example> {
    let mut stream = Stream::new(&[seed]);
    (0..count)
        .map(|i| {
            let prompt = 1 + stream.below(20);
            let response = 4 + stream.below(20);
            let mut draw = |n: usize| (0..n).map(|_| stream.below(VOCABULARY) as u32).collect::<Vec<_>>();
            Example::of_response(&draw(prompt), &draw(response), i + 1)
        })
        .collect()
}
