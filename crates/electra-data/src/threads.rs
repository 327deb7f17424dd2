//! The thread pool of this crate's parallel iterators, one per process.
//!
//! rayon's global pool does not survive a fork: its threads stay in the parent, and a child that gives it
//! work waits forever. So nothing in this crate runs on the global pool.

use std::sync::atomic::{AtomicPtr, Ordering};

use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::error::{Error, Result};

/// Not behind a lock, because a fork could leave the lock held in the child.
static POOL: AtomicPtr<ProcessPool> = AtomicPtr::new(std::ptr::null_mut());

/// Never freed once it is in `POOL`.
struct ProcessPool {
    process: u32,
    threads: ThreadPool,
}

/// Runs `work` on all cores: its parallel iterators use the pool of this process.
pub(crate) fn on_all_cores<T: Send>(work: impl FnOnce() -> T + Send) -> Result<T> {
    Ok(pool()?.threads.install(work))
}

fn pool() -> Result<&'static ProcessPool> {
    let process = std::process::id();
    loop {
        let known = POOL.load(Ordering::Acquire);
        // SAFETY: the pointer is null or from a leaked box, which is never changed or freed.
        if let Some(pool) = unsafe { known.as_ref() }
            && pool.process == process
        {
            return Ok(pool);
        }
        let threads = ThreadPoolBuilder::new().thread_name(|index| format!("electra-{index}")).build();
        let threads = threads.map_err(|error| Error::Input(format!("cannot start threads: {error}")))?;
        let ours = Box::into_raw(Box::new(ProcessPool { process, threads }));
        // In a child this leaks the parent's pool: dropping it would wait for threads that do not exist.
        if POOL.compare_exchange(known, ours, Ordering::AcqRel, Ordering::Acquire).is_err() {
            // SAFETY: `ours` is from a box and was not published, because another thread was faster.
            drop(unsafe { Box::from_raw(ours) });
        }
    }
}
