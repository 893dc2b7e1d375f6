//! What is sent, what is left out and what is refused before anything is sent.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use dflash_data::files::sha256_hex;

use super::stub::{Stored, TOKEN};
use super::{REPO, Scene};
use crate::folders::edit_tensors;

const OURS: [&str; 4] = ["README.md", "config.json", "dflash_export.json", "model.safetensors"];

#[test]
fn a_new_repository_gets_every_file_of_the_list_and_no_other() {
    let scene = Scene::new();
    fs::write(scene.folder().join("optimizer.bin"), "state").unwrap();
    fs::write(scene.folder().join(".env"), "x").unwrap();
    fs::create_dir(scene.folder().join("logs")).unwrap();
    let out = scene.push(&["--private"]).passed();
    for part in [
        "created",
        "left out    .env",
        "left out    logs/",
        "left out    optimizer.bin",
        "sent        4 files",
        "DFlash 2",
    ] {
        assert!(out.contains(part), "{part} is not in:\n{out}");
    }
    let there = scene.stub.files(REPO, "main");
    for name in OURS {
        let here = fs::read(scene.folder().join(name)).unwrap();
        assert_eq!(there[name], Stored::Inline(here), "{name}");
    }
    let names: BTreeSet<&str> = there.keys().map(String::as_str).collect();
    assert_eq!(names, OURS.iter().copied().chain([".gitattributes"]).collect());
    assert!(scene.stub.state().models[REPO].private);
    let head = scene.stub.state().models[REPO].branches["main"].last().unwrap().clone();
    assert!(
        out.contains(&format!("{}/{REPO}/commit/{head}", scene.stub.address)),
        "{out}"
    );
    scene.check_secrets();
}

#[test]
fn a_second_push_sends_what_changed_and_a_third_makes_no_commit() {
    let scene = Scene::new();
    // somebody has it already: no right to make repositories is needed
    scene.stub.publish(REPO, &[(".gitattributes", b"")]);
    scene.push(&[]).passed();
    assert_eq!(
        (scene.stub.commits(REPO, "main"), scene.stub.count("repos/create")),
        (1, 0)
    );
    let again = scene.push(&[]).passed();
    assert!(again.contains("no commit was made"), "{again}");
    assert_eq!(scene.stub.commits(REPO, "main"), 1);

    edit_tensors(&scene.folder(), |tensors| {
        let norm = tensors["norm.weight"].affine(1.0, 0.5).unwrap();
        tensors.insert("norm.weight".to_owned(), norm);
    });
    let changed = scene.push(&[]).passed();
    assert!(
        changed.contains("sent        1 files; 3 were there already"),
        "{changed}"
    );
    assert_eq!(scene.stub.commits(REPO, "main"), 2);
    let here = fs::read(scene.folder().join("model.safetensors")).unwrap();
    assert_eq!(
        scene.stub.files(REPO, "main")["model.safetensors"],
        Stored::Inline(here)
    );
}

#[test]
fn links_are_followed_and_one_to_nothing_is_refused() {
    let scene = Scene::new();
    let (blobs, folder) = (scene.root.path().join("blobs"), scene.folder());
    fs::create_dir(&blobs).unwrap();
    for name in OURS {
        fs::rename(folder.join(name), blobs.join(name)).unwrap();
        std::os::unix::fs::symlink(format!("../blobs/{name}"), folder.join(name)).unwrap();
    }
    let latest = scene.root.path().join("latest");
    std::os::unix::fs::symlink("drafter", &latest).unwrap();
    scene.run(&["push", latest.to_str().unwrap(), "--repo", REPO]).passed();
    let there = scene.stub.files(REPO, "main");
    for name in OURS {
        assert_eq!(
            there[name],
            Stored::Inline(fs::read(blobs.join(name)).unwrap()),
            "{name}"
        );
    }
    std::os::unix::fs::symlink("nowhere", folder.join("tokenizer.json")).unwrap();
    scene.push(&[]).refused(2, &["tokenizer.json", "a link to nothing"]);
}

