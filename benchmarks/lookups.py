"""What n-gram and suffix lookup draft for recorded texts, and how fast.

The target is played by a text: of every proposal the tokens that agree with it are accepted, and one more is committed.
``prose`` are files nobody has seen, the second half after the first. ``edits`` are six versions of each file, one
request each: the prompt is one version, the output the next, in which a name, a line or two are changed. ``rewrites``
are the same outputs after a prompt that does not show the file.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from draft_service.common_prefix import common_prefix_len
from draft_service.drafters.base import DraftJob
from draft_service.drafters.lookup import LookupDrafter
from draft_service.drafters.registry import load_drafter
from gateway.text.tokenizer import TextTokenizer
from specdec.flags import Parser
from specdec.params import SamplingParams
from specdec.settings import DraftSettings, SpeculativeSettings
from specdec.types import SessionSpec
from tandem.bench.edits import MARK, versions
from tandem.bench.prompts import HELD_OUT
from tandem.checkpoints import TARGET, find_checkpoint

#: Characters of a file that are used.
_LENGTH: Final = 4000
SETTINGS: Final[dict[str, dict[str, Any]]] = {
    "ngram": {"method": "ngram"},
    "suffix, own text": {"method": "suffix", "suffix_decoding_max_cached_requests": 0},
    "suffix": {"method": "suffix"},
    "suffix, depth 64": {"method": "suffix", "suffix_decoding_max_tree_depth": 64},
}


@dataclass(frozen=True, slots=True)
class Request:
    """Tokens of a prompt and of its answer."""

    prompt: Sequence[int]
    output: Sequence[int]


@dataclass(frozen=True, slots=True)
class LookupResult:
    """What a drafter did with some requests."""

    name: str
    text: str
    k: int
    acceptance_length: float
    drafted_per_round: float
    #: Share of the drafted tokens.
    accepted: float
    #: Median time of a round: ingesting what was committed, and looking up.
    round_us: float

    def speed(self, token_cost: float) -> float:
        """Over plain decoding, where a drafted token takes this share of a plain step to verify, none to draft."""
        return self.acceptance_length / (1.0 + token_cost * self.drafted_per_round)


def prose(encode: Callable[[str], Sequence[int]]) -> list[Request]:
    """The second half of each file after the first."""
    halves = [(text[: len(text) // 2], text[len(text) // 2 :]) for text in _files()]
    return [Request(encode(prompt), encode(output)) for prompt, output in halves]


def edits(encode: Callable[[str], Sequence[int]]) -> list[Request]:
    """Each version of a file after the one before."""
    return [Request(encode(before + MARK), encode(after)) for before, after in _versions()]


def rewrites(encode: Callable[[str], Sequence[int]]) -> list[Request]:
    """Each version of a file after a prompt that does not show it."""
    return [Request(encode(f"# Version {i}:\n"), encode(after)) for i, (_, after) in enumerate(_versions())]


TEXTS: Final = {"prose": prose, "edits": edits, "rewrites": rewrites}


def _files() -> Iterator[str]:
    library = Path(sysconfig.get_paths()["stdlib"])
    for name in HELD_OUT:
        if (library / name).is_file():
            yield (library / name).read_text(errors="replace")[:_LENGTH]


def _versions() -> Iterator[tuple[str, str]]:
    for number, text in enumerate(_files()):
        yield from versions(text, number)


async def play(
    drafter: LookupDrafter[Any], requests: Sequence[Request], k: int
) -> tuple[list[tuple[int, int]], list[int]]:
    """(drafted, accepted) of every round, and the nanoseconds it took."""
    rounds, times = [], []
    params = SamplingParams(temperature=0.0, seed=0)
    for number, request in enumerate(requests):
        prompt, output = tuple(request.prompt), request.output
        spec = SessionSpec(session_id=str(number), token_ids=prompt, prompt_len=len(prompt), params=params)
        state = drafter.open(spec)
        await drafter.draft([DraftJob(state, state.num_pending, 0)])
        done = 0
        while done < len(output):
            started_ns = time.perf_counter_ns()
            drafted = drafter.draft_one(DraftJob(state, state.num_pending, min(k, len(output) - done))).token_ids
            spent_ns = time.perf_counter_ns() - started_ns
            accepted = common_prefix_len(drafted, output[done:-1])
            committed = output[done : done + accepted + 1]
            started_ns = time.perf_counter_ns()
            drafter.advance(state, len(prompt) + done, committed)
            times.append(spent_ns + time.perf_counter_ns() - started_ns)
            rounds.append((len(drafted), accepted))
            done += len(committed)
        drafter.close(state)
        for _ in range(20):
            await asyncio.sleep(0)  # the output goes into the tree
    return rounds, times


async def measure(name: str, text: str, requests: Sequence[Request], k: int) -> LookupResult:
    """Play all requests, one after another, to a drafter that has seen nothing before."""
    settings = SpeculativeSettings(**SETTINGS[name], num_speculative_tokens=k)
    drafter = await load_drafter(DraftSettings(speculative=settings))
    assert isinstance(drafter, LookupDrafter)
    rounds, times = await play(drafter, requests, k)
    await drafter.shutdown()
    drafted, accepted = sum(drafted for drafted, _ in rounds), sum(accepted for _, accepted in rounds)
    return LookupResult(
        name=name,
        text=text,
        k=k,
        acceptance_length=(accepted + len(rounds)) / len(rounds),
        drafted_per_round=drafted / len(rounds),
        accepted=accepted / max(1, drafted),
        round_us=statistics.median(times) / 1e3,
    )


async def _run(args: argparse.Namespace) -> list[LookupResult]:
    tokenizer = TextTokenizer.load(find_checkpoint(TARGET))
    outcomes = []
    print(f"{'text':10}{'drafter':20}{'k':>4}{'length':>9}{'drafted':>9}{'accepted':>10}{'us a round':>12}{'speed':>8}")
    for text, make in TEXTS.items():
        requests = make(tokenizer.encode)
        for k in args.k:
            for name in SETTINGS:
                one = await measure(name, text, requests, k)
                outcomes.append(one)
                print(
                    f"{text:10}{name:20}{k:4}{one.acceptance_length:9.2f}{one.drafted_per_round:9.2f}"
                    f"{one.accepted:10.2f}{one.round_us:12.1f}{one.speed(args.token_cost):7.2f}x"
                )
    return outcomes


def main(argv: Sequence[str] | None = None) -> int:
    """Play, and print a table."""
    parser = Parser(prog="python -m benchmarks.lookups", description=__doc__)
    parser.add_argument("--k", type=int, nargs="+", default=[4, 16, 32], help="drafted tokens a round at most")
    parser.add_argument(
        "--token-cost",
        type=float,
        default=0.1,
        help="time to verify one drafted token, in plain steps",
    )
    parser.add_argument("--json", metavar="FILE", help="write every number to a file, too")
    args = parser.parse_args(argv)
    outcomes = asyncio.run(_run(args))
    if args.json:
        Path(args.json).write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
