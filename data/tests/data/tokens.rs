//! Which tokens are supervised, and what is dropped and why. All with the demo target's own tokenizer.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use dflash_data::{
    Chat, ChatTemplate, Conversation, Dropped, Example, LengthPolicy, Message, PrepareConfig, Report, Turns, prepare,
    prompt_text, prompt_tokens, read_jsonl, stop_ids,
};
use proptest::prelude::*;
use serde_json::{Value, json};

fn demo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("demo")
}

/// The demo target's tokenizer with a template that rewrites history as Qwen3.5's does.
fn thinking_chat() -> Chat {
    let mut chat = Chat::load(&demo().join("target")).unwrap();
    chat.template = ChatTemplate::new(include_str!("../fixtures/thinking.jinja"), BTreeMap::new()).unwrap();
    chat
}

fn config() -> PrepareConfig {
    PrepareConfig {
        max_length: 4096,
        length_policy: LengthPolicy::Drop,
        turns: Turns::Every,
        thinking: None,
    }
}

fn row(value: Value) -> Conversation {
    Conversation::from_json(value).unwrap()
}

fn made(chat: &Chat, rows: &[Value], config: &PrepareConfig) -> (Vec<Example>, Report) {
    let rows: Vec<_> = rows
        .iter()
        .cloned()
        .enumerate()
        .map(|(i, value)| (i + 1, row(value)))
        .collect();
    prepare(chat, &rows, config).unwrap()
}

/// What the first dropped turn says. A second, good row keeps the list from being empty.
fn dropped(chat: &Chat, value: Value, config: &PrepareConfig) -> (Dropped, String) {
    let good = json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "some text"}]});
    let (_, report) = made(chat, &[value, good], config);
    let (reason, case) = report.dropped.first_key_value().unwrap();
    assert_eq!((report.dropped.len(), case.count, case.line), (1, 1, 1), "{report}");
    (*reason, case.sample.clone())
}

/// Text of the tokens that are supervised, or of those that are not.
fn part(chat: &Chat, example: &Example, supervised: bool) -> String {
    let chosen = example
        .tokens
        .iter()
        .zip(&example.loss_mask)
        .filter(|(_, on)| **on == supervised);
    chat.tokenizer
        .decode(&chosen.map(|(token, _)| *token).collect::<Vec<_>>(), false)
        .unwrap()
}

fn two_turns() -> Value {
    json!({"messages": [
        {"role": "user", "content": "first question"},
        {"role": "assistant", "content": "first answer", "reasoning_content": "first thought"},
        {"role": "user", "content": "second question"},
        {"role": "assistant", "content": "second answer", "reasoning_content": "second thought"}]})
}

#[test]
fn each_turn_is_learned_from_the_rendering_that_ends_with_it() {
    let chat = thinking_chat();
    let (examples, report) = made(&chat, &[two_turns()], &config());
    assert_eq!((report.rows, report.examples, examples.len()), (1, 2, 2));
    assert_eq!(
        part(&chat, &examples[0], true),
        "first thought\n</think>\n\nfirst answer<|im_end|>",
        "the thought of turn 1 is there although the second rendering has lost it"
    );
    assert_eq!(
        part(&chat, &examples[1], true),
        "second thought\n</think>\n\nsecond answer<|im_end|>"
    );
    let context = part(&chat, &examples[1], false);
    assert!(
        context.contains("first answer") && !context.contains("first thought"),
        "{context}"
    );
    let (last, _) = made(
        &chat,
        &[two_turns()],
        &PrepareConfig {
            turns: Turns::Last,
            ..config()
        },
    );
    assert_eq!(last, examples[1..]);
}

#[test]
fn the_mask_starts_after_the_generation_prompt_and_ends_with_the_stop_token() {
    let chat = thinking_chat();
    let (examples, _) = made(&chat, &[two_turns()], &config());
    for example in &examples {
        assert!(part(&chat, example, false).ends_with("<|im_start|>assistant\n<think>\n"));
        let first = example.loss_mask.iter().position(|on| *on).unwrap();
        assert!(
            example.loss_mask[first..].iter().all(|on| *on),
            "one response, at the end"
        );
        assert_eq!(example.tokens.last(), chat.tokenizer.id_of("<|im_end|>").as_ref());
        assert_eq!(example.tokens.len(), example.loss_mask.len());
    }
}

#[test]
fn the_prompt_of_an_example_is_to_the_token_what_serving_feeds() {
    let chat = thinking_chat();
    for thinking in [Some(true), Some(false)] {
        let message = if thinking == Some(true) {
            json!({"role": "assistant", "content": "b", "reasoning_content": "r"})
        } else {
            json!({"role": "assistant", "content": "b"})
        };
        let (examples, _) = made(
            &chat,
            &[json!({"messages": [{"role": "user", "content": "a"}, message]})],
            &PrepareConfig { thinking, ..config() },
        );
        let question = row(json!({"messages": [{"role": "user", "content": "a"}]}));
        let served = prompt_tokens(&chat, &question, thinking).unwrap();
        assert_eq!(examples[0].tokens[..served.len()], served);
        assert!(!examples[0].loss_mask[served.len() - 1] && examples[0].loss_mask[served.len()]);
    }
}

