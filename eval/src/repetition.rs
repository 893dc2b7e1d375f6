//! Texts that mostly repeat themselves: their acceptance says little.

/// Longest run of one token, and distinct tokens / tokens (1 for an empty text).
pub(crate) fn repetition(tokens: &[u32]) -> (usize, f64) {
    let longest = tokens.chunk_by(|a, b| a == b).map(<[u32]>::len).max().unwrap_or(0);
    let distinct = tokens.iter().collect::<std::collections::HashSet<_>>().len();
    let ratio = if tokens.is_empty() {
        1.
    } else {
        distinct as f64 / tokens.len() as f64
    };
    (longest, ratio)
}

/// Whether a text of `length` tokens is mostly repetition: a run of 16, or one distinct token in ten from 64 on.
pub(crate) fn is_degenerate(length: usize, longest_run: usize, distinct_ratio: f64) -> bool {
    longest_run >= 16 || (length >= 64 && distinct_ratio < 0.1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_of_one_token_is_degenerate_and_prose_is_not() {
        let (run, ratio) = repetition(&[7; 488]);
        assert_eq!(run, 488);
        assert!(is_degenerate(488, run, ratio));
        let loops: Vec<u32> = (0..200).map(|i| i % 5).collect();
        let (run, ratio) = repetition(&loops);
        assert_eq!(run, 1);
        assert!(is_degenerate(200, run, ratio));
        let prose: Vec<u32> = (0..200).map(|i| i * i % 97).collect();
        let (run, ratio) = repetition(&prose);
        assert!(!is_degenerate(200, run, ratio), "{run} {ratio}");
    }
}
