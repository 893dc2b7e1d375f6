//! Sampling: whatever is drafted, from whatever distribution, the text follows the target's own distribution.
//!
//! Every chain of tokens at positions 0 to 3 of a text over six tokens has a probability that can be computed; 100,000
//! texts are drawn and counted against it. Position 0 comes from the prompt's pass, 1 to 3 from drafting rounds.

use std::collections::HashMap;
use std::sync::Mutex;

use candle_core::{DType, Device};
use dflash_eval::SamplingConfig;
use dflash_eval::evaluate::decode_speculatively_by;
use dflash_eval::sampling::Seen;
use dflash_model::params::Codebooks;
use dflash_model::walk::walk;
use dflash_model::{BoundDrafter, Drafter, DrafterConfig, Params, TargetHead};
use rayon::prelude::*;
use serde_json::json;

use super::*;

const SMALL: usize = 6;
const DRAWS: u64 = 100_000;
const LENGTH: usize = 4;
const PROMPT: [u32; 2] = [3, 1];

fn soft_target() -> ScriptedTarget {
    ScriptedTarget::new(21, SMALL, 64).unwrap().with_spread(3.)
}

fn settings() -> Vec<SamplingConfig> {
    let plain = SamplingConfig {
        temperature: 1.,
        ..SamplingConfig::default()
    };
    vec![
        plain,
        SamplingConfig {
            temperature: 0.6,
            top_k: 4,
            ..plain
        },
        SamplingConfig { top_p: 0.8, ..plain },
        SamplingConfig {
            temperature: 1.5,
            min_p: 0.3,
            ..plain
        },
        SamplingConfig {
            repetition_penalty: 1.4,
            presence_penalty: 0.5,
            ..plain
        },
    ]
}

/// Probability of every chain of four tokens, by the target's own logits and the rule applied to them.
fn expected(target: &ScriptedTarget, config: &SamplingConfig) -> Vec<f64> {
    let mut chains = vec![0.; SMALL.pow(LENGTH as u32)];
    let mut open = vec![(Vec::<u32>::new(), 1.)];
    while let Some((text, chance)) = open.pop() {
        if text.len() == LENGTH {
            chains[index(&text)] = chance;
            continue;
        }
        let mut seen = Seen::default();
        seen.prompt(&PROMPT);
        for &token in &text {
            seen.text(token);
        }
        let mut session = target.session(&[]).unwrap();
        let forward = session
            .forward(&[&PROMPT, text.as_slice()].concat(), LogitRows::Last)
            .unwrap();
        let row = forward.logits.unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        for (token, p) in config.distribution(&row, &seen).unwrap().entries() {
            open.push(([text.as_slice(), &[token]].concat(), chance * p));
        }
    }
    chains
}

fn index(text: &[u32]) -> usize {
    text.iter().fold(0, |at, &token| at * SMALL + token as usize)
}

/// Counts of every chain over many texts, and how many drafts were accepted.
fn drawn(target: &ScriptedTarget, drafting: &dyn Drafting, config: &SamplingConfig) -> (Vec<u64>, usize) {
    let options = Options {
        sampling: *config,
        ..Options::new(LENGTH, vec![NEVER])
    };
    let limits = options.limits(target);
    let empty = || (vec![0; SMALL.pow(LENGTH as u32)], 0);
    let count = |(mut counts, accepted): (Vec<u64>, usize), text: u64| {
        let decision = Decision {
            limits: &limits,
            chooser: &mut options.chooser(text as usize, true),
            width: &mut Width::Fixed(drafting.block_size() - 1),
        };
        let got = decode_speculatively_by(target, drafting, &PROMPT, decision).unwrap();
        counts[index(&got.tokens)] += 1;
        let more: usize = got.rounds.iter().map(|round| round.accepted).sum();
        (counts, accepted + more)
    };
    (0..DRAWS)
        .into_par_iter()
        .fold(empty, count)
        .reduce(empty, |(mut a, x), (b, y)| {
            a.iter_mut().zip(b).for_each(|(a, b)| *a += b);
            (a, x + y)
        })
}

