//! The records of a `.wandb` file: messages of W&B's `wandb_internal.proto`, as many fields as an upload needs.
//!
//! ```text
//! Record   1 num · one of 2 history, 3 summary, 13 output_raw, 17 run, 18 exit, 21 header, 26 environment · 200 info
//! history  1 item*, 2 step { 1 num }        item  2 nested_key*, 16 value_json
//! summary  1 update*                        update as item
//! ```
//!
//! Numbers are those of wandb 0.22 and 0.31. Values travel as JSON text in both.

use std::time::Duration;

use serde_json::{Number, Value};

use crate::tracking::Row;
use crate::tracking::proto::{self, Message, Value as Wire};

const HISTORY: u32 = 2;
const SUMMARY: u32 = 3;
const OUTPUT_RAW: u32 = 13;
const RUN: u32 = 17;
const EXIT: u32 = 18;
const HEADER: u32 = 21;
const ENVIRONMENT: u32 = 26;
/// `_info`, which every record has.
const INFO: u32 = 200;

/// What a run is, on W&B's side.
#[derive(Debug, Clone, PartialEq)]
pub struct RunFacts<'c> {
    /// Eight letters and digits.
    pub id: &'c str,
    /// Project that the run goes into.
    pub project: &'c str,
    /// User or team; absent: the default of whoever uploads.
    pub entity: Option<&'c str>,
    /// Name that is shown.
    pub name: &'c str,
    /// Labels.
    pub tags: &'c [String],
    /// The resolved run file.
    pub config: &'c serde_json::Map<String, Value>,
    /// Commit of the repository around the current directory.
    pub commit: Option<&'c str>,
    /// When the run began, since 1970.
    pub started: Duration,
}

/// What a record holds, as far as a run that goes on has to know.
#[derive(Debug, Clone, PartialEq)]
pub enum Kind {
    /// Numbers of a step.
    History {
        /// The step.
        step: u64,
        /// Seconds that the run had worked.
        runtime: f64,
    },
    /// Numbers of the whole run, by name, as JSON.
    Summary(Vec<(String, String)>),
    /// A line that the run said.
    Output(String),
    /// The run's start, since 1970.
    Run(Duration),
    /// The end, or a part of it.
    End,
    /// Anything else.
    Other,
}

/// Who wrote the file.
pub fn header() -> Message {
    let producer = concat!("dflash-train ", env!("CARGO_PKG_VERSION"));
    Message::new().message(HEADER, &Message::new().message(1, &Message::new().text(1, producer)))
}

/// The run, with the whole of its configuration.
pub fn run(facts: &RunFacts<'_>) -> Message {
    let config = facts.config.iter().fold(Message::new(), |config, (key, value)| {
        config.message(1, &Message::new().text(1, key).text(16, &value.to_string()))
    });
    let mut run = Message::new().text(1, facts.id);
    if let Some(entity) = facts.entity {
        run = run.text(2, entity);
    }
    run = run.text(3, facts.project).message(4, &config).text(8, facts.name);
    run = facts.tags.iter().fold(run, |run, tag| run.text(10, tag));
    run = run.message(17, &timestamp(facts.started));
    if let Some(commit) = facts.commit {
        run = run.message(21, &Message::new().text(2, commit));
    }
    Message::new().message(RUN, &run)
}

/// The program and the machine; no names, no environment variables, no arguments.
pub fn environment(os: &str, started: Duration, cores: u64, commit: Option<&str>) -> Message {
    let mut environment = Message::new()
        .text(1, os)
        .message(3, &timestamp(started))
        .text(6, "dflash-train");
    if let Some(commit) = commit {
        environment = environment.message(9, &Message::new().text(2, commit));
    }
    environment = environment.integer(17, cores).text(199, "dflash");
    Message::new().message(ENVIRONMENT, &environment)
}

/// The numbers of a step, after `runtime` seconds of work.
pub fn history(row: &Row, now: Duration, runtime: f64) -> Message {
    let items = row_items(row, now, runtime).fold(Message::new(), |items, (name, value)| {
        items.message(1, &item(&name, &value))
    });
    Message::new().message(HISTORY, &items.message(2, &Message::new().integer(1, row.step)))
}

/// The same numbers as the run's latest.
pub fn latest(row: &Row, now: Duration, runtime: f64) -> Message {
    summary(row_items(row, now, runtime))
}

/// Numbers of the whole run.
pub fn summary(values: impl Iterator<Item = (String, Number)>) -> Message {
    let updates = values.fold(Message::new(), |updates, (name, value)| {
        updates.message(1, &item(&name, &value))
    });
    Message::new().message(SUMMARY, &updates)
}

/// A line that the run said.
pub fn output(line: &str, now: Duration) -> Message {
    // output type 1, stdout: W&B marks every line of stderr as an error
    let output = Message::new().integer(1, 1).message(2, &timestamp(now)).text(3, line);
    Message::new().message(OUTPUT_RAW, &output)
}

/// Seconds of work as W&B shows them, `_wandb.runtime` of the summary; part of the end.
pub fn worked(runtime: f64) -> Message {
    let update = Message::new()
        .text(2, "_wandb")
        .text(2, "runtime")
        .text(16, &(runtime as u64).to_string());
    Message::new().message(SUMMARY, &Message::new().message(1, &update))
}

/// The end of the process, after `runtime` seconds of work.
pub fn exit(code: i32, runtime: f64) -> Message {
    let exit = Message::new().signed(1, code.into()).integer(2, runtime as u64);
    Message::new().message(EXIT, &exit)
}

/// A record of the run `id`, the `number`-th of its file.
pub fn numbered(record: Message, number: u64, id: &str) -> Vec<u8> {
    Message::new()
        .integer(1, number)
        .append(record)
        .message(INFO, &Message::new().text(1, id))
        .into_bytes()
}

