"""For all tests: threads, kernels, Triton's interpreter without a GPU, how files go to workers, and a virtual clock."""

from __future__ import annotations

import asyncio
import os
import selectors
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

from specdec.engine.native.library import NativeLibrary, load

# Workers share the cores: a thread each.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

# Read when a kernel is defined, so it must stand before any import of triton.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Hypothesis gives an example 200 ms of real time, which a busy machine takes away.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")


class _FileScheduling(LoadFileScheduling):
    """A file's tests go to one worker, and so do all files of tests/e2e: they share servers."""

    def _split_scope(self, nodeid: str) -> str:
        return "tests/e2e" if nodeid.startswith("tests/e2e/") else super()._split_scope(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _FileScheduling:
    return _FileScheduling(config, log)


@pytest.fixture(scope="session")
def kernels() -> NativeLibrary:
    """The CPU kernels, compiled."""
    loaded = load()
    assert loaded is not None, "the kernels did not compile: the tests need a C++ compiler"
    return loaded


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch computes on one thread."""
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