/// Chi-square of counts against chances in standard deviations (Wilson-Hilferty); cells expected less than 8 times are
/// one cell. Infinite when something happened that cannot.
fn surprise(counts: &[u64], chances: &[f64]) -> f64 {
    let (mut cells, mut rest) = (Vec::new(), (0., 0.));
    for (&count, &chance) in counts.iter().zip(chances) {
        let (seen, due) = (count as f64, chance * DRAWS as f64);
        if chance == 0. && count > 0 {
            return f64::INFINITY;
        }
        if due < 8. {
            rest = (rest.0 + seen, rest.1 + due);
        } else {
            cells.push((seen, due));
        }
    }
    if rest.1 >= 8. {
        cells.push(rest);
    }
    let freedom = (cells.len() - 1) as f64;
    let chi: f64 = cells.iter().map(|(seen, due)| (seen - due).powi(2) / due).sum();
    let spread = 2. / (9. * freedom);
    ((chi / freedom).cbrt() - (1. - spread)) / spread.sqrt()
}

/// The marginal of one position.
fn marginal<T: Copy + std::iter::Sum<T>>(chains: &[T], position: usize) -> Vec<T> {
    let step = SMALL.pow((LENGTH - 1 - position) as u32);
    let at = |token: usize| {
        let of = move |chain: &usize| chain / step % SMALL == token;
        (0..chains.len()).filter(of).map(|chain| chains[chain]).sum()
    };
    (0..SMALL).map(at).collect()
}

/// The largest surprise of the chain and of positions 1 to 3.
fn worst(target: &ScriptedTarget, drafting: &dyn Drafting, config: &SamplingConfig) -> f64 {
    let (counts, accepted) = drawn(target, drafting, config);
    assert!(
        accepted > DRAWS as usize / 100,
        "{accepted} accepted: nothing was tested"
    );
    let chances = expected(target, config);
    let positions = (1..LENGTH).map(|at| surprise(&marginal(&counts, at), &marginal(&chances, at)));
    positions.fold(surprise(&counts, &chances), f64::max)
}

/// A drafter that proposes by a rule of its own and says what its q was.
struct Rule(fn(&mut Sampling<'_>, slot: usize, previous: u32) -> ProposalSlot);

struct RuleSession<'r>(&'r Rule, usize);

impl Drafting for Rule {
    fn block_size(&self) -> usize {
        4
    }

    fn taps(&self) -> &[usize] {
        &TAPS
    }

    fn session(&self) -> Result<Box<dyn DraftSession + '_>> {
        Ok(Box::new(RuleSession(self, 0)))
    }
}

impl DraftSession for RuleSession<'_> {
    fn len(&self) -> usize {
        self.1
    }

    fn extend(&mut self, taps: &Tensor) -> Result<()> {
        self.1 += taps.dim(0)?;
        Ok(())
    }

    fn propose(&mut self, anchor: u32, width: usize, sampling: &mut Sampling<'_>) -> Result<Proposal> {
        let (mut previous, mut slots) = (anchor, Vec::new());
        for slot in 0..width {
            slots.push((self.0.0)(sampling, slot, previous));
            previous = slots[slot].token;
        }
        Ok(Proposal { slots })
    }
}

/// Draws from `q` over `candidates` and reports them.
fn from(sampling: &mut Sampling<'_>, candidates: Vec<u32>, q: Vec<f32>) -> ProposalSlot {
    let Sampling::Random { uniform, .. } = sampling else {
        panic!("these drafters are sampled")
    };
    let mut left = uniform() as f32;
    let at = q.iter().position(|&q| {
        left -= q;
        left < 0.
    });
    let token = candidates[at.unwrap_or(q.len() - 1)];
    ProposalSlot { token, candidates, q }
}

fn certain(_: &mut Sampling<'_>, slot: usize, previous: u32) -> ProposalSlot {
    ProposalSlot {
        token: (previous + slot as u32 + 1) % SMALL as u32,
        candidates: Vec::new(),
        q: Vec::new(),
    }
}

/// Depends on its own predecessor, lists two of six tokens, likes one nine times as much.
fn narrow(sampling: &mut Sampling<'_>, _: usize, previous: u32) -> ProposalSlot {
    let candidates = vec![(previous * 5 + 2) % SMALL as u32, (previous * 5 + 3) % SMALL as u32];
    from(sampling, candidates, vec![0.9, 0.1])
}

fn uniform(sampling: &mut Sampling<'_>, _: usize, _: u32) -> ProposalSlot {
    from(
        sampling,
        (0..SMALL as u32).rev().collect(),
        vec![1. / SMALL as f32; SMALL],
    )
}

