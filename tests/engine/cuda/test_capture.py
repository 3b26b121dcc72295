"""Real captures, on torch's CUDA as it is told of here: what fails when, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.cuda import graphs
from engine.cuda.graphs import CudaCapture
from engine.cuda.sync import HostWaits, NotCapturable

DEVICE = torch.device("cuda", 0)


class Stream:
    """Work is done at once."""

    def __init__(self, device: object = None) -> None:
        pass

    def wait_stream(self, other: object) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """The same."""


class Cuda:
    """Torch's module; a capture is invalid after an error of CUDA."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_capturing = self.is_valid = False
        self.num_pools_ended = 0

        def ended(device: int, pool: object) -> None:
            self.num_pools_ended += 1

        for name, value in {
            "Stream": Stream,
            "stream": lambda stream: nullcontext(),
            "current_stream": Stream,
            "CUDAGraph": lambda: self,
            "graph_pool_handle": lambda: (0, 1),
            "mem_get_info": lambda device: (10**9, 10**9),
            "memory_reserved": lambda device: 0,
            "memory_allocated": lambda device: 0,
            "get_device_properties": lambda device: SimpleNamespace(total_memory=10**10),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", ended, raising=False)  # noqa: SLF001
        monkeypatch.setattr(graphs, "NoSync", lambda device_type, **options: NO_SYNC("cpu", **options))

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        """Other threads go on."""
        assert capture_error_mode == "thread_local"
        self.is_capturing = self.is_valid = True

    def capture_end(self) -> None:
        """As torch's."""
        self.is_capturing = False
        if not self.is_valid:
            raise torch.AcceleratorError("CUDA error: operation failed due to a previous error during capture")

    def replay(self) -> None:
        """Nothing is run."""

    def fail(self) -> None:
        """What CUDA forbids in a capture."""
        if self.is_capturing:
            self.is_valid = False
            raise torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing")


NO_SYNC = graphs.NoSync


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


def test_a_function_may_wait_where_it_makes_what_it_keeps(cuda: Cuda) -> None:
    """As rotary frequencies that come to the device at the first pass."""
    kept: list[float] = []
    ran: list[bool] = []

    def run() -> None:
        ran.append(cuda.is_capturing)
        if not kept:
            kept.append(torch.ones(1).item())

    assert CudaCapture(DEVICE)(run) is not None
    assert ran == [False, False, True]
    with pytest.raises(HostWaits):
        CudaCapture(DEVICE)(lambda: torch.ones(1).item())


def test_what_fails_in_a_capture_alone_is_not_capturable(cuda: Cuda) -> None:
    """The allocator serves other work again, and a later capture is made."""
    capture = CudaCapture(DEVICE)
    with pytest.raises(NotCapturable, match="AcceleratorError: CUDA error: operation not permitted"):
        capture(cuda.fail)
    assert cuda.num_pools_ended == 1
    assert capture(lambda: None) is not None
    assert cuda.num_pools_ended == 1


@pytest.mark.parametrize("error", [ValueError("a fault"), torch.OutOfMemoryError("all of it")])
@pytest.mark.parametrize("in_capture", [False, True])
def test_other_errors_are_what_they_are(error: Exception, in_capture: bool, cuda: Cuda) -> None:
    def run() -> None:
        if cuda.is_capturing is in_capture:
            raise error

    wanted: Any = type(error) if not in_capture or isinstance(error, torch.OutOfMemoryError) else NotCapturable
    with pytest.raises(wanted, match=str(error)):
        CudaCapture(DEVICE)(run)
    assert not cuda.is_capturing


@pytest.mark.parametrize("copy", [lambda x: x.to("meta", non_blocking=True), lambda x: x.copy_(x.to("meta"))])
def test_copies_from_the_host_are_not_captured(copy: Callable[[torch.Tensor], object]) -> None:
    """A replay would read the host's memory again; the device here is "meta"."""

    class Pinned(NO_SYNC):  # type: ignore[misc, valid-type]
        def is_pinned(self, tensor: torch.Tensor) -> bool:
            return True

    host = torch.zeros(3)
    with Pinned("meta", captures=True), pytest.raises(NotCapturable, match="which a replay would repeat"):
        copy(host)
