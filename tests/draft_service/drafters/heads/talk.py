"""Sessions with draft heads whose verdicts are made up, on true states of a tiny target."""

from __future__ import annotations

from itertools import pairwise

import torch

from specdec.types import HiddenStates
from tests.engine.heads import checkpoints as files
from tests.engine.heads import reference
from tests.engine.heads.block_files import STATES

PROMPT = [3, 14, 15, 9, 26, 5]
K = 4
#: Those that draft trees, and those that draft a block.
TREE_KINDS = ("eagle", "eagle3", "medusa", "mlp_speculator")
BLOCK_KINDS = ("dflash", "dflash2", "dspark")
KINDS = (*TREE_KINDS, *BLOCK_KINDS)
#: Those whose chains are drawn by native code.
NATIVE = ("eagle", "eagle3", *BLOCK_KINDS)


class Talk:
    """One session, and the verdicts on it: their tokens are made up, the states are the target's."""

    def __init__(self, core, model, method, dtype="float32"):
        self._core, self._model, self._dtype = core, model, dtype
        #: What the target does with the states before it sends them.
        self.through = None
        self._layers = {"eagle3": (2, 3, 4), **dict.fromkeys(BLOCK_KINDS, STATES)}.get(method, (-1,))
        self.tokens = list(PROMPT)

    async def open(self, spec):
        self.tokens = list(spec.token_ids)
        self.session = await self._core.open(spec)

    def states(self):
        return reference.target_states(self._model, self.tokens, self._layers)

    def rows(self, start, end):
        states = self.states()[start:end]
        data = (states if self.through is None else self.through(states)).to(getattr(torch, self._dtype))
        return HiddenStates(start, data.shape[1], self._dtype, data.view(torch.uint8).numpy().tobytes())

    async def propose(self, new, k, start=None, end=None, cut=None):
        """Commit tokens, with the states of the positions from ``start`` up to ``end``; ``cut`` of them at a time."""
        base = len(self.tokens)
        self.tokens += new
        start, end = base - 1 if start is None else start, len(self.tokens) - 1 if end is None else end
        edges = [*range(start, end, cut or max(1, end - start)), end]
        states = [self.rows(first, last) for first, last in pairwise(edges)]
        await self.session.advance(base, new, k, states)
        return await self.session.receive()


def greedy(step, k):
    drafted = []
    for _ in range(k):
        drafted.append(int(step(drafted).argmax()))
    return tuple(drafted)


def others(rng, count, but=None):
    tokens = [rng.randrange(files.VOCAB) for _ in range(count)]
    if tokens and tokens[0] == but:
        tokens[0] = (tokens[0] + 1) % files.VOCAB
    return tokens


def verdict(rng, kind, drafted):
    match kind:
        case "none":
            return others(rng, 1, but=drafted[0] if drafted else None)
        case "partial":
            return [*drafted[:2], *others(rng, 1, but=drafted[2] if len(drafted) > 2 else None)]
        case "all":
            return [*drafted, *others(rng, 1)]
        case "catch-up":
            return others(rng, 7)
        case "shorter":
            return [*drafted[:1]]
