//! Readers of event files and W&B logs that share nothing with the writers: checksums bit by bit, fields by the
//! schemas' numbers, and the rules by which TensorBoard and W&B put files together.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Values by step, by name.
pub(crate) type Curves = BTreeMap<String, BTreeMap<u64, f64>>;

/// The scalars of all event files of a folder as TensorBoard shows them, and its texts by tag.
pub(crate) fn event_files(folder: &Path) -> (Curves, BTreeMap<String, String>) {
    let (mut curves, mut texts) = (Curves::new(), BTreeMap::new());
    for path in sorted(folder) {
        let bytes = std::fs::read(&path).unwrap();
        let mut rest = bytes.as_slice();
        let mut first = true;
        while !rest.is_empty() {
            let length = u64::from_le_bytes(rest[..8].try_into().unwrap()) as usize;
            assert_eq!(
                le32(&rest[8..]),
                masked(crc(0x82f6_3b78, &rest[..8])),
                "{}",
                path.display()
            );
            let data = &rest[12..12 + length];
            assert_eq!(
                le32(&rest[12 + length..]),
                masked(crc(0x82f6_3b78, data)),
                "{}",
                path.display()
            );
            rest = &rest[16 + length..];
            let event = fields(data);
            if first {
                assert_eq!(event[&3][0], b"brain.Event:2");
                first = false;
            }
            let step = event.get(&2).map_or(0, |step| number(&step[0]));
            if let Some(session) = event.get(&7) {
                assert_eq!(number(&fields(&session[0])[&1][0]), 1, "only starts are written");
                for curve in curves.values_mut() {
                    curve.retain(|&at, _| at < step);
                }
            }
            let summary = event.get(&5).map(|summary| fields(&summary[0])).unwrap_or_default();
            for value in summary.values().flatten().map(|value| fields(value)) {
                let tag = text(&value[&1][0]);
                if let Some(float) = value.get(&2) {
                    let float = f32::from_le_bytes(float[0].as_slice().try_into().unwrap());
                    let before = curves.entry(tag).or_default().insert(step, float.into());
                    assert_eq!(before, None, "step {step} twice");
                } else {
                    texts.insert(tag, text(&fields(&value[&8][0])[&8][0]));
                }
            }
        }
    }
    (curves, texts)
}

/// A W&B log as `wandb sync` uploads it.
#[derive(Debug, Default)]
pub(crate) struct WandbLog {
    pub(crate) path: PathBuf,
    pub(crate) id: String,
    pub(crate) project: String,
    pub(crate) name: String,
    pub(crate) tags: Vec<String>,
    pub(crate) config: BTreeMap<String, serde_json::Value>,
    /// Numbers that a step logged, `_step`, `_runtime` and `_timestamp` among them.
    pub(crate) history: Curves,
    pub(crate) summary: BTreeMap<String, f64>,
    pub(crate) output: String,
    /// Exit code of the last end.
    pub(crate) exit: Option<u64>,
}

/// The one log in `run_dir/wandb`, up to its last whole record.
pub(crate) fn wandb_log(run_dir: &Path) -> WandbLog {
    let folders = sorted(&run_dir.join("wandb"));
    assert_eq!(folders.len(), 1, "{folders:?}");
    let folder_name = folders[0].file_name().unwrap().to_str().unwrap();
    let mut log = WandbLog {
        id: folder_name.rsplit('-').next().unwrap().to_owned(),
        ..WandbLog::default()
    };
    log.path = folders[0].join(format!("run-{}.wandb", log.id));
    let mut last_number = 0;
    for record in chunks(&std::fs::read(&log.path).unwrap()) {
        let record = fields(&record);
        assert!(log.exit.is_none(), "a record behind the end");
        assert_eq!(text(&fields(&record[&200][0])[&1][0]), log.id);
        let count = number(&record[&1][0]);
        assert!(count > last_number, "record {count} after {last_number}");
        last_number = count;
        let messages = record.iter().filter(|(field, _)| [2, 3, 13, 17, 18].contains(*field));
        for (field, message) in messages.map(|(field, values)| (field, fields(&values[0]))) {
            match field {
                2 => {
                    let step = number(&fields(&message[&2][0])[&1][0]);
                    for (name, value) in items(&message) {
                        let curve = log.history.entry(name).or_default();
                        assert!(
                            curve.last_key_value().is_none_or(|(&before, _)| before < step),
                            "step {step} is not later"
                        );
                        curve.insert(step, value);
                    }
                }
                3 => log.summary.extend(items(&message)),
                13 => log.output += &text(&message[&3][0]),
                17 => {
                    log.project = text(&message[&3][0]);
                    log.name = text(&message[&8][0]);
                    log.tags = message
                        .get(&10)
                        .iter()
                        .copied()
                        .flatten()
                        .map(|tag| text(tag))
                        .collect();
                    let entries = fields(&message[&4][0]).remove(&1).unwrap();
                    log.config = entries
                        .iter()
                        .map(|entry| fields(entry))
                        .map(|entry| {
                            (
                                text(&entry[&1][0]),
                                serde_json::from_str(&text(&entry[&16][0])).unwrap(),
                            )
                        })
                        .collect();
                }
                _ => log.exit = Some(number(&message[&1][0])),
            }
        }
    }
    log
}

