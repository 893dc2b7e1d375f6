//! Files that are cut short, changed or made to mislead: a clear error each, no panic, no memory for what is not there.

use std::fs;
use std::path::Path;

use candle_core::DType;
use dflash_export::gguf::file::{Plan, Planned, Stored};
use dflash_model::formats;
use dflash_model::formats::gguf::{ElementType, GgufFile, Value};
use proptest::prelude::*;

use super::{dflash2, plan, source, target_of, write};

fn whole() -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("d.gguf");
    write(
        &path,
        &source(&dflash2(), DType::BF16, 3),
        &target_of(&dflash2(), true),
        Stored::Q8_0,
    )
    .unwrap();
    fs::read(&path).unwrap()
}

/// Reads bytes as a drafter; the message names the file.
fn read(bytes: &[u8]) -> Result<(), String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("hostile.gguf");
    fs::write(&path, bytes).unwrap();
    match formats::read(&path, Some(&target_of(&dflash2(), true).info)) {
        Ok(_) => Ok(()),
        Err(error) => {
            let message = error.to_string();
            assert!(message.contains("hostile.gguf"), "no file in {message:?}");
            Err(message)
        }
    }
}

/// Writes a drafter's file with another value or tensor list than it should have.
fn changed(change: impl FnOnce(&mut Plan)) -> Result<(), String> {
    let source = source(&dflash2(), DType::F32, 3);
    let (mut plan, published) = plan(&source, &target_of(&dflash2(), true), Stored::F32).unwrap();
    let original = plan.tensors.clone();
    change(&mut plan);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("d.gguf");
    let load = |index: usize| {
        let Planned { name, shape, .. } = &plan.tensors[index];
        let known = original
            .iter()
            .position(|tensor| tensor.name == *name && tensor.shape == *shape);
        Ok(match known {
            Some(at) => source.tensors[&published[at]].clone(),
            None => candle_core::Tensor::zeros(shape.as_slice(), DType::F32, &candle_core::Device::Cpu)?,
        })
    };
    plan.write(&path, false, &load, &|_: &Path| Ok(())).unwrap();
    read(&fs::read(&path).unwrap())
}

fn set(plan: &mut Plan, key: &str, value: Value) {
    plan.metadata.retain(|(name, _)| name != key);
    plan.metadata.push((key.to_owned(), value));
}

