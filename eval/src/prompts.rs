//! The prompts of a run as the measuring loops see them: conversations whose next turn may depend on the answers.

use anyhow::Result;

use crate::report::Piece;

/// Prompts to measure with.
pub trait Prompts: Sync {
    /// How many conversations there are.
    fn len(&self) -> usize;

    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What is known of conversation `index`.
    fn about(&self, index: usize) -> About;

    /// Token ids of the prompt after `answers` (token ids of earlier turns' texts); nothing when the conversation is over.
    ///
    /// # Errors
    /// When the template refuses the conversation.
    fn turn(&self, index: usize, answers: &[Vec<u32>]) -> Result<Option<Vec<u32>>>;

    /// The text of each token, for people; nothing when the prompts know no tokenizer.
    fn pieces(&self, _tokens: &[u32]) -> Option<Vec<String>> {
        None
    }
}

/// What is known of a conversation besides its text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct About {
    /// `file:line` or the data set's own id.
    pub id: String,
    /// Domain or category.
    pub domain: Option<String>,
    /// The thinking switch it is rendered with, where both are measured.
    pub thinking: Option<bool>,
}

impl Prompts for [Vec<u32>] {
    fn len(&self) -> usize {
        <[Vec<u32>]>::len(self)
    }

    fn about(&self, index: usize) -> About {
        About {
            id: format!("prompt {}", index + 1),
            ..About::default()
        }
    }

    fn turn(&self, index: usize, answers: &[Vec<u32>]) -> Result<Option<Vec<u32>>> {
        Ok(answers.is_empty().then(|| self[index].clone()))
    }
}

impl Prompts for Vec<Vec<u32>> {
    fn len(&self) -> usize {
        Vec::len(self)
    }

    fn about(&self, index: usize) -> About {
        self.as_slice().about(index)
    }

    fn turn(&self, index: usize, answers: &[Vec<u32>]) -> Result<Option<Vec<u32>>> {
        self.as_slice().turn(index, answers)
    }
}

/// Every token's own text out of a tokenizer's `decode`. Characters that span tokens belong to the last of them.
pub(crate) fn pieces(tokens: &[u32], decode: &dyn Fn(&[u32]) -> Result<String>) -> Result<Vec<String>> {
    let (mut open, mut texts) = (Vec::new(), Vec::with_capacity(tokens.len()));
    for &token in tokens {
        open.push(token);
        let text = decode(&open)?;
        // the decoder writes U+FFFD for bytes that are not a character yet; four tokens always are one
        if text.ends_with('\u{FFFD}') && open.len() < 4 {
            texts.push(String::new());
        } else {
            texts.push(text);
            open.clear();
        }
    }
    Ok(texts)
}

/// Joins texts with what wrote each token: the prefill, then round by round.
pub(crate) fn attribute(texts: Vec<String>, accepted: &[usize], drafted: &[usize]) -> Vec<Piece> {
    use crate::report::PieceSource::{Accepted, Bonus, Corrected, Prefill};
    let mut sources = vec![Prefill];
    for (&accepted, &drafted) in accepted.iter().zip(drafted) {
        sources.extend(std::iter::repeat_n(Accepted, accepted));
        sources.push(if accepted < drafted { Corrected } else { Bonus });
    }
    texts
        .into_iter()
        .zip(sources)
        .map(|(text, source)| Piece { text, source })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::PieceSource::{Accepted, Bonus, Corrected, Prefill};

    #[test]
    fn a_character_of_several_tokens_is_shown_once() {
        let bytes = "aé€z".as_bytes();
        let decode = |ids: &[u32]| {
            let raw: Vec<u8> = ids.iter().map(|&id| bytes[id as usize]).collect();
            Ok(String::from_utf8_lossy(&raw).into_owned())
        };
        let ids: Vec<u32> = (0..bytes.len() as u32).collect();
        let texts = pieces(&ids, &decode).unwrap();
        assert_eq!(texts.len(), ids.len());
        assert_eq!(texts.concat(), "aé€z");
    }

    #[test]
    fn every_token_has_one_writer() {
        let texts: Vec<String> = "abcdefg".chars().map(String::from).collect();
        let pieces = attribute(texts, &[2, 1, 0], &[2, 3, 0]);
        let sources: Vec<_> = pieces.iter().map(|piece| piece.source).collect();
        assert_eq!(
            sources,
            [Prefill, Accepted, Accepted, Bonus, Accepted, Corrected, Bonus]
        );
    }
}
