//! What an open run file resolves to.

use candle_core::Device;
use dflash_model::{Codebooks, DrafterConfig, LayerRule, Params, TargetConfig, TargetInfo};
use dflash_train::config::{Algorithm, CodebookKind, RunConfig};
use dflash_train::config_file;
use dflash_train::resolve::{default_gamma, default_mask_token, default_taps, resolve};
use dflash_train::room::Sizes;

use crate::command::repository;

fn target() -> TargetInfo {
    TargetInfo {
        model_type: "qwen3_5".into(),
        hidden_size: 2560,
        intermediate_size: 9728,
        num_layers: 32,
        vocab_size: 248_320,
        max_positions: 262_144,
        rope_theta: 1e7,
        rms_norm_eps: 1e-6,
        tied: true,
    }
}

fn config(overrides: &[&str]) -> RunConfig {
    let overrides: Vec<String> = overrides.iter().map(ToString::to_string).collect();
    config_file::parse(
        "run_dir = 'x'\n[target]\npath = 't'\n[data]\nprompts = 'p'\n",
        &overrides,
    )
    .unwrap()
}

fn shape(overrides: &[&str]) -> DrafterConfig {
    resolve(&config(overrides), &target(), None).unwrap().drafter
}

fn refusal(overrides: &[&str], init: Option<&DrafterConfig>) -> String {
    resolve(&config(overrides), &target(), init).unwrap_err().to_string()
}

#[test]
fn an_open_run_file_gives_the_published_shape() {
    let resolved = resolve(&config(&[]), &target(), None).unwrap();
    let drafter = &resolved.drafter;
    assert_eq!(drafter.target_layer_ids, [1, 8, 15, 22, 29]);
    assert_eq!(
        (drafter.num_heads, drafter.num_kv_heads, drafter.head_dim),
        (32, 8, 128)
    );
    assert_eq!(
        (drafter.intermediate_size, drafter.block_size, drafter.mask_token_id),
        (9728, 8, 248_070)
    );
    let rule = LayerRule {
        window: Some(2048),
        causal: false,
    };
    assert_eq!(drafter.layers, vec![rule; 5]);
    assert_eq!(
        drafter.conv.map(|conv| (conv.kernel_size, conv.group_size)),
        Some((2, 16))
    );
    assert_eq!(drafter.selector.map(|s| (s.rank, s.top_k)), Some((256, 16)));
    assert_eq!(resolved.codebooks, CodebookKind::Factored);
    assert_eq!(resolved.config.train.epochs, Some(6));
    // what is written as resolved resolves to itself
    let again = resolve(&resolved.config, &target(), None).unwrap();
    assert_eq!(again, resolved);
}

#[test]
fn published_tap_lists_follow_from_the_formula() {
    for (layers, expected) in [
        (24, [1, 6, 11, 16, 21]),
        (32, [1, 8, 15, 22, 29]),
        (36, [1, 9, 17, 25, 33]),
        (40, [1, 10, 19, 28, 37]),
        (64, [1, 16, 31, 46, 61]),
    ] {
        assert_eq!(default_taps(layers, 5).unwrap(), expected);
    }
    assert_eq!(default_taps(32, 1).unwrap(), [16]);
    // 1 + 0.5: halves go to the even number
    assert!(default_taps(5, 3).unwrap_err().to_string().contains("repeats"));
    assert!(default_taps(3, 5).is_err());
}

#[test]
fn mask_token_and_gamma_have_defaults_only_where_published() {
    assert_eq!(default_mask_token(151_936).unwrap(), 151_669);
    assert!(
        default_mask_token(4096)
            .unwrap_err()
            .to_string()
            .contains("mask_token_id")
    );
    for (block, gamma) in [(8, 4.0), (9, 4.5), (10, 5.0), (13, 6.0), (16, 7.0)] {
        assert!((default_gamma(block).unwrap() - gamma).abs() < 1e-12);
    }
    assert!(default_gamma(4).unwrap_err().to_string().contains("train.gamma"));
    assert!(default_gamma(32).is_err());
}

