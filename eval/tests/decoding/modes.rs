//! Comparison, sweep, timing and recorded texts: what they count and what they refuse.

use super::*;
use dflash_eval::compare::compare;
use dflash_eval::costs::costs_after;
use dflash_eval::prompts::{About, Prompts};
use dflash_eval::recorded::{Record, replay_all};
use dflash_eval::report::Setting;
use dflash_eval::speed::speed;
use dflash_eval::sweep::{Drafter, Grid, sweep};

fn prompts(n: u32) -> Vec<Vec<u32>> {
    let prompt = |i: u32| (0..i % 11 + 2).map(|j| (i * 3 + j) % VOCAB as u32).collect();
    (0..n).map(prompt).collect()
}

fn oracle(seed: u64, odds: u64) -> NoisyOracle {
    NoisyOracle {
        target: target(seed),
        odds,
    }
}

#[test]
fn the_better_of_two_drafters_is_told_with_an_interval_that_excludes_zero() {
    let (often, rarely) = (oracle(41, 3), oracle(41, 12));
    let options = Options::new(80, vec![NEVER]);
    let drafters: [(&dyn Drafting, Options); 2] = [(&often, options.clone()), (&rarely, options.clone())];
    let report = compare(&target(41), &drafters, &prompts(20), &mut |_, _| Ok(())).unwrap();
    let pair = &report.differences[0];
    let gain = report.reports[1].acceptance_length.unwrap() - report.reports[0].acceptance_length.unwrap();
    assert!((pair.acceptance_length.unwrap() - gain).abs() < 1e-12);
    let [low, high] = pair.ci95.unwrap();
    assert!(0. < low && low < gain && gain < high, "{low} {gain} {high}");
    assert_eq!(pair.longer_equal_shorter.iter().sum::<usize>(), 20);
    assert!(compare(&target(41), &drafters[..1], &prompts(2), &mut |_, _| Ok(())).is_err());
}

#[test]
fn a_scripted_chance_gives_the_acceptance_that_it_promises_at_every_block() {
    let (target, chance) = (target(42), 0.8f64);
    let grid = Grid {
        blocks: vec![2, 4, 8],
        contexts: vec![0, 64],
    };
    let drafter = Drafter::Scripted { chance, shadow: None };
    let options = Options::new(200, vec![NEVER]);
    let report = sweep(&target, drafter, &prompts(20), &grid, &options, &mut |_| Ok(())).unwrap();
    assert_eq!(report.cells.len(), 6);
    for cell in &report.cells {
        let expected: f64 = (0..cell.block).map(|i| chance.powi(i as i32)).sum();
        let found = cell.acceptance_length.unwrap();
        assert!(
            (found - expected).abs() < 0.15,
            "block {}: {found} for {expected}",
            cell.block
        );
        assert!(cell.identical && cell.prompts == 20);
    }
    let real = oracle(42, 2);
    let shadowed = Drafter::Scripted {
        chance,
        shadow: Some(&real),
    };
    let report = sweep(&target, shadowed, &prompts(3), &grid, &options, &mut |_| Ok(())).unwrap();
    assert!(
        report
            .cells
            .iter()
            .all(|cell| cell.identical && cell.seconds.draft > 0.)
    );
    for (blocks, contexts, word) in [
        (vec![9], vec![0], "block 9"),
        (vec![1], vec![0], "block 1"),
        (vec![4], vec![4000], "context 4000"),
    ] {
        let error = sweep(
            &target,
            Drafter::Real(&real),
            &prompts(1),
            &Grid { blocks, contexts },
            &options,
            &mut |_| Ok(()),
        );
        assert!(error.unwrap_err().to_string().contains(word));
    }
}

