"""What came out: one measurement per mode and number of sessions, and what follows from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from specdec.structured_outputs import StructuredOutputsParams
from tandem.bench.answers import TimedAnswer
from tandem.bench.limits import Limits, Spread, quantile
from tandem.bench.modes import PLAIN
from tandem.bench.parts import RoundCosts
from tandem.bench.tasks import TASKS

PERCENTILES = (0.5, 0.9, 0.99)


@dataclass(slots=True)
class Measurement:
    """What one mode brought."""

    #: Drafted tokens a round at most; None is the server's own number.
    k: int | None
    #: Whether the drafted tokens are trees.
    is_tree: bool = False
    #: Tokens per second, one entry per batch, in the order of the batches.
    rates: list[float] = field(default_factory=list)
    #: The same from each answer's first token on, without the time it takes to ingest the prompt.
    decode_rates: list[float] = field(default_factory=list)
    #: Seconds: one entry per answer, per token, per piece.
    ttft_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    #: Seconds per round after the first token, one entry per answer.
    round_s: list[float] = field(default_factory=list)
    #: The answers' speculation metrics, summed: counts and nanoseconds.
    speculation: dict[str, int] = field(default_factory=dict)
    histogram: list[int] = field(default_factory=list)
    #: Why answers had no round with drafted tokens, as the server says.
    no_speculation_reasons: set[str] = field(default_factory=set)
    #: Tokens and pieces of the answers whose server reports no speculation metrics.
    num_tokens: int = 0
    num_pieces: int = 0
    #: Seconds measured, and what target and draft worked in them.
    wall_s: float = 0.0
    busy_s: list[float] = field(default_factory=list)
    costs: RoundCosts | None = None
    #: With a schema: answers that fit it, and others that the limit of tokens cut off.
    num_fitting: int = 0
    num_cut_off: int = 0
    #: Greedy answers that were compared with those of plain decoding, those that differ, and the batches with such.
    num_compared: int = 0
    num_differing: int = 0
    differing_runs: set[int] = field(default_factory=set)

    def add_run(self, rate: float, answers: Sequence[TimedAnswer] = ()) -> None:
        """Add one batch."""
        self.rates.append(rate)
        decode_rates = [answer.decode_rate for answer in answers]
        if (of_all := [each for each in decode_rates if each is not None]) and len(of_all) == len(decode_rates):
            self.decode_rates.append(sum(of_all))
        for answer in answers:
            self.ttft_s.append(answer.ttft_s)
            self.itl_s += answer.itl_s
            self.gaps_s += answer.gaps_s
            if not answer.speculation:
                self.num_tokens += answer.num_tokens
                self.num_pieces += len(answer.pieces)
            if steps := answer.num_steps:
                self.round_s.append(answer.decode_s / steps)
            if reason := answer.speculation.get("no_speculation_reason"):
                self.no_speculation_reasons.add(reason)
            self._count(answer, 1)

    def compare(self, answers: Sequence[TimedAnswer], plain: Sequence[TimedAnswer]) -> None:
        """Take the last batch's answers that are not those of plain decoding out of what is counted: text that repeats
        itself is easily drafted, so wrong text would look like a speed-up.
        """
        others = [own for own, right in zip(answers, plain, strict=True) if own.text != right.text]
        self.num_compared += len(answers)
        self.num_differing += len(others)
        if others:
            self.differing_runs.add(len(self.rates) - 1)
        for answer in others:
            self._count(answer, -1)

    def _count(self, answer: TimedAnswer, sign: int) -> None:
        """Add an answer's speculation metrics, or take them back."""
        for name, value in answer.speculation.items():
            if isinstance(value, int) and (name.startswith("num_") or name.endswith(("_ns", "_bytes"))):
                self.speculation[name] = self.speculation.get(name, 0) + sign * value
        self.histogram.extend([0] * (len(answer.histogram) - len(self.histogram)))
        for accepted, rounds in enumerate(answer.histogram):
            self.histogram[accepted] += sign * rounds

    def add_busy(self, wall_s: float, busy_ns: Sequence[int]) -> None:
        """Add how long target and draft worked during a batch."""
        self.wall_s += wall_s
        self.busy_s.extend([0.0] * (len(busy_ns) - len(self.busy_s)))
        for service, spent in enumerate(busy_ns):
            self.busy_s[service] += spent / 1e9

    def count(self, name: str) -> int | None:
        """One of the speculation metrics; None where the server does not report it."""
        return self.speculation.get(name)

    @property
    def drafts(self) -> bool:
        """Whether any round carried drafted tokens."""
        return bool(self.count("num_spec_steps"))

    @property
    def state_bytes(self) -> float | None:
        """Bytes of the target's hidden states that a position takes; None where none were sent."""
        count, num_bytes = self.count("num_hidden_states"), self.count("hidden_state_bytes")
        return num_bytes / count if count and num_bytes else None

    @property
    def alpha(self) -> float | None:
        """Acceptance per token: accepted / (accepted + rounds that ended with a rejection)."""
        accepted, rejections = self.count("num_accepted_draft_tokens"), self.count("num_rejections")
        if not self.drafts or accepted is None or rejections is None:
            return None
        return accepted / (accepted + rejections) if accepted + rejections else 0.0

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per round that carried drafts, the target's own included."""
        rounds, accepted = self.count("num_spec_steps"), self.count("num_accepted_draft_tokens")
        return 1.0 + accepted / rounds if rounds and accepted is not None else None

    @property
    def acceptance_rates(self) -> list[float]:
        """Share of the rounds that carried drafts in which more than j drafted tokens were accepted, by j."""
        rounds = self.count("num_spec_steps")
        return [sum(self.histogram[j:]) / rounds for j in range(1, len(self.histogram))] if rounds else []

    @property
    def mean_drafts(self) -> float | None:
        """Drafted tokens per round that carried any."""
        rounds, drafted = self.count("num_spec_steps"), self.count("num_draft_tokens")
        return drafted / rounds if rounds and drafted is not None else None

    @property
    def limits(self) -> Limits | None:
        """What α, c and d allow; None for trees, whose tokens are not all on one path."""
        if self.costs is None or self.alpha is None or self.k is None or self.is_tree:
            return None
        return Limits.of(self.alpha, self.k, self.costs.c, self.costs.d, self.costs.verify_ratio)

    @property
    def round_ms(self) -> float | None:
        """Median duration of a target's step with all that belongs to it, over answers."""
        return quantile(self.round_s, 0.5) * 1e3 if self.round_s else None

    def percentiles_ms(self, values: Sequence[float]) -> dict[str, float]:
        """``p50`` and so on of seconds, in milliseconds; empty without any."""
        return {f"p{100 * share:g}": quantile(values, share) * 1e3 for share in PERCENTILES} if values else {}

    def busy_share(self, service: int) -> float | None:
        """Share of the time the target (0) or the draft (1) worked."""
        return self.busy_s[service] / self.wall_s if len(self.busy_s) > service else None