#[test]
fn impossible_shapes_are_refused_by_key() {
    for (change, key) in [
        ("drafter.kv_heads=5", "drafter.kv_heads"),
        ("drafter.head_dim=7", "drafter.head_dim"),
        ("drafter.mask_token_id=248320", "drafter.mask_token_id"),
        ("drafter.sliding_window=4", "drafter.sliding_window"),
        ("drafter.conv_group=7", "drafter.conv_group"),
        ("drafter.conv_kernel=9", "drafter.conv_kernel"),
        ("taps.layers=[1, 31]", "taps.layers"),
        ("taps.layers=[3, 1]", "taps.layers"),
        ("taps.layers=[]", "taps.layers"),
    ] {
        let text = refusal(&[change], None);
        assert!(text.contains(key), "{change}: {text}");
    }
    let text = refusal(&["drafter.algorithm=dflash", "drafter.selector_rank=8"], None);
    assert!(text.contains("drafter.selector_rank"), "{text}");
}

#[test]
fn window_zero_is_full_attention() {
    let rule = shape(&["drafter.sliding_window=0", "drafter.causal=true"]).layers[0];
    assert_eq!((rule.window, rule.causal), (None, true));
}

#[test]
fn a_warm_start_keeps_what_the_folder_says() {
    let mut init = shape(&[
        "drafter.algorithm=dflash",
        "drafter.block_size=16",
        "drafter.mask_token_id=5",
    ]);
    init.target_layer_ids = vec![2, 9, 16];
    init.layers[4].window = None;
    init.final_logit_softcapping = Some(20.0);
    let plain = resolve(&config(&[]), &target(), Some(&init)).unwrap();
    assert_eq!(plain.drafter, init);
    assert_eq!(plain.config.drafter.algorithm, Some(Algorithm::Dflash));
    let upgraded = resolve(
        &config(&["drafter.algorithm=dflash2", "drafter.block_size=8"]),
        &target(),
        Some(&init),
    )
    .unwrap();
    assert_eq!(upgraded.drafter.block_size, 8);
    assert_eq!(upgraded.codebooks, CodebookKind::Factored);
    assert_eq!(upgraded.drafter.layers, init.layers);
    let second = resolve(&config(&[]), &target(), Some(&upgraded.drafter)).unwrap();
    assert_eq!(second.codebooks, CodebookKind::Free);

    assert!(refusal(&["taps.layers=[1]"], Some(&init)).contains("--allow taps"));
    assert!(refusal(&["drafter.mask_token_id=6"], Some(&init)).contains("--allow mask"));
    assert!(refusal(&["drafter.selector_rank=8"], Some(&init)).contains("drafter.algorithm = \"dflash2\""));
    assert!(refusal(&["drafter.rope_theta=6"], Some(&init)).contains("--allow rope"));
    assert!(refusal(&["drafter.allow=[\"mask\"]"], None).contains("drafter.allow: only with drafter.init_from"));
    assert!(refusal(&["drafter.layers=4"], Some(&init)).contains("drafter.layers"));
    assert!(refusal(&["drafter.ffn=4"], Some(&init)).contains("drafter.ffn"));
    assert!(refusal(&["drafter.algorithm=dflash"], Some(&second.drafter)).contains("drafter.algorithm"));
    assert!(refusal(&["drafter.codebooks=factored"], Some(&second.drafter)).contains("drafter.codebooks"));
}

#[test]
fn a_target_of_another_depth_or_vocabulary_is_allowed_by_name_and_moves_the_taps() {
    let init = shape(&[]);
    for (layers, vocabulary) in [(36, 248_320), (32, 248_400)] {
        let other = TargetInfo {
            num_layers: layers,
            vocab_size: vocabulary,
            ..target()
        };
        let error = resolve(&config(&[]), &other, Some(&init)).unwrap_err().to_string();
        assert!(
            error.contains("drafter.init_from") && error.contains("--allow target"),
            "{error}"
        );
        let allowed = resolve(&config(&["drafter.allow=[\"target\"]"]), &other, Some(&init)).unwrap();
        assert_eq!(allowed.drafter.num_target_layers, layers);
        let moved = default_taps(layers, 5).unwrap();
        assert_eq!(allowed.drafter.target_layer_ids, moved);
    }
    let wider = TargetInfo {
        hidden_size: 4096,
        ..target()
    };
    let error = resolve(&config(&["drafter.allow=[\"target\"]"]), &wider, Some(&init)).unwrap_err();
    assert!(error.to_string().contains("width 2560, this one has 4096"), "{error}");
}

