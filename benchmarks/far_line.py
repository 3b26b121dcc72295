"""This machine at a distance: an address whose packets take a while, and some of which are lost.

The command runs in a network namespace of its own (``unshare -rn``, which needs no root). A program passes on the
packets of a TUN device there: what is sent to :data:`FAR` goes back after its delay with its two addresses exchanged,
so :data:`FAR` is :data:`NEAR` once more. What is delayed and lost are packets, as on a network: the kernel's own TCP at
both ends sends again what was lost.
"""

from __future__ import annotations

import fcntl
import os
import random
import select
import shutil
import struct
import subprocess
import sys
import time
from heapq import heappop, heappush
from itertools import count
from multiprocessing import get_context
from typing import Final

from specdec.errors import Unavailable

NEAR: Final = "10.77.0.1"
FAR: Final = "10.77.0.2"
_MARK: Final = "TANDEM_FAR_LINE"
_TUNSETIFF: Final = 0x400454CA
_TUN_WITHOUT_HEADER: Final = 0x1001


def enter() -> None:
    """Run this command again in a namespace of its own, where it is not in one yet.

    Raises :class:`Unavailable` where a program is missing.
    """
    if missing := [name for name in ("unshare", "ip") if shutil.which(name) is None]:
        raise Unavailable(f"{' and '.join(missing)} not found; install util-linux and iproute2")
    if os.environ.setdefault(_MARK, "outside") == "outside":
        os.environ[_MARK] = "inside"
        os.execvp("unshare", ["unshare", "-rn", sys.executable, *sys.orig_argv[1:]])


class FarLine:
    """The line to :data:`FAR`. Start it before threads."""

    def __init__(self) -> None:
        """Raises :class:`Unavailable` where the kernel has no TUN devices."""
        try:
            device = os.open("/dev/net/tun", os.O_RDWR)
        except OSError as error:
            raise Unavailable(f"/dev/net/tun cannot be opened ({error.strerror}); load the kernel module tun") from None
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", b"far", _TUN_WITHOUT_HEADER))
        for command in ("addr add 10.77.0.1/30 dev far", "link set far up", "link set lo up"):
            subprocess.run(["ip", *command.split()], check=True)
        fork = get_context("fork")
        #: Seconds of a delay, its jitter, the share of lost packets, the port; bytes to this port, and bytes from it.
        self._state = fork.Array("d", 6)
        fork.Process(target=self._carry, args=(device,), daemon=True).start()

    def set(self, rtt_ms: float, jitter: float, loss: float, port: int) -> None:
        """``jitter``: of each delay, relatively. ``loss``: share of the packets. ``port``: of the far server."""
        self._state[:4] = rtt_ms / 2e3, jitter, loss, port

    @property
    def num_bytes(self) -> tuple[int, int]:
        """What was sent to the port and from it, headers and lost packets included."""
        return int(self._state[4]), int(self._state[5])

    def _carry(self, device: int) -> None:
        """Pass packets on, in order by connection and direction (in one queue, trips of 50 ms were 61; now 53)."""
        waiting: list[tuple[float, int, bytes]] = []
        latest: dict[bytes, float] = {}
        for number in count():
            if select.select([device], [], [], max(0.0, waiting[0][0] - time.perf_counter()) if waiting else None)[0]:
                packet = bytearray(os.read(device, 2**16))
                if packet[0] >> 4 != 4:  # IPv4 alone
                    continue
                delay_s, jitter, loss, port = self._state[:4]
                self._state[4 if int.from_bytes(packet[22:24]) == port else 5] += len(packet)
                if random.random() >= loss:
                    packet[12:20] = packet[16:20] + packet[12:16]  # the checksums stay right
                    due = time.perf_counter() + delay_s * (1.0 + jitter * random.uniform(-1.0, 1.0))
                    ports = bytes(packet[20:24])
                    latest[ports] = due = max(due, latest.get(ports, 0.0))
                    heappush(waiting, (due, number, bytes(packet)))
            while waiting and waiting[0][0] <= time.perf_counter():
                os.write(device, heappop(waiting)[-1])
