"""Simpler policies of pacing beside the gateway's own, from 1 to 32 sessions.

One target and one draft serve four gateways, one for each policy. Pairs of windows, of plain decoding and of a policy,
take turns (:class:`benchmarks.never_slower.Windows`). ``serve POLICY …`` runs such a gateway alone.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from benchmarks import command
from benchmarks.never_slower import PAIRS, Cell, Windows
from benchmarks.pairs import pair
from benchmarks.service_process import service
from gateway.pacing.lookup_pacer import LookupPacer
from gateway.pacing.pace import Pace, Pacer
from gateway.pacing.stats import Mode, PacingStats
from gateway.pacing.target_pacer import TargetPacer
from specdec.flags import Parser
from specdec.types import RoundTimings, Verdict

NUM_TOKENS: Final = 4
#: The static rule: the most sessions that draft.
STATIC_SESSIONS: Final = 2
#: Weight of the newest round, the least acceptance rate, and one verdict in so many is drafted to learn the rate.
NEWEST: Final = 0.1
LEAST_RATE: Final = 0.5
PROBE_EVERY: Final = 64
#: The cost model (two cores of an Intel Xeon): ms of a step, of each row, of a drafted token, of a round's messages.
STEP_MS: Final = 0.58
ROW_MS: Final = 0.088
DRAFT_MS: Final = 0.15
WIRE_MS: Final = 1.0


class SharedPacer:
    """Drafts the same number of tokens for all sessions of a target: in every round, or in none but probes."""

    def __init__(self, lookups: LookupPacer) -> None:
        self.stats = PacingStats()
        self.num_sessions = 0
        self.rate = 0.7
        self._num_verdicts = 0

    def session(self, limit: int, drafter: str = "") -> Pace:
        """See :class:`~gateway.pacing.pace.Pacer`."""
        return SharedPace(self, limit)

    def num_draft_tokens(self) -> int:
        """What all sessions draft now."""
        self._num_verdicts += 1
        return NUM_TOKENS if self.pays() or self._num_verdicts % PROBE_EVERY == 0 else 0

    def pays(self) -> bool:
        """Whether rounds are faster than plain decoding, as the policy sees it."""
        raise NotImplementedError

    def observe(self, num_asked: int, num_accepted: int) -> None:
        """Take a round into the moving average of the acceptance rate of a token (Leviathan et al. 2023, section 3)."""
        self.rate += NEWEST * (num_accepted / min(num_asked, num_accepted + 1) - self.rate)


class SharedPace:
    """A session of a :class:`SharedPacer`."""

    group: Final = ""
    speedup: Final = 1.0
    is_settled: Final = False

    def __init__(self, target: SharedPacer, limit: int) -> None:
        self.k = 0
        self._target, self._limit = target, limit
        self._is_open = True
        target.num_sessions += 1

    def num_draft_tokens(self, num_remaining: int, now_ns: int) -> int:
        """See :class:`~gateway.pacing.pace.Pace`."""
        self.k = max(0, min(self._limit, num_remaining - 1, self._target.num_draft_tokens())) if self._limit else 0
        return self.k

    def record(self, verdict: Verdict, num_asked: int, now_ns: int, **_: object) -> None:
        """See :class:`~gateway.pacing.pace.Pace`."""
        if not num_asked:
            self.record_plain(1, len(verdict.token_ids), verdict.timings, now_ns)
            return
        stats = self._target.stats
        stats.num_verdicts[Mode.SPECULATIVE] += 1
        stats.num_draft_tokens += num_asked
        self._target.observe(num_asked, verdict.num_accepted)

    def record_plain(self, num_verdicts: int, num_tokens: int, timings: RoundTimings, now_ns: int) -> None:
        """See :class:`~gateway.pacing.pace.Pace`."""
        self._target.stats.num_verdicts[Mode.PLAIN] += num_verdicts

    def skip(self, timings: RoundTimings, now_ns: int) -> None:
        """See :class:`~gateway.pacing.pace.Pace`."""

    def leave(self) -> None:
        """See :class:`~gateway.pacing.pace.Pace`."""
        self._target.num_sessions -= self._is_open
        self._is_open = False


class StaticPacer(SharedPacer):
    """Draft while few sessions are open: vLLM's ``disable_by_batch_size``."""

    def pays(self) -> bool:
        """Whether few are open."""
        return self.num_sessions <= STATIC_SESSIONS

    def num_draft_tokens(self) -> int:
        """No probes: nothing is learned."""
        return NUM_TOKENS if self.pays() else 0