/// What a record holds.
pub fn kind(record: &[u8]) -> Kind {
    let of = |field| proto::field(record, field).and_then(Wire::bytes);
    if let Some(history) = of(HISTORY) {
        let step = proto::field(history, 2)
            .and_then(Wire::bytes)
            .and_then(|step| proto::field(step, 1)?.integer());
        let runtime = items(history).into_iter().find(|(name, _)| name == "_runtime");
        return Kind::History {
            step: step.unwrap_or(0),
            runtime: runtime.and_then(|(_, json)| json.parse().ok()).unwrap_or(0.0),
        };
    }
    if let Some(summary) = of(SUMMARY) {
        let values = items(summary);
        let worked = matches!(values.as_slice(), [(name, _)] if name == "_wandb");
        return if worked { Kind::End } else { Kind::Summary(values) };
    }
    if let Some(output) = of(OUTPUT_RAW) {
        return Kind::Output(text(output, 3));
    }
    if let Some(run) = of(RUN) {
        let number = |field| {
            let started = proto::field(run, 17)?.bytes()?;
            proto::field(started, field)?.integer()
        };
        let nanos = number(2).unwrap_or(0) as u32;
        return Kind::Run(Duration::new(number(1).unwrap_or(0), nanos));
    }
    if of(EXIT).is_some() { Kind::End } else { Kind::Other }
}

fn row_items(row: &Row, now: Duration, runtime: f64) -> impl Iterator<Item = (String, Number)> {
    let own = [
        ("_step", Some(row.step.into())),
        ("_timestamp", Number::from_f64(now.as_secs_f64())),
        ("_runtime", Number::from_f64(runtime)),
    ];
    let own = own
        .into_iter()
        .filter_map(|(name, value)| Some((name.to_owned(), value?)));
    own.chain(row.values.iter().cloned())
}

/// A name and its value. The name is one nested key: W&B would split a plain `key` at its dots.
fn item(name: &str, value: &Number) -> Message {
    Message::new().text(2, name).text(16, &value.to_string())
}

fn items(message: &[u8]) -> Vec<(String, String)> {
    let fields = proto::fields(message).unwrap_or_default().into_iter();
    fields
        .filter_map(|(field, value)| (field == 1).then(|| value.bytes()).flatten())
        .map(|item| (text(item, 2), text(item, 16)))
        .collect()
}

fn text(message: &[u8], field: u32) -> String {
    let bytes = proto::field(message, field).and_then(Wire::bytes).unwrap_or_default();
    String::from_utf8_lossy(bytes).into_owned()
}

/// `google.protobuf.Timestamp`.
fn timestamp(time: Duration) -> Message {
    Message::new()
        .integer(1, time.as_secs())
        .integer(2, u64::from(time.subsec_nanos()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tracking::wandb::log;

    /// What `scripts/fixtures/tracking.py` wrote with W&B's messages and writer: our bytes, and read back.
    #[test]
    fn a_log_has_the_bytes_of_wandbs_own_writer() {
        let started = Duration::new(1_796_257_349, 486_538_000);
        let later = Duration::new(1_796_257_351, 500_000_000);
        let number = |number| Number::from_f64(number).unwrap();
        let values = [
            ("train/loss", number(0.5)),
            ("train/slots", 12.into()),
            ("validation/accept_at_pos/01", number(0.25)),
        ];
        let row = Row {
            step: 301,
            values: values.map(|(name, value)| (name.to_owned(), value)).to_vec(),
        };
        let config = serde_json::json!({"seed": 1, "train": {"lr": 0.001}});
        let line = "x".repeat(40_000) + "\n";
        let facts = RunFacts {
            id: "abcd1234",
            project: "dflash",
            entity: Some("team"),
            name: "a run",
            tags: &["one".to_owned(), "two".to_owned()],
            config: config.as_object().unwrap(),
            commit: Some("c0ffee"),
            started,
        };
        let messages = [
            header(),
            run(&facts),
            environment("linux-x86_64", started, 2, Some("c0ffee")),
            history(&row, later, 2.25),
            latest(&row, later, 2.25),
            output(&line, later),
            worked(2.25),
            exit(143, 2.25),
        ];
        let (mut ours, mut position) = (log::HEAD.to_vec(), log::HEAD.len());
        for (record, number) in messages.into_iter().zip(1..) {
            log::append(&mut ours, &mut position, &numbered(record, number, "abcd1234"));
        }
        let theirs = include_bytes!("../../../tests/fixtures/tracking/run.wandb");
        assert!(
            ours == theirs,
            "the first difference is at {:?}",
            ours.iter().zip(theirs).position(|(a, b)| a != b)
        );

        let kinds: Vec<Kind> = log::records(theirs)
            .unwrap()
            .iter()
            .map(|record| kind(record))
            .collect();
        let summary = [
            "_step 301",
            "_timestamp 1796257351.5",
            "_runtime 2.25",
            "train/loss 0.5",
            "train/slots 12",
        ];
        let mut summary = summary.to_vec();
        summary.push("validation/accept_at_pos/01 0.25");
        let pair = |text: &str| {
            text.split_once(' ')
                .map(|(name, value)| (name.to_owned(), value.to_owned()))
                .unwrap()
        };
        let step = Kind::History {
            step: 301,
            runtime: 2.25,
        };
        let expected = [
            Kind::Other,
            Kind::Run(started),
            Kind::Other,
            step,
            Kind::Summary(summary.into_iter().map(pair).collect()),
            Kind::Output(line),
            Kind::End,
            Kind::End,
        ];
        assert_eq!(kinds, expected);
    }
}
