//! Reads a run file, applies `--set a.b=v`, and checks every value.
//!
//! An override goes through the same schema as the file, so that an unknown path or a wrong type is named as
//! the user wrote it. `v` is read as TOML when it is TOML that fits, else as a plain string: `--set
//! run_dir=runs/x` needs no quotes.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};

use crate::config::RunConfig;
use crate::limits;

/// The run file at `path` with `overrides` (`a.b=v`) applied in order.
///
/// # Errors
/// When the file cannot be read or parsed (with line and column), when a key is unknown, a type wrong or a
/// value out of range.
pub fn load(path: &Path, overrides: &[String]) -> Result<RunConfig> {
    let text = std::fs::read_to_string(path).with_context(|| format!("run file {}", path.display()))?;
    parse(&text, overrides).with_context(|| format!("run file {}", path.display()))
}

/// A run file's text with `overrides` applied in order.
pub fn parse(text: &str, overrides: &[String]) -> Result<RunConfig> {
    // first the text by itself: errors of the file then carry its line and column
    let mut config: RunConfig = toml::from_str(text)?;
    let mut table: toml::Table = toml::from_str(text)?;
    for assignment in overrides {
        (table, config) = with_override(&table, assignment).with_context(|| format!("--set {assignment}"))?;
    }
    check(&config)?;
    Ok(config)
}

/// The config as TOML text, every known key written.
pub fn to_toml(config: &RunConfig) -> Result<String> {
    Ok(toml::to_string_pretty(config)?)
}

fn with_override(table: &toml::Table, assignment: &str) -> Result<(toml::Table, RunConfig)> {
    let Some((path, text)) = assignment.split_once('=') else {
        bail!("expected section.key=value")
    };
    let as_toml = toml::from_str::<toml::Table>(&format!("value = {text}"))
        .ok()
        .and_then(|mut parsed| {
            if parsed.len() == 1 {
                parsed.remove("value")
            } else {
                None
            }
        });
    let as_string = toml::Value::String(text.to_owned());
    let mut failure = None;
    for value in as_toml.into_iter().chain([as_string]) {
        let mut changed = table.clone();
        insert(&mut changed, path.trim(), value)?;
        match toml::Value::Table(changed.clone()).try_into::<RunConfig>() {
            Ok(config) => return Ok((changed, config)),
            // the first reading is the one that the user meant
            Err(error) => failure = failure.or(Some(error)),
        }
    }
    match failure {
        Some(error) => Err(error.into()),
        None => bail!("no value"),
    }
}

fn insert(table: &mut toml::Table, path: &str, value: toml::Value) -> Result<()> {
    let mut keys: Vec<&str> = path.split('.').collect();
    let Some(last) = keys.pop().filter(|key| !key.is_empty()) else {
        bail!("expected section.key=value")
    };
    let mut inner = table;
    for key in keys {
        let entry = inner
            .entry(key)
            .or_insert_with(|| toml::Value::Table(toml::Table::new()));
        let toml::Value::Table(next) = entry else {
            bail!("{key} is a value, not a section")
        };
        inner = next;
    }
    inner.insert(last.to_owned(), value);
    Ok(())
}

/// What the types cannot say. Each message names the key, what was expected and what came.
fn check(config: &RunConfig) -> Result<()> {
    let RunConfig { data, train, .. } = config;
    ensure!(
        !config.run_dir.as_os_str().is_empty(),
        "run_dir: expected a folder, got an empty path"
    );
    ensure!(
        config
            .drafter
            .init_from
            .as_ref()
            .is_none_or(|path| !path.as_os_str().is_empty()),
        "drafter.init_from: expected a drafter, got an empty path"
    );
    ensure!(
        data.prompts.is_some() || data.conversations.is_some(),
        "data: expected prompts or conversations, got neither"
    );
    ensure!(
        train.steps.is_none() || train.epochs.is_none(),
        "train: steps and epochs exclude each other, got both"
    );
    check_tracking(config)?;
    limits::check(config)
}

/// Characters that W&B refuses in the name of a project.
const NOT_IN_A_PROJECT: [char; 7] = ['/', '\\', '#', '?', '%', ':', '"'];

/// No tracker twice, and names that W&B takes; it would refuse others at the upload, long after the training.
fn check_tracking(config: &RunConfig) -> Result<()> {
    for (i, name) in config.tracking.iter().enumerate() {
        ensure!(
            !config.tracking[..i].contains(name),
            "tracking: expected every name once, got {:?} twice",
            format!("{name:?}").to_lowercase()
        );
    }
    let Some(names) = &config.wandb else { return Ok(()) };
    check_name("wandb.project", &names.project, 128, &NOT_IN_A_PROJECT)?;
    for (key, name, refused) in [
        ("wandb.entity", &names.entity, NOT_IN_A_PROJECT.as_slice()),
        ("wandb.name", &names.name, &[]),
    ] {
        if let Some(name) = name {
            check_name(key, name, 128, refused)?;
        }
    }
    for (i, tag) in names.tags.iter().enumerate() {
        check_name(&format!("wandb.tags[{i}]"), tag, 64, &[])?;
        ensure!(
            !names.tags[..i].contains(tag),
            "wandb.tags: expected every tag once, got {tag:?} twice"
        );
    }
    Ok(())
}