#[test]
fn a_dry_run_tells_everything_and_contacts_nobody() {
    let scene = Scene::new();
    fs::write(scene.folder().join("notes.txt"), "x").unwrap();
    let mut command = scene.command(&["push", scene.folder().to_str().unwrap(), "--repo", REPO, "--dry-run"]);
    // neither a token nor the network is needed
    let output = command
        .env_remove("HF_TOKEN")
        .env("HF_HUB_OFFLINE", "1")
        .output()
        .unwrap();
    let out = super::Run::of(&output).passed();
    let size = fs::metadata(scene.folder().join("model.safetensors")).unwrap().len();
    for part in [
        &format!("model.safetensors, {size} bytes, as a large file (LFS)"),
        "config.json",
        "in the commit",
        "left out    notes.txt",
        "base_model: \"org/target\"",
        "| 8 of heldout.jsonl | greedy | 100 | 3.500 | 3.250 |",
        "Acceptance length is the number of tokens that one verification",
        "nothing was sent",
    ] {
        assert!(out.contains(part), "{part} is not in:\n{out}");
    }
    assert_eq!(scene.stub.state().requests.len(), 0);
}

/// One way to spoil a folder, and what must be said about it.
type Case = (fn(&Path), &'static [&'static str]);

#[test]
fn what_may_not_be_published_is_refused_before_anybody_is_asked() {
    let spoiled: [Case; 7] = [
        (
            |folder| {
                edit_tensors(folder, |tensors| {
                    tensors.remove("hidden_norm.weight").unwrap();
                });
            },
            &["not sent", "missing (1): hidden_norm.weight"],
        ),
        (
            |folder| {
                edit_tensors(folder, |tensors| {
                    let norm = tensors["norm.weight"].affine(f64::NAN, 0.0).unwrap();
                    tensors.insert("norm.weight".to_owned(), norm);
                });
            },
            &["not sent", "norm.weight", "not a finite number"],
        ),
        (
            |folder| {
                fs::copy(folder.join("model.safetensors"), folder.join("adamw.safetensors")).unwrap();
            },
            &["not sent", "adamw.safetensors"],
        ),
        (
            |folder| fs::remove_file(folder.join("README.md")).unwrap(),
            &["README.md"],
        ),
        (
            |folder| edit_card(folder, "license: \"mit\"\n", ""),
            &["README.md", "license: missing", "--license"],
        ),
        (
            |folder| edit_card(folder, "\"org/target\"", "\"/models/target\""),
            &["README.md", "base_model: expected", "/models/target"],
        ),
        (
            |folder| fs::write(folder.join("dflash_export.json"), format!("{{\"env\": \"{TOKEN}\"}}")).unwrap(),
            &["dflash_export.json: holds the token from HF_TOKEN"],
        ),
    ];
    for (number, (spoil, words)) in spoiled.into_iter().enumerate() {
        let scene = Scene::new();
        spoil(&scene.folder());
        let error = scene.push(&[]).refused(2, words);
        assert_eq!(scene.stub.state().requests.len(), 0, "case {number}: {error}");
    }
    let scene = Scene::new();
    for (options, words) in [
        (
            vec!["--revision", "0123456789abcdef0123456789abcdef01234567"],
            "expected a branch",
        ),
        (vec!["--revision", "a b"], "revision \"a b\""),
    ] {
        scene.push(&options).refused(2, &[words]);
    }
    let folder = scene.folder();
    for repo in ["drafter", "org/", "org/a--b", "../x/y"] {
        scene
            .run(&["push", folder.to_str().unwrap(), "--repo", repo])
            .refused(2, &["expected a repository"]);
    }
    for (name, value, words) in [
        ("HF_TOKEN", "", "set HF_TOKEN"),
        ("HF_HUB_OFFLINE", "1", "HF_HUB_OFFLINE"),
    ] {
        let mut command = scene.command(&["push", folder.to_str().unwrap(), "--repo", REPO]);
        super::Run::of(&command.env(name, value).output().unwrap()).refused(2, &[words, REPO]);
    }
    assert_eq!(scene.stub.state().requests.len(), 0);
}

fn edit_card(folder: &Path, from: &str, to: &str) {
    let path = folder.join("README.md");
    let card = fs::read_to_string(&path).unwrap();
    assert!(card.contains(from), "{card}");
    fs::write(path, card.replace(from, to)).unwrap();
}

