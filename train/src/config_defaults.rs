//! What an absent key of the run file means, where that does not depend on the target or another key.

use crate::config::{
    CheckpointSection, EvaluateSection, GenerateSection, Precision, Schedule, TapMode, TapsSection, TrainSection,
    ValidateSection, WandbSection,
};

impl Default for GenerateSection {
    fn default() -> Self {
        Self {
            max_new: 1024,
            temperature: 0.0,
            seed: None,
        }
    }
}

impl Default for TapsSection {
    fn default() -> Self {
        Self {
            mode: TapMode::Stored,
            layers: None,
            dir: None,
            shard_mib: 1024,
        }
    }
}

impl Default for TrainSection {
    fn default() -> Self {
        Self {
            steps: None,
            epochs: None,
            accumulate_samples: None,
            pack_tokens: 4096,
            anchors: 512,
            lr: 6e-4,
            betas: [0.9, 0.999],
            eps: 1e-8,
            weight_decay: 0.0,
            clip: 1.0,
            schedule: Schedule::Cosine,
            warmup_ratio: 0.04,
            min_lr_ratio: 0.0,
            gamma: None,
            selector_alpha: 1.0,
            selector_ramp_steps: 0,
            selector_inject_gold: false,
            selector_detached: false,
            compute: Precision::F32,
            recompute: false,
        }
    }
}

impl Default for CheckpointSection {
    fn default() -> Self {
        Self {
            every: 500,
            keep_last: 2,
            keep_best: true,
        }
    }
}

impl Default for ValidateSection {
    fn default() -> Self {
        Self {
            every: 500,
            samples: 64,
        }
    }
}

impl Default for WandbSection {
    fn default() -> Self {
        Self {
            project: "dflash".to_owned(),
            entity: None,
            name: None,
            tags: Vec::new(),
        }
    }
}

impl Default for EvaluateSection {
    fn default() -> Self {
        Self {
            prompts: None,
            max_new: 256,
            limit: None,
        }
    }
}
