//! The CPU kernel of one (sample, key/value head): scores, softmax and products of all its blocks.
//!
//! Everything is a small matrix product against a panel of [`PANEL`] columns, four rows at a time, which keeps the
//! sums in vector registers. Keys are transposed into panels once a task.

use crate::blocks::Block;
use crate::drafter_config::LayerRule;
use crate::simd::{dot, exp_shifted, max, vectorised};

/// Columns of a panel.
const PANEL: usize = 32;

#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) d: usize,
    pub(super) block_size: usize,
    pub(super) rule: LayerRule,
}

/// All blocks of one sample under one key/value head.
pub(super) struct HeadTask<'p> {
    pub(super) sizes: Sizes,
    pub(super) blocks: &'p [Block],
    /// Index of `blocks[0]` among all blocks.
    pub(super) first_block: usize,
    /// Context rows before the blocks' own rows in k and v.
    pub(super) context_rows: usize,
    pub(super) head: usize,
}

/// Gradients of one task in its own layout: queries [blocks * B * group, D], keys [context + blocks * B, D].
pub(super) struct Gradients {
    pub(super) dq: Vec<f32>,
    pub(super) dk: Vec<f32>,
    pub(super) dv: Vec<f32>,
}

/// Where one block's visible context begins, in whole panels.
struct Span {
    /// First context row of the first panel.
    base: usize,
    /// Context columns scored, a multiple of PANEL.
    context_columns: usize,
    /// Context rows that exist among them.
    context_rows: usize,
}

