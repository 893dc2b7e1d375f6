//! Attention of N blocks over their own context prefix and themselves; nothing else is ever scored.
//!
//! Queries: B slots a block. Keys: the block's sample's context rows strictly before the anchor, then the block's
//! own B slots. With positions q = anchor + slot, a context row p is visible iff p < anchor and q - p < W (W the
//! layer's window, if any); slot i of the own block is visible to slot j iff |j - i| < W, and i <= j in a causal
//! layer. Heads: query head h reads key/value head h / (heads / kv_heads); the scale is head_dim^-1/2.
//!
//! Forward, a task is one (block, key/value head); backward, it is a [`Part`], some blocks of one sample under one
//! head. The cost is in visible pairs and no [N * B, T] matrix exists: scores of one block live in scratch.

mod kernel;

use super::{on_cpu, slice_of, with_slice};
use crate::blocks::Block;
use crate::drafter_config::LayerRule;
use candle_core::{CpuStorage, CustomOp3, D, DType, Layout, Result, Shape, Tensor};
use kernel::{Inputs, KeyGradients, Scratch, Sizes};
use rayon::prelude::*;
use std::borrow::Cow;
use std::sync::Arc;

/// Parts that a backward pass is cut into at least, where there are blocks enough: two threads or eight share them.
const PARTS: usize = 8;
/// Blocks of a part at least: every part has its own sums of the key gradients, which cost room and a last addition.
const LEAST_BLOCKS: usize = 4;

/// Which blocks attend, by which rule.
#[derive(Debug, Clone)]
pub struct AttentionPlan {
    /// The blocks, grouped by sample (equal `context_start`), N.
    pub blocks: Arc<Vec<Block>>,
    /// Slots of a block, B.
    pub block_size: usize,
    /// Packed context rows, T; the blocks' own rows follow them in k and v.
    pub context_rows: usize,
    /// Window and causality of the layer.
    pub rule: LayerRule,
}

impl AttentionPlan {
    /// Runs of blocks that share a context.
    fn samples(&self) -> Vec<std::ops::Range<usize>> {
        let mut runs: Vec<std::ops::Range<usize>> = Vec::new();
        for (n, block) in self.blocks.iter().enumerate() {
            match runs.last_mut() {
                Some(run) if self.blocks[run.start].context_start == block.context_start => run.end = n + 1,
                _ => runs.push(n..n + 1),
            }
        }
        runs
    }
}

/// Attends every block. `q`: [N * B, heads, D]; `k`, `v`: [T + N * B, kv_heads, D]; returns [N * B, heads, D].
///
/// # Errors
/// When the sizes do not fit together or a block's context reaches past T.
pub fn block_attention(q: &Tensor, k: &Tensor, v: &Tensor, plan: &AttentionPlan) -> Result<Tensor> {
    let ((rows, heads, d), (key_rows, kv_heads, _)) = (q.dims3()?, k.dims3()?);
    let fits = k.dims() == v.dims()
        && k.dim(2)? == d
        && rows == plan.blocks.len() * plan.block_size
        && key_rows == plan.context_rows + rows
        && heads.is_multiple_of(kv_heads);
    if !fits {
        candle_core::bail!(
            "block_attention: q {:?}, k {:?}, v {:?} for {} blocks of {} and {} context rows",
            q.shape(),
            k.shape(),
            v.shape(),
            plan.blocks.len(),
            plan.block_size,
            plan.context_rows
        )
    }
    if let Some(block) = plan
        .blocks
        .iter()
        .find(|b| b.context_start + b.anchor > plan.context_rows)
    {
        candle_core::bail!(
            "block_attention: the block at anchor {} of the context from row {} needs more than {} context rows",
            block.anchor,
            block.context_start,
            plan.context_rows
        )
    }
    if on_cpu(&[q, k, v]) {
        let sizes = Sizes {
            heads,
            kv_heads,
            d,
            block_size: plan.block_size,
            rule: plan.rule,
        };
        q.contiguous()?.apply_op3(
            &k.contiguous()?,
            &v.contiguous()?,
            BlockAttention {
                plan: plan.clone(),
                sizes,
            },
        )
    } else {
        composed(q, k, v, plan)
    }
}

