//! The checkpoint's own chat template, rendered as `transformers` renders it.
//!
//! Jinja with `trim_blocks` and `lstrip_blocks`, Python string and mapping methods, `raise_exception`,
//! `strftime_now` (UTC), `tojson` with Python's text, `break`/`continue`; `{% generation %}` marks are accepted and
//! have no effect. Nothing is escaped for HTML. Special tokens of `tokenizer_config.json` stand in the context.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, anyhow, bail, ensure};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, escape_formatter};
use serde_json::Value;

use crate::conversation::Message;
use crate::files::{read_json, read_text, sha256_hex};
use crate::jsonl::kind;
use crate::python::{JsonStyle, float_repr, json_dumps, strftime};

/// Name under which the only template is stored; part of every error of the engine.
const NAME: &str = "chat_template";

/// Keys of `tokenizer_config.json` that templates may read.
const SPECIAL_TOKENS: [&str; 7] = [
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
];

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    engine: Environment<'static>,
    special_tokens: BTreeMap<String, String>,
    hash: String,
}

impl ChatTemplate {
    /// Loads the template of a checkpoint folder: `chat_template.jinja`, else `chat_template` of
    /// `tokenizer_config.json` (a string, or a list of named ones of which `default` is taken).
    ///
    /// # Errors
    /// When there is none, it is blank or does not compile; with the file.
    pub fn load(folder: &Path) -> Result<Self> {
        let config_path = folder.join("tokenizer_config.json");
        let config = if config_path.exists() {
            read_json(&config_path)?
        } else {
            Value::Null
        };
        let jinja_path = folder.join("chat_template.jinja");
        let (text, origin) = if jinja_path.exists() {
            (read_text(&jinja_path)?, jinja_path)
        } else {
            let text = template_of_config(&config).with_context(|| config_path.display().to_string())?;
            (text, config_path)
        };
        ensure!(
            !text.trim().is_empty(),
            "{}: chat_template: expected a Jinja template, found {}",
            origin.display(),
            if text.is_empty() {
                "an empty text"
            } else {
                "only white space"
            }
        );
        let special_tokens = special_tokens(&config);
        Self::new(&text, special_tokens).with_context(|| origin.display().to_string())
    }

    /// Compiles a template text. `strftime_now` answers with the time of this call.
    pub fn new(text: &str, special_tokens: BTreeMap<String, String>) -> Result<Self> {
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |age| age.as_secs());
        let mut engine = Environment::new();
        engine.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
        // its reports copy the whole template into every error
        engine.set_debug(false);
        engine.set_auto_escape_callback(|_| AutoEscape::None);
        engine.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        engine.set_formatter(|out, state, value| escape_formatter(out, state, &with_python_float(value)));
        engine.add_filter("string", |value: minijinja::Value| {
            with_python_float(&value).to_string()
        });
        engine.add_filter("tojson", to_json);
        engine.add_function("raise_exception", raise_exception);
        engine.add_function("strftime_now", move |format: &str| {
            strftime(format, now).ok_or_else(|| {
                Error::new(
                    ErrorKind::InvalidOperation,
                    format!("strftime_now: unknown code in {format:?}"),
                )
            })
        });
        engine
            .add_template_owned(NAME, without_generation_marks(text))
            .map_err(|error| anyhow!("chat template does not compile: {error:#}"))?;
        Ok(Self {
            engine,
            special_tokens,
            hash: sha256_hex(text.as_bytes()),
        })
    }

    /// SHA-256 of the template text.
    pub fn hash(&self) -> &str {
        &self.hash
    }

    /// Renders messages; with `add_generation_prompt` the text ends where the assistant's own tokens begin.
    ///
    /// `thinking` becomes `enable_thinking`, which stays undefined for `None`: the template then decides by itself.
    ///
    /// # Errors
    /// With the template's own message when it refuses the conversation.
    pub fn render(
        &self,
        messages: &[Message],
        add_generation_prompt: bool,
        thinking: Option<bool>,
        tools: Option<&Value>,
    ) -> Result<String> {
        let mut context: BTreeMap<&str, minijinja::Value> = self
            .special_tokens
            .iter()
            .map(|(name, token)| (name.as_str(), token.as_str().into()))
            .collect();
        context.insert("messages", Serde(messages).into());
        context.insert("add_generation_prompt", add_generation_prompt.into());
        // as in transformers: defined, and none when there are none
        context.insert("tools", Serde(tools).into());
        context.insert("documents", minijinja::Value::from(()));
        if let Some(on) = thinking {
            context.insert("enable_thinking", on.into());
        }
        self.engine
            .get_template(NAME)
            .and_then(|template| template.render(context))
            .map_err(|error| anyhow!("{error:#}"))
    }
}

