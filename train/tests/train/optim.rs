//! AdamW against `torch.optim.AdamW` (`scripts/fixtures/adamw.py`) and its refusals.

use std::collections::BTreeMap;

use candle_core::{Device, Tensor, Var};
use dflash_train::gradient::{Gradient, Gradients};
use dflash_train::optim::{AdamW, AdamWSettings};

const PLAIN: AdamWSettings = AdamWSettings {
    beta1: 0.9,
    beta2: 0.999,
    eps: 1e-8,
    weight_decay: 0.0,
    clip: 1.0,
};

fn var(values: &[f32], shape: &[usize]) -> Var {
    Var::from_tensor(&Tensor::from_slice(values, shape, &Device::Cpu).unwrap()).unwrap()
}

fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

/// The fixture script's gradient.
fn gradient(offset: i64, step: i64, count: i64) -> Vec<f32> {
    (0..count)
        .map(|i| (((7 * i + 13 * step + offset) % 19 - 9) as f64 / 30.0 * (1.0 + step as f64 / 4.0)) as f32)
        .collect()
}

fn whole(values: &[f32]) -> Gradient {
    Gradient::Whole(Tensor::new(values, &Device::Cpu).unwrap())
}

#[test]
fn updates_equal_pytorchs_clip_decay_and_moments() {
    let text = include_str!("fixtures/adamw.json");
    let fixture: serde_json::Value = serde_json::from_str(text).unwrap();
    let start: Vec<f32> = (0..12).map(|i| i as f32 / 10.0 - 0.5).collect();
    let vars = BTreeMap::from([
        ("a.weight".to_owned(), var(&start, &[3, 4])),
        ("b.weight".to_owned(), var(&[1.0; 4], &[4])),
    ]);
    let settings = AdamWSettings {
        beta2: 0.95,
        weight_decay: 0.1,
        ..PLAIN
    };
    let mut optimizer = AdamW::new(settings, &vars).unwrap();
    let mut clipped = 0;
    for (step, row) in fixture["steps"].as_array().unwrap().iter().enumerate() {
        let step = step as i64;
        let a = Tensor::from_vec(gradient(0, step, 12), (3, 4), &Device::Cpu).unwrap();
        let b = Tensor::from_vec(gradient(5, step, 4), 4, &Device::Cpu).unwrap();
        let grads = BTreeMap::from([
            ("a.weight".to_owned(), Gradient::Whole(a)),
            ("b.weight".to_owned(), Gradient::Whole(b)),
        ]);
        let update = optimizer.step(&vars, &grads, 0.01).unwrap();
        clipped += usize::from(update.clip_scale < 1.0);
        let expected = row["grad_norm"].as_f64().unwrap();
        assert!(
            (update.grad_norm - expected).abs() < 1e-6 * expected,
            "{}",
            update.grad_norm
        );
        for (name, var) in &vars {
            for (ours, theirs) in values(var).iter().zip(row[name].as_array().unwrap()) {
                let difference = (f64::from(*ours) - theirs.as_f64().unwrap()).abs();
                assert!(difference < 1e-6, "step {step} {name}: {ours} instead of {theirs}");
            }
        }
    }
    assert!(
        (1..12).contains(&clipped),
        "the fixture must clip some steps, not all: {clipped}"
    );
}

/// A master in bf16 would stay at 1: each of these updates is below half its spacing.
#[test]
fn a_weight_of_one_moves_under_a_small_learning_rate() {
    let fixture: serde_json::Value = serde_json::from_str(include_str!("fixtures/adamw.json")).unwrap();
    let vars = BTreeMap::from([("norm.weight".to_owned(), var(&[1.0], &[1]))]);
    let mut optimizer = AdamW::new(PLAIN, &vars).unwrap();
    for _ in 0..100 {
        let grads = BTreeMap::from([(
            "norm.weight".to_owned(),
            Gradient::Whole(Tensor::full(0.01f32, 1, &Device::Cpu).unwrap()),
        )]);
        optimizer.step(&vars, &grads, 6e-4).unwrap();
    }
    let expected = fixture["lone_weight_after_100"].as_f64().unwrap();
    let moved = f64::from(values(&vars["norm.weight"])[0]);
    assert!((moved - expected).abs() < 1e-6, "{moved} instead of {expected}");
    assert!((moved - 0.940).abs() < 1e-3);
}

#[test]
fn only_matrices_decay() {
    let names = [
        "layers.0.mlp.up_proj.weight",
        "layers.0.attention_conv.base_kernel",
        "norm.weight",
    ];
    let shapes: [&[usize]; 3] = [&[1, 2], &[1, 1, 2], &[2]];
    let vars: BTreeMap<String, Var> = names
        .iter()
        .zip(shapes)
        .map(|(name, shape)| ((*name).to_owned(), var(&[1.0, 1.0], shape)))
        .collect();
    let grads: Gradients = vars
        .iter()
        .map(|(name, var)| (name.clone(), Gradient::zero(name, var).unwrap()))
        .collect();
    let settings = AdamWSettings {
        weight_decay: 0.5,
        ..PLAIN
    };
    AdamW::new(settings, &vars).unwrap().step(&vars, &grads, 0.1).unwrap();
    assert_eq!(values(&vars[names[0]]), [0.95, 0.95]);
    assert_eq!(values(&vars[names[1]]), [1.0, 1.0]);
    assert_eq!(values(&vars[names[2]]), [1.0, 1.0]);
}

