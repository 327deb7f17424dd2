"""A pytest plugin that counts the processes that tests start. A process takes 0.1 s, or 3 s if it imports torch.

A test that starts a process needs the marker `process`. `make check` skips these tests, and fails if another test
starts a process. All tests without the marker `slow` together start at most `MAX_PROCESSES`.
"""

import multiprocessing.process
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

MAX_PROCESSES = 100
# Fixtures that start a process in the first test that uses them.
FIXTURES = {"server", "exact_run", "s3"}
EVENTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"}
BEFORE = pytest.StashKey[int]()

# Processes that this process started, and processes that all workers started for tests that are not slow.
counts = {"started": 0, "not slow": 0}


def pytest_configure() -> None:
    this = os.getpid()
    spawn = multiprocessing.process.BaseProcess.start

    def count(event: str, _: Any) -> None:
        if event in EVENTS and os.getpid() == this:
            counts["started"] += 1

    def start(process: multiprocessing.process.BaseProcess) -> None:
        before = counts["started"]
        spawn(process)
        counts["started"] = before + 1  # a fork is an audit event, a spawn is none

    sys.addaudithook(count)
    multiprocessing.process.BaseProcess.start = start  # type: ignore[method-assign]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker("process")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    item.stash[BEFORE] = counts["started"]
    result = yield
    if not item.get_closest_marker("slow"):
        counts["not slow"] += counts["started"] - item.stash[BEFORE]
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[Any]:
    result = yield
    if counts["started"] > item.stash[BEFORE] and "not process" in item.config.option.markexpr:
        pytest.fail(
            "starts a process: call the function instead, or mark the test with pytest.mark.process", pytrace=False
        )
    return result


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    counts["not slow"] += getattr(node, "workeroutput", {}).get("processes", 0)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["processes"] = counts["not slow"]
    elif counts["not slow"] > MAX_PROCESSES:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(
        f"child processes of tests that are not slow: {counts['not slow']}, at most {MAX_PROCESSES}"
    )
