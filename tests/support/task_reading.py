"""Calls of the readers of fine-tuning, and what their results hold."""

import contextlib

import pytest

from electra_fast.errors import InputError
from electra_fast.finetuning.tasks import TASK_TYPES


def read(task, train, dev=None, test=None, **options):
    """A task's data; without validation examples of its own, they are the training examples."""
    return TASK_TYPES[task].read(train, dev or train, test, **options)


def read_divided(task, train, **options):
    """A task's data, with validation examples that are set aside."""
    return TASK_TYPES[task].read(train, None, None, **options)


def refusal(function, *args, error=InputError, **options):
    """The line with which a call ends."""
    with pytest.raises(error) as caught:
        function(*args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@contextlib.contextmanager
def refused(message):
    """A block that ends with a line that has this part."""
    with pytest.raises(InputError) as caught:
        yield
    assert message in str(caught.value) and "\n" not in str(caught.value)


def words_of(split):
    """The words of each sentence."""
    return [[text[a:b] for a, b in words] for (text,), words in zip(split.texts, split.words, strict=True)]


def tagged(data, split):
    """Each sentence as `word/TAG word/TAG`."""
    names = ([data.task.labels[tag] for tag in target] for target in split.targets)
    sentences = zip(words_of(split), names, strict=True)
    return [" ".join(map("/".join, zip(words, tags, strict=True))) for words, tags in sentences]
