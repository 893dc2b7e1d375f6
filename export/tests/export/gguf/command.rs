//! The two commands as they are called: exit codes, what they leave, what they say.

use std::fs;
use std::path::Path;

use candle_core::DType;
use dflash_export::gguf::file::Stored;
use dflash_export::gguf::tokenizer::Tokenizer;
use dflash_model::formats::gguf::GgufFile;
use dflash_model::{DrafterConfig, TargetConfig, formats};
use serde_json::{Value, json};

use crate::folders;

use super::{demo, dflash2, refused, source, target_of, write};

/// Exit code, and all that was said.
fn program(arguments: &[&str]) -> (i32, String) {
    let output = folders::program(arguments);
    let said = String::from_utf8([output.stdout.clone(), output.stderr.clone()].concat()).unwrap();
    (folders::code(&output), said)
}

/// A drafter for the demo target, as a GGUF file.
fn for_demo(path: &Path) -> DrafterConfig {
    let config = DrafterConfig {
        hidden_size: 256,
        vocab_size: 4096,
        num_target_layers: 8,
        mask_token_id: 4095,
        ..dflash2()
    };
    let target = TargetConfig::read(&demo("target")).unwrap();
    write(path, &source(&config, DType::BF16, 9), &target, Stored::Bf16).unwrap();
    config
}

#[test]
fn a_drafter_of_any_format_becomes_a_file_that_is_never_replaced_unasked() {
    let folder = tempfile::tempdir().unwrap();
    let (given, out) = (folder.path().join("given.gguf"), folder.path().join("out.gguf"));
    let config = for_demo(&given);
    let (target, given, path) = (demo("target"), given.to_str().unwrap(), out.to_str().unwrap());
    let arguments = [
        "gguf",
        given,
        "--target",
        target.to_str().unwrap(),
        "--out",
        path,
        "--dtype",
        "f32",
    ];
    let (code, said) = program(&arguments);
    assert_eq!(code, 0, "{said}");
    assert!(
        said.contains("36 tensors") && said.contains("read back and equal"),
        "{said}"
    );
    let info = TargetConfig::read(&target).unwrap().info;
    assert_eq!(formats::read(&out, Some(&info)).unwrap().config, config);
    assert_eq!(
        GgufFile::open(&out).unwrap().get("general.name").unwrap().as_str(),
        Some("given")
    );
    let first = fs::read(&out).unwrap();

    let (code, said) = program(&arguments);
    assert_eq!(code, 2, "{said}");
    assert!(said.contains("--out") && said.contains("--force"), "{said}");
    let (code, said) = program(&[&arguments[..], &["--force"]].concat());
    assert_eq!(code, 0, "{said}");
    assert_eq!(fs::read(&out).unwrap(), first, "the same file again");

    let (code, said) = program(&[
        "gguf",
        path,
        "--target",
        target.to_str().unwrap(),
        "--out",
        folder.path().to_str().unwrap(),
        "--force",
    ]);
    assert_eq!(code, 2, "{said}");
    assert!(said.contains("found a folder"), "{said}");
    let nowhere = folder.path().join("no/where.gguf");
    let (code, said) = program(&[
        "gguf",
        path,
        "--target",
        target.to_str().unwrap(),
        "--out",
        nowhere.to_str().unwrap(),
    ]);
    assert_eq!(code, 2, "{said}");
    assert!(said.contains("there is no folder"), "{said}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2, "nothing else is left");
}

#[test]
fn bad_input_is_named_with_exit_code_2() {
    let folder = tempfile::tempdir().unwrap();
    let given = folder.path().join("given.gguf");
    for_demo(&given);
    let out = folder.path().join("out.gguf");
    let (given, out, target) = (given.to_str().unwrap(), out.to_str().unwrap(), demo("target"));
    let target = target.to_str().unwrap();
    let text = folder.path().join("notes.txt");
    fs::write(&text, "no model").unwrap();
    for (source, target, part) in [
        (text.to_str().unwrap(), target, "notes.txt"),
        ("/nowhere", target, "nowhere"),
        (given, "/nowhere", "--target /nowhere"),
        (given, folder.path().to_str().unwrap(), "config.json"),
    ] {
        let (code, said) = program(&["gguf", source, "--target", target, "--out", out]);
        assert_eq!(code, 2, "{said}");
        assert!(said.contains(part), "{part:?} is not in {said:?}");
    }
    let (code, said) = program(&["gguf", given, "--target", target, "--out", out, "--dtype", "q4_0"]);
    assert_eq!(code, 2, "{said}");
    assert!(!Path::new(out).exists());
}

#[test]
fn a_gguf_drafter_is_not_read_without_its_target() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("d.gguf");
    write(
        &path,
        &source(&dflash2(), DType::F32, 1),
        &target_of(&dflash2(), true),
        Stored::F32,
    )
    .unwrap();
    let message = formats::read(&path, None).unwrap_err().to_string();
    assert!(
        message.contains("d.gguf") && message.contains("target's folder is needed"),
        "{message}"
    );
}

