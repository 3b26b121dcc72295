"""How many drafted tokens a greedy round would commit, by what a drafter gets right from each position.

No speculative loop runs: verification leaves the target's text as it is, so it is written once, and the drafter is
asked from every position what it would have proposed there.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AcceptanceRates:
    """`length`: mean tokens a round commits, the target's own included; `rates[j]`: share of rounds that accept more
    than j drafted tokens."""

    length: float
    rates: tuple[float, ...]

    def __str__(self) -> str:
        return f"{self.length:.2f} ({' '.join(f'{rate:.2f}' for rate in self.rates)})"


def greedy_acceptance(hits: torch.Tensor, sizes: torch.Tensor) -> AcceptanceRates:
    """Acceptance over rows of which the first `sizes` int64 [B] positions count.

    `hits` bool [B, S, k]: whether the j-th token drafted from position s is the target's, given those before it. A
    round from s commits its leading hits and one token of the target's own, and the next one starts behind them.
    """
    depth = hits.shape[-1]
    accepted = hits.long().cumprod(-1).sum(-1).tolist()  # [B, S]
    num_tokens, counts = 0, [0] * (depth + 1)
    for row, size in zip(accepted, sizes.tolist(), strict=True):
        position = 0
        while position < size:
            # The last tokens of a row have fewer after them that could be accepted.
            length = min(row[position], size - position - 1)
            counts[length] += 1
            position += length + 1
        num_tokens += size
    num_rounds = max(1, sum(counts))
    rates = tuple(sum(counts[j + 1 :]) / num_rounds for j in range(depth))
    return AcceptanceRates(num_tokens / num_rounds, rates)
