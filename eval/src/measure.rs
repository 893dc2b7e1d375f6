//! Sums over texts while an evaluation runs, and the report made of them; nothing is divided before the end.

use std::collections::BTreeMap;

use anyhow::Result;

use crate::acceptance::{Counts, Tally, macro_acceptance_length, pooled};
use crate::bootstrap::bootstrap_interval;
use crate::evaluate::{Block, Options, first_difference};
use crate::prompts::{About, Prompts, attribute};
use crate::repetition::{is_degenerate, repetition};
use crate::report::{ContextBin, Group, PromptResult, Report, Seconds, TextDetail, WidthCost, WidthUse, definitions};
use crate::speculate::{Generation, Round};
use crate::warnings::warnings;

/// Texts that a report shows token by token.
const WORST: usize = 5;
/// Fewest rounds of a text that may count as one of the worst: shorter ones are all chance.
const WORST_ROUNDS: u64 = 4;
/// Characters of their prompts that are shown.
const TAIL: usize = 300;
/// Most bins of context length.
const BINS: usize = 12;

/// One prompt decoded both ways.
pub(crate) struct Measured<'m> {
    /// Index of its conversation.
    pub(crate) prompt: usize,
    /// What is known of it.
    pub(crate) about: &'m About,
    /// Turn of the conversation, 0-based.
    pub(crate) turn: usize,
    /// Tokens of the prompt.
    pub(crate) prompt_tokens: usize,
    /// The target alone.
    pub(crate) plain: &'m Generation,
    /// With the drafter.
    pub(crate) speculative: &'m Generation,
}

/// Sums over texts.
pub(crate) struct Sum {
    include_truncated: bool,
    tally: Tally,
    /// Counted rounds of every conversation: turns of one are not independent.
    texts: Vec<Counts>,
    plain: Seconds,
    spec: Seconds,
    plain_tokens: usize,
    spec_tokens: usize,
    differing: Vec<(usize, usize)>,
    degenerate: usize,
    widths: BTreeMap<usize, WidthUse>,
    rounds: Vec<Round>,
    per_prompt: Vec<PromptResult>,
}

impl Sum {
    /// Nothing yet; blocks draft at most `width` tokens.
    pub(crate) fn new(width: usize, include_truncated: bool) -> Self {
        Self {
            include_truncated,
            tally: Tally::new(width),
            texts: Vec::new(),
            plain: Seconds::default(),
            spec: Seconds::default(),
            plain_tokens: 0,
            spec_tokens: 0,
            differing: Vec::new(),
            degenerate: 0,
            widths: BTreeMap::new(),
            rounds: Vec::new(),
            per_prompt: Vec::new(),
        }
    }

    /// Texts so far.
    pub(crate) fn results(&self) -> usize {
        self.per_prompt.len()
    }

    /// Acceptance length so far.
    pub(crate) fn acceptance_length(&self) -> Option<f64> {
        self.tally.counted(self.include_truncated).acceptance_length()
    }

    /// Adds one prompt.
    pub(crate) fn add(&mut self, measured: &Measured<'_>) {
        let (reference, text) = (measured.plain, measured.speculative);
        let tally = Tally::of_text(&text.rounds, self.tally.full.histogram.len() - 1);
        let counts = tally.counted(self.include_truncated);
        self.tally.merge(&tally);
        self.plain.add(&reference.time);
        self.spec.add(&text.time);
        self.plain_tokens += reference.tokens.len();
        self.spec_tokens += text.tokens.len();
        for round in &text.rounds {
            let used = self.widths.entry(round.drafted).or_insert(WidthUse {
                width: round.drafted,
                rounds: 0,
                accepted: 0,
            });
            used.rounds += 1;
            used.accepted += round.accepted as u64;
        }
        let counted = |round: &&Round| self.include_truncated || !round.truncated;
        self.rounds.extend(text.rounds.iter().filter(counted));
        let difference = first_difference(&reference.tokens, &text.tokens);
        self.differing
            .extend(difference.map(|position| (self.per_prompt.len(), position)));
        let (longest_run, distinct_ratio) = repetition(&text.tokens);
        self.degenerate += usize::from(is_degenerate(text.tokens.len(), longest_run, distinct_ratio));
        self.per_prompt.push(PromptResult {
            prompt: measured.prompt,
            id: measured.about.id.clone(),
            domain: measured.about.domain.clone(),
            thinking: measured.about.thinking.map(|on| if on { "on" } else { "off" }.into()),
            turn: measured.turn,
            prompt_tokens: measured.prompt_tokens,
            new_tokens: text.tokens.len(),
            finish: text.finish,
            acceptance_length: counts.acceptance_length(),
            accepted: text.rounds.iter().map(|round| round.accepted).collect(),
            drafted: text.rounds.iter().map(|round| round.drafted).collect(),
            truncated: (0..text.rounds.len()).filter(|&i| text.rounds[i].truncated).collect(),
            spec_seconds: text.time.decode.as_secs_f64(),
            plain_seconds: reference.time.decode.as_secs_f64(),
            identical: difference.is_none(),
            tokens: text.tokens.clone(),
            longest_run,
            distinct_ratio,
        });
        match self.texts.get_mut(measured.prompt) {
            Some(conversation) => conversation.merge(&counts),
            None => self.texts.push(counts),
        }
    }

