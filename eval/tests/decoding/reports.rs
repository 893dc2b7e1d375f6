//! Losslessness, evaluation and replay over many prompts: what they report and what they refuse.

use super::*;

fn prompts(n: u64) -> Vec<Vec<u32>> {
    let prompt = |i: u64| (0..=i % 9).map(|j| (mix(i * 31 + j) % VOCAB as u64) as u32).collect();
    (0..n).map(prompt).collect()
}

#[test]
fn lossless_passes_for_all_four_drafters_and_counts_their_work() {
    let oracle = NoisyOracle {
        target: target(11),
        odds: 4,
    };
    let options = Options::new(40, vec![0, 1]);
    let report = lossless(
        &target(11),
        &oracle,
        &prompts(12),
        &Kind::ALL,
        0.,
        &options,
        &mut |_| Ok(()),
    )
    .unwrap();
    assert!(report.passed && report.identical);
    let [trained, random, right, wrong] = &report.drafters[..] else {
        panic!("four drafters")
    };
    assert!(trained.accepted > 0 && trained.accepted < trained.drafted);
    assert!(random.accepted < random.drafted / 4);
    assert_eq!((right.identical_prompts, wrong.accepted), (12, 0));
    assert_eq!(right.acceptance_length, Some(8.));
}

#[test]
fn lossless_catches_a_target_that_does_not_restore_its_state() {
    let broken = target(12).with_fault(Fault::StaleState);
    let oracle = NoisyOracle {
        target: target(12),
        odds: 4,
    };
    let options = Options::new(40, vec![NEVER]);
    let report = lossless(&broken, &oracle, &prompts(4), &Kind::ALL, 0., &options, &mut |_| Ok(())).unwrap();
    assert!(!report.passed && !report.identical);
    let [_, _, right, wrong] = &report.drafters[..] else {
        panic!("four drafters")
    };
    // whole blocks need no rollback, so only drafters that err can show it
    assert!(right.passed());
    assert_eq!(wrong.identical_prompts, 0);
    for difference in &wrong.differences {
        assert!(difference.position >= 2, "the first round's own token is right");
        assert_ne!(difference.plain_token, difference.spec_token);
        assert_ne!(Some(difference.runner_up), difference.plain_token);
        assert!(difference.top_two_margin > 0.);
    }
}

#[test]
fn a_target_that_keeps_rejected_rows_is_caught_by_its_length() {
    let broken = target(12).with_fault(Fault::UncutCache);
    let oracle = NoisyOracle {
        target: target(12),
        odds: 4,
    };
    let options = Options::new(40, vec![NEVER]);
    let error = lossless(&broken, &oracle, &prompts(4), &[Kind::Wrong], 0., &options, &mut |_| {
        Ok(())
    })
    .unwrap_err();
    assert!(format!("{error:#}").contains("prompt 1: "), "{error:#}");
    assert!(
        format!("{error:#}").contains("the target holds 9 tokens after the commit, expected 2"),
        "{error:#}"
    );
}

#[test]
fn lossless_refuses_to_pass_empty() {
    let target = target(13);
    let everything: Vec<u32> = (0..VOCAB as u32).collect();
    let oracle = NoisyOracle {
        target: self::target(13),
        odds: 1,
    };
    let one_token = Options::new(40, everything);
    let report = lossless(&target, &oracle, &prompts(3), &Kind::ALL, 0., &one_token, &mut |_| {
        Ok(())
    })
    .unwrap();
    assert!(report.identical && !report.passed);
    assert!(report.drafters.iter().all(|drafter| drafter.unproven.is_some()));

    let never_right = Options::new(40, vec![NEVER]);
    let report = lossless(&target, &oracle, &prompts(3), &Kind::ALL, 0., &never_right, &mut |_| {
        Ok(())
    })
    .unwrap();
    let passed: Vec<bool> = report
        .drafters
        .iter()
        .map(dflash_eval::lossless::DrafterResult::passed)
        .collect();
    assert_eq!(
        passed,
        [false, true, true, true],
        "a trained drafter that is never right proves nothing"
    );
    assert!(
        lossless(
            &target,
            &oracle,
            &prompts(0),
            &Kind::ALL,
            0.,
            &never_right,
            &mut |_| Ok(())
        )
        .is_err()
    );
}