#[test]
fn rows_with_thought_without_thought_and_with_a_call_alone_are_all_supervised() {
    let chat = thinking_chat();
    let call = json!([{"function": {"name": "look", "arguments": "{\"at\": 1}"}}]);
    let rows = [
        json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning_content": "r"}], "enable_thinking": true}),
        json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "enable_thinking": false}),
        json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": call}], "enable_thinking": false}),
    ];
    let (examples, report) = made(&chat, &rows, &config());
    let texts: Vec<String> = examples.iter().map(|example| part(&chat, example, true)).collect();
    assert_eq!(
        texts,
        [
            "r\n</think>\n\nb<|im_end|>",
            "b<|im_end|>",
            "<tool_call>\n<function=look>\n<parameter=at>\n1\n</parameter>\n</function>\n</tool_call><|im_end|>"
        ]
    );
    let counted: usize = examples
        .iter()
        .flat_map(|example| &example.loss_mask)
        .filter(|on| **on)
        .count();
    assert_eq!(report.supervised, counted);
    assert!(part(&chat, &examples[1], false).ends_with("<think>\n\n</think>\n\n"));
}

#[test]
fn thoughts_under_a_prompt_without_thinking_are_dropped_not_mislabelled() {
    let thoughtful = json!({"messages": [{"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "r"}], "enable_thinking": false});
    let (reason, sample) = dropped(&thinking_chat(), thoughtful, &config());
    assert_eq!(reason, Dropped::UnstableBoundary);
    assert!(
        sample.contains("messages[1]") && sample.contains("thinking"),
        "{sample}"
    );
}

#[test]
fn every_other_reason_is_counted_with_its_first_case() {
    let chat = thinking_chat();
    let (reason, _) = dropped(
        &chat,
        json!({"messages": [{"role": "user", "content": "a"}]}),
        &config(),
    );
    assert_eq!(reason, Dropped::NoAssistantTurn);
    let nobody = json!({"messages": [{"role": "assistant", "content": "a"}]});
    let (reason, sample) = dropped(&chat, nobody, &config());
    assert_eq!(reason, Dropped::TemplateError);
    assert!(sample.contains("nobody asked anything"), "{sample}");
    let long =
        json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "word ".repeat(300)}]});
    let (reason, sample) = dropped(
        &chat,
        long,
        &PrepareConfig {
            max_length: 200,
            ..config()
        },
    );
    assert_eq!(reason, Dropped::TooLong);
    assert!(sample.contains("at most 200"), "{sample}");
    let mut silent = thinking_chat();
    silent.template = ChatTemplate::new(
        "{% for m in messages %}{{ m.content }}{% if m.content != 'never ends' %}<|im_end|>{% endif %}{% endfor %}",
        BTreeMap::new(),
    )
    .unwrap();
    let endless =
        json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "never ends"}]});
    assert_eq!(dropped(&silent, endless, &config()).0, Dropped::NoStopToken);
    let nothing = json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]});
    assert_eq!(dropped(&silent, nothing, &config()).0, Dropped::NoSupervisedPair);
}

#[test]
fn a_list_without_any_example_is_an_error_that_carries_the_report() {
    let rows = [(4, row(json!({"messages": [{"role": "user", "content": "a"}]})))];
    let error = format!("{:#}", prepare(&thinking_chat(), &rows, &config()).unwrap_err());
    assert!(
        error.contains("no example is left") && error.contains("no assistant turn (line 4"),
        "{error}"
    );
}

#[test]
fn truncation_cuts_the_tail_and_keeps_what_is_supervised_in_range() {
    let chat = thinking_chat();
    let long =
        json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "word ".repeat(300)}]});
    let cut = |max_length| PrepareConfig {
        max_length,
        length_policy: LengthPolicy::Truncate,
        ..config()
    };
    let (whole, _) = made(&chat, std::slice::from_ref(&long), &config());
    let (examples, report) = made(&chat, std::slice::from_ref(&long), &cut(100));
    assert_eq!(
        (examples[0].tokens.len(), examples[0].loss_mask.len(), report.truncated),
        (100, 100, 1)
    );
    assert_eq!(examples[0].tokens, whole[0].tokens[..100]);
    let prompt = whole[0].loss_mask.iter().position(|on| *on).unwrap();
    assert_eq!(
        made(&chat, std::slice::from_ref(&long), &cut(prompt + 2)).0[0]
            .tokens
            .len(),
        prompt + 2
    );
    let rows = [(1, row(long))];
    let error = format!("{:#}", prepare(&chat, &rows, &cut(prompt + 1)).unwrap_err());
    assert!(error.contains("too long"), "{error}");
}

