//! The target against Hugging Face transformers, against its own composed twin, and against itself: any split of the
//! input, any number of committed rows, any prefix of names.
//!
//! Fixtures come from scripts/fixtures/target.py.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Result, Tensor};
use dflash_model::target::{self, LogitRows, Session, Target, config::GateActivation, config::Mixer};
use dflash_model::{TargetConfig, TensorFolder};
use proptest::prelude::*;

const CASES: [&str; 7] = ["ratio1", "ratio2", "ratio3", "odd", "interval", "qwen3", "qwen3_tied"];

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures/target")
        .join(name)
}

fn demo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/demo/target")
}

fn load(name: &str) -> Box<dyn Target> {
    target::load(&fixture(name), &Device::Cpu, DType::F32).expect("fixture loads")
}

fn both(name: &str) -> [(&'static str, Box<dyn Target>); 2] {
    let composed = target::load_composed(&fixture(name), &Device::Cpu, DType::F32).expect("fixture loads");
    [("kernels", load(name)), ("composed", composed)]
}

fn golden(path: &Path) -> HashMap<String, Tensor> {
    candle_core::safetensors::load(path, &Device::Cpu).expect("golden file")
}

fn tokens(count: usize, vocab: usize, seed: u32) -> Vec<u32> {
    (0..count as u32)
        .map(|i| (i.wrapping_add(seed).wrapping_mul(2_654_435_761) >> 7) % vocab as u32)
        .collect()
}

fn values(x: &Tensor) -> Vec<f32> {
    x.to_dtype(DType::F32)
        .and_then(|x| x.flatten_all()?.to_vec1())
        .expect("values")
}

fn relative(came: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(came.len(), expected.len());
    let square = |x: f64| x * x;
    let error: f64 = came
        .iter()
        .zip(expected)
        .map(|(a, b)| square(f64::from(*a) - f64::from(*b)))
        .sum();
    (error / expected.iter().map(|b| square(f64::from(*b))).sum::<f64>().max(1e-30)).sqrt()
}

fn all_taps(target: &dyn Target) -> Vec<usize> {
    (0..target.info().num_layers - 1).collect()
}

/// Logits and taps of one forward from empty caches.
fn fresh(target: &dyn Target, tokens: &[u32]) -> (Vec<f32>, Vec<f32>) {
    let mut session = target.session(&all_taps(target)).expect("session");
    let out = session.forward(tokens, LogitRows::All).expect("forward");
    (values(&out.logits.expect("logits")), values(&out.taps))
}

/// Convolution tail and S of each gated-delta-net layer.
fn states(session: &dyn Session) -> Vec<Option<(Vec<f32>, Vec<f32>)>> {
    let states = session.delta_net_states().expect("states");
    states
        .into_iter()
        .map(|state| state.map(|state| (values(&state.conv_tail), values(&state.state))))
        .collect()
}

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

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn any_split_of_a_prompt_gives_the_same(case in 0usize..7, cuts in prop::collection::vec(1usize..90, 1..6), seed in 0u32..1000) {
        for (path, target) in both(CASES[case]) {
            let ids = tokens(cuts.iter().sum(), target.info().vocab_size, seed);
            let (logits, taps) = fresh(&*target, &ids);
            let mut session = target.session(&all_taps(&*target)).expect("session");
            let (mut split_logits, mut split_taps, mut at) = (Vec::new(), Vec::new(), 0);
            for cut in &cuts {
                let out = session.forward(&ids[at..at + cut], LogitRows::All).expect("forward");
                split_logits.extend(values(&out.logits.expect("logits")));
                split_taps.extend(values(&out.taps));
                at += cut;
            }
            prop_assert_eq!(session.len(), ids.len());
            prop_assert!(relative(&split_logits, &logits) < 1e-5, "{} logits", path);
            prop_assert!(relative(&split_taps, &taps) < 1e-5, "{} taps", path);
        }
    }
}

#[test]
fn a_prompt_longer_than_a_segment_equals_its_halves() -> Result<()> {
    // 1,300 tokens on the demo target cross the internal pieces of every path
    let target = target::load(&demo(), &Device::Cpu, DType::F32)?;
    let ids = tokens(1300, 4090, 3);
    let whole = target.taps(&ids, &[1, 3, 5])?;
    let mut session = target.session(&[1, 3, 5])?;
    let first = session.forward(&ids[..701], LogitRows::None)?.taps;
    let second = session.forward(&ids[701..], LogitRows::None)?.taps;
    let error = relative(&values(&Tensor::cat(&[first, second], 0)?), &values(&whole));
    assert!(error < 1e-5, "{error:e}");
    Ok(())
}

