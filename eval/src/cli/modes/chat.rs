//! `dflash-eval chat`: a live view of what is accepted.

use anyhow::{Context, Result};
use clap::Args;
use dflash_data::Chat;
use std::io::{BufRead, IsTerminal, Write};

use crate::chat::{Talk, summary};
use crate::cli::arguments::{DraftArguments, SamplingArguments, TargetArguments, ThinkingName, use_threads};
use crate::console::{Failure, Precision, at_least_one};
use crate::evaluate::Options;
use crate::folder::Folder;
use crate::load::{bind, load_target, setting};

/// Options of the mode.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    target: TargetArguments,
    /// Drafter folder, or hf://org/name@revision.
    #[arg(long, value_name = "FOLDER")]
    drafter: Folder,
    #[command(flatten)]
    draft: DraftArguments,
    #[command(flatten)]
    sampling: SamplingArguments,
    /// Most new tokens an answer.
    #[arg(long, default_value_t = 1024, value_name = "TOKENS", value_parser = at_least_one)]
    max_new: usize,
    /// Thinking switch for the chat template [default: the template's own].
    #[arg(long, value_enum)]
    thinking: Option<ThinkingName>,
    /// Seed of sampling.
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

pub(crate) fn run(arguments: &Arguments) -> Result<bool, Failure> {
    let of = &arguments.target;
    let prepared = || {
        use_threads(of.threads)?;
        let bf16 = of.dtype == Precision::Bf16;
        let mut setting = setting(of.folder()?, &of.device, bf16)?;
        let thinking = match arguments.thinking {
            None => None,
            Some(ThinkingName::On) => Some(true),
            Some(ThinkingName::Off) => Some(false),
            Some(ThinkingName::Both) => anyhow::bail!("--thinking both: a conversation has one; expected on or off"),
        };
        let options = Options {
            block: arguments.draft.block.unwrap_or_default(),
            sampling: arguments.sampling.config()?,
            exact_verify: arguments.draft.exact_verify,
            seed: arguments.seed,
            ..Options::new(arguments.max_new, setting.stop_ids.clone())
        };
        let chat = Chat::load(of.folder()?)?;
        let target = load_target(of.folder()?, &of.device, bf16)?;
        let drafting = bind(
            arguments.drafter.place("--drafter", of.quiet)?,
            arguments.draft.without_selector,
            target.as_ref(),
            &mut setting,
        )?;
        options.width(&drafting).context("--block")?;
        Ok((options, chat, target, drafting, thinking))
    };
    let (options, chat, target, drafting, thinking) = prepared().map_err(Failure::Input)?;
    let mut talk = Talk::new(target.as_ref(), &drafting, &chat, &options, thinking).map_err(Failure::Run)?;
    converse(&mut talk, of.quiet).map_err(Failure::Run)?;
    Ok(true)
}

/// Reads lines until the input ends. Answers go to standard output, all else to standard error.
fn converse(talk: &mut Talk<'_>, quiet: bool) -> Result<()> {
    let (input, out) = (std::io::stdin(), std::io::stdout());
    let asks = input.is_terminal() && !quiet;
    let colour = out.is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    if asks {
        let drafted = if colour {
            "\u{1b}[32mdrafted\u{1b}[0m"
        } else {
            "drafted"
        };
        eprintln!("{drafted} tokens were accepted, others are the target's own. /reset forgets, /quit ends.");
    }
    loop {
        if asks {
            eprint!("> ");
        }
        let mut line = String::new();
        if input.lock().read_line(&mut line).context("standard input")? == 0 {
            return Ok(());
        }
        match line.trim() {
            "" => continue,
            "/quit" => return Ok(()),
            "/reset" => {
                talk.reset()?;
                continue;
            }
            _ => {}
        }
        let mut broken = None;
        let answer = talk.say(line.trim(), &mut |text, drafted| {
            let mut out = out.lock();
            let written = if drafted && colour {
                write!(out, "\u{1b}[32m{text}\u{1b}[0m")
            } else {
                write!(out, "{text}")
            };
            broken = broken.take().or(written.and_then(|()| out.flush()).err());
        });
        if let Some(error) = broken {
            return if error.kind() == std::io::ErrorKind::BrokenPipe {
                Ok(())
            } else {
                Err(error).context("standard output")
            };
        }
        match answer {
            Ok(answer) => {
                crate::console::print("\n")?;
                if !quiet {
                    eprintln!("{}", summary(&answer));
                }
            }
            // one impossible turn does not end the conversation; in a script it must not go unnoticed
            Err(error) if asks => eprintln!("error: {error:#}"),
            Err(error) => return Err(error),
        }
    }
}
