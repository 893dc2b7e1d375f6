//! A drafter comes back from its GGUF file as it went in.

use candle_core::{DType, Tensor};
use dflash_export::gguf::file::Stored;
use dflash_model::formats::gguf::GgufFile;
use dflash_model::formats::{self, Format};
use dflash_model::{ConvConfig, DrafterConfig, LayerRule, SelectorConfig};
use proptest::prelude::*;

use super::{source, target_of, write};

fn bits(tensor: &Tensor) -> Vec<u32> {
    let wide = tensor.flatten_all().unwrap().to_dtype(DType::F32).unwrap();
    wide.to_vec1::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
}

fn values(tensor: &Tensor) -> Vec<f32> {
    tensor
        .flatten_all()
        .unwrap()
        .to_dtype(DType::F32)
        .unwrap()
        .to_vec1()
        .unwrap()
}

/// Any configuration that GGUF can say; sizes are multiples of `unit`, so that rows can be whole blocks.
fn configs(unit: usize) -> impl Strategy<Value = DrafterConfig> {
    let sizes = (1_usize..4, 1_usize..4, 1_usize..3, 1_usize..3, 1_usize..4, 8_usize..50);
    let rules = (prop::option::of(8_usize..40), any::<bool>(), any::<u64>());
    let numbers = (
        prop::sample::select(vec![1e-6, 1e-5, 0.0123]),
        prop::sample::select(vec![1e4, 5e5, 1e7]),
    );
    let scales = prop::option::of((0.5_f32..2.0, 1.0_f32..50.0, 0.5_f32..2.0));
    let second = prop::option::of((1_usize..4, any::<bool>(), 1_usize..9, 1_usize..6));
    (sizes, rules, numbers, scales, second, 2_usize..9).prop_map(
        move |(sizes, rules, numbers, scales, second, block_size)| {
            let (hidden, inner, kv, per_kv, layers, vocab_size) = sizes;
            let (window, causal, chosen) = rules;
            let hidden_size = 2 * unit * hidden;
            let slides = |layer: usize| window.filter(|_| chosen >> layer & 1 == 1);
            let single = |value: f32| value.to_string().parse::<f64>().unwrap();
            let lattice = (1..=hidden_size).rfind(|k| k * (k + 1) <= hidden_size).unwrap();
            DrafterConfig {
                hidden_size,
                intermediate_size: unit * inner,
                num_heads: kv * per_kv,
                num_kv_heads: kv,
                head_dim: 2 * unit,
                layers: (0..layers)
                    .map(|layer| LayerRule {
                        window: slides(layer),
                        causal,
                    })
                    .collect(),
                vocab_size,
                num_target_layers: 6,
                target_layer_ids: (0..5).filter(|id| *id == 3 || chosen >> (8 + id) & 1 == 1).collect(),
                block_size,
                mask_token_id: (chosen % vocab_size as u64) as u32,
                rms_norm_eps: numbers.0,
                rope_theta: numbers.1,
                max_positions: 64,
                output_multiplier: scales.map_or(1.0, |scales| single(scales.0)),
                final_logit_softcapping: scales.map(|scales| single(scales.1)),
                input_embedding_scale: scales.map_or(1.0, |scales| single(scales.2)),
                conv: second.map(|(taps, wide, ..)| ConvConfig {
                    kernel_size: taps.min(block_size),
                    group_size: if wide { hidden_size } else { 2 },
                }),
                selector: second.map(|(_, _, rank, top_k)| SelectorConfig {
                    rank,
                    top_k: top_k.min(lattice).min(vocab_size),
                }),
            }
        },
    )
}

fn single_configs() -> impl Strategy<Value = DrafterConfig> {
    configs(1)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// The float types lose nothing but what rounding to them loses, and the configuration nothing at all.
    #[test]
    fn floats_and_configuration_come_back_to_the_bit(
        config in single_configs(),
        qwen3_5: bool,
        seed in 0_u64..1000,
        halves: bool,
    ) {
        let target = target_of(&config, qwen3_5);
        let folder = tempfile::tempdir().unwrap();
        let given = if halves { DType::BF16 } else { DType::F32 };
        let source = source(&config, given, seed);
        for (stored, dtype) in [(Stored::F32, DType::F32), (Stored::Bf16, DType::BF16)] {
            let path = folder.path().join(format!("{stored:?}.gguf"));
            write(&path, &source, &target, stored).unwrap();
            let read = formats::read(&path, Some(&target.info)).unwrap();
            prop_assert_eq!(read.format, Format::Gguf);
            prop_assert_eq!(&read.config, &config);
            prop_assert_eq!(&read.notes, &Vec::<String>::new());
            prop_assert_eq!(read.tensors.len(), source.tensors.len());
            for (name, tensor) in &source.tensors {
                let found = &read.tensors[name];
                let single = tensor.rank() == 1 || name.ends_with("base_kernel");
                prop_assert_eq!(found.dtype(), if single { DType::F32 } else { dtype }, "{}", name);
                prop_assert_eq!(found.dims(), tensor.dims(), "{}", name);
                let expected = tensor.to_dtype(DType::F32).unwrap().to_dtype(found.dtype()).unwrap();
                prop_assert_eq!(bits(found), bits(&expected), "{}", name);
            }
        }
    }

    /// Matrices in blocks come back within half a step of their block, all else to the bit, and the reader says so.
    #[test]
    fn blocks_come_back_within_half_a_step(config in configs(32), seed in 0_u64..1000) {
        let target = target_of(&config, true);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("q8_0.gguf");
        let source = source(&config, DType::BF16, seed);
        write(&path, &source, &target, Stored::Q8_0).unwrap();
        let read = formats::read(&path, Some(&target.info)).unwrap();
        prop_assert_eq!(&read.config, &config);
        let matrices = 1 + 7 * config.layers.len();
        prop_assert_eq!(&read.notes, &vec![format!("{matrices} tensors were widened from Q8_0 to F32")]);
        for (name, tensor) in &source.tensors {
            let (given, found) = (values(tensor), values(&read.tensors[name]));
            let kept = name.starts_with("candidate_selector.") || name.contains("_conv.") || tensor.rank() == 1;
            if kept {
                prop_assert_eq!(bits(tensor), bits(&read.tensors[name]), "{}", name);
                continue;
            }
            for (given, found) in given.chunks(32).zip(found.chunks(32)) {
                let step = given.iter().fold(0.0_f32, |most, value| most.max(value.abs())) / 127.0;
                // the scale is a half float: 11 bits, or steps of 2^-24
                let scale = 127.0 * (step / 2048.0 + 6e-8);
                for (a, b) in given.iter().zip(found) {
                    prop_assert!((a - b).abs() <= 0.5 * step + scale, "{name}: {a} came back as {b}, step {step}");
                }
            }
        }
    }
}

/// What is read from a GGUF file is written as the same file again.
#[test]
fn a_second_generation_is_the_first_byte_for_byte() {
    let config = super::dflash2();
    let target = target_of(&config, true);
    let folder = tempfile::tempdir().unwrap();
    let (first, second) = (folder.path().join("first.gguf"), folder.path().join("second.gguf"));
    write(&first, &source(&config, DType::BF16, 5), &target, Stored::F16).unwrap();
    let read = formats::read(&first, Some(&target.info)).unwrap();
    write(&second, &read, &target, Stored::F16).unwrap();
    assert_eq!(std::fs::read(&first).unwrap(), std::fs::read(&second).unwrap());
    assert_eq!(
        GgufFile::open(&first).unwrap().tensors().len(),
        config.tensor_shapes().len()
    );
}
