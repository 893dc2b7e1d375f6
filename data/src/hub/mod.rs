//! The Hugging Face hub: how it is reached, and folders of models from it.
//!
//! ```text
//! reference   hf://org/name@revision/folder, and the name that goes on record
//! folder      such a reference -> a folder of the hub's cache
//! snapshot    files of a commit -> that cache; tree: which there are; intact: whether a file is what its name says
//! local       a file of this machine as it was checked
//! upload      files of this machine -> one commit; remote: what is there, admission: what may be sent
//! wire        requests with an end to waiting and to size
//! token       where the token is found, and how it is kept out of texts
//! ```

mod admission;
mod failure;
mod folder;
pub(crate) mod intact;
mod local;
mod reference;
mod remote;
pub(crate) mod snapshot;
#[cfg(test)]
mod tests;
mod token;
mod tree;
mod upload;
mod wire;

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use hf_hub::{HFClient, HFClientSync};

pub use admission::INLINE_LIMIT;
pub use failure::{Failure, Kind};
pub use folder::{Transfer, Watch, fetch};
pub use intact::git_hash;
pub use local::LocalFile;
pub use reference::{Reference, SCHEME, base_model, cached, check_revision, is_commit, is_repository, on_record};
pub use token::Token;
pub use upload::{Upload, Uploaded};
use wire::Wire;

/// How the hub is reached.
#[derive(Clone, Default)]
pub struct Hub {
    endpoint: Option<String>,
    token: Option<Token>,
    cache: Option<PathBuf>,
    revision: Option<String>,
    offline: bool,
    patience: Option<Duration>,
}

/// How long nothing may come before a connection is given up.
const PATIENCE: Duration = Duration::from_secs(60);

/// A client of the hub and what it was set up with.
pub struct Connection {
    /// The client.
    pub client: HFClientSync,
    /// The hub's address.
    pub endpoint: String,
    /// The cache folder.
    pub cache: PathBuf,
    /// The token, if there is one.
    pub token: Option<Token>,
    /// How long it waits for a byte.
    pub patience: Duration,
}

impl Hub {
    /// The hub as the environment sets it up: `HF_ENDPOINT`, `HF_TOKEN` or the token that its own tools stored, the
    /// cache in `HF_HUB_CACHE` or below `HF_HOME`, and the cache alone when `HF_HUB_OFFLINE` is 1, true, yes or on.
    /// A connection on which nothing comes is given up after `HF_HUB_DOWNLOAD_TIMEOUT` seconds, 60 if it is not set.
    pub fn from_env() -> Self {
        // the other variables are read by the client, these are not
        let seconds = std::env::var("HF_HUB_DOWNLOAD_TIMEOUT").ok();
        let seconds = seconds.and_then(|seconds| seconds.trim().parse::<u64>().ok());
        let offline = std::env::var("HF_HUB_OFFLINE").unwrap_or_default();
        Self {
            offline: ["1", "true", "yes", "on"].contains(&offline.to_ascii_lowercase().as_str()),
            patience: seconds.filter(|seconds| *seconds > 0).map(Duration::from_secs),
            ..Self::default()
        }
    }

    /// Another address than the environment's.
    #[must_use]
    pub fn at(mut self, endpoint: &str) -> Self {
        self.endpoint = Some(endpoint.to_owned());
        self
    }

    /// Another token than the environment's.
    #[must_use]
    pub fn with_token(mut self, token: &str) -> Self {
        self.token = Token::given(token, "the caller");
        self
    }

    /// Another cache folder than the environment's.
    #[must_use]
    pub fn cached_in(mut self, folder: &Path) -> Self {
        self.cache = Some(folder.to_owned());
        self
    }

    /// Another branch, tag or commit than `main`.
    #[must_use]
    pub fn at_revision(mut self, revision: &str) -> Self {
        self.revision = Some(revision.to_owned());
        self
    }

    /// Another time than 60 s that nothing may come on a connection.
    #[must_use]
    pub fn with_patience(mut self, patience: Duration) -> Self {
        self.patience = Some(patience);
        self
    }

    /// Whether only the cache is asked.
    #[must_use]
    pub fn offline(mut self, offline: bool) -> Self {
        self.offline = offline;
        self
    }

    /// Whether only the cache may be asked.
    pub fn is_offline(&self) -> bool {
        self.offline
    }

    /// The branch, tag or commit that is asked for.
    pub(crate) fn revision(&self) -> &str {
        self.revision.as_deref().unwrap_or("main")
    }

    /// The token, from the environment if the caller gave none.
    pub fn token(&self) -> Option<Token> {
        self.token.clone().or_else(Token::from_env)
    }

    /// Sets up a client that repeats what failed in passing.
    ///
    /// # Errors
    /// When the address or the token cannot be used.
    pub fn connect(&self) -> Result<Connection> {
        self.connect_with(None, Duration::ZERO)
    }

    /// Sets up a client that sends every request once: for what must not happen twice. It waits `more` than usual for an
    /// answer, since the time that a request takes to be sent counts, too.
    ///
    /// # Errors
    /// As [`Self::connect`].
    pub fn connect_once(&self, more: Duration) -> Result<Connection> {
        self.connect_with(Some(0), more)
    }

    fn connect_with(&self, retries: Option<usize>, more: Duration) -> Result<Connection> {
        let token = self.token();
        let patience = self.patience.unwrap_or(PATIENCE);
        let address = self.endpoint.clone().or_else(|| std::env::var("HF_ENDPOINT").ok());
        ensure!(
            address.is_none_or(|address| address.starts_with("http://") || address.starts_with("https://")),
            "HF_ENDPOINT: expected http:// or https://"
        );
        let mut client = HFClient::builder().client(wire::client(patience + more)?);
        if let Some(endpoint) = &self.endpoint {
            client = client.endpoint(endpoint);
        }
        if let Some(token) = &token {
            let printable = token.secret().bytes().all(|byte| byte.is_ascii_graphic());
            // the client would leave it out without a word
            ensure!(
                printable,
                "{}: the token has characters that no token has",
                token.origin()
            );
            client = client.token(token.secret());
        }
        if let Some(cache) = &self.cache {
            client = client.cache_dir(cache);
        }
        if let Some(retries) = retries {
            client = client.retry_max_attempts(retries);
        }
        let client = client
            .build()
            .context("cannot set up the hub's client (HF_ENDPOINT?)")?;
        let (endpoint, cache) = (client.endpoint().to_owned(), client.cache_dir().to_owned());
        let authority = endpoint.split("://").nth(1).and_then(|rest| rest.split('/').next());
        ensure!(
            authority.is_some_and(|authority| !authority.contains('@')),
            "HF_ENDPOINT: expected an address without user or password; a token belongs into HF_TOKEN"
        );
        Ok(Connection {
            client: HFClientSync::from_inner(client).context("cannot set up the hub's client")?,
            endpoint,
            cache,
            token,
            patience,
        })
    }
}

impl fmt::Debug for Hub {
    /// Everything but the token.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hub")
            .field("endpoint", &self.endpoint)
            .field("token_set", &self.token.is_some())
            .field("cache", &self.cache)
            .field("revision", &self.revision)
            .field("offline", &self.offline)
            .field("patience", &self.patience)
            .finish()
    }
}
