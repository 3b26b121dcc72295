"""The ranks of one model: who they are, and how they add up, gather and pass on what they compute.

Ranks of one host that compute on its CPU meet in shared memory, others through torch.distributed: gloo between CPUs,
NCCL between GPUs. Sums over CPUs are added in the order of the ranks, so a row's result depends on no other row.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from engine.parallel import shared_memory
from engine.parallel.shared_memory import SharedExchange
from specdec.errors import InvalidRequest, Unavailable

logger = logging.getLogger(__name__)

T = TypeVar("T")
#: A message of rank 0 to the others: int64 [n], its first element is n.
Words = npt.NDArray[np.int64]

#: The variable that names :attr:`Place.store_port`.
STORE_PORT: Final = "TANDEM_STORE_PORT"
#: What a rank adds 1 to when it has come to the store.
PRESENT: Final = "present"
_HOST: Final = "127.0.0.1"
#: Weights are read at different speeds.
_LOAD_TIMEOUT_S: Final = 3600.0
#: Elements of the first part of a message; a longer one has a second. A page: a step of eight sessions with five rows
#: each and 1,000 tokens of context takes 448.
_FIRST_WORDS: Final = 512
#: Of the timeout; so often rank 0 sends a heartbeat to ranks that would take it for lost otherwise.
_HEARTBEAT_SHARE: Final = 0.25
#: Seconds that the processes of other ranks get to end by themselves once rank 0 has told them to.
_STOP_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process stands among the ranks of a model."""

    rank: int
    size: int
    #: Among those of its host.
    local_rank: int
    local_size: int
    #: Where rank 0 listens, on this host, if it started the others.
    store_port: int | None = None

    @classmethod
    def of(cls, environment: Mapping[str, str], size: int) -> Self | None:
        """The place that torchrun's variables name, or those that rank 0 set; None where nobody set them.

        Raises:
            InvalidRequest: they name another number of ranks than ``size``.
        """
        if STORE_PORT in environment:
            rank = int(environment["RANK"])
            return cls(rank, size, rank, size, int(environment[STORE_PORT]))
        if size == 1 or "RANK" not in environment or "WORLD_SIZE" not in environment:
            return None
        rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        if world != size:
            raise InvalidRequest(
                f"tensor_parallel_size is {size} but torchrun has started {world} processes (WORLD_SIZE): make them"
                " equal",
                param="tensor_parallel_size",
            )
        local_rank, local_size = int(environment.get("LOCAL_RANK", 0)), int(environment.get("LOCAL_WORLD_SIZE", 1))
        return cls(rank, size, local_rank, local_size)

    @property
    def on_one_host(self) -> bool:
        """Whether all ranks are on one host."""
        return self.size == self.local_size


def listen() -> TCPStore:
    """A store for the ranks of this host, on a free port of the loopback interface."""
    return TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)


