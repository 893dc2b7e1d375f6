//! The DFlash drafter and DFlash 2, which is DFlash with two optional parts.
//!
//! One pass fills a block. Context, once for all layers: c = rms(fc f), f the target's taps. A layer:
//!   a = conv_before(rms(x));  q = a Wq, k = [c Wk ; a Wk], v = [c Wv ; a Wv];  q, k normed a head, then rotated
//!   x += conv_after(attend(q, k, v) Wo);   m = conv_before(rms(x));  x += conv_after(swiglu(m Wg, m Wu) Wd)
//! The conv is a grouped dynamic convolution along the block's slots ([`ops::grouped_conv`]); context rows never
//! pass it. Embedding and head are the target's. Slot j of a block at anchor a predicts the token at a + j.
//!
//! The selector rescores the k best tokens C of each slot: `S(p, c) = u(c) + <A[p] * P h, B[c]>`, u the unary logit,
//! p the token chosen at the slot before (the anchor first); a greedy walk takes the best, left to right.
//!
//! Papers: arXiv 2602.06036 (DFlash); DFlash 2 after its published checkpoints. Shapes: N blocks, B slots,
//! R = N * B rows, T context rows, H hidden, V vocabulary, r rank, k candidates.

use crate::beside::Beside;
use crate::blocks::Blocks;
use crate::drafter_config::{DrafterConfig, LayerRule};
use crate::ops::{self, AttentionPlan, Compute, LogitShape, Rotation, Weight, rms_norm};
use crate::params::Params;
use crate::recompute::recomputed;
use crate::selector::CandidateSelector;
use crate::target::TargetHead;
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Result, Tensor};
use std::path::Path;
use std::sync::Arc;

/// A drafter's weights and rules. Training and decoding share it.
#[derive(Debug, Clone)]
pub struct Drafter {
    /// The resolved configuration.
    pub config: DrafterConfig,
    pub(crate) fc: Weight,          // [H, n_taps * H]
    pub(crate) hidden_norm: Tensor, // [H]
    pub(crate) layers: Vec<Layer>,
    pub(crate) norm: Tensor, // [H]
    /// DFlash 2's selector.
    pub selector: Option<CandidateSelector>,
    /// What the products of a training pass are computed in.
    pub compute: Compute,
    /// Whether a training pass computes its layers again instead of keeping them.
    recompute: bool,
    beside: Beside,
}

impl Drafter {
    /// A drafter over trainable variables. Their gradients are those of candle's backward pass together with
    /// [`Self::take_gradients`].
    pub fn new(config: DrafterConfig, params: &Params) -> Result<Self> {
        Self::computing(config, params, Compute::F32)
    }

    /// As [`Self::new`], with the products of all matrices but the codebooks' in `compute`.
    pub fn computing(config: DrafterConfig, params: &Params, compute: Compute) -> Result<Self> {
        let find = |name: &str| params.vars().get(name).map(|var| var.as_tensor().clone());
        Self::build(config, &Source::new(&find, Use::Training(compute, Beside::default())))
    }

    /// The same drafter, but a training pass keeps the inputs of its layers only and computes each layer again for its
    /// gradients, which are the same bits.
    #[must_use]
    pub fn recomputing(mut self) -> Self {
        self.recompute = true;
        self
    }

    /// Gradients that backward passes since the last call have formed beside candle's own store: those of matrices on the
    /// CPU, and of all variables of layers that were computed again.
    ///
    /// # Errors
    /// As candle's constructors.
    pub fn take_gradients(&self) -> Result<GradStore> {
        self.beside.take()
    }

    /// Loads a published folder, strictly, for decoding: computes in f32, keeps BF16 matrices as they are stored.
    pub fn load(dir: &Path, device: &Device) -> Result<Self> {
        let config = DrafterConfig::from_json_file(&dir.join("config.json"))?;
        let tensors = crate::folder::read_tensors(dir, &config, device)?;
        Self::frozen(config, &|name| tensors.get(name).cloned())
    }

