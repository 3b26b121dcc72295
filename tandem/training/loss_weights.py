"""Weights of the parts of a drafter's loss."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LossWeights:
    """Weights of the parts of a loss."""

    #: Of the Kullback-Leibler divergence from the target, over its top tokens and the rest.
    divergence: float = 1.0
    #: Of the cross entropy of the target's first choice, which a greedy round accepts.
    greedy: float = 0.3
    #: Of the total variation, which a sampled round rejects (Leviathan et al. 2023, theorem 3.5).
    variation: float = 0.5