fn template_of_config(config: &Value) -> Result<String> {
    match config.get("chat_template") {
        Some(Value::String(text)) => Ok(text.clone()),
        Some(Value::Array(named)) => named
            .iter()
            .find(|entry| entry.get("name").and_then(Value::as_str) == Some("default"))
            .and_then(|entry| entry.get("template").and_then(Value::as_str))
            .map(str::to_owned)
            .context("chat_template: a list without an entry named \"default\""),
        Some(other) => bail!(
            "chat_template: expected a string or a list of named templates, found {}",
            kind(other)
        ),
        None => bail!("no chat_template here, and no chat_template.jinja beside it"),
    }
}

fn special_tokens(config: &Value) -> BTreeMap<String, String> {
    SPECIAL_TOKENS
        .iter()
        .filter_map(|name| {
            let entry = config.get(name)?;
            let token = entry.as_str().or_else(|| entry.get("content")?.as_str())?;
            Some(((*name).to_owned(), token.to_owned()))
        })
        .collect()
}

/// `{% generation %}` ... `{% endgeneration %}` marks the assistant's tokens for another way of masking. The mask
/// here comes from two renderings, so the marks become a condition that always holds.
fn without_generation_marks(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find("{%") {
        let (before, tag_on) = rest.split_at(start);
        plain.push_str(before);
        let Some(length) = tag_on.find("%}").map(|end| end + 2) else {
            rest = tag_on;
            break;
        };
        let (tag, after) = tag_on.split_at(length);
        match tag[2..length - 2].trim_matches(|c: char| c == '-' || c == '+' || c.is_whitespace()) {
            "generation" => plain.push_str(&tag.replacen("generation", "if true", 1)),
            "endgeneration" => plain.push_str(&tag.replacen("endgeneration", "endif", 1)),
            _ => plain.push_str(tag),
        }
        rest = after;
    }
    plain.push_str(rest);
    plain
}

/// Printed floats read as Python's (1e-07, not 0.0000001). Inside printed lists the engine's own spelling stays.
fn with_python_float(value: &minijinja::Value) -> Cow<'_, minijinja::Value> {
    if value.is_number()
        && !value.is_integer()
        && let Ok(float) = f64::try_from(value.clone())
    {
        return Cow::Owned(float_repr(float).into());
    }
    Cow::Borrowed(value)
}

fn raise_exception(message: &str) -> Result<String, Error> {
    Err(Error::new(
        ErrorKind::InvalidOperation,
        format!("the template refuses: {message}"),
    ))
}

#[expect(
    clippy::needless_pass_by_value,
    reason = "the engine hands filters their arguments by value"
)]
fn to_json(value: minijinja::Value, arguments: Kwargs) -> Result<String, Error> {
    let failed = |what: String| Error::new(ErrorKind::InvalidOperation, format!("tojson: {what}"));
    if value.is_undefined() {
        return Err(failed("the value is undefined".to_owned()));
    }
    let indent: Option<usize> = arguments.get("indent")?;
    let separators: Option<Vec<String>> = arguments.get("separators")?;
    let (item_separator, key_separator) = match separators.as_deref() {
        None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
        None => (", ".to_owned(), ": ".to_owned()),
        Some([item, key]) => (item.clone(), key.clone()),
        Some(other) => return Err(failed(format!("separators: expected two texts, found {}", other.len()))),
    };
    let style = JsonStyle {
        indent,
        sort_keys: arguments.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        ensure_ascii: arguments.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        item_separator,
        key_separator,
    };
    arguments.assert_all_used()?;
    let value = serde_json::to_value(&value).map_err(|error| failed(error.to_string()))?;
    Ok(json_dumps(&value, &style))
}
