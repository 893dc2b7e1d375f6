//! Conversations from JSONL or Parquet: `messages` with role and content, or ShareGPT `conversations` with from and
//! value.
//!
//! A row is one JSON object, or a row of columns of these names:
//! ```json
//! {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}],
//!  "tools": [...], "enable_thinking": false, "finish_reason": "stop", "source": "anything"}
//! ```
//! Messages keep every field they came with (`reasoning_content`, `tool_calls`, ...), because the chat template
//! decides which of them it reads. A role that is not known is an error, never quietly an assistant.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde::Serialize;
use serde_json::{Map, Value};

use crate::jsonl::{kind, read_rows};
use crate::parquet_file::{self, is_parquet};

/// The roles that a message may have.
pub const ROLES: [&str; 4] = ["system", "user", "assistant", "tool"];

/// One message, with all fields of its row.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(transparent)]
pub struct Message {
    fields: Map<String, Value>,
}

impl Message {
    /// A plain text message.
    ///
    /// # Errors
    /// When the role is none of [`ROLES`].
    pub fn new(role: &str, content: &str) -> Result<Self> {
        ensure!(ROLES.contains(&role), "role {role:?}: expected one of {ROLES:?}");
        Ok(Self::of_known_role(role, content))
    }

    /// What a user says.
    pub fn user(content: &str) -> Self {
        Self::of_known_role("user", content)
    }

    fn of_known_role(role: &str, content: &str) -> Self {
        let mut fields = Map::new();
        fields.insert("role".to_owned(), role.into());
        fields.insert("content".to_owned(), content.into());
        Self { fields }
    }

    /// One of [`ROLES`].
    pub fn role(&self) -> &str {
        self.text("role")
    }

    /// The content when it is plain text, else "".
    pub fn content(&self) -> &str {
        self.text("content")
    }

    /// Every field as the template sees it.
    pub fn fields(&self) -> &Map<String, Value> {
        &self.fields
    }

    fn text(&self, name: &str) -> &str {
        self.fields.get(name).and_then(Value::as_str).unwrap_or("")
    }
}

/// How the last assistant turn of a generated row came to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Finish {
    /// The target wrote its stop token, or nothing is said about it.
    #[default]
    Stop,
    /// The token limit cut the turn: the stop token that the template adds was never the target's own.
    Length,
}

/// One row.
#[derive(Debug, Clone, PartialEq)]
pub struct Conversation {
    /// The messages, oldest first; at least one.
    pub messages: Vec<Message>,
    /// Tool definitions for the template.
    pub tools: Option<Value>,
    /// Thinking switch of this row; stands above the run's own.
    pub enable_thinking: Option<bool>,
    /// Whether the last assistant turn is complete (`finish_reason`: `stop`, `tool_calls` or `length`).
    pub finish: Finish,
    /// All other fields of the row, untouched.
    pub fields: Map<String, Value>,
}

impl Conversation {
    /// A conversation of these messages and nothing else.
    pub fn of(messages: Vec<Message>) -> Self {
        Self {
            messages,
            tools: None,
            enable_thinking: None,
            finish: Finish::Stop,
            fields: Map::new(),
        }
    }

    /// Reads one row. Errors name the field, what was expected and what was found.
    pub fn from_json(row: Value) -> Result<Self> {
        let Value::Object(mut row) = row else {
            bail!("expected a JSON object, found {}", kind(&row))
        };
        let messages = match (row.shift_remove("messages"), row.shift_remove("conversations")) {
            (Some(list), None) => messages(list, "messages", "role", "content")?,
            (None, Some(list)) => messages(list, "conversations", "from", "value")?,
            (Some(_), Some(_)) => bail!("both messages and conversations: expected one of them"),
            (None, None) => bail!("neither messages nor conversations"),
        };
        let enable_thinking = match row.shift_remove("enable_thinking") {
            None | Some(Value::Null) => None,
            Some(Value::Bool(on)) => Some(on),
            Some(other) => bail!("enable_thinking: expected true or false, found {}", kind(&other)),
        };
        let finish = match row.shift_remove("finish_reason") {
            None | Some(Value::Null) => Finish::Stop,
            Some(Value::String(reason)) => match reason.as_str() {
                "stop" | "tool_calls" => Finish::Stop,
                "length" => Finish::Length,
                other => bail!("finish_reason: expected stop, tool_calls or length, found {other:?}"),
            },
            Some(other) => bail!("finish_reason: expected a string, found {}", kind(&other)),
        };
        Ok(Self {
            messages,
            tools: tools(row.shift_remove("tools"))?,
            enable_thinking,
            finish,
            fields: row,
        })
    }
}

