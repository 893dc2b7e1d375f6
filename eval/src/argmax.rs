//! The one greedy choice: argmax over a row of logits, the first maximum wins, NaN is an error.
//!
//! Plain and speculative decoding both choose here, so that a tie can never be broken differently by the two.
//! The scan runs on the host: device argmax kernels differ in how they break ties and hide NaN.

use anyhow::{Result, ensure};
use candle_core::{DType, Tensor};

/// The greedy choice of every row of `logits` [rows, V].
///
/// # Errors
/// When the tensor is not a non-empty matrix, or a row holds a NaN (the row is named).
pub fn argmax_rows(logits: &Tensor) -> Result<Vec<u32>> {
    let (rows, vocab) = logits.dims2()?;
    ensure!(vocab > 0, "argmax of logits [{rows}, 0]: a row has no entry");
    let values = logits.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
    let choice = |(row, values): (usize, &[f32])| match first_maximum(values) {
        Some(index) => Ok(index as u32),
        None => anyhow::bail!("logits row {row} of {rows} holds a NaN: the target's forward pass is broken"),
    };
    values.chunks_exact(vocab).enumerate().map(choice).collect()
}

/// The two largest logits of the last row: the choice, its logit, and how far the runner-up lies below it.
///
/// # Errors
/// As [`argmax_rows`]; a vocabulary of one entry has no runner-up and is refused.
pub fn top_two(logits: &Tensor) -> Result<TopTwo> {
    let (rows, vocab) = logits.dims2()?;
    ensure!(
        rows > 0 && vocab > 1,
        "top two of logits [{rows}, {vocab}]: needs a row of two entries"
    );
    let last = logits.narrow(0, rows - 1, 1)?;
    let first = argmax_rows(&last)?[0];
    let mut values = last.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
    let best = values[first as usize];
    values[first as usize] = f32::NEG_INFINITY;
    let Some(second) = first_maximum(&values) else {
        anyhow::bail!("top two: the row without its maximum holds a NaN")
    };
    Ok(TopTwo {
        first,
        second: second as u32,
        margin: best - values[second],
    })
}

/// The best and second-best entry of one row of logits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TopTwo {
    /// The greedy choice.
    pub first: u32,
    /// The runner-up.
    pub second: u32,
    /// Logit of `first` minus logit of `second`, >= 0.
    pub margin: f32,
}

/// Index of the first maximum, or nothing when a NaN is present or the slice is empty.
pub fn first_maximum(values: &[f32]) -> Option<usize> {
    // Two passes that the compiler vectorises beat one that carries an index: V is a quarter of a million.
    let mut maximum = f32::NEG_INFINITY;
    let mut nan = false;
    for &value in values {
        maximum = if value > maximum { value } else { maximum };
        nan |= value.is_nan();
    }
    if nan {
        return None;
    }
    values.iter().position(|&value| value >= maximum)
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    fn rows(values: &[[f32; 4]]) -> Tensor {
        Tensor::from_slice(values.as_flattened(), (values.len(), 4), &Device::Cpu).unwrap()
    }

    #[test]
    fn the_first_of_equal_maxima_wins() {
        let logits = rows(&[
            [1., 3., 3., 0.],
            [5., 5., 5., 5.],
            [f32::NEG_INFINITY; 4],
            [-2., -1., -3., -1.],
        ]);
        assert_eq!(argmax_rows(&logits).unwrap(), [1, 0, 0, 1]);
    }

    #[test]
    fn a_nan_is_an_error_that_names_its_row() {
        let error = argmax_rows(&rows(&[[0., 1., 2., 3.], [0., f32::NAN, 2., 9.]])).unwrap_err();
        assert!(error.to_string().contains("row 1 of 2"), "{error}");
    }

    #[test]
    fn the_margin_is_the_gap_to_the_runner_up() {
        let top = top_two(&rows(&[[9., 9., 9., 9.], [1., 4., 3.5, 0.]])).unwrap();
        assert_eq!((top.first, top.second), (1, 2));
        assert!((top.margin - 0.5).abs() < 1e-7);
        let tie = top_two(&rows(&[[2., 7., 7., 0.]])).unwrap();
        assert_eq!((tie.first, tie.second, tie.margin), (1, 2, 0.));
    }

    #[test]
    fn an_empty_row_is_refused() {
        let empty = Tensor::zeros((2, 0), DType::F32, &Device::Cpu).unwrap();
        assert!(argmax_rows(&empty).is_err());
    }
}
