//! The target against Hugging Face transformers, against its own composed twin, and against itself: any split of the
//! input, any number of committed rows, any prefix of names.
//!
//! Fixtures come from scripts/fixtures/target.py.

mod configs;
mod folders;
mod goldens;
mod sessions;

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use dflash_model::target::{self, LogitRows, Session, Target};

const CASES: [&str; 7] = ["ratio1", "ratio2", "ratio3", "odd", "interval", "qwen3", "qwen3_tied"];

pub(crate) fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures/target")
        .join(name)
}

pub(crate) fn demo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/demo/target")
}

pub(crate) fn load(name: &str) -> Box<dyn Target> {
    target::load(&fixture(name), &Device::Cpu, DType::F32).expect("fixture loads")
}

pub(crate) fn both(name: &str) -> [(&'static str, Box<dyn Target>); 2] {
    let composed = target::load_composed(&fixture(name), &Device::Cpu, DType::F32).expect("fixture loads");
    [("kernels", load(name)), ("composed", composed)]
}

pub(crate) fn golden(path: &Path) -> HashMap<String, Tensor> {
    candle_core::safetensors::load(path, &Device::Cpu).expect("golden file")
}

pub(crate) fn tokens(count: usize, vocab: usize, seed: u32) -> Vec<u32> {
    (0..count as u32)
        .map(|i| (i.wrapping_add(seed).wrapping_mul(2_654_435_761) >> 7) % vocab as u32)
        .collect()
}

pub(crate) fn values(x: &Tensor) -> Vec<f32> {
    x.to_dtype(DType::F32)
        .and_then(|x| x.flatten_all()?.to_vec1())
        .expect("values")
}

pub(crate) fn relative(came: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(came.len(), expected.len());
    let square = |x: f64| x * x;
    let error: f64 = came
        .iter()
        .zip(expected)
        .map(|(a, b)| square(f64::from(*a) - f64::from(*b)))
        .sum();
    (error / expected.iter().map(|b| square(f64::from(*b))).sum::<f64>().max(1e-30)).sqrt()
}

pub(crate) fn all_taps(target: &dyn Target) -> Vec<usize> {
    (0..target.info().num_layers - 1).collect()
}

/// Logits and taps of one forward from empty caches.
pub(crate) fn fresh(target: &dyn Target, tokens: &[u32]) -> (Vec<f32>, Vec<f32>) {
    let mut session = target.session(&all_taps(target)).expect("session");
    let out = session.forward(tokens, LogitRows::All).expect("forward");
    (values(&out.logits.expect("logits")), values(&out.taps))
}

/// Convolution tail and S of each gated-delta-net layer.
pub(crate) fn states(session: &dyn Session) -> Vec<Option<(Vec<f32>, Vec<f32>)>> {
    let states = session.delta_net_states().expect("states");
    states
        .into_iter()
        .map(|state| state.map(|state| (values(&state.conv_tail), values(&state.state))))
        .collect()
}
