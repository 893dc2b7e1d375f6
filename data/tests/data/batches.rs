//! Packing: what a block sees and is asked for, and which samples go together.

use dflash_data::{Sample, anchors, pack, plan_epoch};
use half::bf16;
use proptest::prelude::*;

const WIDTH: usize = 3;

/// A sample whose tokens and taps name their owner and position: token = 1000 * owner + position.
fn sample(owner: usize, loss_mask: Vec<bool>) -> Sample {
    let length = loss_mask.len();
    Sample {
        tokens: (0..length).map(|position| (1000 * owner + position) as u32).collect(),
        loss_mask,
        taps: (0..length * WIDTH)
            .map(|at| bf16::from_f32((owner * 40 + at / WIDTH) as f32 + 0.25 * (at % WIDTH) as f32))
            .collect(),
        tap_width: WIDTH,
    }
}

fn mask(prompt: usize, response: usize) -> Vec<bool> {
    let mut mask = vec![false; prompt];
    mask.resize(prompt + response, true);
    mask
}

#[test]
fn two_samples_pack_as_written_down_by_hand() {
    let samples = [sample(1, mask(2, 4)), sample(2, mask(1, 3))];
    let batch = pack(&samples, &[vec![2, 4], vec![1]], 4).unwrap();
    assert_eq!((batch.tokens, batch.samples, batch.tap_width), (10, 2, WIDTH));
    let blocks = &batch.blocks;
    let seen: Vec<_> = blocks
        .blocks
        .iter()
        .map(|block| (block.context_start, block.anchor))
        .collect();
    assert_eq!(seen, [(0, 2), (0, 4), (4, 1)]);
    assert_eq!(blocks.anchors, [1002, 1004, 2001]);
    // rows 4 and 5 of the first sample and 1 to 3 of the second are seen by no block
    assert_eq!(blocks.context_positions, [0, 1, 2, 3, 0]);
    assert_eq!(blocks.labels, [0, 1003, 1004, 1005, 0, 1005, 0, 0, 0, 2002, 2003, 0]);
    let supervised: Vec<u8> = blocks.supervised.iter().map(|&on| u8::from(on)).collect();
    assert_eq!(supervised, [0, 1, 1, 1, 0, 1, 0, 0, 0, 1, 1, 0]);
    assert_eq!(batch.supervised_slots(), 6);
    assert_eq!(batch.taps[..4 * WIDTH], samples[0].taps[..4 * WIDTH]);
    assert_eq!(batch.taps[4 * WIDTH..], samples[1].taps[..WIDTH]);
    let tensor = batch
        .taps_tensor(candle_core::DType::F32, &candle_core::Device::Cpu)
        .unwrap();
    assert_eq!(tensor.dims(), [5, WIDTH]);
}

#[test]
fn supervision_ends_with_the_response_even_when_another_one_follows() {
    let mask = vec![false, true, true, false, true, true];
    let batch = pack(&[sample(1, mask)], &[vec![1, 4]], 5).unwrap();
    assert_eq!(batch.blocks.labels, [0, 1002, 0, 0, 0, 0, 1005, 0, 0, 0]);
}

#[test]
fn a_sample_without_anchors_adds_nothing_but_is_counted() {
    let samples = [sample(1, mask(3, 1)), sample(2, mask(1, 3))];
    let batch = pack(&samples, &[vec![], vec![2]], 8).unwrap();
    assert_eq!(
        (
            batch.samples,
            batch.blocks.blocks.len(),
            batch.blocks.context_positions.len()
        ),
        (2, 1, 2)
    );
    assert_eq!(batch.blocks.blocks[0].context_start, 0);
    let empty = pack(&samples[..1], &[vec![]], 8).unwrap();
    assert_eq!((empty.blocks.blocks.len(), empty.supervised_slots()), (0, 0));
}

#[test]
fn lengths_need_not_be_multiples_of_the_block() {
    for length in [17, 3071] {
        let samples = [sample(1, mask(1, length - 1))];
        let drawn = anchors(&samples[0].loss_mask, 4096, 0, 0, 0);
        let batch = pack(&samples, std::slice::from_ref(&drawn), 16).unwrap();
        assert_eq!(drawn.len(), length - 2);
        let last = batch.blocks.supervised.len() - 16;
        assert_eq!(batch.blocks.supervised[last..].iter().filter(|on| **on).count(), 1);
    }
}

#[test]
fn responses_shorter_than_a_block_still_train() {
    let samples = [sample(1, mask(9, 5))];
    let drawn = anchors(&samples[0].loss_mask, 512, 0, 0, 0);
    let batch = pack(&samples, &[drawn], 16).unwrap();
    assert_eq!(batch.blocks.blocks.len(), 4);
    assert_eq!(batch.supervised_slots(), 4 + 3 + 2 + 1);
}