/// The same from candle's own operations, block by block over an explicit mask.
pub fn composed(q: &Tensor, k: &Tensor, v: &Tensor, plan: &AttentionPlan) -> Result<Tensor> {
    let (b, (_, heads, d), kv_heads) = (plan.block_size, q.dims3()?, k.dim(1)?);
    let group = heads / kv_heads;
    let mut outputs = Vec::with_capacity(plan.blocks.len());
    for (n, block) in plan.blocks.iter().enumerate() {
        let own = plan.context_rows + n * b;
        let keys_of = |t: &Tensor| -> Result<Tensor> {
            let context = t.narrow(0, block.context_start, block.anchor)?;
            let all = Tensor::cat(&[context, t.narrow(0, own, b)?], 0)?; // [S, kv, D]
            let (s, kv, d) = all.dims3()?;
            all.unsqueeze(2)?
                .broadcast_as((s, kv, group, d))?
                .reshape((s, heads, d))?
                .transpose(0, 1)?
                .contiguous()
        };
        let (keys, values) = (keys_of(k)?, keys_of(v)?);
        let queries = q.narrow(0, n * b, b)?.transpose(0, 1)?.contiguous()?; // [heads, B, D]
        let scores = (queries.matmul(&keys.transpose(1, 2)?.contiguous()?)? / (d as f64).sqrt())?;
        let mask: Vec<f32> = (0..b)
            .flat_map(|slot| {
                let context = (0..block.anchor).map(move |p| context_visible(plan.rule, block.anchor + slot, p));
                context.chain((0..b).map(move |other| own_visible(plan.rule, slot, other)))
            })
            .map(|visible| if visible { 0.0 } else { f32::NEG_INFINITY })
            .collect();
        let mask = Tensor::from_vec(mask, (b, block.anchor + b), q.device())?;
        let probs = candle_nn::ops::softmax(&scores.broadcast_add(&mask)?, D::Minus1)?;
        outputs.push(probs.matmul(&values)?.transpose(0, 1)?.contiguous()?);
    }
    if outputs.is_empty() {
        return Tensor::zeros((0, heads, d), DType::F32, q.device());
    }
    Tensor::cat(&outputs, 0)
}

/// Whether the query at position `q` sees context position `p` (already known to be before the anchor).
fn context_visible(rule: LayerRule, q: usize, p: usize) -> bool {
    rule.window.is_none_or(|w| q - p < w)
}

/// Whether slot `slot` sees slot `other` of its own block.
fn own_visible(rule: LayerRule, slot: usize, other: usize) -> bool {
    (!rule.causal || other <= slot) && rule.window.is_none_or(|w| slot.abs_diff(other) < w)
}

/// Attends one block of B queries over cached context rows: the decoding form, on the same kernel.
///
/// `q`: [B, heads, D]; `context_k`, `context_v`: [T, kv_heads, D]; `own_k`, `own_v`: [B, kv_heads, D].
pub fn attend_one_block(
    q: &Tensor,
    context: (&Tensor, &Tensor),
    own: (&Tensor, &Tensor),
    rule: LayerRule,
) -> Result<Tensor> {
    let (block_size, context_rows) = (q.dim(0)?, context.0.dim(0)?);
    // A window makes most of a long context invisible: only what some slot can see is joined to the block.
    let seen = rule
        .window
        .map_or(context_rows, |w| context_rows.min(w.saturating_sub(1)));
    let plan = AttentionPlan {
        blocks: Arc::new(vec![Block {
            context_start: 0,
            anchor: seen,
        }]),
        block_size,
        context_rows: seen,
        rule,
    };
    let join = |context: &Tensor, own: &Tensor| Tensor::cat(&[&context.narrow(0, context_rows - seen, seen)?, own], 0);
    block_attention(q, &join(context.0, own.0)?, &join(context.1, own.1)?, &plan)
}

struct BlockAttention {
    plan: AttentionPlan,
    sizes: Sizes,
}

/// Blocks of one sample whose key gradients are summed up together, under one key/value head.
struct Part {
    head: usize,
    blocks: Vec<usize>,
    /// Context rows that they reach.
    reach: usize,
}

impl BlockAttention {
    /// Every sample's blocks, dealt out in turn (later blocks cost more) so that few samples and heads still occupy the
    /// threads. The number of parts decides the order of additions, so it comes from the sizes alone.
    fn parts(&self) -> Vec<Part> {
        let (samples, heads) = (self.plan.samples(), self.sizes.kv_heads);
        let split = PARTS.div_ceil(samples.len().max(1) * heads);
        let dealt = |run: std::ops::Range<usize>| {
            let split = split.min(run.len().div_ceil(LEAST_BLOCKS));
            (0..split).map(move |at| run.clone().skip(at).step_by(split).collect::<Vec<usize>>())
        };
        let lists = samples.into_iter().flat_map(dealt);
        lists
            .flat_map(|blocks| {
                let reach = blocks.iter().map(|n| self.plan.blocks[*n].anchor).max().unwrap_or(0);
                (0..heads).map(move |head| Part {
                    head,
                    blocks: blocks.clone(),
                    reach,
                })
            })
            .collect()
    }

    fn inputs<'p>(&'p self, q: &'p [f32], keys: &'p [f32], values: &'p [f32]) -> Inputs<'p> {
        Inputs {
            sizes: self.sizes,
            blocks: &self.plan.blocks,
            context_rows: self.plan.context_rows,
            q,
            keys,
            values,
        }
    }