    /// A drafter for decoding over what was read from any format, as [`Drafter::load`].
    ///
    /// # Errors
    /// When the device cannot hold a tensor.
    pub fn from_source(source: &crate::formats::Source, device: &Device) -> Result<Self> {
        let place = |(name, tensor): (&String, &Tensor)| Ok((name.clone(), tensor.to_device(device)?));
        let tensors: crate::formats::Tensors = source.tensors.iter().map(place).collect::<Result<_>>()?;
        Self::frozen(source.config.clone(), &|name| tensors.get(name).cloned())
    }

    /// A drafter for decoding over tensors by published name.
    pub(crate) fn frozen(config: DrafterConfig, find: &dyn Fn(&str) -> Option<Tensor>) -> Result<Self> {
        let mut drafter = Self::build(config, &Source::new(find, Use::Decoding))?;
        let layers = drafter.layers.iter_mut().flat_map(Layer::weights);
        let projection = drafter
            .selector
            .as_mut()
            .map(|selector| &mut selector.hidden_projection);
        Weight::gather([&mut drafter.fc].into_iter().chain(layers).chain(projection))?;
        Ok(drafter)
    }

    fn build(config: DrafterConfig, source: &Source<'_>) -> Result<Self> {
        let layers = config.layers.iter().enumerate();
        let layers = layers.map(|(i, rule)| Layer::load(&config, *rule, &source.within(&format!("layers.{i}"))));
        Ok(Self {
            fc: source.weight("fc.weight")?,
            hidden_norm: source.tensor("hidden_norm.weight")?,
            layers: layers.collect::<Result<_>>()?,
            norm: source.tensor("norm.weight")?,
            selector: match config.selector {
                Some(sizes) => Some(CandidateSelector::load(sizes.top_k, source)?),
                None => None,
            },
            compute: match &source.used {
                Use::Training(compute, _) => *compute,
                Use::Decoding => Compute::F32,
            },
            recompute: false,
            beside: match &source.used {
                Use::Training(_, beside) => beside.clone(),
                Use::Decoding => Beside::default(),
            },
            config,
        })
    }

    /// What happens between head and logits.
    pub fn logit_shape(&self) -> LogitShape {
        LogitShape {
            multiplier: self.config.output_multiplier,
            softcap: self.config.final_logit_softcapping,
        }
    }

    /// Training form: post-norm hidden of every slot of every block, [N * B, H].
    ///
    /// `taps`: [T, n_taps * H] f32, row i belonging to `blocks.context_positions[i]`; `head.embed` in any type.
    pub fn hidden(&self, blocks: &Blocks, taps: &Tensor, head: &TargetHead) -> Result<Tensor> {
        let config = &self.config;
        let b = blocks.block_size;
        let positions = blocks.blocks.iter().flat_map(|block| block.anchor..block.anchor + b);
        let slots = Rotation::new(positions, config.head_dim, config.rope_theta);
        let context_positions = blocks.context_positions.iter().map(|p| *p as usize);
        let rows = Rotation::new(context_positions, config.head_dim, config.rope_theta);
        let all_blocks = Arc::new(blocks.blocks.clone());
        let context = self.context(taps)?;
        let mut x = self.embed_blocks(&blocks.anchors, b, head)?;
        for layer in &self.layers {
            let plan = AttentionPlan {
                blocks: all_blocks.clone(),
                block_size: b,
                context_rows: taps.dim(0)?,
                rule: layer.rule,
            };
            let (layer, config) = (layer.clone(), config.clone());
            let (slots, rows) = (slots.clone(), rows.clone());
            let forward = move |x: &Tensor, context: &Tensor| {
                let (context_k, context_v) = layer.keys_values(context, &rows, &config)?;
                layer.forward(x, &slots, b, &config, &|q, k, v| {
                    ops::block_attention(
                        q,
                        &Tensor::cat(&[&context_k, k], 0)?,
                        &Tensor::cat(&[&context_v, v], 0)?,
                        &plan,
                    )
                })
            };
            x = if self.recompute {
                recomputed(&x, &context, &self.beside, forward)?
            } else {
                // the copy's gradient sums a layer's keys and values first, as the recomputed layer's does: the same bits
                forward(&x, &context.copy()?)?
            };
        }
        rms_norm(&x, &self.norm, config.rms_norm_eps)
    }