class AveragePacer(SharedPacer):
    """Draft while enough is accepted, whatever the load."""

    def pays(self) -> bool:
        """Whether the moving average is high enough."""
        return self.rate >= LEAST_RATE


class CostPacer(SharedPacer):
    """Draft while the expected tokens are worth the cost of their rows: goodput (Liu et al. 2024, arXiv 2406.14066)."""

    def pays(self) -> bool:
        """Whether tokens a millisecond of a round are more than those of a plain step."""
        sessions, rate = max(1, self.num_sessions), min(self.rate, 0.999)
        plain_ms = STEP_MS + ROW_MS * sessions
        round_ms = STEP_MS + ROW_MS * sessions * (NUM_TOKENS + 1) + DRAFT_MS * sessions * NUM_TOKENS + WIRE_MS
        return (1.0 - rate ** (NUM_TOKENS + 1)) / (1.0 - rate) * plain_ms > round_ms


POLICIES: Final[Mapping[str, Callable[[LookupPacer], Pacer]]] = {
    "static": StaticPacer,
    "average": AveragePacer,
    "cost": CostPacer,
    "measured": TargetPacer,
}


def serve(arguments: Sequence[str]) -> None:
    """Run a gateway with the policy named first; its own flags follow."""
    import uvloop  # noqa: PLC0415 - only a gateway needs it

    from gateway import app  # noqa: PLC0415
    from gateway.main import add_arguments, settings_of  # noqa: PLC0415

    parser = Parser("benchmarks.pacing_baselines serve", description=__doc__)
    parser.add_argument("policy", choices=POLICIES)
    add_arguments(parser)
    args = parser.parse_args(arguments)

    async def run() -> None:
        await app.serve(app.Gateway(settings_of(args), make_pacer=POLICIES[args.policy]))

    uvloop.run(run())


async def measure(args: argparse.Namespace) -> list[Cell]:
    """A cell for each policy and number of sessions."""
    from gateway.text.tokenizer import TextTokenizer  # noqa: PLC0415
    from specdec.rpc.channel import open_channel  # noqa: PLC0415
    from tandem.bench.prompts import pick_prompts  # noqa: PLC0415
    from tandem.bench.systems import GrpcSystem  # noqa: PLC0415
    from tandem.launcher.deployment import services_of  # noqa: PLC0415

    cells: list[Cell] = []
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        kind, drafter, options = PAIRS[args.pair]
        models = pair(kind, drafter, NUM_TOKENS, scratch, **options)
        prompts = pick_prompts(TextTokenizer.load(models.target.model.model).encode, 256, 16)
        target, draft, _ = services_of(models, scratch)
        for each in (target, draft):
            stack.enter_context(service(each.module, *each.arguments))
        windows = {}
        for policy in POLICIES:
            flags = ("--targets", target.address, "--drafts", draft.address, "--port", "0", "--grpc-port", "0")
            gateway = stack.enter_context(service("benchmarks.pacing_baselines", "serve", policy, *flags))
            windows[policy] = Windows([GrpcSystem(open_channel(gateway.grpc_address))], prompts, args)
        for sessions in args.sessions:
            row = {name: Cell(system=name, pair=args.pair, drafter="draft", sessions=sessions) for name in windows}
            for policy, own in windows.items():
                await own.learn(row[policy])
            for number in range(args.repeats):
                for policy, own in windows.items():
                    await own.pair(row[policy], number)
            cells += row.values()
            print(*(cell.show() for cell in row.values()), sep="\n", flush=True)
    return cells


def main() -> int:
    """Measure and print."""
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2:])
        return 0
    flags = Parser("python -m benchmarks.pacing_baselines", description=__doc__)
    flags.add_argument("--sessions", type=command.numbers, default=(1, 4, 8, 16, 32), help="default: 1,4,8,16,32")
    flags.add_argument("--pair", choices=PAIRS, default="bundled", help="of models (default: bundled)")
    flags.add_argument("--repeats", type=int, default=8, help="windows of each policy")
    flags.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    flags.set_defaults(seconds=1.0, warm_up=3.0, max_tokens=64)
    args = flags.parse_args()
    cells = asyncio.run(measure(args))
    print(f"\n| policy | {' | '.join(map(str, args.sessions))} |\n| --- |{' --- |' * len(args.sessions)}")
    for policy in POLICIES:
        ratios = [cell.ratio for cell in cells if cell.system == policy]
        print(f"| {policy} | {' | '.join(f'{each.spread.median:.2f} ({each.quartiles})' for each in ratios)} |")
    return 0


if __name__ == "__main__":
    command.run("benchmarks.pacing_baselines", main)
