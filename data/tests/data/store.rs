//! Capture, resume after a kill, damage, and equality of stored and online taps.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use dflash_data::{CaptureConfig, Example, TapSource, TapStore, capture, estimate_bytes};
use dflash_model::Target;
use half::bf16;
use proptest::prelude::*;

use crate::fake::{FakeTarget, HIDDEN, examples, identity};

const SHARD: u64 = 4_000;

fn config(folder: &Path, layers: &[usize], workers: usize) -> CaptureConfig {
    CaptureConfig {
        folder: folder.to_path_buf(),
        identity: identity(layers),
        shard_bytes: SHARD,
        workers,
    }
}

fn run(target: &FakeTarget, examples: &[Example], config: &CaptureConfig) -> Result<Vec<(usize, usize)>, String> {
    let mut heard = Vec::new();
    capture(target, examples, config, &mut |done, total| heard.push((done, total)))
        .map(|()| heard)
        .map_err(|error| format!("{error:#}"))
}

fn content(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    fs::read_dir(folder)
        .unwrap()
        .map(|entry| {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            (name, fs::read(path).unwrap())
        })
        .collect()
}

#[test]
fn stored_taps_are_the_targets_rounded_once_and_equal_online_ones_bit_for_bit() {
    let folder = tempfile::tempdir().unwrap();
    let (target, examples) = (FakeTarget::new(1), examples(25, 3));
    let heard = run(&target, &examples, &config(folder.path(), &[1, 3, 6], 2)).unwrap();
    assert_eq!(heard.len(), 26);
    assert!(heard.iter().enumerate().all(|(i, step)| *step == (i, 25)));
    let stored = TapSource::Stored(TapStore::open(folder.path(), &identity(&[1, 3, 6])).unwrap());
    let online = TapSource::online(Arc::new(FakeTarget::new(1)), vec![1, 3, 6], examples.clone()).unwrap();
    assert_eq!(
        (stored.len(), stored.lengths(), stored.tap_width()),
        (25, online.lengths(), 3 * HIDDEN)
    );
    for (i, example) in examples.iter().enumerate() {
        let sample = stored.sample(i).unwrap();
        assert_eq!(sample, online.sample(i).unwrap());
        assert_eq!(stored.example(i).unwrap(), *example);
        assert_eq!(
            (&sample.tokens, &sample.loss_mask),
            (&example.tokens, &example.loss_mask)
        );
        let exact = target.taps(&example.tokens, &[1, 3, 6]).unwrap().flatten_all().unwrap();
        let exact: Vec<bf16> = exact
            .to_vec1::<f32>()
            .unwrap()
            .into_iter()
            .map(bf16::from_f32)
            .collect();
        assert_eq!(sample.taps, exact);
    }
    assert!(format!("{:#}", stored.sample(25).unwrap_err()).contains("record 25: the folder holds 25"));
}

#[test]
fn shards_respect_their_limit_and_the_estimate_is_their_payload() {
    let folder = tempfile::tempdir().unwrap();
    let examples = examples(25, 3);
    run(&FakeTarget::new(1), &examples, &config(folder.path(), &[2], 1)).unwrap();
    let shards: Vec<Vec<u8>> = content(folder.path())
        .into_iter()
        .filter(|(name, _)| name.ends_with(".safetensors"))
        .map(|(_, bytes)| bytes)
        .collect();
    assert!(shards.len() > 2);
    let payload = |bytes: &Vec<u8>| bytes.len() as u64 - 8 - u64::from_le_bytes(bytes[..8].try_into().unwrap());
    assert!(shards.iter().all(|shard| payload(shard) <= SHARD));
    let tokens = examples.iter().map(|example| example.tokens.len()).sum();
    assert_eq!(
        shards.iter().map(payload).sum::<u64>(),
        estimate_bytes(tokens, 1, HIDDEN)
    );
}

#[test]
fn a_capture_killed_anywhere_and_resumed_equals_an_uninterrupted_one_byte_for_byte() {
    let examples = examples(25, 9);
    let whole = tempfile::tempdir().unwrap();
    run(&FakeTarget::new(1), &examples, &config(whole.path(), &[1, 4], 1)).unwrap();
    let expected = content(whole.path());
    for workers in [1, 2] {
        for killed_after in [0, 1, 7, 13, 24] {
            let folder = tempfile::tempdir().unwrap();
            let mut target = FakeTarget::new(1);
            target.passes_left = AtomicUsize::new(killed_after);
            let error = run(&target, &examples, &config(folder.path(), &[1, 4], workers)).unwrap_err();
            assert!(
                error.contains("the power went out") && error.contains("example"),
                "{error}"
            );
            // what a kill in the middle of a write leaves behind: a part, or a shard that is not recorded yet
            let next = content(folder.path())
                .keys()
                .filter(|name| name.ends_with(".safetensors"))
                .count();
            fs::write(folder.path().join(format!("taps-{next:05}.safetensors")), b"part").unwrap();
            fs::write(
                folder.path().join(format!("taps-{next:05}.safetensors.unfinished")),
                b"part",
            )
            .unwrap();
            if folder.path().join("manifest.json").exists() {
                let error = TapStore::open(folder.path(), &identity(&[1, 4])).unwrap_err();
                assert!(format!("{error:#}").contains("of 25 examples"), "{error:#}");
            }
            target.passes_left.store(usize::MAX, Ordering::SeqCst);
            let heard = run(&target, &examples, &config(folder.path(), &[1, 4], workers)).unwrap();
            assert_eq!(heard.last(), Some(&(25, 25)));
            assert_eq!(
                content(folder.path()),
                expected,
                "killed after {killed_after} with {workers} workers"
            );
        }
    }
}

