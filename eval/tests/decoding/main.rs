//! The decoding loop against a target without weights: identity with plain decoding, rollback, cuts, counts.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use candle_core::{Result, Tensor};
use dflash_eval::chooser::Chooser;
use dflash_eval::evaluate::{decode_plainly, decode_speculatively};
use dflash_eval::lossless::{Kind, lossless};
use dflash_eval::random::mix;
use dflash_eval::scripted::{Script, Scripted};
use dflash_eval::scripted_target::{Fault, ScriptedTarget};
use dflash_eval::{
    Block, Decision, Emitted, Finish, Generation, Limits, Options, Recording, Tally, Width, evaluate, plain, replay,
    speculate,
};
use dflash_model::{DraftSession, Drafting, LogitRows, Proposal, ProposalSlot, Sampling, Session, Target};
use proptest::prelude::*;

mod command;
mod modes;
mod reports;
mod sampling;
mod widths;

const BLOCK: usize = 8;
const TAPS: [usize; 3] = [1, 3, 5];
const VOCAB: usize = 23;
/// A token id that no vocabulary of these tests has: never stops.
const NEVER: u32 = u32::MAX;

fn target(seed: u64) -> ScriptedTarget {
    ScriptedTarget::new(seed, VOCAB, 4096).unwrap()
}

fn limits(max_new: usize, stop: u32) -> Limits {
    Limits::new(max_new, 4096, vec![stop])
}

/// Greedy decoding in sessions that the test keeps.
fn greedily(
    session: &mut dyn Session,
    draft: &mut dyn DraftSession,
    prompt: &[u32],
    limits: &Limits,
    observer: &mut dyn FnMut(Emitted<'_>),
) -> anyhow::Result<Generation> {
    let (chooser, width) = (&mut Chooser::greedy(), &mut Width::Fixed(BLOCK - 1));
    let decision = Decision { limits, chooser, width };
    speculate(session, draft, prompt, decision, observer)
}

fn text(target: &dyn Target, prompt: &[u32], limits: &Limits) -> Generation {
    decode_plainly(target, &TAPS, prompt, limits).unwrap()
}

fn scripted(script: Script, prompt: &[u32], text: &[u32]) -> Scripted {
    Scripted::new(script, [prompt, text].concat(), BLOCK, &TAPS, VOCAB).unwrap()
}

/// Reads the committed tokens off the taps, asks a copy of the target how they go on, and errs in one draft of `odds`.
struct NoisyOracle {
    target: ScriptedTarget,
    odds: u64,
}

struct NoisySession<'d> {
    oracle: &'d NoisyOracle,
    rows: Vec<Vec<f32>>,
}

impl Drafting for NoisyOracle {
    fn block_size(&self) -> usize {
        BLOCK
    }

    fn taps(&self) -> &[usize] {
        &TAPS
    }

    fn session(&self) -> Result<Box<dyn DraftSession + '_>> {
        let rows = Vec::new();
        Ok(Box::new(NoisySession { oracle: self, rows }))
    }
}

impl DraftSession for NoisySession<'_> {
    fn len(&self) -> usize {
        self.rows.len()
    }

    fn extend(&mut self, taps: &Tensor) -> Result<()> {
        for row in taps.to_vec2::<f32>()? {
            for (tap, block) in row.chunks(4).enumerate() {
                assert_eq!(block[0] as usize, TAPS[tap], "taps in the order of the list");
                assert_eq!(
                    block[1] as usize,
                    self.rows.len(),
                    "one row a position, none skipped or repeated"
                );
            }
            self.rows.push(row);
        }
        Ok(())
    }

    fn propose(&mut self, anchor: u32, width: usize, _: &mut Sampling<'_>) -> Result<Proposal> {
        let context: Vec<u32> = self.rows.iter().map(|row| row[2] as u32).collect();
        let mut session = self.oracle.target.session(&[])?;
        session.forward(&context, LogitRows::None)?;
        let (mut token, mut slots) = (anchor, Vec::new());
        for slot in 0..width {
            let logits = session.forward(&[token], LogitRows::Last)?.logits.unwrap();
            token = dflash_eval::argmax::argmax_rows(&logits).unwrap()[0];
            let lie = mix((context.len() * BLOCK + slot) as u64).is_multiple_of(self.oracle.odds);
            slots.push(ProposalSlot {
                token: if lie { (token + 1) % VOCAB as u32 } else { token },
                candidates: Vec::new(),
                q: Vec::new(),
            });
        }
        Ok(Proposal { slots })
    }
}

