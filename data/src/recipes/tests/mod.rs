//! Recipes over local files; the hub and plain conversations in files of their own.

mod hub;
mod set;

use std::fs;
use std::path::Path;

use parquet::basic::Compression;
use serde_json::json;

use super::*;
use crate::parquet_file::tests::{Leaf, write};

/// Writes a file of text columns that all have a value in every row.
fn table(path: &Path, columns: &[&str], groups: &[&[&[&str]]]) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    let fields: Vec<String> = columns
        .iter()
        .map(|name| format!("optional binary {name} (UTF8);"))
        .collect();
    let rows = groups[0][0].len();
    let (defined, top) = (vec![1; rows], vec![0; rows]);
    let groups: Vec<Vec<Leaf<'_>>> = groups
        .iter()
        .map(|group| {
            group
                .iter()
                .map(|texts| (*texts, &defined[..texts.len()], &top[..texts.len()]))
                .collect()
        })
        .collect();
    let groups: Vec<&[Leaf<'_>]> = groups.iter().map(Vec::as_slice).collect();
    write(
        path,
        &format!("message m {{ {} }}", fields.join(" ")),
        Compression::SNAPPY,
        &groups,
    );
}

fn from(name: &str, path: &Path, selection: &Selection) -> Result<PromptSet> {
    load(Recipe::by_name(name)?, &Source::Path(path.to_owned()), selection)
}

fn all(name: &str, path: &Path) -> Result<PromptSet> {
    from(name, path, &Selection::default())
}

fn texts(set: &PromptSet) -> Vec<&str> {
    set.prompts.iter().map(|row| row.start.messages[0].content()).collect()
}

#[test]
fn recipes_are_sorted_by_name_and_an_unknown_one_lists_them() {
    assert!(RECIPES.is_sorted_by_key(Recipe::name));
    let error = Recipe::by_name("gsm").unwrap_err().to_string();
    assert!(
        error.contains("\"gsm\"") && RECIPES.iter().all(|recipe| error.contains(recipe.name())),
        "{error}"
    );
}

#[test]
fn every_recipe_reads_its_own_columns_and_keeps_the_answer_out() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rows.jsonl");
    for (name, row, id, domain) in [
        (
            "aime",
            json!({"id": 60, "problem": "P", "solution": "SECRET", "answer": "SECRET", "url": "SECRET", "year": "2024"}),
            "60",
            None,
        ),
        (
            "alpaca",
            json!({"instruction": "P", "input": "", "output": "SECRET", "text": "SECRET"}),
            "1",
            None,
        ),
        ("gsm8k", json!({"question": "P", "answer": "SECRET"}), "1", None),
        (
            "humaneval",
            json!({"task_id": "HumanEval/0", "prompt": "P", "canonical_solution": "SECRET", "test": "SECRET", "entry_point": "SECRET"}),
            "HumanEval/0",
            None,
        ),
        (
            "math500",
            json!({"problem": "P", "solution": "SECRET", "answer": "SECRET", "subject": "Algebra", "level": 2, "unique_id": "test/1.json"}),
            "test/1.json",
            Some("Algebra"),
        ),
        (
            "mbpp",
            json!({"task_id": 2, "prompt": "P", "code": "SECRET", "test_list": ["SECRET"]}),
            "2",
            None,
        ),
        (
            "mt-bench",
            json!({"prompt_id": 81, "category": "writing", "prompt": ["P", "Q"], "reference": ["SECRET"]}),
            "81",
            Some("writing"),
        ),
    ] {
        fs::write(&path, row.to_string()).unwrap();
        let set = all(name, &path).unwrap();
        let [prompt] = set.prompts.as_slice() else {
            panic!("{name}")
        };
        assert_eq!((prompt.id.as_str(), prompt.domain.as_deref()), (id, domain), "{name}");
        let first = texts(&set)[0].to_owned();
        assert!(first.contains('P'), "{name}: {first}");
        // the row's only capital A is in what must stay out, and no wording begins a word of its own with one
        assert!(
            !first.replace("At the end", "").replace("Answer with", "").contains('A'),
            "{name}: {first}"
        );
        let follow_ups: &[&str] = if name == "mt-bench" { &["Q"] } else { &[] };
        assert_eq!(prompt.follow_ups, follow_ups, "{name}");
    }
    assert_eq!(RECIPES.len(), 7, "a recipe without a row above");
}

#[test]
fn two_turns_come_out_of_a_list_column() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("data/train-00000-of-00001.parquet");
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    let schema = "message m { optional binary category (UTF8); optional group prompt (LIST) { repeated group list {
        optional binary element (UTF8); } } optional binary prompt_id (UTF8); }";
    let group: &[Leaf<'_>] = &[
        (&["math", "stem"], &[1, 1], &[0, 0]),
        (&["a", "b", "c", "d"], &[3, 3, 3, 3], &[0, 1, 0, 1]),
        (&["111", "141"], &[1, 1], &[0, 0]),
    ];
    write(&path, schema, Compression::UNCOMPRESSED, &[group]);
    let set = all("mt-bench", folder.path()).unwrap();
    assert_eq!(texts(&set), ["a", "c"]);
    assert_eq!(
        (set.prompts[1].id.as_str(), set.prompts[1].domain.as_deref()),
        ("141", Some("stem"))
    );
    assert_eq!(set.prompts[1].follow_ups, ["d"]);
}