    /// [rows, kv_heads, D] as [kv_heads, rows, D].
    fn by_head<'x>(&self, x: &'x [f32]) -> Cow<'x, [f32]> {
        let (heads, d) = (self.sizes.kv_heads, self.sizes.d);
        if heads == 1 {
            return Cow::Borrowed(x);
        }
        let mut parted = Vec::with_capacity(x.len());
        for head in 0..heads {
            for row in x.chunks_exact(heads * d) {
                parted.extend_from_slice(&row[head * d..][..d]);
            }
        }
        Cow::Owned(parted)
    }

    /// The rows of [N * B, heads, D] apart: B stretches of [group, D] for each block and key/value head.
    fn stretches<'x>(&self, x: &'x mut [f32]) -> Vec<Vec<&'x mut [f32]>> {
        let (b, heads) = (self.sizes.block_size, self.sizes.kv_heads);
        let mut stretches: Vec<Vec<&mut [f32]>> = Vec::new();
        stretches.resize_with(self.plan.blocks.len() * heads, || Vec::with_capacity(b));
        for (i, part) in x.chunks_exact_mut(self.sizes.group() * self.sizes.d).enumerate() {
            stretches[i / (b * heads) * heads + i % heads].push(part);
        }
        stretches
    }

    fn forward(&self, q: &[f32], k: &[f32], v: &[f32]) -> Vec<f32> {
        let (keys, values) = rayon::join(|| self.by_head(k), || self.by_head(v));
        let (inputs, heads) = (self.inputs(q, &keys, &values), self.sizes.kv_heads);
        let mut y = vec![0f32; q.len()];
        let places = self.stretches(&mut y).into_par_iter().enumerate();
        places.for_each_init(Scratch::default, |scratch, (i, mut into)| {
            inputs.forward(i / heads, i % heads, scratch, &mut into);
        });
        y
    }

    fn backward(&self, q: &[f32], k: &[f32], v: &[f32], y: &[f32], dy: &[f32]) -> [Vec<f32>; 3] {
        let (keys, values) = rayon::join(|| self.by_head(k), || self.by_head(v));
        let (inputs, heads, b, d) = (
            self.inputs(q, &keys, &values),
            self.sizes.kv_heads,
            self.sizes.block_size,
            self.sizes.d,
        );
        let mut dq = vec![0f32; q.len()];
        let mut places = self.stretches(&mut dq);
        let parts = self.parts();
        let tasks: Vec<_> = (parts.iter())
            .map(|part| {
                let places = part
                    .blocks
                    .iter()
                    .map(|n| std::mem::take(&mut places[n * heads + part.head]));
                (part, places.collect::<Vec<_>>())
            })
            .collect();
        let gradients: Vec<KeyGradients> = (tasks.into_par_iter())
            .map_init(Scratch::default, |scratch, (part, places)| {
                let floats = (part.reach + part.blocks.len() * b) * d;
                let mut gradients = KeyGradients {
                    dk: vec![0f32; floats],
                    dv: vec![0f32; floats],
                };
                for (at, (n, mut into)) in part.blocks.iter().zip(places).enumerate() {
                    let of_keys = (&mut gradients, part.reach + at * b);
                    inputs.backward((*n, part.head), (y, dy), scratch, &mut into, of_keys);
                }
                gradients
            })
            .collect();
        let whole = |of: fn(&KeyGradients) -> &[f32]| {
            let mut whole = vec![0f32; k.len()];
            for (part, gradients) in parts.iter().zip(&gradients) {
                self.scatter(part, of(gradients), &mut whole);
            }
            whole
        };
        let (dk, dv) = rayon::join(|| whole(|both| &both.dk), || whole(|both| &both.dv));
        [dq, dk, dv]
    }

    /// Adds a part's gradients [reach + blocks * B, D] to the whole [T + N * B, kv_heads, D].
    fn scatter(&self, part: &Part, gradients: &[f32], whole: &mut [f32]) {
        let (b, d, heads) = (self.sizes.block_size, self.sizes.d, self.sizes.kv_heads);
        let start = part.blocks.first().map_or(0, |n| self.plan.blocks[*n].context_start);
        let own = part
            .blocks
            .iter()
            .flat_map(|n| (n * b..(n + 1) * b).map(|row| self.plan.context_rows + row));
        for (row, gradients) in (start..start + part.reach).chain(own).zip(gradients.chunks_exact(d)) {
            let whole = &mut whole[(row * heads + part.head) * d..][..d];
            for (whole, gradient) in whole.iter_mut().zip(gradients) {
                *whole += gradient;
            }
        }
    }
}