impl HeadTask<'_> {
    fn group(&self) -> usize {
        self.sizes.heads / self.sizes.kv_heads
    }

    /// Context rows that the task's blocks reach.
    fn reach(&self) -> usize {
        self.blocks.iter().map(|block| block.anchor).max().unwrap_or(0)
    }

    /// Rows of the task's key layout: the reached context, then each block's own slots.
    fn key_rows(&self) -> usize {
        self.reach() + self.blocks.len() * self.sizes.block_size
    }

    /// Row of k and v (in heads' units) that stands behind row `i` of the task's key layout.
    fn key_row(&self, i: usize) -> usize {
        let reach = self.reach();
        let context_start = self.blocks.first().map_or(0, |block| block.context_start);
        if i < reach {
            context_start + i
        } else {
            self.context_rows + self.first_block * self.sizes.block_size + i - reach
        }
    }

    /// Copies this head's keys into the task's layout, [key_rows, D].
    fn gather_keys(&self, k: &[f32]) -> Vec<f32> {
        let (d, stride) = (self.sizes.d, self.sizes.kv_heads * self.sizes.d);
        let mut rows = vec![0f32; self.key_rows() * d];
        for (i, row) in rows.chunks_exact_mut(d).enumerate() {
            row.copy_from_slice(&k[self.key_row(i) * stride + self.head * d..][..d]);
        }
        rows
    }

    /// Copies this head's query group into [blocks * B * group, D].
    fn gather_queries(&self, q: &[f32]) -> Vec<f32> {
        let (d, group, width) = (self.sizes.d, self.group(), self.sizes.heads * self.sizes.d);
        let rows = self.blocks.len() * self.sizes.block_size;
        let first = self.first_block * self.sizes.block_size;
        (0..rows)
            .flat_map(|r| {
                q[(first + r) * width + self.head * group * d..][..group * d]
                    .iter()
                    .copied()
            })
            .collect()
    }

    /// Adds task-layout query rows to the [N * B, heads, D] whole.
    pub(super) fn scatter_queries(&self, part: &[f32], whole: &mut [f32]) {
        let (d, group, width) = (self.sizes.d, self.group(), self.sizes.heads * self.sizes.d);
        let first = self.first_block * self.sizes.block_size;
        for (r, part) in part.chunks_exact(group * d).enumerate() {
            whole[(first + r) * width + self.head * group * d..][..group * d].copy_from_slice(part);
        }
    }

    /// Adds task-layout key rows to the [T + N * B, kv_heads, D] whole.
    pub(super) fn scatter_keys(&self, part: &[f32], whole: &mut [f32]) {
        let (d, stride) = (self.sizes.d, self.sizes.kv_heads * self.sizes.d);
        for (i, part) in part.chunks_exact(d).enumerate() {
            let row = &mut whole[self.key_row(i) * stride + self.head * d..][..d];
            for (whole, part) in row.iter_mut().zip(part) {
                *whole += part;
            }
        }
    }

    /// Attention output in the task's query layout.
    pub(super) fn forward(&self, q: &[f32], k: &[f32], v: &[f32]) -> Vec<f32> {
        let (queries, keys, values) = (self.gather_queries(q), self.gather_keys(k), self.gather_keys(v));
        vectorised(
            #[inline(always)]
            || {
                let panels = Panels::new(self, &keys);
                let mut y = vec![0f32; queries.len()];
                let rows = self.sizes.block_size * self.group();
                let mut probs = Vec::new();
                for (n, y) in y.chunks_exact_mut(rows * self.sizes.d).enumerate() {
                    let span = self.probabilities(n, &queries, &panels, &mut probs);
                    let columns = probs.len() / rows;
                    for (at, first, count) in self.value_parts(n, &span) {
                        let coefficients = Coefficients {
                            data: &probs[at..],
                            row: columns,
                            step: 1,
                        };
                        multiply_add(
                            y,
                            coefficients,
                            rows,
                            count,
                            &values[first * self.sizes.d..],
                            self.sizes.d,
                        );
                    }
                }
                y
            },
        )
    }

    /// Gradients in the task's layouts.
    pub(super) fn backward(&self, q: &[f32], k: &[f32], v: &[f32], dy: &[f32]) -> Gradients {
        let (queries, keys, values) = (self.gather_queries(q), self.gather_keys(k), self.gather_keys(v));
        let dy = self.gather_queries(dy);
        let d = self.sizes.d;
        vectorised(
            #[inline(always)]
            || {
                let (key_panels, value_panels) = (Panels::new(self, &keys), Panels::new(self, &values));
                let mut out = Gradients {
                    dq: vec![0f32; queries.len()],
                    dk: vec![0f32; keys.len()],
                    dv: vec![0f32; keys.len()],
                };
                let rows = self.sizes.block_size * self.group();
                let (mut probs, mut dprobs) = (Vec::new(), Vec::new());
                let scale = self.scale();
                for n in 0..self.blocks.len() {
                    let mine = n * rows * d..(n + 1) * rows * d;
                    let span = self.probabilities(n, &queries, &key_panels, &mut probs);
                    self.products(n, &dy, &value_panels, &span, &mut dprobs);
                    let columns = probs.len() / rows;
                    // dS = P * (dP - sum P dP), times the score's scale; a masked pair has P = 0 and so dS = 0.
                    for (p, dp) in probs.chunks_exact(columns).zip(dprobs.chunks_exact_mut(columns)) {
                        let mean = dot(p, dp);
                        for (dp, p) in dp.iter_mut().zip(p) {
                            *dp = p * (*dp - mean) * scale;
                        }
                    }
                    for (at, first, count) in self.value_parts(n, &span) {
                        let ds = Coefficients {
                            data: &dprobs[at..],
                            row: columns,
                            step: 1,
                        };
                        multiply_add(&mut out.dq[mine.clone()], ds, rows, count, &keys[first * d..], d);
                        let ds = Coefficients {
                            data: &dprobs[at..],
                            row: 1,
                            step: columns,
                        };
                        multiply_add(
                            &mut out.dk[first * d..(first + count) * d],
                            ds,
                            count,
                            rows,
                            &queries[mine.clone()],
                            d,
                        );
                        let p = Coefficients {
                            data: &probs[at..],
                            row: 1,
                            step: columns,
                        };
                        multiply_add(
                            &mut out.dv[first * d..(first + count) * d],
                            p,
                            count,
                            rows,
                            &dy[mine.clone()],
                            d,
                        );
                    }
                }
                out
            },
        )
    }

    fn scale(&self) -> f32 {
        (1.0 / (self.sizes.d as f64).sqrt()) as f32
    }

    fn span(&self, n: usize) -> Span {
        let anchor = self.blocks[n].anchor;
        let first = self
            .sizes
            .rule
            .window
            .map_or(0, |w| (anchor + 1).saturating_sub(w).min(anchor));
        let base = first / PANEL * PANEL;
        Span {
            base,
            context_columns: (anchor - base).div_ceil(PANEL) * PANEL,
            context_rows: anchor - base,
        }
    }

    /// (column, first key row, keys) of the two stretches that block `n` multiplies values over.
    fn value_parts(&self, n: usize, span: &Span) -> [(usize, usize, usize); 2] {
        let b = self.sizes.block_size;
        [
            (0, span.base, span.context_rows),
            (span.context_columns, self.reach() + n * b, b),
        ]
    }

    /// Rows of block `n` against panels: [B * group, context columns + own columns].
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "see simd::vectorised")]
    fn products(&self, n: usize, rows_of: &[f32], panels: &Panels, span: &Span, out: &mut Vec<f32>) {
        let (d, rows) = (self.sizes.d, self.sizes.block_size * self.group());
        let own = self.sizes.block_size.div_ceil(PANEL);
        let columns = span.context_columns + own * PANEL;
        out.clear();
        out.resize(rows * columns, 0.0);
        let a = Coefficients {
            data: &rows_of[n * rows * d..(n + 1) * rows * d],
            row: d,
            step: 1,
        };
        let first = span.base / PANEL;
        let context = (first..first + span.context_columns / PANEL).map(|p| panels.context(p, d));
        let own = (0..own).map(|p| panels.own(n * own + p, d));
        for (p, panel) in context.chain(own).enumerate() {
            let mut row = 0;
            while row < rows {
                let at = row * columns + p * PANEL;
                if rows - row >= 4 {
                    tile::<4>(&mut out[at..], columns, a.from(row), d, panel, PANEL);
                    row += 4;
                } else {
                    tile::<1>(&mut out[at..], columns, a.from(row), d, panel, PANEL);
                    row += 1;
                }
            }
        }
    }

    /// Softmax probabilities of block `n`; exactly zero where the rule forbids.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "see simd::vectorised")]
    fn probabilities(&self, n: usize, queries: &[f32], panels: &Panels, out: &mut Vec<f32>) -> Span {
        let (b, group, rule) = (self.sizes.block_size, self.group(), self.sizes.rule);
        let (span, anchor, scale) = (self.span(n), self.blocks[n].anchor, self.scale());
        self.products(n, queries, panels, &span, out);
        let columns = out.len() / (b * group);
        for (row, scores) in out.chunks_exact_mut(columns).enumerate() {
            let slot = row / group;
            for score in scores.iter_mut() {
                *score *= scale;
            }
            // Visible stretches: context [c0, c1), own slots [o0, o1).
            let c0 = rule
                .window
                .map_or(0, |w| (anchor + slot + 1).saturating_sub(w).min(anchor))
                .max(span.base)
                - span.base;
            let c1 = span.context_rows;
            let o0 = rule.window.map_or(0, |w| (slot + 1).saturating_sub(w));
            let o1 = if rule.causal {
                slot + 1
            } else {
                rule.window.map_or(b, |w| b.min(slot + w))
            };
            let (context, own) = scores.split_at_mut(span.context_columns);
            let largest = max(&context[c0..c1]).max(max(&own[o0..o1]));
            let total = exp_shifted(&mut context[c0..c1], largest) + exp_shifted(&mut own[o0..o1], largest);
            let inverse = 1.0 / total;
            for p in context[c0..c1].iter_mut().chain(&mut own[o0..o1]) {
                *p *= inverse;
            }
            context[..c0].fill(0.0);
            context[c1..].fill(0.0);
            own[..o0].fill(0.0);
            own[o1..].fill(0.0);
        }
        span
    }
}

