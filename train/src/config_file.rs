//! Reads a run file, applies `--set a.b=v`, and checks every value's range.
//!
//! An override goes through the same schema as the file, so that an unknown path or a wrong type is named as
//! the user wrote it. `v` is read as TOML when it is TOML that fits, else as a plain string: `--set
//! run_dir=runs/x` needs no quotes.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};

use crate::config::RunConfig;

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

/// Ranges that the types cannot say. Each message names the key, what was expected and what came.
fn check(config: &RunConfig) -> Result<()> {
    let RunConfig {
        data,
        generate,
        taps,
        train,
        checkpoint,
        evaluate,
        ..
    } = config;
    ensure!(
        !config.run_dir.as_os_str().is_empty(),
        "run_dir: expected a folder, got an empty path"
    );
    ensure!(config.threads != Some(0), "threads: expected at least 1, got 0");
    ensure!(
        data.prompts.is_some() || data.conversations.is_some(),
        "data: expected prompts or conversations, got neither"
    );
    in_range("data.val_fraction", data.val_fraction, 0.0, 1.0)?;
    ensure!(
        data.val_fraction < 1.0,
        "data.val_fraction: expected less than 1, got {}",
        data.val_fraction
    );
    at_least("data.max_length", data.max_length, 2)?;
    at_least("generate.max_new", generate.max_new, 1)?;
    in_range("generate.temperature", generate.temperature, 0.0, 100.0)?;
    at_least("taps.shard_mib", taps.shard_mib, 1)?;
    ensure!(
        train.steps.is_none() || train.epochs.is_none(),
        "train: steps and epochs exclude each other, got both"
    );
    ensure!(train.steps != Some(0), "train.steps: expected at least 1, got 0");
    ensure!(train.epochs != Some(0), "train.epochs: expected at least 1, got 0");
    ensure!(
        train.accumulate_samples != Some(0),
        "train.accumulate_samples: expected at least 1, got 0"
    );
    at_least("train.pack_tokens", train.pack_tokens, 1)?;
    at_least("train.anchors", train.anchors, 1)?;
    positive("train.lr", train.lr)?;
    for (index, &beta) in train.betas.iter().enumerate() {
        ensure!(
            (0.0..1.0).contains(&beta),
            "train.betas[{index}]: expected a number in [0, 1), got {beta}"
        );
    }
    positive("train.eps", train.eps)?;
    in_range("train.weight_decay", train.weight_decay, 0.0, 1.0)?;
    positive("train.clip", train.clip)?;
    in_range("train.warmup_ratio", train.warmup_ratio, 0.0, 1.0)?;
    in_range("train.min_lr_ratio", train.min_lr_ratio, 0.0, 1.0)?;
    if let Some(gamma) = train.gamma {
        positive("train.gamma", gamma)?;
    }
    in_range("train.selector_alpha", train.selector_alpha, 0.0, f64::MAX)?;
    at_least("checkpoint.keep_last", checkpoint.keep_last, 1)?;
    at_least("evaluate.max_new", evaluate.max_new, 1)?;
    ensure!(evaluate.limit != Some(0), "evaluate.limit: expected at least 1, got 0");
    Ok(())
}

fn at_least(key: &str, value: usize, least: usize) -> Result<()> {
    ensure!(value >= least, "{key}: expected at least {least}, got {value}");
    Ok(())
}

fn positive(key: &str, value: f64) -> Result<()> {
    ensure!(
        value > 0.0 && value.is_finite(),
        "{key}: expected a positive number, got {value}"
    );
    Ok(())
}

fn in_range(key: &str, value: f64, least: f64, most: f64) -> Result<()> {
    ensure!(
        value >= least && value <= most,
        "{key}: expected a number from {least} to {most}, got {value}"
    );
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
    fn every_range_error_names_its_key() {
        for (key, bad) in [
            ("threads", "0"),
            ("data.val_fraction", "1.0"),
            ("data.max_length", "1"),
            ("generate.max_new", "0"),
            ("generate.temperature", "-1.0"),
            ("taps.shard_mib", "0"),
            ("train.steps", "0"),
            ("train.epochs", "0"),
            ("train.accumulate_samples", "0"),
            ("train.pack_tokens", "0"),
            ("train.anchors", "0"),
            ("train.lr", "nan"),
            ("train.betas", "[0.9, 1.0]"),
            ("train.eps", "0.0"),
            ("train.weight_decay", "-0.1"),
            ("train.clip", "0.0"),
            ("train.warmup_ratio", "1.5"),
            ("train.min_lr_ratio", "2.0"),
            ("train.gamma", "0.0"),
            ("train.selector_alpha", "-1.0"),
            ("checkpoint.keep_last", "0"),
            ("evaluate.max_new", "0"),
            ("evaluate.limit", "0"),
        ] {
            let text = message(MINIMAL, &[&format!("{key}={bad}")]);
            assert!(
                text.starts_with(key) && text.contains("expected"),
                "{key}={bad}: {text}"
            );
        }
        assert!(message(MINIMAL, &["train.steps=1", "train.epochs=1"]).contains("exclude each other"));
    }

    #[test]
    fn a_missing_section_is_an_error() {
        assert!(message("run_dir = 'x'\n[target]\npath = 't'\n", &[]).contains("data"));
        assert!(message("run_dir = 'x'\n[target]\npath = 't'\n[data]\n", &[]).contains("prompts or conversations"));
    }
}