/// One token stands in the list twice.
fn repeated(sampling: &mut Sampling<'_>, _: usize, previous: u32) -> ProposalSlot {
    let other = (previous + 1) % SMALL as u32;
    from(sampling, vec![previous, other, previous], vec![0.3, 0.4, 0.3])
}

/// Samples but says that it was certain: exact as well (whatever was drafted is then judged for itself), it only accepts
/// less.
fn hides_its_q(sampling: &mut Sampling<'_>, slot: usize, previous: u32) -> ProposalSlot {
    let honest = uniform(sampling, slot, previous);
    ProposalSlot {
        candidates: Vec::new(),
        q: Vec::new(),
        ..honest
    }
}

/// Says that it is less sure than it is.
fn flattens_its_q(sampling: &mut Sampling<'_>, slot: usize, previous: u32) -> ProposalSlot {
    let honest = narrow(sampling, slot, previous);
    ProposalSlot {
        q: vec![0.8, 0.2],
        ..honest
    }
}

/// Reports the distribution of another temperature.
fn reports_another_temperature(sampling: &mut Sampling<'_>, slot: usize, previous: u32) -> ProposalSlot {
    let honest = narrow(sampling, slot, previous);
    ProposalSlot {
        q: vec![0.987_805, 0.012_195],
        ..honest
    }
}

/// A small DFlash, or DFlash 2 with a selector over three candidates, of random weights.
fn real(v2: bool) -> BoundDrafter {
    let mut config = json!({
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_act": "silu", "attention_bias": false,
        "hidden_size": 4, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 4, "vocab_size": SMALL, "num_target_layers": 8, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 64, "rope_theta": 1e4, "is_causal": false, "layer_types": ["full_attention"],
        "block_size": 4, "dflash_config": { "target_layer_ids": TAPS, "mask_token_id": 5, "block_size": 4 }
    });
    if v2 {
        config["architectures"] = json!(["DFlash2DraftModel"]);
        for (key, value) in [
            ("conv_kernel_size", 2),
            ("conv_group_size", 2),
            ("selector_rank", 2),
            ("selector_top_k", 3),
        ] {
            config["dflash_config"][key] = json!(value);
        }
    }
    let config = DrafterConfig::from_json(&config, "test").unwrap();
    let params = Params::init(&config, Codebooks::Free, 3, &Device::Cpu).unwrap();
    for (name, variable) in params.vars() {
        // a fresh selector prefers nothing: give its codebooks something to say
        if name.contains("codebook") {
            let shape = variable.dims2().unwrap();
            let values: Vec<f32> = (0..shape.0 * shape.1)
                .map(|i| (mix(i as u64) % 400) as f32 / 100. - 2.)
                .collect();
            params
                .set(name, &Tensor::from_vec(values, shape, &Device::Cpu).unwrap())
                .unwrap();
        }
    }
    let values: Vec<f32> = (0..SMALL * 4)
        .map(|i| (mix(i as u64 + 99) % 300) as f32 / 100. - 1.5)
        .collect();
    let head = Tensor::from_vec(values, (SMALL, 4), &Device::Cpu).unwrap();
    let head = TargetHead {
        embed: head.clone(),
        head,
    };
    let drafter = Drafter::new(config, &params).unwrap();
    BoundDrafter::new(drafter, &head).unwrap()
}

/// A real drafter whose block passes are remembered: 100,000 texts share a few hundred contexts. The walk, and with it q,
/// is drawn anew each time.
struct Remembered {
    bound: BoundDrafter,
    passes: Mutex<HashMap<Vec<u32>, (Tensor, Tensor)>>,
}

struct RememberedSession<'r> {
    of: &'r Remembered,
    taps: Vec<Tensor>,
    tokens: Vec<u32>,
}

impl Drafting for Remembered {
    fn block_size(&self) -> usize {
        self.bound.block_size()
    }

    fn taps(&self) -> &[usize] {
        self.bound.taps()
    }

    fn session(&self) -> Result<Box<dyn DraftSession + '_>> {
        let (taps, tokens) = (Vec::new(), Vec::new());
        Ok(Box::new(RememberedSession { of: self, taps, tokens }))
    }
}

