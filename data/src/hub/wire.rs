//! Requests to the hub, each with an end: to the waiting, to the size of an answer, and to how often it is asked.
//!
//! The client is left with the one thing that it does best, the commit with its large files. Its other calls read an
//! answer of any size into memory, and it takes names of files from headers.

use std::time::Duration;

use anyhow::{Context, Result};
use reqwest::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderValue, LINK};
use reqwest::redirect::{Attempt, Policy};
use reqwest::{Method, Response};
use serde_json::Value;

use super::failure::chain;
use super::{Connection, Failure, Kind};

/// Pauses before the second, third and fourth attempt.
pub(super) const PAUSES: [Duration; 3] = [
    Duration::from_millis(200),
    Duration::from_millis(800),
    Duration::from_secs(3),
];

/// How long a connection may take to be made.
const CONNECT: Duration = Duration::from_secs(10);

/// The longest that an answer in JSON, or the beginning of a file, may take: a server that sends a byte now and then is
/// never silent.
const LONGEST: Duration = Duration::from_secs(300);

/// The slowest that a file may come, in bytes a second, once [`LONGEST`] is over.
const SLOWEST: u64 = 16 << 10;

/// The largest answer in JSON, in bytes.
pub(super) const MOST_JSON: u64 = 64 << 20;

/// The longest refusal that is read, in bytes.
const MOST_SAID: u64 = 64 << 10;

const REDIRECTS: usize = 10;

const JSON: &str = "application/json";

/// Takes a file's bytes as they come.
pub(super) type Sink<'s> = &'s mut dyn FnMut(&[u8]) -> std::io::Result<()>;

/// What a download failed of: the hub, or the place that the bytes went to.
pub(super) enum Broken {
    Hub(Failure),
    Here(std::io::Error),
}

/// What is asked.
struct Question<'q> {
    method: Method,
    /// Below the hub's address.
    path: &'q str,
    /// Media type of the answer, and of the body if there is one.
    media: &'static str,
    body: Option<&'q Value>,
    /// How long all of the answer may take.
    longest: Duration,
    /// What it is about, in messages.
    subject: &'q str,
}

impl<'q> Question<'q> {
    fn get(path: &'q str, media: &'static str, longest: Duration, subject: &'q str) -> Self {
        Self {
            method: Method::GET,
            path,
            media,
            body: None,
            longest,
            subject,
        }
    }

    fn route(&self) -> String {
        format!("{} /{}", self.method, self.path)
    }
}

/// Asks the hub.
pub(super) struct Wire<'c> {
    connection: &'c Connection,
    client: reqwest::Client,
    runtime: tokio::runtime::Runtime,
}

/// A client that waits for a byte no longer than `patience`.
///
/// # Errors
/// When it cannot be set up.
pub(super) fn client(patience: Duration) -> Result<reqwest::Client> {
    reqwest::Client::builder()
        .user_agent(concat!("dflash/", env!("CARGO_PKG_VERSION")))
        .connect_timeout(CONNECT)
        .read_timeout(patience)
        // which takes the token out of a request that goes to another host
        .redirect(Policy::custom(follow))
        .build()
        .context("cannot set up a client")
}

