//! A run from its command line to its exit code: the stages in order, each only if its result is missing.

use std::fs::{self, File};

use anyhow::{Context, Result, anyhow, bail};

use crate::bench;
use crate::cli::{Args, Bench, Command, CommandLine, Resume, StageName};
use crate::config::RunConfig;
use crate::done::{self, Standing};
use crate::durable::remove_file;
use crate::failure::Blame;
pub use crate::failure::Failure;
use crate::fit::Ending;
use crate::materials::Materials;
use crate::progress::{Display, warn};
use crate::signals::StopFlag;
use crate::{
    checkpoint, config_file, evaluation, examples, from_hub, inputs, plan, prepare, provenance, source, training,
    warm_start,
};

/// Does what the command line asks for and returns the exit code.
pub fn obey(line: &CommandLine) -> Result<u8, Failure> {
    match (&line.command, &line.run) {
        (Some(Command::Bench(Bench::Step(arguments))), _) => {
            if let Some(threads) = arguments.threads {
                use_threads(threads).input()?;
            }
            let report = bench::step(arguments)?;
            print(&if arguments.json {
                serde_json::to_string(&report).work()?
            } else {
                bench::table(&report)
            })?;
            Ok(0)
        }
        (None, Some(args)) => run(args),
        (None, None) => Err(anyhow!("--config FILE: expected a run file")).input(),
    }
}

fn use_threads(threads: usize) -> Result<()> {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
    pool.build_global().with_context(|| format!("threads {threads}"))
}

/// Runs what `args` ask for and returns the exit code.
pub fn run(args: &Args) -> Result<u8, Failure> {
    let display = Display::detect(args.quiet);
    let stop = StopFlag::listen().work()?;
    let mut config = config_file::load(&args.config, &args.overrides).input()?;
    config.drafter.allow.extend(&args.allow);
    if let Some(threads) = config.threads {
        use_threads(threads).work()?;
    }
    from_hub::fetch(&mut config, args.quiet).input()?;
    let materials = Materials::open(&config).input()?;
    let resolved = config_file::to_toml(materials.config()).work()?;
    if args.print_config {
        print(&resolved)?;
        return Ok(0);
    }
    inputs::check(&materials).input()?;
    if args.dry_run || is_fresh(&config, &args.resume).input()? {
        for line in warm_start::check(&materials).input()? {
            warn(&line);
        }
    }
    if args.dry_run {
        print(&plan::dry_run(&materials, display)?)?;
        return Ok(0);
    }
    let _lock = lock(materials.config()).input()?;
    check_contract(&materials, args).input()?;
    provenance::write(&materials.config().run_dir, materials.config()).work()?;
    if let Some(start) = &materials.start {
        start.write(&materials.config().run_dir).work()?;
    }
    display.note(&format!("resolved run file:\n{resolved}"));

    let run = Run {
        materials: &materials,
        args,
        display,
        stop: &stop,
    };
    let code = match args.stage {
        None => run.all_stages()?,
        Some(stage) => run.stage(stage)?,
    };
    Ok(u8::try_from(code).unwrap_or(1))
}

/// What every stage is given.
struct Run<'r> {
    materials: &'r Materials,
    args: &'r Args,
    display: Display,
    stop: &'r StopFlag,
}

impl Run<'_> {
    fn all_stages(&self) -> Result<i32, Failure> {
        for stage in [StageName::Prepare, StageName::Capture, StageName::Train] {
            let code = self.stage(stage)?;
            if code != 0 {
                return Ok(code);
            }
        }
        let Some(prompts) = &self.materials.config().evaluate.prompts else {
            self.display.note("evaluate: evaluate.prompts names no prompts");
            return Ok(0);
        };
        match done::evaluation(self.materials, prompts).input()? {
            Standing::Done => {
                self.display.note("evaluate: evaluation.json is there");
                return Ok(0);
            }
            Standing::Missing => {}
            Standing::Stale(why) => self.display.note(&format!("evaluate: {why}; measuring again")),
        }
        self.stage(StageName::Evaluate)
    }

    fn stage(&self, stage: StageName) -> Result<i32, Failure> {
        match stage {
            StageName::Prepare => {
                prepare::prepare(self.materials, self.display, self.stop)?;
                if self.stop.exit_code().is_some() {
                    self.display.note("stopped; the answers so far are kept");
                }
            }
            StageName::Capture => {
                let examples = examples::load(self.materials, self.display).input()?;
                source::capture_missing(self.materials, &examples, self.display)?;
            }
            StageName::Train => self.train()?,
            StageName::Evaluate => print(&evaluation::evaluate_final(self.materials, self.display)?)?,
        }
        // a signal that came too late for its stage still keeps the next one from starting
        Ok(self.stop.exit_code().unwrap_or(0))
    }

    fn train(&self) -> Result<(), Failure> {
        let materials = self.materials;
        let examples = examples::load(materials, Display::Quiet).input()?;
        let source = source::open(materials, examples, self.stop).input()?;
        if self.args.resume == Resume::Auto {
            let published = materials.config().run_dir.join("final");
            match done::training(materials, &source).input()? {
                Standing::Done => {
                    self.display.note(&format!("train: {} is there", published.display()));
                    return Ok(());
                }
                Standing::Missing => {}
                Standing::Stale(why) => self.display.note(&format!("train: {why}; publishing it again")),
            }
        }
        // what was measured on older weights no longer holds
        remove_file(&done::evaluation_path(materials)).work()?;
        let ending = training::train(materials, &source, &self.args.resume, self.display, self.stop)?;
        if let Ending::Stopped(_, folder) = ending {
            self.display.note(&format!("stopped; saved {}", folder.display()));
        }
        Ok(())
    }
}

/// Whether nothing is there to go on from.
fn is_fresh(config: &RunConfig, resume: &Resume) -> Result<bool> {
    Ok(!matches!(resume, Resume::From(_)) && checkpoint::latest(&config.run_dir)?.is_none())
}

/// Refuses a run folder of another run before anything in it is overwritten.
fn check_contract(materials: &Materials, args: &Args) -> Result<()> {
    let config = materials.config();
    let folder = match (&args.resume, checkpoint::latest(&config.run_dir)?) {
        (Resume::From(folder), _) => folder.clone(),
        (_, None) => return Ok(()),
        (Resume::Auto, Some(folder)) => folder,
        (Resume::Never, Some(folder)) => bail!(
            "--resume never: {} exists; choose another run_dir or remove it",
            folder.display()
        ),
    };
    let progress = checkpoint::read_progress(&folder)?;
    progress
        .check_same_run(&checkpoint::contract(config, materials.start.as_ref())?, &progress.data)
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

fn print(text: &str) -> Result<(), Failure> {
    dflash_eval::console::print(&format!("{}\n", text.trim_end())).work()
}