#[test]
fn a_finished_capture_runs_nothing_and_a_longer_list_runs_only_what_is_missing() {
    let folder = tempfile::tempdir().unwrap();
    let (all, config) = (examples(25, 9), config(folder.path(), &[1], 1));
    run(&FakeTarget::new(1), &all[..10], &config).unwrap();
    let mut target = FakeTarget::new(1);
    target.passes_left = AtomicUsize::new(0);
    assert_eq!(run(&target, &all[..10], &config).unwrap(), [(10, 10)]);
    target.passes_left = AtomicUsize::new(15);
    run(&target, &all, &config).unwrap();
    let store = TapStore::open(folder.path(), &config.identity).unwrap();
    store.verify_all().unwrap();
    assert_eq!(store.len(), 25);
}

#[test]
fn taps_of_another_origin_are_refused_with_both_values() {
    let folder = tempfile::tempdir().unwrap();
    let (all, base) = (examples(6, 2), config(folder.path(), &[1, 3], 1));
    run(&FakeTarget::new(1), &all, &base).unwrap();
    let mut others = vec![base.identity.clone(); 5];
    others[0].target = "target-b".to_owned();
    others[1].tokenizer = "tokenizer-b".to_owned();
    others[2].template = "template-b".to_owned();
    others[3].thinking = Some(true);
    others[4].layers = vec![1, 4];
    let named = [
        ["target-a", "target-b"],
        ["tokenizer-a", "tokenizer-b"],
        ["template-a", "template-b"],
        ["Some(false)", "Some(true)"],
        ["[1, 3]", "[1, 4]"],
    ];
    for (other, values) in others.into_iter().zip(named) {
        let opened = format!("{:#}", TapStore::open(folder.path(), &other).unwrap_err());
        let config = CaptureConfig {
            identity: other,
            ..base.clone()
        };
        let captured = run(&FakeTarget::new(1), &all, &config).unwrap_err();
        for value in values {
            assert!(opened.contains(value), "{value} not in {opened}");
            assert!(captured.contains(value), "{value} not in {captured}");
        }
    }
    let error = run(&FakeTarget::new(1), &all[..3], &base).unwrap_err();
    assert!(error.contains("holds 6 examples, this run has 3"), "{error}");
    let error = run(&FakeTarget::new(1), &examples(6, 5), &base).unwrap_err();
    assert!(
        error.contains("example 0") && error.contains("another folder"),
        "{error}"
    );
}

#[test]
fn any_damaged_byte_of_a_record_is_found_at_its_first_use() {
    let folder = tempfile::tempdir().unwrap();
    let config = config(folder.path(), &[1], 1);
    run(&FakeTarget::new(1), &examples(5, 2), &config).unwrap();
    let path = folder.path().join("taps-00000.safetensors");
    let good = fs::read(&path).unwrap();
    let data = 8 + u64::from_le_bytes(good[..8].try_into().unwrap()) as usize;
    for at in (data..good.len()).step_by(97).chain([good.len() - 1]) {
        let mut bad = good.clone();
        bad[at] ^= 0x10;
        // a new file, as a mapped one must not change
        fs::remove_file(&path).unwrap();
        fs::write(&path, &bad).unwrap();
        let store = TapStore::open(folder.path(), &config.identity).unwrap();
        let error = format!("{:#}", store.verify_all().unwrap_err());
        assert!(
            error.contains("damaged") && error.contains("taps-00000"),
            "byte {at}: {error}"
        );
    }
}

#[test]
fn a_truncated_missing_or_foreign_shard_is_named_when_the_folder_is_opened() {
    let folder = tempfile::tempdir().unwrap();
    let config = config(folder.path(), &[1], 1);
    run(&FakeTarget::new(1), &examples(5, 2), &config).unwrap();
    let path = folder.path().join("taps-00000.safetensors");
    let good = fs::read(&path).unwrap();
    for keep in [0, 5, 40, good.len() - 1] {
        fs::remove_file(&path).unwrap();
        fs::write(&path, &good[..keep]).unwrap();
        let error = format!("{:#}", TapStore::open(folder.path(), &config.identity).unwrap_err());
        assert!(error.contains("taps-00000.safetensors"), "{keep} bytes: {error}");
    }
    fs::remove_file(&path).unwrap();
    let error = format!("{:#}", TapStore::open(folder.path(), &config.identity).unwrap_err());
    assert!(error.contains("taps-00000.safetensors"), "{error}");
    let other = tempfile::tempdir().unwrap();
    run(
        &FakeTarget::new(1),
        &examples(5, 4),
        &CaptureConfig {
            folder: other.path().to_path_buf(),
            ..config.clone()
        },
    )
    .unwrap();
    fs::copy(other.path().join("taps-00000.safetensors"), &path).unwrap();
    let error = format!("{:#}", TapStore::open(folder.path(), &config.identity).unwrap_err());
    assert!(error.contains("00000000.") && error.contains("expected"), "{error}");
}

