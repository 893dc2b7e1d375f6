//! Keeps the thread pool awake while a text is decoded.
//!
//! A decode step is a hundred parallel products of ten to fifty microseconds each, and between two of them the pool's
//! threads fall asleep: waking one costs fifty microseconds. So for the length of a text every other thread polls for
//! work instead, which hands a piece over in about one. The price is that all threads are busy while a text is decoded.
//!
//! Why this cannot hang: a thread polls on top of whatever it was doing, which then waits for the end of the text. So the
//! text must never wait for something underneath. It does not, because polling begins only before the text does
//! ([`Watch::open`]), when no piece of it exists yet, and only one text at a time has threads polling ([`HELD`]).

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// How long a text waits for the other threads to come; those that are busy with something else go on with it.
const PATIENCE: Duration = Duration::from_millis(10);
/// Fruitless polls after which a polling thread offers its core to other programs.
const POLLS: u32 = 64;

/// Whether some text has threads polling for it.
static HELD: AtomicBool = AtomicBool::new(false);
/// Whether all other threads are polling now.
static AWAKE: AtomicBool = AtomicBool::new(false);

/// Whether handing work to another thread is cheap now. A hint only: results do not depend on it.
pub(crate) fn awake() -> bool {
    AWAKE.load(Ordering::Relaxed)
}

/// Runs `work` inside the thread pool while the pool's other threads poll for pieces of it.
///
/// Several at once are allowed; the first has the threads polling, the others run as in a plain [`rayon::scope`].
pub fn with_threads_awake<R: Send>(work: impl FnOnce() -> R + Send) -> R {
    let watch = Watch {
        open: AtomicBool::new(true),
        ended: AtomicBool::new(false),
        came: AtomicUsize::new(0),
    };
    rayon::scope(|scope| {
        let others = rayon::current_num_threads() - 1;
        if others == 0 || HELD.swap(true, Ordering::AcqRel) {
            return work();
        }
        let end = End(&watch);
        scope.spawn_broadcast(|_, _| watch.poll());
        let start = Instant::now();
        while watch.came.load(Ordering::Acquire) < others && start.elapsed() < PATIENCE {
            std::thread::yield_now();
        }
        // This thread's own share of the broadcast comes up in the middle of the text and finds it closed.
        watch.open.store(false, Ordering::Release);
        AWAKE.store(watch.came.load(Ordering::Acquire) >= others, Ordering::Relaxed);
        let result = work();
        drop(end);
        result
    })
}

/// One text, as the threads that poll for it see it.
struct Watch {
    /// Whether the text has yet to begin.
    open: AtomicBool,
    ended: AtomicBool,
    /// Threads that poll.
    came: AtomicUsize,
}

impl Watch {
    fn poll(&self) {
        if !self.open.load(Ordering::Acquire) {
            return;
        }
        self.came.fetch_add(1, Ordering::AcqRel);
        let mut fruitless = 0;
        while !self.ended.load(Ordering::Acquire) {
            if rayon::yield_now() == Some(rayon::Yield::Executed) {
                fruitless = 0;
                continue;
            }
            fruitless += 1;
            if fruitless % POLLS == 0 {
                std::thread::yield_now();
            } else {
                std::hint::spin_loop();
            }
        }
    }
}

/// Sends the polling threads home, also when the text panics.
struct End<'w>(&'w Watch);

impl Drop for End<'_> {
    fn drop(&mut self) {
        AWAKE.store(false, Ordering::Relaxed);
        self.0.open.store(false, Ordering::Release);
        self.0.ended.store(true, Ordering::Release);
        HELD.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rayon::prelude::*;

    fn sum(depth: usize) -> usize {
        if depth == 0 {
            return (0..64usize).into_par_iter().with_max_len(3).map(|i| i % 3).sum();
        }
        let (a, b) = rayon::join(|| sum(depth - 1), || sum(depth - 1));
        a + b
    }

    #[test]
    fn nested_joins_end_alone_and_side_by_side_for_every_size_of_pool() {
        for threads in 1..=5 {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            for _ in 0..20 {
                assert_eq!(pool.install(|| with_threads_awake(|| sum(5))), 63 * 32);
            }
            let inside: Vec<usize> =
                pool.install(|| (0..30).into_par_iter().map(|_| with_threads_awake(|| sum(3))).collect());
            assert_eq!(inside, [63 * 8; 30]);
            std::thread::scope(|scope| {
                for _ in 0..4 {
                    scope.spawn(|| {
                        for _ in 0..10 {
                            assert_eq!(pool.install(|| with_threads_awake(|| sum(4))), 63 * 16);
                        }
                    });
                }
            });
        }
    }

    #[test]
    fn a_panic_sends_the_threads_home() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
        for _ in 0..3 {
            let text = || pool.install(|| with_threads_awake(|| panic!("in the text")));
            assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(text)).is_err());
            assert_eq!(pool.broadcast(|_| 1).len(), 3);
            assert_eq!(pool.install(|| with_threads_awake(|| sum(3))), 63 * 8);
        }
    }
}
