//! What chat templates expect of Python: `json.dumps` text for `tojson`, and `strftime` dates.
//!
//! A template was written against Python's output, so the text must be the same to the byte: `", "` and `": "` as
//! separators, keys in their order, floats as `repr` prints them.

use std::fmt::Write as _;

use serde_json::{Number, Value};

/// The arguments of `json.dumps` that templates use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct JsonStyle {
    /// Spaces a nesting level; `None` keeps everything on one line.
    pub(crate) indent: Option<usize>,
    /// Whether keys are put in order.
    pub(crate) sort_keys: bool,
    /// Whether characters outside ASCII become `\u` escapes.
    pub(crate) ensure_ascii: bool,
    /// Text between items.
    pub(crate) item_separator: String,
    /// Text between a key and its value.
    pub(crate) key_separator: String,
}

/// JSON text as Python writes it.
pub(crate) fn json_dumps(value: &Value, style: &JsonStyle) -> String {
    let mut text = String::new();
    write_value(&mut text, value, style, 0);
    text
}

/// `repr` of a float. Rust and Python agree on the shortest digits and on when to use an exponent, not on its spelling.
pub(crate) fn float_repr(float: f64) -> String {
    let printed = format!("{float:?}");
    let Some((digits, exponent)) = printed.split_once('e') else {
        return printed;
    };
    let (sign, exponent) = match exponent.strip_prefix('-') {
        Some(exponent) => ('-', exponent),
        None => ('+', exponent),
    };
    format!("{digits}e{sign}{exponent:0>2}")
}

/// `time.strftime` for the codes that templates use, in UTC; `None` for an unknown code.
pub(crate) fn strftime(format: &str, unix_seconds: u64) -> Option<String> {
    let days = unix_seconds / 86_400;
    let seconds = unix_seconds % 86_400;
    let (year, month, day) = civil_date(days);
    let weekday = WEEKDAYS[((days + 4) % 7) as usize];
    let month_name = MONTHS[(month - 1) as usize];
    let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    let mut text = String::new();
    let mut characters = format.chars();
    while let Some(character) = characters.next() {
        if character != '%' {
            text.push(character);
            continue;
        }
        // writing to a String cannot fail
        let _ = match characters.next()? {
            'Y' => write!(text, "{year}"),
            'y' => write!(text, "{:02}", year % 100),
            'm' => write!(text, "{month:02}"),
            'd' => write!(text, "{day:02}"),
            'e' => write!(text, "{day:2}"),
            'H' => write!(text, "{hour:02}"),
            'I' => write!(text, "{:02}", (hour + 11) % 12 + 1),
            'M' => write!(text, "{minute:02}"),
            'S' => write!(text, "{second:02}"),
            'p' => write!(text, "{}", if hour < 12 { "AM" } else { "PM" }),
            'B' => write!(text, "{month_name}"),
            'b' => write!(text, "{}", &month_name[..3]),
            'A' => write!(text, "{weekday}"),
            'a' => write!(text, "{}", &weekday[..3]),
            'F' => write!(text, "{year}-{month:02}-{day:02}"),
            'T' => write!(text, "{hour:02}:{minute:02}:{second:02}"),
            '%' => write!(text, "%"),
            _ => return None,
        };
    }
    Some(text)
}

const WEEKDAYS: [&str; 7] = [
    "Sunday",
    "Monday",
    "Tuesday",
    "Wednesday",
    "Thursday",
    "Friday",
    "Saturday",
];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

fn write_value(text: &mut String, value: &Value, style: &JsonStyle, depth: usize) {
    match value {
        Value::Null => text.push_str("null"),
        Value::Bool(true) => text.push_str("true"),
        Value::Bool(false) => text.push_str("false"),
        Value::Number(number) => write_number(text, number),
        Value::String(string) => write_string(text, string, style.ensure_ascii),
        Value::Array(items) if items.is_empty() => text.push_str("[]"),
        Value::Array(items) => {
            text.push('[');
            for (i, item) in items.iter().enumerate() {
                write_separator(text, style, depth + 1, i);
                write_value(text, item, style, depth + 1);
            }
            write_line_start(text, style, depth);
            text.push(']');
        }
        Value::Object(fields) if fields.is_empty() => text.push_str("{}"),
        Value::Object(fields) => {
            let mut fields: Vec<_> = fields.iter().collect();
            if style.sort_keys {
                fields.sort_by_key(|(key, _)| *key);
            }
            text.push('{');
            for (i, (key, item)) in fields.into_iter().enumerate() {
                write_separator(text, style, depth + 1, i);
                write_string(text, key, style.ensure_ascii);
                text.push_str(&style.key_separator);
                write_value(text, item, style, depth + 1);
            }
            write_line_start(text, style, depth);
            text.push('}');
        }
    }
}

