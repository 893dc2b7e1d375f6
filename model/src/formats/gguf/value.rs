//! Metadata values and element types of a GGUF file, with the numbers that stand for them on disk.

use candle_core::DType;
use candle_core::quantized::GgmlDType;

/// A metadata value.
#[derive(Debug, Clone, PartialEq)]
#[expect(missing_docs, reason = "each variant is the type that it is named after")]
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    String(String),
    U64(u64),
    I64(i64),
    F64(f64),
    /// Values of one type, none of them an array.
    Array(Vec<Value>),
}

/// The number that marks an array.
pub(super) const ARRAY: u32 = 9;

impl Value {
    /// The number of the value's type on disk.
    pub fn kind(&self) -> u32 {
        match self {
            Self::U8(_) => 0,
            Self::I8(_) => 1,
            Self::U16(_) => 2,
            Self::I16(_) => 3,
            Self::U32(_) => 4,
            Self::I32(_) => 5,
            Self::F32(_) => 6,
            Self::Bool(_) => 7,
            Self::String(_) => 8,
            Self::Array(_) => ARRAY,
            Self::U64(_) => 10,
            Self::I64(_) => 11,
            Self::F64(_) => 12,
        }
    }

    /// A whole number that is not negative, of whichever integer type.
    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            Self::U8(value) => Some(value.into()),
            Self::U16(value) => Some(value.into()),
            Self::U32(value) => Some(value.into()),
            Self::U64(value) => Some(value),
            Self::I8(value) => value.try_into().ok(),
            Self::I16(value) => value.try_into().ok(),
            Self::I32(value) => value.try_into().ok(),
            Self::I64(value) => value.try_into().ok(),
            _ => None,
        }
    }

    /// A number. What is stored in 32 bits reads as the shortest decimal that stands for it: 1e-6 stays 1e-6.
    pub fn as_f64(&self) -> Option<f64> {
        match *self {
            Self::F32(value) => shortest(value),
            Self::F64(value) => Some(value),
            _ => self.as_u64().map(|whole| whole as f64),
        }
    }

    /// True or false.
    pub fn as_bool(&self) -> Option<bool> {
        match self {
            Self::Bool(value) => Some(*value),
            _ => None,
        }
    }

    /// A text.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::String(value) => Some(value),
            _ => None,
        }
    }

    /// A list.
    pub fn as_array(&self) -> Option<&[Value]> {
        match self {
            Self::Array(values) => Some(values),
            _ => None,
        }
    }

    /// The value for a message, cut short when it is long.
    pub fn brief(&self) -> String {
        match self {
            Self::String(text) => format!("{:?}", text.chars().take(60).collect::<String>()),
            Self::Array(values) if values.len() > 16 => format!("a list of {} values", values.len()),
            Self::Array(values) => {
                let values: Vec<String> = values.iter().map(Value::brief).collect();
                format!("[{}]", values.join(", "))
            }
            Self::Bool(value) => value.to_string(),
            Self::F32(value) => value.to_string(),
            Self::F64(value) => value.to_string(),
            Self::I8(value) => value.to_string(),
            Self::I16(value) => value.to_string(),
            Self::I32(value) => value.to_string(),
            Self::I64(value) => value.to_string(),
            Self::U8(_) | Self::U16(_) | Self::U32(_) | Self::U64(_) => {
                self.as_u64().map(|value| value.to_string()).unwrap_or_default()
            }
        }
    }
}

/// The 64-bit number that is written like `value`.
fn shortest(value: f32) -> Option<f64> {
    value.to_string().parse().ok()
}

/// Type of a tensor's elements: floats, or blocks of quantised ones that candle can widen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ElementType(GgmlDType);

/// Every type that is read, with its number on disk and its usual name.
const TYPES: [(GgmlDType, u32, &str); 13] = [
    (GgmlDType::F32, 0, "F32"),
    (GgmlDType::F16, 1, "F16"),
    (GgmlDType::Q4_0, 2, "Q4_0"),
    (GgmlDType::Q4_1, 3, "Q4_1"),
    (GgmlDType::Q5_0, 6, "Q5_0"),
    (GgmlDType::Q5_1, 7, "Q5_1"),
    (GgmlDType::Q8_0, 8, "Q8_0"),
    (GgmlDType::Q2K, 10, "Q2_K"),
    (GgmlDType::Q3K, 11, "Q3_K"),
    (GgmlDType::Q4K, 12, "Q4_K"),
    (GgmlDType::Q5K, 13, "Q5_K"),
    (GgmlDType::Q6K, 14, "Q6_K"),
    (GgmlDType::BF16, 30, "BF16"),
];

impl ElementType {
    /// 32-bit floats.
    pub const F32: Self = Self(GgmlDType::F32);
    /// IEEE half floats.
    pub const F16: Self = Self(GgmlDType::F16);
    /// bfloat16.
    pub const BF16: Self = Self(GgmlDType::BF16);
    /// Blocks of 32 signed bytes with one half float as their scale.
    pub const Q8_0: Self = Self(GgmlDType::Q8_0);

    /// The type behind a number on disk, if it is one that is read.
    pub fn from_id(id: u32) -> Option<Self> {
        TYPES
            .iter()
            .find(|(_, number, _)| *number == id)
            .map(|entry| Self(entry.0))
    }

    /// Its number on disk.
    pub fn id(self) -> u32 {
        self.entry().1
    }

    /// Its usual name.
    pub fn name(self) -> &'static str {
        self.entry().2
    }

    /// Candle's name for it.
    pub fn ggml(self) -> GgmlDType {
        self.0
    }

    /// The float type, unless the elements are quantised.
    pub fn float(self) -> Option<DType> {
        match self.0 {
            GgmlDType::F32 => Some(DType::F32),
            GgmlDType::F16 => Some(DType::F16),
            GgmlDType::BF16 => Some(DType::BF16),
            _ => None,
        }
    }

    /// Elements of a block; rows are whole blocks.
    pub fn block(self) -> usize {
        self.0.block_size()
    }

    /// Bytes of `elements` elements; none when they are no whole number of blocks or too many to count.
    pub fn bytes(self, elements: u64) -> Option<u64> {
        let block = self.block() as u64;
        if !elements.is_multiple_of(block) {
            return None;
        }
        (elements / block).checked_mul(self.0.type_size() as u64)
    }

    fn entry(self) -> (GgmlDType, u32, &'static str) {
        // every constructor takes its type from the table
        TYPES
            .into_iter()
            .find(|entry| entry.0 == self.0)
            .unwrap_or((self.0, 0, "unknown"))
    }
}