    /// Context rows shared by all layers, [T, H].
    fn context(&self, taps: &Tensor) -> Result<Tensor> {
        rms_norm(&self.fc.apply(taps)?, &self.hidden_norm, self.config.rms_norm_eps)
    }

    /// Embeddings of [anchor, MASK x (b - 1)] for every anchor, [N * b, H] f32.
    fn embed_blocks(&self, anchors: &[u32], b: usize, head: &TargetHead) -> Result<Tensor> {
        let (mask, v) = (self.config.mask_token_id, self.config.vocab_size);
        if let Some(anchor) = anchors.iter().find(|id| **id as usize >= v) {
            candle_core::bail!("anchor token {anchor}: the drafter's vocabulary has {v} rows")
        }
        let ids: Vec<u32> = anchors
            .iter()
            .flat_map(|a| (0..b).map(move |j| if j == 0 { *a } else { mask }))
            .collect();
        let ids = Tensor::from_vec(ids, anchors.len() * b, head.embed.device())?;
        let x = head.embed.index_select(&ids, 0)?.to_dtype(DType::F32)?;
        x.affine(self.config.input_embedding_scale, 0.0)
    }

    /// An empty decoding context.
    pub fn decoding_context(&self) -> DecodingContext {
        DecodingContext {
            len: 0,
            layers: vec![None; self.layers.len()],
        }
    }

    /// Appends committed positions to a decoding context. `taps`: [m, n_taps * H], any float type.
    pub fn extend(&self, context: &mut DecodingContext, taps: &Tensor) -> Result<()> {
        let m = taps.dim(0)?;
        if m == 0 {
            return Ok(());
        }
        let config = &self.config;
        let rows = self.context(&taps.to_dtype(DType::F32)?)?;
        let positions = Rotation::new(context.len..context.len + m, config.head_dim, config.rope_theta);
        for (layer, cache) in self.layers.iter().zip(&mut context.layers) {
            let (k, v) = layer.keys_values(&rows, &positions, config)?;
            match cache {
                Some(cache) => {
                    cache.0.append(&k, context.len)?;
                    cache.1.append(&v, context.len)?;
                }
                None => *cache = Some((Rows::new(&k)?, Rows::new(&v)?)),
            }
        }
        context.len += m;
        Ok(())
    }

    /// Decoding form: post-norm hidden of the first `slots` slots of the block at the context's end, [slots, H].
    pub fn block_hidden(
        &self,
        context: &DecodingContext,
        anchor: u32,
        slots: usize,
        head: &TargetHead,
    ) -> Result<Tensor> {
        let config = &self.config;
        let positions = context.len..context.len + slots;
        let rotation = Rotation::new(positions, config.head_dim, config.rope_theta);
        let mut x = self.embed_blocks(&[anchor], slots, head)?;
        for (layer, cache) in self.layers.iter().zip(&context.layers) {
            x = layer.forward(&x, &rotation, slots, config, &|q, k, v| match cache {
                Some((keys, values)) => {
                    let context = (&keys.rows(context.len)?, &values.rows(context.len)?);
                    ops::attend_one_block(q, context, (k, v), layer.rule)
                }
                None => ops::attend_one_block(q, (&k.narrow(0, 0, 0)?, &v.narrow(0, 0, 0)?), (k, v), layer.rule),
            })?;
        }
        rms_norm(&x, &self.norm, config.rms_norm_eps)
    }
}

/// One decoder layer.
#[derive(Debug, Clone)]
pub(crate) struct Layer {
    pub(crate) rule: LayerRule,
    pub(crate) input_layernorm: Tensor,          // [H]
    pub(crate) post_attention_layernorm: Tensor, // [H]
    pub(crate) q_proj: Weight,                   // [heads * D, H]
    pub(crate) k_proj: Weight,                   // [kv_heads * D, H]
    pub(crate) v_proj: Weight,                   // [kv_heads * D, H]
    pub(crate) o_proj: Weight,                   // [H, heads * D]
    pub(crate) q_norm: Tensor,                   // [D]
    pub(crate) k_norm: Tensor,                   // [D]
    pub(crate) gate_proj: Weight,                // [I, H]
    pub(crate) up_proj: Weight,                  // [I, H]
    pub(crate) down_proj: Weight,                // [H, I]
    pub(crate) attention_conv: Option<GroupedDynamicConv>,
    pub(crate) mlp_conv: Option<GroupedDynamicConv>,
}

