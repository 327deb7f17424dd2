"""A kill in the process of a test: a function that raises KeyboardInterrupt at one of its calls."""

import contextlib
import itertools

import pytest


@contextlib.contextmanager
def killed_at_call(owner, name, number, *, after=False):
    """Ends the block before call `number` (from 1) of a function, or `after` it if it happens."""
    original = getattr(owner, name)
    calls = itertools.count(1)

    def counted(*arguments):
        is_last = next(calls) == number
        if is_last and not after:
            raise KeyboardInterrupt
        result = original(*arguments)
        if is_last:
            raise KeyboardInterrupt
        return result

    killed = contextlib.suppress(KeyboardInterrupt) if after else pytest.raises(KeyboardInterrupt)
    with pytest.MonkeyPatch.context() as patch, killed:
        patch.setattr(owner, name, counted)
        yield