#[test]
fn a_response_cut_by_the_token_limit_teaches_no_stop() {
    let chat = thinking_chat();
    let messages = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "one"},
        {"role": "user", "content": "b"}, {"role": "assistant", "content": "two and"}]);
    let (examples, _) = made(
        &chat,
        &[json!({"messages": messages, "finish_reason": "length"})],
        &config(),
    );
    assert!(part(&chat, &examples[0], true).ends_with("one<|im_end|>"));
    assert!(part(&chat, &examples[1], true).ends_with("two and"));
}

#[test]
fn a_stop_token_inside_a_response_ends_it_as_it_would_in_serving() {
    let chat = thinking_chat();
    let rows = [
        json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "write <|endoftext|> here"}]}),
    ];
    let (examples, _) = made(&chat, &rows, &config());
    assert!(part(&chat, &examples[0], true).ends_with("write <|endoftext|>"));
}

#[test]
fn rows_keep_their_order_on_all_threads() {
    let chat = Chat::load(&demo().join("target")).unwrap();
    let rows: Vec<Value> = (0..300)
        .map(|i| json!({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": format!("answer {i}")}]}))
        .collect();
    let (examples, report) = made(&chat, &rows, &config());
    assert_eq!(report.examples, 300);
    for (i, example) in examples.iter().enumerate() {
        assert_eq!(example.source, i + 1);
        assert_eq!(part(&chat, example, true), format!("answer {i}<|im_end|>"));
    }
}

#[test]
fn thinking_changes_the_rendered_prompt_and_the_row_stands_above_the_run() {
    let chat = Chat::load(&demo().join("target")).unwrap();
    let plain = row(json!({"messages": [{"role": "user", "content": "a"}]}));
    let text = |row: &Conversation, thinking| prompt_text(&chat.template, row, thinking).unwrap();
    assert!(text(&plain, Some(true)).ends_with("<think>\n"));
    assert!(text(&plain, Some(false)).ends_with("</think>\n\n"));
    let own = row(json!({"messages": [{"role": "user", "content": "a"}], "enable_thinking": true}));
    assert_eq!(text(&own, Some(false)), text(&plain, Some(true)));
    let hash = |text: &str| dflash_data::files::sha256_hex(text.as_bytes());
    assert_ne!(hash(&text(&plain, Some(true))), hash(&text(&plain, Some(false))));
    let answered = Conversation::of(vec![
        Message::new("user", "a").unwrap(),
        Message::new("assistant", "b").unwrap(),
    ]);
    assert!(prompt_text(&chat.template, &answered, None).is_err());
}

#[test]
fn all_demo_prompts_become_tokens_below_the_vocabulary() {
    let chat = Chat::load(&demo().join("target")).unwrap();
    for name in ["prompts.jsonl", "heldout.jsonl"] {
        for (line, row) in read_jsonl(&demo().join(name)).unwrap() {
            let tokens = prompt_tokens(&chat, &row, Some(false)).unwrap();
            assert!(
                tokens.len() > 4 && tokens.iter().all(|&token| token < 4096),
                "{name}:{line}"
            );
        }
    }
}

#[test]
fn stop_ids_are_the_union_without_repeats() {
    let chat = Chat::load(&demo().join("target")).unwrap();
    assert_eq!(chat.stops, [4092, 4090]);
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, value: Value| std::fs::write(folder.path().join(name), value.to_string()).unwrap();
    write(
        "config.json",
        json!({"eos_token_id": 7, "text_config": {"eos_token_id": [8, 7]}}),
    );
    assert_eq!(stop_ids(folder.path(), &chat.tokenizer).unwrap(), [7, 8, 4092, 4090]);
    write("generation_config.json", json!({"eos_token_id": [9, 4090]}));
    assert_eq!(stop_ids(folder.path(), &chat.tokenizer).unwrap(), [9, 4090, 7, 8, 4092]);
    write("generation_config.json", json!({"eos_token_id": "end"}));
    let error = format!("{:#}", stop_ids(folder.path(), &chat.tokenizer).unwrap_err());
    assert!(error.contains("generation_config.json: eos_token_id"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn any_answer_is_supervised_whole_and_alone(
        question in "[a-zA-Z \\n`<>|é世]{0,40}", thought in "[a-z \\n]{0,20}", answer in "[a-zA-Z \\n`.(){}é世]{0,60}",
    ) {
        let chat = thinking_chat();
        let messages = json!([{"role": "user", "content": question}, {"role": "assistant", "content": answer, "reasoning_content": thought}]);
        let (examples, _) = made(&chat, &[json!({"messages": messages})], &config());
        let expected = format!("{}\n</think>\n\n{}<|im_end|>", thought.trim(), answer.trim());
        prop_assert_eq!(part(&chat, &examples[0], true), expected);
        let context = part(&chat, &examples[0], false);
        prop_assert_eq!(context, format!("<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n<think>\n", question.trim()));
    }
}
