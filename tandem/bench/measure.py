"""The run: every way of decoding sees every prompt once, in turns, after a warm-up; then the probe."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from specdec.sampling.params import SamplingParams
from specdec.sessions import ModelInfo, Rule
from tandem.bench.answers import Answer, collect
from tandem.bench.huggingface import MODES, HuggingFace
from tandem.bench.limits import (
    Spread,
    acceptance_per_token,
    overlapped_limit,
    quantile,
    serial_limit,
    tokens_per_round,
)
from tandem.bench.probe import Costs, probe
from tandem.bench.systems import System

PLAIN, SPECULATIVE = "plain", "speculative"

Prompt = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to run."""

    #: Each batch is sent at once; one prompt a batch is one session.
    warm_up: Sequence[Sequence[Prompt]]
    batches: Sequence[Sequence[Prompt]]
    probes: Sequence[Sequence[Prompt]]
    params: SamplingParams
    rule: Rule | None
    k: int


@dataclass(slots=True)
class Measurement:
    """What came out."""

    k: int
    #: Way of decoding → tokens per second, one entry per batch, in the order of the batches.
    rates: dict[str, list[float]] = field(default_factory=dict)
    #: Milliseconds per round after the first token, one entry per speculative answer.
    round_ms: list[float] = field(default_factory=list)
    #: Rounds by accepted tokens, summed.
    histogram: list[int] = field(default_factory=list)
    costs: Costs | None = None
    target: ModelInfo | None = None
    draft: ModelInfo | None = None

    @property
    def alpha(self) -> float:
        """Acceptance per token."""
        return acceptance_per_token(self.histogram, self.k)

    @property
    def acceptance_length(self) -> float:
        """Tokens per round that carried drafts, the target's own included."""
        rounds = sum(self.histogram)
        return 1.0 + sum(a * n for a, n in enumerate(self.histogram)) / rounds if rounds else 0.0

    def ratio(self, way: str, to: str = PLAIN) -> Spread:
        """Speed of one way over another, from pairs on the same prompts."""
        return Spread.of([ours / theirs for ours, theirs in zip(self.rates[way], self.rates[to], strict=True)])

    @property
    def round_overhead_ms(self) -> float:
        """What a round takes beyond drafting and verifying: gateway, gRPC, scheduling."""
        assert self.costs is not None
        return quantile(self.round_ms, 0.5) - self.costs.verify_ms - self.k * self.costs.draft_ms

    def limits(self) -> tuple[float, float]:
        """The serial and the overlapped limit of the speed over plain decoding."""
        assert self.costs is not None
        arguments = (self.alpha, self.k, self.costs.c, self.costs.d)
        return serial_limit(*arguments), overlapped_limit(*arguments)

    def summary(self) -> dict[str, object]:
        """Everything, for a JSON file."""
        costs = self.costs
        speedup = self.ratio(SPECULATIVE)
        serial, overlapped = self.limits()
        return {
            "tokens_per_s": self.rates,
            "speedup": {"median": speedup.median, "low": speedup.low, "high": speedup.high},
            "k": self.k,
            "alpha": self.alpha,
            "acceptance_length": self.acceptance_length,
            "expected_acceptance_length": tokens_per_round(self.alpha, self.k),
            "acceptance_histogram": self.histogram,
            "serial_limit": serial,
            "overlapped_limit": overlapped,
            "share_of_serial_limit": speedup.median / serial,
            "share_of_overlapped_limit": speedup.median / overlapped,
            "round_ms": quantile(self.round_ms, 0.5),
            "round_overhead_ms": self.round_overhead_ms,
            **(
                {}
                if costs is None
                else {
                    "decode_ms": costs.decode_ms,
                    "verify_ms": costs.verify_ms,
                    "draft_ms": costs.draft_ms,
                    "wire_ms": costs.wire_ms,
                    "c": costs.c,
                    "d": costs.d,
                    "verify_ratio": costs.verify_ratio,
                }
            ),
        }


async def measure(
    system: System, plan: Plan, *, rival: HuggingFace | None = None, tell: Callable[[str], None] = lambda _: None
) -> Measurement:
    """Run the plan. Ways of decoding take turns on each batch, and who begins changes from batch to batch."""
    result = Measurement(plan.k)
    max_tokens = plan.params.max_tokens or 1

    async def tandem(batch: Sequence[Prompt], k: int, *, keep: bool) -> float:
        started = time.perf_counter()
        answers = await asyncio.gather(*(collect(system.stream(prompt, plan.params, plan.rule, k)) for prompt in batch))
        seconds = time.perf_counter() - started
        if k and keep:
            _take(result, answers)
        return sum(answer.num_tokens for answer in answers) / seconds

    async def huggingface(mode: str, batch: Sequence[Prompt], _: bool) -> float:
        assert rival is not None
        return len(batch) * max_tokens / await rival.run(mode, batch, max_tokens)

    ways: dict[str, Callable[[Sequence[Prompt], bool], Awaitable[float]]] = {
        PLAIN: lambda batch, keep: tandem(batch, 0, keep=keep),
        SPECULATIVE: lambda batch, keep: tandem(batch, plan.k, keep=keep),
    }
    if rival is not None:
        for mode in _modes(len(plan.batches[0])):
            ways[mode] = partial(huggingface, mode)
    for batch in plan.warm_up:
        for way in ways.values():
            await way(batch, False)
    result.rates = {name: [] for name in ways}
    for number, batch in enumerate(plan.batches):
        names = list(ways)
        start = number % len(names)
        for name in names[start:] + names[:start]:
            result.rates[name].append(await ways[name](batch, True))
        tell(f"{number + 1} of {len(plan.batches)} batches measured")
    async with system.backends() as router:
        result.target, result.draft = router.model(), router.draft_model()
        result.costs = await probe(router, plan.probes, plan.params, plan.rule, plan.k)
    return result


def _modes(batch_size: int) -> list[str]:
    """Hugging Face speculates for one sequence at a time only."""
    return list(MODES) if batch_size == 1 else [mode for mode, extra in MODES.items() if not extra]


def _take(result: Measurement, answers: Sequence[Answer]) -> None:
    for answer in answers:
        if answer.num_rounds:
            result.round_ms.append(1000 * answer.decode_s / answer.num_rounds)
        result.histogram.extend([0] * (len(answer.histogram) - len(result.histogram)))
        for accepted, rounds in enumerate(answer.histogram):
            result.histogram[accepted] += rounds