fn scripts() -> Vec<Script> {
    vec![
        Script::Right,
        Script::Wrong,
        Script::Random { seed: 5 },
        Script::Runs(vec![7, 0]),
        Script::Runs(vec![0, 1, 2, 3, 4, 5, 6, 7]),
        Script::Runs(vec![3]),
    ]
}

#[test]
fn every_width_gives_the_plain_text_with_every_drafter() {
    let target = target(1);
    let prompt = [3, 1, 4, 1, 5];
    let reference = text(&target, &prompt, &limits(60, NEVER));
    assert_eq!((reference.tokens.len(), reference.finish), (60, Finish::Budget));
    for script in scripts() {
        for width in 1..BLOCK {
            let drafter = scripted(script.clone(), &prompt, &reference.tokens);
            let got = decode_speculatively(&target, &drafter, &prompt, &limits(60, NEVER), width).unwrap();
            assert_eq!(got.tokens, reference.tokens, "{script:?} width {width}");
            assert_eq!(got.finish, reference.finish);
            assert!(got.rounds.iter().all(|round| round.drafted <= width));
        }
    }
}

#[test]
fn acceptance_of_scripted_drafters_is_exact() {
    let (target, prompt) = (target(2), [7, 7, 2]);
    let reference = text(&target, &prompt, &limits(203, NEVER));
    let run = |script| {
        let drafter = scripted(script, &prompt, &reference.tokens);
        let got = decode_speculatively(&target, &drafter, &prompt, &limits(203, NEVER), 7).unwrap();
        Tally::of_text(&got.rounds, 7)
    };
    assert_eq!(run(Script::Right).full.acceptance_length(), Some(BLOCK as f64));
    assert_eq!(run(Script::Wrong).full.acceptance_length(), Some(1.));
    assert_eq!(run(Script::Wrong).counted(true).acceptance_length(), Some(1.));
    // 202 tokens after the first: eight cycles of 8 + 8 + 8 + 1, then two; the last two blocks are narrowed
    let cycle = run(Script::Runs(vec![7, 7, 7, 0]));
    assert_eq!(cycle.emitted, 202);
    assert_eq!(cycle.full.histogram[1..7], [0; 6]);
    assert_eq!(cycle.full.rounds, 31);
    assert_eq!(cycle.full.accepted, 24 * 7);
    assert_eq!(
        (
            cycle.truncated.rounds,
            cycle.truncated.drafted,
            cycle.truncated.accepted
        ),
        (2, 3, 1)
    );
}

/// After generation both caches must equal those of a run that never speculated.
fn assert_state_is_fresh(target: &dyn Target, drafting: &dyn Drafting, prompt: &[u32], limits: &Limits) {
    let mut session = target.session(drafting.taps()).unwrap();
    let mut draft = drafting.session().unwrap();
    let got = greedily(session.as_mut(), draft.as_mut(), prompt, limits, &mut |_| ()).unwrap();
    let kept = [prompt, &got.tokens[..got.tokens.len() - 1]].concat();
    assert_eq!((session.len(), draft.len()), (kept.len(), kept.len()));
    let mut fresh = target.session(drafting.taps()).unwrap();
    fresh.forward(&kept, LogitRows::None).unwrap();
    let probe = [got.tokens[got.tokens.len() - 1], 0, 1];
    let [a, b] = [&mut session, &mut fresh].map(|s| s.forward(&probe, LogitRows::All).unwrap());
    let values = |tensor: &Tensor| tensor.to_vec2::<f32>().unwrap();
    assert_eq!(values(&a.logits.unwrap()), values(&b.logits.unwrap()));
    assert_eq!(values(&a.taps), values(&b.taps));
}

#[test]
fn accepting_all_some_none_or_in_a_row_leaves_the_state_of_a_fresh_run() {
    let (target, prompt) = (target(3), [9, 8, 7]);
    for runs in [vec![7], vec![3], vec![0], vec![2, 5], vec![7, 0, 0, 7, 1]] {
        for max_new in 1..40 {
            let limits = limits(max_new, NEVER);
            let reference = text(&target, &prompt, &limits);
            let drafter = scripted(Script::Runs(runs.clone()), &prompt, &reference.tokens);
            assert_state_is_fresh(&target, &drafter, &prompt, &limits);
        }
    }
}

