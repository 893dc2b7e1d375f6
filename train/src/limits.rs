//! The range of every number in a run file. A number without an entry is an error, so that no new key goes unchecked.
//!
//! The bounds are generous: they are there to catch slips of the keyboard before hours of work or gigabytes of disk
//! go into them, not to say what is sensible.

use anyhow::{Result, bail};
use toml::Value;

use crate::config::RunConfig;
use crate::config_file::to_toml;

/// What a number may be.
#[derive(Debug, Clone, Copy)]
enum Range {
    /// A whole number from the first to the second.
    Whole(i64, i64),
    /// A number from the first to the second.
    Closed(f64, f64),
    /// A number from the first to below the second.
    Below(f64, f64),
    /// A number above 0, to the given one.
    Positive(f64),
}

use Range::{Below, Closed, Positive, Whole};

/// More tokens, steps or samples than any run has.
const MANY: i64 = 1_000_000_000;
/// Longer than any context, in tokens.
const LONG: i64 = 1 << 24;

/// Ranges by key; elements of a list share the list's.
const RANGES: [(&str, Range); 43] = [
    ("checkpoint.every", Whole(0, MANY)),
    ("checkpoint.keep_last", Whole(1, MANY)),
    ("data.max_length", Whole(2, LONG)),
    ("data.val_fraction", Below(0.0, 1.0)),
    ("drafter.block_size", Whole(2, 256)),
    ("drafter.conv_group", Whole(1, 65_536)),
    ("drafter.conv_kernel", Whole(1, 256)),
    ("drafter.ffn", Whole(1, 262_144)),
    ("drafter.head_dim", Whole(2, 1024)),
    ("drafter.heads", Whole(1, 1024)),
    ("drafter.kv_heads", Whole(1, 1024)),
    // published drafters have 1 to 8
    ("drafter.layers", Whole(1, 64)),
    ("drafter.mask_token_id", Whole(0, u32::MAX as i64)),
    ("drafter.rope_theta", Positive(1e12)),
    ("drafter.selector_rank", Whole(1, 8192)),
    ("drafter.selector_top_k", Whole(1, 4096)),
    ("drafter.sliding_window", Whole(0, LONG)),
    ("evaluate.limit", Whole(1, MANY)),
    ("evaluate.max_new", Whole(1, LONG)),
    ("generate.max_new", Whole(1, LONG)),
    ("generate.seed", Whole(0, i64::MAX)),
    ("generate.temperature", Closed(0.0, 100.0)),
    ("seed", Whole(0, i64::MAX)),
    ("taps.layers", Whole(0, 4095)),
    ("taps.shard_mib", Whole(1, 1 << 20)),
    ("threads", Whole(1, 4096)),
    ("train.accumulate_samples", Whole(1, MANY)),
    ("train.anchors", Whole(1, 65_536)),
    ("train.betas", Below(0.0, 1.0)),
    ("train.clip", Positive(1e12)),
    ("train.epochs", Whole(1, 1_000_000)),
    ("train.eps", Positive(1.0)),
    ("train.gamma", Positive(1e6)),
    // 0 leaves the weights as they are, which shows what a warm start brought
    ("train.lr", Closed(0.0, 10.0)),
    ("train.min_lr_ratio", Closed(0.0, 1.0)),
    // a smaller pack would be a mistaken unit: samples, not tokens
    ("train.pack_tokens", Whole(64, LONG)),
    ("train.selector_alpha", Closed(0.0, 1000.0)),
    ("train.selector_ramp_steps", Whole(0, MANY)),
    ("train.steps", Whole(1, MANY)),
    ("train.warmup_ratio", Closed(0.0, 1.0)),
    ("train.weight_decay", Closed(0.0, 1.0)),
    ("validate.every", Whole(0, MANY)),
    ("validate.samples", Whole(0, MANY)),
];

impl Range {
    fn holds(self, value: &Value) -> bool {
        match (self, value) {
            (Whole(least, most), Value::Integer(number)) => (least..=most).contains(number),
            (Closed(least, most), Value::Float(number)) => (least..=most).contains(number),
            (Below(least, most), Value::Float(number)) => (least..most).contains(number),
            (Positive(most), Value::Float(number)) => *number > 0.0 && *number <= most,
            _ => false,
        }
    }

    fn words(self) -> String {
        match self {
            Whole(least, i64::MAX) => format!("a whole number of at least {least}"),
            Whole(least, most) => format!("a whole number from {least} to {most}"),
            Closed(least, most) => format!("a number from {least} to {most}"),
            Below(least, most) => format!("a number from {least} to below {most}"),
            Positive(most) => format!("a positive number, at most {most}"),
        }
    }
}