#[test]
fn the_demo_target_becomes_a_file_of_every_type() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("target.gguf");
    let target = demo("target");
    let mut sizes = Vec::new();
    for dtype in ["f32", "bf16", "f16", "q8_0"] {
        let arguments = [
            "gguf-target",
            target.to_str().unwrap(),
            "--out",
            out.to_str().unwrap(),
            "--dtype",
            dtype,
            "--force",
        ];
        let (code, said) = program(&arguments);
        assert_eq!(code, 0, "{said}");
        assert!(
            said.contains("108 tensors") && said.contains("mrope_section [4, 2, 2]"),
            "{said}"
        );
        sizes.push(fs::metadata(&out).unwrap().len());
    }
    assert!(
        sizes[0] > sizes[1] && sizes[1] == sizes[2] && sizes[2] > sizes[3],
        "{sizes:?}"
    );
    let (code, said) = program(&[
        "gguf",
        out.to_str().unwrap(),
        "--target",
        target.to_str().unwrap(),
        "--out",
        "x.gguf",
    ]);
    assert_eq!(code, 2, "a target is no drafter: {said}");
    assert!(
        said.contains("general.architecture") && said.contains("qwen35"),
        "{said}"
    );
}

/// Each case changes the demo's tokenizer in one way.
#[test]
fn a_tokenizer_that_llama_cpp_would_misread_is_refused_by_name() {
    type Case = (fn(&mut Value), &'static [&'static str]);
    let cases: [Case; 8] = [
        (
            |t| t["model"]["type"] = json!("Unigram"),
            &["model.type", "BPE", "Unigram"],
        ),
        (|t| t["model"]["byte_fallback"] = json!(true), &["byte_fallback"]),
        (
            |t| t["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = json!("\\w+"),
            &["qwen2 or qwen35", "\\w+"],
        ),
        (|t| t["pre_tokenizer"] = json!({"type": "Whitespace"}), &["byte level"]),
        (
            |t| t["added_tokens"][0]["id"] = json!(4096),
            &["added_tokens[0]", "4096 rows", "got 4096"],
        ),
        (|t| t["added_tokens"][0]["content"] = json!("Ġ"), &["same text", "4090"]),
        (|t| t["model"]["vocab"]["Ġ"] = json!(5), &["both have the id 5"]),
        (
            |t| t["model"]["merges"][7] = json!(["a b", "c"]),
            &["model.merges[7]", "a b"],
        ),
    ];
    let folder = tempfile::tempdir().unwrap();
    for name in ["config.json", "generation_config.json", "tokenizer_config.json"] {
        fs::copy(demo("target").join(name), folder.path().join(name)).unwrap();
    }
    let original: Value = serde_json::from_slice(&fs::read(demo("target").join("tokenizer.json")).unwrap()).unwrap();
    let read = |tokenizer: &Value| {
        fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
        Tokenizer::read(folder.path(), 4096)
    };
    for (change, parts) in cases {
        let mut tokenizer = original.clone();
        change(&mut tokenizer);
        let message = refused(read(&tokenizer));
        for part in parts.iter().chain(&["tokenizer.json"]) {
            assert!(message.contains(part), "{part:?} is not in {message:?}");
        }
    }
    // merges in the older spelling are the same; more rows than tokens are filled up
    let mut older = original.clone();
    for merge in older["model"]["merges"].as_array_mut().unwrap() {
        *merge = json!(format!("{} {}", merge[0].as_str().unwrap(), merge[1].as_str().unwrap()));
    }
    let read = read(&older).unwrap();
    assert_eq!(read, Tokenizer::read(&demo("target"), 4096).unwrap());
    let padded = Tokenizer::read(&demo("target"), 4100).unwrap();
    assert_eq!(
        (&padded.tokens[4096..], &padded.kinds[4096..]),
        (
            &["[PAD4096]", "[PAD4097]", "[PAD4098]", "[PAD4099]"].map(str::to_owned)[..],
            &[5; 4][..]
        )
    );
}