@dataclass(slots=True)
class Section:
    """All modes with one number of sessions; prompts of equal index were the same."""

    num_sessions: int
    modes: dict[str, Measurement]
    #: The kind of text; None for the user's own.
    text: str | None = None
    #: What the answers had to look like.
    language: StructuredOutputsParams | None = None

    @property
    def is_task(self) -> bool:
        """Whether it is one of the task suite's, which are reported together."""
        return self.text in TASKS and self.language is None

    @property
    def title(self) -> str:
        """What sets it apart from other sections."""
        sessions = f"{self.num_sessions} session{'s' if self.num_sessions > 1 else ''}"
        return ", ".join(filter(None, [sessions, self.text, "with the schema" if self.language else None]))

    def speedup(self, name: str) -> Spread | None:
        """Speed over plain decoding, from pairs on the same prompts with the same text; None where there are none."""
        plain = self.modes.get(PLAIN)
        return None if plain is None else self._ratio(name, self.modes[name].rates, plain.rates)

    def decode_speedup(self, name: str) -> Spread | None:
        """The same from the first token on, which is what the limits are about; None also where that is not known."""
        plain = self.modes.get(PLAIN)
        return None if plain is None else self._ratio(name, self.modes[name].decode_rates, plain.decode_rates)

    def compare(self, answers: Mapping[str, Sequence[TimedAnswer]]) -> None:
        """Compare the last batch's answers of every mode with those of plain decoding."""
        plain = answers.get(PLAIN)
        for name, own in answers.items():
            if plain and own and name != PLAIN:
                self.modes[name].compare(own, plain)

    def _ratio(self, name: str, ours: Sequence[float], theirs: Sequence[float]) -> Spread | None:
        """Of pairs; None where not every run of both has a number, or no text is that of plain decoding."""
        if not ours or len(ours) != len(theirs):
            return None
        differing = self.modes[name].differing_runs
        ratios = [one / other for i, (one, other) in enumerate(zip(ours, theirs, strict=True)) if i not in differing]
        return Spread.of(ratios) if ratios else None

    def summary(self) -> dict[str, Any]:
        """Everything, for a JSON file."""
        return {
            "num_sessions": self.num_sessions,
            "text": self.text,
            "structured": self.language is not None,
            "modes": {name: self._summary(name) for name in self.modes},
        }

    def _summary(self, name: str) -> Mapping[str, Any]:
        mode, speedup, decode_speedup = self.modes[name], self.speedup(name), self.decode_speedup(name)
        limits = mode.limits
        values: dict[str, Any] = {
            "tokens_per_s": mode.rates,
            "decode_tokens_per_s": mode.decode_rates,
            "speedup": None if speedup is None else asdict(speedup),
            "decode_speedup": None if decode_speedup is None else asdict(decode_speedup),
            "ttft_ms": mode.percentiles_ms(mode.ttft_s),
            "itl_ms": mode.percentiles_ms(mode.itl_s),
            "gap_ms": mode.percentiles_ms(mode.gaps_s),
            "target_busy": mode.busy_share(0),
            "draft_busy": mode.busy_share(1),
            "round_ms": mode.round_ms,
        }
        if self.language is not None:
            values |= {"num_fitting": mode.num_fitting, "num_cut_off": mode.num_cut_off}
        if mode.num_compared:
            differing = {"num_differing": mode.num_differing, "differing_runs": sorted(mode.differing_runs)}
            values |= {"num_compared": mode.num_compared, **differing}
        if mode.num_pieces:
            values |= {"num_tokens": mode.num_tokens, "num_pieces": mode.num_pieces}
        if mode.drafts:
            values |= {
                "k": mode.k,
                "mean_drafts": mode.mean_drafts,
                "alpha": mode.alpha,
                "acceptance_length": mode.acceptance_length,
                "acceptance_histogram": mode.histogram,
                "acceptance_rates": mode.acceptance_rates,
                **mode.speculation,
            }
        if mode.costs is not None:
            costs = mode.costs
            values |= {**asdict(costs), "c": costs.c, "d": costs.d, "verify_ratio": costs.verify_ratio}
        if limits is not None and decode_speedup is not None:
            values |= {
                "serial_limit": limits.serial,
                "overlapped_limit": limits.overlapped,
                "priced_limit": limits.priced,
                "share_of_serial_limit": decode_speedup.median / limits.serial,
                "share_of_overlapped_limit": decode_speedup.median / limits.overlapped,
                "share_of_priced_limit": decode_speedup.median / limits.priced,
            }
        return values