/// Name and number of every item of a history or summary; nested names are joined by dots.
fn items(message: &Fields) -> Vec<(String, f64)> {
    let found = message[&1].iter().map(|item| fields(item));
    found
        .map(|item| {
            let name: Vec<String> = item[&2].iter().map(|key| text(key)).collect();
            (name.join("."), text(&item[&16][0]).parse().unwrap())
        })
        .collect()
}

/// Records of a log: seven bytes of head, then chunks that no block of 32 KiB cuts.
fn chunks(bytes: &[u8]) -> Vec<Vec<u8>> {
    assert_eq!(&bytes[..7], b":W&B\xe1\xbe\0");
    let (mut records, mut record, mut at) = (Vec::new(), Vec::new(), 7_usize);
    loop {
        if 32_768 - at % 32_768 < 7 {
            at = at.next_multiple_of(32_768);
        }
        let whole = bytes.get(at..at + 7).and_then(|head| {
            let length = usize::from(head[4]) + 256 * usize::from(head[5]);
            Some((head, bytes.get(at + 7..at + 7 + length)?))
        });
        let Some((head, data)) = whole else { return records };
        let checked = [&head[6..7], data].concat();
        assert_eq!(le32(head), crc(0xedb8_8320, &checked), "chunk at {at}");
        record.extend(data);
        // 1 is a whole record, 4 the last part of one
        if head[6] == 1 || head[6] == 4 {
            records.push(std::mem::take(&mut record));
        }
        at += 7 + data.len();
    }
}

type Fields = BTreeMap<u64, Vec<Vec<u8>>>;

/// Values of a protobuf message by field; varints as their eight bytes.
fn fields(mut message: &[u8]) -> Fields {
    let mut found = Fields::new();
    while !message.is_empty() {
        let tag = varint(&mut message);
        let length = match tag % 8 {
            0 => {
                let value = varint(&mut message).to_le_bytes().to_vec();
                found.entry(tag / 8).or_default().push(value);
                continue;
            }
            1 => 8,
            2 => varint(&mut message) as usize,
            5 => 4,
            other => panic!("wire type {other}"),
        };
        found.entry(tag / 8).or_default().push(message[..length].to_vec());
        message = &message[length..];
    }
    found
}

fn varint(message: &mut &[u8]) -> u64 {
    let end = message.iter().position(|byte| byte < &128).unwrap() + 1;
    let (bytes, rest) = message.split_at(end);
    *message = rest;
    bytes
        .iter()
        .rev()
        .fold(0, |value, byte| value * 128 + u64::from(byte % 128))
}

fn number(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(bytes.try_into().unwrap())
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn le32(bytes: &[u8]) -> u32 {
    u32::from_le_bytes(bytes[..4].try_into().unwrap())
}

/// A reflected CRC-32 by its definition.
fn crc(polynomial: u32, bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| (crc >> 1) ^ (polynomial * (crc & 1)))
    })
}

fn masked(crc: u32) -> u32 {
    crc.rotate_left(17).wrapping_add(0xa282_ead8)
}

fn sorted(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths
}
