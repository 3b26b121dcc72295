"""``python -m tests.reliability.rolling``: two gateways, two targets and two drafts, each replaced under load.

No request may fail, and every text must be that of a request that nothing disturbed. Processes come and go as pods of
Kubernetes do: a replica leaves the list of addresses, gets SIGTERM, and another one comes at another address.
"""

import argparse
import asyncio
import random
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

import httpx

from tests.e2e.conftest import PROMPTS
from tests.e2e.servers import TARGET_MODEL, ServerProcess, draft_process, target_process
from tests.reliability.load import Load, Served, questions

NUM_STREAMS: Final = 6
#: Seconds from leaving the list to SIGTERM: what a client had chosen by then has arrived.
LEAVE_S: Final = 1.0
#: Seconds a model service gives its sessions, too few for most of them: the others move.
DRAIN_S: Final = 0.5
#: Seconds for a new replica to be used by all gateways.
JOIN_S: Final = 60.0


class Replicas(Served, Protocol):
    """Gateways, targets and drafts that can be replaced one by one."""

    @property
    def names(self) -> Sequence[str]:
        """All replicas."""
        ...

    async def replace(self, name: str) -> None:
        """Replace one; returns once the new one is used."""
        ...


async def roll(replicas: Replicas, *, num_tokens: int, rounds: int) -> str:
    """Replace every replica under load, ``rounds`` times; a line of figures. Raises AssertionError for a request that
    failed or got another text.
    """
    load = Load(replicas, questions(PROMPTS, num_tokens), random.Random(1))
    await load.learn()
    started_s = time.monotonic()
    running = asyncio.create_task(load.run(3600, NUM_STREAMS))
    try:
        for name in replicas.names * rounds:
            await replicas.replace(name)
            assert not running.done(), "\n".join(load.outcomes.wrong)
    finally:
        load.end()
        await running
    outcomes = load.outcomes
    assert not outcomes.wrong, "\n".join(outcomes.wrong)
    assert not outcomes.unfinished, outcomes.unfinished
    return f"{len(replicas.names) * rounds} replaced in {time.monotonic() - started_s:.0f} s; {outcomes.describe()}"


async def until_used(address: str, gateway_url: str, client: httpx.AsyncClient) -> None:
    """Return once a gateway uses the replica at an address."""
    metric = re.compile(rf'^tandem_(target_kv_use|draft_busy_share)\{{.*="{re.escape(address)}".*\}}', re.MULTILINE)
    while not metric.search((await client.get(f"{gateway_url}/metrics")).text):  # noqa: ASYNC110 (another process)
        await asyncio.sleep(0.1)


class Processes:
    """Two of each service, found through files of addresses."""

    def __init__(self, folder: Path) -> None:
        self._files = {role: folder / role for role in ("target", "draft")}
        drain = ("--drain-s", str(DRAIN_S))
        addresses = (*("--targets", f"file:{folder / 'target'}"), *("--drafts", f"file:{folder / 'draft'}"))
        self._running: dict[str, ServerProcess] = {}
        for i in range(2):
            self._running[f"target {i}"] = target_process(*drain)
            self._running[f"draft {i}"] = draft_process(*drain)
        for i in range(2):
            self._running[f"gateway {i}"] = ServerProcess(
                "gateway", *addresses, "--tokenizer", TARGET_MODEL, "--port", "0", "--grpc-port", "0", "--drain-s", "60"
            )
        self._listed: list[str] = []
        self._rng = random.Random(2)

    @property
    def names(self) -> Sequence[str]:
        """In the order of a careful update: what others need comes first."""
        return list(self._running)

    async def start(self) -> None:
        """Start everything."""
        for process in self._running.values():
            process.launch()
            self._write()  # gateways read them
        for name, process in self._running.items():
            await asyncio.to_thread(process.wait_until_ready)
            await self._join(name)

    async def close(self) -> None:
        """End everything; a process that does not end with status 0 is a failure."""
        for process in reversed(self._running.values()):
            await asyncio.to_thread(process.stop)

    @property
    def base_url(self) -> str:
        return f"http://{self._gateway().address}"

    @property
    def grpc_address(self) -> str:
        return f"127.0.0.1:{self._gateway().ready['grpc_port']}"

    async def replace(self, name: str) -> None:
        """Replace a process by another one with the same arguments on another port."""
        process = self._running[name]
        self._listed.remove(name)
        self._write()
        await asyncio.sleep(LEAVE_S)
        await asyncio.to_thread(process.stop)
        await asyncio.to_thread(process.start)
        await self._join(name)

    async def _join(self, name: str) -> None:
        self._listed.append(name)
        self._write()
        if "gateway" in name:
            return
        process = self._running[name]
        gateways = [self._running[each] for each in self._listed if "gateway" in each]
        async with asyncio.timeout(JOIN_S), httpx.AsyncClient(timeout=JOIN_S) as client:
            for gateway in gateways:
                await until_used(process.address, f"http://{gateway.address}", client)

    def _write(self) -> None:
        for role, path in self._files.items():
            addresses = [self._running[name].address for name in self._listed if role in name]
            new = path.with_suffix(".new")
            new.write_text("\n".join(addresses))
            new.replace(path)

    def _gateway(self) -> ServerProcess:
        return self._running[self._rng.choice([name for name in self._listed if "gateway" in name])]


async def roll_processes(*, num_tokens: int, rounds: int) -> str:
    """:func:`roll` with the bundled pair."""
    with tempfile.TemporaryDirectory() as folder:
        processes = Processes(Path(folder))
        try:
            await processes.start()
            return await roll(processes, num_tokens=num_tokens, rounds=rounds)
        finally:
            await processes.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    print(asyncio.run(roll_processes(num_tokens=300, rounds=args.rounds)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
