//! Against itself: splits, causality, commit and drop, bit equality of decoding and verification.

use candle_core::{DType, Device, Result, Tensor};
use dflash_model::target::{self, LogitRows};
use proptest::prelude::*;

use crate::{CASES, all_taps, both, demo, fresh, load, relative, states, tokens, values};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn any_split_of_a_prompt_gives_the_same(case in 0usize..7, cuts in prop::collection::vec(1usize..90, 1..6), seed in 0u32..1000) {
        for (path, target) in both(CASES[case]) {
            let ids = tokens(cuts.iter().sum(), target.info().vocab_size, seed);
            let (logits, taps) = fresh(&*target, &ids);
            let mut session = target.session(&all_taps(&*target)).expect("session");
            let (mut split_logits, mut split_taps, mut at) = (Vec::new(), Vec::new(), 0);
            for cut in &cuts {
                let out = session.forward(&ids[at..at + cut], LogitRows::All).expect("forward");
                split_logits.extend(values(&out.logits.expect("logits")));
                split_taps.extend(values(&out.taps));
                at += cut;
            }
            prop_assert_eq!(session.len(), ids.len());
            prop_assert!(relative(&split_logits, &logits) < 1e-5, "{} logits", path);
            prop_assert!(relative(&split_taps, &taps) < 1e-5, "{} taps", path);
        }
    }
}

#[test]
fn a_prompt_longer_than_a_segment_equals_its_halves() -> Result<()> {
    // 1,300 tokens on the demo target cross the internal pieces of every path
    let target = target::load(&demo(), &Device::Cpu, DType::F32)?;
    let ids = tokens(1300, 4090, 3);
    let whole = target.taps(&ids, &[1, 3, 5])?;
    let mut session = target.session(&[1, 3, 5])?;
    let first = session.forward(&ids[..701], LogitRows::None)?.taps;
    let second = session.forward(&ids[701..], LogitRows::None)?.taps;
    let error = relative(&values(&Tensor::cat(&[first, second], 0)?), &values(&whole));
    assert!(error < 1e-5, "{error:e}");
    Ok(())
}

#[test]
fn later_tokens_never_change_earlier_rows() {
    for name in CASES {
        for (path, target) in both(name) {
            let vocab = target.info().vocab_size;
            let mut ids = tokens(100, vocab, 9);
            let (before, _) = fresh(&*target, &ids);
            for id in &mut ids[70..] {
                *id = (*id + 1) % vocab as u32;
            }
            let (after, _) = fresh(&*target, &ids);
            assert_eq!(before[..70 * vocab], after[..70 * vocab], "{name} {path}");
            assert_ne!(before[70 * vocab..], after[70 * vocab..], "{name} {path}");
        }
    }
}

#[test]
fn commit_of_every_n_equals_a_fresh_run_twice_in_a_row_and_dropping_changes_nothing() -> Result<()> {
    for name in CASES {
        for (path, target) in both(name) {
            let taps = all_taps(&*target);
            let vocab = target.info().vocab_size;
            let ids = tokens(60, vocab, 4);
            let wrong = tokens(60, vocab, 77);
            for rows in [1, 5, 20] {
                for n in 0..=rows {
                    let mut session = target.session(&taps)?;
                    session.forward(&ids[..17], LogitRows::None)?;
                    let mut done = 17;
                    for round in 0..2 {
                        // a pass that is dropped leaves nothing behind
                        drop(session.verify(&wrong[..rows])?);
                        assert_eq!(session.len(), done);
                        // n right tokens, the rest garbage
                        let fed: Vec<u32> = [&ids[done..done + n], &wrong[n..rows]].concat();
                        let step = session.verify(&fed)?;
                        let (expected, expected_taps) = fresh(&*target, &[&ids[..done], &fed[..]].concat());
                        assert!(
                            relative(&values(&step.logits), &expected[done * vocab..]) < 1e-5,
                            "{name} {path}"
                        );
                        let width = step.taps.dim(1)?;
                        assert!(
                            relative(&values(&step.taps), &expected_taps[done * width..]) < 1e-5,
                            "{name} {path}"
                        );
                        step.commit(n)?;
                        done += n;
                        assert_eq!(session.len(), done);
                        let mut plain = target.session(&taps)?;
                        plain.forward(&ids[..done], LogitRows::None)?;
                        for (layer, (a, b)) in states(&*session).into_iter().zip(states(&*plain)).enumerate() {
                            let (Some((tail_a, state_a)), Some((tail_b, state_b))) = (a, b) else {
                                continue;
                            };
                            let place = format!("{name} {path} commit {n} of {rows}, round {round}, layer {layer}");
                            assert!(relative(&tail_a, &tail_b) < 1e-5, "{place}");
                            assert!(relative(&state_a, &state_b) < 1e-5, "{place}");
                        }
                    }
                    let next = session
                        .forward(&ids[done..=done], LogitRows::Last)?
                        .logits
                        .expect("logits");
                    let (expected, _) = fresh(&*target, &ids[..=done]);
                    // one row of a small random model can amplify rounding; a wrong state is off by whole percents
                    assert!(
                        relative(&values(&next), &expected[done * vocab..]) < 5e-5,
                        "{name} {path} commit {n} of {rows}"
                    );
                }
            }
            let mut session = target.session(&taps)?;
            let refused = session.verify(&ids[..3])?.commit(4).expect_err("too many").to_string();
            assert!(refused.contains("commit of 4"), "{refused}");
            assert_eq!(session.len(), 0);
        }
    }
    Ok(())
}