    /// The report.
    ///
    /// # Errors
    /// When the tokenizer cannot decode a text.
    pub(crate) fn report(self, options: &Options, prompts: &dyn Prompts, costs: Vec<WidthCost>) -> Result<Report> {
        let counts = self.tally.counted(options.include_truncated);
        let texts = self.per_prompt.len();
        let plain_rate = rate(self.plain_tokens - texts, self.plain.decode);
        let spec_rate = rate(self.spec_tokens - texts, self.spec.decode);
        let plain_rate_whole = rate(self.plain_tokens, self.plain.decode + self.plain.prefill);
        let spec_rate_whole = rate(self.spec_tokens, self.spec.decode + self.spec.prefill);
        let groups = groups(&self.per_prompt, options);
        let worst = worst(&self.per_prompt, prompts)?;
        let mut report = Report {
            kind: "acceptance".into(),
            mode: "generation".into(),
            acceptance_length: counts.acceptance_length(),
            acceptance_length_macro: macro_acceptance_length(&self.texts),
            acceptance_length_ci95: bootstrap_interval(&self.texts, options.seed),
            mean_accepted_drafts: counts.mean_accepted_drafts(),
            draft_acceptance_rate: counts.draft_acceptance_rate(),
            rounds: counts.rounds,
            drafted: counts.drafted,
            accepted: counts.accepted,
            accept_at_pos: counts.accept_at_pos(),
            accept_cond: counts.accept_cond(),
            histogram: counts.histogram,
            include_truncated: options.include_truncated,
            truncated_rounds: self.tally.truncated.rounds,
            tokens_per_verify_e2e: self.tally.tokens_per_verify_e2e(),
            truncated: self.tally.truncated,
            plain_tokens_per_s: plain_rate,
            spec_tokens_per_s: spec_rate,
            speedup: quotient(spec_rate, plain_rate),
            speedup_with_prefill: quotient(spec_rate_whole, plain_rate_whole),
            spec_seconds: self.spec,
            plain_seconds: self.plain,
            identical: options.sampling.is_greedy().then_some(self.differing.is_empty()),
            differing: if options.sampling.is_greedy() {
                self.differing
            } else {
                Vec::new()
            },
            prompts: texts,
            degenerate_prompts: self.degenerate,
            groups,
            by_context: by_context(&self.rounds),
            costs,
            widths: self.widths.into_values().collect(),
            worst,
            warnings: Vec::new(),
            seed: options.seed,
            setting: options.setting.clone(),
            definitions: definitions(),
            per_prompt: self.per_prompt,
        };
        report.setting.sampling = options.sampling;
        report.setting.exact_verify = options.exact_verify;
        report.setting.width_policy = if options.block == Block::Auto { "auto" } else { "fixed" }.into();
        report.warnings = warnings(&report);
        Ok(report)
    }
}

/// Counted rounds of one result.
pub(crate) fn counts_of(result: &PromptResult, include_truncated: bool) -> Counts {
    let mut counts = Counts::default();
    for (round, (&accepted, &drafted)) in result.accepted.iter().zip(&result.drafted).enumerate() {
        if include_truncated || !result.truncated.contains(&round) {
            counts.add(drafted, accepted);
        }
    }
    counts
}

