//! Checkpoint folders: prefixes, shards, storage types, and every fault named.

use std::collections::HashMap;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use dflash_model::{TensorFolder, target};

use crate::{fixture, fresh, load, tokens};

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
