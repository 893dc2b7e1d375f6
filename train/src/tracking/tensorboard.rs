//! TensorBoard event files: `RUN_DIR/tensorboard/events.out.tfevents.SECONDS.dflash`, one a process.
//!
//! ```text
//! file   := frame*
//! frame  := length u64  masked crc32c(length)  event  masked crc32c(event)      little-endian
//! event  := protobuf { 1 wall time, 2 step, 3 version | 5 summary | 7 session log }
//! ```
//!
//! A process that goes on after step s begins its file with a session log START of step s + 1: readers then forget
//! whatever earlier files hold from s + 1 on, which is why the curve of a resumed run equals an uninterrupted one's.
//! Where the earlier files end before s, because one was cut or none was written, the START is that of the first step
//! that they lack, and the steps up to s follow from the JSON lines.
//! Numbers are f32 there. TFRecord: <https://www.tensorflow.org/tutorials/load_data/tfrecord>; messages:
//! `tensorboard/compat/proto/{event,summary}.proto` in github.com/tensorflow/tensorboard.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::{Context, Result};
use crc::{CRC_32_ISCSI, Crc};

use super::appended::{Appended, make_folder};
use super::clock;
use super::proto::{self, Message, Value as Wire};
use super::{Row, Tracker};

/// What precedes the seconds in a file's name; readers look for `tfevents`.
const NAME: &str = "events.out.tfevents.";
/// Seconds since 1970 that a name may bear: ten digits, with room behind the latest that a clock is believed to tell
/// (the year 2255).
const LATEST_CLOCK: u64 = 9_000_000_000;
const LATEST_NAME: u64 = 9_900_000_000;
/// `DT_STRING` of a tensor.
const DT_STRING: u64 = 7;
/// `DATA_CLASS_TENSOR` of a summary's metadata.
const CLASS_TENSOR: u64 = 2;
/// `START` of a session log.
const START: u64 = 1;

static CRC: Crc<u32> = Crc::<u32>::new(&CRC_32_ISCSI);

/// One event file on its way.
#[derive(Debug)]
pub struct EventFile {
    file: Appended,
    /// Last step that readers of the folder find.
    held: u64,
}

impl EventFile {
    /// Begins an event file in `folder`. With `after`, a training that goes on after that step: later steps of earlier
    /// files no longer count. Steps up to it that those files lack are still to be written.
    pub fn create(folder: &Path, after: Option<u64>) -> Result<Self> {
        make_folder(folder)?;
        let held = last_step(folder)?;
        let mut events = Self {
            held: after.map_or(held, |after| held.min(after)),
            file: Appended::open(&next_name(folder)?)?,
        };
        events.write(version)?;
        if after.is_some() {
            let first = events.held.saturating_add(1);
            events.write(|time| restart(time, first))?;
        }
        Ok(events)
    }

    /// Adds a text of the text tab; Markdown.
    pub fn text(&mut self, step: u64, tag: &str, markdown: &str) -> Result<()> {
        self.write(|time| text(time, step, tag, markdown))
    }

    fn write(&mut self, event: impl FnOnce(f64) -> Message) -> Result<()> {
        let now = clock::since_epoch(SystemTime::now()).as_secs_f64();
        self.file.write(&frame(&event(now).into_bytes()))
    }
}

impl Tracker for EventFile {
    fn held(&self) -> u64 {
        self.held
    }

    fn row(&mut self, row: &Row) -> Result<()> {
        self.held = self.held.max(row.step);
        self.write(|time| scalars(time, row))
    }

    fn summary(&mut self, row: &Row) -> Result<()> {
        self.write(|time| scalars(time, row))
    }

    /// Event files have no console.
    fn say(&mut self, _text: &str) -> Result<()> {
        Ok(())
    }

    fn finish(&mut self, _exit_code: i32) -> Result<()> {
        self.file.sync()
    }
}

/// A name behind all those in the folder: readers take the files in the order of their names, also where the clock went
/// back or two processes began in one second.
fn next_name(folder: &Path) -> Result<PathBuf> {
    let now = clock::since_epoch(SystemTime::now()).as_secs().min(LATEST_CLOCK);
    let last = event_files(folder)?.pop_last();
    let seconds = last.map_or(now, |(seconds, _)| now.max(seconds + 1));
    Ok(folder.join(format!("{NAME}{seconds:010}.dflash")))
}

/// The event files in `folder` by time and name, which is the order of their names: ten digits each. A time of other
/// length, or one that no clock tells, is no name of ours: behind it no other would fit.
fn event_files(folder: &Path) -> Result<BTreeSet<(u64, PathBuf)>> {
    let mut found = BTreeSet::new();
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str());
        let digits = name.and_then(|name| name.strip_prefix(NAME)?.split('.').next());
        let digits = digits.filter(|digits| digits.len() == 10 && digits.bytes().all(|byte| byte.is_ascii_digit()));
        let seconds = digits.and_then(|digits| digits.parse().ok());
        if let Some(seconds) = seconds.filter(|&seconds| seconds < LATEST_NAME) {
            found.insert((seconds, path));
        }
    }
    Ok(found)
}

/// The last step whose numbers a reader finds in the event files of `folder`; 0 without any.
fn last_step(folder: &Path) -> Result<u64> {
    let mut last = 0;
    for (_, path) in event_files(folder)?.into_iter().filter(|(_, path)| path.is_file()) {
        let bytes = fs::read(&path).with_context(|| format!("{}: cannot read", path.display()))?;
        for event in frames(&bytes) {
            let step = proto::field(event, 2).and_then(Wire::integer).unwrap_or(0);
            if proto::field(event, 7).is_some() {
                last = last.min(step.saturating_sub(1));
            } else if has_numbers(event) {
                last = last.max(step);
            }
        }
    }
    Ok(last)
}