#[test]
fn a_folder_gives_the_recipes_split_in_the_order_of_its_parts() {
    let folder = tempfile::tempdir().unwrap();
    let part =
        |name: &str, texts: &[&str]| table(&folder.path().join(name), &["question", "answer"], &[&[texts, texts]]);
    part("main/train-00000-of-00001.parquet", &["wrong"]);
    part("main/test-00001-of-00002.parquet", &["c"]);
    let error = format!("{:#}", all("gsm8k", folder.path()).unwrap_err());
    assert!(
        error.contains("expected 2 files") && error.contains("found 1"),
        "{error}"
    );
    part("main/test-00000-of-00002.parquet", &["a", "b"]);
    let set = all("gsm8k", folder.path()).unwrap();
    assert_eq!(texts(&set).iter().map(|text| &text[..1]).collect::<String>(), "abc");
    assert_eq!(set.prompts.iter().map(|row| row.id.as_str()).collect::<String>(), "123");
    assert_eq!(set.facts.files.iter().map(|file| file.rows).collect::<Vec<_>>(), [2, 1]);
    assert_eq!(all("gsm8k", &folder.path().join("main")).unwrap().prompts, set.prompts);
    let error = format!("{:#}", all("mbpp", folder.path()).unwrap_err());
    assert!(
        error.contains("sanitized/test-*.parquet") && error.contains("main/train-"),
        "{error}"
    );
}

#[test]
fn the_record_makes_the_same_set_again_from_any_source() {
    let folder = tempfile::tempdir().unwrap();
    let questions: Vec<String> = (0..30).map(|i| format!("q{i}")).collect();
    let columns: Vec<&str> = questions.iter().map(String::as_str).collect();
    let (first, second) = columns.split_at(17);
    let parquet = folder.path().join("a.parquet");
    table(&parquet, &["question"], &[&[first], &[second]]);
    let rows: Vec<_> = questions
        .iter()
        .map(|question| json!({"question": question, "answer": 1}))
        .collect();
    let json_path = folder.path().join("a.json");
    fs::write(&json_path, serde_json::to_string_pretty(&rows).unwrap()).unwrap();

    let selection = Selection {
        samples: Some(8),
        seed: 3,
        order: Order::Shuffled,
    };
    let set = from("gsm8k", &parquet, &selection).unwrap();
    let again = from("gsm8k", &json_path, &selection).unwrap();
    assert_eq!(set.prompts, again.prompts);
    assert_eq!(set.facts.prompts_sha256, again.facts.prompts_sha256);
    assert_ne!(set.facts.files[0].sha256, again.facts.files[0].sha256);
    let record = serde_json::to_value(&set.facts).unwrap();
    assert_eq!(
        record["files"][0]["sha256"],
        crate::files::sha256_hex(&fs::read(&parquet).unwrap())
    );
    for (key, value) in [
        ("name", json!("gsm8k")),
        ("revision", json!(null)),
        ("rows_total", json!(30)),
        ("samples", json!(8)),
        ("seed", json!(3)),
        ("order", json!("shuffled")),
    ] {
        assert_eq!(record[key], value, "{key}");
    }
    let too_many = Selection {
        samples: Some(31),
        ..selection
    };
    let error = format!("{:#}", from("gsm8k", &parquet, &too_many).unwrap_err());
    assert!(
        error.contains("31") && error.contains("30") && error.contains("a.parquet"),
        "{error}"
    );
}

#[test]
fn broken_sources_name_file_row_and_column() {
    let folder = tempfile::tempdir().unwrap();
    let error_of = |path: &Path| format!("{:#}", all("gsm8k", path).unwrap_err());
    let parquet = folder.path().join("a.parquet");
    table(&parquet, &["query", "answer"], &[&[&["a"], &["b"]]]);
    assert!(
        error_of(&parquet).contains("a.parquet: no column question, found query, answer"),
        "{}",
        error_of(&parquet)
    );
    let group: &[Leaf<'_>] = &[(&["a"], &[1, 0], &[0, 0])];
    let schema = "message m { optional binary question (UTF8); }";
    write(&parquet, schema, Compression::SNAPPY, &[group]);
    let error = error_of(&parquet);
    assert!(
        error.contains("a.parquet: row 2: question: expected text, found null"),
        "{error}"
    );
    write(&parquet, schema, Compression::SNAPPY, &[]);
    assert!(
        error_of(&parquet).contains("a.parquet: no rows"),
        "{}",
        error_of(&parquet)
    );

    for (name, text, expected) in [
        (
            "a.jsonl",
            "{\"question\": \"a\"}\n{\"question\": 1}",
            "a.jsonl:2: question: expected text, found a number",
        ),
        (
            "a.jsonl",
            "{\"question\": \"a\"}\n[]",
            "a.jsonl:2: expected an object, found a list",
        ),
        ("a.jsonl", "\n", "a.jsonl: no rows"),
        ("a.jsonl", "{\"q\": 1}", "a.jsonl:1: no column question, found q"),
        (
            "a.json",
            "[{\"question\": \"a\"}, {}]",
            "a.json: row 2: no column question",
        ),
        ("a.json", "[]", "a.json: no rows"),
        ("a.csv", "question", "a.csv: expected a name that ends with"),
    ] {
        let path = folder.path().join(name);
        fs::write(&path, text).unwrap();
        let error = error_of(&path);
        assert!(error.contains(expected), "{expected:?} not in {error:?}");
    }
    assert!(error_of(&folder.path().join("gone")).contains("gone: cannot read"));
}
