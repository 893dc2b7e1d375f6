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
//! Numbers are f32 there. TFRecord: <https://www.tensorflow.org/tutorials/load_data/tfrecord>; messages:
//! `tensorboard/compat/proto/{event,summary}.proto` in github.com/tensorflow/tensorboard.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::{Context, Result};
use crc::{CRC_32_ISCSI, Crc};

use super::appended::Appended;
use super::clock;
use super::proto::Message;
use super::{Row, Tracker};

/// What precedes the seconds in a file's name; readers look for `tfevents`.
const NAME: &str = "events.out.tfevents.";
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
}

impl EventFile {
    /// Begins an event file in `folder`. With `after`, a training that goes on after that step: later steps of earlier
    /// files no longer count.
    pub fn create(folder: &Path, after: Option<u64>) -> Result<Self> {
        fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))?;
        let mut events = Self {
            file: Appended::open(&next_name(folder)?)?,
        };
        events.write(version)?;
        if let Some(after) = after {
            events.write(|time| restart(time, after + 1))?;
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
    fn row(&mut self, row: &Row) -> Result<()> {
        self.write(|time| scalars(time, row))
    }

    fn summary(&mut self, row: &Row) -> Result<()> {
        self.row(row)
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
    let mut seconds = clock::since_epoch(SystemTime::now()).as_secs();
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let name = entry?.file_name();
        let existing = name
            .to_str()
            .and_then(|name| name.strip_prefix(NAME)?.split('.').next()?.parse::<u64>().ok());
        seconds = seconds.max(existing.map_or(0, |existing| existing + 1));
    }
    Ok(folder.join(format!("{NAME}{seconds:010}.dflash")))
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
        fs::write(folder.path().join(format!("{NAME}9000000000.other.host")), "").unwrap();
        let names: Vec<PathBuf> = (0..3)
            .map(|_| EventFile::create(folder.path(), None).unwrap().file.path().to_owned())
            .collect();
        let expected = [1, 2, 3].map(|i| folder.path().join(format!("{NAME}900000000{i}.dflash")));
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

    #[cfg(target_os = "linux")]
    #[test]
    fn a_full_disk_ends_the_step_with_an_error() {
        let mut events = EventFile {
            file: Appended::open(Path::new("/dev/full")).unwrap(),
        };
        let error = format!("{:#}", events.row(&Row::default()).unwrap_err());
        assert!(error.starts_with("/dev/full: "), "{error}");
    }
}
