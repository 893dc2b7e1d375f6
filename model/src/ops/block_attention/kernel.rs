//! The CPU kernel of one block under one key/value head: scores, softmax and products.
//!
//! Scores stand with a row a key and a column a query, so that the softmax runs down the columns, vector by vector, and
//! a block takes exactly the keys that it sees. The queries come in already scaled, and 1 / total goes into the rows of
//! the result or of its gradient, never over the scores.
#![expect(clippy::inline_always, reason = "see simd::vectorised")]

use crate::blocks::Block;
use crate::drafter_config::LayerRule;
use crate::simd::{LANES, dot, exp, vectorised};
use crate::small_matmul::{Left, Matrix, multiply, multiply_add};
use std::ops::Range;

/// Keys whose weights are summed up before their sum is added to the whole: long sums lose fewer bits that way.
const SUMMED: usize = 64;

#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) d: usize,
    pub(super) block_size: usize,
    pub(super) rule: LayerRule,
}

impl Sizes {
    pub(super) fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Queries of a block under one key/value head.
    fn queries(&self) -> usize {
        self.block_size * self.group()
    }

    /// The same in whole vectors: columns of the scores.
    fn columns(&self) -> usize {
        self.queries().next_multiple_of(LANES)
    }

    fn scale(&self) -> f32 {
        (1.0 / (self.d as f64).sqrt()) as f32
    }
}

/// What all blocks share. Keys and values are [kv_heads, T + N * B, D]: a head's rows lie together.
#[derive(Clone, Copy)]
pub(super) struct Inputs<'p> {
    pub(super) sizes: Sizes,
    pub(super) blocks: &'p [Block],
    /// Context rows before the blocks' own rows, T.
    pub(super) context_rows: usize,
    /// [N * B, heads, D].
    pub(super) q: &'p [f32],
    pub(super) keys: &'p [f32],
    pub(super) values: &'p [f32],
}

/// Gradients of keys and values, [reach + blocks * B, D], that some blocks of one sample have under one head.
pub(super) struct KeyGradients {
    pub(super) dk: Vec<f32>,
    pub(super) dv: Vec<f32>,
}

/// Room for one block under one head.
#[derive(Default)]
pub(super) struct Scratch {
    /// Scaled queries, [queries, D].
    queries: Vec<f32>,
    /// Gradients of the result, each row times its 1 / total, [queries, D].
    dy: Vec<f32>,
    /// Either, turned: [D, columns].
    turned: Vec<f32>,
    /// exp(score - largest), [keys, columns].
    weights: Vec<f32>,
    /// Gradients of the scores, [keys, columns].
    dscores: Vec<f32>,
    /// 1 / total of each column.
    inverse: Vec<f32>,
    /// What a query's weights give on average of their gradients, a column each.
    means: Vec<f32>,
    /// [queries, D].
    out: Vec<f32>,
}

/// The two stretches of keys that a block scores: rows of keys and values, and where their scores begin.
struct Stretches {
    context: Range<usize>,
    own: Range<usize>,
}

impl Stretches {
    fn keys(&self) -> usize {
        self.context.len() + self.own.len()
    }

    /// (first score row, key rows), without an empty context.
    fn each(&self) -> impl Iterator<Item = (usize, Range<usize>)> {
        let parts = [(0, self.context.clone()), (self.context.len(), self.own.clone())];
        parts.into_iter().filter(|(_, rows)| !rows.is_empty())
    }
}

/// At least `len` floats of whatever was there.
fn room(buffer: &mut Vec<f32>, len: usize) -> &mut [f32] {
    if buffer.len() < len {
        buffer.resize(len, 0.0);
    }
    &mut buffer[..len]
}

