//! Attention on the CPU over a cache that grows in place: streaming softmax, f32. The target's is causal; a drafter's
//! block sees itself in both directions, and either may be held to a window.
//!
//! The cache of one key/value head is a list of blocks of 64 positions: keys transposed `[D][64]`, so that the scores
//! of a block are plain multiply-adds over 64 lanes, and values `[64][D]`. A query walks the blocks in order and blocks
//! lie at absolute positions, so its result does not depend on how many queries came with it.
#![expect(
    clippy::inline_always,
    reason = "a kernel must be inlined into the function compiled for the wide unit"
)]

use std::ops::Range;

use rayon::prelude::*;

use super::kernels::{Kernel, exp, wide};
use crate::awake::awake;
use crate::buffer::Buffer;
use crate::small_matmul::{Matrix, multiply_add};

/// Positions of a block.
const BLOCK: usize = 64;
/// Partial maxima and sums of a softmax; divides a block.
const LANES: usize = 16;
/// Query vectors that walk the cache together.
const TILE: usize = 32;
/// Below this many (query, key, channel) triples one thread does it all.
fn parallel_work() -> usize {
    if awake() { 32 * 1024 } else { 256 * 1024 }
}

/// Which positions a query sees: a stretch whose two ends never move back from one query to the next.
#[derive(Clone, Copy)]
pub(crate) struct Sight {
    /// W of |q - k| < W.
    pub(crate) window: Option<usize>,
    /// Whether a query sees nothing behind itself.
    pub(crate) causal: bool,
    /// Positions that there are.
    pub(crate) end: usize,
}

impl Sight {
    fn of(self, position: usize) -> Range<usize> {
        let first = self.window.map_or(0, |w| (position + 1).saturating_sub(w));
        let ahead = if self.causal {
            1
        } else {
            self.window.unwrap_or(self.end)
        };
        first..self.end.min(position + ahead)
    }
}

/// Keys and values of one layer.
#[derive(Debug, Clone)]
pub(crate) struct KvCache {
    heads: Vec<HeadCache>,
    dim: usize,
}

#[derive(Debug, Clone, Default)]
struct HeadCache {
    keys: Vec<f32>,
    values: Vec<f32>,
}

impl KvCache {
    pub(crate) fn new(heads: usize, dim: usize) -> Self {
        Self {
            heads: vec![HeadCache::default(); heads],
            dim,
        }
    }

    /// Writes rows at positions from `start`, over whatever stood there: keys and values are [rows, heads * D].
    pub(crate) fn write(&mut self, start: usize, keys: Matrix<'_>, values: Matrix<'_>, rows: usize) {
        let dim = self.dim;
        let blocks = (start + rows).div_ceil(BLOCK);
        for (h, head) in self.heads.iter_mut().enumerate() {
            let size = blocks * BLOCK * dim;
            if head.keys.len() < size {
                head.keys.resize(size, 0.0);
                head.values.resize(size, 0.0);
            }
            for t in 0..rows {
                let (block, lane) = ((start + t) / BLOCK, (start + t) % BLOCK);
                let key = &keys.0[t * keys.1 + h * dim..][..dim];
                let block_keys = &mut head.keys[block * BLOCK * dim..][..BLOCK * dim];
                for (slot, k) in block_keys.iter_mut().skip(lane).step_by(BLOCK).zip(key) {
                    *slot = *k;
                }
                let value = &values.0[t * values.1 + h * dim..][..dim];
                head.values[(start + t) * dim..][..dim].copy_from_slice(value);
            }
        }
    }

    /// Attention of queries at positions from `start`; `queries` is `[kv heads][rows][group][D]`, already scaled, and so is
    /// the result. The keys of these positions are in the cache.
    pub(crate) fn attend(&self, start: usize, queries: &[f32], group: usize) -> Buffer {
        let end = start + queries.len() / (self.heads.len() * group * self.dim);
        let sight = Sight {
            window: None,
            causal: true,
            end,
        };
        self.attend_within(start, queries, group, sight)
    }

    /// The same, with what a query sees given.
    pub(crate) fn attend_within(&self, start: usize, queries: &[f32], group: usize, sight: Sight) -> Buffer {
        let (dim, heads) = (self.dim, self.heads.len());
        let per_head = queries.len() / heads;
        let mut out = Buffer::zeros(queries.len());
        let tile_rows = (TILE / group).max(1);
        let tile_floats = tile_rows * group * dim;
        let work = |head: usize, tile: usize, out: &mut [f32]| {
            let queries = &queries[head * per_head + tile * tile_floats..][..out.len()];
            self.heads[head].tile(start + tile * tile_rows, queries, (group, dim), sight, out);
        };
        if queries.len() * (sight.end - sight.of(start).start) < parallel_work() {
            for (head, out) in out.chunks_exact_mut(per_head).enumerate() {
                out.chunks_mut(tile_floats)
                    .enumerate()
                    .for_each(|(tile, out)| work(head, tile, out));
            }
        } else {
            out.par_chunks_exact_mut(per_head).enumerate().for_each(|(head, out)| {
                out.par_chunks_mut(tile_floats)
                    .enumerate()
                    .for_each(|(tile, out)| work(head, tile, out));
            });
        }
        out
    }
}

