//! Looks values up in the two places of a configuration, and says what is wrong with them.

use serde_json::{Map, Value};

/// A problem in words; the caller puts the file's name before it.
pub(super) type Read<T> = std::result::Result<T, String>;

/// The two places of a configuration: the top and `dflash_config`.
pub(super) struct Keys<'v> {
    pub(super) top: &'v Map<String, Value>,
    pub(super) nested: Option<&'v Map<String, Value>>,
}

/// One value with the place it was found at.
pub(super) struct Field<'v> {
    pub(super) name: String,
    pub(super) value: &'v Value,
}

impl<'v> Keys<'v> {
    pub(super) fn of(value: &'v Value) -> Read<Self> {
        let Value::Object(top) = value else {
            return Err(format!("expected a JSON object, got {}", brief(value)));
        };
        let nested = match top.get("dflash_config") {
            None | Some(Value::Null) => None,
            Some(Value::Object(nested)) => Some(nested),
            Some(other) => return Err(format!("dflash_config: expected an object, got {}", brief(other))),
        };
        Ok(Self { top, nested })
    }

    pub(super) fn top(&self, key: &str) -> Option<Field<'v>> {
        let value = self.top.get(key).filter(|value| !value.is_null())?;
        Some(Field {
            name: key.to_owned(),
            value,
        })
    }

    pub(super) fn nested(&self, key: &str) -> Option<Field<'v>> {
        let value = self.nested?.get(key).filter(|value| !value.is_null())?;
        Some(Field {
            name: format!("dflash_config.{key}"),
            value,
        })
    }

    /// The nested value first, then the one at the top; both must agree.
    pub(super) fn either(&self, key: &str) -> Read<Option<Field<'v>>> {
        agreed(self.nested(key), self.top(key))
    }

    pub(super) fn required(&self, key: &str) -> Read<Field<'v>> {
        self.either(key)?
            .ok_or_else(|| format!("{key}: missing, it is required at the top or in dflash_config"))
    }

    pub(super) fn number_or(&self, key: &str, absent: f64) -> Read<f64> {
        self.either(key)?.map_or(Ok(absent), |field| field.number())
    }

    pub(super) fn flag_or(&self, key: &str, absent: bool) -> Read<bool> {
        self.either(key)?.map_or(Ok(absent), |field| field.flag())
    }
}

impl Field<'_> {
    pub(super) fn size(&self, most: usize) -> Read<usize> {
        match self.value.as_u64() {
            Some(size) if size <= most as u64 => Ok(size as usize),
            _ => Err(self.expected(&format!("an integer from 0 to {most}"))),
        }
    }

    pub(super) fn token(&self) -> Read<u32> {
        let token = self.value.as_u64().and_then(|token| u32::try_from(token).ok());
        token.ok_or_else(|| self.expected("a token id (an integer that is not negative)"))
    }

    pub(super) fn number(&self) -> Read<f64> {
        self.value.as_f64().ok_or_else(|| self.expected("a number"))
    }

    pub(super) fn flag(&self) -> Read<bool> {
        self.value.as_bool().ok_or_else(|| self.expected("true or false"))
    }

    pub(super) fn list(&self) -> Read<&Vec<Value>> {
        self.value.as_array().ok_or_else(|| self.expected("a list"))
    }

    pub(super) fn expected(&self, what: &str) -> String {
        format!("{}: expected {what}, got {}", self.name, brief(self.value))
    }
}

/// The value that two places agree on.
pub(super) fn agreed<'v>(first: Option<Field<'v>>, second: Option<Field<'v>>) -> Read<Option<Field<'v>>> {
    if let (Some(a), Some(b)) = (&first, &second)
        && !same(a.value, b.value)
    {
        return Err(format!(
            "{} is {} but {} is {}: both places must hold the same value",
            a.name,
            brief(a.value),
            b.name,
            brief(b.value)
        ));
    }
    Ok(first.or(second))
}

/// Equality in which 10000000 and 1e7 are one number.
fn same(a: &Value, b: &Value) -> bool {
    match (a.as_f64(), b.as_f64()) {
        (Some(a), Some(b)) => a.to_bits() == b.to_bits(),
        _ => a == b,
    }
}

/// A value for a message, cut where it gets long.
pub(super) fn brief(value: &Value) -> String {
    let text = value.to_string();
    if text.chars().count() <= 80 {
        return text;
    }
    text.chars().take(77).chain("...".chars()).collect()
}
