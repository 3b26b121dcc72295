"""Services in processes of their own, every link between them through a proxy, that can be hurt and asked."""

import asyncio
import random
import re
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import httpx
import psutil

from specdec.rpc.certificates import Certificates
from specdec.rpc.channel import open_channel
from specdec.settings.listening import TlsFiles
from specdec.v1 import draft_service_pb2_grpc, target_service_pb2_grpc, types_pb2
from tandem.certificates import write_certificates
from tests.e2e.servers import TARGET_MODEL, ServerProcess
from tests.reliability.proxy import FaultyProxy

#: Seconds for everything to be up, or free, again once nothing is disturbed any more.
RECOVERY_S = 120.0
#: Blocks of a bundled target for about three streams, and bytes of one: 32 tokens, layers, keys and values, KV heads,
#: head size, float32.
FEW_BLOCKS = 24
BLOCK_BYTES = 32 * 6 * 2 * 2 * 64 * 4


class Rig:
    """A gateway, its targets and its drafts by name, and the proxy before each of the latter."""

    def __init__(
        self,
        targets: Sequence[ServerProcess],
        drafts: Sequence[ServerProcess],
        rng: random.Random,
        *,
        certificates: Path | None = None,
    ) -> None:
        """``certificates``: an empty folder for them; links then speak mutual TLS."""
        self.targets = {f"target {i}": process for i, process in enumerate(targets)}
        self.drafts = {f"draft {i}": process for i, process in enumerate(drafts)}
        self.links = {name: FaultyProxy(rng) for name in (*self.targets, *self.drafts)}
        self.gateway = ServerProcess("gateway")
        self.certificates: Certificates | None = None
        if certificates is not None:
            self._seal(certificates)

    def _seal(self, folder: Path) -> None:
        write_certificates(folder)
        own = folder / "gateway"
        files = TlsFiles(str(own / "cert.pem"), str(own / "key.pem"), str(own / "ca.pem"))
        self.certificates = Certificates(files)
        for prefix, role, processes in (
            ("ssl", "target", self.targets.values()),
            ("ssl", "draft", self.drafts.values()),
            ("backend-ssl", "gateway", [self.gateway]),
        ):
            for option, file in (("certfile", "cert"), ("keyfile", "key"), ("ca-certs", "ca")):
                for process in processes:
                    process.command += [f"--{prefix}-{option}", str(folder / role / f"{file}.pem")]

    @property
    def processes(self) -> dict[str, ServerProcess]:
        """All of them by name; the gateway is the last."""
        return {**self.targets, **self.drafts, "gateway": self.gateway}

    async def start(self, *gateway_arguments: str) -> None:
        """Start everything; call :meth:`close` in any case."""
        for process in self.processes.values():
            process.log = deque(maxlen=100_000)
        behind = {**self.targets, **self.drafts}
        for process in behind.values():
            process.launch()
        for name, process in behind.items():
            await asyncio.to_thread(process.wait_until_ready)
            self.links[name].upstream_port = process.ready["port"]
            await self.links[name].start()
        self.gateway.command += [
            *("--targets", ",".join(f"127.0.0.1:{self.links[name].port}" for name in self.targets)),
            *("--tokenizer", TARGET_MODEL, "--port", "0", "--grpc-port", "0", *gateway_arguments),
        ]
        if self.drafts:
            addresses = ",".join(f"127.0.0.1:{self.links[name].port}" for name in self.drafts)
            self.gateway.command += ["--drafts", addresses]
        await asyncio.to_thread(self.gateway.start)

    @property
    def base_url(self) -> str:
        return f"http://{self.gateway.address}"

    @property
    def grpc_address(self) -> str:
        return f"127.0.0.1:{self.gateway.ready['grpc_port']}"

    async def recover(self) -> None:
        """Heal every link, and wait until every service is used again."""
        for link in self.links.values():
            link.heal()
        async with asyncio.timeout(RECOVERY_S):
            while len(await self._addresses_up()) < len(self.links):  # noqa: ASYNC110 (asks other processes)
                await asyncio.sleep(0.1)

    async def _addresses_up(self) -> set[str]:
        """The targets and drafts that answer, if the gateway says that it is well."""
        try:
            async with httpx.AsyncClient(timeout=5) as client:
                if (await client.get(f"{self.base_url}/health")).status_code != 200:
                    return set()
            return {name for name in self.links if await self.load_of(name) is not None}
        except httpx.TransportError:
            return set()

    async def load_of(self, name: str) -> types_pb2.ServerLoad:
        """Occupancy of a target or a draft, asked past its proxy."""
        stub = (
            target_service_pb2_grpc.TargetServiceStub
            if name in self.targets
            else draft_service_pb2_grpc.DraftServiceStub
        )
        async with open_channel(self.processes[name].address, certificates=self.certificates) as channel:
            answer = await stub(channel).GetModelInfo(types_pb2.GetModelInfoRequest(), timeout=10)
        return answer.load

    async def wait_until_free(self) -> None:
        """Return once no service holds a session, a waiting one or a KV block; fail where one does for too long."""
        async with asyncio.timeout(RECOVERY_S):
            while held := await self.held():  # noqa: ASYNC110
                await asyncio.sleep(0.2)
        assert not held

    async def held(self) -> dict[str, str]:
        """What each service still holds; empty when nothing."""
        held = {}
        for name in self.links:
            load = await self.load_of(name)
            if load.open_sessions or load.waiting_sessions or load.used_blocks:
                held[name] = str(load)
        if running := await self.metric("tandem_requests_running"):
            held["gateway"] = f"{running:.0f} requests"
        return held

    async def metric(self, name: str) -> float:
        """A metric of the gateway, all its labels together."""
        async with httpx.AsyncClient(timeout=10) as client:
            metrics = (await client.get(f"{self.base_url}/metrics")).text
        return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", metrics, re.MULTILINE))

    def sizes(self) -> dict[str, tuple[int, int]]:
        """Resident bytes and open file descriptors of each process."""
        return {name: self.size_of(process) for name, process in self.processes.items()}

    @staticmethod
    def size_of(process: ServerProcess) -> tuple[int, int]:
        """Resident bytes and open file descriptors."""
        running = psutil.Process(process.pid)
        return running.memory_info().rss, running.num_fds()

    def tracebacks(self) -> list[str]:
        """Lines of the logs that no fault explains."""
        return [
            f"{name}: {line.strip()}"
            for name, process in self.processes.items()
            for line in process.log
            if "Traceback" in line or "never retrieved" in line or "never awaited" in line
        ]

    async def close(self) -> None:
        """Stop everything; a process that does not end well fails."""
        try:
            for process in reversed(self.processes.values()):
                await asyncio.to_thread(process.stop)
        finally:
            for process in self.processes.values():
                if process.is_running:
                    process.kill()
            for link in self.links.values():
                await link.close()
