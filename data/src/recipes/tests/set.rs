//! Conversations as prompts, turns in their order, and the hash of a set.

use anyhow::Result;

use crate::conversation::{Conversation, Message};
use crate::recipes::{PromptRow, PromptSet, Selection, load_conversations};

fn load(text: &str, selection: &Selection) -> Result<PromptSet> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("p.jsonl");
    std::fs::write(&path, text)?;
    load_conversations(&path, selection)
}

#[test]
fn a_conversation_is_asked_from_its_last_open_message() {
    let text = r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}], "domain": "chat"}

{"id": 7, "messages": [{"role": "user", "content": "e"}], "enable_thinking": true}"#;
    let set = load(text, &Selection::default()).unwrap();
    let [first, second] = set.prompts.as_slice() else {
        panic!()
    };
    assert!(first.id.ends_with("p.jsonl:1"), "{}", first.id);
    assert_eq!(
        (second.id.as_str(), first.domain.as_deref(), second.domain.as_deref()),
        ("7", Some("chat"), None)
    );
    let request = first.request(&[]).unwrap();
    let contents: Vec<_> = request.messages.iter().map(Message::content).collect();
    assert_eq!(contents, ["a", "b", "c"]);
    assert_eq!(second.request(&[]).unwrap().enable_thinking, Some(true));
    assert!(second.request(&[Message::user("x")]).is_none());
    assert_eq!(
        (set.facts.rows_total, set.facts.samples, set.facts.files.len()),
        (2, 2, 1)
    );
}

#[test]
fn several_turns_are_sent_with_the_models_own_answers_between() {
    let row = PromptRow {
        id: "1".to_owned(),
        domain: None,
        start: Conversation::of(vec![Message::user("q1")]),
        follow_ups: vec!["q2".to_owned(), "q3".to_owned()],
    };
    let answers: Vec<Message> = ["a1", "a2", "a3"]
        .map(|text| Message::new("assistant", text).unwrap())
        .into();
    let sent = |answers: &[Message]| {
        let request = row.request(answers)?;
        Some(
            request
                .messages
                .iter()
                .map(|m| m.content().to_owned())
                .collect::<Vec<_>>(),
        )
    };
    assert_eq!(sent(&[]).unwrap(), ["q1"]);
    assert_eq!(sent(&answers[..1]).unwrap(), ["q1", "a1", "q2"]);
    assert_eq!(sent(&answers[..2]).unwrap(), ["q1", "a1", "q2", "a2", "q3"]);
    assert_eq!(sent(&answers), None);
}

#[test]
fn rows_that_cannot_be_asked_are_named() {
    let user = r#"{"role": "user", "content": "a"}"#;
    for (text, expected) in [
        (
            r#"{"messages": [{"role": "assistant", "content": "b"}]}"#.to_owned(),
            "p.jsonl:1: expected a user message",
        ),
        (
            r#"{"messages": [{"role": "system", "content": "b"}]}"#.to_owned(),
            "the last one is of system",
        ),
        (
            format!(r#"{{"id": 1.5, "messages": [{user}]}}"#),
            "p.jsonl:1: id: expected a text or a whole number, found 1.5",
        ),
        (
            format!(r#"{{"domain": ["x"], "messages": [{user}]}}"#),
            "domain: expected a text, found a list",
        ),
        (
            format!("{{\"id\": \"x\", \"messages\": [{user}]}}\n{{\"id\": \"x\", \"messages\": [{user}]}}"),
            "id \"x\" stands in two rows, 1 and 2",
        ),
    ] {
        let error = format!("{:#}", load(&text, &Selection::default()).unwrap_err());
        assert!(error.contains(expected), "{expected:?} not in {error:?}");
    }
}

#[test]
fn the_hash_of_the_prompts_follows_their_texts_and_order() {
    let line = |id: u32, text: &str| {
        format!("{{\"id\": {id}, \"messages\": [{{\"role\": \"user\", \"content\": \"{text}\"}}]}}\n")
    };
    let hash = |text: String| load(&text, &Selection::default()).unwrap().facts.prompts_sha256;
    let base = hash(line(1, "a") + &line(2, "b"));
    assert_eq!(base, hash(line(1, "a") + "\n" + &line(2, "b")));
    assert_ne!(base, hash(line(2, "b") + &line(1, "a")));
    assert_ne!(base, hash(line(1, "a") + &line(2, "c")));
}
