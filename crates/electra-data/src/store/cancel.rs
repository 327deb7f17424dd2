//! A signal that cancels requests to stores when a run ends or its caller is interrupted.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

use crate::error::{Error, Result};

/// Interval at which a caller is checked for interruption.
const ATTEND_INTERVAL: Duration = Duration::from_millis(50);
/// The stack size of a main thread, which the work may expect.
const STACK_BYTES: usize = 8 << 20;

thread_local! {
    static CALL: RefCell<Option<Arc<Cancel>>> = const { RefCell::new(None) };
}

/// Cancels all requests that have a clone of it. The end of the call that created it does so, too.
#[derive(Clone, Debug)]
pub(crate) struct Cancel {
    raised: Arc<AtomicBool>,
    call: Option<Arc<Cancel>>,
}

impl Default for Cancel {
    fn default() -> Self {
        Self { raised: Arc::default(), call: CALL.with_borrow(Clone::clone) }
    }
}

impl Cancel {
    pub fn raise(&self) {
        self.raised.store(true, Ordering::Release);
    }

    pub fn is_raised(&self) -> bool {
        self.raised.load(Ordering::Acquire) || self.call.as_ref().is_some_and(|call| call.is_raised())
    }

    /// Runs `work` on another thread on behalf of the call that created this.
    pub fn carry<T>(&self, work: impl FnOnce() -> T) -> T {
        run_for(self.call.clone(), work)
    }

    /// Runs `work` as a call that this cancels, with all its requests.
    pub fn cover<T>(&self, work: impl FnOnce() -> T) -> T {
        run_for(Some(Arc::new(self.clone())), work)
    }
}

fn run_for<T>(call: Option<Arc<Cancel>>, work: impl FnOnce() -> T) -> T {
    struct Restore(Option<Arc<Cancel>>);
    impl Drop for Restore {
        fn drop(&mut self) {
            CALL.set(self.0.take());
        }
    }
    let _restore = Restore(CALL.replace(call));
    work()
}

/// Runs `work` on a separate thread. Meanwhile, calls `attend` on this thread with every value that the work sends,
/// or at least every 50 ms; its first error cancels all requests to stores and becomes the result.
pub fn attended<T: Send, V: Send, E>(
    work: impl FnOnce(Sender<V>) -> Result<T> + Send,
    mut attend: impl FnMut(Option<V>) -> std::result::Result<(), E>,
) -> std::result::Result<Result<T>, E> {
    let call = Cancel::default();
    std::thread::scope(|scope| {
        // The channel closes when the work ends, even by a panic.
        let (sender, events) = channel();
        let builder = std::thread::Builder::new().name("electra-call".into()).stack_size(STACK_BYTES);
        let thread = match builder.spawn_scoped(scope, || call.cover(move || work(sender))) {
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
                call.raise();
                interruption = Some(error);
            }
        }
        let outcome = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        interruption.map_or(Ok(outcome), Err)
    })
}
