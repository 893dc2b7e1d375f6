//! Renderings against `transformers` (scripts/fixtures/templates.py), and where templates are found.

use std::collections::BTreeMap;
use std::fs;

use dflash_data::{ChatTemplate, Conversation, Message};
use serde_json::{Value, json};

const CASES: &str = include_str!("../fixtures/templates.json");
const THINKING: &str = include_str!("../fixtures/thinking.jinja");

fn special() -> BTreeMap<String, String> {
    [("bos_token", "<s>"), ("eos_token", "</s>")]
        .map(|(name, token)| (name.to_owned(), token.to_owned()))
        .into()
}

fn messages(list: &Value) -> Vec<Message> {
    Conversation::from_json(json!({ "messages": list })).unwrap().messages
}

#[test]
fn every_rendering_and_refusal_is_that_of_transformers() {
    let cases: Vec<Value> = serde_json::from_str(CASES).unwrap();
    assert!(cases.len() >= 70);
    let mut wrong = Vec::new();
    for case in &cases {
        let text = case["template"].as_str().unwrap_or(THINKING);
        let template = ChatTemplate::new(text, special()).unwrap_or_else(|e| panic!("{}: {e:#}", case["name"]));
        let tools = Some(&case["tools"]).filter(|tools| !tools.is_null());
        let prompt = case["prompt"].as_bool().unwrap();
        let rendered = template.render(&messages(&case["messages"]), prompt, case["thinking"].as_bool(), tools);
        let agrees = match (&rendered, case["text"].as_str(), case["refusal"].as_str()) {
            (Ok(ours), Some(theirs), _) => ours == theirs,
            (Err(ours), None, Some(theirs)) => format!("{ours:#}").contains(theirs),
            _ => false,
        };
        if !agrees {
            wrong.push(format!(
                "{}\n  ours   {rendered:?}\n  theirs {:?} {:?}",
                case["name"], case["text"], case["refusal"]
            ));
        }
    }
    assert!(
        wrong.is_empty(),
        "{} of {}:\n{}",
        wrong.len(),
        cases.len(),
        wrong.join("\n")
    );
}

#[test]
fn the_template_comes_from_the_jinja_file_else_from_the_config() {
    let folder = tempfile::tempdir().unwrap();
    let config = |value: Value| fs::write(folder.path().join("tokenizer_config.json"), value.to_string()).unwrap();
    let render = || {
        let template = ChatTemplate::load(folder.path())?;
        template.render(&[Message::new("user", "x")?], false, None, None)
    };
    let error = || format!("{:#}", render().unwrap_err());
    assert!(error().contains("chat_template"));
    config(json!({"bos_token": "<b>"}));
    assert!(error().contains("no chat_template here"));
    config(json!({"chat_template": [{"name": "tool_use", "template": "t"}]}));
    assert!(error().contains("default"));
    config(json!({"chat_template": "{% if %}"}));
    assert!(error().contains("tokenizer_config.json") && error().contains("does not compile"));
    config(json!({"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]}));
    assert_eq!(render().unwrap(), "d");
    config(
        json!({"chat_template": "{{ bos_token }}{{ eos_token }}c", "bos_token": {"content": "<b>"}, "eos_token": "<e>"}),
    );
    assert_eq!(render().unwrap(), "<b><e>c");
    fs::write(folder.path().join("chat_template.jinja"), "j{{ bos_token }}").unwrap();
    assert_eq!(render().unwrap(), "j<b>");
}

#[test]
fn an_empty_template_is_refused_when_it_is_loaded_and_an_empty_prompt_when_it_is_made() {
    let folder = tempfile::tempdir().unwrap();
    let error = || format!("{:#}", ChatTemplate::load(folder.path()).unwrap_err());
    fs::write(folder.path().join("tokenizer_config.json"), r#"{"chat_template": ""}"#).unwrap();
    let expected = "tokenizer_config.json: chat_template: expected a Jinja template, found an empty text";
    assert!(error().contains(expected), "{}", error());
    fs::write(folder.path().join("chat_template.jinja"), " \n").unwrap();
    assert!(
        error().contains("chat_template.jinja: ") && error().contains("only white space"),
        "{}",
        error()
    );

    let template = ChatTemplate::new("{# nothing #}", BTreeMap::new()).unwrap();
    let prompt = Conversation::of(vec![Message::user("x")]);
    let error = dflash_data::prompt_text(&template, &prompt, None)
        .unwrap_err()
        .to_string();
    assert!(error.contains("found an empty one"), "{error}");
}

#[test]
fn the_hash_is_of_the_text_and_dates_are_filled_in() {
    let hash = |text: &str| ChatTemplate::new(text, BTreeMap::new()).unwrap().hash().to_owned();
    assert_ne!(hash("a"), hash("b"));
    assert_eq!(hash("a"), hash("a"));
    let dated = ChatTemplate::new("{{ strftime_now('%Y-%m-%d') }}", BTreeMap::new()).unwrap();
    let text = dated.render(&[], false, None, None).unwrap();
    assert!(text.len() == 10 && text.starts_with("20"), "{text}");
}

#[test]
fn what_is_undefined_and_what_json_cannot_hold_are_errors() {
    for text in [
        "{{ nothing.field }}",
        "{{ nothing | tojson }}",
        "{{ 1 | tojson(unknown=1) }}",
        "{{ strftime_now('%Q') }}",
    ] {
        let template = ChatTemplate::new(text, BTreeMap::new()).unwrap();
        assert!(template.render(&[], false, None, None).is_err(), "{text}");
    }
}
