//! `hf` and `speculators`: the same drafter in another folder, read back and held against what it was made from.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use candle_core::DType;
use clap::{Args, ValueEnum};
use dflash_data::hub::{base_model, cached, is_repository, on_record};
use dflash_data::target_hash;
use dflash_eval::console::Failure;
use dflash_eval::folder::{drafter_in, local, named_info, settle, sizes_for};
use dflash_eval::load::load_target;
use dflash_model::folder::{Contents, Existing, ModelCard, PROVENANCE, check_destination, place, verify_written};
use dflash_model::formats::{self, Format, Source, speculators};
use dflash_model::{DrafterConfig, Target, TargetInfo};
use serde::Serialize;
use serde_json::{Value, json};

use crate::compare::{Compared, compare};

/// What `hf` is told.
#[derive(Debug, Args)]
pub struct Hf {
    /// Run folder, checkpoint, drafter folder of any format, or GGUF file.
    source: PathBuf,
    /// Folder to write.
    #[arg(long, value_name = "FOLDER")]
    out: PathBuf,
    /// Target folder: needed where the source does not say how deep its target is; with it, both are drafted with.
    #[arg(long, value_name = "FOLDER")]
    target: Option<PathBuf>,
    /// Type to store the weights in.
    #[arg(long, value_enum, default_value = "bf16")]
    dtype: Stored,
    #[command(flatten)]
    card: CardOptions,
    /// Replace a drafter folder that is already there.
    #[arg(long)]
    force: bool,
    /// Print JSON instead of a table.
    #[arg(long)]
    json: bool,
}

/// What `speculators` is told.
#[derive(Debug, Args)]
pub struct Speculators {
    /// Run folder, checkpoint, drafter folder of any format, or GGUF file.
    source: PathBuf,
    /// Target folder.
    #[arg(long, value_name = "FOLDER")]
    target: PathBuf,
    /// Folder to write.
    #[arg(long, value_name = "FOLDER")]
    out: PathBuf,
    /// Type to store the weights in.
    #[arg(long, value_enum, default_value = "bf16")]
    dtype: Stored,
    /// Target as the folder should name it: repository or path [default: the absolute path of --target].
    #[arg(long, value_name = "NAME")]
    verifier: Option<String>,
    /// Carry the target's embedding and head along (releases before 0.9 want them).
    #[arg(long)]
    carry_matrices: bool,
    /// Replace a folder that is already there.
    #[arg(long)]
    force: bool,
    /// Print JSON instead of a table.
    #[arg(long)]
    json: bool,
}

/// What the card of a published folder says beyond the source's own.
#[derive(Debug, Args)]
struct CardOptions {
    /// Name of the drafter on its card [default: the source's, else the folder's].
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Repository of the target on the card [default: the source's, else --target].
    #[arg(long, value_name = "ORG/NAME")]
    base_model: Option<String>,
    /// Commit of that repository on the card [default: the source's, or that of a target from the hub].
    #[arg(long, value_name = "COMMIT")]
    base_revision: Option<String>,
    /// What the drafter is to that model in the hub's words; a drafter is none of them, but the hub takes silence for
    /// finetune [default: the source's].
    #[arg(long, value_enum)]
    base_model_relation: Option<Relation>,
    /// Licence on the card, in the hub's spelling [default: the source's].
    #[arg(long, value_name = "LICENCE")]
    license: Option<String>,
}

/// The hub's words for what a model is to its base.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Relation {
    Adapter,
    Merge,
    Quantized,
    Finetune,
}

impl Relation {
    fn name(self) -> &'static str {
        match self {
            Self::Adapter => "adapter",
            Self::Merge => "merge",
            Self::Quantized => "quantized",
            Self::Finetune => "finetune",
        }
    }
}

/// Types that weights are stored in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Stored {
    Bf16,
    F16,
    F32,
}

impl Stored {
    fn dtype(self) -> DType {
        match self {
            Self::Bf16 => DType::BF16,
            Self::F16 => DType::F16,
            Self::F32 => DType::F32,
        }
    }
}

/// What a conversion did.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Conversion {
    /// What was read.
    pub source: String,
    /// Its format.
    pub format: &'static str,
    /// What was written.
    pub out: String,
    /// The weights' stored type.
    pub dtype: String,
    /// What was left out or changed on the way.
    pub notes: Vec<String>,
    /// Whether the weights were stored in a narrower type than the source's.
    pub rounded: bool,
    /// Both held against each other; absent without a target.
    pub compared: Option<Compared>,
    /// What failed; empty when nothing did.
    pub failures: Vec<String>,
}

impl Conversion {
    /// Whether nothing failed.
    pub fn passed(&self) -> bool {
        self.failures.is_empty()
    }

    /// The result for a terminal.
    pub fn table(&self) -> String {
        let mut lines = vec![
            format!("read        {} ({})", self.source, self.format),
            format!("wrote       {} ({})", self.out, self.dtype),
        ];
        lines.extend(self.notes.iter().map(|note| format!("note        {note}")));
        lines.push(if let Some(compared) = &self.compared {
            format!("compared    {}", compared.line())
        } else {
            let how = if self.rounded {
                format!("rounded to {}, to the bit of that", self.dtype)
            } else {
                "to the bit".to_owned()
            };
            format!("compared    weights only, {how}; give --target to compare what both draft")
        });
        lines.extend(self.failures.iter().map(|failure| format!("failed      {failure}")));
        lines.join("\n") + "\n"
    }
}