#[test]
fn a_gradient_that_is_not_finite_is_named_and_changes_nothing() {
    for bad in [f32::NAN, f32::INFINITY] {
        let vars = BTreeMap::from([
            ("a".to_owned(), var(&[1.0, 2.0], &[2])),
            ("b".to_owned(), var(&[3.0], &[1])),
        ]);
        let mut optimizer = AdamW::new(PLAIN, &vars).unwrap();
        let grads = BTreeMap::from([("a".to_owned(), whole(&[1.0, 1.0])), ("b".to_owned(), whole(&[bad]))]);
        let error = format!("{:#}", optimizer.step(&vars, &grads, 0.1).unwrap_err());
        assert!(error.contains("gradient of b is not finite"), "{error}");
        assert_eq!(values(&vars["a"]), [1.0, 2.0]);
        assert_eq!(optimizer.updates(), 0);
    }
}

#[test]
fn missing_unexpected_and_misshapen_gradients_are_named() {
    let vars = BTreeMap::from([("a".to_owned(), var(&[1.0, 2.0], &[2]))]);
    let mut optimizer = AdamW::new(PLAIN, &vars).unwrap();
    let grad = |shape: &[usize]| Tensor::zeros(shape, candle_core::DType::F32, &Device::Cpu).unwrap();
    let mut fails = |grads: &[(&str, &[usize])]| {
        let grads = grads
            .iter()
            .map(|(name, shape)| ((*name).to_owned(), Gradient::Whole(grad(shape))))
            .collect();
        format!("{:#}", optimizer.step(&vars, &grads, 0.1).unwrap_err())
    };
    assert!(fails(&[]).contains("a has no gradient"));
    assert!(fails(&[("a", &[2]), ("c", &[1])]).contains("gradient of c"));
    assert!(fails(&[("a", &[3])]).contains("expected shape [2], got [3]"));
}

/// More values than one chunk, so that threads share the work: any number of them gives the same bits.
#[test]
fn the_number_of_threads_does_not_change_a_bit() {
    let count = 3 * (1 << 16) + 17;
    let run = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let start: Vec<f32> = (0..count).map(|i| (i % 101) as f32 / 50.0 - 1.0).collect();
            let vars = BTreeMap::from([("a".to_owned(), var(&start, &[count]))]);
            let mut optimizer = AdamW::new(PLAIN, &vars).unwrap();
            for step in 0..3 {
                let grad = Tensor::from_vec(gradient(step, step, count as i64), count, &Device::Cpu).unwrap();
                optimizer
                    .step(&vars, &BTreeMap::from([("a".to_owned(), Gradient::Whole(grad))]), 0.01)
                    .unwrap();
            }
            values(&vars["a"])
        })
    };
    assert_eq!(run(1), run(4));
}

/// A table whose every row has a gradient in every step is updated as a matrix is; rows without one keep still; and a saved
/// state goes on as if it had not been saved.
#[test]
fn a_table_by_rows_is_updated_where_it_is_used_and_resumes_exactly() {
    const TABLE: &str = "candidate_selector.successor_codebook";
    let start: Vec<f32> = (0..12).map(|i| i as f32 / 10.0 - 0.5).collect();
    let vars = |name: &str| BTreeMap::from([(name.to_owned(), var(&start, &[4, 3]))]);
    let rows = |ids: &[u32], step: i64| Gradient::Rows {
        ids: ids.to_vec(),
        values: Tensor::from_vec(gradient(0, step, 3 * ids.len() as i64), (ids.len(), 3), &Device::Cpu).unwrap(),
    };
    let (table, matrix) = (vars(TABLE), vars("other"));
    let (mut by_rows, mut by_matrix) = (AdamW::new(PLAIN, &table).unwrap(), AdamW::new(PLAIN, &matrix).unwrap());
    for step in 0..3 {
        let grad = rows(&[0, 1, 2, 3], step);
        let same = Gradient::Whole(grad.values().clone());
        by_rows
            .step(&table, &BTreeMap::from([(TABLE.to_owned(), grad)]), 0.01)
            .unwrap();
        by_matrix
            .step(&matrix, &BTreeMap::from([("other".to_owned(), same)]), 0.01)
            .unwrap();
    }
    assert_eq!(values(&table[TABLE]), values(&matrix["other"]));

    let table = vars(TABLE);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("adamw.safetensors");
    let mut optimizer = AdamW::new(PLAIN, &table).unwrap();
    let step = |optimizer: &mut AdamW, vars: &BTreeMap<String, Var>, ids: &[u32], step| {
        optimizer
            .step(vars, &BTreeMap::from([(TABLE.to_owned(), rows(ids, step))]), 0.01)
            .unwrap();
    };
    step(&mut optimizer, &table, &[1, 3], 0);
    step(&mut optimizer, &table, &[], 1);
    assert_eq!(values(&table[TABLE])[6..9], start[6..9]);
    assert_ne!(values(&table[TABLE])[9..], start[9..]);
    optimizer.save(&path).unwrap();
    let copy = BTreeMap::from([(TABLE.to_owned(), var(&values(&table[TABLE]), &[4, 3]))]);
    let mut resumed = AdamW::new(PLAIN, &copy).unwrap();
    resumed.load(&path, 2).unwrap();
    step(&mut optimizer, &table, &[0, 3], 2);
    step(&mut resumed, &copy, &[0, 3], 2);
    assert_eq!(values(&table[TABLE]), values(&copy[TABLE]));

    let error = optimizer
        .step(&table, &BTreeMap::from([(TABLE.to_owned(), rows(&[4], 3))]), 0.01)
        .unwrap_err();
    assert!(format!("{error:#}").contains(TABLE), "{error:#}");
}