class Ranks:
    """One process's end of the group. All ranks make the same calls in the same order, from one thread."""

    def __init__(
        self,
        place: Place,
        device: torch.device,
        *,
        store: Store | None = None,
        timeout_s: float,
        on_loss: Callable[[str], object] = logger.error,
        end_others: Callable[[float], object] | None = None,
    ) -> None:
        """Meet the other ranks, at ``store``, at the place's port or where torchrun's variables say.

        ``timeout_s``: how long a rank waits for the others once the model is loaded. ``on_loss`` is called, once and on
        any thread, with the reason when the group is lost; every later call raises it. ``end_others`` belongs to a
        rank 0 that has started the others: it gets the seconds that they have left, and returns when they have ended.

        Raises:
            InvalidRequest: GPUs are to be left alone, but are visible.
            Unavailable: they do not come.
        """
        self.place = place
        #: Seconds between two heartbeats.
        self.heartbeat_s = timeout_s * _HEARTBEAT_SHARE
        self._on_loss = on_loss
        self._end_others = end_others
        self._lost: str | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._shared: SharedExchange | None = None
        self._owns_world = not dist.is_initialized()
        if device.type == "cpu" and torch.cuda.is_available():  # transformers would split the model over GPUs
            raise InvalidRequest("ranks on the CPU of a machine with GPUs: set CUDA_VISIBLE_DEVICES=", param="device")
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        try:
            if store is None and place.store_port is not None:
                store = TCPStore(_HOST, place.store_port, is_master=False)
                store.add(PRESENT, 1)
            if self._owns_world:
                where: dict[str, Any] = {"store": store, "rank": place.rank, "world_size": place.size} if store else {}
                dist.init_process_group(backend, timeout=timedelta(seconds=_LOAD_TIMEOUT_S), **where)
            self._group: Any = dist.new_group(timeout=timedelta(seconds=timeout_s), backend=backend)
            self._shared = self._share(timeout_s) if place.on_one_host else None
        except BaseException as error:
            self.close()
            if isinstance(error, RuntimeError | ValueError):
                raise Unavailable(f"rank {place.rank} of {place.size} cannot meet the others: {error}") from error
            raise

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.place.rank == 0

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' tensors; ``x`` may be overwritten."""
        if self._shared is not None and self._shared.knows(x):
            return self._shared.sum(x)
        if x.device.type != "cpu":
            dist.all_reduce(x, group=self._group)
            return x
        total, *others = self.gather(x).float().unbind()
        for part in others:
            total += part
        return total.to(x.dtype)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' tensors, [size, *x.shape]."""
        if self._shared is not None and x.device.type == "cpu":
            return self._shared.gather(x)
        out = x.new_empty((self.place.size, *x.shape))
        if x.device.type != "cpu":
            dist.all_gather_into_tensor(out, x.contiguous(), group=self._group)
            return out
        dist.all_gather(list(out.unbind()), x.contiguous(), group=self._group)
        return out

    def smallest(self, value: int) -> int:
        """The smallest of all ranks' numbers; waits until all have come here, however long they read their weights.

        Raises:
            Unavailable: a rank is gone.
        """
        least = torch.tensor([value])
        try:
            dist.all_reduce(least, op=dist.ReduceOp.MIN)
        except RuntimeError as error:
            raise Unavailable(f"a rank has ended: {error}") from error
        return int(least)

    def agree(self, is_true: bool) -> bool:
        """Whether something is true on all ranks; waits and raises as :meth:`smallest`."""
        return self.smallest(is_true) == 1

    def wait_for_all(self) -> None:
        """Return once all ranks have come here; raises as :meth:`smallest`."""
        self.smallest(0)

    def lead(self, message: Words, own_part: Callable[[], T]) -> T:
        """Send a message to the others and do this rank's part of it.

        Raises:
            Unavailable: the group is lost, or is lost by this: whatever fails here leaves the others at another place.
        """
        if self._lost is not None:
            raise Unavailable(self._lost)
        try:
            self._send(message)
            return own_part()
        except Exception as error:
            self.lose(str(error), error)
            raise Unavailable(self._lost or str(error)) from error

    def receive(self) -> Words:
        """The next message of rank 0.

        Raises:
            Unavailable: rank 0 is gone or silent.
        """
        first = torch.empty(_FIRST_WORDS, dtype=torch.int64)
        self._broadcast(first)
        count = int(first[0])
        if count <= _FIRST_WORDS:
            return first[:count].numpy()
        rest = torch.empty(count - _FIRST_WORDS, dtype=torch.int64)
        self._broadcast(rest)
        return torch.cat((first, rest)).numpy()

    def lose(self, reason: str, error: BaseException | None = None) -> None:
        """Take the group for lost, unless it was closed; may be called on any thread."""
        with self._lock:
            if self._closed or self._lost is not None:
                return
            self._lost = f"the {self.place.size} ranks of the model are no longer together: {reason}"
        if error is not None and not isinstance(error, Unavailable):
            logger.error("rank %d failed", self.place.rank, exc_info=error)
        self._on_loss(self._lost)

    def close(self, last_message: Words | None = None) -> None:
        """Leave the group, and end the processes that this one has started. Idempotent.

        Rank 0 sends the others ``last_message``; those that cannot get one are killed.
        """
        with self._lock:  # from here on the end of a rank is no loss
            if self._closed:
                return
            self._closed = True
        is_told = False
        if self.leads and last_message is not None and self._lost is None:
            try:
                self._send(last_message)
                is_told = True
            except Unavailable as error:
                logger.warning("the other ranks were not told to stop: %s", error)
        self._shared = None
        if self._owns_world and dist.is_initialized():
            dist.destroy_process_group()
        if self._end_others is not None:
            self._end_others(_STOP_S if is_told else 0.0)

    def _send(self, message: Words) -> None:
        words = torch.from_numpy(message)
        if len(message) <= _FIRST_WORDS:
            first = torch.zeros(_FIRST_WORDS, dtype=torch.int64)
            first[: len(message)] = words
            self._broadcast(first)
            return
        self._broadcast(words[:_FIRST_WORDS])
        self._broadcast(words[_FIRST_WORDS:])

    def _broadcast(self, data: torch.Tensor) -> None:
        if self._shared is not None:
            self._shared.broadcast(data)
            return
        try:
            dist.broadcast(data, 0, group=self._group)
        except RuntimeError as error:
            raise Unavailable(f"a rank is gone or silent: {error}") from error

    def _share(self, timeout_s: float) -> SharedExchange | None:
        library = shared_memory.load()
        if not self.agree(library is not None) or library is None:
            return None
        named: list[Any] = [shared_memory.make_file(library, self.place.size) if self.leads else None]
        try:
            dist.broadcast_object_list(named, 0)
            exchange = SharedExchange(
                library, named[0], rank=self.place.rank, size=self.place.size, timeout_s=timeout_s
            )
            self.wait_for_all()
        finally:
            if self.leads:
                os.unlink(named[0])
        return exchange
