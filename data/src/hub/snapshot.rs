//! Files of a commit in the hub's own cache, where its other tools find them too.
//!
//! ```text
//! models--org--name/blobs/HASH               a file, named by git's hash or its SHA-256
//! models--org--name/snapshots/COMMIT/PATH    a link to it
//! models--org--name/refs/main                the commit that a branch was at
//! ```
//!
//! No name comes from a header, and a file gets its name after its hash was compared, not before.

use std::cell::RefCell;
use std::fs::{self, File, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::intact::{Hasher, hash_of, kind_of};
use super::reference::{check_revision, is_commit};
use super::tree::{Entry, commit_of, files_of};
use super::wire::{Broken, PAUSES, Wire, segment};
use super::{Connection, Kind, Transfer, Watch};
use crate::files::{beside, publish, write_whole};

/// Larger files of the cache are compared with their size alone when they are used; all are hashed when they are fetched.
pub(super) const SMALL: u64 = 16 << 20;

/// How often the progress of a download is told.
const TOLD: Duration = Duration::from_millis(100);

/// What is asked for.
#[derive(Clone, Copy)]
pub(crate) struct Asked<'a> {
    /// `models` or `datasets`.
    pub(crate) kind: &'static str,
    /// `org/name`.
    pub(crate) repository: &'a str,
    /// Branch, tag or commit.
    pub(crate) revision: &'a str,
    /// How it is called in messages.
    pub(crate) subject: &'a str,
}

impl Asked<'_> {
    /// The repository's folder in the cache.
    fn place(&self, cache: &Path) -> PathBuf {
        cache.join(format!("{}--{}", self.kind, self.repository.replace('/', "--")))
    }
}

/// What the cache alone says: the commit and its folder.
///
/// # Errors
/// When it does not hold it.
pub(crate) fn held(connection: &Connection, asked: Asked<'_>) -> Result<(String, PathBuf)> {
    check_revision(asked.revision)?;
    let place = asked.place(&connection.cache);
    let missing = |cause: &str| connection.worded(Kind::NotCached, false, asked.subject, cause);
    let commit = if is_commit(asked.revision) {
        asked.revision.to_ascii_lowercase()
    } else {
        let named = fs::read_to_string(place.join("refs").join(asked.revision));
        let named = named.map_err(|error| missing(&format!("refs/{}: {error}", asked.revision)))?;
        named.trim().to_owned()
    };
    let folder = place.join("snapshots").join(&commit);
    if !is_commit(&commit) || !folder.is_dir() {
        return Err(missing(&format!("no snapshot {commit:?}")).into());
    }
    Ok((commit, folder))
}

/// A commit with its listing.
pub(crate) struct Snapshot<'c> {
    wire: Wire<'c>,
    asked: Asked<'c>,
    place: PathBuf,
    /// The commit.
    pub(crate) commit: String,
    entries: Vec<Entry>,
}

impl<'c> Snapshot<'c> {
    /// Asks which commit the revision is at, and which files it has.
    ///
    /// # Errors
    /// When the hub refuses, cannot be reached, or names what is no commit or no listing.
    pub(crate) fn ask(connection: &'c Connection, asked: Asked<'c>) -> Result<Self> {
        check_revision(asked.revision)?;
        let wire = Wire::new(connection)?;
        let route = format!("{}/{}", asked.kind, asked.repository);
        let commit = commit_of(&wire, connection, &route, asked.revision, asked.subject)?;
        let entries = files_of(&wire, connection, &route, &commit, asked.subject)?;
        Ok(Self {
            wire,
            asked,
            place: asked.place(&connection.cache),
            commit,
            entries,
        })
    }

    /// Paths of all files.
    pub(crate) fn paths(&self) -> Vec<String> {
        self.entries.iter().map(|entry| entry.path.clone()).collect()
    }

    /// Puts the files of these paths into the cache, as far as they are not there, and returns the commit's folder.
    /// A cache that has them all is not written to.
    ///
    /// # Errors
    /// When the hub refuses or cannot be reached, a file is not what its hash says, or the cache cannot be written.
    pub(crate) fn fetch(&self, paths: &[String], watch: Option<&Watch>) -> Result<PathBuf> {
        let folder = self.place.join("snapshots").join(&self.commit);
        let mut missing = Vec::new();
        for entry in self.entries.iter().filter(|entry| paths.contains(&entry.path)) {
            entry.check_path()?;
            if !self.is_there(&folder.join(&entry.path), entry) {
                missing.push(entry);
            }
        }
        let absent = missing.iter().filter(|entry| !is_whole(&self.blob(entry), entry));
        let progress = Progress::of(watch, absent.map(|entry| entry.size).sum());
        progress.tell(true);
        for entry in &missing {
            if !is_whole(&self.blob(entry), entry) {
                self.download(entry, &progress)?;
            }
            self.link(&folder.join(&entry.path), entry)?;
        }
        progress.tell(true);
        let noted = self.note();
        if !missing.is_empty() {
            noted?;
        }
        Ok(folder)
    }

    fn blob(&self, entry: &Entry) -> PathBuf {
        self.place.join("blobs").join(&entry.hash)
    }

    /// Whether a name leads to the file of the cache, or is, where there are no links, a copy of it.
    fn is_there(&self, path: &Path, entry: &Entry) -> bool {
        let Ok(metadata) = fs::symlink_metadata(path) else {
            return false;
        };
        let leads = || match (path.canonicalize(), self.blob(entry).canonicalize()) {
            (Ok(end), Ok(blob)) => end == blob,
            _ => false,
        };
        is_whole(path, entry) && (!metadata.is_symlink() || leads())
    }

