//! Which rows of a set are taken, and in which order: a function of the seed and the number of rows.

use std::fmt;
use std::str::FromStr;

use anyhow::{Result, bail, ensure};
use serde::Serialize;

use crate::rng::Stream;

/// Keeps the draw of prompts apart from all other streams of the same seed.
const SELECTION_STREAM: u64 = 0x0070_726F_6D70_7473;

/// In which order rows are taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Order {
    /// As they stand in the file.
    #[default]
    File,
    /// In a random order that depends on the seed and the number of rows only.
    Shuffled,
}

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::File => "file",
            Self::Shuffled => "shuffled",
        })
    }
}

impl FromStr for Order {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        Ok(match text {
            "file" => Self::File,
            "shuffled" => Self::Shuffled,
            other => bail!("expected file or shuffled, found {other:?}"),
        })
    }
}

/// Which rows are taken. The default is all of them as they stand.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Selection {
    /// How many; all when `None`.
    pub samples: Option<usize>,
    /// Seed of the shuffled order.
    pub seed: u64,
    /// In which order.
    pub order: Order,
}

impl Selection {
    /// The chosen ones among `rows` rows, each at most once.
    ///
    /// # Errors
    /// When none or more than there are were asked for: a set is never cycled, that would count prompts twice.
    pub fn indices(&self, rows: usize) -> Result<Vec<usize>> {
        let samples = self.samples.unwrap_or(rows);
        ensure!(samples > 0, "samples: expected at least 1, found 0");
        ensure!(
            samples <= rows,
            "{samples} samples asked for, the set has only {rows} rows"
        );
        let mut indices: Vec<usize> = (0..rows).collect();
        if self.order == Order::Shuffled {
            Stream::new(&[SELECTION_STREAM, self.seed, rows as u64]).shuffle(&mut indices);
        }
        indices.truncate(samples);
        Ok(indices)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn shuffled(samples: usize, seed: u64) -> Selection {
        Selection {
            samples: Some(samples),
            seed,
            order: Order::Shuffled,
        }
    }

    proptest! {
        #[test]
        fn a_draw_takes_each_row_at_most_once_and_smaller_draws_begin_larger_ones(
            rows in 1_usize..200, share in 0.0..1.0_f64, seed: u64,
        ) {
            let samples = 1 + ((rows - 1) as f64 * share) as usize;
            let all = shuffled(rows, seed).indices(rows).unwrap();
            let mut sorted = all.clone();
            sorted.sort_unstable();
            prop_assert_eq!(sorted, (0..rows).collect::<Vec<_>>());
            prop_assert_eq!(&shuffled(samples, seed).indices(rows).unwrap(), &all[..samples]);
            let in_order = Selection { samples: Some(samples), seed, order: Order::File };
            prop_assert_eq!(in_order.indices(rows).unwrap(), (0..samples).collect::<Vec<_>>());
        }
    }

    #[test]
    fn the_draw_of_a_seed_never_changes() {
        // written down once: published numbers name only the seed
        assert_eq!(shuffled(5, 0).indices(20).unwrap(), [10, 9, 0, 19, 11]);
        assert_ne!(shuffled(5, 1).indices(20).unwrap(), shuffled(5, 0).indices(20).unwrap());
    }

    #[test]
    fn asking_for_more_than_there_is_names_both_numbers() {
        let error = shuffled(9, 0).indices(8).unwrap_err().to_string();
        assert!(error.contains('9') && error.contains('8'), "{error}");
        assert!(
            shuffled(0, 0)
                .indices(8)
                .unwrap_err()
                .to_string()
                .contains("at least 1")
        );
        assert_eq!("shuffled".parse::<Order>().unwrap(), Order::Shuffled);
        assert!(
            "random"
                .parse::<Order>()
                .unwrap_err()
                .to_string()
                .contains("\"random\"")
        );
    }
}