#[test]
fn evaluate_reports_the_counts_of_its_rounds() {
    let oracle = NoisyOracle {
        target: target(14),
        odds: 5,
    };
    let options = Options::new(48, vec![3]);
    let mut last = None;
    let report = evaluate(&target(14), &oracle, &prompts(10), &options, &mut |progress| {
        last = Some(progress);
        Ok(())
    })
    .unwrap();
    assert!(report.identical == Some(true) && report.differing.is_empty());
    assert_eq!((report.prompts, report.per_prompt.len()), (10, 10));
    let last = last.unwrap();
    assert_eq!(
        (last.done, last.total, last.acceptance_length),
        (10, 10, report.acceptance_length)
    );
    let runs = |truncated| {
        report.per_prompt.iter().flat_map(move |prompt| {
            let kept = move |i: &usize| prompt.truncated.contains(i) == truncated;
            (0..prompt.accepted.len())
                .filter(kept)
                .map(|i| prompt.accepted[i] as u64)
        })
    };
    assert_eq!(report.accepted, runs(false).sum::<u64>());
    assert_eq!(report.rounds, runs(false).count() as u64);
    assert_eq!(report.truncated_rounds, runs(true).count() as u64);
    assert_eq!(report.drafted, report.rounds * 7);
    let joint: f64 = report.accept_at_pos.iter().map(|p| p.unwrap()).sum();
    assert!((1. + joint - report.acceptance_length.unwrap()).abs() < 1e-12);
    let new: usize = report.per_prompt.iter().map(|prompt| prompt.new_tokens - 1).sum();
    let verifies = report.rounds + report.truncated_rounds;
    assert_eq!(report.tokens_per_verify_e2e, Some(new as f64 / verifies as f64));
    assert!(report.plain_tokens_per_s.unwrap() > 0. && report.spec_tokens_per_s.unwrap() > 0.);
    let json = serde_json::to_value(&report).unwrap();
    for key in [
        "acceptance_length",
        "acceptance_length_macro",
        "plain_tokens_per_s",
        "spec_tokens_per_s",
    ] {
        assert!(json[key].is_f64(), "{key}: {}", json[key]);
    }
    assert_eq!(serde_json::from_value::<dflash_eval::Report>(json).unwrap(), report);
    assert!(evaluate(&target(14), &oracle, &prompts(0), &options, &mut |_| Ok(())).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_drafter_stop_and_budget_give_the_plain_text_and_replay_to_the_same_rounds(
        seed in 0u64..1000,
        runs in prop::collection::vec(0usize..8, 1..6),
        prompt in prop::collection::vec(0u32..VOCAB as u32, 1..6),
        max_new in 1usize..50,
        stop in prop::option::of(0u32..VOCAB as u32),
        width in 1usize..BLOCK,
    ) {
        let target = target(seed);
        let limits = limits(max_new, stop.unwrap_or(NEVER));
        let reference = text(&target, &prompt, &limits);
        // beyond a stop the drafter keeps proposing something, here its padding
        let drafter = scripted(Script::Runs(runs), &prompt, &reference.tokens);
        let got = decode_speculatively(&target, &drafter, &prompt, &limits, width).unwrap();
        prop_assert_eq!(&got.tokens, &reference.tokens);
        prop_assert_eq!(got.finish, reference.finish);

        let tokens = [prompt.as_slice(), &got.tokens].concat();
        let recording = Recording {
            response: prompt.len()..tokens.len(),
            taps: &target.taps(&tokens, &TAPS).unwrap(),
            tokens: &tokens,
            stopped: got.finish == Finish::Stop,
            max_new: Some(max_new),
        };
        prop_assert_eq!(replay(&drafter, &recording, width).unwrap(), got.rounds);
    }
}

#[test]
fn replay_refuses_a_recording_that_contradicts_itself() {
    let tokens = [1, 2, 3, 4, 5, 6];
    let drafter = scripted(Script::Right, &tokens, &[]);
    let rows = |n| Tensor::zeros((n, 12), candle_core::DType::F32, &candle_core::Device::Cpu).unwrap();
    let attempt = |response, taps: &Tensor, max_new, width| {
        let recording = Recording {
            tokens: &tokens,
            response,
            taps,
            stopped: false,
            max_new,
        };
        replay(&drafter, &recording, width).map(|rounds| rounds.len())
    };
    assert_eq!(
        attempt(2..6, &rows(5), None, 7).unwrap(),
        1,
        "three tokens to compare: two drafts and a bonus"
    );
    assert!(attempt(2..6, &rows(4), None, 7).is_err(), "too few tap rows");
    assert!(attempt(0..6, &rows(6), None, 7).is_err(), "no prompt");
    assert!(attempt(3..3, &rows(6), None, 7).is_err(), "no response");
    assert!(attempt(2..7, &rows(6), None, 7).is_err(), "past the end");
    assert!(attempt(2..6, &rows(6), Some(3), 7).is_err(), "longer than its budget");
    assert!(attempt(2..6, &rows(6), None, 8).is_err(), "wider than the block");
}
