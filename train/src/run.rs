//! A run from its command line to its exit code: the stages in order, each only if its result is missing.

use std::fs::{self, File};
use std::io::Write;

use anyhow::{Context, Result, anyhow};

use crate::checkpoint;
use crate::cli::{Args, Resume, StageName};
use crate::config::RunConfig;
use crate::fit::Ending;
use crate::materials::Materials;
use crate::progress::Display;
use crate::signals::StopFlag;
use crate::{config_file, evaluation, examples, plan, prepare, provenance, source, training};

/// Why a run ended early.
#[derive(Debug)]
pub enum Failure {
    /// The command line, the run file or a file that it names is wrong: exit code 2.
    Input(anyhow::Error),
    /// Something went wrong on the way: exit code 1.
    Work(anyhow::Error),
}

impl From<anyhow::Error> for Failure {
    fn from(error: anyhow::Error) -> Self {
        Self::Work(error)
    }
}

/// Runs what `args` ask for and returns the exit code.
pub fn run(args: &Args) -> Result<u8, Failure> {
    let display = Display::detect(args.quiet);
    let stop = StopFlag::listen()?;
    let config = config_file::load(&args.config, &args.overrides).map_err(Failure::Input)?;
    if let Some(threads) = config.threads {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
        pool.build_global().context("threads")?;
    }
    let materials = Materials::open(&config).map_err(Failure::Input)?;
    let resolved = config_file::to_toml(materials.config())?;
    if args.print_config {
        print(&resolved)?;
        return Ok(0);
    }
    if args.dry_run {
        print(&plan::dry_run(&materials, display)?)?;
        return Ok(0);
    }
    let _lock = lock(materials.config()).map_err(Failure::Input)?;
    check_contract(&materials, args).map_err(Failure::Input)?;
    provenance::write(&materials.config().run_dir, materials.config())?;
    display.note(&format!("resolved run file:\n{resolved}"));

    let code = match args.stage {
        None => all_stages(&materials, args, display, &stop)?,
        Some(stage) => one_stage(&materials, stage, args, display, &stop)?,
    };
    Ok(u8::try_from(code).unwrap_or(1))
}

fn all_stages(materials: &Materials, args: &Args, display: Display, stop: &StopFlag) -> Result<i32, Failure> {
    let config = materials.config();
    let measured = config.run_dir.join("evaluation.json");
    let mut code = 0;
    for stage in [
        StageName::Prepare,
        StageName::Capture,
        StageName::Train,
        StageName::Evaluate,
    ] {
        if stage == StageName::Evaluate && (config.evaluate.prompts.is_none() || measured.exists()) {
            display.note(if measured.exists() {
                "evaluate: evaluation.json is there"
            } else {
                "evaluate: evaluate.prompts names no prompts"
            });
            continue;
        }
        code = one_stage(materials, stage, args, display, stop)?;
        if code != 0 {
            break;
        }
    }
    Ok(code)
}

fn one_stage(
    materials: &Materials,
    stage: StageName,
    args: &Args,
    display: Display,
    stop: &StopFlag,
) -> Result<i32, Failure> {
    let run_dir = &materials.config().run_dir;
    match stage {
        StageName::Prepare => Ok(prepare::prepare(materials, display, stop)?.unwrap_or(0)),
        StageName::Capture => {
            let examples = examples::load(materials, display).map_err(Failure::Input)?;
            source::capture_missing(materials, &examples, display)?;
            Ok(stop.exit_code().unwrap_or(0))
        }
        StageName::Train => {
            let examples = examples::load(materials, Display::Quiet).map_err(Failure::Input)?;
            let source = source::open(materials, examples)?;
            if args.resume == Resume::Auto && is_trained(materials, &source)? {
                display.note(&format!("train: {} is there", run_dir.join("final").display()));
                return Ok(0);
            }
            // what was measured on older weights no longer holds
            remove_if_there(&run_dir.join("evaluation.json"))?;
            match training::train(materials, &source, &args.resume, display, stop)? {
                Ending::Done(..) => Ok(0),
                Ending::Stopped(code, folder) => {
                    display.note(&format!("stopped; saved {}", folder.display()));
                    Ok(code)
                }
            }
        }
        StageName::Evaluate => {
            print(&evaluation::evaluate_final(materials, display)?)?;
            Ok(0)
        }
    }
}

/// Whether the newest checkpoint is that of the last step and `final` is published.
fn is_trained(materials: &Materials, source: &source::Source) -> Result<bool> {
    let config = materials.config();
    let Some(folder) = checkpoint::latest(&config.run_dir)? else {
        return Ok(false);
    };
    let progress = checkpoint::read_progress(&folder)?;
    progress
        .check_same_run(&checkpoint::contract(config)?, &source.identity)
        .with_context(|| folder.display().to_string())?;
    Ok(progress.step == source.order.total_steps() && config.run_dir.join("final").is_dir())
}

/// Refuses a run folder of another run before anything in it is overwritten.
fn check_contract(materials: &Materials, args: &Args) -> Result<()> {
    let config = materials.config();
    let folder = match &args.resume {
        Resume::Auto => checkpoint::latest(&config.run_dir)?,
        Resume::From(folder) => Some(folder.clone()),
        Resume::Never => None,
    };
    let Some(folder) = folder else {
        return Ok(());
    };
    let progress = checkpoint::read_progress(&folder)?;
    progress
        .check_same_run(&checkpoint::contract(config)?, &progress.data)
        .with_context(|| folder.display().to_string())
}

/// Keeps a second process out of the run folder for as long as the handle lives.
fn lock(config: &RunConfig) -> Result<File> {
    let run_dir = &config.run_dir;
    fs::create_dir_all(run_dir).with_context(|| format!("making {}", run_dir.display()))?;
    let path = run_dir.join(".lock");
    let file = File::create(&path).with_context(|| path.display().to_string())?;
    file.try_lock()
        .map_err(|_| anyhow!("{}: another process is using this run folder", path.display()))?;
    Ok(file)
}

fn remove_if_there(path: &std::path::Path) -> Result<()> {
    if path.exists() {
        fs::remove_file(path).with_context(|| format!("removing {}", path.display()))?;
    }
    Ok(())
}

fn print(text: &str) -> Result<()> {
    writeln!(std::io::stdout(), "{}", text.trim_end()).context("standard output")
}
