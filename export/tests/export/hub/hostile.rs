//! A hub that answers nonsense or nothing, and a folder that changes while it is pushed.

use std::fs;
use std::time::{Duration, Instant};

use dflash_data::files::sha256_hex;

use super::stub::{Change, Fault, Stored, TOKEN};
use super::{REPO, Run, Scene};

#[test]
fn a_commit_that_is_not_named_counts_when_it_is_there() {
    for body in ["{}", "<html>ok</html>", "{\"commitOid\": \"../x\"}"] {
        let scene = Scene::new();
        scene.stub.fail("/commit/", &[Fault::DoneSays(body)]);
        scene.push(&[]).passed();
        assert_eq!(
            (scene.stub.commits(REPO, "main"), scene.stub.count("/commit/")),
            (1, 1),
            "{body}"
        );

        let scene = Scene::new();
        scene.stub.fail("/commit/", &[Fault::Says(body)]);
        let error = scene.push(&[]).refused(1, &["nothing was committed"]);
        assert!(!error.contains("moved"), "{error}");
        assert_eq!((scene.stub.commits(REPO, "main"), scene.stub.count("/commit/")), (0, 1));
        let scene = Scene::new();
        scene.stub.fail("/commit/", &[Fault::Says(body)]);
        scene
            .push(&["--create-pr"])
            .refused(1, &["Whether the proposal was made is not known"]);
    }
}

#[test]
fn errors_name_who_is_to_blame() {
    let scene = Scene::new();
    scene.stub.fail("/preupload/", &[Fault::Says("<html>")]);
    let error = scene.push(&[]).refused(
        1,
        &[
            "answered what the hub would not",
            "POST /api/models/org/drafter/preupload/main",
        ],
    );
    assert!(!error.contains("cannot be reached"), "{error}");
    // somebody else is there, says the hub, and the branch is where it was
    let scene = Scene::new();
    scene.stub.fail("/commit/", &[Fault::Status(409)]);
    let error = scene.push(&[]).refused(1, &["nothing was committed"]);
    assert!(!error.contains("moved"), "{error}");
    // made, and then no answer about it
    let scene = Scene::new();
    scene.stub.fail("/revision/", &[Fault::Status(403)]);
    scene.push(&[]).refused(1, &[REPO, "new and still empty"]);
}

#[test]
fn a_silent_hub_is_given_up() {
    for route in [
        "GET /api/models/org/drafter",
        "repos/create",
        "/preupload/",
        "/objects/batch",
    ] {
        let scene = Scene::new();
        scene.stub.state().large_from = Some(100_000);
        scene.stub.fail(route, &[Fault::Silent]);
        let folder = scene.folder();
        let mut command = scene.command(&["push", folder.to_str().unwrap(), "--repo", REPO]);
        let begun = Instant::now();
        let output = command.env("HF_HUB_DOWNLOAD_TIMEOUT", "1").output().unwrap();
        Run::of(&output).refused(1, &["sent nothing for 1 s", route.trim_start_matches("GET ")]);
        assert!(begun.elapsed() < Duration::from_secs(20), "{route}");
    }
}

#[test]
fn what_changes_after_it_was_checked_is_not_sent() {
    // seen before the commit
    let scene = Scene::new();
    for name in ["README.md", "model.safetensors"] {
        let path = scene.folder().join(name);
        let before = fs::read(&path).unwrap();
        scene.stub.state().change = Some(Change {
            route: "/preupload/",
            path: path.clone(),
            bytes: [&before[..100], TOKEN.as_bytes()].concat(),
        });
        scene.push(&[]).refused(1, &[name, "changed since it was checked"]);
        assert_eq!(scene.stub.count("/commit/"), 0);
        fs::write(path, before).unwrap();
    }
    // later: a small file is sent as it was, out of memory
    let scene = Scene::new();
    scene.stub.publish(REPO, &[(".gitattributes", b"")]);
    let path = scene.folder().join("README.md");
    let before = fs::read(&path).unwrap();
    scene.stub.state().large_from = Some(100_000);
    scene.stub.state().change = Some(Change {
        route: "/xet-write-token/",
        path: path.clone(),
        bytes: TOKEN.into(),
    });
    scene.push(&[]).passed();
    assert_eq!(scene.stub.files(REPO, "main")["README.md"], Stored::Inline(before));
}

#[test]
fn a_large_file_is_a_stream_that_ends_as_it_was_or_not_at_all() {
    let scene = Scene::new();
    scene.stub.state().large_from = Some(1_000_000);
    let path = scene.folder().join("drafter.gguf");
    let bytes = vec![7; 10_000_001];
    fs::write(&path, &bytes).unwrap();
    scene.stub.state().change = Some(Change {
        route: "/xet-write-token/",
        path: path.clone(),
        bytes: vec![8; 10_000_001],
    });
    scene
        .push(&[])
        .refused(1, &["drafter.gguf: changed since it was checked", "on this machine"]);
    assert_eq!((scene.stub.commits(REPO, "main"), scene.stub.count("/commit/")), (0, 0));
    fs::write(&path, &bytes).unwrap();
    scene.push(&[]).passed();
    let stored = Stored::Large {
        sha256: sha256_hex(&bytes),
        size: 10_000_001,
    };
    assert_eq!(scene.stub.files(REPO, "main")["drafter.gguf"], stored);
}

#[test]
fn what_may_not_be_sent_is_refused_before_anybody_is_asked() {
    let scene = Scene::new();
    let reference = format!("hf://{REPO}");
    scene
        .run(&["push", &reference, "--repo", "org/copy", "--dry-run"])
        .refused(2, &["FOLDER", &reference, "--dry-run"]);
    // across the end of a block, far behind the beginning
    let mut licence = vec![b'x'; (17 << 20) - 10];
    licence.extend_from_slice(TOKEN.as_bytes());
    let path = scene.folder().join("LICENSE");
    fs::write(&path, &licence).unwrap();
    scene.push(&[]).refused(2, &["LICENSE: holds the token from HF_TOKEN"]);
    fs::remove_file(path).unwrap();
    for branch in [
        "a..b", "a@{b", "/x", "x/", "a//b", ".x", "x.lock", "@", "HEAD", "a\u{7}", "a~", "a:b", "a\\b",
    ] {
        scene.push(&["--revision", branch]).refused(2, &["expected a branch"]);
    }
    let folder = scene.folder();
    for repo in ["org/x.git", "org/x.ipynb", "org/a..b"] {
        scene
            .run(&["push", folder.to_str().unwrap(), "--repo", repo])
            .refused(2, &["expected a repository"]);
    }
    let card = fs::read_to_string(folder.join("README.md")).unwrap();
    fs::write(folder.join("README.md"), card + &"x".repeat(1_000_000)).unwrap();
    scene
        .push(&[])
        .refused(2, &["README.md", "bytes: a model card has at most 1000000"]);
    assert_eq!(scene.stub.state().requests.len(), 0);
}
