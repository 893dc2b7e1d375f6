//! Counters out of Prometheus text: exact names, whole numbers, a series at a time.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail, ensure};

/// Whole numbers above this are not exact in the text's floats.
const EXACT: f64 = 9_007_199_254_740_992.; // 2^53

/// Names and values, sorted.
pub(super) type Labels = Vec<(String, String)>;
/// All series of one counter.
pub(super) type Family = BTreeMap<Labels, u64>;

/// The counter `name`, with or without `_total`; nothing when the text has no such series.
///
/// Other names are skipped unread, so that what another exporter writes cannot break a measurement.
///
/// # Errors
/// Names the line when labels or value are not a counter's.
pub(super) fn counter(text: &str, name: &str) -> Result<Option<Family>> {
    let total = format!("{name}_total");
    let (mut plain, mut totals) = (Family::new(), Family::new());
    for (index, line) in text.lines().enumerate() {
        let line = line.trim();
        let end = line.find(|c: char| c == '{' || c.is_whitespace()).unwrap_or(line.len());
        let family = match &line[..end] {
            found if found == name => &mut plain,
            found if found == total => &mut totals,
            _ => continue,
        };
        let (labels, value) = series(&line[end..]).with_context(|| format!("line {}: {line}", index + 1))?;
        ensure!(
            family.insert(labels, value).is_none(),
            "line {}: {line}: the same series twice",
            index + 1
        );
    }
    let family = if totals.is_empty() { plain } else { totals };
    Ok((!family.is_empty()).then_some(family))
}

/// A gauge without labels that stays the same as long as a process lives.
pub(super) fn start_time(text: &str) -> Option<&str> {
    text.lines()
        .find_map(|line| line.strip_prefix("process_start_time_seconds "))
        .map(str::trim)
}

/// What each series grew by.
///
/// # Errors
/// When one shrank or vanished: the counts of a restarted server say nothing.
pub(super) fn growth<'f>(name: &str, before: &'f Family, after: &'f Family) -> Result<Vec<(&'f Labels, u64)>> {
    for (labels, old) in before {
        let new = after.get(labels);
        ensure!(
            new.is_some_and(|new| new >= old),
            "{name} went from {old} to {}: the server was restarted, or its counters reset, while we measured",
            new.map_or("nothing".into(), ToString::to_string)
        );
    }
    // a series that is new began at 0
    let grown = after
        .iter()
        .map(|(labels, new)| (labels, new - before.get(labels).unwrap_or(&0)));
    Ok(grown.collect())
}

/// What is left of a line after its name.
fn series(rest: &str) -> Result<(Labels, u64)> {
    let (mut labels, rest) = match rest.trim_start().strip_prefix('{') {
        Some(rest) => label_list(rest)?,
        None => (Vec::new(), rest),
    };
    labels.sort();
    // a time stamp may follow
    let value = rest.split_whitespace().next().context("no value")?;
    let number: f64 = value.parse().ok().with_context(|| format!("no number: {value}"))?;
    ensure!(
        number.is_finite() && (0. ..EXACT).contains(&number) && number.fract() == 0.,
        "expected a count, got {value}"
    );
    Ok((labels, number as u64))
}

/// Labels up to the closing brace, and what follows it.
fn label_list(text: &str) -> Result<(Labels, &str)> {
    let (mut labels, mut rest) = (Vec::new(), text);
    loop {
        rest = rest.trim_start().trim_start_matches(',').trim_start();
        if let Some(after) = rest.strip_prefix('}') {
            return Ok((labels, after));
        }
        let (name, quoted) = rest.split_once('=').context("labels without a closing brace")?;
        let quoted = quoted
            .trim_start()
            .strip_prefix('"')
            .context("a label without quotes")?;
        let mut value = String::new();
        let mut characters = quoted.char_indices();
        let end = loop {
            match characters.next() {
                Some((at, '"')) => break at + 1,
                Some((_, '\\')) => match characters.next() {
                    Some((_, 'n')) => value.push('\n'),
                    Some((_, c)) => value.push(c),
                    None => bail!("a label without closing quotes"),
                },
                Some((_, c)) => value.push(c),
                None => bail!("a label without closing quotes"),
            }
        };
        labels.push((name.trim().to_owned(), value));
        rest = &quoted[end..];
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sum(text: &str, name: &str) -> Option<u64> {
        counter(text, name).unwrap().map(|family| family.values().sum())
    }

    #[test]
    fn only_the_exact_name_counts() {
        let text = "# HELP x y\nx_total{a=\"1\"} 3.0\nx_created{a=\"1\"} 1.7e+09\nx_per_pos_total{position=\"0\"} 9\nxy 5\n\
                    x_total{a=\"2\"} 4 1700000000\n";
        assert_eq!(sum(text, "x"), Some(7));
        assert_eq!(sum("x 1.0e+06\n", "x"), Some(1_000_000));
        assert_eq!(sum(text, "z"), None);
    }

    #[test]
    fn the_order_of_labels_does_not_matter() {
        let before = counter("x{a=\"1\",b=\"}, \\\"\"} 3\n", "x").unwrap().unwrap();
        let after = counter("x{ b=\"}, \\\"\" , a=\"1\", } 5\n", "x").unwrap().unwrap();
        let grown: Vec<u64> = growth("x", &before, &after)
            .unwrap()
            .iter()
            .map(|grown| grown.1)
            .collect();
        assert_eq!(grown, [2]);
    }

    #[test]
    fn what_is_no_count_is_an_error_that_names_the_line() {
        for bad in ["NaN", "+Inf", "-1", "0.5", "1e300", "", "x", "9007199254740993"] {
            let error = format!("{:#}", counter(&format!("\nx{{a=\"1\"}} {bad}\n"), "x").unwrap_err());
            assert!(error.contains("line 2"), "{bad}: {error}");
        }
        for bad in [
            "x{a=\"1} 3",
            "x{a=1} 3",
            "x{a=\"1\" 3",
            "x{a=\"1\"} 3\nx{a=\"1\"} 3",
            "x{a=\"\\",
        ] {
            assert!(counter(bad, "x").is_err(), "{bad}");
        }
    }

    #[test]
    fn a_counter_that_shrinks_in_one_of_two_series_is_a_restart() {
        let family = |a: u64, b: u64| {
            counter(&format!("x{{e=\"0\"}} {a}\nx{{e=\"1\"}} {b}\n"), "x")
                .unwrap()
                .unwrap()
        };
        // the sum grows all the same
        let error = growth("x", &family(10, 10), &family(90, 3)).unwrap_err().to_string();
        assert!(error.contains("from 10 to 3") && error.contains("restarted"), "{error}");
        let gone = counter("x{e=\"0\"} 90\n", "x").unwrap().unwrap();
        assert!(growth("x", &family(10, 10), &gone).is_err());
        assert_eq!(
            growth("x", &gone, &family(90, 4)).unwrap()[1].1,
            4,
            "a new series began at 0"
        );
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "(x|x_total|\\{|\\}|a=|\"|\\\\|,| |é|\n|[0-9.eNa-]){0,40}") {
            let _ = counter(&text, "x");
        }
    }
}