impl Inputs<'_> {
    /// Attention of block `n` under `head`, into its B stretches of [group, D].
    pub(super) fn forward(&self, n: usize, head: usize, scratch: &mut Scratch, into: &mut [&mut [f32]]) {
        vectorised(
            #[inline(always)]
            || {
                let (d, queries) = (self.sizes.d, self.sizes.queries());
                let stretches = self.weights(n, head, scratch);
                let out = room(&mut scratch.out, queries * d);
                self.over_keys(&scratch.weights, &stretches, self.of_head(self.values, head), out);
                for (row, factor) in out.chunks_exact_mut(d).zip(&scratch.inverse) {
                    scale(row, *factor);
                }
                spread(out, into);
            },
        );
    }

    /// Adds the gradients of block `n` under `head` to those of its keys, whose own rows stand at `own`, and writes
    /// those of its queries into B stretches of [group, D].
    pub(super) fn backward(
        &self,
        (n, head): (usize, usize),
        (y, dy): (&[f32], &[f32]),
        scratch: &mut Scratch,
        into: &mut [&mut [f32]],
        (of_keys, own): (&mut KeyGradients, usize),
    ) {
        vectorised(
            #[inline(always)]
            || {
                let (d, queries, columns) = (self.sizes.d, self.sizes.queries(), self.sizes.columns());
                let stretches = self.weights(n, head, scratch);
                // With P = W / total, dV = W^T dY' and dS = W * (dP' - mean) where dY' is dY / total, dP' = dY' V^T and
                // mean = sum of P dP' = Y dY'. A masked pair has W = 0 and so dS = 0.
                let rows = room(&mut scratch.dy, queries * d);
                let out = room(&mut scratch.out, queries * d);
                self.gather(n, head, dy, 1.0, rows);
                self.gather(n, head, y, 1.0, out);
                let means = room(&mut scratch.means, columns);
                for (r, (row, y)) in rows.chunks_exact_mut(d).zip(out.chunks_exact(d)).enumerate() {
                    scale(row, scratch.inverse[r]);
                    means[r] = dot(row, y);
                }
                let turned = room(&mut scratch.turned, d * columns);
                turn(rows, turned, columns);
                let dscores = room(&mut scratch.dscores, stretches.keys() * columns);
                self.against(&stretches, self.of_head(self.values, head), turned, dscores);
                for (ds, w) in dscores
                    .chunks_exact_mut(columns)
                    .zip(scratch.weights.chunks_exact(columns))
                {
                    for ((ds, w), mean) in ds.iter_mut().zip(w).zip(&*means) {
                        *ds = w * (*ds - mean);
                    }
                }
                self.over_keys(dscores, &stretches, self.of_head(self.keys, head), out);
                scale(out, self.sizes.scale());
                spread(out, into);
                for (at, keys) in stretches.each() {
                    let first = if at == stretches.context.len() {
                        own
                    } else {
                        keys.start - self.blocks[n].context_start
                    };
                    let sizes = (keys.len(), queries, d);
                    let (ds, w) = (&dscores[at * columns..], &scratch.weights[at * columns..]);
                    multiply_add(
                        Matrix(ds, columns),
                        Matrix(&scratch.queries, d),
                        &mut of_keys.dk[first * d..],
                        d,
                        sizes,
                    );
                    multiply_add(
                        Matrix(w, columns),
                        Matrix(rows, d),
                        &mut of_keys.dv[first * d..],
                        d,
                        sizes,
                    );
                }
            },
        );
    }

    /// The keys that some slot of block `n` sees.
    fn stretches(&self, n: usize) -> Stretches {
        let (block, b) = (self.blocks[n], self.sizes.block_size);
        let first = (self.sizes.rule.window).map_or(0, |w| (block.anchor + 1).saturating_sub(w).min(block.anchor));
        let own = self.context_rows + n * b;
        Stretches {
            context: block.context_start + first..block.context_start + block.anchor,
            own: own..own + b,
        }
    }

    /// The slots of block `n` that see the key at a row of keys and values.
    #[inline(always)]
    fn seen_by(&self, n: usize, row: usize) -> Range<usize> {
        let (block, b, rule) = (self.blocks[n], self.sizes.block_size, self.sizes.rule);
        if row < self.context_rows {
            let behind = block.anchor - (row - block.context_start);
            return 0..rule.window.map_or(b, |w| b.min(w.saturating_sub(behind)));
        }
        let slot = row - self.context_rows - n * b;
        let first = rule.window.map_or(0, |w| (slot + 1).saturating_sub(w));
        (if rule.causal { slot } else { first })..rule.window.map_or(b, |w| b.min(slot + w))
    }

    /// One head's rows of keys or values.
    fn of_head<'x>(&self, x: &'x [f32], head: usize) -> &'x [f32] {
        let floats = x.len() / self.sizes.kv_heads;
        &x[head * floats..][..floats]
    }

    /// Copies the rows of block `n` under `head` out of [N * B, heads, D], times `factor`.
    #[inline(always)]
    fn gather(&self, n: usize, head: usize, x: &[f32], factor: f32, rows: &mut [f32]) {
        let (width, whole) = (self.sizes.group() * self.sizes.d, self.sizes.heads * self.sizes.d);
        for (slot, part) in rows.chunks_exact_mut(width).enumerate() {
            let x = &x[(n * self.sizes.block_size + slot) * whole + head * width..][..width];
            for (part, x) in part.iter_mut().zip(x) {
                *part = x * factor;
            }
        }
    }

    /// scores [keys, columns] = rows of the stretches [keys, D] x turned [D, columns].
    #[inline(always)]
    fn against(&self, stretches: &Stretches, rows: &[f32], turned: &[f32], scores: &mut [f32]) {
        let (d, columns) = (self.sizes.d, self.sizes.columns());
        for (at, keys) in stretches.each() {
            let (rows, count) = (Matrix(&rows[keys.start * d..], d), keys.len());
            let into = &mut scores[at * columns..];
            multiply(rows, Matrix(turned, columns), into, columns, (count, d, columns));
        }
    }

    /// out [queries, D] = scores^T [queries, keys] x rows of the stretches [keys, D].
    #[inline(always)]
    fn over_keys(&self, scores: &[f32], stretches: &Stretches, rows: &[f32], out: &mut [f32]) {
        let (d, columns) = (self.sizes.d, self.sizes.columns());
        for (part, (at, keys)) in stretches.each().enumerate() {
            let left = Left::Transposed(Matrix(&scores[at * columns..], columns));
            let right = Matrix(&rows[keys.start * d..], d);
            let sizes = (self.sizes.queries(), keys.len(), d);
            if part == 0 {
                multiply(left, right, out, d, sizes);
            } else {
                multiply_add(left, right, out, d, sizes);
            }
        }
    }

    /// Fills the scratch's scaled queries, its weights exp(score - largest) and the inverses of their totals; a weight
    /// is exactly zero where the rule forbids.
    #[inline(always)]
    fn weights(&self, n: usize, head: usize, scratch: &mut Scratch) -> Stretches {
        let (d, columns, stretches) = (self.sizes.d, self.sizes.columns(), self.stretches(n));
        let queries = room(&mut scratch.queries, self.sizes.queries() * d);
        self.gather(n, head, self.q, self.sizes.scale(), queries);
        let turned = room(&mut scratch.turned, d * columns);
        turn(queries, turned, columns);
        let weights = room(&mut scratch.weights, stretches.keys() * columns);
        self.against(&stretches, self.of_head(self.keys, head), turned, weights);
        self.mask(n, &stretches, f32::NEG_INFINITY, weights);
        softmax(weights, room(&mut scratch.inverse, columns), columns);
        self.mask(n, &stretches, 0.0, weights);
        stretches
    }

    /// Puts `value` where the rule forbids.
    #[inline(always)]
    fn mask(&self, n: usize, stretches: &Stretches, value: f32, scores: &mut [f32]) {
        let (group, rule) = (self.sizes.group(), self.sizes.rule);
        if rule.window.is_none() && !rule.causal {
            return;
        }
        let keys = stretches.context.clone().chain(stretches.own.clone());
        for (row, scores) in keys.zip(scores.chunks_exact_mut(self.sizes.columns())) {
            let seen = self.seen_by(n, row);
            scores[..seen.start * group].fill(value);
            scores[seen.end * group..self.sizes.queries()].fill(value);
        }
    }
}