/// Key rows transposed into [D, PANEL] panels: the context's, then each block's own.
struct Panels {
    data: Vec<f32>,
    context_panels: usize,
}

impl Panels {
    fn new(task: &HeadTask<'_>, rows: &[f32]) -> Self {
        let (d, b, reach) = (task.sizes.d, task.sizes.block_size, task.reach());
        let mut data = Vec::new();
        let mut transpose = |rows: &[f32]| {
            for rows in rows.chunks(PANEL * d) {
                let at = data.len();
                data.resize(at + PANEL * d, 0.0);
                for (column, row) in rows.chunks_exact(d).enumerate() {
                    for (i, value) in row.iter().enumerate() {
                        data[at + i * PANEL + column] = *value;
                    }
                }
            }
        };
        transpose(&rows[..reach * d]);
        for own in rows[reach * d..].chunks_exact(b * d) {
            transpose(own);
        }
        Self {
            data,
            context_panels: reach.div_ceil(PANEL),
        }
    }

    fn context(&self, panel: usize, d: usize) -> &[f32] {
        &self.data[panel * PANEL * d..][..PANEL * d]
    }

    fn own(&self, panel: usize, d: usize) -> &[f32] {
        self.context(self.context_panels + panel, d)
    }
}

/// The left factor of a small product: element (r, j) at `r * row + j * step`.
#[derive(Clone, Copy)]
struct Coefficients<'a> {
    data: &'a [f32],
    row: usize,
    step: usize,
}

