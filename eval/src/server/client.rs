//! Plain HTTP to a server: statuses and bodies as they come, secrets never in a message.

use std::io::{ErrorKind, Read};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use serde_json::Value;
use url::Url;

/// Characters of a body that a message shows.
const SHOWN: usize = 300;
/// Largest body that is read, in bytes: metrics of large servers have a few MiB.
const LARGEST: u64 = 64 << 20;
/// Longest wait for a connection.
const CONNECT: Duration = Duration::from_secs(10);

/// What a server answered.
#[derive(Debug)]
pub struct Reply {
    /// HTTP status.
    pub status: u16,
    /// The body.
    pub body: String,
}

/// A server, and how to talk to it.
pub struct Client {
    agent: ureq::Agent,
    /// Without a slash at the end; may hold credentials.
    base: String,
    shown: String,
    key: Option<String>,
    timeout: Duration,
}

impl Client {
    /// A client of the server at `url`; a path `/v1` at its end is left out. `key` goes into every request as a bearer token.
    ///
    /// # Errors
    /// When the URL is none of plain HTTP or the key cannot stand in a header.
    pub fn new(url: &str, key: Option<String>, timeout: Duration) -> Result<Self> {
        // the text itself stays out of the message: it may hold a password
        let mut parsed = Url::parse(url)
            .map_err(|error| anyhow!("expected http://HOST:PORT, got something that is no URL ({error})"))?;
        match parsed.scheme() {
            "http" => {}
            "https" => bail!(
                "https is not built in; measure on the server's own network over http, or forward its port (ssh -L)"
            ),
            other => bail!("expected http://HOST:PORT, got the scheme {other}"),
        }
        ensure!(parsed.has_host(), "expected http://HOST:PORT, got no host");
        ensure!(
            parsed.query().is_none() && parsed.fragment().is_none(),
            "expected http://HOST:PORT, got a query or a fragment"
        );
        let path = parsed.path().trim_end_matches('/');
        let path = path.strip_suffix("/v1").unwrap_or(path).to_owned();
        parsed.set_path(&path);
        let base = parsed.as_str().trim_end_matches('/').to_owned();
        let cleared = parsed.set_username("").and_then(|()| parsed.set_password(None));
        ensure!(cleared.is_ok(), "expected http://HOST:PORT");
        if let Some(key) = &key {
            ensure!(
                !key.is_empty() && key.bytes().all(|byte| byte.is_ascii_graphic()),
                "the API key is empty or has characters that no key has"
            );
        }
        Ok(Self {
            agent: ureq::AgentBuilder::new()
                .timeout_connect(CONNECT.min(timeout))
                .timeout(timeout)
                // a redirect could carry the key elsewhere
                .redirects(0)
                .build(),
            base,
            shown: parsed.as_str().trim_end_matches('/').to_owned(),
            key,
            timeout,
        })
    }

    /// The address without credentials.
    pub fn url(&self) -> &str {
        &self.shown
    }

    /// GET, whatever the status.
    ///
    /// # Errors
    /// When no whole answer came.
    pub fn get(&self, path: &str) -> Result<Reply> {
        self.call("GET", path, None)
    }

    /// POST of JSON, whatever the status.
    ///
    /// # Errors
    /// When no whole answer came.
    pub fn post(&self, path: &str, body: &Value) -> Result<Reply> {
        self.call("POST", path, Some(body))
    }

    /// The JSON of a reply with status 200.
    ///
    /// # Errors
    /// Shows status and the beginning of the body.
    pub fn json(&self, reply: &Reply, path: &str) -> Result<Value> {
        ensure!(
            reply.status == 200,
            "{path}: HTTP {}: {}",
            reply.status,
            self.beginning(&reply.body)
        );
        serde_json::from_str(&reply.body)
            .map_err(|error| anyhow!("{path}: not JSON ({error}): {}", self.beginning(&reply.body)))
    }

