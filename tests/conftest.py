"""For all tests: threads, kernels, Triton's interpreter without a GPU, how files go to workers, and a virtual clock.

Torch is not imported here: the tests of the gateway do without it.
"""

from __future__ import annotations

import asyncio
import os
import selectors
import sys
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from xdist.scheduler import LoadFileScheduling

import tests.one_thread  # noqa: F401 - before the engine is imported
from specdec.process.imports import large_imports

if TYPE_CHECKING:
    from engine.native.library import NativeLibrary

# Triton reads it when a kernel is defined. Torch would know whether there is a GPU, but takes seconds to import.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


#: Where services are forks of one process, which takes seconds to start (``tests/e2e/fork_server.py``).
FORKING = ("tests/e2e/", "tests/reliability/", "tests/benchmarks/test_memory.py", "tests/tandem/bench/test_bench.py")

#: Where no file takes more than ten seconds.
SHORT = ("tests/gateway/", "tests/specdec/")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported for the tests stays: no later collection of garbage looks at it."""
    with large_imports():
        return (yield)


def pytest_pycollect_makemodule(module_path: Path) -> None:
    """Hypothesis gives an example 200 ms of real time, which a busy machine takes away; for files that use it."""
    if "hypothesis" in module_path.read_text():
        from hypothesis import settings

        settings.register_profile("any machine", deadline=None)
        settings.load_profile("any machine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest comes first and files of few seconds last, so that both workers end at the same time."""
    items.sort(key=lambda item: item.nodeid.startswith(SHORT) - item.nodeid.startswith(FORKING))


class _FileScheduling(LoadFileScheduling):
    """A file's tests go to one worker, and so do all files that share servers or the process that is forked."""

    def _split_scope(self, nodeid: str) -> str:
        return FORKING[0] if nodeid.startswith(FORKING) else super()._split_scope(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _FileScheduling:
    return _FileScheduling(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Workers share the cores: a thread each, once a test has imported torch."""
    torch = sys.modules.get("torch")
    if torch is not None and "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def kernels() -> NativeLibrary:
    """The CPU kernels, compiled."""
    from engine.native.library import load

    loaded = load()
    assert loaded is not None, "the kernels did not compile: the tests need a C++ compiler"
    return loaded


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch computes on one thread."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
async def virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes only where every task sleeps, and then at once: sleeps are exact, however busy the machine is.

    For tests whose tasks wait for each other and for timers alone, not for threads, sockets or processes.
    """
    loop: Any = asyncio.get_running_loop()
    look, now_s, thread = selectors.DefaultSelector.select, time.monotonic(), threading.get_ident()

    def select(self: selectors.DefaultSelector, timeout_s: float | None = None) -> Any:
        nonlocal now_s
        if threading.get_ident() != thread:
            return look(self, timeout_s)
        events = look(self, timeout_s and 0)
        if not events:
            now_s += timeout_s or 0
        return events

    def now() -> float:
        return now_s

    def now_ns() -> int:
        return int(now_s * 1e9)

    monkeypatch.setattr(selectors.DefaultSelector, "select", select)
    monkeypatch.setattr(loop, "time", now)
    for name, clock in (
        ("monotonic", now),
        ("perf_counter", now),
        ("monotonic_ns", now_ns),
        ("perf_counter_ns", now_ns),
    ):
        monkeypatch.setattr(time, name, clock)
