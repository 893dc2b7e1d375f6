//! What CSV and page hold for every report: they can be parsed, nothing in them is obeyed, nothing is cut in silence.

use proptest::prelude::*;
use roxmltree::{Document, ParsingOptions};

use super::{COLUMNS, ContextBin, Group, Piece, PieceSource, Report, TextDetail, WidthCost, csv, html};
use crate::evaluate::{Options, evaluate};
use crate::scripted::{Script, Scripted};
use crate::scripted_target::ScriptedTarget;

/// What a model or a file name may try.
const HOSTILE: &str =
    "</style></title><script>alert(1)</script>\0\u{1b}[2J\r\n\t\"'&amp; <!-- ]]> \u{202e}\u{feff}\u{ffff}é🦀";

/// A measured report of blocks of `slots`.
fn measured(slots: usize, prompts: usize) -> Report {
    let target = ScriptedTarget::new(1, 23, 4096).unwrap();
    let drafter = Scripted::new(Script::Random { seed: 1 }, Vec::new(), slots, &[1], 23).unwrap();
    let prompts: Vec<Vec<u32>> = (0..prompts as u32).map(|first| vec![first]).collect();
    let options = Options::new(40, vec![u32::MAX]);
    evaluate(&target, &drafter, &prompts, &options, &mut |_| Ok(())).unwrap()
}

/// A report with something in every part of it, `texts` prompts long, every string `word`.
fn full(slots: usize, texts: usize, word: &str) -> Report {
    let mut report = measured(slots, 3);
    let model = report.per_prompt[0].clone();
    report.per_prompt = (0..texts)
        .map(|prompt| {
            let mut result = model.clone();
            (result.prompt, result.turn) = (prompt, prompt % 2);
            result.id = format!("{word}:{prompt}");
            (result.domain, result.thinking) = (Some(word.into()), Some("on".into()));
            result
        })
        .collect();
    report.prompts = texts;
    report.groups = (0..texts)
        .map(|i| Group {
            name: format!("domain {word} {i}"),
            prompts: 1,
            rounds: 0,
            acceptance_length: None,
            acceptance_length_ci95: Some([f64::NAN, 2.]),
            acceptance_length_macro: Some(f64::NAN),
            speedup: Some(f64::INFINITY),
        })
        .collect();
    report.by_context = [0, 64, 1024]
        .map(|from| ContextBin {
            from,
            to: from + 64,
            rounds: 20 + from as u64,
            accepted: 50,
        })
        .into();
    report.costs = (0..slots)
        .map(|width| WidthCost {
            width,
            context: 22,
            draft: 0.001 * width as f64,
            verify: 0.002,
            verify_median: Some(0.0021),
            commit: 0.0001,
        })
        .collect();
    report.setting.width_policy = "auto".into();
    report.warnings = vec![word.into(); 30];
    report.worst = (0..7)
        .map(|result| TextDetail {
            result,
            prompt_tail: word.repeat(20),
            pieces: (0..2000)
                .map(|i| Piece {
                    text: if i % 5 == 0 { String::new() } else { word.into() },
                    source: [
                        PieceSource::Prefill,
                        PieceSource::Accepted,
                        PieceSource::Corrected,
                        PieceSource::Bonus,
                    ][i % 4],
                })
                .collect(),
        })
        .collect();
    for text in [
        &mut report.mode,
        &mut report.setting.target,
        &mut report.setting.drafter,
        &mut report.setting.device,
        &mut report.setting.dtype,
        &mut report.setting.prompt_tail,
        &mut report.setting.prompts_file,
        &mut report.setting.version,
    ] {
        *text = word.into();
    }
    report.setting.prompt_set = serde_json::json!({ word: [word, 1, null] });
    report.definitions.insert(word.into(), word.into());
    report
}