#[test]
fn later_tokens_never_change_earlier_rows() {
    for name in CASES {
        for (path, target) in both(name) {
            let vocab = target.info().vocab_size;
            let mut ids = tokens(100, vocab, 9);
            let (before, _) = fresh(&*target, &ids);
            for id in &mut ids[70..] {
                *id = (*id + 1) % vocab as u32;
            }
            let (after, _) = fresh(&*target, &ids);
            assert_eq!(before[..70 * vocab], after[..70 * vocab], "{name} {path}");
            assert_ne!(before[70 * vocab..], after[70 * vocab..], "{name} {path}");
        }
    }
}

#[test]
fn commit_of_every_n_equals_a_fresh_run_twice_in_a_row_and_dropping_changes_nothing() -> Result<()> {
    for name in CASES {
        for (path, target) in both(name) {
            let taps = all_taps(&*target);
            let vocab = target.info().vocab_size;
            let ids = tokens(60, vocab, 4);
            let wrong = tokens(60, vocab, 77);
            for rows in [1, 5, 20] {
                for n in 0..=rows {
                    let mut session = target.session(&taps)?;
                    session.forward(&ids[..17], LogitRows::None)?;
                    let mut done = 17;
                    for round in 0..2 {
                        // a pass that is dropped leaves nothing behind
                        drop(session.verify(&wrong[..rows])?);
                        assert_eq!(session.len(), done);
                        // n right tokens, the rest garbage
                        let fed: Vec<u32> = [&ids[done..done + n], &wrong[n..rows]].concat();
                        let step = session.verify(&fed)?;
                        let (expected, expected_taps) = fresh(&*target, &[&ids[..done], &fed[..]].concat());
                        assert!(
                            relative(&values(&step.logits), &expected[done * vocab..]) < 1e-5,
                            "{name} {path}"
                        );
                        let width = step.taps.dim(1)?;
                        assert!(
                            relative(&values(&step.taps), &expected_taps[done * width..]) < 1e-5,
                            "{name} {path}"
                        );
                        step.commit(n)?;
                        done += n;
                        assert_eq!(session.len(), done);
                        let mut plain = target.session(&taps)?;
                        plain.forward(&ids[..done], LogitRows::None)?;
                        for (layer, (a, b)) in states(&*session).into_iter().zip(states(&*plain)).enumerate() {
                            let (Some((tail_a, state_a)), Some((tail_b, state_b))) = (a, b) else {
                                continue;
                            };
                            let place = format!("{name} {path} commit {n} of {rows}, round {round}, layer {layer}");
                            assert!(relative(&tail_a, &tail_b) < 1e-5, "{place}");
                            assert!(relative(&state_a, &state_b) < 1e-5, "{place}");
                        }
                    }
                    let next = session
                        .forward(&ids[done..=done], LogitRows::Last)?
                        .logits
                        .expect("logits");
                    let (expected, _) = fresh(&*target, &ids[..=done]);
                    assert!(
                        relative(&values(&next), &expected[done * vocab..]) < 1e-5,
                        "{name} {path} commit {n} of {rows}"
                    );
                }
            }
            let mut session = target.session(&taps)?;
            let refused = session.verify(&ids[..3])?.commit(4).expect_err("too many").to_string();
            assert!(refused.contains("commit of 4"), "{refused}");
            assert_eq!(session.len(), 0);
        }
    }
    Ok(())
}

