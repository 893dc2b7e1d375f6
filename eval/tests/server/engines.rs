//! Each engine's counts against numbers worked out by hand.

use std::fmt::Write;

use dflash_eval::server::{Engine, table};

use super::*;

fn all(value: f64) -> Vec<Option<f64>> {
    vec![Some(value); K as usize]
}

fn assert_worked_example(report: &ServerReport) {
    let ours = &report.ours;
    assert_eq!(ours.acceptance_length, Some(4.5));
    assert_eq!(ours.draft_acceptance_rate, Some(0.5));
    assert_eq!(ours.accept_at_pos, all(0.5));
    let mut conditional = all(1.);
    conditional[0] = Some(0.5);
    assert_eq!(ours.accept_cond, conditional);
    assert_eq!(ours.histogram, [3, 0, 0, 0, 0, 0, 0, 3]);
    assert_eq!(
        (ours.rounds, ours.drafted, ours.accepted),
        (Some(6), Some(42), Some(21))
    );
    assert_eq!(ours.tokens_per_verify_e2e, Some(27. / 6.));
    assert_eq!(report.completion_tokens, 29);
    assert!(ours.exact);
}

fn assert_fits(report: &ServerReport) {
    for row in table(report).lines() {
        assert!(row.chars().count() <= 80, "{row}");
    }
}

#[test]
fn vllm_counters_of_two_engines_are_summed_above_their_baseline() {
    let stub = vllm(Counted::both, vllm_metrics);
    let report = report(&stub);
    assert_worked_example(&report);
    assert_fits(&report);
    assert_eq!(report.engine, Engine::Vllm);
    assert_eq!(report.version.as_deref(), Some("0.11.0"));
    assert_eq!(
        (report.model.as_str(), report.url.as_str()),
        ("stub-model", stub.url.as_str())
    );
    assert_eq!(report.theirs.acceptance_length, Some(4.5));
    assert!(report.warnings.is_empty(), "{:?}", report.warnings);
    let ids: Vec<_> = report.per_prompt.iter().map(|prompt| &prompt.id).collect();
    assert!(
        ids[0].ends_with("prompts.jsonl:1") && ids[1].ends_with("prompts.jsonl:3"),
        "{ids:?}"
    );
    // the report survives its own JSON
    let text = serde_json::to_string(&report).unwrap();
    assert_eq!(serde_json::from_str::<ServerReport>(&text).unwrap(), report);
}

#[test]
fn vllm_names_without_total_count_the_same() {
    let stub = vllm(Counted::both, |counted| vllm_metrics(counted).replace("_total{", "{"));
    assert_worked_example(&report(&stub));
}

#[test]
fn positions_that_do_not_add_up_are_left_out_with_a_warning() {
    let stub = vllm(Counted::both, |counted| {
        let keep = |line: &&str| !line.contains("position=\"3\"");
        let metrics = vllm_metrics(counted);
        metrics.lines().filter(keep).collect::<Vec<_>>().join("\n")
    });
    let report = report(&stub);
    assert_eq!(report.ours.acceptance_length, Some(4.5));
    assert!(report.ours.histogram.is_empty() && report.ours.accept_at_pos.is_empty());
    assert!(report.warnings[0].contains("by position"), "{:?}", report.warnings);
}

#[test]
fn tokens_for_somebody_else_are_noticed() {
    let stub = vllm(
        |counted, call| {
            counted.text(&[3]);
            counted.both(call)
        },
        vllm_metrics,
    );
    let report = report(&stub);
    assert!(report.warnings[0].contains("39 tokens") && report.warnings[0].contains("29 of them"));
}

/// An SGLang whose answers have `tokens` tokens and this meta_info.
fn sglang(tokens: u64, meta: Value, info: Value) -> Stub {
    Stub::new(move |call| match call.path.as_str() {
        "/server_info" => answer(200, info.to_string()),
        "/v1/models" => models(),
        "/v1/chat/completions" => {
            let mut body = chat(tokens);
            if call.body["return_meta_info"] == true {
                body["choices"][0]["meta_info"] = meta.clone();
            }
            answer(200, body)
        }
        _ => answer(404, "Not Found"),
    })
}

fn info() -> Value {
    json!({"version": "0.5.15", "speculative_algorithm": "DFLASH", "internal_states": [{"avg_spec_accept_length": 2.5}]})
}

#[test]
fn sglangs_length_is_ours_plus_the_prefill_token_minus_what_was_cut() {
    for (tokens, cut) in [(13, 0.), (11, 2. / 3.)] {
        for (histogram, accepted, drafted) in [
            (
                "spec_correct_drafts_histogram",
                "spec_num_correct_drafts",
                "spec_num_proposed_drafts",
            ),
            ("spec_accept_histogram", "spec_accept_token_num", "spec_draft_token_num"),
        ] {
            let meta = json!({
                "spec_verify_ct": 3, "spec_accept_length": tokens as f64 / 3., histogram: [0, 0, 0, 3, 0, 0, 0, 0],
                accepted: 9, drafted: 21
            });
            let report = report(&sglang(tokens, meta, info()));
            let (ours, theirs) = (&report.ours, &report.theirs);
            assert_eq!(ours.acceptance_length, Some(4.));
            assert_eq!(ours.draft_acceptance_rate, Some(9. / 21.));
            assert_eq!(theirs.acceptance_length, Some(tokens as f64 / 3.));
            assert_eq!(theirs.since_start, Some(2.5));
            let sum = 4. + theirs.prefill_share.unwrap() - theirs.cut_share.unwrap();
            assert!((sum - theirs.pooled.unwrap()).abs() < 1e-12);
            assert!((theirs.cut_share.unwrap() - cut).abs() < 1e-12);
            assert_eq!(ours.tokens_per_verify_e2e, Some((tokens - 1) as f64 / 3.));
            assert_eq!(report.per_prompt[1].rounds, Some(3));
            assert!(ours.exact && report.warnings.is_empty(), "{:?}", report.warnings);
            assert_fits(&report);
        }
    }
}

