//! Freed memory kept by the program, where the C library's habit is to return it.

/// Has the allocator keep what is freed, on Linux with glibc; elsewhere nothing.
///
/// A training step frees and takes again hundreds of megabyte-sized tensors. Each returned to the system costs page faults
/// when it comes back and, since other threads may have seen it, an interrupt of their processors: measured, a sixth of a
/// small step. With one arena for all threads a tensor that one has freed serves the next. Memory in use peaks where it did,
/// but is not handed back before the program ends, so this is for programs that train.
///
/// Call it first thing: other threads may not be allocating yet.
pub fn keep_freed_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        /// Larger than any tensor that comes and goes.
        const NEVER: libc::c_int = 1 << 30;
        #[expect(unsafe_code, reason = "the C library's own switch")]
        // SAFETY: mallopt only sets tuning values of the allocator; a value that it refuses changes nothing.
        unsafe {
            libc::mallopt(libc::M_ARENA_MAX, 1);
            libc::mallopt(libc::M_MMAP_THRESHOLD, NEVER);
            libc::mallopt(libc::M_TRIM_THRESHOLD, libc::c_int::MAX);
        }
    }
}