/// The property on which losslessness rests: what verification computes for a row is what decoding would have.
#[test]
fn verified_rows_and_folded_states_equal_decoding_to_the_bit() -> Result<()> {
    for name in ["ratio1", "ratio2", "ratio3", "odd", "qwen3"] {
        let target = load(name);
        let vocab = target.info().vocab_size;
        let ids = tokens(120, vocab, 21);
        let wrong = tokens(120, vocab, 50);
        let (mut plain, mut speculative) = (target.session(&[0])?, target.session(&[0])?);
        plain.forward(&ids[..40], LogitRows::None)?;
        speculative.forward(&ids[..40], LogitRows::None)?;
        let mut done = 40;
        for n in [3, 0, 16, 1, 7, 8, 2, 16] {
            let fed: Vec<u32> = [&ids[done..done + n], &wrong[n..16]].concat();
            let step = speculative.verify(&fed)?;
            let (logits, taps) = (values(&step.logits), values(&step.taps));
            for (r, id) in ids[done..done + n].iter().enumerate() {
                let out = plain.forward(&[*id], LogitRows::Last)?;
                assert_eq!(
                    values(&out.logits.expect("logits")),
                    logits[r * vocab..(r + 1) * vocab],
                    "{name} row {r}"
                );
                let width = target.info().hidden_size;
                assert_eq!(
                    values(&out.taps),
                    taps[r * width..(r + 1) * width],
                    "{name} taps of row {r}"
                );
            }
            step.commit(n)?;
            done += n;
            for (a, b) in states(&*plain).into_iter().zip(states(&*speculative)) {
                let (Some((tail_a, state_a)), Some((tail_b, state_b))) = (a, b) else {
                    continue;
                };
                assert_eq!(tail_a, tail_b, "{name} after {n}");
                assert_eq!(state_a, state_b, "{name} after {n}");
            }
        }
    }
    Ok(())
}

#[test]
fn sessions_on_several_threads_do_not_disturb_each_other() {
    let target = load("ratio2");
    let ids = tokens(90, target.info().vocab_size, 8);
    let (expected, _) = fresh(&*target, &ids);
    std::thread::scope(|scope| {
        let jobs: Vec<_> = (0..4).map(|_| scope.spawn(|| fresh(&*target, &ids).0)).collect();
        for job in jobs {
            assert_eq!(job.join().expect("thread"), expected);
        }
    });
}

#[test]
fn bad_taps_and_tokens_are_refused_by_value() {
    for (path, target) in both("ratio1") {
        let refused = |taps: &[usize]| target.session(taps).err().expect("refused").to_string();
        assert!(refused(&[0, 2]).contains("layer 2 of 3 layers"), "{path}");
        assert!(refused(&[1, 0]).contains("strictly increasing"), "{path}");
        assert!(refused(&[1, 1]).contains("strictly increasing"), "{path}");
        assert!(target.taps(&[1, 2], &[2]).is_err(), "{path}");
        let mut session = target.session(&[0]).expect("session");
        let refused = |result: Result<target::Forward>| result.expect_err("refused").to_string();
        assert!(
            refused(session.forward(&[1, 96], LogitRows::None)).contains("token 1 is 96"),
            "{path}"
        );
        assert!(
            refused(session.forward(&[], LogitRows::None)).contains("no tokens"),
            "{path}"
        );
        assert!(
            refused(session.forward(&[1; 513], LogitRows::None)).contains("512 positions"),
            "{path}"
        );
        assert_eq!(session.len(), 0);
    }
}

/// A copy of a fixture's folder with its tensors renamed or replaced.
fn rewritten(name: &str, change: impl Fn(String, Tensor) -> Option<(String, Tensor)>) -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("dir");
    std::fs::copy(fixture(name).join("config.json"), dir.path().join("config.json")).expect("config");
    let tensors =
        candle_core::safetensors::load(fixture(name).join("model.safetensors"), &Device::Cpu).expect("tensors");
    let tensors: HashMap<String, Tensor> = tensors.into_iter().filter_map(|(name, x)| change(name, x)).collect();
    candle_core::safetensors::save(&tensors, dir.path().join("model.safetensors")).expect("save");
    dir
}

fn refusal(dir: &Path) -> String {
    target::load(dir, &Device::Cpu, DType::F32)
        .err()
        .expect("refused")
        .to_string()
}

#[test]
fn every_published_prefix_loads_and_vision_and_mtp_tensors_are_skipped() {
    let ids = tokens(20, 96, 2);
    let (expected, _) = fresh(&*load("ratio1"), &ids);
    for prefix in [
        "model.language_model.",
        "model.",
        "language_model.model.",
        "language_model.",
    ] {
        let dir = rewritten("ratio1", |name, x| Some((name.replace("model.", prefix), x)));
        let folder = TensorFolder::open(dir.path()).expect("open");
        let mut tensors: HashMap<String, Tensor> = folder
            .iter()
            .map(|(name, _)| (name.to_string(), folder.get(name, &Device::Cpu).expect("tensor")))
            .collect();
        for extra in [
            "model.visual.patch.weight",
            "visual.a",
            "vision_tower.b",
            "mtp.fc.weight",
        ] {
            tensors.insert(
                extra.to_string(),
                Tensor::zeros(3, DType::F32, &Device::Cpu).expect("zeros"),
            );
        }
        drop(folder);
        candle_core::safetensors::save(&tensors, dir.path().join("model.safetensors")).expect("save");
        let target = target::load(dir.path(), &Device::Cpu, DType::F32).expect(prefix);
        assert_eq!(fresh(&*target, &ids).0, expected, "{prefix}");
    }
}

