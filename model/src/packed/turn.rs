//! Sixteen rows of sixteen words to columns: how rows become the strips and tiles of a product.
//!
//! Written word by word this took a quarter as long as the product itself; AVX-512 does it in registers, in four rounds of
//! the perfect shuffle (the first half of 256 words interleaved with the second), each of which turns the place of a word,
//! row and column as eight bits, by one bit.

/// Rows, and words of a row, that are turned at once.
pub(super) const SIDE: usize = 16;

pub(super) type Square = [[u32; SIDE]; SIDE];

/// Word c of row r becomes word r of row c.
#[inline(always)]
#[expect(clippy::inline_always, reason = "called for every 256 words")]
pub(super) fn turned(square: &Square) -> Square {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512f") {
        #[expect(unsafe_code, reason = "compiled for a processor feature")]
        // SAFETY: the processor has the feature, as just found.
        return unsafe { x86::turned(square) };
    }
    by_words(square)
}

#[inline(always)]
#[expect(clippy::inline_always, reason = "see turned")]
fn by_words(square: &Square) -> Square {
    std::array::from_fn(|c| std::array::from_fn(|r| square[r][c]))
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{__m512i, _mm512_permutex2var_epi32};

    use super::{SIDE, Square};

    /// Where each word of an interleaved pair of rows comes from: from 16 on the second row's.
    const fn interleave(first: u32) -> [u32; SIDE] {
        let (mut from, mut i) = ([0; SIDE], 0);
        while i < SIDE {
            from[i] = first + (i / 2) as u32 + if i % 2 == 0 { 0 } else { SIDE as u32 };
            i += 1;
        }
        from
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) fn turned(square: &Square) -> Square {
        let mut rows: [__m512i; SIDE] = std::array::from_fn(|r| vector(square[r]));
        for _ in 0..SIDE.ilog2() {
            rows = shuffled(&rows);
        }
        std::array::from_fn(|c| words(rows[c]))
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn shuffled(rows: &[__m512i; SIDE]) -> [__m512i; SIDE] {
        let halves = [vector(interleave(0)), vector(interleave(SIDE as u32 / 2))];
        let mut out = *rows;
        for i in 0..SIDE {
            out[i] = _mm512_permutex2var_epi32(rows[i / 2], halves[i % 2], rows[i / 2 + SIDE / 2]);
        }
        out
    }

    #[inline(always)]
    #[expect(clippy::inline_always, reason = "no code of its own")]
    fn vector(words: [u32; SIDE]) -> __m512i {
        #[expect(unsafe_code, reason = "the language has no other conversion")]
        // SAFETY: both are 64 bytes without an invalid value.
        unsafe {
            std::mem::transmute::<[u32; SIDE], __m512i>(words)
        }
    }

    #[inline(always)]
    #[expect(clippy::inline_always, reason = "no code of its own")]
    fn words(vector: __m512i) -> [u32; SIDE] {
        #[expect(unsafe_code, reason = "the language has no other conversion")]
        // SAFETY: both are 64 bytes without an invalid value.
        unsafe {
            std::mem::transmute::<__m512i, [u32; SIDE]>(vector)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_goes_to_the_place_that_its_own_row_and_column_name() {
        let square: Square = std::array::from_fn(|r| std::array::from_fn(|c| (r * SIDE + c) as u32));
        let columns: Square = std::array::from_fn(|c| std::array::from_fn(|r| (r * SIDE + c) as u32));
        assert_eq!(turned(&square), columns);
        assert_eq!(by_words(&square), columns);
    }
}