impl DraftSession for RememberedSession<'_> {
    fn len(&self) -> usize {
        self.tokens.len()
    }

    fn extend(&mut self, taps: &Tensor) -> Result<()> {
        self.tokens
            .extend(taps.to_vec2::<f32>()?.iter().map(|row| row[2] as u32));
        self.taps.push(taps.clone());
        Ok(())
    }

    fn propose(&mut self, anchor: u32, width: usize, sampling: &mut Sampling<'_>) -> Result<Proposal> {
        let bound = &self.of.bound;
        let key = [self.tokens.as_slice(), &[anchor, width as u32]].concat();
        let known = self.of.passes.lock().unwrap().get(&key).cloned();
        let (hidden, logits) = if let Some(pass) = known {
            pass
        } else {
            let mut context = bound.drafter().decoding_context();
            bound.drafter().extend(&mut context, &Tensor::cat(&self.taps, 0)?)?;
            let pass = bound.slots(&context, anchor, width)?;
            self.of.passes.lock().unwrap().insert(key, pass.clone());
            pass
        };
        walk(bound, &hidden, &logits, anchor, sampling)
    }
}

type RuleFn = fn(&mut Sampling<'_>, usize, u32) -> ProposalSlot;

#[test]
fn the_text_follows_the_target_whatever_a_rule_drafts() {
    let target = soft_target();
    let (all, two) = (settings(), vec![settings()[0], settings()[4]]);
    let rules: [(&str, RuleFn, &[SamplingConfig]); 5] = [
        ("certain", certain, &all),
        ("narrow", narrow, &all),
        ("uniform", uniform, &two),
        ("repeated", repeated, &two),
        ("hides its q", hides_its_q, &two),
    ];
    for (name, rule, settings) in rules {
        for config in settings {
            let surprise = worst(&target, &Rule(rule), config);
            assert!(surprise < 4.5, "{name}, {config}: {surprise:.1} standard deviations");
        }
    }
}

#[test]
fn the_text_follows_the_target_with_real_drafters() {
    let target = soft_target();
    for (v2, config) in [(false, settings()[0]), (true, settings()[0]), (true, settings()[4])] {
        let drafter = Remembered {
            bound: real(v2),
            passes: Mutex::default(),
        };
        let surprise = worst(&target, &drafter, &config);
        assert!(
            surprise < 4.5,
            "DFlash 2 {v2}, {config}: {surprise:.1} standard deviations"
        );
    }
}

#[test]
fn a_wrong_q_is_noticed() {
    let target = soft_target();
    for rule in [
        flattens_its_q as fn(&mut Sampling<'_>, usize, u32) -> ProposalSlot,
        reports_another_temperature,
    ] {
        let surprise = worst(&target, &Rule(rule), &settings()[0]);
        assert!(
            surprise > 8.,
            "{surprise:.1} standard deviations are not enough to notice"
        );
    }
}

#[test]
fn row_by_row_verification_draws_the_same_text() {
    let target = soft_target();
    for config in settings() {
        for seed in 0..50 {
            let run = |exact_verify| {
                let options = Options {
                    sampling: config,
                    seed,
                    exact_verify,
                    ..Options::new(20, vec![NEVER])
                };
                let limits = options.limits(&target);
                let (chooser, width) = (&mut options.chooser(0, true), &mut Width::Fixed(3));
                let decision = Decision {
                    limits: &limits,
                    chooser,
                    width,
                };
                let got = decode_speculatively_by(&target, &Rule(narrow), &PROMPT, decision).unwrap();
                (got.tokens, got.rounds)
            };
            assert_eq!(run(false), run(true), "{config} {seed}");
        }
    }
}

#[test]
fn a_tap_of_real_drafters_is_what_the_target_gives() {
    // the drafters above read the scripted target's taps: 3 layers of 4 numbers
    let drafter = real(true);
    let taps = soft_target().taps(&PROMPT, &TAPS).unwrap();
    assert_eq!((taps.dims(), taps.dtype()), (&[2, 12][..], DType::F32));
    let mut session = drafter.session().unwrap();
    session.extend(&taps).unwrap();
    let proposal = session
        .propose(
            0,
            3,
            &mut Sampling::Random {
                temperature: 1.,
                uniform: &mut || 0.5,
            },
        )
        .unwrap();
    assert!(
        proposal
            .slots
            .iter()
            .all(|slot| slot.candidates.len() == 3 && slot.q.len() == 3)
    );
}