/// Turns rows [R, D] into [D, columns]; columns from R on are zero.
#[inline(always)]
fn turn(rows: &[f32], turned: &mut [f32], columns: usize) {
    let d = turned.len() / columns;
    // A vector's worth of rows at a time: each cache line of the result is written once, whole.
    for (part, rows) in rows.chunks(LANES * d).enumerate() {
        for i in 0..d {
            let mut line = [0f32; LANES];
            for (slot, row) in line.iter_mut().zip(rows.chunks_exact(d)) {
                *slot = row[i];
            }
            turned[i * columns + part * LANES..][..LANES].copy_from_slice(&line);
        }
    }
}

/// Scores [keys, columns] to exp(score - largest of the column); `inverse` becomes 1 / total of each column.
#[inline(always)]
fn softmax(scores: &mut [f32], inverse: &mut [f32], columns: usize) {
    for (part, inverse) in inverse.chunks_exact_mut(LANES).enumerate() {
        let mut largest = [f32::NEG_INFINITY; LANES];
        for row in scores.chunks_exact(columns) {
            let row = &row[part * LANES..][..LANES];
            for l in 0..LANES {
                largest[l] = if row[l] > largest[l] { row[l] } else { largest[l] };
            }
        }
        let mut totals = [0f32; LANES];
        for rows in scores.chunks_mut(SUMMED * columns) {
            let mut sums = [0f32; LANES];
            for row in rows.chunks_exact_mut(columns) {
                let row = &mut row[part * LANES..][..LANES];
                for l in 0..LANES {
                    row[l] = exp(row[l] - largest[l]);
                    sums[l] += row[l];
                }
            }
            for l in 0..LANES {
                totals[l] += sums[l];
            }
        }
        for l in 0..LANES {
            inverse[l] = 1.0 / totals[l];
        }
    }
}

#[inline(always)]
fn scale(x: &mut [f32], factor: f32) {
    for x in x {
        *x *= factor;
    }
}

/// Copies rows into the stretches where they belong, which are all of one length.
#[inline(always)]
fn spread(rows: &[f32], into: &mut [&mut [f32]]) {
    let width = into.first().map_or(1, |part| part.len());
    for (part, row) in into.iter_mut().zip(rows.chunks_exact(width)) {
        part.copy_from_slice(row);
    }
}