/// Whether an event holds what a step measured; texts and the evaluation bear a step, too.
fn has_numbers(event: &[u8]) -> bool {
    let summary = proto::field(event, 5).and_then(Wire::bytes).unwrap_or_default();
    let first = proto::field(summary, 1).and_then(Wire::bytes).unwrap_or_default();
    let tag = proto::field(first, 1).and_then(Wire::bytes).unwrap_or_default();
    [b"train/".as_slice(), b"validation/"]
        .iter()
        .any(|prefix| tag.starts_with(prefix))
}

/// The events of a file up to its end or to the first damage, where readers stop as well.
fn frames(mut rest: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let (length, after) = rest.split_first_chunk::<8>()?;
        let (head, after) = after.split_first_chunk::<4>()?;
        let (data, after) = after.split_at_checked(usize::try_from(u64::from_le_bytes(*length)).ok()?)?;
        let (foot, after) = after.split_first_chunk::<4>()?;
        rest = after;
        let whole = [(&length[..], head), (data, foot)]
            .iter()
            .all(|(bytes, written)| masked(CRC.checksum(bytes)) == u32::from_le_bytes(**written));
        whole.then_some(data)
    })
    .fuse()
}

/// What every file begins with.
fn version(time: f64) -> Message {
    Message::new().double(1, time).text(3, "brain.Event:2")
}

/// From `step` on, only what follows counts.
fn restart(time: f64, step: u64) -> Message {
    event(time, step).message(7, &Message::new().integer(1, START))
}

/// The numbers of a step, in one event.
fn scalars(time: f64, row: &Row) -> Message {
    let values = row.numbers().fold(Message::new(), |values, (name, number)| {
        values.message(1, &Message::new().text(1, name).float(2, number as f32))
    });
    event(time, row.step).message(5, &values)
}

/// A text for the text tab.
fn text(time: f64, step: u64, tag: &str, markdown: &str) -> Message {
    let plugin = Message::new().text(1, "text");
    let metadata = Message::new().message(1, &plugin).integer(4, CLASS_TENSOR);
    // no dimensions: one text
    let tensor = Message::new()
        .integer(1, DT_STRING)
        .message(2, &Message::new())
        .text(8, markdown);
    let value = Message::new().text(1, tag).message(8, &tensor).message(9, &metadata);
    event(time, step).message(5, &Message::new().message(1, &value))
}

fn event(time: f64, step: u64) -> Message {
    Message::new().double(1, time).integer(2, step)
}

fn frame(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    let [head, foot] = [&length, data].map(|bytes| masked(CRC.checksum(bytes)).to_le_bytes());
    [&length, &head[..], data, &foot].concat()
}

/// Rotated and shifted, so that a checksum over bytes that hold checksums stays a good one.
fn masked(crc: u32) -> u32 {
    crc.rotate_right(15).wrapping_add(0xa282_ead8)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Vectors of RFC 3720, B.4.
    #[test]
    fn the_checksum_is_that_of_the_iscsi_standard() {
        let ascending: Vec<u8> = (0..32).collect();
        let descending: Vec<u8> = (0..32).rev().collect();
        for (bytes, expected) in [
            (vec![0; 32], 0x8a91_36aa),
            (vec![0xff; 32], 0x62a8_ab43),
            (ascending, 0x46dd_794e),
            (descending, 0x113f_db5c),
        ] {
            assert_eq!(CRC.checksum(&bytes), expected, "{bytes:02x?}");
        }
        assert_eq!(CRC.checksum(b"123456789"), 0xe306_9283);
    }

    #[test]
    fn a_later_file_is_named_behind_every_earlier_one() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join(format!("{NAME}8000000000.other.host")), "").unwrap();
        let names: Vec<PathBuf> = (0..3)
            .map(|_| EventFile::create(folder.path(), None).unwrap().file.path().to_owned())
            .collect();
        let expected = [1, 2, 3].map(|i| folder.path().join(format!("{NAME}800000000{i}.dflash")));
        assert_eq!(names, expected);
    }

    /// `scripts/fixtures/tracking.py` wrote the file with TensorBoard's messages and writer.
    #[test]
    fn events_have_the_bytes_of_tensorboards_own_writer() {
        let row = Row {
            step: 301,
            values: vec![
                ("train/loss".into(), serde_json::Number::from_f64(0.5).unwrap()),
                ("train/slots".into(), 12.into()),
                (
                    "validation/accept_at_pos/01".into(),
                    serde_json::Number::from_f64(0.25).unwrap(),
                ),
            ],
        };
        let events = [
            version(1.5),
            restart(2.5, 301),
            text(3.5, 300, "config", "seed = 1\n"),
            scalars(4.5, &row),
        ];
        let ours: Vec<u8> = events
            .into_iter()
            .flat_map(|event| frame(&event.into_bytes()))
            .collect();
        assert_eq!(ours, include_bytes!("../../tests/fixtures/tracking/events.tfevents"));
    }

    #[test]
    fn a_failed_write_ends_the_step_with_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let mut events = EventFile {
            file: Appended::that_fails(folder.path()),
            held: 0,
        };
        let error = format!("{:#}", events.row(&Row::default()).unwrap_err());
        assert!(error.contains("read-only: cannot append"), "{error}");
    }
}