impl Hf {
    /// Puts folders of this machine in the place of those on the hub.
    ///
    /// # Errors
    /// When the hub does not have one.
    pub fn fetch(&mut self) -> Result<()> {
        settle("SOURCE", &mut self.source, false)?;
        let target = self.target.as_mut();
        target.map_or(Ok(()), |target| settle("--target", target, false))
    }

    /// Whether JSON is asked for.
    pub fn json(&self) -> bool {
        self.json
    }

    /// Converts, reads back, compares.
    ///
    /// # Errors
    /// When the source is not a whole drafter, the destination is taken, or writing fails.
    pub fn run(&self) -> Result<Conversion, Failure> {
        check_out(&self.out, self.force).map_err(Failure::Input)?;
        let target = self.target.as_deref().map(load_on_cpu).transpose();
        let target = target.map_err(Failure::Input)?;
        let path = drafter_in(&self.source).map_err(Failure::Input)?;
        let info = target_info(&path, target.as_deref()).map_err(Failure::Input)?;
        let source = read_source(&path, info.as_ref()).map_err(Failure::Input)?;
        if let (Some(target), false) = (&target, source.carried.is_empty()) {
            source
                .check_carried(target.head())
                .map_err(|error| Failure::Input(error.into()))?;
        }
        let stored = self.dtype.dtype();
        let own = own_provenance(&path);
        let card = self.card.card(own.as_ref(), &self.out, self.target.as_deref());
        let provenance = self
            .provenance(&path, &source, own.as_ref(), &card)
            .map_err(Failure::Run)?;
        let contents = Contents {
            config: &source.config,
            tensors: &source.tensors,
            stored,
            card: &card,
            provenance: &provenance,
        };
        let fill = |fresh: &Path| {
            contents.write_into(fresh)?;
            verify_written(fresh, &source.tensors)
        };
        place(&self.out, existing(self.force), &fill).map_err(|e| Failure::Run(e.into()))?;
        let mut notes = source.notes.clone();
        notes.extend(carried_notes(&source, target.is_some()));
        finish(&self.source, &self.out, &source, stored, notes, target.as_deref()).map_err(Failure::Run)
    }

    /// Where the folder comes from, with all that the source says of itself.
    fn provenance(&self, path: &Path, source: &Source, own: Option<&Value>, card: &ModelCard) -> Result<Value> {
        let target = match &self.target {
            None => Value::Null,
            Some(folder) => json!({"path": on_record(folder), "hash": target_hash(folder)?}),
        };
        Ok(json!({
            "tool": "dflash-export",
            "version": env!("CARGO_PKG_VERSION"),
            "card": card,
            "target": target,
            "source": {
                "path": on_record(path),
                "format": source.format.name(),
                "hash": target_hash(path)?,
                "notes": source.notes,
                "provenance": own,
            },
        }))
    }
}

impl Speculators {
    /// Puts folders of this machine in the place of those on the hub.
    ///
    /// # Errors
    /// When the hub does not have one.
    pub fn fetch(&mut self) -> Result<()> {
        settle("SOURCE", &mut self.source, false)?;
        settle("--target", &mut self.target, false)
    }

    /// Whether JSON is asked for.
    pub fn json(&self) -> bool {
        self.json
    }

    /// Converts, reads back, compares.
    ///
    /// # Errors
    /// When the source is not a whole drafter for this target, the format cannot say it, the destination is taken, or
    /// writing fails.
    pub fn run(&self) -> Result<Conversion, Failure> {
        check_out(&self.out, self.force).map_err(Failure::Input)?;
        let target = load_on_cpu(&self.target).map_err(Failure::Input)?;
        let path = drafter_in(&self.source).map_err(Failure::Input)?;
        let source = read_source(&path, Some(target.info())).map_err(Failure::Input)?;
        let verifier = self.verifier().map_err(Failure::Input)?;
        let fits = source.config.check_target(target.info());
        fits.and_then(|()| source.check_carried(target.head()))
            .map_err(|error| Failure::Input(error.into()))?;
        let stored = self.dtype.dtype();
        // what the format cannot say is the input's fault
        speculators::config_json(&source.config, &verifier, stored).map_err(|e| Failure::Input(e.into()))?;
        let carried = self.carry_matrices.then(|| target.head());
        speculators::write(&self.out, &source, &verifier, carried, stored, existing(self.force))
            .map_err(|e| Failure::Run(e.into()))?;
        let mut notes = source.notes.clone();
        let plain = DrafterConfig {
            output_multiplier: 1.0,
            input_embedding_scale: 1.0,
            final_logit_softcapping: None,
            ..source.config.clone()
        };
        if source.config != plain {
            notes.push(
                "output_multiplier, input_embedding_scale, final_logit_softcapping: written, but speculators 0.9.0 does \
                 not read them"
                    .to_owned(),
            );
        }
        if let Some(window) = source.config.layers.iter().filter_map(|rule| rule.window).min() {
            notes.push(format!(
                "sliding_window {window}: the same number, by another rule where the context is longer: training in \
                 speculators 0.9.0 shows every slot the {window} rows before the anchor, served it is |q - k| < {window}"
            ));
        }
        finish(&self.source, &self.out, &source, stored, notes, Some(target.as_ref())).map_err(Failure::Run)
    }

