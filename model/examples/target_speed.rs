//! Times a target on this CPU: prefill through taps and through the full forward, plain decoding, verification.
//!
//! `cargo run --release -p dflash-model --example target_speed -- DIR [CONTEXT] [f32|bf16]`; RAYON_NUM_THREADS sets
//! the threads.
#![expect(clippy::print_stdout, reason = "a program that prints its measurements")]

use std::time::Instant;

use candle_core::{DType, Device, Result, bail};
use dflash_model::{LogitRows, Target, target, with_threads_awake};

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let Some(dir) = args.first() else {
        bail!("usage: target_speed DIR [CONTEXT] [f32|bf16]")
    };
    let context = args
        .get(1)
        .map_or(Ok(1024), |text| text.parse())
        .map_err(candle_core::Error::wrap)?;
    let compute = match args.get(2).map(String::as_str) {
        None | Some("f32") => DType::F32,
        Some("bf16") => DType::BF16,
        Some(other) => bail!("compute type {other:?}: expected f32 or bf16"),
    };
    let target = target::load(dir.as_ref(), &Device::Cpu, compute)?;
    let vocab = target.info().vocab_size as u32;
    let tokens: Vec<u32> = (0..context as u32 + 64)
        .map(|i| i.wrapping_mul(2_654_435_761) % vocab)
        .collect();
    let (prompt, rest) = tokens.split_at(context);
    let last = target.info().num_layers - 2;
    let taps: Vec<usize> = [1, 3, 5].into_iter().filter(|tap| *tap <= last).collect();
    let threads = rayon::current_num_threads();
    println!("{threads} threads, {context} tokens of context, {compute:?}");

    with_threads_awake(|| measure(target.as_ref(), prompt, rest, &taps))
}

fn measure(target: &dyn Target, prompt: &[u32], rest: &[u32], taps: &[usize]) -> Result<()> {
    let context = prompt.len();
    let seconds = fastest(7, || target.taps(prompt, taps).map(drop))?;
    println!("taps {taps:?}          {:>9.0} tokens/s", context as f64 / seconds);
    let seconds = fastest(7, || target.session(taps)?.forward(prompt, LogitRows::Last).map(drop))?;
    println!("full forward           {:>9.0} tokens/s", context as f64 / seconds);

    let mut session = target.session(taps)?;
    session.forward(prompt, LogitRows::None)?;
    let mut next = rest.iter().cycle();
    let one = fastest(32, || {
        session
            .forward(&[*next.next().unwrap_or(&0)], LogitRows::Last)
            .map(drop)
    })?;
    println!("decode                 {:>9.0} tokens/s", 1.0 / one);
    for rows in (1..=8).chain([16]) {
        let seconds = fastest(32, || session.verify(&rest[..rows])?.commit(0))?;
        println!(
            "verify {rows:>2} rows         {:>9.2} times a decode step, {:.3} ms",
            seconds / one,
            seconds * 1e3
        );
    }
    let seconds = fastest(15, || session.verify(&rest[..8])?.commit(5))?;
    println!("verify 8 and commit 5  {:>9.2} times a decode step", seconds / one);
    Ok(())
}

/// Seconds of the fastest of `repeats` runs after one to warm up: other programs on the machine only ever add time.
fn fastest(repeats: usize, mut work: impl FnMut() -> Result<()>) -> Result<f64> {
    work()?;
    let mut times = Vec::with_capacity(repeats);
    for _ in 0..repeats {
        let start = Instant::now();
        work()?;
        times.push(start.elapsed().as_secs_f64());
    }
    times.sort_by(f64::total_cmp);
    Ok(times[0])
}