fn check_name(key: &str, name: &str, longest: usize, refused: &[char]) -> Result<()> {
    let length = name.chars().count();
    ensure!(
        (1..=longest).contains(&length) && name.trim() == name,
        "{key}: expected 1 to {longest} characters without spaces around them, got {name:?}"
    );
    if let Some(bad) = name.chars().find(|c| c.is_control() || refused.contains(c)) {
        bail!("{key}: expected a name without {bad:?}, got {name:?}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINIMAL: &str = "run_dir = 'runs/x'\n[target]\npath = 't'\n[data]\nprompts = 'p.jsonl'\n";

    fn message(text: &str, overrides: &[&str]) -> String {
        let overrides: Vec<String> = overrides.iter().map(ToString::to_string).collect();
        format!("{:#}", parse(text, &overrides).unwrap_err())
    }

    #[test]
    fn a_resolved_file_reads_back_as_itself() {
        let config = parse(MINIMAL, &["train.steps=5".into(), "taps.layers=[1, 3]".into()]).unwrap();
        let again = parse(&to_toml(&config).unwrap(), &[]).unwrap();
        assert_eq!(config, again);
        assert_eq!(config.train.steps, Some(5));
        assert_eq!(config.taps.layers, Some(vec![1, 3]));
    }

    #[test]
    fn an_override_needs_no_quotes_and_the_last_one_wins() {
        let config = parse(
            MINIMAL,
            &["run_dir=a".into(), "run_dir=b/c".into(), "train.lr=1".into()],
        )
        .unwrap();
        assert_eq!(config.run_dir, Path::new("b/c"));
        assert!((config.train.lr - 1.0).abs() < f64::EPSILON);
    }

    #[test]
    fn an_unknown_key_is_named_with_its_line() {
        let text = message(&format!("{MINIMAL}[train]\nlearning_rate = 1.0\n"), &[]);
        assert!(text.contains("learning_rate") && text.contains("line 7"), "{text}");
    }

    #[test]
    fn an_override_of_an_unknown_path_or_wrong_type_is_named() {
        let text = message(MINIMAL, &["train.learning_rate=1"]);
        assert!(
            text.contains("--set train.learning_rate=1") && text.contains("unknown field"),
            "{text}"
        );
        let text = message(MINIMAL, &["train.lr=fast"]);
        assert!(
            text.contains("--set train.lr=fast") && text.contains("invalid type"),
            "{text}"
        );
        let text = message(MINIMAL, &["run_dir.x=1"]);
        assert!(text.contains("run_dir is a value"), "{text}");
        assert!(message(MINIMAL, &["train.lr"]).contains("section.key=value"));
        assert!(message(MINIMAL, &["trian.lr=1"]).contains("trian"));
    }

    #[test]
    fn a_number_out_of_range_is_named_with_its_range() {
        let text = message(MINIMAL, &["train.selector_alpha=-1.0"]);
        assert_eq!(text, "train.selector_alpha: expected a number from 0 to 1000, got -1.0");
        let text = message(MINIMAL, &["drafter.layers=4096"]);
        assert_eq!(text, "drafter.layers: expected a whole number from 1 to 64, got 4096");
        assert!(message(MINIMAL, &["train.steps=1", "train.epochs=1"]).contains("exclude each other"));
    }

    #[test]
    fn trackers_are_known_and_named_once() {
        use crate::config::TrackerName::{Jsonl, Tensorboard, Wandb};
        assert_eq!(parse(MINIMAL, &[]).unwrap().tracking, [Jsonl]);
        let both = parse(MINIMAL, &["tracking=['tensorboard', 'wandb']".into()]).unwrap();
        assert_eq!(both.tracking, [Tensorboard, Wandb]);
        assert!(parse(MINIMAL, &["tracking=[]".into()]).unwrap().tracking.is_empty());
        let text = message(MINIMAL, &["tracking=['wandb', 'jsonl', 'wandb']"]);
        assert_eq!(text, "tracking: expected every name once, got \"wandb\" twice");
        let text = message(MINIMAL, &["tracking=['mlflow']"]);
        assert!(
            text.contains("unknown variant `mlflow`, expected one of `jsonl`, `tensorboard`, `wandb`"),
            "{text}"
        );
        assert!(message(MINIMAL, &["tracking=wandb"]).contains("expected a sequence"));
    }

    #[test]
    fn names_that_wandb_would_refuse_are_refused_before_the_training() {
        for (setting, key) in [
            ("wandb.project=''", "wandb.project: expected 1 to 128"),
            (
                "wandb.project=a/b",
                "wandb.project: expected a name without '/', got \"a/b\"",
            ),
            ("wandb.entity='me '", "wandb.entity: expected 1 to 128"),
            ("wandb.entity=a:b", "wandb.entity: expected a name without ':'"),
            ("wandb.name=\"a\\nb\"", "wandb.name: expected a name without '\\n'"),
            ("wandb.tags=['a', '']", "wandb.tags[1]: expected 1 to 64"),
            (
                "wandb.tags=['a', 'b', 'a']",
                "wandb.tags: expected every tag once, got \"a\" twice",
            ),
            ("wandb.api_key=x", "unknown field `api_key`"),
        ] {
            let text = message(MINIMAL, &[setting]);
            assert!(text.contains(key), "{setting}: {text}");
        }
        let config = parse(
            MINIMAL,
            &["wandb.tags=['a b', 'c/d']".into(), "wandb.name=v2: long".into()],
        )
        .unwrap();
        let again = parse(&to_toml(&config).unwrap(), &[]).unwrap();
        assert_eq!(config, again);
        assert_eq!(config.wandb().project, "dflash");
        assert_eq!(parse(MINIMAL, &[]).unwrap().wandb().name.as_deref(), Some("x"));
    }

    #[test]
    fn a_missing_section_is_an_error() {
        assert!(message("run_dir = 'x'\n[target]\npath = 't'\n", &[]).contains("data"));
        assert!(message("run_dir = 'x'\n[target]\npath = 't'\n[data]\n", &[]).contains("prompts or conversations"));
    }
}