#[test]
fn every_document_of_a_pack_gets_its_own_anchors() {
    let lengths = [187, 1500, 3000, 3500];
    let drawn: Vec<usize> = lengths
        .iter()
        .enumerate()
        .map(|(i, &supervised)| anchors(&mask(20, supervised), 512, 0, 0, i as u64).len())
        .collect();
    assert_eq!(drawn, [186, 512, 512, 512]);
}

#[test]
fn anchors_that_are_not_supervised_pairs_are_refused() {
    for (own, expected) in [
        (vec![1], "anchor 1"),
        (vec![5], "anchor 5"),
        (vec![90], "anchor 90"),
        (vec![3, 2], "not ascending"),
        (vec![3, 3], "not ascending"),
    ] {
        let error = format!("{:#}", pack(&[sample(1, mask(2, 4))], &[own], 4).unwrap_err());
        assert!(error.contains(expected), "{error}");
    }
    assert!(pack(&[], &[], 4).is_err());
    assert!(pack(&[sample(1, mask(2, 4))], &[], 4).is_err());
    assert!(pack(&[sample(1, mask(2, 4))], &[vec![2]], 1).is_err());
    let mut cut = sample(1, mask(2, 4));
    cut.taps.pop();
    assert!(pack(&[cut], &[vec![2]], 4).is_err());
}

#[test]
fn the_plan_of_an_epoch_never_changes() {
    let lengths = [30, 10, 20, 60, 5, 25, 90, 15];
    let golden = [vec![4], vec![6], vec![7, 0], vec![5, 1, 2], vec![3]];
    assert_eq!(plan_epoch(&lengths, 60, 11, 0), golden);
    assert_ne!(plan_epoch(&lengths, 60, 11, 0), plan_epoch(&lengths, 60, 11, 1));
    assert_ne!(plan_epoch(&lengths, 60, 11, 0), plan_epoch(&lengths, 60, 12, 0));
}

proptest! {
    #[test]
    fn a_plan_holds_every_sample_once_within_the_budget(
        lengths in proptest::collection::vec(1_usize..100, 0..60), budget in 1_usize..200, seed: u64, epoch in 0_u64..5,
    ) {
        let plan = plan_epoch(&lengths, budget, seed, epoch);
        let mut all: Vec<usize> = plan.concat();
        all.sort_unstable();
        prop_assert_eq!(all, (0..lengths.len()).collect::<Vec<_>>());
        for group in &plan {
            let tokens: usize = group.iter().map(|&i| lengths[i]).sum();
            prop_assert!(!group.is_empty() && (tokens <= budget || group.len() == 1));
        }
    }

    #[test]
    fn no_block_reaches_another_sample(
        masks in proptest::collection::vec(proptest::collection::vec(proptest::bool::weighted(0.8), 1..30), 1..6),
        block_size in 2_usize..9, max in 0_usize..8, seed: u64,
    ) {
        let samples: Vec<Sample> = masks.into_iter().enumerate().map(|(i, mask)| sample(i + 1, mask)).collect();
        let drawn: Vec<Vec<usize>> =
            samples.iter().enumerate().map(|(i, s)| anchors(&s.loss_mask, max, seed, 0, i as u64)).collect();
        let batch = pack(&samples, &drawn, block_size).unwrap();
        let (blocks, rows) = (&batch.blocks, batch.blocks.context_positions.len());
        prop_assert_eq!(batch.taps.len(), rows * WIDTH);
        prop_assert_eq!(blocks.blocks.len(), drawn.iter().map(Vec::len).sum::<usize>());
        // the owner of a context row is in its tap values, and positions start again with every owner
        let owner_of_row = |row: usize| (batch.taps[row * WIDTH].to_f32() as usize) / 40;
        for row in 0..rows {
            let at = blocks.context_positions[row] as usize;
            prop_assert_eq!(batch.taps[row * WIDTH].to_f32() as usize % 40, at);
            let first = row == 0 || owner_of_row(row) != owner_of_row(row - 1);
            prop_assert_eq!(at == 0, first);
        }
        for (n, block) in blocks.blocks.iter().enumerate() {
            let owner = blocks.anchors[n] as usize / 1000;
            let loss_mask = &samples[owner - 1].loss_mask;
            prop_assert_eq!(blocks.anchors[n] as usize % 1000, block.anchor);
            prop_assert!(block.context_start + block.anchor <= rows);
            for seen in 0..block.anchor {
                prop_assert_eq!(owner_of_row(block.context_start + seen), owner);
                prop_assert_eq!(blocks.context_positions[block.context_start + seen] as usize, seen);
            }
            for slot in 0..block_size {
                let (at, label) = (n * block_size + slot, blocks.labels[n * block_size + slot]);
                let in_response = (0..=slot).all(|k| loss_mask.get(block.anchor + k) == Some(&true));
                prop_assert_eq!(blocks.supervised[at], slot > 0 && in_response);
                let expected = if blocks.supervised[at] { 1000 * owner + block.anchor + slot } else { 0 };
                prop_assert_eq!(label as usize, expected);
            }
            prop_assert!(blocks.supervised[n * block_size + 1], "slot 1 of every block has a label");
        }
    }
}