#[test]
fn a_manifest_that_does_not_hold_together_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let config = config(folder.path(), &[1], 1);
    run(&FakeTarget::new(1), &examples(5, 2), &config).unwrap();
    let path = folder.path().join("manifest.json");
    let good = fs::read_to_string(&path).unwrap();
    for (from, to, expected) in [
        ("\"version\": 1", "\"version\": 2", "version: expected 1, found 2"),
        ("\"dflash-taps\"", "\"other\"", "format"),
        ("\"bf16\"", "\"f32\"", "dtype"),
        ("\"total\": 5", "\"total\": 4", "more than the total"),
        ("\"shard\": 0", "\"shard\": 9", "shard 9"),
        ("taps-00000", "../taps-00000", "plain file name"),
        ("\"total\": 5", "\"total\": 5, \"extra\": 1", "extra"),
    ] {
        fs::write(&path, good.replacen(from, to, 1)).unwrap();
        let error = format!("{:#}", TapStore::open(folder.path(), &config.identity).unwrap_err());
        assert!(
            error.contains(expected) && error.contains("manifest.json"),
            "{expected}: {error}"
        );
    }
}

#[test]
fn tap_ids_are_increasing_and_below_the_last_layer() {
    let folder = tempfile::tempdir().unwrap();
    for (layers, expected) in [
        (vec![], "at least one"),
        (vec![1, 1], "strictly increasing"),
        (vec![3, 2], "strictly increasing"),
        (vec![1, 7], "tap layer 7"),
        (vec![99], "tap layer 99"),
    ] {
        let error = run(&FakeTarget::new(1), &examples(2, 1), &config(folder.path(), &layers, 1)).unwrap_err();
        assert!(error.contains(expected), "{error}");
        assert!(TapSource::online(Arc::new(FakeTarget::new(1)), layers, examples(2, 1)).is_err());
    }
}

#[test]
fn a_non_finite_tap_names_its_example_and_layer() {
    let folder = tempfile::tempdir().unwrap();
    let mut all = examples(4, 1);
    for example in &mut all {
        example.tokens.iter_mut().for_each(|token| *token %= 90);
    }
    all[2].tokens[3] = 95;
    let mut target = FakeTarget::new(1);
    target.poison = Some(95);
    let error = run(&target, &all, &config(folder.path(), &[1, 3, 5], 2)).unwrap_err();
    assert!(
        error.contains("example 2 (line 3): tap 2 of layer 3 is inf at position 3"),
        "{error}"
    );
}

#[test]
fn tokens_outside_of_the_embedding_and_too_long_examples_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let run = |example: Example| run(&FakeTarget::new(1), &[example], &config(folder.path(), &[1], 1)).unwrap_err();
    let error = run(Example::of_response(&[1], &[2, 97], 7));
    assert!(
        error.contains("line 7") && error.contains("token 97") && error.contains("97 rows"),
        "{error}"
    );
    let error = run(Example::of_response(&[1; 500], &[2; 13], 7));
    assert!(error.contains("513 tokens") && error.contains("512"), "{error}");
}

#[test]
fn two_captures_never_write_into_one_folder() {
    let folder = tempfile::tempdir().unwrap();
    let (all, config) = (examples(3, 1), config(folder.path(), &[1], 1));
    let mut inner = None;
    capture(&FakeTarget::new(1), &all, &config, &mut |done, _| {
        if done == 1 {
            inner = Some(run(&FakeTarget::new(1), &all, &config));
        }
    })
    .unwrap();
    assert!(inner.unwrap().unwrap_err().contains("another capture"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn any_list_of_examples_comes_back_as_it_went_in(
        count in 1_usize..12, seed: u64, shard_bytes in 1_u64..3_000, workers in 1_usize..4,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let all = examples(count, seed);
        let config = CaptureConfig { shard_bytes, ..config(folder.path(), &[0, 2], workers) };
        run(&FakeTarget::new(seed), &all, &config).unwrap();
        let store = TapStore::open(folder.path(), &config.identity).unwrap();
        prop_assert_eq!(store.len(), count);
        for (i, example) in all.iter().enumerate() {
            let record = store.get(i).unwrap();
            prop_assert_eq!(&record.tokens(), &example.tokens);
            prop_assert_eq!(&record.loss_mask(), &example.loss_mask);
            prop_assert_eq!(record.taps().len(), example.tokens.len() * 2 * HIDDEN);
        }
    }
}
