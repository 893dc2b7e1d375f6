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

use anyhow::{Context, Result, bail, ensure};
use dflash_data::hub::is_repository;
use dflash_model::folder::ACCEPTANCE_DEFINITION;
use serde::Deserialize;

/// What the head of a card says, as far as it is looked at; whatever else stands there is the hub's to judge.
#[derive(Deserialize)]
struct Head {
    #[serde(default)]
    license: Values,
    #[serde(default)]
    base_model: Values,
    #[serde(default)]
    tags: Values,
}

/// A value or a list of them.
#[derive(Default, Deserialize)]
#[serde(untagged)]
enum Values {
    #[default]
    None,
    One(String),
    Many(Vec<String>),
}

impl Values {
    /// All of them, none being an error that names `key`.
    fn of(self, key: &str, hint: &str) -> Result<Vec<String>> {
        let values = match self {
            Self::None => Vec::new(),
            Self::One(value) => vec![value],
            Self::Many(values) => values,
        };
        ensure!(
            values.iter().any(|value| !value.trim().is_empty()),
            "{key}: missing. Write it there, or make the folder with dflash-export hf{hint}"
        );
        Ok(values)
    }
}

/// Checks licence, target and tags of a card, and returns what is allowed but worth a look.
///
/// # Errors
/// Naming the key that is missing or wrong.
pub fn check(card: &str, repository: &str) -> Result<Vec<String>> {
    let head = head(card)?;
    head.license.of("license", " --license LICENCE")?;
    for base in head.base_model.of("base_model", " --base-model ORG/NAME")? {
        ensure!(
            is_repository(&base),
            "base_model: expected the target's repository, org/name, got {base:?}; set it, or make the folder with \
             dflash-export hf --base-model ORG/NAME"
        );
    }
    let tags = head.tags.of("tags", "")?;
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

/// Reads the lines between the first two `---`.
fn head(card: &str) -> Result<Head> {
    // a mark of the encoding, which editors of some systems write
    let mut lines = card.trim_start_matches('\u{feff}').lines();
    ensure!(
        lines.next().map(str::trim_end) == Some("---"),
        "expected a YAML head: a first line of three dashes"
    );
    let mut text = String::new();
    for line in lines {
        if line.trim_end() == "---" {
            return serde_saphyr::from_str(&text).context("YAML head");
        }
        // the reader lets it pass, YAML does not
        ensure!(!line.starts_with('\t'), "YAML head: {line:?} begins with a tab");
        text += line;
        text.push('\n');
    }
    bail!("YAML head: no second line of three dashes")
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
            let card = format!("---\n{head}\n---\n# org/drafter\n");
            assert!(check(&format!("\u{feff}{card}"), "org/drafter").is_ok(), "{head}");
            let notes = check(&card, "org/drafter").unwrap();
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
            ("---\nlicense: mit\nlicense: mit\n---\n", "license"),
            ("---\nlicense: \"mit\n---\n", "YAML head"),
            ("---\nlicense: mit\nx: [1,\n---\n", "YAML head"),
            ("---\nlicense: mit\n- item\n---\n", "YAML head"),
            (
                "---\nlicense: ' '\nbase_model: a/b\ntags: [dflash]\n---\n",
                "license: missing",
            ),
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