    fn verifier(&self) -> Result<speculators::Verifier> {
        let config = formats::config_value(&self.target)?;
        let architectures = config["architectures"].as_array().into_iter().flatten();
        let name = match &self.verifier {
            Some(name) => name.clone(),
            None => base_model(&std::fs::canonicalize(&self.target)?).0,
        };
        Ok(speculators::Verifier {
            name,
            architectures: architectures.filter_map(Value::as_str).map(str::to_owned).collect(),
        })
    }
}

impl CardOptions {
    /// The source's card with what the options say instead.
    fn card(&self, own: Option<&Value>, out: &Path, target: Option<&Path>) -> ModelCard {
        let own = own.and_then(|value| serde_json::from_value(value["card"].clone()).ok());
        let mut card: ModelCard = own.unwrap_or_else(|| {
            let name = out.file_name().unwrap_or_default().to_string_lossy();
            let (base, revision) = target.map_or_else(|| ("not stated".to_owned(), None), base_model);
            ModelCard {
                base_revision: revision,
                ..ModelCard::named(name, base)
            }
        });
        if let Some(reference) = target.and_then(cached)
            && !is_repository(&card.base_model)
        {
            // a run's card knows the target by its path; now it is known by its repository
            (card.base_model, card.base_revision) = (reference.repository, reference.revision);
        }
        if let Some(name) = &self.name {
            card.name.clone_from(name);
        }
        if let Some(base) = &self.base_model {
            card.base_model.clone_from(base);
        }
        if self.base_revision.is_some() {
            card.base_revision.clone_from(&self.base_revision);
        }
        if let Some(relation) = self.base_model_relation {
            card.base_model_relation = Some(relation.name().to_owned());
        }
        if self.license.is_some() {
            card.license.clone_from(&self.license);
        }
        card
    }
}

/// Sizes of the target: of the one given, else of the one that the drafter names, where it is a folder here.
///
/// # Errors
/// When the named folder's configuration cannot be read.
pub fn target_info(path: &Path, target: Option<&dyn Target>) -> Result<Option<TargetInfo>> {
    if let Some(target) = target {
        return Ok(Some(target.info().clone()));
    }
    named_info(path)
}

fn read_source(path: &Path, info: Option<&TargetInfo>) -> Result<Source> {
    let sizes = info.map(|info| sizes_for(path, info));
    match formats::read(path, sizes.as_ref()) {
        Err(error) if info.is_none() && formats::detect(path).is_ok_and(|format| format != Format::Published) => {
            bail!("{error} (--target FOLDER)")
        }
        outcome => Ok(outcome?),
    }
}

fn load_on_cpu(folder: &Path) -> Result<Box<dyn Target>> {
    load_target(folder, "cpu", false)
}

/// `dflash_export.json` of the source, if it has a readable one.
fn own_provenance(path: &Path) -> Option<Value> {
    serde_json::from_slice(&std::fs::read(path.join(PROVENANCE)).ok()?).ok()
}

fn carried_notes(source: &Source, compared: bool) -> Vec<String> {
    let how = if compared {
        "left out, it is the target's"
    } else {
        "left out without comparing it with the target's, for want of --target"
    };
    source.carried.keys().map(|name| format!("{name}: {how}")).collect()
}

/// Refuses a destination before the work.
fn check_out(out: &Path, force: bool) -> Result<()> {
    local("--out", out)?;
    check_destination(out, existing(force)).with_context(|| format!("--out {}", out.display()))?;
    Ok(())
}

fn existing(force: bool) -> Existing {
    if force {
        Existing::ReplaceDrafter
    } else {
        Existing::Refuse
    }
}

/// Reads `out` back and holds it against `source`.
fn finish(
    from: &Path,
    out: &Path,
    source: &Source,
    stored: DType,
    notes: Vec<String>,
    target: Option<&dyn Target>,
) -> Result<Conversion> {
    let written = formats::read(out, target.map(Target::info)).context("reading back what was written")?;
    let mut failures = Vec::new();
    if written.config != source.config {
        failures.push("the configuration that was written does not read back as the source's".to_owned());
    }
    // stored as they were, or wider: nothing is rounded
    let exact = source
        .tensors
        .values()
        .all(|tensor| tensor.dtype() == stored || stored == DType::F32);
    let compared = target
        .map(|target| compare(source, &written, exact, target))
        .transpose()?;
    failures.extend(compared.iter().flat_map(Compared::failures));
    Ok(Conversion {
        source: from.display().to_string(),
        format: source.format.name(),
        out: out.display().to_string(),
        dtype: stored.as_str().to_uppercase(),
        notes,
        rounded: !exact,
        compared,
        failures,
    })
}
