//! Where engines look: keys of `config.json` as it stands, stored names against the list.

use serde_json::Value;

use super::{Findings, Seen};

/// `config.json` as an engine looks into it.
pub(super) struct Raw<'v>(pub(super) &'v Value);

impl<'v> Raw<'v> {
    pub(super) fn top(&self, key: &str) -> Option<&'v Value> {
        self.0.get(key).filter(|value| !value.is_null())
    }

    pub(super) fn nested(&self, key: &str) -> Option<&'v Value> {
        self.0.get("dflash_config")?.get(key).filter(|value| !value.is_null())
    }

    pub(super) fn either(&self, key: &str) -> Option<&'v Value> {
        self.nested(key).or_else(|| self.top(key))
    }

    pub(super) fn size(&self, key: &str) -> Option<u64> {
        self.either(key)?.as_u64()
    }

    pub(super) fn architecture(&self) -> Option<&'v str> {
        self.0.pointer("/architectures/0")?.as_str()
    }

    pub(super) fn is_dflash2(&self) -> bool {
        self.architecture() == Some("DFlash2DraftModel")
    }

    pub(super) fn theta(&self) -> Option<&'v Value> {
        self.0
            .pointer("/rope_parameters/rope_theta")
            .or_else(|| self.top("rope_theta"))
    }

    pub(super) fn taps(&self) -> Option<Vec<u64>> {
        self.nested("target_layer_ids")?
            .as_array()?
            .iter()
            .map(Value::as_u64)
            .collect()
    }

    pub(super) fn slides(&self) -> Vec<bool> {
        let types = self.top("layer_types").and_then(Value::as_array);
        types
            .into_iter()
            .flatten()
            .map(|name| name == "sliding_attention")
            .collect()
    }

    /// Keys of the target's RoPE that have been copied into a drafter.
    pub(super) fn foreign_rope(&self) -> Option<String> {
        let inner = self.0.get("rope_parameters").and_then(Value::as_object);
        let inner = inner.into_iter().flatten().filter(|(_, value)| !value.is_null());
        let mut keys: Vec<String> = inner
            .map(|(key, _)| key.clone())
            .filter(|key| !["rope_theta", "rope_type", "type"].contains(&key.as_str()))
            .collect();
        if self
            .top("partial_rotary_factor")
            .is_some_and(|value| value.as_f64() != Some(1.0))
        {
            keys.push("partial_rotary_factor".to_owned());
        }
        (!keys.is_empty()).then(|| {
            format!(
                "{}: the target's RoPE, a drafter rotates the whole head",
                keys.join(", ")
            )
        })
    }

    pub(super) fn disagreeing_theta(&self) -> bool {
        let (flat, inner) = (self.top("rope_theta"), self.0.pointer("/rope_parameters/rope_theta"));
        matches!((flat, inner), (Some(a), Some(b)) if a.as_f64() != b.as_f64())
    }
}

/// Stored names against the list, and what explains them.
pub(super) struct Names {
    pub(super) missing: Vec<String>,
    pub(super) unexpected: Vec<String>,
    pub(super) misshapen: Vec<String>,
}

impl Names {
    pub(super) fn of(seen: &Seen) -> Self {
        let Some(config) = &seen.config else {
            return Self {
                missing: Vec::new(),
                unexpected: Vec::new(),
                misshapen: Vec::new(),
            };
        };
        let list = config.tensor_shapes();
        let listed = |name: &String| list.iter().any(|(listed, _)| listed == name);
        Self {
            missing: list
                .iter()
                .map(|(name, _)| name.clone())
                .filter(|name| !seen.tensors.contains_key(name))
                .collect(),
            unexpected: seen.tensors.keys().filter(|name| !listed(name)).cloned().collect(),
            misshapen: list
                .iter()
                .filter_map(|(name, shape)| {
                    let stored = seen.tensors.get(name).filter(|stored| *stored != shape)?;
                    Some(format!("{name}: expected shape {shape:?}, got {stored:?}"))
                })
                .collect(),
        }
    }

    /// Refused, whatever is wrong: a strict loader.
    pub(super) fn strict(&self, found: &mut Findings) {
        found.refuse(!self.missing.is_empty(), format!("missing {}", some(&self.missing)));
        found.refuse(
            !self.unexpected.is_empty(),
            format!("unexpected {}", some(&self.unexpected)),
        );
        found.refuse(!self.misshapen.is_empty(), self.misshapen.join("; "));
    }
}

/// The first few of many names.
pub(super) fn some(names: &[String]) -> String {
    const SHOWN: usize = 3;
    let more = names.len().saturating_sub(SHOWN);
    let shown = names.iter().take(SHOWN).cloned().collect::<Vec<_>>().join(", ");
    if more == 0 {
        shown
    } else {
        format!("{shown} and {more} more")
    }
}
