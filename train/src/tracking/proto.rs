//! Protocol buffers on the wire, as much as event files and W&B logs need: fields out, fields in, no schema.
//!
//! A message is a row of fields, each a varint `number << 3 | type` and its value. Types: 0 varint, 1 eight bytes,
//! 2 varint length and bytes (texts, bytes, messages), 5 four bytes; numbers are little-endian.
//! <https://protobuf.dev/programming-guides/encoding>

use anyhow::{Context, Result, bail};

/// A message that is being written; fields follow one another in the order of the calls.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Message(Vec<u8>);

impl Message {
    /// A message without fields.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an integer, an enum or a bool.
    #[must_use]
    pub fn integer(mut self, field: u32, value: u64) -> Self {
        self.tag(field, 0);
        self.varint(value);
        self
    }

    /// Adds a signed integer (`int32`, `int64`): two's complement, not zigzag.
    #[must_use]
    pub fn signed(self, field: u32, value: i64) -> Self {
        self.integer(field, value.cast_unsigned())
    }

    /// Adds a `double`.
    #[must_use]
    pub fn double(mut self, field: u32, value: f64) -> Self {
        self.tag(field, 1);
        self.0.extend(value.to_le_bytes());
        self
    }

    /// Adds a `float`.
    #[must_use]
    pub fn float(mut self, field: u32, value: f32) -> Self {
        self.tag(field, 5);
        self.0.extend(value.to_le_bytes());
        self
    }

    /// Adds a text.
    #[must_use]
    pub fn text(self, field: u32, value: &str) -> Self {
        self.bytes(field, value.as_bytes())
    }

    /// Adds bytes.
    #[must_use]
    pub fn bytes(mut self, field: u32, value: &[u8]) -> Self {
        self.tag(field, 2);
        self.varint(value.len() as u64);
        self.0.extend(value);
        self
    }

    /// Adds a message.
    #[must_use]
    pub fn message(self, field: u32, value: &Self) -> Self {
        self.bytes(field, &value.0)
    }

    /// Adds the fields of another message.
    #[must_use]
    pub fn append(mut self, fields: Self) -> Self {
        self.0.extend(fields.0);
        self
    }

    /// The message as it is written.
    pub fn into_bytes(self) -> Vec<u8> {
        self.0
    }

    fn tag(&mut self, field: u32, wire_type: u64) {
        self.varint(u64::from(field) << 3 | wire_type);
    }

    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }
}

/// A value as it is read; only the schema tells what the number of an `Integer` or the bytes mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Value<'m> {
    /// A varint.
    Integer(u64),
    /// Eight bytes.
    Eight([u8; 8]),
    /// Four bytes.
    Four([u8; 4]),
    /// A text, bytes or a message.
    Bytes(&'m [u8]),
}

impl<'m> Value<'m> {
    /// The bytes of a text or message.
    pub fn bytes(self) -> Option<&'m [u8]> {
        match self {
            Self::Bytes(bytes) => Some(bytes),
            _ => None,
        }
    }

    /// The number of a varint.
    pub fn integer(self) -> Option<u64> {
        match self {
            Self::Integer(number) => Some(number),
            _ => None,
        }
    }
}

/// All fields of a message, with their numbers.
///
/// # Errors
/// When the bytes are no message: cut off, or of a wire type that nobody writes any more.
pub fn fields(mut rest: &[u8]) -> Result<Vec<(u32, Value<'_>)>> {
    let mut found = Vec::new();
    while !rest.is_empty() {
        let tag = take_varint(&mut rest)?;
        let field = u32::try_from(tag >> 3).context("a field number of more than 32 bits")?;
        let value = match tag & 7 {
            0 => Value::Integer(take_varint(&mut rest)?),
            1 => Value::Eight(take_array(&mut rest)?),
            2 => {
                let length = usize::try_from(take_varint(&mut rest)?)?;
                Value::Bytes(take(&mut rest, length)?)
            }
            5 => Value::Four(take_array(&mut rest)?),
            other => bail!("field {field}: expected a wire type of 0, 1, 2 or 5, got {other}"),
        };
        found.push((field, value));
    }
    Ok(found)
}

/// The first value of a field of a message; none when the message lacks it or is none.
pub fn field(message: &[u8], wanted: u32) -> Option<Value<'_>> {
    let found = fields(message).ok()?;
    found
        .into_iter()
        .find_map(|(number, value)| (number == wanted).then_some(value))
}

fn take<'m>(rest: &mut &'m [u8], length: usize) -> Result<&'m [u8]> {
    let Some((taken, left)) = rest.split_at_checked(length) else {
        bail!("expected {length} more bytes, got {}", rest.len())
    };
    *rest = left;
    Ok(taken)
}

fn take_array<const N: usize>(rest: &mut &[u8]) -> Result<[u8; N]> {
    Ok(take(rest, N)?.try_into()?)
}

fn take_varint(rest: &mut &[u8]) -> Result<u64> {
    let mut number = 0;
    for shift in (0..64).step_by(7) {
        let byte = take(rest, 1)?[0];
        number |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Ok(number);
        }
    }
    bail!("a varint of more than ten bytes")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The examples of the encoding's own documentation.
    #[test]
    fn documented_examples_have_the_documented_bytes() {
        assert_eq!(Message::new().integer(1, 150).into_bytes(), [0x08, 0x96, 0x01]);
        let text = Message::new().text(2, "testing");
        assert_eq!(text.into_bytes(), b"\x12\x07testing");
        let inner = Message::new().integer(1, 150);
        assert_eq!(Message::new().message(3, &inner).into_bytes(), [0x1a, 3, 8, 0x96, 1]);
        let minus_two = Message::new().signed(1, -2).into_bytes();
        assert_eq!(
            minus_two[1..],
            [0xfe, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1]
        );
    }

    #[test]
    fn a_message_that_is_cut_off_is_an_error_at_every_place_within_a_field() {
        let whole = Message::new()
            .integer(200, 300)
            .text(2, "abc")
            .double(1, 0.5)
            .into_bytes();
        // a cut between two fields leaves a shorter message
        let between = [4, 9];
        for cut in 1..whole.len() {
            assert_eq!(fields(&whole[..cut]).is_ok(), between.contains(&cut), "{cut}");
        }
        assert!(fields(&[0x0b]).unwrap_err().to_string().contains("got 3"));
        assert!(fields(&[0xff; 11]).is_err());
    }

    proptest! {
        #[test]
        fn what_is_written_reads_back(
            field in 1..10_000_u32, number: u64, double: f64, float: f32, bytes: Vec<u8>
        ) {
            let message = Message::new().integer(field, number).double(field, double).float(field, float)
                .bytes(field, &bytes).into_bytes();
            let values = [
                Value::Integer(number),
                Value::Eight(double.to_le_bytes()),
                Value::Four(float.to_le_bytes()),
                Value::Bytes(&bytes),
            ];
            prop_assert_eq!(fields(&message).unwrap(), values.map(|value| (field, value)));
        }
    }
}