#[test]
fn every_truncation_is_an_error() {
    let whole = whole();
    read(&whole).unwrap();
    // the last tensor may be followed by padding, which nothing needs
    let needed = whole.len() - 32;
    for keep in (0..whole.len().min(3000)).chain((3000..needed).step_by(997)) {
        assert!(
            read(&whole[..keep]).is_err(),
            "{keep} of {} bytes were enough",
            whole.len()
        );
    }
    let message = read(&whole[..needed]).unwrap_err();
    assert!(message.contains("cut short"), "{message}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Any bytes in the place of any others end in a drafter or an error.
    #[test]
    fn no_change_of_bytes_makes_the_reader_panic(
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        front: bool,
    ) {
        let mut bytes = whole();
        let reach = if front { 2500 } else { bytes.len() };
        for (place, byte) in edits {
            bytes[place.index(reach)] = byte;
        }
        let _ = read(&bytes);
    }
}

/// Counts and lengths far beyond the file are refused before memory is taken for them.
#[test]
fn what_a_header_promises_is_held_against_the_file() {
    let header = |tensors: u64, keys: u64, rest: &[u8]| {
        [
            b"GGUF",
            &3_u32.to_le_bytes()[..],
            &tensors.to_le_bytes(),
            &keys.to_le_bytes(),
            rest,
        ]
        .concat()
    };
    let text = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
    let list = |kind: u32, length: u64| {
        [
            text("k"),
            9_u32.to_le_bytes().to_vec(),
            kind.to_le_bytes().to_vec(),
            length.to_le_bytes().to_vec(),
        ]
        .concat()
    };
    let tensor = |sizes: &[u64], kind: u32, offset: u64| {
        let sizes: Vec<u8> = sizes.iter().flat_map(|size| size.to_le_bytes()).collect();
        [
            text("t"),
            (sizes.len() as u32 / 8).to_le_bytes().to_vec(),
            sizes,
            kind.to_le_bytes().to_vec(),
            offset.to_le_bytes().to_vec(),
            vec![0; 64],
        ]
        .concat()
    };
    let huge = u64::MAX;
    let cases: Vec<(Vec<u8>, &str)> = vec![
        (b"GGUF\x03\0\0".to_vec(), "the version"),
        (
            [b"GGUF", &1_u32.to_le_bytes()[..], &[0; 16]].concat(),
            "expected 2 or 3",
        ),
        ([b"GGUF", &3_u32.to_be_bytes()[..], &[0; 16]].concat(), "little-endian"),
        (header(0, huge, &[]), "keys"),
        (header(huge, 0, &[]), "tensors"),
        (header(0, 1, &huge.to_le_bytes().repeat(2)), "a key"),
        // what stands in messages is short and printable
        (
            header(0, 1, &[text(&"k".repeat(600)), vec![0; 16]].concat()),
            "a key: expected at most 512 bytes, got 600",
        ),
        (
            header(0, 1, &[text("k\u{1b}[31m"), vec![0; 16]].concat()),
            "a key: expected printable characters, got \"k\\u{1b}[31m\"",
        ),
        (header(0, 1, &list(0, huge)), "more than any model needs"),
        (header(0, 1, &list(0, 1 << 24)), "16777216 bytes expected"),
        (header(0, 1, &[list(9, 1), vec![0; 16]].concat()), "lists of lists"),
        (
            header(0, 1, &[text("k"), 13_u32.to_le_bytes().to_vec(), vec![0; 16]].concat()),
            "no value type 13",
        ),
        (
            header(0, 1, &[text("k"), 7_u32.to_le_bytes().to_vec(), vec![2; 16]].concat()),
            "false or true",
        ),
        (
            header(1, 0, &tensor(&[huge, huge], 0, 0)),
            "no F32 tensor has the shape",
        ),
        (header(1, 0, &tensor(&[1 << 40], 0, 0)), "the whole file has"),
        (header(1, 0, &tensor(&[0, 4], 0, 0)), "no F32 tensor has the shape"),
        (header(1, 0, &tensor(&[33], 8, 0)), "multiples of 32"),
        (header(1, 0, &tensor(&[8], 99, 0)), "element type 99"),
        (header(1, 0, &tensor(&[8], 0, 1)), "no multiple of the alignment"),
        (header(1, 0, &tensor(&[8], 0, huge - 31)), "beyond the end"),
        (header(1, 0, &tensor(&[1; 5], 0, 0)), "1 to 4 dimensions"),
        (
            header(2, 0, &[&tensor(&[8], 0, 0)[..33], &tensor(&[8], 0, 0)].concat()),
            "t occurs twice",
        ),
        (
            header(
                0,
                1,
                &[text("general.alignment"), 4_u32.to_le_bytes().to_vec(), vec![0; 4]].concat(),
            ),
            "general.alignment",
        ),
    ];
    for (bytes, part) in cases {
        let message = read(&bytes).unwrap_err();
        assert!(message.contains(part), "{part:?} is not in {message:?}");
    }
}

#[test]
fn two_tensors_may_not_share_bytes() {
    let mut bytes = whole();
    let at = |name: &str, bytes: &[u8]| {
        bytes
            .windows(name.len())
            .position(|window| window == name.as_bytes())
            .unwrap()
            + name.len()
    };
    // the second norm's offset set to the first's: both are [32] in F32
    let (first, second) = (
        at("blk.0.attn_norm.weight", &bytes),
        at("blk.0.ffn_norm.weight", &bytes),
    );
    let offset = |at: usize| at + 4 + 8 + 4;
    let copy = bytes[offset(first)..][..8].to_vec();
    bytes[offset(second)..][..8].copy_from_slice(&copy);
    let message = read(&bytes).unwrap_err();
    assert!(
        message.contains("overlap") && message.contains("attn_norm"),
        "{message}"
    );
}

/// Keys that contradict the drafter or say what none of ours does; each message names the key and what came.
#[test]
fn a_key_that_is_missing_foreign_or_wrong_is_named() {
    type Case = (fn(&mut Plan), &'static [&'static str]);
    let text = |text: &str| Value::String(text.to_owned());
    let cases: [Case; 17] = [
        (
            |p| set(p, "general.architecture", Value::String("qwen35".to_owned())),
            &["general.architecture", "qwen35"],
        ),
        (
            |p| p.metadata.retain(|(key, _)| key != "dflash.target_layers"),
            &["dflash.target_layers: missing"],
        ),
        (
            |p| p.metadata.retain(|(key, _)| key != "dflash.rope.freq_base"),
            &["dflash.rope.freq_base: missing"],
        ),
        (
            |p| p.metadata.retain(|(key, _)| !key.ends_with("mask_token_id")),
            &["mask_token_id: missing"],
        ),
        (
            |p| p.metadata.retain(|(key, _)| !key.ends_with("_pattern")),
            &["sliding_window_pattern: missing"],
        ),
        (
            |p| p.metadata.retain(|(key, _)| !key.ends_with("selector_rank")),
            &["selector_rank: missing"],
        ),
        (
            |p| set(p, "dflash.target_layers", Value::Array(vec![Value::I32(0)])),
            &["target_layers", "at least 1", "[0]"],
        ),
        (
            |p| set(p, "dflash.target_layers", Value::Array(vec![Value::I32(9)])),
            &["target_layer_ids", "got 8"],
        ),
        (
            |p| set(p, "dflash.sample_from_anchor", Value::Bool(true)),
            &["sample_from_anchor", "expected false", "true"],
        ),
        (
            |p| {
                set(
                    p,
                    "dflash.rope.dimension_sections",
                    Value::Array([8, 4, 4, 0].map(Value::I32).to_vec()),
                );
            },
            &["dimension_sections", "[16, 0, 0, 0]", "[8, 4, 4, 0]"],
        ),
        (
            |p| set(p, "dflash.attention.value_length", Value::U32(16)),
            &["value_length", "32", "got 16"],
        ),
        (
            |p| set(p, "dflash.hidden_activation", Value::String("gelu".to_owned())),
            &["hidden_activation", "silu", "gelu"],
        ),
        (
            |p| set(p, "dflash.rope.scaling.factor", Value::F32(4.0)),
            &["dflash.rope.scaling.factor", "not known"],
        ),
        (
            |p| set(p, "dflash.embedding_length", Value::I32(-5)),
            &["embedding_length", "whole number", "-5"],
        ),
        (
            |p| set(p, "dflash.block_count", Value::U32(u32::MAX)),
            &["block_count", "4294967295"],
        ),
        (
            |p| set(p, "dflash.attention.head_count", Value::U32(0)),
            &["num_attention_heads", "got 0"],
        ),
        (
            |p| {
                set(
                    p,
                    "tokenizer.ggml.tokens",
                    Value::Array(vec![Value::String("a".to_owned())]),
                );
            },
            &["vocab_size", "1"],
        ),
    ];
    for (change, parts) in cases {
        let message = changed(change).unwrap_err();
        for part in parts {
            assert!(message.contains(part), "{part:?} is not in {message:?}");
        }
    }
    changed(|p| set(p, "general.author", text("anybody"))).unwrap();
}

