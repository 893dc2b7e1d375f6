//! Files of this machine to a model on the hub, in one commit or none.
//!
//! What the client would do without a word is asked first: whether a large file would travel inside the commit, whether
//! somebody else moved the branch, and, after an answer that got lost, whether the commit was made all the same.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use hf_hub::progress::{Progress, ProgressEvent, ProgressHandler, UploadEvent};
use hf_hub::repository::CommitInfo;
use hf_hub::split_id;

use super::admission::admit;
use super::local::LocalFile;
use super::remote::Remote;
use super::{Connection, Failure, Hub, Kind, Transfer, Watch, check_revision, is_commit, is_repository};

/// Pauses before the second and third attempt at a commit.
const PAUSES: [Duration; 2] = [Duration::from_millis(500), Duration::from_secs(3)];

/// The slowest that a commit with its small files may leave, in bytes a second: the client counts that time as silence.
const SLOWEST: u64 = 32 << 10;

/// What to send where.
#[derive(Debug, Clone)]
pub struct Upload<'u> {
    /// `org/name`.
    pub repository: &'u str,
    /// Branch, made from `main` where it does not exist; `main` when there is none.
    pub revision: Option<&'u str>,
    /// Whether nobody else may see the model.
    pub private: bool,
    /// Whether to propose the commit instead of making it.
    pub create_pr: bool,
    /// First line of the commit.
    pub message: &'u str,
    /// All that the model should have of us.
    pub files: &'u [LocalFile],
}

/// What was sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Uploaded {
    /// Address of the commit, or of the proposal.
    pub url: String,
    /// The commit that has all files; unknown for a proposal whose answer does not name it.
    pub commit: Option<String>,
    /// Names of the files in the commit; empty when the model had them all.
    pub sent: Vec<String>,
    /// Names of those that the model had already.
    pub unchanged: Vec<String>,
    /// Whether the model is new.
    pub created: bool,
}

impl Upload<'_> {
    /// Checks the names of repository and branch, before anybody hears of them.
    ///
    /// # Errors
    /// Naming the one that is none.
    pub fn check(&self) -> Result<()> {
        let repository = self.repository;
        ensure!(
            is_repository(repository),
            "{repository:?}: expected a repository, org/name"
        );
        let Some(revision) = self.revision else { return Ok(()) };
        ensure!(
            !is_commit(revision),
            "revision {revision}: expected a branch, found a commit, which never changes"
        );
        check_revision(revision).with_context(|| format!("revision {revision:?}: expected a branch"))
    }
}

impl Hub {
    /// Checks what can be checked without contacting anybody.
    ///
    /// # Errors
    /// On a bad name, offline, and without a token.
    pub fn may_upload(&self, upload: &Upload<'_>) -> Result<()> {
        upload.check()?;
        let repository = upload.repository;
        ensure!(
            !self.is_offline(),
            "push to {repository}: HF_HUB_OFFLINE forbids to contact the hub"
        );
        ensure!(
            self.token().is_some(),
            "push to {repository}: no token: set HF_TOKEN to one that may write there"
        );
        Ok(())
    }

    /// Makes one commit of those files that the model does not have yet, or none when it has all.
    ///
    /// # Errors
    /// Offline, without a token, when the hub refuses or cannot be reached, when the model has weights that are not among
    /// the files, when a private one is asked for and it is public, and when a large file would travel inside the commit.
    /// The model is as it was then, or new and empty, except where the error says that this is not known.
    pub fn upload(&self, upload: &Upload<'_>, watch: Option<Watch>) -> Result<Uploaded> {
        let repository = upload.repository;
        self.may_upload(upload)?;
        let connection = self.connect()?;
        // whatever the hub says ends in a text, and it may say anything
        let clean = |error: anyhow::Error| anyhow!(connection.redacted(&format!("{error:#}")));
        let (remote, created) = Remote::open(&connection, upload).map_err(clean)?;
        let sent = self.send(&connection, &remote, upload, created, watch);
        let mut uploaded = sent.map_err(clean).with_context(|| {
            let state = if created { ", which is new and still empty" } else { "" };
            format!("push to {repository}{state}")
        })?;
        uploaded.url = connection.redacted(&uploaded.url);
        Ok(uploaded)
    }

    fn send(
        &self,
        connection: &Connection,
        remote: &Remote<'_>,
        upload: &Upload<'_>,
        created: bool,
        watch: Option<Watch>,
    ) -> Result<Uploaded> {
        let state = remote.state()?;
        remote.check_weights(&state, upload.files)?;
        let (unchanged, changed): (Vec<_>, Vec<_>) = upload.files.iter().partition(|file| state.has(file));
        let names = |files: &[&LocalFile]| files.iter().map(|file| file.name.clone()).collect();
        let mut uploaded = Uploaded {
            url: remote.address_of(state.head.as_deref()),
            commit: state.head.clone(),
            sent: names(&changed),
            unchanged: names(&unchanged),
            created,
        };
        if changed.is_empty() {
            return Ok(uploaded);
        }
        admit(connection, upload, &changed)?;
        for file in upload.files {
            file.check_unchanged()?;
        }
        let made = self.commit(connection, remote, upload, state.head.as_deref(), &changed, watch)?;
        uploaded.commit.clone_from(&made.commit_oid);
        uploaded.url = match (made.pr_url, made.commit_url) {
            (Some(url), _) | (None, Some(url)) => url,
            (None, None) => remote.address_of(made.commit_oid.as_deref()),
        };
        Ok(uploaded)
    }

