//! Panics of libraries on files that they do not expect, as errors.

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Once;

thread_local! {
    static CATCHES: Cell<bool> = const { Cell::new(false) };
}

/// Runs what may panic; if it does, nothing is printed, and its message is returned.
///
/// What a panic leaves half-changed must not be used afterwards.
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
    fn messages_are_returned() {
        assert_eq!(caught(|| 1), Ok(1));
        let (number, nested) = (2, || caught(|| caught(|| panic!("inner")).unwrap_err()));
        assert_eq!(caught(|| panic!("number {number}")).err(), Some::<String>("number 2".to_owned()));
        assert_eq!(nested(), Ok("inner".to_owned()));
    }
}