impl Layer {
    fn load(config: &DrafterConfig, rule: LayerRule, source: &Source<'_>) -> Result<Self> {
        let conv = |name: &str| match config.conv {
            Some(_) => GroupedDynamicConv::load(&source.within(name)).map(Some),
            None => Ok(None),
        };
        Ok(Self {
            rule,
            input_layernorm: source.tensor("input_layernorm.weight")?,
            post_attention_layernorm: source.tensor("post_attention_layernorm.weight")?,
            q_proj: source.weight("self_attn.q_proj.weight")?,
            k_proj: source.weight("self_attn.k_proj.weight")?,
            v_proj: source.weight("self_attn.v_proj.weight")?,
            o_proj: source.weight("self_attn.o_proj.weight")?,
            q_norm: source.tensor("self_attn.q_norm.weight")?,
            k_norm: source.tensor("self_attn.k_norm.weight")?,
            gate_proj: source.weight("mlp.gate_proj.weight")?,
            up_proj: source.weight("mlp.up_proj.weight")?,
            down_proj: source.weight("mlp.down_proj.weight")?,
            attention_conv: conv("attention_conv")?,
            mlp_conv: conv("mlp_conv")?,
        })
    }

    /// The matrices in the order of their use.
    fn weights(&mut self) -> impl Iterator<Item = &mut Weight> {
        let [before, between] =
            [&mut self.attention_conv, &mut self.mlp_conv].map(|conv| conv.as_mut().map(|c| &mut c.kernel_projection));
        let qkv = [&mut self.q_proj, &mut self.k_proj, &mut self.v_proj, &mut self.o_proj];
        let feed_forward = [&mut self.gate_proj, &mut self.up_proj, &mut self.down_proj];
        before.into_iter().chain(qkv).chain(between).chain(feed_forward)
    }

    /// Rotated keys and values of rows that are already normed, each [rows, kv_heads, D].
    fn keys_values(&self, rows: &Tensor, at: &Rotation, config: &DrafterConfig) -> Result<(Tensor, Tensor)> {
        let shape = (rows.dim(0)?, config.num_kv_heads, config.head_dim);
        let k = rms_norm(
            &self.k_proj.apply(rows)?.reshape(shape)?,
            &self.k_norm,
            config.rms_norm_eps,
        )?;
        Ok((ops::rope(&k, at)?, self.v_proj.apply(rows)?.reshape(shape)?))
    }

    /// x [R, H] -> [R, H]; `attend` gets q [R, heads, D] and the block rows' own k and v [R, kv_heads, D].
    fn forward(
        &self,
        x: &Tensor,
        at: &Rotation,
        block_size: usize,
        config: &DrafterConfig,
        attend: &dyn Fn(&Tensor, &Tensor, &Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let (rows, eps) = (x.dim(0)?, config.rms_norm_eps);
        let attention = |a: &Tensor| {
            let q = self
                .q_proj
                .apply(a)?
                .reshape((rows, config.num_heads, config.head_dim))?;
            let q = ops::rope(&rms_norm(&q, &self.q_norm, eps)?, at)?;
            let (k, v) = self.keys_values(a, at, config)?;
            self.o_proj
                .apply(&attend(&q, &k, &v)?.reshape((rows, config.num_heads * config.head_dim))?)
        };
        let feed_forward = |m: &Tensor| {
            self.down_proj
                .apply(&ops::swiglu(&self.gate_proj.apply(m)?, &self.up_proj.apply(m)?)?)
        };
        let a = rms_norm(x, &self.input_layernorm, eps)?;
        let x = (x + around(self.attention_conv.as_ref(), &a, block_size, attention)?)?;
        let m = rms_norm(&x, &self.post_attention_layernorm, eps)?;
        &x + around(self.mlp_conv.as_ref(), &m, block_size, feed_forward)?
    }
}

/// Runs a sublayer between the two sides of its convolution, if it has one.
fn around(
    conv: Option<&GroupedDynamicConv>,
    input: &Tensor,
    block_size: usize,
    sublayer: impl Fn(&Tensor) -> Result<Tensor>,
) -> Result<Tensor> {
    let Some(conv) = conv else { return sublayer(input) };
    // One projection of the normed input gives the coefficients of both sides.
    let delta = conv.kernel_projection.apply(input)?;
    let before = ops::grouped_conv(input, &delta, &conv.base_kernel, 0, block_size)?;
    ops::grouped_conv(&sublayer(&before)?, &delta, &conv.base_kernel, 1, block_size)
}

/// Coefficients of a sublayer's two convolutions.
#[derive(Debug, Clone)]
pub(crate) struct GroupedDynamicConv {
    pub(crate) base_kernel: Tensor,       // [2, K, H]: side, tap, channel
    pub(crate) kernel_projection: Weight, // [2 * K * G, H]: side, tap, group
}

impl GroupedDynamicConv {
    fn load(source: &Source<'_>) -> Result<Self> {
        Ok(Self {
            base_kernel: source.tensor("base_kernel")?,
            kernel_projection: source.weight("kernel_projection.weight")?,
        })
    }
}

/// Where a drafter's tensors come from, by published name.
pub(crate) struct Source<'s> {
    find: &'s dyn Fn(&str) -> Option<Tensor>,
    used: Use,
    prefix: String,
}