/// Reads all rows of a file with their 1-based numbers: a `.parquet` file, or else JSONL, whose numbers are lines.
///
/// In Parquet a null is a field that the row does not have, because a column exists for every row.
///
/// # Errors
/// When the file cannot be read or has no rows, and when a row is no conversation; with file and row.
pub fn read_conversations(path: &Path) -> Result<Vec<(usize, Conversation)>> {
    if !is_parquet(path) {
        return read_jsonl(path);
    }
    let table = parquet_file::read(path, None)?;
    ensure!(
        table
            .columns
            .iter()
            .any(|name| name == "messages" || name == "conversations"),
        "{}: expected a column messages or conversations, found {}",
        path.display(),
        table.columns.join(", ")
    );
    ensure!(!table.rows.is_empty(), "{}: no rows", path.display());
    let rows = table.rows.into_iter().enumerate().map(|(index, mut row)| {
        row.retain(|_, value| !value.is_null());
        let conversation = Conversation::from_json(Value::Object(row))
            .with_context(|| format!("{}: row {}", path.display(), index + 1))?;
        Ok((index + 1, conversation))
    });
    rows.collect()
}

/// Reads all rows of a JSONL file with their 1-based line numbers. Blank lines are skipped.
///
/// # Errors
/// As [`read_conversations`].
pub fn read_jsonl(path: &Path) -> Result<Vec<(usize, Conversation)>> {
    let rows = read_rows(path)?.into_iter().map(|(number, row)| {
        let row = Conversation::from_json(row).with_context(|| format!("{}:{number}", path.display()))?;
        Ok((number, row))
    });
    rows.collect()
}

fn messages(list: Value, list_name: &str, role_name: &str, content_name: &str) -> Result<Vec<Message>> {
    let Value::Array(list) = list else {
        bail!("{list_name}: expected a list, found {}", kind(&list))
    };
    ensure!(!list.is_empty(), "{list_name}: expected at least one message");
    list.into_iter()
        .enumerate()
        .map(|(i, item)| message(item, role_name, content_name).with_context(|| format!("{list_name}[{i}]")))
        .collect()
}

fn message(item: Value, role_name: &str, content_name: &str) -> Result<Message> {
    let Value::Object(mut fields) = item else {
        bail!("expected an object, found {}", kind(&item))
    };
    let role = match fields.shift_remove(role_name) {
        Some(Value::String(name)) => known_role(&name, role_name)?,
        Some(other) => bail!("{role_name}: expected a string, found {}", kind(&other)),
        None => bail!("{role_name}: missing"),
    };
    let content = match fields.shift_remove(content_name) {
        Some(content) => text_content(content).with_context(|| content_name.to_owned())?,
        // a turn may consist of a call or of a thought alone
        None if fields.contains_key("tool_calls") || fields.contains_key("reasoning_content") => Value::Null,
        None => bail!("{content_name}: missing"),
    };
    if let Some(calls) = fields.get_mut("tool_calls") {
        open_arguments(calls)?;
    }
    let mut ordered = Map::new();
    ordered.insert("role".to_owned(), role.into());
    ordered.insert("content".to_owned(), content);
    ordered.extend(fields);
    Ok(Message { fields: ordered })
}

fn known_role(name: &str, field: &str) -> Result<&'static str> {
    Ok(match (name, field) {
        ("human", "from") => "user",
        ("gpt", "from") => "assistant",
        _ => match ROLES.iter().find(|role| **role == name) {
            Some(role) => role,
            None if field == "from" => bail!("from: unknown role {name:?}, expected human, gpt or one of {ROLES:?}"),
            None => bail!("role: unknown role {name:?}, expected one of {ROLES:?}"),
        },
    })
}

