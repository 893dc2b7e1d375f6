//! The tensor list that a configuration stands for: published names and shapes, nothing more and nothing less.
//!
//! DFlash has 3 + 11 L tensors (58 at five layers), DFlash 2 has 6 + 15 L (81). Shapes are row-major, as stored:
//! a linear layer is [out, in]. There is no embedding, no head and no `model.` prefix. The two codebooks are bare
//! parameters, so their names carry no `.weight`.

use super::DrafterConfig;

impl DrafterConfig {
    /// Every tensor of the published file with its shape, sorted by name.
    pub fn tensor_shapes(&self) -> Vec<(String, Vec<usize>)> {
        let hidden = self.hidden_size;
        let mut list = vec![
            (
                "fc.weight".to_owned(),
                vec![hidden, self.target_layer_ids.len() * hidden],
            ),
            ("hidden_norm.weight".to_owned(), vec![hidden]),
            ("norm.weight".to_owned(), vec![hidden]),
        ];
        if let Some(selector) = self.selector {
            let codebook = vec![self.vocab_size, selector.rank];
            list.push(("candidate_selector.predecessor_codebook".to_owned(), codebook.clone()));
            list.push(("candidate_selector.successor_codebook".to_owned(), codebook));
            list.push((
                "candidate_selector.hidden_projection.weight".to_owned(),
                vec![selector.rank, hidden],
            ));
        }
        for layer in 0..self.layers.len() {
            self.push_layer(layer, &mut list);
        }
        list.sort();
        list
    }

    /// Numbers in all tensors together.
    pub fn parameter_count(&self) -> u64 {
        let numbers = |shape: &[usize]| {
            shape
                .iter()
                .fold(1_u64, |product, &size| product.saturating_mul(size as u64))
        };
        self.tensor_shapes()
            .iter()
            .fold(0_u64, |sum, (_, shape)| sum.saturating_add(numbers(shape)))
    }

    fn push_layer(&self, layer: usize, list: &mut Vec<(String, Vec<usize>)>) {
        let (hidden, inner) = (self.hidden_size, self.intermediate_size);
        let queries = self.num_heads * self.head_dim;
        let keys = self.num_kv_heads * self.head_dim;
        let mut push = |name: &str, shape: Vec<usize>| list.push((format!("layers.{layer}.{name}"), shape));
        push("input_layernorm.weight", vec![hidden]);
        push("post_attention_layernorm.weight", vec![hidden]);
        push("self_attn.q_proj.weight", vec![queries, hidden]);
        push("self_attn.k_proj.weight", vec![keys, hidden]);
        push("self_attn.v_proj.weight", vec![keys, hidden]);
        push("self_attn.o_proj.weight", vec![hidden, queries]);
        push("self_attn.q_norm.weight", vec![self.head_dim]);
        push("self_attn.k_norm.weight", vec![self.head_dim]);
        push("mlp.gate_proj.weight", vec![inner, hidden]);
        push("mlp.up_proj.weight", vec![inner, hidden]);
        push("mlp.down_proj.weight", vec![hidden, inner]);
        if let Some(conv) = self.conv {
            let groups = hidden / conv.group_size;
            for sublayer in ["attention_conv", "mlp_conv"] {
                // side 0 before the sublayer, side 1 after it; tap 0 the current slot
                push(&format!("{sublayer}.base_kernel"), vec![2, conv.kernel_size, hidden]);
                push(
                    &format!("{sublayer}.kernel_projection.weight"),
                    vec![2 * conv.kernel_size * groups, hidden],
                );
            }
        }
    }
}
