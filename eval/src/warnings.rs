//! What a reader should know before quoting a report: signs of a drafter that does not fit, or of text that says little.

use crate::report::Report;

/// Acceptance length below which a drafter guesses.
const GUESSING: f64 = 1.1;
/// Acceptance of the last bin of context relative to the best bin before it that marks a collapse.
const COLLAPSE: f64 = 0.4;
/// Accepted drafts a round in one thinking mode relative to the other that mark a drafter of one mode.
const ONE_MODE: f64 = 0.6;
/// Rounds of a bin or group below which it says nothing.
const ENOUGH_ROUNDS: u64 = 30;

/// Warnings of a finished report, one sentence each.
pub(crate) fn warnings(report: &Report) -> Vec<String> {
    let mut found = Vec::new();
    if report.degenerate_prompts > 0 {
        found.push(format!(
            "{} of {} texts mostly repeat themselves: their acceptance says little",
            report.degenerate_prompts, report.prompts
        ));
    }
    if report.identical == Some(false) {
        found.push(match report.setting.dtype.as_str() {
            "f32" => "texts differ from plain decoding in f32: a defect, see dflash-eval lossless".into(),
            other => format!(
                "texts differ from plain decoding in {other}: dflash-eval lossless tells near-ties from defects"
            ),
        });
    }
    if report.acceptance_length.is_some_and(|length| length < GUESSING) && report.rounds >= ENOUGH_ROUNDS {
        found.push(
            "the drafter hardly ever agrees with the target: another target or quantisation, wrong taps, mask id, RoPE base \
             or thinking mode are the usual causes (dflash-export inspect)"
                .into(),
        );
    }
    match thinking_mismatch(report) {
        // where one mode's texts are the longer ones, acceptance falls off with the context for that reason alone
        Some(mismatch) => found.push(mismatch),
        None => found.extend(context_collapse(report)),
    }
    if report.rounds == 0 {
        found.push("no full round took place: texts are too short for an acceptance number".into());
    }
    found
}

/// Acceptance that is much lower in one thinking mode than in the other.
fn thinking_mismatch(report: &Report) -> Option<String> {
    let length = |mode: &str| {
        let group = report
            .groups
            .iter()
            .find(|group| group.name == format!("thinking {mode}"))?;
        group.acceptance_length.filter(|_| group.rounds >= ENOUGH_ROUNDS)
    };
    let (on, off) = (length("on")?, length("off")?);
    let (low, high, better, worse) = if on < off {
        (on, off, "off", "on")
    } else {
        (off, on, "on", "off")
    };
    (low - 1. < (high - 1.) * ONE_MODE).then(|| {
        format!(
            "acceptance length {high:.2} with thinking {better} but {low:.2} with thinking {worse}: the drafter was trained \
             for thinking {better}"
        )
    })
}

/// Acceptance that falls off with the context: text beyond what the drafter was trained for, or a window not honoured.
fn context_collapse(report: &Report) -> Option<String> {
    let bins: Vec<(usize, f64)> = report
        .by_context
        .iter()
        .filter(|bin| bin.rounds >= ENOUGH_ROUNDS)
        .map(|bin| (bin.from, bin.accepted as f64 / bin.rounds as f64))
        .collect();
    let (&(from, last), before) = bins.split_last()?;
    // beside all that came before, not its best place: the first words of an answer are often the easiest
    let usual = before.iter().map(|bin| bin.1).sum::<f64>() / before.len().max(1) as f64;
    (usual > 0.5 && last < usual * COLLAPSE).then(|| {
        format!(
            "off distribution: beyond position {from} {last:.2} drafts are accepted a round, before it {usual:.2}; \
             the drafter was trained on shorter texts, or a sliding window is not honoured"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evaluate::{Options, evaluate};
    use crate::report::{ContextBin, Group};
    use crate::scripted::{Script, Scripted};
    use crate::scripted_target::ScriptedTarget;

    fn report() -> Report {
        let target = ScriptedTarget::new(1, 23, 4096).unwrap();
        let drafter = Scripted::new(Script::Random { seed: 1 }, Vec::new(), 8, &[1], 23).unwrap();
        let prompts: Vec<Vec<u32>> = vec![vec![1], vec![2]];
        evaluate(
            &target,
            &drafter,
            &prompts,
            &Options::new(80, vec![u32::MAX]),
            &mut |_| Ok(()),
        )
        .unwrap()
    }

    #[test]
    fn a_drafter_that_guesses_is_named_and_a_sound_report_is_silent() {
        let mut report = report();
        assert!(report.acceptance_length.unwrap() < GUESSING);
        assert!(
            report
                .warnings
                .iter()
                .any(|warning| warning.contains("hardly ever agrees")),
            "{:?}",
            report.warnings
        );
        report.acceptance_length = Some(3.);
        assert_eq!(warnings(&report), Vec::<String>::new());
        report.identical = Some(false);
        report.degenerate_prompts = 1;
        assert_eq!(warnings(&report).len(), 2);
    }

    #[test]
    fn acceptance_that_collapses_with_the_context_is_off_distribution() {
        let mut report = report();
        report.acceptance_length = Some(3.);
        let bin = |from, accepted| ContextBin {
            from,
            to: from + 512,
            rounds: 100,
            accepted,
        };
        report.by_context = vec![bin(0, 210), bin(512, 200), bin(1024, 30)];
        assert!(
            warnings(&report)[0].contains("beyond position 1024"),
            "{:?}",
            warnings(&report)
        );
        report.by_context.pop();
        assert_eq!(warnings(&report), Vec::<String>::new());
    }

    #[test]
    fn a_drafter_of_one_thinking_mode_is_told_apart_from_one_of_short_texts() {
        let mut report = report();
        report.acceptance_length = Some(3.);
        let group = |name: &str, length| Group {
            name: name.into(),
            prompts: 9,
            rounds: 90,
            acceptance_length: Some(length),
            acceptance_length_ci95: None,
            acceptance_length_macro: None,
            speedup: None,
        };
        report.groups = vec![group("thinking on", 1.2), group("thinking off", 2.3)];
        report.by_context = [(0, 210), (512, 30)]
            .map(|(from, accepted)| ContextBin {
                from,
                to: from + 512,
                rounds: 100,
                accepted,
            })
            .to_vec();
        let found = warnings(&report);
        assert!(found.len() == 1 && found[0].contains("for thinking off"), "{found:?}");
        report.groups[0].acceptance_length = Some(2.2);
        assert!(warnings(&report)[0].contains("off distribution"));
    }
}
