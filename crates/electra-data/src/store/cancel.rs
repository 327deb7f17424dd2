//! A signal that ends waiting for a store.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

/// Ends all requests that were given a clone of it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Cancel(Arc<Signal>);

#[derive(Debug, Default)]
struct Signal {
    raised: AtomicBool,
    lock: Mutex<()>,
    changed: Condvar,
}

impl Cancel {
    /// Ends the requests.
    pub fn raise(&self) {
        let _held = self.0.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.0.raised.store(true, Ordering::Release);
        self.0.changed.notify_all();
    }

    /// Whether the requests are to end.
    pub fn is_raised(&self) -> bool {
        self.0.raised.load(Ordering::Acquire)
    }

    /// Waits, at most until it is raised.
    pub fn wait(&self, time: Duration) {
        let held = self.0.lock.lock().unwrap_or_else(PoisonError::into_inner);
        let _held = self.0.changed.wait_timeout_while(held, time, |()| !self.is_raised());
    }
}