    /// Fetches a file under an unfinished name, again when it fails in passing, and compares it before it gets its own.
    fn download(&self, entry: &Entry, progress: &Progress<'_>) -> Result<()> {
        let (path, unfinished) = (self.blob(entry), beside(&self.blob(entry)));
        let here = || format!("{}: cannot write", unfinished.display());
        create_folder(&self.place.join("blobs"))?;
        let options = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&unfinished);
        let file = options.with_context(here)?;
        // one process at a time: a second one waits, and finds the file finished
        file.lock().with_context(here)?;
        if is_whole(&path, entry) {
            return Ok(());
        }
        let mut pauses = PAUSES.iter();
        let found = loop {
            match (self.receive(entry, &file, progress), pauses.next()) {
                (Ok(found), _) => break found,
                (Err(Broken::Hub(failure)), Some(pause)) if failure.kind.passes() => std::thread::sleep(*pause),
                (Err(broken), _) => {
                    // emptied and not removed: another process may wait for its lock
                    let _ = file.set_len(0);
                    return match broken {
                        Broken::Hub(failure) => Err(failure.into()),
                        Broken::Here(error) => Err(error).with_context(here),
                    };
                }
            }
        };
        if found != entry.hash {
            let _ = file.set_len(0);
            let kind = kind_of(entry.is_large());
            bail!(
                "{}: {}: damaged on its way: expected {kind} {}, found {found}. It was not kept",
                self.asked.subject,
                entry.path,
                entry.hash
            );
        }
        file.sync_all().with_context(here)?;
        publish(&unfinished, &path)
    }

    /// Receives a file from its beginning and returns its hash.
    fn receive(&self, entry: &Entry, file: &File, progress: &Progress<'_>) -> Result<String, Broken> {
        use std::io::{Seek as _, SeekFrom};
        let mut file = file;
        file.set_len(0).map_err(Broken::Here)?;
        file.seek(SeekFrom::Start(0)).map_err(Broken::Here)?;
        let parts: Vec<String> = entry.path.split('/').map(segment).collect();
        let prefix = if self.asked.kind == "models" { "" } else { "datasets/" };
        let route = format!(
            "{prefix}{}/resolve/{}/{}",
            self.asked.repository,
            self.commit,
            parts.join("/")
        );
        let mut hasher = Hasher::of(entry);
        let begun = progress.done();
        let subject = format!("{}: {}", self.asked.subject, entry.path);
        let received = self.wire.download(&route, entry.size, &subject, &mut |bytes| {
            hasher.update(bytes);
            progress.add(bytes.len() as u64);
            file.write_all(bytes)
        });
        if received.is_err() {
            progress.back_to(begun);
        }
        received.map(|()| hasher.finish())
    }

    fn link(&self, path: &Path, entry: &Entry) -> Result<()> {
        let cannot = || format!("{}: cannot write", path.display());
        let folder = path.parent().with_context(cannot)?;
        create_folder(folder)?;
        if fs::symlink_metadata(path).is_ok() {
            fs::remove_file(path).with_context(cannot)?;
        }
        #[cfg(unix)]
        {
            // up to the commit's folder, and two more
            let up = "../".repeat(entry.path.matches('/').count() + 2);
            let linked = std::os::unix::fs::symlink(format!("{up}blobs/{}", entry.hash), path);
            match linked {
                // another process was faster
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                linked => linked.with_context(cannot)?,
            }
        }
        #[cfg(not(unix))]
        fs::copy(self.blob(entry), path).with_context(cannot)?;
        ensure!(
            self.is_there(path, entry),
            "{}: changed while it was fetched",
            path.display()
        );
        Ok(())
    }

    /// Notes which commit the revision was at, for those who ask the cache alone.
    fn note(&self) -> Result<()> {
        if is_commit(self.asked.revision) {
            return Ok(());
        }
        let path = self.place.join("refs").join(self.asked.revision);
        if fs::read_to_string(&path).is_ok_and(|known| known.trim() == self.commit) {
            return Ok(());
        }
        create_folder(path.parent().unwrap_or(&self.place))?;
        write_whole(&path, self.commit.as_bytes())
    }
}

/// Whether a file has the size, and if it is a small one the hash, of an entry.
fn is_whole(path: &Path, entry: &Entry) -> bool {
    let sized = fs::metadata(path).is_ok_and(|metadata| metadata.is_file() && metadata.len() == entry.size);
    sized && (entry.size > SMALL || hash_of(path, entry.is_large()).is_ok_and(|found| found == entry.hash))
}

fn create_folder(path: &Path) -> Result<()> {
    fs::create_dir_all(path).with_context(|| format!("{}: cannot make this folder", path.display()))
}

/// Adds up what came.
struct Progress<'w> {
    watch: Option<&'w Watch>,
    total: u64,
    state: RefCell<(u64, Instant)>,
}

impl<'w> Progress<'w> {
    fn of(watch: Option<&'w Watch>, total: u64) -> Self {
        Self {
            watch,
            total,
            state: RefCell::new((0, Instant::now())),
        }
    }

    fn done(&self) -> u64 {
        self.state.borrow().0
    }

    fn back_to(&self, done: u64) {
        self.state.borrow_mut().0 = done;
    }

    fn add(&self, bytes: u64) {
        self.state.borrow_mut().0 += bytes;
        self.tell(false);
    }

    fn tell(&self, in_any_case: bool) {
        let mut state = self.state.borrow_mut();
        if self.total == 0 || (!in_any_case && state.1.elapsed() < TOLD) {
            return;
        }
        state.1 = Instant::now();
        if let Some(watch) = self.watch {
            watch(Transfer {
                done: state.0.min(self.total),
                total: self.total,
            });
        }
    }
}
