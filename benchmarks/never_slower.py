"""Is a drafter ever slower than plain decoding? A table of ratios.

A cell is a system (``serve``: processes as ``tandem serve`` runs them; ``gateways``: the same with a second gateway,
and requests go to both in turn; ``embedded``: everything in one process), a pair of models, a drafter and a number of
sessions. On one running server windows of plain decoding and of the drafter alternate (plain, drafter, drafter, plain,
…), chosen by request options. Both windows of a pair have the same prompts and seeds, so the same texts. Before, the
drafter decodes for ``--warm-up`` seconds, and 160 tokens of each session at least: the server learns in this time.

Pairs are the bundled one, the same with a poor draft (``fair``: 0.48 of its tokens are right; ``poor``: none is) or
with a target of other numbers (``int8``, ``bfloat16``), and the bundled target padded to 200 M parameters. ``right``
and ``wrong`` are predictions beside the pair's draft: the text that follows, and in turn another text or the text with
a wrong word after each word. ``mixed``: requests take the draft and both lookups in turn. ``plain`` is the control:
plain windows against plain windows. Texts are sampled, because greedy texts of the bundled target repeat themselves.

    python -m benchmarks.never_slower --systems serve --drafters ngram --sessions 1,8

``--json`` adds to what the file holds already, so that the table can be made in parts; ``--drafters none`` measures
nothing and prints it. Exit status 1 when a median is below ``--floor`` by more than its standard error.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from itertools import count, cycle
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks import command
from benchmarks.pairs import pair
from specdec.flags import Parser
from specdec.params import SamplingParams
from specdec.process.cores import usable_cores
from tandem.bench.limits import Ratio, Spread

if TYPE_CHECKING:
    from tandem.bench.answers import Piece
    from tandem.bench.systems import LocalSystem

SYSTEMS: Final[Mapping[str, str]] = {"serve": "grpc", "gateways": "grpc", "embedded": "embedded"}
#: Target and draft of ``benchmarks.pairs``, and other settings of the target.
PAIRS: Final[Mapping[str, tuple[str, str, Mapping[str, str]]]] = {
    "bundled": ("bundled", "good", {}),
    "fair": ("bundled", "fair", {}),
    "poor": ("bundled", "bad", {}),
    "padded": ("padded", "good", {}),
    "int8": ("bundled", "good", {"quantization": "int8"}),
    "bfloat16": ("bundled", "good", {"dtype": "bfloat16"}),
}
CONTROL: Final = "plain"
#: Methods that a request names: no draft takes part, so they are not measured again beside worse drafts.
LOOKUPS: Final = ("ngram", "suffix")
PREDICTIONS: Final = ("right", "wrong")
MIXED: Final = "mixed"
DRAFTERS: Final = (CONTROL, "draft", *LOOKUPS, *PREDICTIONS, MIXED)
SESSIONS: Final = (1, 2, 4, 8, 32)
_PROMPT_TOKENS: Final = 16
_NUM_PROMPTS: Final = 256
_NUM_PREDICTED: Final = 32
#: What is learned is learned by verdicts: on a slow machine seconds show how it is learned, not what.
_LEARNING_TOKENS: Final = 160

Tokens = tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class Cell:
    """One cell: tokens per second of windows in the order plain, drafter, drafter, plain, …"""

    system: str
    pair: str
    drafter: str
    sessions: int
    plain: list[float] = field(default_factory=list)
    drafted: list[float] = field(default_factory=list)
    #: While the server learned.
    learning: list[float] = field(default_factory=list)
    #: Sums of the metrics of the answers that ended in windows of the drafter.
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def key(self) -> tuple[int, ...]:
        """Its place in the table; cells of one place measure the same."""
        places: tuple[tuple[Sequence[str], str], ...] = (
            (tuple(SYSTEMS), self.system),
            (tuple(PAIRS), self.pair),
            (DRAFTERS, self.drafter),
        )
        return (*(names.index(name) for names, name in places), self.sessions)

    @property
    def ratio(self) -> Ratio:
        """Speed of the drafter over plain decoding."""
        return Ratio.of(self.drafted, self.plain)

    def is_slow(self, floor: float) -> bool:
        """Whether the drafter is slower than that share of plain decoding, beyond the standard error."""
        return self.ratio.spread.median + self.ratio.error < floor

    def show(self) -> str:
        """What was measured, and what was drafted, as one line."""
        plain = Spread.of(self.plain).median
        tokens, rounds, drafted, accepted = (
            max(self.counts.get(name, 0), 0)
            for name in ("num_tokens", "num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
        )
        return (
            f"{self.system}, {self.pair}, {self.drafter}, {self.sessions}: {self.ratio.show()}"
            f" ({self.ratio.quartiles}), plain {plain:.0f} tokens/s, learning"
            f" {' '.join(f'{value / plain:.2f}' for value in self.learning)}; of {tokens} tokens {accepted} accepted of"
            f" {drafted} drafted in {rounds} rounds"
        )


class Windows:
    """Requests, plain or with a drafter, to fronts of one target in turn."""

    def __init__(self, systems: Iterable[LocalSystem], prompts: Sequence[Tokens], args: argparse.Namespace) -> None:
        self._systems = cycle(systems)
        self._methods = cycle(("", *LOOKUPS))
        self._prompts = prompts
        self._args = args
        self._starts = count(0, 31)
        self._seeds = count(_NUM_PROMPTS)
        #: By prompt: predictions of both kinds. The seed is the prompt's number.
        self._predictions: dict[Tokens, tuple[int, Mapping[str, str]]] = {}

    async def predict(self) -> None:
        """Let the server write the texts that are predicted."""
        predicted = self._prompts[:_NUM_PREDICTED]
        texts = await asyncio.gather(*(self._write(prompt, seed) for seed, prompt in enumerate(predicted)))
        source = random.Random(0)
        for seed, (prompt, text) in enumerate(zip(predicted, texts, strict=True)):
            words = re.findall(r"\s*\S+", text)
            mixed = "".join(word + source.choice(words) for word in words)
            wrong = mixed if seed % 2 else texts[seed - 1]
            self._predictions[prompt] = seed, {"right": text, "wrong": wrong}

    async def _write(self, prompt: Tokens, seed: int) -> str:
        params = self._params(self._args.max_tokens, seed)
        async with aclosing(next(self._systems).stream(prompt, params, None, 0)) as pieces:
            return "".join([piece.text async for piece in pieces])

    def _params(self, max_tokens: int, seed: int) -> SamplingParams:
        return SamplingParams(temperature=self._args.temperature, seed=seed, max_tokens=max_tokens, ignore_eos=True)

    async def learn(self, cell: Cell) -> None:
        """Decode with the drafter until the server has learned."""
        begun, num_tokens = time.monotonic(), 0.0
        while time.monotonic() - begun < self._args.warm_up or num_tokens < _LEARNING_TOKENS * cell.sessions:
            cell.learning.append(await self._window(cell, next(self._starts), next(self._seeds), is_plain=False))
            num_tokens += cell.learning[-1] * self._args.seconds
        cell.counts.clear()

    async def pair(self, cell: Cell, number: int) -> None:
        """A window of each kind; every other pair begins with the drafter."""
        start, seed = next(self._starts), next(self._seeds)
        for is_plain in (number % 2 == 0, number % 2 == 1):
            speed = await self._window(cell, start, seed, is_plain=is_plain)
            (cell.plain if is_plain else cell.drafted).append(speed)

    async def _window(self, cell: Cell, start: int, seed: int, *, is_plain: bool) -> float:
        from benchmarks.load import hold  # noqa: PLC0415 (gRPC)

        drafter = CONTROL if is_plain else cell.drafter
        prompts = list(self._predictions) if cell.drafter in PREDICTIONS else self._prompts
        first = start % len(prompts)

        async def ask(prompt: Tokens, length: int) -> AsyncGenerator[Piece, None]:
            known_seed, predictions = self._predictions.get(prompt, (0, {}))
            is_predicted = cell.drafter in PREDICTIONS
            params = self._params(length, known_seed if is_predicted else seed)
            prediction = predictions[drafter] if drafter in PREDICTIONS else ""
            k = 0 if drafter == CONTROL else None
            method = drafter if drafter in LOOKUPS else next(self._methods) if drafter == MIXED else ""
            system = next(self._systems)
            async with aclosing(system.stream(prompt, params, None, k, method=method, prediction=prediction)) as pieces:
                async for piece in pieces:
                    yield piece
                    if piece.speculation and not is_plain:
                        for name, value in piece.speculation.items():
                            if name.startswith("num_"):
                                cell.counts[name] = cell.counts.get(name, 0) + value
                        cell.counts["num_tokens"] = cell.counts.get("num_tokens", 0) + length

        rotated = [*prompts[first:], *prompts[:first]]
        held = await hold(
            ask, rotated, num_clients=cell.sessions, max_tokens=self._args.max_tokens, seconds=self._args.seconds
        )
        return held.tokens_per_s


async def measure(args: argparse.Namespace, tell: Callable[[Cell], None]) -> list[Cell]:
    """Every cell asked for; ``tell`` hears of each."""
    from gateway.text.tokenizer import TextTokenizer  # noqa: PLC0415
    from tandem.bench.prompts import pick_prompts  # noqa: PLC0415
    from tandem.bench.systems import start_systems  # noqa: PLC0415 (gRPC)

    cells: list[Cell] = []
    with tempfile.TemporaryDirectory() as scratch:
        for system, name in ((system, name) for system in args.systems for name in args.pairs):
            target, draft, options = PAIRS[name]
            drafters = [each for each in args.drafters if draft == "good" or each not in LOOKUPS]
            deployment = pair(target, draft, args.k, Path(scratch), **options)
            fronts = {str(number): deployment for number in range(2 if system == "gateways" else 1)}
            prompts = pick_prompts(
                TextTokenizer.load(deployment.target.model.model).encode, _NUM_PROMPTS, _PROMPT_TOKENS
            )
            async with start_systems(SYSTEMS[system], fronts) as running:
                windows = Windows(running.values(), prompts, args)
                if set(drafters) & set(PREDICTIONS):
                    await windows.predict()
                for sessions in args.sessions:
                    for drafter in drafters:
                        cell = Cell(system=system, pair=name, drafter=drafter, sessions=sessions)
                        await windows.learn(cell)
                        for number in range(args.repeats):
                            await windows.pair(cell, number)
                        cells.append(cell)
                        tell(cell)
    return cells


def table(cells: Iterable[Cell], floor: float) -> str:
    """Medians and quartiles in Markdown: a row for each drafter, a column for each number of sessions."""
    places = {cell.key: cell for cell in cells}
    sessions = sorted({key[-1] for key in places})
    rows = [["system", "pair", "drafter", *map(str, sessions)], ["---"] * (3 + len(sessions))]
    for row in sorted({key[:-1] for key in places}):
        found = {number: places[*row, number] for number in sessions if (*row, number) in places}
        one = next(iter(found.values()))
        texts = {number: f"{cell.ratio.spread.median:.2f} ({cell.ratio.quartiles})" for number, cell in found.items()}
        marked = {number: f"**{text}**" if found[number].is_slow(floor) else text for number, text in texts.items()}
        rows.append([one.system, one.pair, one.drafter, *(marked.get(number, "–") for number in sessions)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def read_cells(path: Path) -> list[Cell]:
    """What a JSON file holds; nothing where there is none."""
    return [Cell(**values) for values in json.loads(path.read_text())["cells"]] if path.is_file() else []


def parser() -> Parser:
    """The flags."""
    flags = Parser("python -m benchmarks.never_slower", description=__doc__)
    for name, known, default in (
        ("systems", tuple(SYSTEMS), ("serve", "embedded")),
        ("pairs", tuple(PAIRS), ("bundled", "poor", "padded")),
        ("drafters", (*DRAFTERS, "none"), DRAFTERS),
    ):
        text = f"of {', '.join(known)}; default: {', '.join(default)}"
        flags.add_argument(f"--{name}", type=command.names(known), default=default, help=text)
    flags.add_argument("--sessions", type=command.numbers, default=SESSIONS, help="default: 1,2,4,8,32")
    flags.add_argument("--k", type=int, default=4, help="tokens that the draft drafts in a round at most")
    flags.add_argument("--temperature", type=float, default=0.8, help="0 is greedy")
    flags.add_argument("--warm-up", type=float, default=3.0, help="seconds the server learns at first, at least")
    flags.add_argument("--repeats", type=int, default=8, help="windows of each kind")
    flags.add_argument("--seconds", type=float, default=0.8, help="length of each window")
    flags.add_argument("--max-tokens", type=int, default=96, help="tokens of a request")
    flags.add_argument("--floor", type=float, default=0.97, help="the least ratio that is good enough")
    flags.add_argument("--json", metavar="FILE", help="add the cells to this file, and print all it holds")
    return flags


def main() -> int:
    """Measure, write, print."""
    args = parser().parse_args()
    begun = time.monotonic()
    args.drafters = [name for name in args.drafters if name != "none"]
    new = asyncio.run(measure(args, lambda cell: print(cell.show(), flush=True))) if args.drafters else []
    old = read_cells(Path(args.json)) if args.json else []
    cells = list({cell.key: cell for cell in (*old, *new)}.values())
    if args.json:
        Path(args.json).write_text(json.dumps({"cells": [asdict(cell) for cell in cells]}, indent=1) + "\n")
    print(f"\n{table(cells, args.floor)}\n")
    print(f"{usable_cores()} cores, {len(new)} cells in {time.monotonic() - begun:.0f} s")
    return 1 if any(cell.is_slow(args.floor) for cell in cells) else 0


if __name__ == "__main__":
    command.run("benchmarks.never_slower", main)