fn follow(attempt: Attempt<'_>) -> reqwest::redirect::Action {
    let from = attempt.previous().last().map(|url| url.scheme().to_owned());
    if attempt.previous().len() > REDIRECTS {
        attempt.error("it is led from place to place without end")
    } else if from.as_deref() == Some("https") && attempt.url().scheme() != "https" {
        attempt.error("it is led from https to a place without")
    } else {
        attempt.follow()
    }
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
            client: client(connection.patience)?,
            runtime: runtime.context("cannot set up a client")?,
        })
    }

    /// Gets a path below the hub's address, again when it fails in passing.
    ///
    /// # Errors
    /// About `subject`.
    pub(super) fn get(&self, path: &str, subject: &str) -> Result<Value, Failure> {
        Ok(self.page(path, subject)?.0)
    }

    /// As [`Self::get`], with the query of the next page, if there is one.
    ///
    /// # Errors
    /// As [`Self::get`].
    pub(super) fn page(&self, path: &str, subject: &str) -> Result<(Value, Option<String>), Failure> {
        self.ask(&Question::get(path, JSON, LONGEST, subject))
    }

    /// Posts `body` as `media` to a path below the hub's address, again when it fails in passing.
    ///
    /// # Errors
    /// About `subject`.
    pub(super) fn post(&self, path: &str, media: &'static str, body: &Value, subject: &str) -> Result<Value, Failure> {
        let question = Question {
            method: Method::POST,
            body: Some(body),
            ..Question::get(path, media, LONGEST, subject)
        };
        Ok(self.ask(&question)?.0)
    }

    fn ask(&self, question: &Question<'_>) -> Result<(Value, Option<String>), Failure> {
        let mut pauses = PAUSES.iter();
        loop {
            let answer = self.runtime.block_on(self.attempt(question));
            match (answer, pauses.next()) {
                (Err(failure), Some(pause)) if failure.kind.passes() => std::thread::sleep(*pause),
                (answer, _) => return answer,
            }
        }
    }

    /// Gets a file of exactly `size` bytes, once.
    ///
    /// # Errors
    /// About `subject`, also when there are more or fewer bytes; or of the place that they went to.
    pub(super) fn download(&self, path: &str, size: u64, subject: &str, sink: Sink<'_>) -> Result<(), Broken> {
        self.runtime.block_on(self.receive(path, size, subject, sink))
    }

    async fn receive(&self, path: &str, size: u64, subject: &str, sink: Sink<'_>) -> Result<(), Broken> {
        let longest = LONGEST + Duration::from_secs(size / SLOWEST);
        let question = Question::get(path, "*/*", longest, subject);
        let route = question.route();
        let mut response = self.send(&question).await.map_err(Broken::Hub)?;
        let mut done = 0_u64;
        let wrong = |cause: String| Broken::Hub(self.connection.worded(Kind::NoHub, false, subject, &cause));
        loop {
            let chunk = response.chunk().await;
            let Some(chunk) = chunk.map_err(|error| Broken::Hub(self.broken(error, &route, subject)))? else {
                break;
            };
            done += chunk.len() as u64;
            if done > size {
                return Err(wrong(format!(
                    "{route}: damaged: more than the {size} bytes of the file"
                )));
            }
            sink(&chunk).map_err(Broken::Here)?;
        }
        if done < size {
            return Err(wrong(format!("{route}: damaged: {done} bytes of a file of {size}")));
        }
        Ok(())
    }

    async fn attempt(&self, question: &Question<'_>) -> Result<(Value, Option<String>), Failure> {
        let (route, subject) = (question.route(), question.subject);
        let failed = |cause: &str| self.connection.worded(Kind::NoHub, false, subject, cause);
        let response = self.send(question).await?;
        let next = next_page(response.headers());
        let (bytes, whole) = self.body(response, MOST_JSON, &route, subject).await?;
        if !whole {
            return Err(failed(&format!("{route}: more than {MOST_JSON} bytes")));
        }
        match serde_json::from_slice(&bytes) {
            Ok(value) => Ok((value, next)),
            Err(error) => Err(failed(&format!("{route}: {error}"))),
        }
    }

    /// The answer, once its head is there and says that it is one.
    async fn send(&self, question: &Question<'_>) -> Result<Response, Failure> {
        let subject = question.subject;
        let address = format!("{}/{}", self.connection.endpoint, question.path);
        let request = self.client.request(question.method.clone(), address);
        let mut request = request.timeout(question.longest).header(ACCEPT, question.media);
        if let Some(body) = question.body {
            request = request.header(CONTENT_TYPE, question.media).body(body.to_string());
        }
        if let Some(token) = &self.connection.token {
            let mut value = HeaderValue::from_str(&format!("Bearer {}", token.secret()))
                .map_err(|error| self.connection.worded(Kind::Other, false, subject, &error.to_string()))?;
            value.set_sensitive(true);
            request = request.header(AUTHORIZATION, value);
        }
        let route = question.route();
        let response = request.send().await;
        let response = response.map_err(|error| self.broken(error, &route, subject))?;
        self.accepted(response, &route, subject).await
    }

    /// The answer, or what a status that is no success says.
    async fn accepted(&self, response: Response, route: &str, subject: &str) -> Result<Response, Failure> {
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let header = |name: &str| Some(response.headers().get(name)?.to_str().ok()?.to_owned());
        let gated = header("x-error-code").as_deref() == Some("GatedRepo");
        let mut said = header("x-error-message");
        if said.is_none() {
            let (bytes, _) = self.body(response, MOST_SAID, route, subject).await?;
            let value = serde_json::from_slice::<Value>(&bytes).ok();
            said = value.and_then(|value| Some(value.get("error")?.as_str()?.to_owned()));
        }
        let cause = format!("HTTP {status} for {route}: {}", said.unwrap_or_default());
        let kind = Kind::of_status(status.as_u16());
        Err(self
            .connection
            .worded(kind, gated, subject, cause.trim_end_matches([':', ' '])))
    }

    /// The body up to `most` bytes, and whether that is all of it.
    async fn body(
        &self,
        mut response: Response,
        most: u64,
        route: &str,
        subject: &str,
    ) -> Result<(Vec<u8>, bool), Failure> {
        let mut bytes = Vec::new();
        while let Some(chunk) = response
            .chunk()
            .await
            .map_err(|error| self.broken(error, route, subject))?
        {
            if (bytes.len() + chunk.len()) as u64 > most {
                return Ok((bytes, false));
            }
            bytes.extend_from_slice(&chunk);
        }
        Ok((bytes, true))
    }

    /// A connection that was not made, or broke, or fell silent.
    fn broken(&self, error: reqwest::Error, route: &str, subject: &str) -> Failure {
        let kind = if error.is_timeout() {
            Kind::Silent
        } else if error.is_redirect() || error.is_builder() {
            Kind::Other
        } else {
            Kind::Unanswered
        };
        // an address that it was led to may hold a signature
        let cause = format!("{route}: {}", chain(&error.without_url()));
        self.connection.worded(kind, false, subject, &cause)
    }
}

