//! Whether a model card says what a reader and the hub need: the YAML head before the text.
//!
//! ```text
//! ---
//! license: apache-2.0
//! base_model: "org/name"
//! tags:
//! - dflash2
//! ---
//! ```
//! Read are keys at the left edge with a value, a list below or a list in brackets, which is all that such heads use for
//! these three; whatever else stands there is the hub's to judge.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail, ensure};
use dflash_data::hub::is_repository;
use dflash_model::folder::ACCEPTANCE_DEFINITION;

/// What the head of a card says, each key with its values in order.
type Head = BTreeMap<String, Vec<String>>;

/// Checks licence, target and tags of a card, and returns what is allowed but worth a look.
///
/// # Errors
/// Naming the key that is missing or wrong.
pub fn check(card: &str, repository: &str) -> Result<Vec<String>> {
    let head = head(card)?;
    let values = |key: &str, hint: &str| {
        let values = head.get(key).filter(|values| !values.is_empty());
        values
            .with_context(|| format!("{key}: missing. Write it there, or make the folder with dflash-export hf{hint}"))
    };
    values("license", " --license LICENCE")?;
    for base in values("base_model", " --base-model ORG/NAME")? {
        ensure!(
            is_repository(base),
            "base_model: expected the target's repository, org/name, got {base:?}; set it, or make the folder with \
             dflash-export hf --base-model ORG/NAME"
        );
    }
    let tags = values("tags", "")?;
    ensure!(
        tags.iter().any(|tag| tag == "dflash" || tag == "dflash2"),
        "tags: expected dflash or dflash2 among them, got {}",
        tags.join(", ")
    );
    let mut notes = Vec::new();
    if !card.contains(repository) {
        notes.push(format!(
            "README.md: does not name {repository}; its commands start another drafter (dflash-export hf --name {repository})"
        ));
    }
    if !card.contains(ACCEPTANCE_DEFINITION) {
        notes.push("README.md: no table of acceptance with its definition".to_owned());
    }
    Ok(notes)
}

/// The lines between the first two `---`.
fn head(card: &str) -> Result<Head> {
    let mut lines = card.lines().map(str::trim_end);
    ensure!(
        lines.next() == Some("---"),
        "expected a YAML head: a first line of three dashes"
    );
    let mut head = Head::new();
    let mut last: Option<String> = None;
    for line in lines {
        if line == "---" {
            return Ok(head);
        }
        ensure!(!line.contains('\t'), "YAML head: a tab in {line:?}");
        let inner = line.trim_start();
        if inner.is_empty() || inner.starts_with('#') {
            continue;
        }
        if let (Some(item), Some(key)) = (inner.strip_prefix("- ").or(inner.strip_prefix('-')), &last) {
            // an item below a deeper key would be that one's, and the keys asked for have none
            head.entry(key.clone()).or_default().push(scalar(item)?);
            continue;
        }
        if line != inner {
            continue;
        }
        let Some((key, value)) = line.split_once(':') else {
            bail!("YAML head: expected key: value, got {line:?}");
        };
        ensure!(!head.contains_key(key), "YAML head: {key} stands there twice");
        head.insert(key.to_owned(), values_of(value.trim())?);
        last = Some(key.to_owned());
    }
    bail!("YAML head: no second line of three dashes")
}

fn values_of(value: &str) -> Result<Vec<String>> {
    let list = value.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    let parts: Vec<&str> = match list {
        Some(list) => list.split(',').collect(),
        None => vec![value],
    };
    let scalars: Vec<String> = parts.into_iter().map(scalar).collect::<Result<_>>()?;
    Ok(scalars.into_iter().filter(|scalar| !scalar.is_empty()).collect())
}

/// A plain or quoted value. JSON's strings are YAML's in double quotes; null is nothing.
fn scalar(text: &str) -> Result<String> {
    let text = text.trim();
    if text.starts_with('"') {
        return serde_json::from_str(text).with_context(|| format!("YAML head: {text}: not a string in quotes"));
    }
    if let Some(inner) = text.strip_prefix('\'') {
        let inner = inner.strip_suffix('\'');
        let inner = inner.with_context(|| format!("YAML head: {text}: the quote does not end"))?;
        return Ok(inner.replace("''", "'"));
    }
    let plain = text.split(" #").next().unwrap_or_default().trim();
    Ok(if matches!(plain, "null" | "~") { "" } else { plain }.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(card: &str) -> String {
        format!("{:#}", check(card, "org/drafter").unwrap_err())
    }

    #[test]
    fn every_spelling_of_a_good_head_passes() {
        for head in [
            "license: mit\nbase_model: \"org/target\"\ntags:\n- dflash2\n- vllm",
            "license: 'mit'\nbase_model:\n  - org/target\ntags: [vllm, \"dflash\"]",
            "# ours\nlicense: mit # really\nmodel-index:\n- name: x\n  results: []\nbase_model: org/target\ntags:\n  - dflash",
        ] {
            let notes = check(&format!("---\n{head}\n---\n# org/drafter\n"), "org/drafter").unwrap();
            assert_eq!(
                notes,
                ["README.md: no table of acceptance with its definition"],
                "{head}"
            );
        }
    }

    #[test]
    fn a_head_that_is_wrong_in_one_way_is_refused_by_key() {
        for (card, words) in [
            ("", "first line of three dashes"),
            ("# org/drafter", "first line of three dashes"),
            ("---\nlicense: mit", "no second line"),
            ("---\nbase_model: a/b\ntags: [dflash]\n---\n", "license: missing"),
            (
                "---\nlicense: null\nbase_model: a/b\ntags: [dflash]\n---\n",
                "license: missing",
            ),
            ("---\nlicense: mit\ntags: [dflash]\n---\n", "base_model: missing"),
            (
                "---\nlicense: mit\nbase_model: /runs/x\ntags: [dflash]\n---\n",
                "base_model: expected",
            ),
            (
                "---\nlicense: mit\nbase_model: not stated\ntags: [dflash]\n---\n",
                "base_model: expected",
            ),
            ("---\nlicense: mit\nbase_model: a/b\n---\n", "tags: missing"),
            (
                "---\nlicense: mit\nbase_model: a/b\ntags:\n- vllm\n---\n",
                "tags: expected dflash",
            ),
            ("---\nlicense: mit\nlicense: mit\n---\n", "license stands there twice"),
            ("---\nlicense: \"mit\n---\n", "not a string"),
            ("---\n\tlicense: mit\n---\n", "a tab"),
        ] {
            assert!(refusal(card).contains(words), "{card:?}: {}", refusal(card));
        }
    }

    #[test]
    fn a_card_that_names_another_drafter_is_worth_a_note() {
        let card = format!("---\nlicense: mit\nbase_model: a/b\ntags: [dflash]\n---\n{ACCEPTANCE_DEFINITION}");
        let notes = check(&card, "org/drafter").unwrap();
        assert!(notes.len() == 1 && notes[0].contains("--name org/drafter"), "{notes:?}");
    }
}
