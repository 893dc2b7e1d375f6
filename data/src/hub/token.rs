//! The hub's token: where it is found, and how it is kept out of every text.

use std::fmt;
use std::path::{Path, PathBuf};

/// A token with the name of the place that it came from.
#[derive(Clone)]
pub struct Token {
    secret: String,
    origin: String,
}

impl Token {
    /// A token that the caller has; `None` when there is nothing but white space in it.
    pub fn given(secret: &str, origin: &str) -> Option<Self> {
        let secret = secret.trim();
        (!secret.is_empty()).then(|| Self {
            secret: secret.to_owned(),
            origin: origin.to_owned(),
        })
    }

    /// The token that the hub's own tools would use: `HF_TOKEN`, the file that `HF_TOKEN_PATH` names, the file `token` in
    /// `HF_HOME`; none when `HF_HUB_DISABLE_IMPLICIT_TOKEN` is set.
    pub fn from_env() -> Option<Self> {
        Self::find(&|name| std::env::var(name).ok().filter(|value| !value.is_empty()))
    }

    fn find(variable: &dyn Fn(&str) -> Option<String>) -> Option<Self> {
        if variable("HF_HUB_DISABLE_IMPLICIT_TOKEN").is_some() {
            return None;
        }
        if let Some(token) = variable("HF_TOKEN").and_then(|secret| Self::given(&secret, "HF_TOKEN")) {
            return Some(token);
        }
        let stored = |path: &Path| {
            let secret = std::fs::read_to_string(path).ok()?;
            Self::given(&secret, &format!("the file {}", path.display()))
        };
        let home = variable("HF_HOME").map(PathBuf::from).or_else(|| {
            let cache = variable("XDG_CACHE_HOME").map(PathBuf::from);
            let cache = cache.or_else(|| variable("HOME").map(|home| Path::new(&home).join(".cache")));
            cache.map(|cache| cache.join("huggingface"))
        });
        variable("HF_TOKEN_PATH")
            .and_then(|path| stored(Path::new(&path)))
            .or_else(|| stored(&home?.join("token")))
    }

    /// Where it came from, for messages.
    pub fn origin(&self) -> &str {
        &self.origin
    }

    /// `text` with every occurrence of the token replaced.
    pub fn redacted(&self, text: &str) -> String {
        text.replace(&self.secret, "[token]")
    }

    /// Whether the token stands in `bytes`.
    pub fn occurs_in(&self, bytes: &[u8]) -> bool {
        let secret = self.secret.as_bytes();
        bytes.windows(secret.len()).any(|window| window == secret)
    }

    /// Its bytes, in number.
    pub fn length(&self) -> usize {
        self.secret.len()
    }

    /// The token itself, for the one place that sends it.
    pub(super) fn secret(&self) -> &str {
        &self.secret
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Token(from {})", self.origin)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_token_is_found_where_the_hubs_tools_put_it_and_shown_nowhere() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("token"), "stored\n").unwrap();
        std::fs::write(folder.path().join("other"), "other").unwrap();
        let home = folder.path().to_str().unwrap().to_owned();
        let other = folder.path().join("other").to_str().unwrap().to_owned();
        let found = |variables: &[(&str, &str)]| {
            let token = Token::find(&|name| {
                let mut named = variables.iter().filter(|(known, _)| *known == name);
                named.next().map(|(_, value)| (*value).to_owned())
            });
            token.map(|token| token.secret)
        };
        assert_eq!(
            found(&[("HF_TOKEN", " secret\n"), ("HF_HOME", &home)]).unwrap(),
            "secret"
        );
        assert_eq!(
            found(&[("HF_TOKEN_PATH", &other), ("HF_HOME", &home)]).unwrap(),
            "other"
        );
        assert_eq!(found(&[("HF_HOME", &home)]).unwrap(), "stored");
        assert_eq!(found(&[("HOME", &home)]), None);
        let disabled = [("HF_TOKEN", "secret"), ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")];
        assert_eq!(found(&disabled), None);

        let token = Token::given("secret", "HF_TOKEN").unwrap();
        assert!(!format!("{token:?}").contains("secret"));
        assert_eq!(token.redacted("Bearer secret, secret"), "Bearer [token], [token]");
        assert!(token.occurs_in(b"a secret b") && !token.occurs_in(b"secre"));
        assert!(Token::given(" \n", "HF_TOKEN").is_none());
    }
}
