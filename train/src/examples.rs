//! Conversations to examples, and which of them are held out.
//!
//! Held out are the examples of `data.validation`, or of a share of the conversations drawn by seed: whole
//! conversations, so that no turn of one is trained on while another is validated.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use dflash_data::conversation::read_conversations;
use dflash_data::rng::Stream;
use dflash_data::tokens::{Example, LengthPolicy, PrepareConfig, Turns, prepare};

use crate::config::TooLong;
use crate::materials::Materials;
use crate::progress::Display;

/// Keeps the split apart from all other streams of the same seed.
const SPLIT_STREAM: u64 = 0x0073_706C_6974;

/// All examples of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct Examples {
    /// Those to train on and those held out, in the order of their files.
    pub all: Vec<Example>,
    /// Indices of those to train on, ascending.
    pub train: Vec<usize>,
    /// Indices of those held out, ascending.
    pub validation: Vec<usize>,
}

/// Reads the conversations and splits them.
pub fn load(materials: &Materials, display: Display) -> Result<Examples> {
    let config = materials.config();
    let mut all = read(materials, &materials.conversations(), display)?;
    let validates = config.validate.samples > 0;
    let (train, validation) = match &config.data.validation {
        Some(path) if validates => {
            let count = all.len();
            all.extend(read(materials, path, display).context("data.validation")?);
            ((0..count).collect(), (count..all.len()).collect())
        }
        None if validates => split(&all, config.data.val_fraction, config.seed),
        _ => ((0..all.len()).collect(), Vec::new()),
    };
    ensure!(
        !train.is_empty(),
        "data.val_fraction = {}: nothing is left to train on",
        config.data.val_fraction
    );
    Ok(Examples { all, train, validation })
}

fn read(materials: &Materials, path: &Path, display: Display) -> Result<Vec<Example>> {
    let data = &materials.config().data;
    let rows = read_conversations(path)?;
    let settings = PrepareConfig {
        max_length: data.max_length,
        length_policy: match data.length_policy {
            TooLong::Truncate => LengthPolicy::Truncate,
            TooLong::Drop => LengthPolicy::Drop,
        },
        turns: Turns::Every,
        thinking: Some(data.thinking),
    };
    let (examples, report) = prepare(&materials.chat, &rows, &settings).with_context(|| path.display().to_string())?;
    display.note(&format!("{}: {report}", path.display()));
    Ok(examples)
}

/// Indices of training and held-out examples: `fraction` of the conversations, drawn by `seed`.
fn split(examples: &[Example], fraction: f64, seed: u64) -> (Vec<usize>, Vec<usize>) {
    let mut sources: Vec<usize> = examples.iter().map(|example| example.source).collect();
    sources.sort_unstable();
    sources.dedup();
    let count = (fraction * sources.len() as f64).round() as usize;
    let mut stream = Stream::new(&[SPLIT_STREAM, seed]);
    let held_out: BTreeSet<usize> = stream.choose(&mut sources, count).iter().copied().collect();
    (0..examples.len()).partition(|&index| !held_out.contains(&examples[index].source))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_conversation_is_held_out_whole_and_the_same_ones_each_time() {
        let examples: Vec<Example> = (0..200).map(|i| Example::of_response(&[1], &[2, 3], i / 2)).collect();
        let (train, validation) = split(&examples, 0.1, 7);
        assert_eq!((train.len(), validation.len()), (180, 20));
        for pair in validation.chunks(2) {
            assert_eq!(examples[pair[0]].source, examples[pair[1]].source);
        }
        assert_eq!(split(&examples, 0.1, 7).1, validation);
        assert_ne!(split(&examples, 0.1, 8).1, validation);
        assert_eq!(split(&examples, 0.0, 7).1, Vec::<usize>::new());
    }
}
