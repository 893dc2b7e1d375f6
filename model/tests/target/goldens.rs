//! Against Hugging Face transformers, stored by scripts/fixtures/target.py.

use candle_core::{DType, Device, Result};
use dflash_model::target::{self, LogitRows};

use crate::{CASES, all_taps, both, demo, fixture, golden, relative, states, values};

#[test]
fn logits_and_hidden_states_equal_transformers() -> Result<()> {
    for name in CASES {
        let golden = golden(&fixture(name).join("golden.safetensors"));
        let lengths: Vec<usize> = golden
            .keys()
            .filter_map(|key| key.strip_suffix(".tokens"))
            .map(|n| n.parse().expect("length"))
            .collect();
        assert!(lengths.len() >= 2, "{name}");
        for (path, target) in both(name) {
            let (taps, hidden) = (all_taps(&*target), target.info().hidden_size);
            for n in &lengths {
                let tokens: Vec<u32> = golden[&format!("{n}.tokens")]
                    .to_vec1::<i64>()?
                    .into_iter()
                    .map(|t| t as u32)
                    .collect();
                let mut session = target.session(&taps)?;
                let out = session.forward(&tokens, LogitRows::All)?;
                let logits = out.logits.expect("logits");
                let error = relative(&values(&logits), &values(&golden[&format!("{n}.logits")]));
                assert!(error <= 1e-5, "{name} {path} {n} logits: {error:e}");
                for layer in &taps {
                    let came = out.taps.narrow(1, layer * hidden, hidden)?;
                    let error = relative(&values(&came), &values(&golden[&format!("{n}.hidden.{}", layer + 1)]));
                    assert!(error <= 1e-5, "{name} {path} {n} layer {layer}: {error:e}");
                }
                assert_eq!(
                    values(&target.taps(&tokens, &taps)?),
                    values(&out.taps),
                    "{name} {path}: taps() is forward"
                );
            }
        }
    }
    Ok(())
}

#[test]
fn final_states_equal_transformers() -> Result<()> {
    for name in CASES {
        let golden = golden(&fixture(name).join("golden.safetensors"));
        for (path, target) in both(name) {
            for n in golden.keys().filter_map(|key| key.strip_suffix(".tokens")) {
                let tokens: Vec<u32> = golden[&format!("{n}.tokens")]
                    .to_vec1::<i64>()?
                    .into_iter()
                    .map(|t| t as u32)
                    .collect();
                let mut session = target.session(&[])?;
                session.forward(&tokens, LogitRows::None)?;
                let mut compared = 0;
                for (layer, cache) in states(&*session).into_iter().enumerate() {
                    let Some((tail, state)) = cache else { continue };
                    for (came, part) in [(tail, "conv"), (state, "state")] {
                        let error = relative(&came, &values(&golden[&format!("{n}.{part}.{layer}")]));
                        assert!(error <= 1e-5, "{name} {path} {n} {part} of layer {layer}: {error:e}");
                        compared += 1;
                    }
                }
                let stored = golden
                    .keys()
                    .filter(|key| key.starts_with(&format!("{n}.conv.")) || key.starts_with(&format!("{n}.state.")));
                assert_eq!(compared, stored.count(), "{name} {path} {n}");
            }
        }
    }
    Ok(())
}

#[test]
fn the_demo_target_equals_transformers() -> Result<()> {
    let golden = golden(&fixture("demo.safetensors"));
    let tokens: Vec<u32> = golden["tokens"]
        .to_vec1::<i64>()?
        .into_iter()
        .map(|t| t as u32)
        .collect();
    let target = target::load(&demo(), &Device::Cpu, DType::F32)?;
    let mut session = target.session(&[1, 3, 5])?;
    let out = session.forward(&tokens, LogitRows::All)?;
    let logits = out.logits.expect("logits");
    let last = logits.narrow(0, tokens.len() - 1, 1)?;
    let error = relative(&values(&last), &values(&golden["logits_last"]));
    assert!(error <= 1e-5, "logits: {error:e}");
    let best: Vec<i64> = logits.argmax(1)?.to_vec1::<u32>()?.into_iter().map(i64::from).collect();
    assert_eq!(best, golden["argmax"].to_vec1::<i64>()?);
    for (slot, entry) in [2, 4, 6].into_iter().enumerate() {
        let came = out.taps.narrow(1, slot * 256, 256)?.narrow(0, tokens.len() - 8, 8)?;
        let error = relative(&values(&came), &values(&golden[&format!("hidden.{entry}")]));
        assert!(error <= 1e-5, "hidden state {entry}: {error:e}");
    }
    // bf16 is close, not equal, and its taps are bf16
    let rounded = target::load(&demo(), &Device::Cpu, DType::BF16)?;
    let out = rounded.session(&[1, 3, 5])?.forward(&tokens, LogitRows::Last)?;
    assert_eq!(out.taps.dtype(), DType::BF16);
    let error = relative(&values(&out.logits.expect("logits")), &values(&golden["logits_last"]));
    assert!(error > 1e-6 && error < 0.05, "bf16 logits: {error:e}");
    Ok(())
}