/// Parses the page and checks what every page must hold; gives its visible words.
fn checked(page: &str) -> String {
    let options = ParsingOptions {
        allow_dtd: true,
        ..ParsingOptions::default()
    };
    let document = Document::parse_with_options(page, options).unwrap_or_else(|error| panic!("{error}"));
    for node in document.descendants().filter(roxmltree::Node::is_element) {
        assert_ne!(node.tag_name().name(), "script");
        assert!(!node.attributes().any(|attribute| attribute.name().starts_with("on")));
        if node.tag_name().name() == "svg" {
            let first: Vec<_> = node.children().filter(roxmltree::Node::is_element).take(2).collect();
            assert_eq!(node.attribute("role"), Some("img"));
            assert_eq!(
                (first[0].tag_name().name(), first[1].tag_name().name()),
                ("title", "desc")
            );
        }
        for place in ["x", "y", "width", "height", "cx", "cy", "r"] {
            if let Some(value) = node.attribute(place) {
                assert!(
                    value.parse::<f64>().is_ok_and(|value| value.is_finite() && value >= 0.),
                    "{place}={value}"
                );
            }
        }
    }
    let mut ids: Vec<&str> = document.descendants().filter_map(|node| node.attribute("id")).collect();
    let count = ids.len();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), count, "an id stands twice");
    let local = page.replace("http://www.w3.org/2000/svg", "");
    for word in ["NaN", "inf", "http://", "https://", "url(", "@import"] {
        let outside_words = local.replace("information", "");
        assert!(!outside_words.contains(word), "{word}");
    }
    let words = |node: roxmltree::Node<'_, '_>| node.text().filter(|_| node.is_text()).map(str::to_owned);
    document.descendants().filter_map(words).collect::<Vec<_>>().join(" ")
}

#[test]
fn the_page_shows_what_the_report_holds() {
    let mut report = measured(8, 3);
    report.acceptance_length = Some(2.345_6);
    let words = checked(&html(&report));
    for word in [
        "2.35",
        "3 of 3",
        "Acceptance by position",
        "target_hash",
        "sampling.top_p",
        "repetition_penalty",
    ] {
        assert!(words.contains(word), "{word}");
    }
    report.identical = Some(false);
    report.differing = vec![(1, 7)];
    let words = checked(&html(&report));
    assert!(words.contains("2 of 3") && words.contains("text 1 at token 7"));
}

#[test]
fn every_field_of_the_setting_is_on_the_page() {
    let report = measured(4, 1);
    let words = checked(&html(&report));
    let fields = serde_json::to_value(&report.setting).unwrap();
    for name in fields.as_object().unwrap().keys().filter(|name| *name != "sampling") {
        assert!(words.contains(name.as_str()), "{name}");
    }
}

#[test]
fn hostile_text_is_shown_and_not_obeyed() {
    let page = html(&full(8, 3, HOSTILE));
    let words = checked(&page);
    assert!(words.contains("</style></title><script>alert(1)"));
    assert!(words.contains("[U+202E]") && words.contains('␛') && !page.contains('\u{202e}'));
    assert_eq!(
        page.matches("</style>").count(),
        1,
        "a style sheet that model text could end"
    );
}

#[test]
fn a_page_stays_small_and_says_what_it_leaves_out() {
    let report = full(64, 2000, HOSTILE);
    let page = html(&report);
    assert!(page.len() < 300_000, "{} bytes", page.len());
    let words = checked(&page);
    for notice in [
        "First 50 of 2,000 prompts",
        "First 80 of 2,000 groups",
        "First 400 of 2,000 tokens",
        "First 5 of 7 texts",
        "First 20 of 30 warnings",
    ] {
        assert!(words.contains(notice), "{notice}");
    }
    let plain = html(&full(64, 2000, "word")).len();
    assert!(plain < 200_000, "{plain} bytes");
}

#[test]
fn reports_without_rounds_numbers_or_prompts_have_a_page_too() {
    let mut report = measured(64, 1);
    checked(&html(&report));
    report.acceptance_length_ci95 = None;
    report.rounds = 0;
    report.histogram.clear();
    report.accept_at_pos = vec![None; 63];
    report.accept_cond = vec![Some(f64::NAN); 63];
    report.acceptance_length = Some(f64::NAN);
    report.spec_seconds = super::Seconds::default();
    report.plain_tokens_per_s = Some(f64::INFINITY);
    report.speedup = None;
    report.by_context.clear();
    let words = checked(&html(&report));
    assert!(words.contains("too few prompts") && !words.contains("Acceptance by position"));
    report.per_prompt.clear();
    report.definitions.clear();
    report.prompts = 0;
    checked(&html(&report));
    assert_eq!(csv(&report), format!("{}\n", COLUMNS.join(",")));
}