    /// The beginning of a body, safe for a terminal and without the key.
    pub fn beginning(&self, body: &str) -> String {
        let body = match &self.key {
            Some(key) => body.replace(key.as_str(), "[API key]"),
            None => body.to_owned(),
        };
        let shown = body.trim().chars().take(SHOWN);
        shown.map(|c| if c.is_control() { ' ' } else { c }).collect()
    }

    fn call(&self, method: &str, path: &str, body: Option<&Value>) -> Result<Reply> {
        let named = || format!("{method} {}{path}", self.shown);
        let mut request = self.agent.request(method, &format!("{}{path}", self.base));
        if let Some(key) = &self.key {
            request = request.set("Authorization", &format!("Bearer {key}"));
        }
        let result = match body {
            Some(body) => request
                .set("Content-Type", "application/json")
                .send_string(&body.to_string()),
            None => request.call(),
        };
        let response = match result {
            Ok(response) | Err(ureq::Error::Status(_, response)) => response,
            Err(ureq::Error::Transport(transport)) => return Err(self.unreachable(&transport)).with_context(named),
        };
        let status = response.status();
        let mut bytes = Vec::new();
        response
            .into_reader()
            .take(LARGEST + 1)
            .read_to_end(&mut bytes)
            .map_err(|error| self.broken(&error))
            .with_context(named)?;
        ensure!(
            bytes.len() as u64 <= LARGEST,
            "{}: more than {LARGEST} bytes of body",
            named()
        );
        let body = String::from_utf8(bytes)
            .map_err(|_| anyhow!("the body (HTTP {status}) is not UTF-8"))
            .with_context(named)?;
        Ok(Reply { status, body })
    }

    /// Why no answer came. The transport's own text is not used: it repeats the URL, with its password.
    fn unreachable(&self, transport: &ureq::Transport) -> anyhow::Error {
        let source = std::error::Error::source(transport);
        if let Some(error) = source.and_then(|source| source.downcast_ref::<std::io::Error>()) {
            return self.broken(error);
        }
        let detail = source.map(ToString::to_string);
        let detail = detail.as_deref().or(transport.message()).unwrap_or("no reason given");
        anyhow!("{}: {detail}", transport.kind())
    }

    fn broken(&self, error: &std::io::Error) -> anyhow::Error {
        match error.kind() {
            ErrorKind::TimedOut | ErrorKind::WouldBlock => {
                anyhow!("no answer within {} s (--timeout)", self.timeout.as_secs_f64())
            }
            ErrorKind::UnexpectedEof => anyhow!("the answer broke off: {error}"),
            _ => anyhow!("{error}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(url: &str) -> Result<Client> {
        Client::new(url, None, Duration::from_secs(1))
    }

    #[test]
    fn an_address_is_shown_without_its_password() {
        let client = client("http://me:secret@localhost:1/v1/").unwrap();
        assert_eq!(client.url(), "http://localhost:1");
        let error = format!("{:#}", client.get("/x").unwrap_err());
        assert!(error.contains("localhost:1/x") && !error.contains("secret"), "{error}");
    }

    #[test]
    fn what_is_no_plain_address_is_refused_without_repeating_it() {
        for url in [
            "localhost:8000",
            "https://me:secret@h",
            "http://me:secret@h:99999",
            "http://h?key=secret",
            "",
            "http://",
        ] {
            let error = client(url).err().unwrap().to_string();
            assert!(!error.contains("secret"), "{error}");
        }
        let key = |key: &str| Client::new("http://h", Some(key.into()), Duration::from_secs(1));
        assert!(key("").is_err() && key("a\nb").is_err() && key("sk-1").is_ok());
    }

    #[test]
    fn a_body_is_shown_short_and_without_the_key() {
        let client = Client::new("http://h", Some("sk-1".into()), Duration::from_secs(1)).unwrap();
        assert_eq!(client.beginning(" no sk-1\u{1b}[2J"), "no [API key] [2J");
        assert_eq!(client.beginning(&"é".repeat(999)).chars().count(), SHOWN);
    }
}
