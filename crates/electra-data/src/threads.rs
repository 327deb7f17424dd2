//! The thread pool of this crate's parallel iterators, one per process, and helpers for shared values and panics.
//!
//! rayon's global pool does not survive a fork: its threads stay in the parent, and a child that gives it
//! work waits forever. So nothing in this crate runs on the global pool.

use std::any::Any;
use std::cell::Cell;
use std::fmt::Display;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::error::{Error, Result};

static POOL: PerProcess<ThreadPool> = PerProcess::new();

/// Runs `work` on all cores: its parallel iterators use the pool of this process.
pub(crate) fn on_all_cores<T: Send>(work: impl FnOnce() -> T + Send) -> Result<T> {
    let build = || ThreadPoolBuilder::new().thread_name(|index| format!("electra-{index}")).build();
    Ok(POOL.get(build)?.install(work))
}

/// Threads that each process starts on first use. Not a lock, because a fork could leave it held in the child.
pub(crate) struct PerProcess<T>(AtomicPtr<(u32, T)>);

impl<T: Send + Sync> PerProcess<T> {
    pub const fn new() -> Self {
        Self(AtomicPtr::new(std::ptr::null_mut()))
    }

    pub fn get<E: Display>(&'static self, start: impl Fn() -> Result<T, E>) -> Result<&'static T> {
        let process = std::process::id();
        loop {
            let known = self.0.load(Ordering::Acquire);
            // SAFETY: the pointer is null or from a leaked box, which is never changed or freed.
            if let Some((owner, threads)) = unsafe { known.as_ref() }
                && *owner == process
            {
                return Ok(threads);
            }
            let new = start().map_err(|error| Error::Input(format!("cannot start threads: {error}")))?;
            let started = Box::into_raw(Box::new((process, new)));
            // A child leaks the parent's threads: dropping them would wait for threads that do not exist in the child.
            if self.0.compare_exchange(known, started, Ordering::AcqRel, Ordering::Acquire).is_err() {
                // SAFETY: `started` is from a box and was not published, because another thread was faster.
                drop(unsafe { Box::from_raw(started) });
            }
        }
    }
}

/// Locks a mutex, even if a thread panicked while holding it: no value here is left half-changed.
pub(crate) fn lock<T>(value: &Mutex<T>) -> MutexGuard<'_, T> {
    value.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn nonce() -> u64 {
    RandomState::new().build_hasher().finish()
}

thread_local! {
    static CATCHES: Cell<bool> = const { Cell::new(false) };
}

/// Runs code that may panic; a panic prints nothing, and its message is returned.
///
/// Values that a panic may leave half-changed must not be used afterwards.
pub(crate) fn caught<T>(run: impl FnOnce() -> T) -> Result<T, String> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let report = take_hook();
        set_hook(Box::new(move |panic| {
            if !CATCHES.get() {
                report(panic);
            }
        }));
    });
    let outer = CATCHES.replace(true);
    let result = catch_unwind(AssertUnwindSafe(run));
    CATCHES.set(outer);
    result.map_err(|panic| message(&*panic))
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("without a message").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panic_messages_are_returned() {
        assert_eq!(caught(|| 1), Ok(1));
        let (number, nested) = (2, || caught(|| caught(|| panic!("inner")).unwrap_err()));
        assert_eq!(caught(|| panic!("number {number}")).err(), Some::<String>("number 2".to_owned()));
        assert_eq!(nested(), Ok("inner".to_owned()));
    }
}
