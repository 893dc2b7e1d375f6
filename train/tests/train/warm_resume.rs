//! A run that started from another drafter, taken up again: with that drafter changed, exchanged or gone.

use std::fs;
use std::path::Path;

use dflash_eval::folder::sizes_for;
use dflash_model::TargetConfig;
use serde_json::{Value, json};

use crate::command::{command, conversations, repository, same_state, succeeded, train};

fn init_from(path: &Path) -> String {
    format!("drafter.init_from={}", path.display())
}

/// `initialised` of a dry run, moved to `name`.
fn drafter(folder: &Path, name: &str, seed: &str) -> std::path::PathBuf {
    let run = format!("{name}-run");
    succeeded(&command(folder, &run, &["--dry-run", "--set", seed]).output().unwrap());
    let place = folder.join(name);
    fs::rename(folder.join(run).join("initialised"), &place).unwrap();
    place
}

#[test]
fn a_run_goes_on_without_the_drafter_that_it_started_from_but_not_with_another() {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path();
    conversations(folder);
    let (first, second) = (drafter(folder, "a", "seed=1"), drafter(folder, "b", "seed=2"));
    let started = init_from(&first);
    succeeded(&train(folder, "run", &["--set", &started]));
    succeeded(&train(folder, "straight", &["--set", &started]));
    let hash = |run: &str| {
        let bytes = fs::read(folder.join(run).join("final/dflash_export.json")).unwrap();
        let provenance: Value = serde_json::from_slice(&bytes).unwrap();
        assert_eq!(provenance["started_from"]["path"], json!(first));
        provenance["started_from"]["hash"].clone()
    };
    let known = hash("run");
    let refused = |path: &Path, run: &str| {
        let arguments = ["--stage", "train", "--set", &init_from(path)];
        let output = command(folder, run, &arguments).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains("drafter.init_from"), "{said}");
        said
    };
    assert!(refused(&second, "run").contains("resume refused"));
    assert!(refused(&folder.join("nowhere"), "run").contains("no such file or folder"));

    // gone: a finished run stands, a broken-off one goes on to the same bits
    fs::rename(&first, folder.join("away")).unwrap();
    succeeded(
        &command(folder, "run", &["--stage", "train", "--set", &started])
            .output()
            .unwrap(),
    );
    fs::remove_dir_all(folder.join("run/final")).unwrap();
    fs::remove_dir_all(folder.join("run/step-000020")).unwrap();
    succeeded(
        &command(folder, "run", &["--stage", "train", "--set", &started])
            .output()
            .unwrap(),
    );
    same_state(&folder.join("straight/step-000020"), &folder.join("run/step-000020"));
    assert_eq!(hash("run"), known);
    // without a checkpoint there is nothing to go on from
    assert!(refused(&first, "fresh").contains("no such file or folder"));

    // another one in its place is another one
    fs::rename(&second, &first).unwrap();
    assert!(refused(&first, "run").contains("resume refused"));
}

#[test]
fn what_a_warm_start_changes_is_said_even_when_quiet_and_only_at_the_start() {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path();
    conversations(folder);
    let started = init_from(&drafter(folder, "a", "seed=1"));
    let options = ["--set", &started, "--set", "taps.layers=[1, 2, 5]", "--allow", "taps"];
    let first = train(folder, "run", &options);
    succeeded(&first);
    let said = String::from_utf8_lossy(&first.stderr);
    assert!(said.contains("taps: [1, 3, 5] -> [1, 2, 5]"), "{said}");
    let again = command(folder, "run", &[&["--stage", "train"], &options[..]].concat())
        .output()
        .unwrap();
    succeeded(&again);
    assert!(!String::from_utf8_lossy(&again.stderr).contains("taps:"));
}

/// A speculators folder does not say how deep its target is; the target that it names does.
#[test]
fn the_depth_of_a_named_target_is_its_own() {
    let root = tempfile::tempdir().unwrap();
    let target = repository().join("data/demo/target");
    let mut info = TargetConfig::read(&target).unwrap().info;
    info.num_layers = 12;
    let folder = |name: &str| {
        let config = json!({
            "speculators_model_type": "dflash",
            "speculators_config": {"verifier": {"name_or_path": name}},
        });
        fs::write(root.path().join("config.json"), config.to_string()).unwrap();
        sizes_for(root.path(), &info).num_layers
    };
    assert_eq!(folder(target.to_str().unwrap()), 8);
    assert_eq!(folder("org/elsewhere"), 12);
}