/// Text, null, or a list of text parts. Pictures and sounds cannot be rendered for a text model.
fn text_content(content: Value) -> Result<Value> {
    let Value::Array(parts) = &content else {
        ensure!(
            content.is_string() || content.is_null(),
            "expected text, null or a list of parts, found {}",
            kind(&content)
        );
        return Ok(content);
    };
    for (i, part) in parts.iter().enumerate() {
        ensure!(
            part.get("type").and_then(Value::as_str) == Some("text") && part.get("text").is_some_and(Value::is_string),
            "part {i}: expected {{\"type\": \"text\", \"text\": ...}}, found {part}"
        );
    }
    Ok(content)
}

/// Templates walk over call arguments as a mapping, while chat servers hand them out as a string of JSON.
/// A string that is no JSON object stays as it is; the template says what it thinks of it.
fn open_arguments(calls: &mut Value) -> Result<()> {
    let calls = match calls {
        Value::Array(calls) => calls,
        Value::Null => return Ok(()),
        other => bail!("tool_calls: expected a list, found {}", kind(other)),
    };
    for call in calls {
        let holder = match call.get("function") {
            Some(_) => &mut call["function"],
            None => call,
        };
        let parsed = match holder.get("arguments").and_then(Value::as_str) {
            Some(text) => serde_json::from_str::<Map<String, Value>>(text).ok(),
            None => None,
        };
        if let (Some(object), Some(arguments)) = (parsed, holder.get_mut("arguments")) {
            *arguments = Value::Object(object);
        }
    }
    Ok(())
}

