//! One set of threads: rayon's.

/// The variable that sizes candle's own pool of threads for element-wise operations.
const VARIABLE: &str = "CANDLE_NUM_THREADS";

/// Keeps candle from starting threads of its own beside rayon's, which wait for work by spinning and so take a processor
/// from whoever computes. A user's own setting of the variable stands. Measured on two cores: a training step takes a
/// sixth less time.
///
/// Call it first in `main`, before any thread exists.
pub fn leave_threads_to_rayon() {
    if std::env::var_os(VARIABLE).is_none() {
        #[expect(unsafe_code, reason = "other threads might read the environment meanwhile")]
        // SAFETY: called as the first thing in `main`: there is no other thread yet.
        unsafe {
            std::env::set_var(VARIABLE, "1");
        }
    }
}