/// Acceptance by domain and by thinking mode, wherever there is more than one.
fn groups(results: &[PromptResult], options: &Options) -> Vec<Group> {
    let domain = |result: &PromptResult| result.domain.as_ref().map(|name| format!("domain {name}"));
    let thinking = |result: &PromptResult| result.thinking.as_ref().map(|mode| format!("thinking {mode}"));
    let split = |name: &dyn Fn(&PromptResult) -> Option<String>| {
        let mut named: BTreeMap<String, Vec<&PromptResult>> = BTreeMap::new();
        for result in results {
            if let Some(name) = name(result) {
                named.entry(name).or_default().push(result);
            }
        }
        let several = named.len() > 1;
        named
            .into_iter()
            .filter(move |_| several)
            .map(|(name, members)| group(name, &members, options))
            .collect::<Vec<_>>()
    };
    [split(&domain), split(&thinking)].concat()
}

fn group(name: String, members: &[&PromptResult], options: &Options) -> Group {
    let mut texts: BTreeMap<usize, Counts> = BTreeMap::new();
    for result in members {
        texts
            .entry(result.prompt)
            .or_default()
            .merge(&counts_of(result, options.include_truncated));
    }
    let texts: Vec<Counts> = texts.into_values().collect();
    let whole = pooled(&texts);
    let tokens: usize = members.iter().map(|result| result.new_tokens - 1).sum();
    let seconds = |part: &dyn Fn(&PromptResult) -> f64| members.iter().map(|result| part(result)).sum::<f64>();
    // both texts are equally long when they are identical; when sampled, the ratio is of rates all the same
    let plain = rate(tokens, seconds(&|result| result.plain_seconds));
    let spec = rate(tokens, seconds(&|result| result.spec_seconds));
    let comparable = members.iter().all(|result| result.identical);
    Group {
        name,
        prompts: texts.len(),
        rounds: whole.rounds,
        acceptance_length: whole.acceptance_length(),
        acceptance_length_ci95: bootstrap_interval(&texts, options.seed),
        acceptance_length_macro: macro_acceptance_length(&texts),
        speedup: quotient(spec, plain).filter(|_| comparable),
    }
}

/// Rounds by the position of their anchor, in at most [`BINS`] equal bins of a power of two.
fn by_context(rounds: &[Round]) -> Vec<ContextBin> {
    let Some(furthest) = rounds.iter().map(|round| round.anchor).max() else {
        return Vec::new();
    };
    let size = (furthest / BINS + 1).next_power_of_two().max(16);
    let mut bins: BTreeMap<usize, ContextBin> = BTreeMap::new();
    for round in rounds {
        let from = round.anchor / size * size;
        let bin = bins.entry(from).or_insert(ContextBin {
            from,
            to: from + size,
            rounds: 0,
            accepted: 0,
        });
        bin.rounds += 1;
        bin.accepted += round.accepted as u64;
    }
    bins.into_values().collect()
}

fn worst(results: &[PromptResult], prompts: &dyn Prompts) -> Result<Vec<TextDetail>> {
    let enough = |result: &PromptResult| (result.accepted.len() - result.truncated.len()) as u64 >= WORST_ROUNDS;
    let mut order: Vec<usize> = (0..results.len()).filter(|&i| enough(&results[i])).collect();
    let length = |i: usize| results[i].acceptance_length.unwrap_or(f64::INFINITY);
    order.sort_by(|&a, &b| length(a).total_cmp(&length(b)));
    let mut details = Vec::new();
    for &index in order.iter().take(WORST) {
        let result = &results[index];
        let Some(texts) = prompts.pieces(&result.tokens) else {
            return Ok(Vec::new());
        };
        let prompt_tail = match (result.turn, prompts.turn(result.prompt, &[])?) {
            (0, Some(tokens)) => prompts.pieces(&tokens).unwrap_or_default().concat(),
            _ => String::new(),
        };
        let skip = prompt_tail.chars().count().saturating_sub(TAIL);
        details.push(TextDetail {
            result: index,
            prompt_tail: prompt_tail.chars().skip(skip).collect(),
            pieces: attribute(texts, &result.accepted, &result.drafted),
        });
    }
    Ok(details)
}

fn rate(tokens: usize, seconds: f64) -> Option<f64> {
    (tokens > 0 && seconds > 0.).then(|| tokens as f64 / seconds)
}

fn quotient(part: Option<f64>, whole: Option<f64>) -> Option<f64> {
    Some(part? / whole?)
}