fn tools(tools: Option<Value>) -> Result<Option<Value>> {
    let list = match tools {
        None | Some(Value::Null) => return Ok(None),
        // some data sets store the list as text so that their columns have one type
        Some(Value::String(text)) if text.trim().is_empty() => return Ok(None),
        Some(Value::String(text)) => serde_json::from_str(&text).context("tools: the string is not JSON")?,
        Some(list) => list,
    };
    match list {
        Value::Array(list) if list.is_empty() => Ok(None),
        Value::Array(_) => Ok(Some(list)),
        other => bail!("tools: expected a list, found {}", kind(&other)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn error_of(row: Value) -> String {
        format!("{:#}", Conversation::from_json(row).unwrap_err())
    }

    #[test]
    fn both_spellings_give_the_same_messages() {
        let plain = json!({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"},
            {"role": "assistant", "content": "a", "reasoning_content": "r"}], "source": "x"});
        let share = json!({"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "u"},
            {"from": "gpt", "value": "a", "reasoning_content": "r"}], "source": "x"});
        let plain = Conversation::from_json(plain).unwrap();
        assert_eq!(plain, Conversation::from_json(share).unwrap());
        assert_eq!(plain.messages[2].fields()["reasoning_content"], "r");
        assert_eq!(plain.fields["source"], "x");
    }

    #[test]
    fn an_unknown_role_is_refused_by_name() {
        let error =
            error_of(json!({"conversations": [{"from": "human", "value": "u"}, {"from": "bard", "value": "a"}]}));
        assert!(
            error.contains("conversations[1]") && error.contains("\"bard\""),
            "{error}"
        );
        assert!(error_of(json!({"messages": [{"role": "gpt", "content": "a"}]})).contains("\"gpt\""));
    }

    #[test]
    fn broken_rows_name_the_field() {
        for (row, expected) in [
            (json!([1]), "expected a JSON object"),
            (json!({"text": "a"}), "neither messages nor conversations"),
            (json!({"messages": []}), "at least one message"),
            (json!({"messages": "hi"}), "messages: expected a list, found a string"),
            (json!({"messages": [{"role": "user"}]}), "messages[0]: content: missing"),
            (json!({"messages": [{"content": "x"}]}), "messages[0]: role: missing"),
            (
                json!({"messages": [{"role": "user", "content": 3}]}),
                "content: expected text",
            ),
            (
                json!({"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
                "part 0",
            ),
            (
                json!({"messages": [{"role": "user", "content": "x"}], "enable_thinking": "no"}),
                "enable_thinking",
            ),
            (
                json!({"messages": [{"role": "user", "content": "x"}], "finish_reason": "dunno"}),
                "\"dunno\"",
            ),
            (
                json!({"messages": [{"role": "user", "content": "x"}], "tools": {}}),
                "tools: expected a list",
            ),
        ] {
            let error = error_of(row);
            assert!(error.contains(expected), "{expected:?} not in {error:?}");
        }
    }

    #[test]
    fn call_arguments_open_up_and_a_call_needs_no_content() {
        let row = json!({"messages": [{"role": "assistant", "tool_calls": [
            {"function": {"name": "f", "arguments": "{\"b\": 1, \"a\": [2]}"}}, {"name": "g", "arguments": "oops"}]}]});
        let message = &Conversation::from_json(row).unwrap().messages[0];
        let calls = &message.fields()["tool_calls"];
        assert_eq!(calls[0]["function"]["arguments"], json!({"b": 1, "a": [2]}));
        assert_eq!(calls[1]["arguments"], "oops");
        assert!(message.fields()["content"].is_null());
    }

    #[test]
    fn errors_of_a_file_name_path_and_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rows.jsonl");
        let good = r#"{"messages": [{"role": "user", "content": "x"}]}"#;
        std::fs::write(&path, format!("\u{feff}{good}\n\n{good}\n")).unwrap();
        let lines: Vec<usize> = read_jsonl(&path).unwrap().iter().map(|(line, _)| *line).collect();
        assert_eq!(lines, [1, 3]);
        std::fs::write(&path, format!("{good}\n{{\"messages\": \n")).unwrap();
        let error = format!("{:#}", read_jsonl(&path).unwrap_err());
        assert!(error.contains("rows.jsonl:2") && error.contains("not JSON"), "{error}");
        std::fs::write(&path, "\n").unwrap();
        assert!(format!("{:#}", read_jsonl(&path).unwrap_err()).contains("no rows"));
    }

    #[test]
    fn parquet_rows_are_the_same_conversations_with_the_same_checks() {
        use crate::parquet_file::tests::{CHAT, Leaf, write};
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.parquet");
        let compression = parquet::basic::Compression::SNAPPY;
        let rows = |roles: &[&str]| {
            let group: &[Leaf<'_>] = &[
                (roles, &[4, 4, 4], &[0, 1, 0]),
                (&["a", "b", "c"], &[4, 4, 4], &[0, 1, 0]),
                (&["t"], &[3, 4, 3], &[0, 1, 0]),
                (&["web"], &[1, 0], &[0, 0]),
            ];
            write(&path, CHAT, compression, &[group]);
            read_conversations(&path)
        };
        let read_rows = rows(&["user", "assistant", "user"]).unwrap();
        let lines = [
            json!({"messages": [{"role": "user", "content": "a"},
                {"role": "assistant", "content": "b", "reasoning_content": "t"}], "source": "web"}),
            json!({"messages": [{"role": "user", "content": "c"}]}),
        ];
        let expected = lines.map(|row| Conversation::from_json(row).unwrap());
        assert_eq!(read_rows, [1, 2].into_iter().zip(expected).collect::<Vec<_>>());
        let error = format!("{:#}", rows(&["user", "assistant", "bard"]).unwrap_err());
        assert!(
            error.contains("a.parquet: row 2: messages[0]: role: unknown role \"bard\""),
            "{error}"
        );
        write(&path, "message m { optional binary text (UTF8); }", compression, &[]);
        let error = format!("{:#}", read_conversations(&path).unwrap_err());
        assert!(
            error.contains("a.parquet: expected a column messages or conversations, found text"),
            "{error}"
        );
        write(&path, CHAT, compression, &[]);
        assert!(format!("{:#}", read_conversations(&path).unwrap_err()).contains("a.parquet: no rows"));
    }
}
