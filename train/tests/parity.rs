//! Loss and gradients of one step against the nearest peer trainer.
//!
//! Fixtures: `fixtures/train_step/*`, written by `scripts/fixtures/train_step.py`; its README states the conversion of the
//! peer's normaliser into ours.

#![expect(clippy::unwrap_used, reason = "fixtures are part of the test")]

use candle_core::{DType, Device, Tensor};
use dflash_model::{Block, Blocks, Codebooks, Drafter, DrafterConfig, Params, TargetHead};
use dflash_train::loss::{LossSettings, total_weight};
use dflash_train::step::gradients;
use std::collections::HashMap;
use std::path::PathBuf;

const TOLERANCE: f64 = 1e-4; // relative L2, f32

fn integers(step: &HashMap<String, Tensor>, name: &str) -> Vec<usize> {
    let flat = step[name].to_dtype(DType::I64).unwrap().flatten_all().unwrap();
    flat.to_vec1::<i64>().unwrap().into_iter().map(|x| x as usize).collect()
}

fn norm(t: &Tensor) -> f64 {
    f64::from(t.sqr().unwrap().sum_all().unwrap().to_scalar::<f32>().unwrap()).sqrt()
}

#[test]
fn loss_and_every_gradient_equal_the_peers() {
    for algorithm in ["dflash", "dflash2"] {
        let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
            .join("tests/fixtures/train_step")
            .join(algorithm);
        let step = candle_core::safetensors::load(dir.join("step.safetensors"), &Device::Cpu).unwrap();
        let losses: serde_json::Value =
            serde_json::from_str(&std::fs::read_to_string(dir.join("loss.json")).unwrap()).unwrap();
        let number = |name: &str| losses[name].as_f64().unwrap();
        let config = DrafterConfig::from_json_file(&dir.join("config.json")).unwrap();
        let params = Params::init(&config, Codebooks::Free, 1, &Device::Cpu).unwrap();
        for (name, tensor) in candle_core::safetensors::load(dir.join("model.safetensors"), &Device::Cpu).unwrap() {
            params.set(&name, &tensor).unwrap();
        }
        let drafter = Drafter::new(config.clone(), &params).unwrap();
        let head = TargetHead {
            embed: step["embed"].clone(),
            head: step["head"].clone(),
        };

        let (b, tokens) = (config.block_size, integers(&step, "tokens"));
        let (rows, positions) = (integers(&step, "anchor_rows"), integers(&step, "anchor_positions"));
        let supervised = integers(&step, "supervised");
        let blocks = Blocks {
            block_size: b,
            blocks: rows
                .iter()
                .zip(&positions)
                .map(|(row, p)| Block {
                    context_start: row - p,
                    anchor: *p,
                })
                .collect(),
            anchors: rows.iter().map(|row| tokens[*row] as u32).collect(),
            context_positions: integers(&step, "sample_lengths")
                .iter()
                .flat_map(|len| 0..*len as u32)
                .collect(),
            labels: rows
                .iter()
                .flat_map(|row| {
                    (0..b)
                        .map(|j| tokens.get(row + j).copied().unwrap_or(0) as u32)
                        .collect::<Vec<_>>()
                })
                .collect(),
            supervised: supervised.iter().map(|s| *s == 1).collect(),
        };
        let settings = LossSettings {
            gamma: number("gamma"),
            selector_alpha: losses["alpha"].as_f64().unwrap_or(0.0),
            inject_gold: true,
            selector_detached: false,
        };
        let denominator = total_weight(&blocks, settings.gamma);
        assert!((denominator - number("weight_sum")).abs() < 1e-4);
        let (sums, grads) = gradients(&drafter, &params, &head, &blocks, &step["taps"], settings, denominator)
            .unwrap()
            .unwrap();

        let to_ours = number("theirs_to_ours");
        let same = |ours: f64, theirs: f64| (ours - theirs * to_ours).abs() / (theirs * to_ours) <= 1e-5;
        let base = if algorithm == "dflash" {
            number("loss")
        } else {
            number("base")
        };
        assert!(
            same(sums.mean_base_loss(), base),
            "{algorithm}: {} against {base}",
            sums.mean_base_loss()
        );
        assert_eq!(sums.slots(), number("slots") as u64);
        if algorithm == "dflash2" {
            assert!(
                same(sums.mean_selector_loss(), number("selector")),
                "{}",
                sums.mean_selector_loss()
            );
            let hits = losses["metrics"]["unary_candidate_recall_at_8_sum"].as_f64().unwrap();
            assert_eq!(sums.hits, hits as u64);
        }
        for (name, ours) in &grads {
            let theirs = (&step[&format!("grad.{name}")] * to_ours).unwrap();
            let ours = ours.whole(&params.vars()[name]).unwrap();
            let distance = norm(&(ours - &theirs).unwrap()) / norm(&theirs);
            assert!(
                distance <= TOLERANCE,
                "{algorithm}: gradient of {name} is off by {distance:e}"
            );
        }
        let count = step.keys().filter(|name| name.starts_with("grad.")).count();
        assert_eq!(grads.len(), count, "{algorithm}: gradients of every tensor");
    }
}
