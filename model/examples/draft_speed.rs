//! Times a drafter beside its target: one proposal, one context update.
//!
//! `cargo run --release -p dflash-model --example draft_speed -- TARGET DRAFTER [CONTEXT]`; RAYON_NUM_THREADS sets the
//! threads.
#![expect(clippy::print_stdout, reason = "a program that prints its measurements")]

use std::time::Instant;

use candle_core::{DType, Device, Result, bail};
use dflash_model::{BoundDrafter, Drafter, Drafting, LogitRows, Sampling, target, with_threads_awake};

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let (Some(target), Some(drafter)) = (args.first(), args.get(1)) else {
        bail!("usage: draft_speed TARGET DRAFTER [CONTEXT]")
    };
    let context = args
        .get(2)
        .map_or(Ok(128), |text| text.parse())
        .map_err(candle_core::Error::wrap)?;
    let target = target::load(target.as_ref(), &Device::Cpu, DType::F32)?;
    let drafter = BoundDrafter::new(Drafter::load(drafter.as_ref(), &Device::Cpu)?, target.head())?;
    let vocab = target.info().vocab_size as u32;
    let tokens: Vec<u32> = (0..context)
        .map(|i: u32| i.wrapping_mul(2_654_435_761) % vocab)
        .collect();
    with_threads_awake(|| {
        let taps = target.session(drafter.taps())?.forward(&tokens, LogitRows::None)?.taps;
        let width = drafter.block_size() - 1;
        let mut session = drafter.session()?;
        session.extend(&taps)?;
        let mut fastest = f64::INFINITY;
        for _ in 0..400 {
            let start = Instant::now();
            session.propose(tokens[0], width, &mut Sampling::Greedy)?;
            fastest = fastest.min(start.elapsed().as_secs_f64());
        }
        println!("propose {width}      {:>7.3} ms", fastest * 1e3);
        for rows in [1, 3, 8] {
            let some = taps.narrow(0, 0, rows)?;
            let mut fastest = f64::INFINITY;
            for _ in 0..50 {
                let start = Instant::now();
                session.extend(&some)?;
                fastest = fastest.min(start.elapsed().as_secs_f64());
            }
            println!("extend by {rows}     {:>7.3} ms", fastest * 1e3);
        }
        Ok(())
    })
}
