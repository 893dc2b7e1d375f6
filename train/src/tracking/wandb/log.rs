//! The frame of a `.wandb` file: a LevelDB log with a head of seven bytes and the checksum of zlib.
//!
//! ```text
//! file   := ":W&B"  magic u16 = 0xBEE1  version u8 = 0   chunk*      counted in blocks of 32 KiB from the file's start
//! chunk  := checksum u32  length u16  kind u8  data       little-endian; never across the end of a block
//! ```
//!
//! A record is one FULL chunk, or a FIRST, any MIDDLE and a LAST where it does not fit what is left of its block. Fewer
//! than seven bytes at the end of a block are zeros. The checksum is CRC-32 (zlib) over kind and data.
//! <https://github.com/google/leveldb/blob/main/doc/log_format.md>

use anyhow::{Result, ensure};
use crc::{CRC_32_ISO_HDLC, Crc};

/// The head of every file.
pub const HEAD: [u8; 7] = *b":W&B\xe1\xbe\x00";
/// Size of a block.
const BLOCK: usize = 32 << 10;
/// Size of a chunk without its data.
const FRAME: usize = 7;

const FULL: u8 = 1;
const FIRST: u8 = 2;
const MIDDLE: u8 = 3;
const LAST: u8 = 4;

static CRC: Crc<u32> = Crc::<u32>::new(&CRC_32_ISO_HDLC);

/// Adds a record to `out`, whose end is byte `position` of the file before and after.
pub fn append(out: &mut Vec<u8>, position: &mut usize, record: &[u8]) {
    let before = out.len();
    let start = *position;
    let mut rest = record;
    let mut first = true;
    loop {
        let at = start + out.len() - before;
        let mut room = BLOCK - at % BLOCK;
        if room < FRAME {
            out.extend(std::iter::repeat_n(0, room));
            room = BLOCK;
        }
        let (data, later) = rest.split_at(rest.len().min(room - FRAME));
        let kind = match (first, later.is_empty()) {
            (true, true) => FULL,
            (true, false) => FIRST,
            (false, false) => MIDDLE,
            (false, true) => LAST,
        };
        out.extend(checksum(kind, data).to_le_bytes());
        out.extend((data.len() as u16).to_le_bytes());
        out.push(kind);
        out.extend(data);
        (rest, first) = (later, false);
        if rest.is_empty() {
            break;
        }
    }
    *position = start + out.len() - before;
}

/// All whole records of a file. What a killed writer left at the end, a record cut off, is passed over.
///
/// # Errors
/// When the head is another file's or a chunk that is all there does not hold what was written.
pub fn records(file: &[u8]) -> Result<Vec<Vec<u8>>> {
    let head = &file[..file.len().min(HEAD.len())];
    ensure!(
        HEAD.starts_with(head),
        "expected the head of a W&B log, {HEAD:02x?}, got {head:02x?}"
    );
    let mut found = Vec::new();
    let mut record: Option<Vec<u8>> = None;
    let mut at = HEAD.len();
    loop {
        let room = BLOCK - at % BLOCK;
        if room < FRAME {
            at += room;
        }
        let Some(frame) = file.get(at..at + FRAME) else { break };
        let length = usize::from(u16::from_le_bytes([frame[4], frame[5]]));
        let Some(data) = file.get(at + FRAME..at + FRAME + length) else {
            break;
        };
        let kind = frame[6];
        let (written, computed) = (
            u32::from_le_bytes([frame[0], frame[1], frame[2], frame[3]]),
            checksum(kind, data),
        );
        ensure!(
            written == computed,
            "byte {at}: expected checksum {computed:08x}, got {written:08x}"
        );
        match (kind, record.take()) {
            (FULL, None) => found.push(data.to_vec()),
            (FIRST, None) => record = Some(data.to_vec()),
            (MIDDLE | LAST, Some(mut begun)) => {
                begun.extend(data);
                if kind == LAST {
                    found.push(begun);
                } else {
                    record = Some(begun);
                }
            }
            (_, begun) => {
                let expected = if begun.is_some() {
                    "the rest of a record (3, 4)"
                } else {
                    "a record's start (1, 2)"
                };
                anyhow::bail!("byte {at}: expected {expected}, got a chunk of kind {kind}");
            }
        }
        at += FRAME + length;
    }
    Ok(found)
}

fn checksum(kind: u8, data: &[u8]) -> u32 {
    let mut digest = CRC.digest();
    digest.update(&[kind]);
    digest.update(data);
    digest.finalize()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn file(records: &[Vec<u8>]) -> Vec<u8> {
        let (mut file, mut position) = (HEAD.to_vec(), HEAD.len());
        for record in records {
            append(&mut file, &mut position, record);
            assert_eq!(position, file.len());
        }
        file
    }

    #[test]
    fn the_checksum_is_that_of_zlib() {
        assert_eq!(CRC.checksum(b"123456789"), 0xcbf4_3926);
        // the magic number says the same: the low half of the name's checksum
        assert_eq!(CRC.checksum(b"Weights & Biases") & 0xffff, 0xbee1);
    }

    /// A record that ends `left` bytes before a block's end, then another: padding, an empty FIRST chunk, or neither.
    #[test]
    fn records_at_the_end_of_a_block_keep_the_rules_of_the_frame() {
        for left in 0..=9 {
            let first = vec![1; BLOCK - HEAD.len() - FRAME - left];
            let file = file(&[first.clone(), vec![2; 3]]);
            let kind = file[BLOCK - left..].get(6).copied();
            match left {
                0 => assert_eq!(kind, Some(FULL)),
                1..7 => {
                    assert!(file[BLOCK - left..BLOCK].iter().all(|&byte| byte == 0));
                    assert_eq!(file[BLOCK + 6], FULL);
                }
                7.. => {
                    assert_eq!(kind, Some(FIRST), "{left} bytes left");
                    assert_eq!(file[BLOCK + 6], LAST);
                }
            }
            assert_eq!(records(&file).unwrap(), [first, vec![2; 3]]);
        }
    }

    #[test]
    fn a_damaged_byte_is_an_error_that_says_where() {
        let mut bytes = file(&[vec![5; 10], vec![6; 10]]);
        bytes[HEAD.len() + FRAME + 2] ^= 1;
        let error = records(&bytes).unwrap_err().to_string();
        assert!(error.starts_with("byte 7: expected checksum"), "{error}");
        for cut in 0..=HEAD.len() {
            assert!(records(&HEAD[..cut]).unwrap().is_empty(), "cut off within the head");
        }
        let error = records(b"{\"step\":1}").unwrap_err().to_string();
        assert!(error.contains("head of a W&B log"), "{error}");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Lengths around the block's, so that most cases cross a boundary at some place.
        #[test]
        fn records_of_any_length_read_back_and_a_cut_loses_only_what_it_cuts(
            lengths in prop::collection::vec(prop_oneof![0..40_usize, 32_700..32_800_usize, 0..70_000_usize], 1..6),
            cut in 0.0..1.0_f64,
        ) {
            let written: Vec<Vec<u8>> =
                lengths.iter().enumerate().map(|(i, &length)| vec![i as u8 + 1; length]).collect();
            let whole = file(&written);
            prop_assert_eq!(records(&whole).unwrap(), written.clone());
            let cut = HEAD.len() + (cut * (whole.len() - HEAD.len()) as f64) as usize;
            let kept = records(&whole[..cut]).unwrap();
            let whole_ones = (0..=written.len()).rev().find(|&n| file(&written[..n]).len() <= cut).unwrap();
            prop_assert_eq!(kept, written[..whole_ones].to_vec());
        }
    }
}