#[test]
fn shards_through_an_index_load_the_same() {
    let dir = rewritten("qwen3", |name, x| Some((name, x)));
    let all = candle_core::safetensors::load(dir.path().join("model.safetensors"), &Device::Cpu).expect("tensors");
    std::fs::remove_file(dir.path().join("model.safetensors")).expect("remove");
    let mut map = serde_json::Map::new();
    let mut shards = [HashMap::new(), HashMap::new()];
    for (i, (name, x)) in all.into_iter().enumerate() {
        map.insert(name.clone(), format!("part-{}.safetensors", i % 2).into());
        shards[i % 2].insert(name, x);
    }
    for (i, shard) in shards.iter().enumerate() {
        candle_core::safetensors::save(shard, dir.path().join(format!("part-{i}.safetensors"))).expect("save");
    }
    let index = serde_json::json!({ "metadata": {}, "weight_map": map }).to_string();
    std::fs::write(dir.path().join("model.safetensors.index.json"), index).expect("index");
    let target = target::load(dir.path(), &Device::Cpu, DType::F32).expect("sharded");
    let ids = tokens(20, 96, 2);
    assert_eq!(fresh(&*target, &ids), fresh(&*load("qwen3"), &ids));
}

#[test]
fn storage_types_mix_and_compute_stays_f32() {
    let stored = |dtype: DType| {
        rewritten("ratio2", move |name, x| {
            let keep = name.ends_with("A_log") || name.ends_with("linear_attn.norm.weight");
            let x = if keep { x } else { x.to_dtype(dtype).expect("cast") };
            Some((name, x))
        })
    };
    let ids = tokens(40, 96, 2);
    for dtype in [DType::BF16, DType::F16] {
        let half = stored(dtype);
        // the same rounded numbers, stored wide
        let wide = rewritten("ratio2", |name, x| {
            let keep = name.ends_with("A_log") || name.ends_with("linear_attn.norm.weight");
            let x = if keep {
                x
            } else {
                x.to_dtype(dtype).and_then(|x| x.to_dtype(DType::F32)).expect("cast")
            };
            Some((name, x))
        });
        let load = |dir: &tempfile::TempDir| target::load(dir.path(), &Device::Cpu, DType::F32).expect("loads");
        let (half, wide) = (load(&half), load(&wide));
        assert_eq!(half.head().embed.dtype(), dtype);
        assert_eq!(fresh(&*half, &ids), fresh(&*wide, &ids), "{dtype:?}");
    }
}

#[test]
fn every_tensor_that_does_not_fit_is_named_in_one_error() {
    let dir = rewritten("ratio1", |name, x| match name.as_str() {
        "model.layers.0.linear_attn.A_log" => None,
        "model.layers.1.self_attn.q_norm.weight" => {
            Some((name, x.narrow(0, 0, 8).and_then(|x| x.contiguous()).expect("cut")))
        }
        "model.layers.2.mlp.up_proj.weight" => Some((name, x.to_dtype(DType::U8).expect("cast"))),
        "lm_head.weight" => Some(("lm_heads.weight".to_string(), x)),
        _ => Some((name, x)),
    });
    let text = refusal(dir.path());
    for part in [
        "5 tensors",
        "model.layers.0.linear_attn.A_log is missing, expected [2]",
        "q_norm.weight has shape [8], expected [32]",
        "up_proj.weight is stored as U8",
        "lm_head.weight is missing",
        "lm_heads.weight is unexpected",
    ] {
        assert!(text.contains(part), "{part} not in {text}");
    }
    let mlx = rewritten("ratio1", |name, x| {
        let x = if name.ends_with("conv1d.weight") {
            x.transpose(1, 2).and_then(|x| x.contiguous()).expect("mlx")
        } else {
            x
        };
        Some((name, x))
    });
    assert!(refusal(mlx.path()).contains("MLX-converted"));
    let bare = rewritten("ratio1", |name, x| Some((format!("nobody.{name}"), x)));
    assert!(refusal(bare.path()).contains("no embed_tokens.weight under any of the prefixes"));
    // a tied checkpoint may repeat its head, but not contradict it
    let tied = |factor: f64| {
        let dir = rewritten("qwen3_tied", |name, x| Some((name, x)));
        let path = dir.path().join("model.safetensors");
        let mut all = candle_core::safetensors::load(&path, &Device::Cpu).expect("tensors");
        all.insert(
            "lm_head.weight".to_string(),
            (&all["model.embed_tokens.weight"] * factor).expect("head"),
        );
        candle_core::safetensors::save(&all, &path).expect("save");
        dir
    };
    assert!(target::load(tied(1.0).path(), &Device::Cpu, DType::F32).is_ok());
    assert!(refusal(tied(2.0).path()).contains("lm_head.weight differs from the embedding"));
    assert!(target::load(&fixture("ratio1"), &Device::Cpu, DType::F16).is_err());
}

