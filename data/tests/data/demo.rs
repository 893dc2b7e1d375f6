//! The demo target, from its prompts to stored taps.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use candle_core::{DType, Device};
use dflash_data::{
    CaptureConfig, Chat, DEFAULT_SHARD_BYTES, Example, Identity, TapSource, TapStore, capture, prompt_tokens,
    read_jsonl, target_hash,
};
use dflash_model::Target;

#[test]
fn taps_of_the_demo_target_are_the_same_bits_stored_online_and_with_any_number_of_workers() {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("demo");
    let folder = demo.join("target");
    let chat = Chat::load(&folder).unwrap();
    let target: Arc<dyn Target> = dflash_model::target::load(&folder, &Device::Cpu, DType::F32)
        .unwrap()
        .into();
    let layers = vec![1, 3, 5];
    let identity = Identity {
        target: target_hash(&folder).unwrap(),
        tokenizer: chat.tokenizer.hash().to_owned(),
        template: chat.template.hash().to_owned(),
        thinking: Some(false),
        layers: layers.clone(),
        hidden_size: target.info().hidden_size,
    };
    // other prompts stand in for answers: only the numbers matter here
    let prompts: Vec<Vec<u32>> = read_jsonl(&demo.join("heldout.jsonl"))
        .unwrap()
        .iter()
        .map(|(_, row)| prompt_tokens(&chat, row, Some(false)).unwrap())
        .collect();
    let examples: Vec<Example> = prompts
        .chunks_exact(5)
        .enumerate()
        .map(|(i, group)| Example::of_response(&group[0], &group[1..].concat(), i + 1))
        .collect();
    let tokens: usize = examples.iter().map(|example| example.tokens.len()).sum();
    let online = TapSource::online(Arc::clone(&target), layers, examples.clone()).unwrap();
    for workers in [1, 2] {
        let taps = tempfile::tempdir().unwrap();
        let config = CaptureConfig {
            folder: taps.path().to_path_buf(),
            identity: identity.clone(),
            shard_bytes: DEFAULT_SHARD_BYTES,
            workers,
        };
        let started = Instant::now();
        capture(target.as_ref(), &examples, &config, &mut |_, _| {}).unwrap();
        let seconds = started.elapsed().as_secs_f64();
        eprintln!(
            "{workers} workers: {tokens} tokens in {seconds:.2} s, {:.0} tokens/s",
            tokens as f64 / seconds
        );
        let stored = TapSource::Stored(TapStore::open(taps.path(), &identity).unwrap());
        for i in 0..examples.len() {
            assert_eq!(
                stored.sample(i).unwrap(),
                online.sample(i).unwrap(),
                "example {i}, {workers} workers"
            );
        }
    }
}