/// The property on which losslessness rests: what verification computes for a row is what decoding would have.
#[test]
fn verified_rows_and_folded_states_equal_decoding_to_the_bit() -> Result<()> {
    for name in ["ratio1", "ratio2", "ratio3", "odd", "qwen3"] {
        let target = load(name);
        let vocab = target.info().vocab_size;
        let ids = tokens(120, vocab, 21);
        let wrong = tokens(120, vocab, 50);
        let (mut plain, mut speculative) = (target.session(&[0])?, target.session(&[0])?);
        plain.forward(&ids[..40], LogitRows::None)?;
        speculative.forward(&ids[..40], LogitRows::None)?;
        let mut done = 40;
        for n in [3, 0, 16, 1, 7, 8, 2, 16] {
            let fed: Vec<u32> = [&ids[done..done + n], &wrong[n..16]].concat();
            let step = speculative.verify(&fed)?;
            let (logits, taps) = (values(&step.logits), values(&step.taps));
            for (r, id) in ids[done..done + n].iter().enumerate() {
                let out = plain.forward(&[*id], LogitRows::Last)?;
                assert_eq!(
                    values(&out.logits.expect("logits")),
                    logits[r * vocab..(r + 1) * vocab],
                    "{name} row {r}"
                );
                let width = target.info().hidden_size;
                assert_eq!(
                    values(&out.taps),
                    taps[r * width..(r + 1) * width],
                    "{name} taps of row {r}"
                );
            }
            step.commit(n)?;
            done += n;
            for (a, b) in states(&*plain).into_iter().zip(states(&*speculative)) {
                let (Some((tail_a, state_a)), Some((tail_b, state_b))) = (a, b) else {
                    continue;
                };
                assert_eq!(tail_a, tail_b, "{name} after {n}");
                assert_eq!(state_a, state_b, "{name} after {n}");
            }
        }
    }
    Ok(())
}

#[test]
fn sessions_on_several_threads_do_not_disturb_each_other() {
    let target = load("ratio2");
    let ids = tokens(90, target.info().vocab_size, 8);
    let (expected, _) = fresh(&*target, &ids);
    std::thread::scope(|scope| {
        let jobs: Vec<_> = (0..4).map(|_| scope.spawn(|| fresh(&*target, &ids).0)).collect();
        for job in jobs {
            assert_eq!(job.join().expect("thread"), expected);
        }
    });
}

#[test]
fn bad_taps_and_tokens_are_refused_by_value() {
    for (path, target) in both("ratio1") {
        let refused = |taps: &[usize]| target.session(taps).err().expect("refused").to_string();
        assert!(refused(&[0, 2]).contains("layer 2 of 3 layers"), "{path}");
        assert!(refused(&[1, 0]).contains("strictly increasing"), "{path}");
        assert!(refused(&[1, 1]).contains("strictly increasing"), "{path}");
        assert!(target.taps(&[1, 2], &[2]).is_err(), "{path}");
        let mut session = target.session(&[0]).expect("session");
        let refused = |result: Result<target::Forward>| result.expect_err("refused").to_string();
        assert!(
            refused(session.forward(&[1, 96], LogitRows::None)).contains("token 1 is 96"),
            "{path}"
        );
        assert!(
            refused(session.forward(&[], LogitRows::None)).contains("no tokens"),
            "{path}"
        );
        assert!(
            refused(session.forward(&[1; 513], LogitRows::None)).contains("512 positions"),
            "{path}"
        );
        assert_eq!(session.len(), 0);
    }
}

#[test]
fn in_bf16_too_a_verified_row_equals_the_decoded_row_to_the_bit() -> Result<()> {
    let target = target::load(&demo(), &Device::Cpu, DType::BF16)?;
    let ids = tokens(60, 4090, 17);
    let (prompt, rest) = ids.split_at(21);
    let mut plain = target.session(&[1, 3])?;
    plain.forward(prompt, LogitRows::None)?;
    let decoded: Vec<Vec<f32>> = rest
        .iter()
        .map(|&id| {
            values(
                &plain
                    .forward(&[id], LogitRows::Last)
                    .expect("step")
                    .logits
                    .expect("logits"),
            )
        })
        .collect();
    for rows in 1..=16 {
        let mut session = target.session(&[1, 3])?;
        session.forward(prompt, LogitRows::None)?;
        for (block, expected) in rest.chunks(rows).zip(decoded.chunks(rows)) {
            let step = session.verify(block)?;
            assert_eq!(values(&step.logits), expected.concat(), "{rows} rows");
            step.commit(block.len())?;
        }
    }
    Ok(())
}
