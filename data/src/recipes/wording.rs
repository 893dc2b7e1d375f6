//! From a row of a data set to the user's turns: which columns they come from, and what they ask for.
//!
//! The recipes ask what the field's usual benchmarks ask (`interop-and-eval.md` 3.1), in our own words. Reference
//! answers and tests stay out of the prompt.

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Map, Value};

use crate::jsonl::kind;

/// How a row is put to the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wording {
    /// A mathematical problem in this column; steps and a boxed answer are asked for.
    Problem(&'static str),
    /// The head of a Python function in this column; the whole function in a code fence is asked for.
    Function(&'static str),
    /// The text of this column as it stands.
    AsItIs(&'static str),
    /// A list of texts in this column, one a turn.
    Turns(&'static str),
    /// An instruction in the first column, and what it is about in the second, which may be empty.
    Instruction(&'static str, &'static str),
}

impl Wording {
    /// The columns that a row must have.
    pub(super) fn columns(self) -> Vec<&'static str> {
        match self {
            Self::Problem(column) | Self::Function(column) | Self::AsItIs(column) | Self::Turns(column) => vec![column],
            Self::Instruction(instruction, input) => vec![instruction, input],
        }
    }

    /// The user's turns of a row, at least one, none of them blank.
    ///
    /// # Errors
    /// When a column is missing, null, of another type or blank; with the column.
    pub(super) fn turns(self, row: &Map<String, Value>) -> Result<Vec<String>> {
        Ok(match self {
            Self::Problem(column) => vec![format!(
                "{}\n\nWork this out step by step. At the end, write the final answer inside \\boxed{{}}.",
                filled(row, column)?.trim_end()
            )],
            Self::Function(column) => vec![format!(
                "Complete this Python function so that it does what its description says and passes the tests for it. \
                 Answer with the whole solution inside one ```python code fence.\n\n```python\n{}\n```",
                filled(row, column)?.trim_end()
            )],
            Self::AsItIs(column) => vec![filled(row, column)?.to_owned()],
            Self::Turns(column) => {
                let list = value(row, column)?;
                let Value::Array(list) = list else {
                    bail!("{column}: expected a list of texts, found {}", kind(list))
                };
                ensure!(
                    !list.is_empty(),
                    "{column}: expected at least one turn, found an empty list"
                );
                list.iter()
                    .enumerate()
                    .map(|(i, turn)| {
                        not_blank(turn)
                            .with_context(|| format!("{column}[{i}]"))
                            .map(str::to_owned)
                    })
                    .collect::<Result<_>>()?
            }
            Self::Instruction(instruction, input) => {
                let (instruction, input) = (filled(row, instruction)?, text(value(row, input)?).context(input)?);
                vec![match input.trim() {
                    "" => instruction.to_owned(),
                    _ => format!("{}\n\n{input}", instruction.trim_end()),
                }]
            }
        })
    }
}

fn value<'r>(row: &'r Map<String, Value>, column: &str) -> Result<&'r Value> {
    row.get(column).with_context(|| missing(column, row.keys()))
}

/// The message about a column that is not there.
pub(super) fn missing(column: &str, found: impl IntoIterator<Item = impl AsRef<str>>) -> String {
    let found: Vec<_> = found.into_iter().map(|name| name.as_ref().to_owned()).collect();
    format!("no column {column}, found {}", found.join(", "))
}

fn filled<'r>(row: &'r Map<String, Value>, column: &str) -> Result<&'r str> {
    not_blank(value(row, column)?).with_context(|| column.to_owned())
}

fn not_blank(value: &Value) -> Result<&str> {
    let text = text(value)?;
    ensure!(!text.trim().is_empty(), "expected text, found only white space");
    Ok(text)
}

fn text(value: &Value) -> Result<&str> {
    value
        .as_str()
        .with_context(|| format!("expected text, found {}", kind(value)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn row(value: Value) -> Map<String, Value> {
        let Value::Object(row) = value else { panic!("{value}") };
        row
    }

    #[test]
    fn every_wording_holds_the_row_and_its_request() {
        let turns = |wording: Wording, value| wording.turns(&row(value)).unwrap();
        let math = turns(Wording::Problem("q"), json!({"q": "1+1?\n", "answer": "secret"}));
        assert!(math[0].starts_with("1+1?\n\n") && math[0].contains("step by step") && math[0].ends_with("\\boxed{}."));
        let code = turns(
            Wording::Function("p"),
            json!({"p": "def f():\n    ...\n", "test": "secret"}),
        );
        assert!(
            code[0].ends_with("\n\n```python\ndef f():\n    ...\n```") && code[0].contains("tests"),
            "{code:?}"
        );
        assert_eq!(turns(Wording::AsItIs("p"), json!({"p": "Write f. "})), ["Write f. "]);
        assert_eq!(turns(Wording::Turns("p"), json!({"p": ["a", "b"]})), ["a", "b"]);
        let instruction = Wording::Instruction("i", "x");
        assert_eq!(turns(instruction, json!({"i": "Sum.", "x": "1 2"})), ["Sum.\n\n1 2"]);
        assert_eq!(turns(instruction, json!({"i": "Hello", "x": ""})), ["Hello"]);
        assert!(!format!("{math:?}{code:?}").contains("secret"));
    }

    #[test]
    fn broken_rows_name_the_column_what_was_expected_and_what_was_found() {
        for (wording, value, expected) in [
            (Wording::AsItIs("p"), json!({"a": 1, "b": 2}), "no column p, found a, b"),
            (Wording::AsItIs("p"), json!({"p": null}), "p: expected text, found null"),
            (
                Wording::Problem("p"),
                json!({"p": 3}),
                "p: expected text, found a number",
            ),
            (
                Wording::Function("p"),
                json!({"p": " \n"}),
                "p: expected text, found only white space",
            ),
            (
                Wording::Turns("p"),
                json!({"p": "a"}),
                "p: expected a list of texts, found a string",
            ),
            (Wording::Turns("p"), json!({"p": []}), "at least one turn"),
            (
                Wording::Turns("p"),
                json!({"p": ["a", null]}),
                "p[1]: expected text, found null",
            ),
            (
                Wording::Instruction("i", "x"),
                json!({"i": "a", "x": null}),
                "x: expected text, found null",
            ),
            (
                Wording::Instruction("i", "x"),
                json!({"i": "a"}),
                "no column x, found i",
            ),
        ] {
            let error = format!("{:#}", wording.turns(&row(value)).unwrap_err());
            assert!(error.contains(expected), "{expected:?} not in {error:?}");
        }
    }
}