    /// Makes the commit on top of `head`, trying again as long as it is certain that it was not made.
    fn commit(
        &self,
        connection: &Connection,
        remote: &Remote<'_>,
        upload: &Upload<'_>,
        head: Option<&str>,
        changed: &[&LocalFile],
        watch: Option<Watch>,
    ) -> Result<CommitInfo> {
        // the usual client repeats a commit after 5xx by itself, and could make it twice
        let inline: u64 = changed
            .iter()
            .filter_map(|file| file.bytes())
            .map(|bytes| bytes.len() as u64)
            .sum();
        // a third more as base64
        let once = self.connect_once(Duration::from_secs(inline * 4 / 3 / SLOWEST))?;
        let (owner, name) = split_id(upload.repository);
        let repository = once.client.model(owner, name);
        let watch: Arc<Mutex<Option<Watch>>> = Arc::new(Mutex::new(watch));
        let mut pauses = PAUSES.iter();
        loop {
            let asked = Arc::new(AtomicBool::new(false));
            let operations = changed.iter().map(|file| file.added());
            let progress = Progress::new(Uploads {
                watch: Arc::clone(&watch),
                asked: Arc::clone(&asked),
                total: AtomicU64::new(0),
            });
            let outcome = repository
                .create_commit()
                .operations(operations.collect())
                .commit_message(upload.message)
                .maybe_revision(upload.revision.map(str::to_owned))
                .create_pr(upload.create_pr)
                .maybe_parent_commit(head.map(str::to_owned))
                .progress(progress)
                .send();
            let failure = match outcome {
                Ok(made) if told(&made, upload.create_pr) => return Ok(made),
                Ok(_) => connection.worded(
                    Kind::NoHub,
                    false,
                    &format!("commit to {}", upload.repository),
                    "it does not name the commit that it made",
                ),
                Err(error) => connection.failure(&error, &format!("commit to {}", upload.repository)),
            };
            if !failure.kind.leaves_open() {
                return Err(failure.into());
            }
            if asked.load(Ordering::SeqCst)
                && let Some(made) = after(remote, upload, head, &failure)?
            {
                return Ok(made);
            }
            let pause = pauses.next().filter(|_| failure.kind.passes());
            let Some(pause) = pause else {
                return Err(failure).context("nothing was committed");
            };
            std::thread::sleep(*pause);
        }
    }
}

/// What a commit whose answer was a failure came to: made, or not made and safe to try again (none).
fn after(
    remote: &Remote<'_>,
    upload: &Upload<'_>,
    head: Option<&str>,
    failure: &Failure,
) -> Result<Option<CommitInfo>> {
    let refused = matches!(failure.kind, Kind::Conflict | Kind::Limited);
    if upload.create_pr && !refused {
        // a proposal leaves no trace in the branch
        bail!(
            "{failure}. Whether the proposal was made is not known: see {}/discussions before pushing again",
            remote.address()
        );
    }
    let state = remote
        .state()
        .with_context(|| format!("{failure}. Whether the commit was made is not known: push again to find out"))?;
    if state.head.as_deref() != head && upload.files.iter().all(|file| state.has(file)) {
        return Ok(Some(CommitInfo {
            commit_url: Some(remote.address_of(state.head.as_deref())),
            commit_message: None,
            commit_description: None,
            commit_oid: state.head,
            pr_url: None,
            pr_num: None,
        }));
    }
    ensure!(
        state.head.as_deref() == head,
        "{failure}. The branch has moved meanwhile: push again"
    );
    Ok(None)
}

/// Whether an answer names what was made.
fn told(made: &CommitInfo, proposed: bool) -> bool {
    if proposed {
        made.pr_url.is_some()
    } else {
        made.commit_oid.as_deref().is_some_and(is_commit)
    }
}

/// Passes the client's events on, and remembers whether the commit itself was asked for.
struct Uploads {
    watch: Arc<Mutex<Option<Watch>>>,
    asked: Arc<AtomicBool>,
    /// Bytes of all files, small ones included.
    total: AtomicU64,
}

impl Uploads {
    fn tell(&self, done: u64) {
        let total = self.total.load(Ordering::SeqCst);
        let watch = self.watch.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(watch) = watch.as_ref().filter(|_| total > 0) {
            watch(Transfer { done, total });
        }
    }
}

impl ProgressHandler for Uploads {
    fn on_progress(&self, event: &ProgressEvent) {
        let ProgressEvent::Upload(event) = event else { return };
        match event {
            UploadEvent::Start { total_bytes, .. } => {
                self.total.store(*total_bytes, Ordering::SeqCst);
                self.tell(0);
            }
            // of large files; the small ones go with the commit, and only then all is done
            UploadEvent::Progress { bytes_completed, .. } => {
                let most = self.total.load(Ordering::SeqCst).saturating_sub(1);
                self.tell(most.min(*bytes_completed));
            }
            UploadEvent::Committing => self.asked.store(true, Ordering::SeqCst),
            UploadEvent::Complete => self.tell(self.total.load(Ordering::SeqCst)),
        }
    }
}
