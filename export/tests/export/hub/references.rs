//! `hf://` where a folder is expected: what was pushed comes back bit for bit, and offline nobody is asked.

use std::fs;

use super::{REPO, Run, Scene};
use crate::folders::demo;

#[test]
fn what_was_pushed_comes_back_bit_for_bit() {
    let scene = Scene::new();
    scene.push(&[]).passed();
    let head = scene.stub.state().models[REPO].branches["main"].last().unwrap().clone();
    for reference in [
        format!("hf://{REPO}"),
        format!("hf://{REPO}@main"),
        format!("hf://{REPO}@{head}"),
    ] {
        let target = demo("target");
        let arguments = ["inspect", &reference, "--target", target.to_str().unwrap()];
        let out = scene.run(&arguments).passed();
        assert!(out.contains("a whole drafter") && out.contains(&head), "{out}");
    }
    let cache = scene
        .root
        .path()
        .join("home/hub/models--org--drafter/snapshots")
        .join(&head);
    for name in ["README.md", "config.json", "dflash_export.json", "model.safetensors"] {
        assert_eq!(
            fs::read(cache.join(name)).unwrap(),
            fs::read(scene.folder().join(name)).unwrap(),
            "{name}"
        );
    }
    // once, however often it was named
    assert_eq!(scene.stub.count("GET /org/drafter/resolve/"), 4);
    scene.check_secrets();

    // a folder of the cache is a folder of links: pushed elsewhere, it is whole there
    scene
        .run(&["push", &format!("hf://{REPO}"), "--repo", "org/copy"])
        .passed();
    let (first, copy) = (scene.stub.files(REPO, "main"), scene.stub.files("org/copy", "main"));
    assert_eq!(first, copy);
}

#[test]
fn a_conversion_from_the_hub_names_the_commit_that_it_read() {
    let scene = Scene::new();
    scene.push(&[]).passed();
    let head = scene.stub.state().models[REPO].branches["main"].last().unwrap().clone();
    let out = scene.root.path().join("copy");
    scene
        .run(&["hf", &format!("hf://{REPO}@main"), "--out", out.to_str().unwrap()])
        .passed();
    let provenance = fs::read_to_string(out.join("dflash_export.json")).unwrap();
    assert!(provenance.contains(&format!("hf://{REPO}@{head}")), "{provenance}");
    let weights = |folder: &std::path::Path| fs::read(folder.join("model.safetensors")).unwrap();
    assert_eq!(weights(&out), weights(&scene.folder()));
}

#[test]
fn a_target_from_the_hub_is_the_card_s_base_model_at_its_commit() {
    let scene = Scene::new();
    let files: Vec<(String, Vec<u8>)> = fs::read_dir(demo("target"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .map(|path| {
            (
                path.file_name().unwrap().to_str().unwrap().to_owned(),
                fs::read(path).unwrap(),
            )
        })
        .collect();
    let files: Vec<(&str, &[u8])> = files
        .iter()
        .map(|(name, body)| (name.as_str(), body.as_slice()))
        .collect();
    scene.stub.publish("org/demo", &files);
    let head = scene.stub.state().models["org/demo"].branches["main"]
        .last()
        .unwrap()
        .clone();
    let (folder, out) = (scene.folder(), scene.root.path().join("copy"));
    let (folder, out) = (folder.to_str().unwrap(), out.to_str().unwrap());
    let fixed = [
        "hf",
        folder,
        "--out",
        out,
        "--target",
        "hf://org/demo",
        "--license",
        "mit",
        "--name",
        REPO,
    ];
    scene.run(&fixed).passed();
    let card = fs::read_to_string(scene.root.path().join("copy/README.md")).unwrap();
    for part in [
        "base_model: \"org/demo\"",
        &format!("`org/demo` (revision `{head}`)"),
        "vllm serve org/demo",
    ] {
        assert!(card.contains(part), "{part} is not in:\n{card}");
    }
    // and that is a card that may be published
    scene.run(&["push", out, "--repo", REPO]).passed();
    let pinned = [
        &fixed[..],
        &["--force", "--base-model", "org/other", "--base-revision", "v2"],
    ]
    .concat();
    scene.run(&pinned).passed();
    let card = fs::read_to_string(scene.root.path().join("copy/README.md")).unwrap();
    assert!(card.contains("`org/other` (revision `v2`)"), "{card}");
}

#[test]
fn offline_the_cache_alone_is_asked() {
    let scene = Scene::new();
    scene.push(&[]).passed();
    let reference = format!("hf://{REPO}");
    let offline = || {
        let mut command = scene.command(&["inspect", &reference]);
        Run::of(&command.env("HF_HUB_OFFLINE", "1").output().unwrap())
    };
    let before = scene.stub.state().requests.len();
    offline().refused(2, &[&reference, "does not hold it", "HF_HUB_OFFLINE"]);
    assert_eq!(scene.stub.state().requests.len(), before);
    scene.run(&["inspect", &reference]).passed();
    let before = scene.stub.state().requests.len();
    offline().passed();
    assert_eq!(scene.stub.state().requests.len(), before);
}

#[test]
fn a_reference_to_nothing_names_option_and_repository() {
    let scene = Scene::new();
    scene
        .run(&["inspect", "hf://org/none"])
        .refused(2, &["FOLDER", "hf://org/none", "HF_TOKEN"]);
    scene
        .run(&["inspect", "hf://none"])
        .refused(2, &["FOLDER", "expected hf://org/name"]);
    let folder = scene.folder();
    let arguments = ["inspect", folder.to_str().unwrap(), "--target", "hf://org/none"];
    scene.run(&arguments).refused(2, &["--target", "hf://org/none"]);
}
