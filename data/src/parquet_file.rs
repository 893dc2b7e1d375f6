//! Rows of Parquet files as JSON values, so that every reader of rows sees one kind of row.

use std::fs::File;
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail, ensure};
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::reader::RowIter;
use parquet::record::{Field, Row};
use parquet::schema::types::Type;
use serde_json::{Map, Number, Value};

/// A file's columns and rows.
#[derive(Debug)]
pub(crate) struct Table {
    /// Names of all top-level columns, in the file's order.
    pub(crate) columns: Vec<String>,
    /// The rows in the file's order: a value a column that was asked for, null where the file has none.
    pub(crate) rows: Vec<Map<String, Value>>,
}

/// Whether the name of a file says that it is Parquet.
pub(crate) fn is_parquet(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "parquet")
}

/// Reads a file: the columns that `wanted` names as far as they are there, or all of them.
///
/// Text, numbers, booleans, lists, structs and maps become their JSON forms, dates and decimals text. A field of a
/// nested struct that is null is left out: a column exists for all rows, in JSON only those with a value have it.
///
/// # Errors
/// When the file cannot be opened, is truncated or damaged, or a value has no JSON form; with the file and, where it is
/// known, the 1-based row.
pub(crate) fn read(path: &Path, wanted: Option<&[&str]>) -> Result<Table> {
    // the library asserts what a damaged page does not keep
    std::panic::catch_unwind(|| read_undamaged(path, wanted))
        .unwrap_or_else(|_| bail!("{}: cannot read as Parquet: a page is damaged", path.display()))
}

fn read_undamaged(path: &Path, wanted: Option<&[&str]>) -> Result<Table> {
    let place = || format!("{}: cannot read as Parquet", path.display());
    let file = File::open(path).with_context(|| format!("{}: cannot read", path.display()))?;
    let reader = SerializedFileReader::new(file).with_context(place)?;
    let schema = reader.metadata().file_metadata().schema();
    let columns: Vec<String> = schema
        .get_fields()
        .iter()
        .map(|field| field.name().to_owned())
        .collect();
    let mut rows = Vec::new();
    let kept: Vec<_> = schema
        .get_fields()
        .iter()
        .filter(|field| wanted.is_none_or(|wanted| wanted.contains(&field.name())))
        .cloned()
        .collect();
    if kept.is_empty() {
        return Ok(Table { columns, rows });
    }
    let projection = Type::group_type_builder(schema.name())
        .with_fields(kept)
        .build()
        .with_context(place)?;
    for group in 0..reader.num_row_groups() {
        let group = reader.get_row_group(group).with_context(place)?;
        for row in RowIter::from_row_group(Some(projection.clone()), group.as_ref()).with_context(place)? {
            let number = rows.len() + 1;
            let row = row.map_err(anyhow::Error::from).and_then(|row| columns_of(&row));
            rows.push(row.with_context(|| format!("{}: row {number}", path.display()))?);
        }
    }
    let promised = reader.metadata().file_metadata().num_rows();
    ensure!(
        i64::try_from(rows.len()) == Ok(promised),
        "{}: expected {promised} rows by its footer, found {}",
        path.display(),
        rows.len()
    );
    Ok(Table { columns, rows })
}

fn columns_of(row: &Row) -> Result<Map<String, Value>> {
    row.get_column_iter()
        .map(|(name, field)| Ok((name.clone(), json_of(field).with_context(|| name.clone())?)))
        .collect()
}

fn json_of(field: &Field) -> Result<Value> {
    Ok(match field {
        Field::Null => Value::Null,
        Field::Bool(value) => (*value).into(),
        Field::Byte(value) => (*value).into(),
        Field::Short(value) => (*value).into(),
        Field::Int(value) => (*value).into(),
        Field::Long(value) => (*value).into(),
        Field::UByte(value) => (*value).into(),
        Field::UShort(value) => (*value).into(),
        Field::UInt(value) => (*value).into(),
        Field::ULong(value) => (*value).into(),
        Field::Float16(value) => number(f64::from(*value))?,
        Field::Float(value) => number(f64::from(*value))?,
        Field::Double(value) => number(*value)?,
        Field::Str(text) => text.as_str().into(),
        // older writers do not mark text as text
        Field::Bytes(bytes) => match std::str::from_utf8(bytes.data()) {
            Ok(text) => text.into(),
            Err(_) => bail!("expected text, found {} bytes that are not UTF-8", bytes.len()),
        },
        Field::Group(row) => row
            .get_column_iter()
            .filter(|(_, field)| **field != Field::Null)
            .map(|(name, field)| Ok((name.clone(), json_of(field).with_context(|| name.clone())?)))
            .collect::<Result<Map<_, _>>>()?
            .into(),
        Field::ListInternal(list) => list.elements().iter().map(json_of).collect::<Result<Vec<_>>>()?.into(),
        Field::MapInternal(map) => map
            .entries()
            .iter()
            .map(|(key, field)| {
                let key = match key {
                    Field::Str(key) => key.clone(),
                    other => other.to_string(),
                };
                Ok((key, json_of(field)?))
            })
            .collect::<Result<Map<_, _>>>()?
            .into(),
        dated @ (Field::Decimal(_)
        | Field::Date(_)
        | Field::TimeMillis(_)
        | Field::TimeMicros(_)
        | Field::TimestampMillis(_)
        | Field::TimestampMicros(_)) => dated.to_string().into(),
    })
}