#[test]
fn missing_and_unexpected_tensors_are_listed_together() {
    let planned = |name: &str, shape: &[usize]| Planned {
        name: name.to_owned(),
        element: ElementType::F32,
        shape: shape.to_vec(),
    };
    let message = changed(|p| {
        p.tensors
            .retain(|tensor| tensor.name != "blk.1.attn_q.weight" && tensor.name != "fc.weight");
        p.tensors.push(planned("token_embd.weight", &[40, 32]));
        p.tensors.push(planned("fc.weight", &[32, 96]));
    })
    .unwrap_err();
    for part in [
        "missing (1): blk.1.attn_q.weight",
        "unexpected (1): token_embd.weight",
        "an embedding or a head of its own",
        "fc.weight: expected shape [32, 64], got [32, 96]",
    ] {
        assert!(message.contains(part), "{part:?} is not in {message:?}");
    }
}

#[test]
fn a_value_that_is_not_finite_is_found_when_reading_and_before_writing() {
    let mut bytes = whole();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("d.gguf");
    fs::write(&path, &bytes).unwrap();
    let norm = GgufFile::open(&path).unwrap().bytes("output_norm.weight").unwrap();
    let at = bytes.windows(norm.len()).position(|window| window == norm).unwrap();
    bytes[at + 8..][..4].copy_from_slice(&f32::NAN.to_le_bytes());
    let message = read(&bytes).unwrap_err();
    assert!(
        message.contains("output_norm.weight") && message.contains("element 2"),
        "{message}"
    );

    let target = target_of(&dflash2(), true);
    let mut wide = source(&dflash2(), DType::F32, 3);
    let fc = wide.tensors["fc.weight"].clone();
    wide.tensors
        .insert("fc.weight".to_owned(), (fc.ones_like().unwrap() * 1e5).unwrap());
    let message = super::refused(write(&folder.path().join("half.gguf"), &wide, &target, Stored::F16));
    assert!(
        message.contains("fc.weight") && message.contains("too large for F16"),
        "{message}"
    );
    assert_eq!(
        fs::read_dir(folder.path()).unwrap().count(),
        1,
        "nothing may be left of a file that failed"
    );
}
