//! `push`: a drafter folder to the Hugging Face hub, in one commit.
//!
//! The folder is read as an engine would read it, its card is checked, and only files of a fixed list are sent. What goes
//! over the wire, and what is asked before, is `dflash_data::hub`'s.

pub mod card;
pub mod files;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use dflash_data::hub::{Hub, SCHEME, Upload, Uploaded, Watch};
use dflash_eval::console::{self, Failure};
use dflash_eval::folder::{drafter_in, settle};
use dflash_eval::progress::transfer;
use dflash_model::formats;

use crate::convert::target_info;
use crate::inspect::inspect;
use files::{Selected, check_secret, select, way};

/// What `push` is told. The token is none of it: it comes from the environment alone.
#[derive(Debug, Args)]
#[expect(clippy::struct_excessive_bools, reason = "switches of a command line")]
pub struct Push {
    /// Drafter folder, or a run folder for its final.
    folder: PathBuf,
    /// Repository on the hub; made if it is not there.
    #[arg(long, value_name = "ORG/NAME")]
    repo: String,
    /// Make the repository a private one.
    #[arg(long)]
    private: bool,
    /// Propose the commit as a pull request.
    #[arg(long)]
    create_pr: bool,
    /// Branch; made from main if it is not there [default: main].
    #[arg(long, value_name = "BRANCH")]
    revision: Option<String>,
    /// Print what would be sent, and contact nothing.
    #[arg(long)]
    dry_run: bool,
    /// No progress.
    #[arg(long)]
    quiet: bool,
}

/// The longest model card, in bytes.
const LONGEST_CARD: u64 = 1_000_000;

/// A folder that may be pushed.
struct Checked {
    folder: PathBuf,
    method: &'static str,
    card: String,
    notes: Vec<String>,
    selected: Selected,
}

impl Push {
    /// Puts a folder of this machine in the place of one on the hub.
    ///
    /// # Errors
    /// When the hub does not have it.
    pub fn fetch(&mut self) -> Result<()> {
        let named = self.folder.to_string_lossy();
        ensure!(
            !(self.dry_run && named.starts_with(SCHEME)),
            "FOLDER: {}: --dry-run contacts nobody, and a folder of the hub may have to be fetched: name one of this machine",
            named.escape_debug()
        );
        settle("FOLDER", &mut self.folder, self.quiet)
    }

    /// Checks and sends, or with `--dry-run` checks and tells.
    ///
    /// # Errors
    /// As input: a folder that is no whole drafter, a card without licence, target or tags, a bad name, no token, no
    /// network allowed. As failure of the run: whatever the hub refuses.
    pub fn run(&self) -> Result<bool, Failure> {
        let hub = Hub::from_env();
        let checked = self.check(&hub).map_err(Failure::Input)?;
        let message = format!(
            "Upload {} drafter with dflash-export {}",
            checked.method,
            env!("CARGO_PKG_VERSION")
        );
        let upload = Upload {
            repository: &self.repo,
            revision: self.revision.as_deref(),
            private: self.private,
            create_pr: self.create_pr,
            message: &message,
            files: &checked.selected.files,
        };
        if self.dry_run {
            upload.check().map_err(Failure::Input)?;
            let text =
                self.listing(&checked) + &format!("card\n{}dry run     nothing was sent\n", indented(&checked.card));
            console::print(&text).map_err(Failure::Run)?;
            return Ok(true);
        }
        hub.may_upload(&upload).map_err(Failure::Input)?;
        console::print(&self.listing(&checked)).map_err(Failure::Run)?;
        let watch: Option<Watch> = (!self.quiet).then(|| transfer("upload"));
        let uploaded = hub.upload(&upload, watch).map_err(Failure::Run)?;
        console::print(&outcome(&uploaded)).map_err(Failure::Run)?;
        Ok(true)
    }

    /// Reads everything that is to be sent.
    fn check(&self, hub: &Hub) -> Result<Checked> {
        ensure!(self.folder.is_dir(), "{}: no such folder", self.folder.display());
        let folder = drafter_in(&self.folder)?;
        // read first: what is checked below is compared with it once more before it is sent
        let selected = select(&folder, &formats::config_value(&folder)?)?;
        let method = check_drafter(&folder)?;
        let path = folder.join("README.md");
        let card = card_of(&selected).with_context(|| path.display().to_string())?;
        if let Some(token) = hub.token() {
            check_secret(&selected.files, &token)?;
        }
        let notes = card::check(&card, &self.repo).with_context(|| path.display().to_string())?;
        Ok(Checked {
            folder,
            method,
            card,
            notes,
            selected,
        })
    }

    /// What is to be sent where.
    fn listing(&self, checked: &Checked) -> String {
        let mut text = String::new();
        let _ = writeln!(text, "folder      {} ({})", checked.folder.display(), checked.method);
        let branch = self.revision.as_deref().unwrap_or("main");
        let private = if self.private { ", private" } else { "" };
        let proposal = if self.create_pr { ", as a pull request" } else { "" };
        let _ = writeln!(text, "repository  {}, branch {branch}{private}{proposal}", self.repo);
        for file in &checked.selected.files {
            let _ = writeln!(text, "file        {}, {} bytes, {}", file.name, file.size, way(file));
        }
        for name in &checked.selected.left_out {
            let _ = writeln!(text, "left out    {name}");
        }
        for note in &checked.notes {
            let _ = writeln!(text, "note        {note}");
        }
        text
    }
}

/// The card, as it will be sent.
fn card_of(selected: &Selected) -> Result<String> {
    let file = selected.files.iter().find(|file| file.name == "README.md");
    let file = file.context("there is none: expected a model card")?;
    ensure!(
        file.size <= LONGEST_CARD,
        "{} bytes: a model card has at most {LONGEST_CARD}",
        file.size
    );
    let bytes = file.bytes().unwrap_or_default().to_vec();
    String::from_utf8(bytes).context("expected text in UTF-8")
}

/// Reads the drafter whole, as whoever downloads it will; returns its method.
fn check_drafter(folder: &Path) -> Result<&'static str> {
    let found = inspect(folder, None)?;
    let Some(method) = found.method.filter(|_| found.passed()) else {
        bail!("{}: not sent: {}", folder.display(), found.problems.join("; "));
    };
    // headers are right; now the numbers, each of which must be finite
    let info = target_info(folder, None)?;
    formats::read(folder, info.as_ref()).with_context(|| format!("{}: not sent", folder.display()))?;
    Ok(method)
}

fn outcome(uploaded: &Uploaded) -> String {
    let mut text = String::new();
    if uploaded.created {
        let _ = writeln!(text, "created     the repository is new");
    }
    if uploaded.sent.is_empty() {
        let _ = writeln!(
            text,
            "unchanged   the repository has all files already; no commit was made"
        );
    } else {
        let _ = writeln!(
            text,
            "sent        {} files; {} were there already",
            uploaded.sent.len(),
            uploaded.unchanged.len()
        );
    }
    let _ = writeln!(text, "commit      {}", uploaded.url);
    text
}

fn indented(text: &str) -> String {
    let lines: Vec<String> = text.lines().map(|line| format!("  {line}")).collect();
    lines.join("\n") + "\n"
}
