//! Prompt sets for measuring: known benchmarks by name, or a file of conversations, all as one [`PromptSet`].
//!
//! ```text
//! recipe + source   a recipe's files: local Parquet, JSONL or JSON, or the hub's      rows, hub
//! rows              columns -> the user's turns, in the recipe's wording              wording
//! selection         how many, in which order: a function of seed and row count        selection
//! set               prompts with ids, and the record that makes them again            set
//! ```
//! ```no_run
//! use dflash_data::recipes::{Recipe, Selection, Source, load};
//! let set = load(Recipe::by_name("gsm8k")?, &"hub".parse::<Source>()?, &Selection::default())?;
//! # anyhow::Ok(())
//! ```

use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, Result};

mod hub;
mod rows;
mod selection;
mod set;
#[cfg(test)]
mod tests;
mod wording;

pub use crate::hub::Hub;
pub(crate) use rows::listed;
pub use rows::matches;
pub use selection::{Order, Selection};
pub use set::{Facts, PromptRow, PromptSet, SourceFile, load_conversations};

use crate::conversation::{Conversation, Message};
use rows::Row;
use set::Origin;
use wording::Wording;

/// A known data set and how its rows become prompts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Recipe {
    name: &'static str,
    about: &'static str,
    dataset: &'static str,
    /// Path patterns within the data set; the first one that finds anything counts.
    files: &'static [&'static str],
    wording: Wording,
    /// Columns that may hold the row's own id; the first one there counts, else rows are numbered.
    ids: &'static [&'static str],
    /// Column that may hold the row's domain.
    domain: Option<&'static str>,
}

/// All recipes, by name.
pub const RECIPES: [Recipe; 7] = [
    Recipe {
        name: "aime",
        about: "competition mathematics, the 30 problems of 2024",
        dataset: "HuggingFaceH4/aime_2024",
        files: &["data/train-*.parquet"],
        wording: Wording::Problem("problem"),
        ids: &["id"],
        domain: None,
    },
    Recipe {
        name: "alpaca",
        about: "general instructions (train split)",
        dataset: "tatsu-lab/alpaca",
        files: &["data/train-*.parquet"],
        wording: Wording::Instruction("instruction", "input"),
        ids: &[],
        domain: None,
    },
    Recipe {
        name: "gsm8k",
        about: "grade-school mathematics (main, test split)",
        dataset: "openai/gsm8k",
        files: &["main/test-*.parquet"],
        wording: Wording::Problem("question"),
        ids: &[],
        domain: None,
    },
    Recipe {
        name: "humaneval",
        about: "Python functions to complete (test split)",
        dataset: "openai/openai_humaneval",
        files: &["openai_humaneval/test-*.parquet"],
        wording: Wording::Function("prompt"),
        ids: &["task_id"],
        domain: None,
    },
    Recipe {
        name: "math500",
        about: "500 competition problems (test split), domain: subject",
        dataset: "HuggingFaceH4/MATH-500",
        files: &["test.jsonl", "data/test-*.parquet"],
        wording: Wording::Problem("problem"),
        ids: &["unique_id"],
        domain: Some("subject"),
    },
    Recipe {
        name: "mbpp",
        about: "small Python tasks (sanitized, test split)",
        dataset: "google-research-datasets/mbpp",
        files: &["sanitized/test-*.parquet"],
        wording: Wording::AsItIs("prompt"),
        ids: &["task_id"],
        domain: None,
    },
    Recipe {
        name: "mt-bench",
        about: "80 conversations of two turns (train split), domain: category",
        dataset: "HuggingFaceH4/mt_bench_prompts",
        files: &["data/train-*.parquet", "raw/question.jsonl"],
        wording: Wording::Turns("prompt"),
        ids: &["prompt_id", "question_id"],
        domain: Some("category"),
    },
];

impl Recipe {
    /// The recipe of this name.
    ///
    /// # Errors
    /// When there is none; lists those that there are.
    pub fn by_name(name: &str) -> Result<&'static Self> {
        RECIPES.iter().find(|recipe| recipe.name == name).with_context(|| {
            let names: Vec<_> = RECIPES.iter().map(Self::name).collect();
            format!("unknown recipe {name:?}, expected one of {}", names.join(", "))
        })
    }

    /// Its name on the command line.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// A line about it.
    pub fn about(&self) -> &'static str {
        self.about
    }

    /// The data set's id on the hub.
    pub fn dataset(&self) -> &'static str {
        self.dataset
    }
}

/// Where a recipe's rows come from.
#[derive(Debug, Clone)]
pub enum Source {
    /// A Parquet, JSONL or JSON file with the data set's own columns, or a folder of Parquet files (a clone of the data
    /// set, or just the files).
    Path(PathBuf),
    /// The data set on the hub, or what the hub's cache holds of it.
    Hub(Hub),
}

impl FromStr for Source {
    type Err = anyhow::Error;

    /// `hub` is the hub as the environment sets it up, anything else a path.
    fn from_str(text: &str) -> Result<Self> {
        Ok(match text {
            "hub" => Self::Hub(Hub::from_env()),
            path => Self::Path(path.into()),
        })
    }
}

/// Loads a recipe's prompts. Every row is checked, also those that are not selected.
///
/// # Errors
/// When the source cannot be reached or read, has no rows or fewer than asked for; with the file and the row when a
/// column is missing (with those that are there), null or of another type; when two rows have one id.
pub fn load(recipe: &Recipe, source: &Source, selection: &Selection) -> Result<PromptSet> {
    let (paths, source, revision) = match source {
        Source::Path(path) => {
            let files = rows::local_files(path, recipe.files)?;
            let files: Vec<_> = files
                .into_iter()
                .map(|file| (file.display().to_string(), file))
                .collect();
            (files, path.display().to_string(), None)
        }
        Source::Hub(hub) => {
            let fetched = hub::fetch(hub, recipe.dataset, recipe.files)?;
            (
                fetched.files,
                format!("{} on the hub", recipe.dataset),
                Some(fetched.revision),
            )
        }
    };
    let mut origin = Origin {
        name: recipe.name.to_owned(),
        source,
        revision,
        files: Vec::new(),
    };
    let mut prompts = Vec::new();
    for (shown, path) in paths {
        let (file, found) = read_file(recipe, &path, &shown)?;
        origin.files.push(file);
        for row in found {
            let number = prompts.len() + 1;
            prompts.push(recipe.prompt(&row, number).with_context(|| row.place.clone())?);
        }
    }
    PromptSet::select(origin, prompts, selection)
}

fn read_file(recipe: &Recipe, path: &Path, shown: &str) -> Result<(SourceFile, Vec<Row>)> {
    let also = [recipe.ids, recipe.domain.as_slice()].concat();
    rows::read_file(path, shown, &recipe.wording.columns(), &also)
}

impl Recipe {
    fn prompt(&self, row: &Row, number: usize) -> Result<PromptRow> {
        let columns = &row.columns;
        let mut turns = self.wording.turns(columns)?.into_iter();
        let start = turns.next().context("no turn")?;
        Ok(PromptRow {
            id: match self.ids.iter().find(|id| columns.contains_key(**id)) {
                Some(id) => set::id_text(&columns[*id]).context(*id)?,
                None => number.to_string(),
            },
            domain: match self.domain.and_then(|name| Some((name, columns.get(name)?))) {
                Some((name, domain)) => Some(set::domain_text(domain).context(name)?),
                None => None,
            },
            start: Conversation::of(vec![Message::user(&start)]),
            follow_ups: turns.collect(),
        })
    }
}