impl CustomOp3 for BlockAttention {
    fn name(&self) -> &'static str {
        "block_attention"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        ql: &Layout,
        k: &CpuStorage,
        kl: &Layout,
        v: &CpuStorage,
        vl: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let q = slice_of(q, ql, self.name())?;
        let (k, v) = (slice_of(k, kl, self.name())?, slice_of(v, vl, self.name())?);
        Ok((CpuStorage::F32(self.forward(q, k, v)), ql.shape().clone()))
    }

    fn bwd(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        y: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let [dq, dk, dv] = with_slice(&q.detach(), self.name(), |q| {
            with_slice(&k.detach(), self.name(), |k| {
                with_slice(&v.detach(), self.name(), |v| {
                    with_slice(&y.detach(), self.name(), |y| {
                        with_slice(dy, self.name(), |dy| Ok(self.backward(q, k, v, y, dy)))
                    })
                })
            })
        })?;
        let shaped = |values, like: &Tensor| Tensor::from_vec(values, like.shape(), like.device()).map(Some);
        Ok((shaped(dq, q)?, shaped(dk, k)?, shaped(dv, v)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::check::{distance, same_value_and_gradients, tensor, var};
    use proptest::prelude::*;

    fn plan(blocks: &[(usize, usize)], b: usize, t: usize, window: Option<usize>, causal: bool) -> AttentionPlan {
        let blocks = blocks.iter().map(|(context_start, anchor)| Block {
            context_start: *context_start,
            anchor: *anchor,
        });
        let rule = LayerRule { window, causal };
        AttentionPlan {
            blocks: Arc::new(blocks.collect()),
            block_size: b,
            context_rows: t,
            rule,
        }
    }

    #[test]
    fn equals_its_composed_twin_with_gradients() {
        // Two samples of 70 and 9 rows; windows shorter than, equal to and longer than the context, and than a block.
        let blocks = [(0, 3), (0, 40), (0, 69), (70, 0), (70, 8)];
        for (window, causal) in [
            (None, false),
            (None, true),
            (Some(5), false),
            (Some(33), true),
            (Some(3), false),
        ] {
            for (heads, kv, d) in [(4, 2, 8), (2, 2, 33), (3, 1, 64)] {
                let plan = plan(&blocks, 4, 79, window, causal);
                let q = var(1, &[20, heads, d]);
                let (k, v) = (var(2, &[99, kv, d]), var(3, &[99, kv, d]));
                let fast = || block_attention(&q, &k, &v, &plan);
                same_value_and_gradients(&[&q, &k, &v], fast, || composed(&q, &k, &v, &plan), 2e-5);
            }
        }
    }

    #[test]
    fn decoding_form_equals_training_form() {
        let (t, b, d) = (50, 4, 16);
        for window in [None, Some(20), Some(51), Some(3)] {
            let plan = plan(&[(0, t)], b, t, window, false);
            let (q, k, v) = (
                tensor(1, &[b, 4, d]),
                tensor(2, &[t + b, 2, d]),
                tensor(3, &[t + b, 2, d]),
            );
            let training = block_attention(&q, &k, &v, &plan).unwrap();
            let part = |x: &Tensor, at, len| x.narrow(0, at, len).unwrap();
            let context = (&part(&k, 0, t), &part(&v, 0, t));
            let decoding = attend_one_block(&q, context, (&part(&k, t, b), &part(&v, t, b)), plan.rule).unwrap();
            assert!(distance(&training, &decoding) < 1e-6, "window {window:?}");
        }
    }

    proptest! {
        /// Every pair of the grid: a key influences a query iff the rule says so, and then only.
        #[test]
        fn gradients_reach_visible_keys_only(
            a in 0usize..40, second in 0usize..12, b in 2usize..6, window in prop::option::of(1usize..50), causal: bool,
        ) {
            let t = 52;
            let plan = plan(&[(0, a), (40, second)], b, t, window, causal);
            let (q, k, v) = (tensor(1, &[2 * b, 1, 4]), tensor(2, &[t + 2 * b, 1, 4]), var(3, &[t + 2 * b, 1, 4]));
            let y = block_attention(&q, &k, &v, &plan).unwrap();
            for n in 0..2 {
                for slot in 0..b {
                    let grads = y.narrow(0, n * b + slot, 1).unwrap().sum_all().unwrap().backward().unwrap();
                    let reach = grads.get(&v).unwrap().abs().unwrap().sum((1, 2)).unwrap().to_vec1::<f32>().unwrap();
                    let block = plan.blocks[n];
                    for (row, reach) in reach.iter().enumerate() {
                        let seen = if row < t {
                            row >= block.context_start && row < block.context_start + block.anchor
                                && context_visible(plan.rule, block.anchor + slot, row - block.context_start)
                        } else {
                            let other = row - t;
                            other / b == n && own_visible(plan.rule, slot, other % b)
                        };
                        prop_assert_eq!(seen, *reach != 0.0, "block {} slot {} row {}", n, slot, row);
                    }
                }
            }
        }
    }
}
