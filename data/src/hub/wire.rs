//! Requests that the client has no call for: two questions that must be answered before an upload.
//!
//! The client asks them itself, but goes on whatever the answer: a large file that the hub does not take as a large one
//! would travel in the commit, all of it in memory.

use std::time::Duration;

use anyhow::{Context, Result};
use reqwest::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HeaderValue};
use serde_json::Value;

use super::failure::chain;
use super::{Connection, Failure, Kind};

/// Pauses before the second, third and fourth attempt.
const PAUSES: [Duration; 3] = [
    Duration::from_millis(200),
    Duration::from_millis(800),
    Duration::from_secs(3),
];

/// Sends JSON and reads JSON.
pub(super) struct Wire<'c> {
    connection: &'c Connection,
    client: reqwest::Client,
    runtime: tokio::runtime::Runtime,
}

impl<'c> Wire<'c> {
    /// Over a connection's address and token.
    ///
    /// # Errors
    /// When no client can be made.
    pub(super) fn new(connection: &'c Connection) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        Ok(Self {
            connection,
            client: reqwest::Client::builder().build().context("cannot set up a client")?,
            runtime: runtime.context("cannot set up a client")?,
        })
    }

    /// Posts `body` as `media` to a path below the hub's address, again when it fails in passing.
    ///
    /// # Errors
    /// About `subject`.
    pub(super) fn post(&self, path: &str, media: &'static str, body: &Value, subject: &str) -> Result<Value, Failure> {
        let mut pauses = PAUSES.iter();
        loop {
            let answer = self.runtime.block_on(self.attempt(path, media, body, subject));
            match (answer, pauses.next()) {
                (Err(failure), Some(pause)) if failure.kind.passes() => std::thread::sleep(*pause),
                (answer, _) => return answer,
            }
        }
    }

    async fn attempt(&self, path: &str, media: &'static str, body: &Value, subject: &str) -> Result<Value, Failure> {
        let failed = |kind: Kind, cause: &str| self.connection.worded(kind, false, subject, cause);
        let mut request = self
            .client
            .post(format!("{}/{path}", self.connection.endpoint))
            .header(ACCEPT, media)
            .header(CONTENT_TYPE, media)
            .body(body.to_string());
        if let Some(token) = &self.connection.token {
            let mut value = HeaderValue::from_str(&format!("Bearer {}", token.secret()))
                .map_err(|error| failed(Kind::Other, &error.to_string()))?;
            value.set_sensitive(true);
            request = request.header(AUTHORIZATION, value);
        }
        let unanswered = |error: reqwest::Error| failed(Kind::Unanswered, &chain(&error));
        let response = request.send().await.map_err(unanswered)?;
        let status = response.status();
        let text = response.text().await.map_err(unanswered)?;
        let value = serde_json::from_str::<Value>(&text);
        if !status.is_success() {
            let said = value
                .ok()
                .and_then(|value| Some(value.get("error")?.as_str()?.to_owned()));
            let cause = format!("HTTP {status} for {path}: {}", said.unwrap_or_default());
            return Err(failed(
                Kind::of_status(status.as_u16()),
                cause.trim_end_matches([':', ' ']),
            ));
        }
        value.map_err(|error| failed(Kind::Other, &format!("{path}: expected JSON: {error}")))
    }
}