/// The text part of a published Qwen3.5 config.
fn published(
    hidden: usize,
    layers: usize,
    ffn: usize,
    heads: [usize; 2],
    value_heads: usize,
    tied: bool,
) -> serde_json::Value {
    let kinds: Vec<&str> = (0..layers)
        .map(|i| {
            if (i + 1) % 4 == 0 {
                "full_attention"
            } else {
                "linear_attention"
            }
        })
        .collect();
    serde_json::json!({
        "model_type": "qwen3_5_text", "vocab_size": 248320, "hidden_size": hidden, "intermediate_size": ffn,
        "num_hidden_layers": layers, "num_attention_heads": heads[0], "num_key_value_heads": heads[1], "head_dim": 256,
        "layer_types": kinds, "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": value_heads,
        "attn_output_gate": true, "attention_bias": false, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262_144, "tie_word_embeddings": tied, "mamba_ssm_dtype": "float32",
        "output_gate_type": "swish", "mtp_num_hidden_layers": 1, "bos_token_id": null, "eos_token_id": 248_044,
        "rope_parameters": { "rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25,
                             "mrope_section": [11, 11, 10], "mrope_interleaved": true },
        "partial_rotary_factor": 0.25
    })
}

#[test]
fn every_published_shape_parses_nested_and_flat() -> Result<()> {
    for (hidden, layers, ffn, heads, value_heads, tied) in [
        (1024, 24, 3584, [8, 2], 16, true),
        (2048, 24, 6144, [8, 2], 16, true),
        (2560, 32, 9216, [16, 4], 32, true),
        (4096, 32, 12288, [16, 4], 32, false),
        (5120, 64, 17408, [24, 4], 48, false),
    ] {
        let text = published(hidden, layers, ffn, heads, value_heads, tied);
        let nested = serde_json::json!({
            "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": text,
            "vision_config": { "depth": 12 }, "image_token_id": 248_056, "tie_word_embeddings": tied
        });
        let config = TargetConfig::parse(&nested.to_string())?;
        assert_eq!(config, TargetConfig::parse(&text.to_string())?, "flat equals nested");
        assert_eq!(config.info.model_type, "qwen3_5");
        assert_eq!(
            (
                config.info.hidden_size,
                config.info.num_layers,
                config.info.intermediate_size
            ),
            (hidden, layers, ffn)
        );
        assert_eq!(
            (config.num_heads, config.num_kv_heads, config.rotary_dim),
            (heads[0], heads[1], 64)
        );
        assert_eq!(
            config.layers.iter().filter(|mixer| **mixer == Mixer::Full).count(),
            layers / 4
        );
        assert!((config.info.rope_theta - 1e7).abs() < 1e-6);
        assert_eq!(config.info.tied, tied);
        let linear = config.linear.expect("linear layers");
        assert_eq!(
            (linear.value_heads, linear.conv_channels()),
            (value_heads, 4096 + value_heads * 128)
        );
        assert_eq!(linear.gate, GateActivation::Silu);
    }
    Ok(())
}