#[test]
fn a_large_file_goes_as_one_or_not_at_all() {
    let scene = Scene::new();
    // the hub takes it as a large file, but by a way that would end inside the commit
    scene.stub.state().large_from = Some(100_000);
    scene.stub.state().transfer = "basic";
    let error = scene
        .push(&[])
        .refused(1, &["model.safetensors", "Some(\"basic\")", "only xet"]);
    assert!(error.contains("new and still empty"), "{error}");
    assert_eq!((scene.stub.commits(REPO, "main"), scene.stub.count("/commit/")), (0, 0));

    // more than the limit, and the hub would take it inside
    scene.stub.state().large_from = None;
    let gguf = fs::File::create(scene.folder().join("drafter.gguf")).unwrap();
    gguf.set_len(10_000_001).unwrap();
    let error = scene
        .push(&[])
        .refused(1, &["drafter.gguf: 10000001 bytes would travel inside the commit"]);
    assert!(!error.contains("new and still empty"), "{error}");
    assert_eq!(scene.stub.count("/commit/"), 0);
    scene.check_secrets();
}

#[test]
fn a_large_file_travels_by_xet_and_is_known_again() {
    let scene = Scene::new();
    scene.stub.state().large_from = Some(100_000);
    let run = scene.push(&[]);
    let all: u64 = OURS
        .iter()
        .map(|name| fs::metadata(scene.folder().join(name)).unwrap().len())
        .sum();
    // without a terminal: a line at the beginning and one at the end, at least
    for line in [format!("upload: 0/{all} bytes"), format!("upload: {all}/{all} bytes")] {
        assert_eq!(run.error.matches(&line).count(), 1, "{}", run.error);
    }
    run.passed();
    let bytes = fs::read(scene.folder().join("model.safetensors")).unwrap();
    let stored = Stored::Large {
        sha256: sha256_hex(&bytes),
        size: bytes.len() as u64,
    };
    assert_eq!(scene.stub.files(REPO, "main")["model.safetensors"], stored);
    let sent: usize = {
        let state = scene.stub.state();
        let blocks = state
            .requests
            .iter()
            .filter(|request| request.line.starts_with("POST /v1/xorbs/"));
        blocks.map(|request| request.body.len()).sum()
    };
    assert!(
        sent > bytes.len() / 2,
        "{sent} of {} bytes reached the storage",
        bytes.len()
    );
    let again = scene.push(&["--quiet"]);
    assert_eq!(again.error, "");
    let again = again.passed();
    assert!(again.contains("no commit was made"), "{again}");
    scene.check_secrets();
}

#[test]
fn branches_and_proposals_leave_main_as_it_was() {
    let scene = Scene::new();
    scene.push(&["--revision", "trial/one"]).passed();
    assert_eq!(
        (scene.stub.commits(REPO, "main"), scene.stub.commits(REPO, "trial/one")),
        (0, 1)
    );
    assert!(scene.stub.files(REPO, "trial/one").contains_key("model.safetensors"));
    let out = scene.push(&["--create-pr"]).passed();
    assert!(
        out.contains(&format!("{}/{REPO}/discussions/1", scene.stub.address)),
        "{out}"
    );
    assert_eq!(scene.stub.commits(REPO, "main"), 0);
    assert!(scene.stub.state().models[REPO].proposals[0].contains_key("model.safetensors"));
}

#[test]
fn a_repository_that_is_not_what_was_meant_stays_as_it_was() {
    let scene = Scene::new();
    scene.stub.publish(
        REPO,
        &[("model-00001-of-00002.safetensors", b"x"), ("config.json", b"{}")],
    );
    scene
        .push(&[])
        .refused(1, &["model-00001-of-00002.safetensors", "another repository"]);
    assert_eq!(scene.stub.commits(REPO, "main"), 0);

    let scene = Scene::new();
    scene.stub.publish(REPO, &[("config.json", b"{}")]);
    scene
        .push(&["--private"])
        .refused(1, &["--private", REPO, "exists already"]);
    assert_eq!(scene.stub.commits(REPO, "main"), 0);
}