#[test]
fn a_projection_is_tokens_by_cost() {
    let mut report = full(4, 1, "word");
    report.accept_at_pos = vec![Some(0.8), Some(0.4), Some(0.2)];
    let projected = report.projected_speedups();
    let expected = 2.2 / 0.0041 * 0.0021;
    assert_eq!(projected.len(), 4);
    assert!((projected[2].1.unwrap() - expected).abs() < 1e-12, "{projected:?}");
    assert_eq!(projected[0].1, Some(1.));
    report.accept_at_pos.pop();
    assert_eq!(report.projected_speedups()[3].1, None, "a width that was never drafted");
    report.costs.remove(0);
    assert!(report.projected_speedups().is_empty());
}

#[test]
fn a_row_of_csv_agrees_with_the_report() {
    let mut report = measured(8, 3);
    report.per_prompt[1].acceptance_length = None;
    report.per_prompt[2].identical = false;
    let text = csv(&report);
    let mut reader = ::csv::Reader::from_reader(text.as_bytes());
    assert_eq!(reader.headers().unwrap(), COLUMNS.as_slice());
    let rows: Vec<_> = reader.records().map(Result::unwrap).collect();
    let at = |row: usize, name: &str| rows[row][COLUMNS.iter().position(|column| *column == name).unwrap()].to_owned();
    let sum = |name: &str| (0..3).map(|row| at(row, name).parse::<u64>().unwrap()).sum::<u64>();
    assert_eq!(
        (sum("rounds"), sum("drafted"), sum("accepted")),
        (report.rounds, report.drafted, report.accepted)
    );
    assert_eq!(sum("truncated_rounds"), report.truncated_rounds);
    let length =
        |row: usize| 1. + at(row, "accepted").parse::<f64>().unwrap() / at(row, "rounds").parse::<f64>().unwrap();
    assert!((at(0, "acceptance_length").parse::<f64>().unwrap() - length(0)).abs() < 1e-12);
    assert_eq!(
        (at(1, "acceptance_length"), at(2, "plain_tokens_per_s")),
        (String::new(), String::new())
    );
}

proptest! {
    #[test]
    fn any_text_comes_back_from_csv_and_fits_a_page(id in any::<String>(), domain in any::<String>()) {
        let mut report = measured(3, 1);
        report.per_prompt[0].id.clone_from(&id);
        report.per_prompt[0].domain = Some(domain.clone());
        let text = csv(&report);
        let row = ::csv::Reader::from_reader(text.as_bytes()).records().next().unwrap().unwrap();
        prop_assert_eq!((&row[1], &row[2]), (id.as_str(), domain.as_str()));
        report.worst = vec![TextDetail {
            result: 0,
            prompt_tail: id.clone(),
            pieces: vec![Piece { text: domain, source: PieceSource::Bonus }],
        }];
        report.setting.drafter = id;
        let options = ParsingOptions { allow_dtd: true, ..ParsingOptions::default() };
        prop_assert!(Document::parse_with_options(&html(&report), options).is_ok());
    }

    #[test]
    fn any_counts_have_a_page(
        histogram in prop::collection::vec(any::<u64>(), 0..80),
        shares in prop::collection::vec(prop::option::of(any::<f64>()), 0..80),
        bins in prop::collection::vec((0..1usize << 40, any::<u64>(), any::<u64>()), 0..5),
        costs in prop::collection::vec((0..100usize, any::<f64>()), 0..20),
    ) {
        let mut report = measured(3, 1);
        report.histogram = histogram;
        report.accept_at_pos.clone_from(&shares);
        report.accept_cond = shares;
        report.by_context = bins.into_iter().map(|(from, rounds, accepted)| ContextBin { from, to: from, rounds, accepted }).collect();
        report.costs = costs.into_iter().map(|(width, verify)| WidthCost { width, context: 0, draft: 0., verify, verify_median: None, commit: 0. }).collect();
        checked(&html(&report));
    }
}