fn write_separator(text: &mut String, style: &JsonStyle, depth: usize, item: usize) {
    if item > 0 {
        text.push_str(&style.item_separator);
    }
    write_line_start(text, style, depth);
}

fn write_line_start(text: &mut String, style: &JsonStyle, depth: usize) {
    if let Some(spaces) = style.indent {
        text.push('\n');
        text.extend(std::iter::repeat_n(' ', spaces * depth));
    }
}

fn write_number(text: &mut String, number: &Number) {
    let float = match number.as_f64() {
        Some(float) if number.is_f64() => float,
        _ => {
            let _ = write!(text, "{number}");
            return;
        }
    };
    text.push_str(&float_repr(float));
}

fn write_string(text: &mut String, string: &str, ensure_ascii: bool) {
    text.push('"');
    for character in string.chars() {
        match character {
            '"' => text.push_str("\\\""),
            '\\' => text.push_str("\\\\"),
            '\n' => text.push_str("\\n"),
            '\r' => text.push_str("\\r"),
            '\t' => text.push_str("\\t"),
            '\u{8}' => text.push_str("\\b"),
            '\u{c}' => text.push_str("\\f"),
            c if (c as u32) < 0x20 || (ensure_ascii && !c.is_ascii()) => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    let _ = write!(text, "\\u{unit:04x}");
                }
            }
            c => text.push(c),
        }
    }
    text.push('"');
}

/// Gregorian date (year, month, day) of a day count since 1970-01-01, by whole 400-year eras that begin on 1 March of
/// year 0.
pub fn civil_date(days: u64) -> (u64, u64, u64) {
    let shifted = days + 719_468;
    let era = shifted / 146_097;
    let day_of_era = shifted % 146_097;
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 {
        month_from_march + 3
    } else {
        month_from_march - 9
    };
    (400 * era + year_of_era + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn plain() -> JsonStyle {
        JsonStyle {
            indent: None,
            sort_keys: false,
            ensure_ascii: false,
            item_separator: ", ".to_owned(),
            key_separator: ": ".to_owned(),
        }
    }

    // expected texts printed by Python 3: json.dumps(x, ensure_ascii=False, ...)
    #[test]
    fn json_text_is_pythons() {
        let value = json!({"b": [1, 2.0, -0.5, 1e-5, 1e16, 1.5e300, 0.0001], "a": {"é<&>'": "\u{1}\"\\\n\u{7f}"}, "n": null, "e": [], "o": {}});
        assert_eq!(
            json_dumps(&value, &plain()),
            "{\"b\": [1, 2.0, -0.5, 1e-05, 1e+16, 1.5e+300, 0.0001], \"a\": {\"é<&>'\": \"\\u0001\\\"\\\\\\n\u{7f}\"}, \"n\": null, \"e\": [], \"o\": {}}"
        );
    }

    #[test]
    fn indent_sorting_and_ascii_are_pythons() {
        let value = json!({"b": [1, {"c": true}], "a": "😀é"});
        let style = JsonStyle {
            indent: Some(2),
            sort_keys: true,
            ensure_ascii: true,
            item_separator: ",".to_owned(),
            ..plain()
        };
        assert_eq!(
            json_dumps(&value, &style),
            "{\n  \"a\": \"\\ud83d\\ude00\\u00e9\",\n  \"b\": [\n    1,\n    {\n      \"c\": true\n    }\n  ]\n}"
        );
    }

    #[test]
    fn dates_are_the_calendars() {
        // 2024-02-29 23:05:09 UTC, a Thursday; 2000-03-01 00:00:00, a Wednesday
        assert_eq!(
            strftime("%A %d %B %Y %H:%M:%S %I %p %j", 1_709_247_909),
            None,
            "an unknown code is not guessed"
        );
        assert_eq!(
            strftime("%A %a %d %b %B %Y-%m %H:%M:%S %I%p %y%%", 1_709_247_909).unwrap(),
            "Thursday Thu 29 Feb February 2024-02 23:05:09 11PM 24%"
        );
        assert_eq!(strftime("%a %F %I", 951_868_800).unwrap(), "Wed 2000-03-01 12");
        assert_eq!(strftime("%F", 0).unwrap(), "1970-01-01");
    }
}
