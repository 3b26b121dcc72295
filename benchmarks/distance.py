"""Speed over plain decoding with the draft at a distance: ``python -m benchmarks.distance``.

Processes of the bundled pair: gateway and target on one socket, and between them and the draft a line with delay,
jitter and loss of packets (benchmarks/far_line.py). The target is padded: a step takes ``--step`` ms at least. Windows
of plain decoding and with the draft alternate; both have the same prompts and seeds, at every distance. ``never_wait``
and ``wait`` are simulated from how many drafted tokens of these texts are right in a row (benchmarks/never_wait.py),
for one session: padded steps hide the rows of others. Bytes are per token.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import tempfile
from argparse import Namespace
from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack, aclosing, contextmanager
from typing import TYPE_CHECKING, Final

from benchmarks import command, far_line
from benchmarks.never_wait import round_speed, stream_speed
from benchmarks.service_process import service
from specdec.flags import Parser
from specdec.params import SamplingParams
from tandem.bench.limits import Ratio

if TYPE_CHECKING:
    from benchmarks.load import LoadWindow
    from tandem.bench.answers import Piece

RTTS_MS: Final = (0.2, 1.0, 5.0, 20.0, 50.0, 100.0)
NUM_PROMPTS: Final = 64
#: Of one drafted token: the bundled draft on one core.
DRAFT_MS: Final = 0.1
#: Drafted tokens a round where runs of right ones are counted: few are longer.
LONG: Final = 16


class Distance:
    """The processes and the line between them."""

    def __init__(self, args: Namespace, line: far_line.FarLine) -> None:
        """Read the prompts."""
        from gateway.text.tokenizer import TextTokenizer  # noqa: PLC0415
        from tandem.bench.prompts import pick_prompts  # noqa: PLC0415
        from tandem.checkpoints import TARGET, find_checkpoint  # noqa: PLC0415

        self._args = args
        self._line = line
        self._model = find_checkpoint(TARGET)
        self._prompts = pick_prompts(TextTokenizer.load(self._model).encode, NUM_PROMPTS, 16)

    async def measure(self) -> None:
        """Print a line for every distance."""
        args = self._args
        flags = ("--host", far_line.NEAR, "--insecure", "--port", "0", "--num-speculative-tokens", str(LONG))
        with tempfile.TemporaryDirectory(prefix="tandem-") as folder, ExitStack() as stack:
            draft = stack.enter_context(service("tandem", "draft", *flags, *args.draft))
            port = int(draft.ready["port"])
            target = f"unix:{folder}/target"
            flags = (str(args.step), "--model", self._model, "--port", "0", "--socket", target)
            stack.enter_context(service("benchmarks.padded_target", *flags))
            self._line.set(0.0, 0.0, 0.0, port)
            with self._gateway(target, port, LONG, "--fixed-draft-length") as gateway:
                near = [await self._window(gateway, i, args.seconds, None) for i in range(args.repeats)]
            runs = [tokens - 1 for window in near for arrivals in window.arrivals for _, tokens in arrivals]
            for rtt_ms in args.rtts:
                self._line.set(rtt_ms, args.jitter, args.loss, port)
                with self._gateway(target, port, args.k, *args.gateway) as gateway:
                    row = {"step_ms": args.step, "rtt_ms": rtt_ms, "sessions": args.sessions}
                    row |= await self._compare(gateway)
                simulated = runs, rtt_ms / args.step, args.k, args.step / DRAFT_MS
                row["never_wait"] = round(stream_speed(*simulated, args.jitter), 2)
                row["wait"] = round(round_speed(*simulated), 2)
                print(json.dumps(row), flush=True)

    @contextmanager
    def _gateway(self, target: str, draft_port: int, k: int, *flags: str) -> Iterator[str]:
        ports = ("--port", "0", "--grpc-port", "0", "--targets", target, "--drafts", f"{far_line.FAR}:{draft_port}")
        k_flag = ("--num-speculative-tokens", str(k))
        with service("gateway", "--tokenizer", self._model, *ports, *k_flag, *flags) as gateway:
            yield gateway.grpc_address

    async def _compare(self, gateway: str) -> dict[str, object]:
        """Windows with the draft over windows without it."""
        args, sent = self._args, [0, 0]
        rates: tuple[list[float], list[float]] = [], []
        await self._window(gateway, args.repeats, args.warm_up, None)
        for repeat in range(args.repeats):
            for drafts in (repeat % 2, 1 - repeat % 2):
                before = self._line.num_bytes
                window = await self._window(gateway, repeat, args.seconds, None if drafts else 0)
                rates[drafts].append(window.tokens_per_s)
                for way in range(2 if drafts else 0):
                    sent[way] += self._line.num_bytes[way] - before[way]
        ratio, num_tokens = Ratio.of(rates[1], rates[0]), max(1.0, sum(rates[1]) * args.seconds)
        found = {"speed": round(ratio.spread.median, 3), "quartiles": ratio.quartiles}
        return found | {"bytes_to": round(sent[0] / num_tokens), "bytes_from": round(sent[1] / num_tokens)}

    async def _window(self, gateway: str, seed: int, seconds: float, k: int | None) -> LoadWindow:
        from benchmarks.load import hold  # noqa: PLC0415 (gRPC)
        from specdec.rpc.channel import open_channel  # noqa: PLC0415
        from tandem.bench.systems import GrpcSystem  # noqa: PLC0415

        args, start = self._args, 7 * seed % NUM_PROMPTS
        load = [*self._prompts[start:], *self._prompts[:start]]
        async with open_channel(gateway) as channel:
            system = GrpcSystem(channel)

            async def ask(prompt: tuple[int, ...], length: int) -> AsyncGenerator[Piece, None]:
                params = SamplingParams(temperature=args.temperature, seed=seed, max_tokens=length, ignore_eos=True)
                async with aclosing(system.stream(prompt, params, None, k)) as pieces:
                    async for piece in pieces:
                        yield piece

            limits = {"num_clients": args.sessions, "max_tokens": args.max_tokens}
            return await hold(ask, load, **limits, seconds=seconds)


def main() -> int:
    """Measure and print."""
    flags = Parser("python -m benchmarks.distance", description=__doc__)
    flags.add_argument("--rtts", type=lambda text: [float(part) for part in text.split(",")], default=RTTS_MS)
    flags.add_argument("--step", type=float, default=28.0, help="ms of a step at least")
    flags.add_argument("--jitter", type=float, default=0.2, help="of each delay, relatively")
    flags.add_argument("--loss", type=float, default=0.0, help="share of the packets, both ways")
    flags.add_argument("--draft", type=shlex.split, default=("--model", "python-1m"), help="options of `tandem draft`")
    flags.add_argument("--gateway", type=shlex.split, default=(), help="options of `tandem gateway`")
    flags.add_argument("--sessions", type=int, default=1)
    flags.add_argument("--k", type=int, default=4, help="drafted tokens a round at most")
    flags.add_argument("--temperature", type=float, default=0.8)
    flags.add_argument("--warm-up", type=float, default=4.0, help="seconds the gateway learns at first")
    flags.add_argument("--repeats", type=int, default=5, help="windows of each kind")
    flags.add_argument("--seconds", type=float, default=2.0, help="length of a window")
    flags.add_argument("--max-tokens", type=int, default=200)
    args = flags.parse_args()
    far_line.enter()
    asyncio.run(Distance(args, far_line.FarLine()).measure())
    return 0


if __name__ == "__main__":
    command.run("benchmarks.distance", main)
