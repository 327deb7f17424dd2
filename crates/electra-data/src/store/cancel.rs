//! A signal that ends waiting for a store: of a run that ends, or of a caller that is interrupted.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::error::{Error, Result};

/// How often a caller is asked whether it is interrupted.
const ATTEND_INTERVAL: Duration = Duration::from_millis(50);
/// The stack of a main thread, since the work may come from one.
const STACK_BYTES: usize = 8 << 20;

thread_local! {
    /// What ends the call that this thread works for.
    static CALL: RefCell<Option<Arc<Signal>>> = const { RefCell::new(None) };
}

/// Ends all requests that were given a clone of it. A new one is also raised with the call that it was made in.
#[derive(Clone, Debug)]
pub(crate) struct Cancel {
    signal: Arc<Signal>,
    call: Option<Arc<Signal>>,
}

#[derive(Debug, Default)]
struct Signal {
    raised: AtomicBool,
    lock: Mutex<()>,
    changed: Condvar,
}

impl Signal {
    fn raise(&self) {
        let _held = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.raised.store(true, Ordering::Release);
        self.changed.notify_all();
    }
}

impl Default for Cancel {
    fn default() -> Self {
        Self { signal: Arc::default(), call: CALL.with_borrow(Clone::clone) }
    }
}

impl Cancel {
    /// Ends the requests.
    pub fn raise(&self) {
        self.signal.raise();
    }

    /// Whether the requests are to end.
    pub fn is_raised(&self) -> bool {
        let raised = |signal: &Arc<Signal>| signal.raised.load(Ordering::Acquire);
        raised(&self.signal) || self.call.as_ref().is_some_and(raised)
    }

    /// Waits, at most until it is raised.
    pub fn wait(&self, time: Duration) {
        let held = self.signal.lock.lock().unwrap_or_else(PoisonError::into_inner);
        let _held = self.signal.changed.wait_timeout_while(held, time, |()| !self.is_raised());
    }

    /// Does `work` for the call that this was made in, on another thread.
    pub fn carry<T>(&self, work: impl FnOnce() -> T) -> T {
        struct Restore(Option<Arc<Signal>>);
        impl Drop for Restore {
            fn drop(&mut self) {
                CALL.set(self.0.take());
            }
        }
        let _restore = Restore(CALL.replace(self.call.clone()));
        work()
    }
}

/// Does `work` on a thread of its own. Meanwhile `attend` is called on this one, with what the work sends, and else
/// every 50 ms; its first error ends all waiting for stores and becomes the result.
pub fn attended<T: Send, V: Send, E>(
    work: impl FnOnce(Sender<V>) -> Result<T> + Send,
    mut attend: impl FnMut(Option<V>) -> std::result::Result<(), E>,
) -> std::result::Result<Result<T>, E> {
    let call = Cancel { signal: Arc::default(), call: Some(Arc::default()) };
    std::thread::scope(|scope| {
        // The channel closes when the work is done, even by a panic.
        let (sender, events) = channel();
        let builder = std::thread::Builder::new().name("electra-call".into()).stack_size(STACK_BYTES);
        let thread = match builder.spawn_scoped(scope, || call.carry(move || work(sender))) {
            Ok(thread) => thread,
            Err(error) => return Ok(Err(Error::Input(format!("cannot start threads: {error}")))),
        };
        let mut interruption = None;
        loop {
            let event = match events.recv_timeout(ATTEND_INTERVAL) {
                Ok(event) => Some(event),
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => break,
            };
            if interruption.is_none()
                && let Err(error) = attend(event)
            {
                call.call.iter().for_each(|signal| signal.raise());
                interruption = Some(error);
            }
        }
        let outcome = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        interruption.map_or(Ok(outcome), Err)
    })
}