impl Coefficients<'_> {
    fn from(self, row: usize) -> Self {
        Self {
            data: &self.data[row * self.row..],
            ..self
        }
    }
}

/// out [rows, D] += a [rows, n] x b [n, D].
#[inline(always)]
#[expect(clippy::inline_always, reason = "see simd::vectorised")]
fn multiply_add(out: &mut [f32], a: Coefficients<'_>, rows: usize, n: usize, b: &[f32], d: usize) {
    let body = d - d % PANEL;
    if n == 0 {
        return;
    }
    for column in (0..body).step_by(PANEL) {
        let mut row = 0;
        while row < rows {
            let at = row * d + column;
            if rows - row >= 4 {
                tile::<4>(&mut out[at..], d, a.from(row), n, &b[column..], d);
                row += 4;
            } else {
                tile::<1>(&mut out[at..], d, a.from(row), n, &b[column..], d);
                row += 1;
            }
        }
    }
    for row in 0..rows {
        for j in 0..n {
            let s = a.data[row * a.row + j * a.step];
            for c in body..d {
                out[row * d + c] += s * b[j * d + c];
            }
        }
    }
}

/// out [R, PANEL] += a [R, n] x panel [n, PANEL], the sums in registers.
#[inline(always)]
#[expect(clippy::inline_always, reason = "see simd::vectorised")]
fn tile<const R: usize>(
    out: &mut [f32],
    out_row: usize,
    a: Coefficients<'_>,
    n: usize,
    panel: &[f32],
    panel_row: usize,
) {
    let mut sums = [[0f32; PANEL]; R];
    for j in 0..n {
        let b = &panel[j * panel_row..][..PANEL];
        for (r, sums) in sums.iter_mut().enumerate() {
            let s = a.data[r * a.row + j * a.step];
            for c in 0..PANEL {
                sums[c] += s * b[c];
            }
        }
    }
    for (r, sums) in sums.iter().enumerate() {
        for (out, sum) in out[r * out_row..][..PANEL].iter_mut().zip(sums) {
            *out += sum;
        }
    }
}