/// The query of the address that a `Link` header names as the next one. Only the query: whatever host stands there, the
/// next page is asked of ours.
fn next_page(headers: &HeaderMap) -> Option<String> {
    let links = headers.get(LINK)?.to_str().ok()?;
    let next = links.split(',').find(|link| link.contains("rel=\"next\""))?;
    let address = next.split_once('<')?.1.split_once('>')?.0;
    Some(address.split_once('?')?.1.to_owned())
}

/// One part of an address: everything but letters, digits and `-._~` escaped.
pub(super) fn segment(text: &str) -> String {
    use std::fmt::Write as _;
    text.bytes().fold(String::with_capacity(text.len()), |mut out, byte| {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            out.push(char::from(byte));
        } else {
            // writing to a String cannot fail
            let _ = write!(out, "%{byte:02X}");
        }
        out
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_page_is_a_query_and_no_address() {
        let link = |text: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(LINK, HeaderValue::from_str(text).unwrap());
            next_page(&headers)
        };
        let there = "<https://elsewhere/api?cursor=a%2Fb&limit=1>; rel=\"next\"";
        assert_eq!(link(there).as_deref(), Some("cursor=a%2Fb&limit=1"));
        assert_eq!(link("<https://elsewhere/api?x>; rel=\"prev\""), None);
        assert_eq!(link("nonsense"), None);
    }

    #[test]
    fn a_part_of_an_address_stays_one() {
        assert_eq!(segment("a/b c?#%é"), "a%2Fb%20c%3F%23%25%C3%A9");
    }
}
