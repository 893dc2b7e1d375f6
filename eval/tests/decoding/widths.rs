//! Widths that change from round to round, plain steps among them: the text stays, the state stays, counts add up.

use super::*;
use dflash_eval::evaluate::decode_speculatively_by;
use dflash_eval::width::AutoWidth;

fn auto() -> Width {
    Width::Auto(AutoWidth::new(BLOCK - 1))
}

#[test]
fn automatic_width_gives_the_plain_text_with_every_drafter() {
    let (target, prompt) = (target(31), [3, 1, 4]);
    let limits = limits(400, NEVER);
    let reference = text(&target, &prompt, &limits);
    let mut seen = std::collections::BTreeSet::new();
    for script in scripts() {
        let drafter = scripted(script, &prompt, &reference.tokens);
        let (chooser, width) = (&mut Chooser::greedy(), &mut auto());
        let decision = Decision {
            limits: &limits,
            chooser,
            width,
        };
        let got = decode_speculatively_by(&target, &drafter, &prompt, decision).unwrap();
        assert_eq!(got.tokens, reference.tokens);
        assert_eq!(1 + got.rounds.iter().map(|round| round.emitted).sum::<usize>(), 400);
        seen.extend(got.rounds.iter().map(|round| round.drafted));
    }
    assert_eq!(
        seen.into_iter().collect::<Vec<_>>(),
        (0..BLOCK).collect::<Vec<_>>(),
        "every width was tried"
    );
}

#[test]
fn plain_steps_between_drafts_leave_both_caches_complete() {
    let (target, prompt) = (target(32), [5, 5, 6]);
    let oracle = NoisyOracle {
        target: self::target(32),
        odds: 3,
    };
    let limits = limits(300, NEVER);
    let reference = text(&target, &prompt, &limits);
    let mut session = target.session(&TAPS).unwrap();
    let mut draft = oracle.session().unwrap();
    let (chooser, width) = (&mut Chooser::greedy(), &mut auto());
    let decision = Decision {
        limits: &limits,
        chooser,
        width,
    };
    let got = speculate(session.as_mut(), draft.as_mut(), &prompt, decision, &mut |_| ()).unwrap();
    assert_eq!(got.tokens, reference.tokens);
    assert!(got.rounds.iter().any(|round| round.drafted == 0));
    assert_eq!((session.len(), draft.len()), (302, 302));
}

#[test]
fn widths_go_on_learning_from_one_text_to_the_next() {
    let (target, mut width) = (target(33), auto());
    let limits = limits(60, NEVER);
    for prompt in [[1, 2], [3, 4], [5, 6]] {
        let reference = text(&target, &prompt, &limits);
        let drafter = scripted(Script::Right, &prompt, &reference.tokens);
        let decision = Decision {
            limits: &limits,
            chooser: &mut Chooser::greedy(),
            width: &mut width,
        };
        let got = decode_speculatively_by(&target, &drafter, &prompt, decision).unwrap();
        assert_eq!(got.tokens, reference.tokens);
    }
    let Width::Auto(learned) = &width else {
        panic!("it stays automatic")
    };
    assert!((0..BLOCK).all(|w| learned.cost(w).is_some()));
}

#[test]
fn the_report_tells_the_widths_chosen_and_row_by_row_is_as_lossless() {
    let oracle = NoisyOracle {
        target: target(34),
        odds: 4,
    };
    let prompts: Vec<Vec<u32>> = (0..8).map(|i| vec![i, i + 1]).collect();
    for (block, exact_verify) in [(Block::Auto, false), (Block::Own, true), (Block::Slots(3), true)] {
        let options = Options {
            block,
            exact_verify,
            ..Options::new(80, vec![2])
        };
        let report = evaluate(&target(34), &oracle, &prompts, &options, &mut |_| Ok(())).unwrap();
        assert_eq!(report.identical, Some(true));
        let rounds: u64 = report.widths.iter().map(|used| used.rounds).sum();
        assert_eq!(rounds, report.rounds + report.truncated_rounds);
        assert_eq!(report.setting.width_policy == "auto", block == Block::Auto);
        let checked = lossless(
            &target(34),
            &oracle,
            &prompts,
            &Kind::ALL,
            0.,
            &options,
            &mut |_| Ok(()),
        )
        .unwrap();
        assert!(checked.passed);
    }
}
