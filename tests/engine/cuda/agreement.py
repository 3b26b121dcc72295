"""Does a device answer as the CPU does? Logits of ragged passes, and what is drafted and decided from given logits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch

from engine.chains import drawn
from engine.engine import Segment
from engine.loading.load import load_engine
from engine.sampling.drafting import collect
from engine.sampling.rows import Rows
from engine.sampling.state import SamplingState
from specdec.params import SamplingParams
from specdec.rules import Rule
from specdec.settings import ModelSettings
from target_service.verification.rounds import Round
from target_service.verification.verifier import Verifier

#: Tokens fed to each sequence, pass by pass: prompts, decoding, rounds of several rows, and long next to short ones.
_PASSES: Final = (
    (7, 40, 100, 300, 1, 65),
    (1, 1, 1, 1, 1, 1),
    (5, 1, 3, 5, 2, 5),
    (1, 0, 0, 200, 9, 0),
    (5, 5, 5, 5, 5, 5),
)
#: Entries taken back after each pass, at most.
_TAKEN_BACK: Final = 3
_ROOM: Final = 544
#: Distance of a row of logits relative to the logits' spread.
_LIMITS: Final = {"float32": 1e-3, "bfloat16": 8e-2}
_SAMPLING: Final[tuple[dict[str, Any], ...]] = (
    {"temperature": 0.0},
    {},
    {"temperature": 0.7, "top_k": 20},
    {"top_p": 0.8},
    {"min_p": 0.05, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"logit_bias": {5: 4.0}, "bad_token_ids": ((7,), (1, 2))},
)
_DRAFTS: Final = 3
_COPIES: Final = 4


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison with the CPU."""

    name: str
    #: Distance of the worst row of logits relative to their spread, the share of sessions decided otherwise, or 1 for
    #: what should have been and was not.
    difference: float
    limit: float

    @property
    def passed(self) -> bool:
        """Whether the difference is small enough; one that is not a number is not."""
        return self.difference <= self.limit


def check_device(folder: str, device: str) -> Iterator[Check]:
    """Compare all paths that run a checkpoint on ``device`` with the CPU, then what is made of logits."""
    expected, _ = _logits(folder, "cpu", "float32", enforce_eager=True)
    for dtype, enforce_eager in (("float32", True), ("float32", False), ("bfloat16", False)):
        actual, path = _logits(folder, device, dtype, enforce_eager=enforce_eager)
        yield Check(f"logits, {dtype}, {path}", distance(actual, expected), _LIMITS[dtype])
        if device.startswith("cuda"):
            wanted = "triton attention" if enforce_eager else "cuda graphs"
            yield Check(f"{wanted} used in {dtype}", float(not path.endswith(wanted)), 0.0)
    decided = decide(expected, torch.device("cpu")), decide(expected, torch.device(device))
    different = sum(here != there for here, there in zip(*decided, strict=True))
    yield Check("tokens drafted and decided", different / len(decided[0]), 0.0)


def distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square distance of the worst row of [N, V], relative to the spread of what was expected."""
    spread = (expected - expected.mean(-1, keepdim=True)).square().mean().sqrt()
    return float(((actual - expected).square().mean(-1).sqrt() / spread).max())


def decide(logits: torch.Tensor, device: torch.device) -> list[object]:
    """What sessions of every rule and kind of sampling draft from some rows of logits and decide from others."""
    kinds = [(rule, params) for _ in range(_COPIES) for rule in Rule for params in _SAMPLING]
    states = [
        SamplingState(SamplingParams(seed=seed, **params), [1, 2, 3], 2, logits.shape[1], device=device)
        for seed, (_, params) in enumerate(kinds)
    ]
    rules = [rule for rule, _ in kinds]
    generator = torch.Generator().manual_seed(1)

    def rows_of(count: int) -> torch.Tensor:
        """Without equal logits, of which a draft on a GPU may name others."""
        noise = 1e-3 * torch.randn(count, logits.shape[1], generator=generator)
        return (logits[torch.randint(len(logits), (count,), generator=generator)] + noise).to(device)

    target = rows_of(len(kinds) * (_DRAFTS + 1))
    rows, steps = Rows.after(states), []
    for step in range(_DRAFTS):
        noise = torch.randn(len(kinds), logits.shape[1], generator=generator).to(device)
        steps.append(drawn(target[step :: _DRAFTS + 1] + 0.3 * noise, rows, rules))
        rows = rows.extended(steps[-1].token_ids)
    chains = collect(steps)
    rounds = [
        Round(state, rule, i * (_DRAFTS + 1), chain.token_ids, chain.q_rows)
        for i, (state, rule, chain) in enumerate(zip(states, rules, chains, strict=True))
    ]
    verifier = Verifier()
    verifier.warm_up(device, logits.shape[1], 0)
    outcomes = verifier.verify(target, rounds)
    return [(chain, o.num_accepted, o.token_ids) for chain, o in zip(chains, outcomes, strict=True)]


def _logits(folder: str, device: str, dtype: str, *, enforce_eager: bool) -> tuple[torch.Tensor, str]:
    """Logits float32 [N, V], on the CPU, of every row of the passes; and how the engine runs them."""
    settings = ModelSettings(
        model=folder, device=device, dtype=dtype, enforce_eager=enforce_eager, kv_cache_memory_bytes=2**28
    )
    engine = load_engine(settings)
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(1, engine.info.vocab_size, (len(_PASSES[0]), _ROOM), generator=generator).tolist()
    sequences = [engine.pool.open(_ROOM) for _ in texts]
    found = []
    for counts in _PASSES:
        segments = [
            Segment(sequence, text[sequence.length :][:count], count)
            for sequence, text, count in zip(sequences, texts, counts, strict=True)
            if count
        ]
        found.append(engine.forward(segments).float().cpu())
        for sequence, count in zip(sequences, counts, strict=True):
            engine.pool.rollback(sequence, sequence.length - min(count // 2, _TAKEN_BACK))
    path = engine.runner.name
    engine.close()
    return torch.cat(found), path
