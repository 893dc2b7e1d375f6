//! `push` and `hf://` against a hub on this machine: what is sent, what is refused, and what happens when a wire breaks.

mod faults;
mod hostile;
mod push;
mod references;
mod stub;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use dflash_model::folder::{AcceptanceRow, Existing, ModelCard, read_config, read_tensors, write};
use serde_json::json;

use crate::folders::{config, publish, text};
use stub::{STORAGE_TOKEN, Stub, TOKEN, header};

const REPO: &str = "org/drafter";

/// A hub, a drafter folder and the home of the hub's tools, in one place that is searched for the token afterwards.
struct Scene {
    stub: Stub,
    root: tempfile::TempDir,
}

impl Scene {
    fn new() -> Self {
        let scene = Self {
            stub: Stub::start(),
            root: tempfile::tempdir().unwrap(),
        };
        write_drafter(&scene.folder());
        scene
    }

    fn folder(&self) -> PathBuf {
        self.root.path().join("drafter")
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_dflash-export"));
        for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("HF_") || name.contains("PROXY")) {
            command.env_remove(name);
        }
        command
            .args(arguments)
            .env("HF_ENDPOINT", &self.stub.address)
            .env("HF_HOME", self.root.path().join("home"))
            .env("HF_TOKEN", TOKEN)
            .env("HF_XET_CLIENT_RETRY_BASE_DELAY", "10ms")
            .env("HF_XET_CLIENT_RETRY_MAX_ATTEMPTS", "1")
            .env("RUST_LOG", "trace");
        command
    }

    fn run(&self, arguments: &[&str]) -> Run {
        Run::of(&self.command(arguments).output().unwrap())
    }

    fn push(&self, options: &[&str]) -> Run {
        let folder = self.folder();
        let fixed = ["push", folder.to_str().unwrap(), "--repo", REPO];
        self.run(&[&fixed[..], options].concat())
    }

    /// Looks for the token in all that was sent, but for the one header, and in all files.
    fn check_secrets(&self) {
        let holds = |bytes: &[u8], secret: &str| bytes.windows(secret.len()).any(|part| part == secret.as_bytes());
        for request in &self.stub.state().requests {
            let others = request
                .headers
                .iter()
                .filter(|line| !line.to_ascii_lowercase().starts_with("authorization:"));
            let said = others
                .cloned()
                .chain([request.line.clone()])
                .collect::<Vec<_>>()
                .join("\n");
            assert!(!holds(said.as_bytes(), TOKEN) && !holds(&request.body, TOKEN), "{said}");
            // the storage of large files is another place: our token is none of its business
            let authorization = header(&request.headers, "authorization").unwrap_or_default();
            assert!(
                !request.line.contains("/v1/") || !authorization.contains(TOKEN),
                "{said}"
            );
        }
        for file in files_below(self.root.path()) {
            let bytes = std::fs::read(&file).unwrap();
            assert!(
                !holds(&bytes, TOKEN) && !holds(&bytes, STORAGE_TOKEN),
                "{}",
                file.display()
            );
        }
    }
}

fn files_below(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(files_below(&path));
        } else if path.is_file() {
            files.push(path);
        }
    }
    files
}

/// What the program did; that it never said the token is checked here, for every run of every test.
struct Run {
    code: i32,
    out: String,
    error: String,
}

impl Run {
    fn of(output: &Output) -> Self {
        let run = Self {
            code: output.status.code().unwrap(),
            out: text(&output.stdout),
            error: text(&output.stderr),
        };
        for said in [&run.out, &run.error] {
            assert!(!said.contains(TOKEN) && !said.contains(STORAGE_TOKEN), "{said}");
        }
        run
    }

    fn passed(self) -> String {
        assert_eq!(self.code, 0, "{}{}", self.out, self.error);
        self.out
    }

    fn refused(self, code: i32, words: &[&str]) -> String {
        assert_eq!(self.code, code, "{}{}", self.out, self.error);
        for word in words {
            assert!(self.error.contains(word), "{word:?} is not in: {}", self.error);
        }
        self.error
    }
}

/// A drafter as `dflash-export hf` would write it, with a card that may be published.
fn write_drafter(folder: &Path) {
    let plain = folder.with_extension("plain");
    publish(&plain, &config());
    let tensors = read_tensors(&plain, &read_config(&plain).unwrap(), &candle_core::Device::Cpu).unwrap();
    let mut card = ModelCard::named(REPO, "org/target");
    card.license = Some("mit".to_owned());
    card.acceptance.push(AcceptanceRow {
        prompts: "8 of heldout.jsonl".to_owned(),
        setting: "greedy".to_owned(),
        rounds: 100,
        acceptance_length: 3.5,
        acceptance_length_macro: 3.25,
    });
    write(folder, &config(), &tensors, &card, &json!({}), Existing::Refuse).unwrap();
    std::fs::remove_dir_all(plain).unwrap();
}
