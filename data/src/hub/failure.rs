//! What went wrong between us and the hub, in words that say what can be done, without the token.

use hf_hub::HFError;

use super::Connection;

/// A failure, told apart as far as callers act on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// Its kind.
    pub kind: Kind,
    /// The message.
    pub message: String,
}

/// Kinds of failures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The cache does not hold it, and nothing else was asked.
    NotCached,
    /// No answer came: not reached, or interrupted.
    Unanswered,
    /// Nothing came for as long as we wait.
    Silent,
    /// An answer, but none that the hub would give.
    NoHub,
    /// Files of this machine.
    Local,
    /// 401, or a gate that was not passed.
    NoAccess,
    /// 403.
    Forbidden,
    /// 404: no such repository, revision or file, or a hidden one.
    NotFound,
    /// 409 or 412: something else is there already.
    Conflict,
    /// 429: too many requests.
    Limited,
    /// 5xx: the hub's own trouble.
    Server,
    /// Anything else.
    Other,
}

impl Kind {
    /// The kind of an HTTP status that is no success.
    pub fn of_status(status: u16) -> Self {
        match status {
            401 => Self::NoAccess,
            403 => Self::Forbidden,
            404 => Self::NotFound,
            409 | 412 => Self::Conflict,
            429 => Self::Limited,
            500.. => Self::Server,
            _ => Self::Other,
        }
    }

    /// Whether it leaves open what the hub did.
    pub fn leaves_open(self) -> bool {
        self.passes() || matches!(self, Self::Silent | Self::NoHub | Self::Conflict)
    }

    /// Whether the same request may well succeed a little later.
    pub fn passes(self) -> bool {
        matches!(self, Self::Unanswered | Self::Limited | Self::Server)
    }
}

impl Connection {
    /// Puts a client's error about `subject` into words.
    pub fn failure(&self, error: &HFError, subject: &str) -> Failure {
        let kind = kind(error);
        let cause = chain(error);
        self.worded(kind, gated(error), subject, &cause)
    }

    /// A failure of `kind` about `subject`, `cause` being what came.
    pub(super) fn worded(&self, kind: Kind, gated: bool, subject: &str, cause: &str) -> Failure {
        let endpoint = &self.endpoint;
        let token = match &self.token {
            Some(token) => format!("the token from {}", token.origin()),
            None => "no token (HF_TOKEN is not set)".to_owned(),
        };
        let advice = match kind {
            Kind::NotCached => format!(
                "{} does not hold it, and HF_HUB_OFFLINE forbids to fetch it",
                self.cache.display()
            ),
            Kind::Unanswered => format!(
                "{endpoint} cannot be reached, or the connection broke. Without network, HF_HUB_OFFLINE=1 uses what the \
                 cache {} holds, and a path a local copy",
                self.cache.display()
            ),
            Kind::Silent => format!(
                "{endpoint} sent nothing for {} s, or has not come to an end (HF_HUB_DOWNLOAD_TIMEOUT sets the seconds)",
                self.patience.as_secs()
            ),
            Kind::NoHub => format!("{endpoint} answered what the hub would not (HF_ENDPOINT?)"),
            Kind::Local => "on this machine".to_owned(),
            Kind::NoAccess | Kind::Forbidden if gated => format!(
                "it is gated: accept its conditions on {endpoint}, then set HF_TOKEN to a token of that account (sent: {token})"
            ),
            Kind::NoAccess => format!("{endpoint} wants a valid token, set HF_TOKEN (sent: {token})"),
            Kind::Forbidden => format!("{endpoint} does not allow it with {token}, set HF_TOKEN to one that may"),
            Kind::NotFound => {
                format!("{endpoint} does not have it, or hides it: for a private one set HF_TOKEN (sent: {token})")
            }
            Kind::Conflict => format!("{endpoint} has something else there"),
            Kind::Limited => format!("{endpoint} gets too many requests, try again later"),
            Kind::Server | Kind::Other => format!("{endpoint} answers with an error"),
        };
        let message = format!("{subject}: {advice}: {cause}");
        Failure {
            kind,
            message: self.redacted(&message),
        }
    }

    /// `text` without the token, and without what a terminal would obey: a server may say anything.
    pub(crate) fn redacted(&self, text: &str) -> String {
        let text = plain(text);
        match &self.token {
            Some(token) => token.redacted(&text),
            None => text,
        }
    }
}

/// `text` with a mark in place of every character that moves a cursor, colours, or turns the direction of writing.
fn plain(text: &str) -> String {
    let obeyed = |c: char| {
        c.is_control() || matches!(c, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    text.chars()
        .map(|c| match c {
            '\n' | '\r' | '\t' => ' ',
            c if obeyed(c) => '\u{fffd}',
            c => c,
        })
        .collect()
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Failure {}

fn kind(error: &HFError) -> Kind {
    match error {
        HFError::LocalEntryNotFound { .. } => Kind::NotCached,
        HFError::Request { source, .. } if source.is_timeout() => Kind::Silent,
        HFError::Request { source, .. } if source.is_decode() => Kind::NoHub,
        HFError::Request { .. } | HFError::Xet { .. } => Kind::Unanswered,
        HFError::MalformedResponse { .. } | HFError::Json(_) => Kind::NoHub,
        HFError::Io(_) | HFError::CacheLockTimeout { .. } => Kind::Local,
        HFError::AuthRequired { .. } => Kind::NoAccess,
        HFError::Forbidden { .. } => Kind::Forbidden,
        HFError::RepoNotFound { .. } | HFError::RevisionNotFound { .. } | HFError::EntryNotFound { .. } => {
            Kind::NotFound
        }
        HFError::Conflict { .. } => Kind::Conflict,
        HFError::RateLimited { .. } => Kind::Limited,
        HFError::Http { context } => Kind::of_status(context.status.as_u16()),
        _ => Kind::Other,
    }
}

fn gated(error: &HFError) -> bool {
    let (HFError::AuthRequired { context } | HFError::Forbidden { context } | HFError::Http { context }) = error else {
        return false;
    };
    context.error_code.as_deref() == Some("GatedRepo")
}

/// An error with everything behind it, each message once.
pub(super) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let message = cause.to_string();
        if !text.contains(&message) {
            text = format!("{text}: {message}");
        }
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_terminal_would_obey_is_marked() {
        let text = plain("a\u{1b}[31mred\u{7}\n\u{9b}2J\u{202e}b é");
        assert_eq!(text, "a\u{fffd}[31mred\u{fffd} \u{fffd}2J\u{fffd}b é");
    }
}