/// Engines refuse a drafter with its target's head sizes or three-part positions, or serve it badly.
#[test]
fn a_drafter_of_a_target_with_partial_rotary_heads_has_plain_heads_of_128() {
    let root = tempfile::tempdir().unwrap();
    let path = repository().join("data/demo/target/config.json");
    let mut json: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let text = json["text_config"].as_object_mut().unwrap();
    text.insert("head_dim".into(), 256.into());
    text["vocab_size"] = 248_320.into();
    text["rope_parameters"] = serde_json::json!({
        "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10], "mrope_interleaved": true,
    });
    std::fs::write(root.path().join("config.json"), json.to_string()).unwrap();
    let info = TargetConfig::read(root.path()).unwrap().info;
    let drafter = resolve(&config(&["taps.layers=[1, 3, 5]"]), &info, None)
        .unwrap()
        .drafter;
    let written = drafter.to_json().unwrap();
    assert_eq!(written["head_dim"], 128);
    assert_eq!(
        written["rope_parameters"],
        serde_json::json!({"rope_theta": 1e7, "rope_type": "default"})
    );
    let text = written.to_string();
    assert!(!text.contains("mrope") && !text.contains("partial_rotary"), "{text}");
}

/// A warm start brings its sizes past the run file, so they are looked at after it.
#[test]
fn a_resolved_shape_is_checked_like_a_written_one_and_against_the_target() {
    let mut deep = shape(&[]);
    deep.layers = vec![deep.layers[0]; 65];
    assert!(refusal(&[], Some(&deep)).contains("drafter.layers: expected a whole number from 1 to 64, got 65"));
    let small = TargetInfo {
        vocab_size: 100,
        max_positions: 64,
        ..target()
    };
    let refused = |change: &[&str]| {
        let all = [&["drafter.mask_token_id=5", "train.gamma=1"], change].concat();
        resolve(&config(&all), &small, None).unwrap_err().to_string()
    };
    assert!(refused(&["drafter.block_size=65"]).contains("drafter.block_size: expected at most the 64 positions"));
    assert!(refused(&["drafter.selector_top_k=101"]).contains("drafter.selector_top_k"));
}

/// What is asked of memory and disk before a drafter is made is what it then takes.
#[test]
fn the_sizes_known_before_are_those_of_the_variables_and_of_the_file() {
    let small = TargetInfo {
        vocab_size: 96,
        hidden_size: 32,
        intermediate_size: 40,
        ..target()
    };
    let sizes = [
        "drafter.layers=2",
        "drafter.heads=2",
        "drafter.kv_heads=1",
        "drafter.head_dim=16",
    ];
    let more = ["drafter.mask_token_id=5", "drafter.selector_rank=8"];
    for (kind, codebooks) in [("factored", Codebooks::Factored), ("free", Codebooks::Free)] {
        let kind = format!("drafter.codebooks={kind}");
        let resolved = resolve(&config(&[&sizes[..], &more, &[&kind]].concat()), &small, None).unwrap();
        let found = Sizes::of(&resolved);
        let params = Params::init(&resolved.drafter, codebooks, 0, &Device::Cpu).unwrap();
        let trained: usize = params.vars().values().map(|var| var.elem_count()).sum();
        assert_eq!(
            (found.trained, found.published),
            (trained as u64, resolved.drafter.parameter_count())
        );
        assert_eq!(found.checkpoint(), 2 * found.published + 12 * found.trained);
    }
}