/// Refuses the first number that is out of its range.
///
/// # Errors
/// Naming the key, the range and the number.
pub fn check(config: &RunConfig) -> Result<()> {
    let table: toml::Table = toml::from_str(&to_toml(config)?)?;
    walk("", &Value::Table(table), &mut |key, value| {
        let list = key.split('[').next().unwrap_or(key);
        let Some((_, range)) = RANGES.iter().find(|(name, _)| *name == list) else {
            bail!("{key}: no range is known for this number")
        };
        if range.holds(value) {
            return Ok(());
        }
        bail!("{key}: expected {}, got {value}", range.words())
    })
}

/// Calls `each` with every number below `value` and its key, `section.key` or `section.key[i]`.
fn walk(key: &str, value: &Value, each: &mut dyn FnMut(&str, &Value) -> Result<()>) -> Result<()> {
    match value {
        Value::Integer(_) | Value::Float(_) => each(key, value),
        Value::Array(items) => {
            let mut items = items.iter().enumerate();
            items.try_for_each(|(i, item)| walk(&format!("{key}[{i}]"), item, each))
        }
        Value::Table(table) => table.iter().try_for_each(|(name, inner)| {
            let joined = format!("{key}.{name}");
            walk(joined.trim_start_matches('.'), inner, each)
        }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::config_file::parse;

    /// A run file that writes every numeric key; `steps` and `epochs` exclude each other.
    const FULL: &str = "run_dir = 'r'\nseed = 1\nthreads = 1\n[target]\npath = 't'\n[data]\nprompts = 'p'\n\
        [generate]\nseed = 1\n[taps]\nlayers = [1, 2]\n[drafter]\nlayers = 1\nheads = 1\nkv_heads = 1\nhead_dim = 2\n\
        ffn = 1\nblock_size = 8\nmask_token_id = 1\nsliding_window = 8\nrope_theta = 1e6\nconv_kernel = 1\n\
        conv_group = 1\nselector_rank = 1\nselector_top_k = 1\n[train]\nsteps = 1\naccumulate_samples = 1\n\
        gamma = 1.0\n[evaluate]\nlimit = 1\n";

    fn keys(text: &str) -> BTreeSet<String> {
        let table: toml::Table = toml::from_str(&to_toml(&parse(text, &[]).unwrap()).unwrap()).unwrap();
        let mut found = BTreeSet::new();
        walk("", &Value::Table(table), &mut |key, _| {
            found.insert(key.split('[').next().unwrap().to_owned());
            Ok(())
        })
        .unwrap();
        found
    }

    #[test]
    fn every_number_of_a_run_file_has_a_range_whose_ends_hold_and_whose_outsides_are_named() {
        let mut walked = keys(FULL);
        walked.extend(keys(&FULL.replace("steps = 1", "epochs = 1")));
        let known: BTreeSet<String> = RANGES.iter().map(|(key, _)| (*key).to_owned()).collect();
        assert_eq!(walked, known);

        for (key, range) in RANGES {
            let text = if key == "train.epochs" {
                FULL.replace("steps = 1", "epochs = 1")
            } else {
                FULL.to_owned()
            };
            let (good, bad) = match range {
                Whole(least, i64::MAX) => (vec![least.to_string()], vec![]),
                Whole(0, most) => (vec!["0".to_owned(), most.to_string()], vec![(most + 1).to_string()]),
                Whole(least, most) => (
                    vec![least.to_string(), most.to_string()],
                    vec![(least - 1).to_string(), (most + 1).to_string()],
                ),
                Closed(least, most) => (
                    vec![format!("{least:?}"), format!("{most:?}")],
                    vec![
                        format!("{:?}", least - 0.1),
                        format!("{:?}", most + 0.1),
                        "nan".to_owned(),
                    ],
                ),
                Below(least, most) => (
                    vec![format!("{least:?}")],
                    vec![format!("{:?}", least - 0.1), format!("{most:?}"), "nan".to_owned()],
                ),
                Positive(most) => (
                    vec![format!("{most:?}")],
                    vec!["0.0".to_owned(), format!("{:?}", most * 1.1), "inf".to_owned()],
                ),
            };
            let written = |value: &str| match key {
                "train.betas" => format!("{key}=[{value}, 0.5]"),
                "taps.layers" => format!("{key}=[{value}]"),
                _ => format!("{key}={value}"),
            };
            for value in good {
                parse(&text, &[written(&value)]).unwrap_or_else(|error| panic!("{key} = {value}: {error:#}"));
            }
            for value in bad {
                // what the type itself refuses (too large for 32 bits) is refused before
                let error = format!("{:#}", parse(&text, &[written(&value)]).unwrap_err());
                assert!(
                    error.contains(key) && (error.contains(&range.words()) || error.contains("invalid value")),
                    "{key} = {value}: {error}"
                );
            }
        }
    }
}