fn number(value: f64) -> Result<Value> {
    Number::from_f64(value)
        .map(Value::Number)
        .ok_or_else(|| anyhow!("expected a finite number, found {value}"))
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::Arc;

    use parquet::basic::{Compression, ZstdLevel};
    use parquet::column::writer::ColumnWriter;
    use parquet::file::properties::WriterProperties;
    use parquet::file::writer::SerializedFileWriter;
    use parquet::schema::parser::parse_message_type;
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    /// Texts of a column with their definition and repetition levels.
    pub(crate) type Leaf<'t> = (&'t [&'t str], &'t [i16], &'t [i16]);

    /// Writes text columns, one slice of leaves a row group.
    pub(crate) fn write(path: &Path, schema: &str, compression: Compression, groups: &[&[Leaf<'_>]]) {
        let schema = Arc::new(parse_message_type(schema).unwrap());
        let properties = Arc::new(WriterProperties::builder().set_compression(compression).build());
        let mut file = SerializedFileWriter::new(File::create(path).unwrap(), schema, properties).unwrap();
        for leaves in groups {
            let mut group = file.next_row_group().unwrap();
            for (texts, definition, repetition) in *leaves {
                let mut column = group.next_column().unwrap().unwrap();
                let ColumnWriter::ByteArrayColumnWriter(writer) = column.untyped() else {
                    panic!("only text columns")
                };
                let texts: Vec<_> = texts.iter().map(|text| (*text).into()).collect();
                writer.write_batch(&texts, Some(definition), Some(repetition)).unwrap();
                column.close().unwrap();
            }
            group.close().unwrap();
        }
        file.close().unwrap();
    }

    /// A list of messages with an optional thought, and a source.
    pub(crate) const CHAT: &str = "message m {
        optional group messages (LIST) { repeated group list { optional group element {
            optional binary role (UTF8); optional binary content (UTF8); optional binary reasoning_content (UTF8); } } }
        optional binary source (UTF8); }";

    fn chat(path: &Path, compression: Compression) {
        // a group of two rows, then one of one row; a message's fields are defined at level 4
        let first: &[Leaf<'_>] = &[
            (&["user", "assistant", "user"], &[4, 4, 4], &[0, 1, 0]),
            (&["a", "b", "c"], &[4, 4, 4], &[0, 1, 0]),
            (&["t"], &[3, 4, 3], &[0, 1, 0]),
            (&["web"], &[1, 0], &[0, 0]),
        ];
        let second: &[Leaf<'_>] = &[
            (&["user"], &[4], &[0]),
            (&["d"], &[4], &[0]),
            (&[], &[3], &[0]),
            (&[], &[0], &[0]),
        ];
        write(path, CHAT, compression, &[first, second]);
    }

    fn expected() -> Vec<Value> {
        vec![
            json!({"messages": [{"role": "user", "content": "a"},
                {"role": "assistant", "content": "b", "reasoning_content": "t"}], "source": "web"}),
            json!({"messages": [{"role": "user", "content": "c"}], "source": null}),
            json!({"messages": [{"role": "user", "content": "d"}], "source": null}),
        ]
    }

    #[test]
    fn all_row_groups_are_read_whatever_the_compression() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.parquet");
        for compression in [
            Compression::UNCOMPRESSED,
            Compression::SNAPPY,
            Compression::GZIP(parquet::basic::GzipLevel::default()),
            Compression::ZSTD(ZstdLevel::default()),
        ] {
            chat(&path, compression);
            let table = read(&path, None).unwrap();
            assert_eq!(table.columns, ["messages", "source"]);
            let rows: Vec<Value> = table.rows.into_iter().map(Value::Object).collect();
            assert_eq!(rows, expected(), "{compression}");
        }
        let table = read(&path, Some(&["source", "nothing"])).unwrap();
        assert_eq!(table.columns, ["messages", "source"]);
        assert_eq!(table.rows[0], *json!({"source": "web"}).as_object().unwrap());
    }

    #[test]
    fn a_truncated_file_is_an_error_that_names_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.parquet");
        chat(&path, Compression::SNAPPY);
        let whole = std::fs::read(&path).unwrap();
        for length in [0, 3, 4, 11, whole.len() / 2, whole.len() - 1] {
            std::fs::write(&path, &whole[..length]).unwrap();
            let error = format!("{:#}", read(&path, None).unwrap_err());
            assert!(error.contains("a.parquet: cannot read as Parquet"), "{length}: {error}");
        }
    }

    proptest! {
        #[test]
        fn a_damaged_byte_gives_rows_or_an_error_but_no_panic(at in 0.0..1.0_f64, value: u8, zstd: bool) {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("a.parquet");
            chat(&path, if zstd { Compression::ZSTD(ZstdLevel::default()) } else { Compression::UNCOMPRESSED });
            let mut bytes = std::fs::read(&path).unwrap();
            let at = (at * bytes.len() as f64) as usize;
            bytes[at] = value;
            std::fs::write(&path, &bytes).unwrap();
            match read(&path, None) {
                Ok(table) => prop_assert_eq!(table.rows.len(), 3),
                Err(error) => prop_assert!(error.to_string().contains("a.parquet"), "{:#}", error),
            }
        }
    }
}