#[test]
fn timing_covers_every_width_and_leaves_its_room() {
    let (target, real) = (target(43), oracle(43, 2));
    let setting = Setting::default();
    let report = speed(&target, Some(&real), &[5, 100], 8, &setting, &mut |_| ()).unwrap();
    assert_eq!(report.contexts.len(), 2);
    for at in &report.contexts {
        let widths: Vec<usize> = at.costs.iter().map(|cost| cost.width).collect();
        assert_eq!(widths, (0..8).collect::<Vec<_>>());
        assert!(at.step_seconds > 0. && at.prefill_tokens_per_s > 0.);
        let no_faster = |median: Option<f64>, fastest: f64| median.is_some_and(|rate| rate > 0. && rate <= fastest);
        assert!(no_faster(at.prefill_median_tokens_per_s, at.prefill_tokens_per_s));
        assert!(no_faster(
            at.capture_median_tokens_per_s,
            at.capture_tokens_per_s.unwrap()
        ));
        assert!(at.step_median_seconds.is_some_and(|median| median >= at.step_seconds));
        assert!(
            at.costs[1..]
                .iter()
                .all(|cost| cost.verify > 0. && cost.draft > 0. && cost.commit > 0.)
        );
    }
    assert!(speed(&target, None, &[5], 20, &setting, &mut |_| ()).is_ok());
    assert!(speed(&target, Some(&real), &[5], 9, &setting, &mut |_| ()).is_err());
    let close = vec![1; 4090];
    assert!(
        costs_after(&target, None, &close, &[0, 7])
            .unwrap_err()
            .to_string()
            .contains("4096")
    );
}

#[test]
fn recorded_texts_replay_to_the_rounds_that_wrote_them_and_other_rounds_are_noticed() {
    let (target, oracle) = (target(44), oracle(44, 4));
    let options = Options::new(60, vec![2]);
    let report = evaluate(&target, &oracle, &prompts(12), &options, &mut |_| Ok(())).unwrap();
    let record = |result: &dflash_eval::report::PromptResult| Record {
        id: result.id.clone(),
        prompt: prompts(12)[result.prompt].clone(),
        text: result.tokens.clone(),
        stopped: result.finish == Finish::Stop,
        max_new: Some(60),
        rounds: Some(
            result
                .accepted
                .iter()
                .copied()
                .zip(result.drafted.iter().copied())
                .collect(),
        ),
    };
    let mut records: Vec<Record> = report.per_prompt.iter().map(record).collect();
    let again = replay_all(&target, &oracle, &records, &options, &mut |_| Ok(())).unwrap();
    assert_eq!(
        (again.acceptance_length, again.rounds),
        (report.acceptance_length, report.rounds)
    );
    assert_eq!(again.acceptance_length_ci95, report.acceptance_length_ci95);
    let compared = again.against_generation.unwrap();
    assert_eq!((compared.equal_rounds, compared.equal_texts), (compared.rounds, 12));
    let wrong = &mut records[3].rounds.as_mut().unwrap()[0];
    wrong.0 = 7 - wrong.0;
    let compared = replay_all(&target, &oracle, &records, &options, &mut |_| Ok(()))
        .unwrap()
        .against_generation
        .unwrap();
    assert_eq!((compared.rounds - compared.equal_rounds, compared.equal_texts), (1, 11));
}

/// Two turns each; the second repeats the first answer's last token.
struct TwoTurns;

impl Prompts for TwoTurns {
    fn len(&self) -> usize {
        6
    }

    fn about(&self, index: usize) -> About {
        About {
            id: format!("talk {index}"),
            domain: Some(if index < 2 { "few" } else { "many" }.into()),
            thinking: None,
        }
    }

    fn turn(&self, index: usize, answers: &[Vec<u32>]) -> anyhow::Result<Option<Vec<u32>>> {
        Ok(match answers {
            [] => Some(vec![index as u32, 1]),
            [first] => Some([&[index as u32, 1], first.as_slice(), &[7]].concat()),
            _ => None,
        })
    }
}

#[test]
fn turns_of_a_conversation_are_one_sample_and_domains_are_counted_apart() {
    let (target, oracle) = (target(45), oracle(45, 5));
    let report = evaluate(&target, &oracle, &TwoTurns, &Options::new(50, vec![NEVER]), &mut |_| {
        Ok(())
    })
    .unwrap();
    assert_eq!((report.prompts, report.identical), (12, Some(true)));
    let turns: Vec<_> = report
        .per_prompt
        .iter()
        .map(|result| (result.prompt, result.turn))
        .collect();
    assert_eq!(turns[..4], [(0, 0), (0, 1), (1, 0), (1, 1)]);
    assert_eq!(report.per_prompt[1].prompt_tokens, 2 + 50 + 1);
    let groups: Vec<_> = report
        .groups
        .iter()
        .map(|group| (group.name.as_str(), group.prompts))
        .collect();
    assert_eq!(groups, [("domain few", 2), ("domain many", 4)]);
    assert_eq!(
        report.groups.iter().map(|group| group.rounds).sum::<u64>(),
        report.rounds
    );
    let positions: u64 = report.by_context.iter().map(|bin| bin.rounds).sum();
    assert_eq!(positions, report.rounds);
}