/// What a drafter is built for.
#[derive(Debug, Clone)]
enum Use {
    /// Matrices get gradients, on the CPU beside candle's store.
    Training(Compute, Beside),
    /// Nothing will be trained, so that matrices may be packed.
    Decoding,
}

impl<'s> Source<'s> {
    fn new(find: &'s dyn Fn(&str) -> Option<Tensor>, used: Use) -> Self {
        let prefix = String::new();
        Self { find, used, prefix }
    }

    fn within(&self, part: &str) -> Source<'s> {
        Source {
            find: self.find,
            used: self.used.clone(),
            prefix: format!("{}{part}.", self.prefix),
        }
    }

    pub(crate) fn optional(&self, name: &str) -> Option<Tensor> {
        (self.find)(&format!("{}{name}", self.prefix))
    }

    fn stored(&self, name: &str) -> Result<Tensor> {
        match self.optional(name) {
            Some(tensor) => Ok(tensor),
            None => candle_core::bail!("drafter: tensor {}{name} is missing", self.prefix),
        }
    }

    pub(crate) fn tensor(&self, name: &str) -> Result<Tensor> {
        self.stored(name)?.to_dtype(DType::F32)
    }

    pub(crate) fn weight(&self, name: &str) -> Result<Weight> {
        let matrix = self.stored(name)?;
        match &self.used {
            Use::Training(compute, beside) => Weight::trained(matrix, *compute, beside),
            Use::Decoding => Weight::frozen(&matrix),
        }
    }
}

/// What a drafter keeps of a sequence while decoding: rotated context keys and values of every layer.
#[derive(Debug)]
pub struct DecodingContext {
    /// Committed positions seen.
    pub len: usize,
    layers: Vec<Option<(Rows, Rows)>>,
}

/// Rows that grow at the end, with room to spare so that appending does not copy what is there.
#[derive(Debug, Clone)]
struct Rows {
    buffer: Tensor, // [capacity, kv_heads, D]
}

impl Rows {
    fn new(first: &Tensor) -> Result<Self> {
        let (rows, heads, d) = first.dims3()?;
        let buffer = Tensor::zeros(
            ((rows + 64).next_power_of_two(), heads, d),
            first.dtype(),
            first.device(),
        )?;
        buffer.slice_set(&first.contiguous()?, 0, 0)?;
        Ok(Self { buffer })
    }

    fn append(&mut self, more: &Tensor, len: usize) -> Result<()> {
        let (rows, heads, d) = more.dims3()?;
        if len + rows > self.buffer.dim(0)? {
            let capacity = (len + rows).next_power_of_two() * 2;
            let larger = Tensor::zeros((capacity, heads, d), more.dtype(), more.device())?;
            larger.slice_set(&self.rows(len)?, 0, 0)?;
            self.buffer = larger;
        }
        self.buffer.slice_set(&more.contiguous()?, 0, len)
    }

    fn rows(&self, len: usize) -> Result<Tensor> {
        self.buffer.narrow(0, 0, len)
    }
}