#[test]
fn sglang_without_a_histogram_says_what_it_cannot_know() {
    let counted = report(&sglang(
        13,
        json!({"spec_verify_ct": 3, "spec_num_correct_drafts": 9}),
        info(),
    ));
    assert_eq!((counted.ours.acceptance_length, counted.ours.exact), (Some(4.), true));
    assert_eq!(counted.ours.draft_acceptance_rate, None, "drafted tokens are unknown");
    let bare = report(&sglang(
        13,
        json!({"spec_verify_ct": 3, "spec_accept_length": 13. / 3.}),
        info(),
    ));
    assert_eq!((bare.ours.acceptance_length, bare.ours.exact), (None, false));
    assert_eq!(bare.ours.tokens_per_verify_e2e, Some(4.));
    let silent = report(&sglang(13, json!({}), info()));
    assert_eq!(silent.ours.tokens_per_verify_e2e, None);
    assert_eq!(silent.theirs.since_start, Some(2.5));
    for report in [counted, bare, silent] {
        assert_fits(&report);
    }
}

#[test]
fn sglang_counts_that_contradict_each_other_are_an_error() {
    for meta in [
        json!({"spec_verify_ct": 3, "spec_accept_histogram": [0, 0, 0, 2]}),
        json!({"spec_verify_ct": 3, "spec_accept_histogram": [0, 0, 0, 3], "spec_num_correct_drafts": 6}),
        json!({"spec_verify_ct": 3, "spec_accept_histogram": [0, 0, 0, -3]}),
        json!({"spec_verify_ct": "NaN"}),
        json!({"spec_verify_ct": 0}),
    ] {
        let error = failed(measured(&sglang(13, meta.clone(), info()), |_| ()));
        assert!(
            error.contains("spec_") || error.contains("histogram"),
            "{meta}: {error}"
        );
    }
}

/// A llama.cpp with or without counters whose answers accept 9 of 21 drafts in three rounds.
fn llamacpp(metrics: bool, predicted: u64, drafted: u64, accepted: u64) -> Stub {
    let drafts = AtomicU64::new(0);
    Stub::new(move |call| match call.path.as_str() {
        "/props" => answer(200, json!({"build_info": "b10600-abc", "total_slots": 1})),
        "/metrics" if metrics => {
            let n = drafts.load(SeqCst);
            let mut text = format!(
                "llamacpp:spec_decode_num_draft_tokens_total {}\nllamacpp:spec_decode_num_accepted_tokens_total {}\n\
                 llamacpp:spec_decode_num_drafts_total {}\n",
                n * drafted,
                n * accepted,
                n * 3
            );
            // the series by position appear with the first draft
            for position in 0..if n > 0 { 3 } else { 0 } {
                writeln!(
                    text,
                    "llamacpp:spec_decode_num_accepted_tokens_per_pos_total{{position=\"{position}\"}} {}",
                    n * 3
                )
                .unwrap();
            }
            answer(200, text)
        }
        "/metrics" => answer(501, json!({"error": {"message": "start it with --metrics"}})),
        "/v1/models" => models(),
        "/v1/chat/completions" => {
            drafts.fetch_add(1, SeqCst);
            let mut body = chat(predicted);
            body["timings"] = json!({"prompt_n": 5, "predicted_n": predicted, "predicted_ms": 1.5});
            if drafted > 0 {
                body["timings"]["draft_n"] = drafted.into();
                body["timings"]["draft_n_accepted"] = accepted.into();
            }
            answer(200, body)
        }
        _ => answer(404, "{}"),
    })
}

#[test]
fn llamacpp_is_exact_by_its_counters_and_approximate_without() {
    let exact = report(&llamacpp(true, 13, 21, 9));
    assert_eq!((exact.ours.acceptance_length, exact.ours.exact), (Some(4.), true));
    assert_eq!(exact.ours.histogram, [0, 0, 0, 6]);
    assert!(exact.warnings.is_empty(), "{:?}", exact.warnings);
    let derived = report(&llamacpp(false, 13, 21, 9));
    assert_eq!((derived.ours.acceptance_length, derived.ours.exact), (Some(4.), false));
    assert_eq!(derived.theirs.draft_acceptance_rate, Some(9. / 21.));
    assert!(derived.warnings[0].contains("501") && table(&derived).contains("APPROXIMATE"));
    // two drafts accepted beyond the limit: the counters do not care, the derivation comes out too high
    assert_eq!(report(&llamacpp(true, 11, 21, 9)).ours.acceptance_length, Some(4.));
    assert_eq!(report(&llamacpp(false, 11, 21, 9)).ours.acceptance_length, Some(10.));
    for report in [exact, derived] {
        assert_fits(&report);
    }
}

#[test]
fn llamacpp_that_accepts_everything_or_nothing_is_not_believed() {
    let whole = report(&llamacpp(false, 25, 21, 21));
    assert!(
        whole.warnings.iter().any(|warning| warning.contains("hybrid")),
        "{:?}",
        whole.warnings
    );
    let error = failed(measured(&llamacpp(true, 13, 0, 0), |_| ()));
    assert!(error.contains("--spec-type"), "{error}");
}