#[test]
fn a_stop_token_inside_a_block_cuts_the_text_after_it() {
    let (target, prompt) = (target(4), [1, 2, 3]);
    let whole = text(&target, &prompt, &limits(40, NEVER)).tokens;
    let first = |token: &u32| whole.iter().position(|t| t == token);
    let firsts: Vec<usize> = (0..40).filter(|&i| first(&whole[i]) == Some(i)).collect();
    assert!(
        firsts.iter().any(|i| i % 8 != 0 && *i > 8),
        "{firsts:?}: the stop must fall inside a block"
    );
    for at in firsts {
        let limits = limits(40, whole[at]);
        let reference = text(&target, &prompt, &limits);
        assert_eq!(
            (reference.tokens.as_slice(), reference.finish),
            (&whole[..=at], Finish::Stop)
        );
        let drafter = scripted(Script::Right, &prompt, &whole);
        let got = decode_speculatively(&target, &drafter, &prompt, &limits, 7).unwrap();
        assert_eq!((got.tokens, got.finish), (reference.tokens, Finish::Stop));
        assert_state_is_fresh(&target, &drafter, &prompt, &limits);
        if let Some(last) = got.rounds.last() {
            // full blocks emit 8 after the first token; only a bonus that stops is not a cut
            let left = (at - 1) % 8 + 1;
            assert_eq!((last.emitted, last.accepted), (left, left.min(7)), "stop at {at}");
            assert_eq!(last.truncated, left < 8 || 40 - 1 - (at - left) < 8 + 1);
        } else {
            assert_eq!(at, 0, "only a text of one token has no round");
        }
    }
}

#[test]
fn the_budget_is_met_exactly_and_narrowed_rounds_are_apart() {
    let (target, prompt) = (target(5), [6]);
    let whole = text(&target, &prompt, &limits(64, NEVER)).tokens;
    for max_new in 1..=40 {
        for script in scripts() {
            let limits = limits(max_new, NEVER);
            let drafter = scripted(script.clone(), &prompt, &whole);
            let got = decode_speculatively(&target, &drafter, &prompt, &limits, 7).unwrap();
            assert_eq!(got.tokens, whole[..max_new], "{script:?} {max_new}");
            assert_eq!(got.finish, Finish::Budget);
            let mut emitted = 1;
            for round in &got.rounds {
                let left = max_new - emitted;
                assert_eq!(round.truncated, left < 8, "left {left}");
                assert_eq!(round.drafted, 7.min(left - 1));
                assert_eq!(round.emitted, round.accepted + 1);
                emitted += round.emitted;
            }
            assert_eq!(emitted, max_new);
        }
    }
}

#[test]
fn the_context_limit_ends_both_texts_at_the_same_token() {
    let target = ScriptedTarget::new(6, VOCAB, 30).unwrap();
    let prompt = [1, 2, 3, 4];
    let limits = Limits {
        max_positions: 30,
        ..limits(1000, NEVER)
    };
    let reference = text(&target, &prompt, &limits);
    assert_eq!((reference.tokens.len(), reference.finish), (26, Finish::Context));
    for script in scripts() {
        let drafter = scripted(script, &prompt, &reference.tokens);
        let got = decode_speculatively(&target, &drafter, &prompt, &limits, 7).unwrap();
        assert_eq!((got.tokens, got.finish), (reference.tokens.clone(), Finish::Context));
    }
    let full = decode_plainly(&target, &TAPS, &[0; 30], &limits).unwrap_err();
    assert!(
        format!("{full:#}").contains("leave no room in the target's 30 positions"),
        "{full:#}"
    );
}