impl HeadCache {
    /// Streaming softmax for one tile of queries, `group` of them a position; `out` starts at zero.
    fn tile(&self, start: usize, queries: &[f32], (group, dim): (usize, usize), sight: Sight, out: &mut [f32]) {
        let count = queries.len() / dim;
        let (begin, end) = (sight.of(start).start, sight.of(start + count / group - 1).end);
        let mut scores = Buffer::zeros(count * BLOCK);
        let mut peaks = vec![f32::NEG_INFINITY; count];
        let mut totals = vec![0f32; count];
        for first in (begin / BLOCK * BLOCK..end).step_by(BLOCK) {
            let keys = &self.keys[first * dim..][..BLOCK * dim];
            // rows before this block may see none of it; a tile may straddle a block's start
            let blind = (0..count / group).take_while(|t| sight.of(start + t).end <= first);
            let skip = blind.count() * group;
            let depth = BLOCK.min(end - first);
            // whole vectors of positions, no more
            let width = depth.next_multiple_of(LANES);
            let queries = &queries[skip * dim..];
            let scores = &mut scores[skip * BLOCK..];
            scores.fill(0.0);
            multiply_add(
                Matrix(queries, dim),
                Matrix(keys, BLOCK),
                scores,
                BLOCK,
                (count - skip, dim, width),
            );
            for r in skip..count {
                let seen = sight.of(start + r / group);
                let seen = seen.start.saturating_sub(first)..BLOCK.min(seen.end - first);
                let row = &mut scores[(r - skip) * BLOCK..][..width];
                if seen.start >= seen.end {
                    row.fill(0.0);
                    continue;
                }
                wide::<SoftmaxStep>((row, seen, &mut peaks[r], &mut totals[r], &mut out[r * dim..][..dim]));
            }
            // what no query of the tile sees must not meet a weight of zero: it may be no number
            let before = begin.saturating_sub(first);
            let values = &self.values[(first + before) * dim..][..(depth - before) * dim];
            let out = &mut out[skip * dim..];
            multiply_add(
                Matrix(&scores[before..], BLOCK),
                Matrix(values, dim),
                out,
                dim,
                (count - skip, depth - before, dim),
            );
        }
        for (out, total) in out.chunks_exact_mut(dim).zip(&totals) {
            wide::<ScaleRow>((out, 1.0 / total));
        }
    }
}

struct ScaleRow;

impl Kernel for ScaleRow {
    type Args<'a> = (&'a mut [f32], f32);

    #[inline(always)]
    fn run((row, factor): Self::Args<'_>) {
        for x in row {
            *x *= factor;
        }
    }
}

/// Turns one row of a block's scores into weights relative to the running maximum and rescales what came before.
struct SoftmaxStep;

impl Kernel for SoftmaxStep {
    type Args<'a> = (&'a mut [f32], Range<usize>, &'a mut f32, &'a mut f32, &'a mut [f32]);

    #[inline(always)]
    fn run((row, seen, peak, total, out): Self::Args<'_>) {
        let mut lanes = [f32::NEG_INFINITY; LANES];
        row[..seen.start].fill(f32::NEG_INFINITY);
        row[seen.end..].fill(f32::NEG_INFINITY);
        for chunk in row.chunks_exact(LANES) {
            for (lane, s) in lanes.iter_mut().zip(chunk) {
                *lane = if *s > *lane { *s } else { *lane };
            }
        }
        let peak_here = lanes.iter().fold(*peak, |a, b| if *b > a { *b } else { a });
        if peak_here > *peak {
            let shrink = exp(*peak - peak_here);
            *total *= shrink;
            ScaleRow::run((out, shrink));
            *peak = peak_here;
        }
        for s in row.iter_mut() {
            *s = exp(*s - peak_here);
        }
        let mut sums = [0f32; LANES];
        for chunk in row.chunks_exact(LANES) {
            for (sum, s) in sums.iter_mut().zip(chunk) {
                *sum += *s;
            }
        }
        *total += sums.iter().sum::<f32>();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equals_the_plain_softmax_and_a_row_alone_equals_the_row_among_many() {
        let (heads, group, dim, length) = (2, 3, 12, 200);
        let value = |i: usize| ((i * 2_654_435_761) % 997) as f32 / 300.0 - 1.6;
        let stride = heads * dim;
        let keys: Vec<f32> = (0..length * stride).map(value).collect();
        let values: Vec<f32> = (0..length * stride).map(|i| value(i + 5)).collect();
        let queries: Vec<f32> = (0..heads * length * group * dim).map(|i| value(i + 71)).collect();
        let mut cache = KvCache::new(heads, dim);
        cache.write(0, Matrix(&keys, stride), Matrix(&values, stride), length);
        let all = cache.attend(0, &queries, group);
        let per_head = length * group * dim;
        for h in 0..heads {
            for r in 0..length * group {
                let q = &queries[h * per_head + r * dim..][..dim];
                let scores: Vec<f64> = (0..=r / group)
                    .map(|s| {
                        (0..dim)
                            .map(|i| f64::from(q[i]) * f64::from(keys[s * stride + h * dim + i]))
                            .sum::<f64>()
                            .exp()
                    })
                    .collect();
                let total: f64 = scores.iter().sum();
                for i in 0..dim {
                    let sum: f64 = scores
                        .iter()
                        .enumerate()
                        .map(|(s, p)| p * f64::from(values[s * stride + h * dim + i]))
                        .sum();
                    let came = f64::from(all[h * per_head + r * dim + i]);
                    assert!(
                        (came - sum / total).abs() < 1e-5,
                        "head {h} row {r}: {came} {}",
                        sum / total
                    );
                }
            }
        }
        for (from, rows) in [(0, 1), (63, 1), (64, 1), (130, 9), (199, 1)] {
            let picked: Vec<f32> = (0..heads)
                .flat_map(|h| &queries[h * per_head + from * group * dim..][..rows * group * dim])
                .copied()
                .collect();
            let some = cache.attend(from, &picked, group);
            for h in 0..heads {
                let expected = &all[h * per_head + from * group * dim..][..rows * group * dim];
                assert_eq!(
                    &some[h * rows * group * dim..][..rows * group * dim],
                    expected,
                    "{rows} rows from {from}"
                );
            }
        }
    }
}
