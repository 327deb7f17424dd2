"""Calls of the readers of fine-tuning data, and views of their results."""

import contextlib

import pytest

from electra_fast.errors import InputError
from electra_fast.finetuning.tasks import TASK_TYPES


def read(task, train, dev=None, test=None, **options):
    """Returns a task's data. Without `dev`, the training examples are also the validation set."""
    return TASK_TYPES[task].read(train, dev or train, test, **options)


def read_divided(task, train, **options):
    """Returns a task's data, with a validation set split from the training examples."""
    return TASK_TYPES[task].read(train, None, None, **options)


def refusal(function, *args, error=InputError, **options):
    """Returns the message of the error that a call raises, which must be one line."""
    with pytest.raises(error) as caught:
        function(*args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@contextlib.contextmanager
def refused(message):
    """Asserts that a block raises an InputError with this text, in one line."""
    with pytest.raises(InputError) as caught:
        yield
    assert message in str(caught.value) and "\n" not in str(caught.value)


def words_of(split):
    """Returns the words of each sentence."""
    return [[text[a:b] for a, b in words] for (text,), words in zip(split.texts, split.words, strict=True)]


def tagged(data, split):
    """Returns each sentence as `word/TAG word/TAG`."""
    names = ([data.task.labels[tag] for tag in target] for target in split.targets)
    sentences = zip(words_of(split), names, strict=True)
    return [" ".join(map("/".join, zip(words, tags, strict=True))) for words, tags in sentences]