#[test]
fn a_second_request_on_one_target_and_a_second_turn_on_one_session_are_as_fresh() {
    let (target, oracle) = (
        target(7),
        NoisyOracle {
            target: target(7),
            odds: 4,
        },
    );
    let limits = limits(30, NEVER);
    let long: Vec<u32> = (0..200).map(|i| i % VOCAB as u32).collect();
    let alone = decode_speculatively(&target, &oracle, &[5, 6], &limits, 7).unwrap();
    decode_speculatively(&target, &oracle, &long, &limits, 7).unwrap();
    let again = decode_speculatively(&target, &oracle, &[5, 6], &limits, 7).unwrap();
    assert_eq!((&alone.tokens, &alone.rounds), (&again.tokens, &again.rounds));

    let mut session = target.session(&TAPS).unwrap();
    let mut draft = oracle.session().unwrap();
    let first = greedily(session.as_mut(), draft.as_mut(), &[5, 6], &limits, &mut |_| ()).unwrap();
    let turn = [*first.tokens.last().unwrap(), 11, 12];
    let second = greedily(session.as_mut(), draft.as_mut(), &turn, &limits, &mut |_| ()).unwrap();
    let whole = [&[5, 6], first.tokens.as_slice(), &[11, 12]].concat();
    assert_eq!(second.tokens, text(&target, &whole, &limits).tokens);
}

#[test]
fn a_prompt_longer_than_one_prefill_pass_reaches_the_drafter_whole() {
    let target = ScriptedTarget::new(8, VOCAB, 8192).unwrap();
    let oracle = NoisyOracle {
        target: ScriptedTarget::new(8, VOCAB, 8192).unwrap(),
        odds: 3,
    };
    let limits = Limits {
        max_positions: 8192,
        ..limits(24, NEVER)
    };
    for length in [2047, 2048, 2049, 5000] {
        let prompt: Vec<u32> = (0..length).map(|i| (mix(i) % VOCAB as u64) as u32).collect();
        assert_state_is_fresh(&target, &oracle, &prompt, &limits);
        let got = decode_speculatively(&target, &oracle, &prompt, &limits, 7).unwrap();
        assert_eq!(got.tokens, text(&target, &prompt, &limits).tokens);
        assert_eq!(got.rounds[0].anchor as u64, length);
    }
}

#[test]
fn the_observer_sees_every_token_once_and_what_was_drafted() {
    let (target, prompt) = (target(9), [2, 4]);
    let limits = limits(50, NEVER);
    let reference = text(&target, &prompt, &limits);
    let drafter = scripted(Script::Runs(vec![2, 0, 7]), &prompt, &reference.tokens);
    let (mut seen, mut accepted) = (Vec::<u32>::new(), 0);
    let mut session = target.session(&TAPS).unwrap();
    let mut draft = drafter.session().unwrap();
    let got = greedily(session.as_mut(), draft.as_mut(), &prompt, &limits, &mut |emitted| {
        seen.extend(emitted.tokens);
        accepted += emitted.accepted;
    });
    assert_eq!(seen, reference.tokens);
    assert_eq!(
        accepted,
        got.unwrap().rounds.iter().map(|round| round.accepted).sum::<usize>()
    );
    let (mut session, mut seen) = (target.session(&TAPS).unwrap(), Vec::<u32>::new());
    plain(
        session.as_mut(),
        &prompt,
        &limits,
        &mut Chooser::greedy(),
        &mut |emitted| {
            seen.extend(emitted.tokens);
        },
    )
    .unwrap();
    assert_eq!(seen, reference.tokens);
}

#[test]
fn misuse_is_an_error_that_says_what_was_expected() {
    let (target, prompt) = (target(10), [1, 2]);
    let drafter = scripted(Script::Right, &prompt, &[]);
    let fails = |prompt: &[u32], limits: &Limits, width| {
        let error = decode_speculatively(&target, &drafter, prompt, limits, width).unwrap_err();
        format!("{error:#}")
    };
    assert!(fails(&[], &limits(5, NEVER), 7).contains("empty prompt"));
    assert!(fails(&prompt, &limits(0, NEVER), 7).contains("max_new 0"));
    assert!(fails(&prompt, &limits(5, NEVER), 0).contains("width 0"));
    assert!(fails(&prompt, &limits(50, NEVER), 8).contains("expected 1..=7"));
    let mut session = target.session(&TAPS).unwrap();
    session.forward(&[1], LogitRows::None).unwrap();
    let mut draft = drafter.session().unwrap();
    let apart = greedily(
        session.as_mut(),
        draft.as_mut(),
        &prompt,
        &limits(5, NEVER),
        &mut |_| (),
    )
    .unwrap_err();
    assert!(apart.to_string().contains("seen 1 tokens and the drafter 0"), "{apart}");
    for block in [0, 1, BLOCK + 1] {
        let options = Options {
            block: Block::Slots(block),
            ..Options::new(5, vec![NEVER])
        };
        assert!(options.width(&drafter).is_err(), "block {block}");
    }
}