#[test]
fn what_is_not_supported_is_refused_by_name() {
    let base = published(1024, 24, 3584, [8, 2], 16, true);
    let with = |changes: serde_json::Value| {
        let mut config = base.clone();
        for (key, value) in changes.as_object().expect("object") {
            match value.as_str() {
                Some("REMOVED") => drop(config.as_object_mut().expect("object").remove(key)),
                _ => config[key] = value.clone(),
            }
        }
        TargetConfig::parse(&config.to_string())
    };
    let rope = |theta: serde_json::Value| serde_json::json!({ "rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.25 });
    for (changes, part) in [
        (
            serde_json::json!({ "model_type": "qwen3_5_moe_text" }),
            "mixture-of-experts",
        ),
        (serde_json::json!({ "model_type": "qwen3_moe" }), "mixture-of-experts"),
        (
            serde_json::json!({ "num_experts": 256 }),
            "num_experts: mixture-of-experts",
        ),
        (serde_json::json!({ "model_type": "qwen4_exp" }), "hyper-connections"),
        (
            serde_json::json!({ "model_type": "llama" }),
            "\"llama\": expected qwen3_5",
        ),
        (serde_json::json!({ "model_type": "REMOVED" }), "model_type is missing"),
        (
            serde_json::json!({ "quantization_config": { "quant_method": "fp8" } }),
            "quantization_config (fp8)",
        ),
        (
            serde_json::json!({ "output_gate_type": "tanh" }),
            "output_gate_type: expected silu, swish or sigmoid",
        ),
        (
            serde_json::json!({ "linear_num_value_heads": "REMOVED" }),
            "linear_num_value_heads is missing",
        ),
        (
            serde_json::json!({ "linear_num_value_heads": 24 }),
            "24 is not a multiple of linear_num_key_heads 16",
        ),
        (serde_json::json!({ "hidden_act": "gelu" }), "hidden_act: expected silu"),
        (serde_json::json!({ "attention_bias": true }), "attention_bias"),
        (serde_json::json!({ "attn_output_gate": false }), "attn_output_gate"),
        (
            serde_json::json!({ "hidden_size": -1 }),
            "hidden_size: expected a positive whole number, came -1",
        ),
        (serde_json::json!({ "hidden_size": "big" }), "hidden_size"),
        (
            serde_json::json!({ "rope_parameters": "REMOVED" }),
            "rope_theta is missing",
        ),
        (
            serde_json::json!({ "rope_theta": 10_000 }),
            "rope_theta is 10000000 in rope_parameters and 10000 beside it",
        ),
        (
            serde_json::json!({ "partial_rotary_factor": 0.5 }),
            "partial_rotary_factor is 0.25 in rope_parameters and 0.5",
        ),
        (
            serde_json::json!({ "rope_parameters": { "rope_type": "yarn", "rope_theta": 1e7 } }),
            "expected default, came \"yarn\"",
        ),
        (
            serde_json::json!({ "rope_parameters": rope("x".into()) }),
            "rope_theta: expected a number",
        ),
        (
            serde_json::json!({ "layer_types": ["full_attention"] }),
            "layer_types has 1 entries, num_hidden_layers is 24",
        ),
        (
            serde_json::json!({ "num_hidden_layers": 1, "layer_types": ["sliding_attention"] }),
            "layer_types[0]",
        ),
        (
            serde_json::json!({ "num_key_value_heads": 3 }),
            "8 is not a multiple of num_key_value_heads 3",
        ),
        (
            serde_json::json!({ "layer_types": "REMOVED", "full_attention_interval": "REMOVED" }),
            "full_attention_interval is missing",
        ),
    ] {
        let text = with(changes.clone()).expect_err("refused").to_string();
        assert!(text.contains(part), "{changes}: {part} not in {text}");
    }
    // absent layer list: the interval; absent gate type: the activation; unknown keys: ignored; theta beside: equal
    let config = with(
        serde_json::json!({ "layer_types": "REMOVED", "output_gate_type": "REMOVED", "novelty": [1], "rope_theta": 1e7 }),
    );
    assert_eq!(
        config.expect("parses"),
        TargetConfig::parse(&base.to_string()).expect("parses")
    );
    let sigmoid = with(serde_json::json!({ "output_gate_type": "sigmoid" })).expect("parses");
    assert_eq!(sigmoid.linear.expect("linear").gate, GateActivation::Sigmoid);
    let moe = serde_json::json!({ "model_type": "qwen3_5_moe", "text_config": base });
    assert!(
        TargetConfig::parse(&moe.to_string())
            .expect_err("refused")
            .to_string()
            .contains("qwen3_5_moe")
    );
}
