"""A target that pretends how much it accepts, so that serving can be measured without a trained draft.

``python -m target_service.synthetic_target LENGTH …`` with the flags of ``tandem target``; ``tandem bench
--synthetic-acceptance-length`` starts it. No request and no option of a service leads here: texts are not the model's.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from target_service.core import TargetCore
from target_service.main import main
from target_service.verification.rounds import Outcome, Round
from target_service.verification.verifier import Verifier


class SyntheticVerifier(Verifier):
    """Accepts a given number of drafted tokens on average, whatever they are.

    Of ``length`` tokens a round one is the target's own. The first ⌊length⌋ − 1 drafted tokens are always accepted, the
    next one with the probability that is left: the schedule of least variance, as of vLLM's method "synthetic".
    """

    length: ClassVar[float] = 1.0

    def __init__(self, *, native: bool = True, num_threads: int | None = None) -> None:
        super().__init__(native=native, num_threads=num_threads)
        self._random = random.Random(0)

    def verify(self, logits: Tensor, rounds: Sequence[Round], masks: Sequence[Tensor] = ()) -> list[Outcome]:
        """Decide as the target does, which costs what it costs; then put other outcomes in the place of those of rounds
        with drafted tokens.
        """
        outcomes = super().verify(logits, rounds, masks)
        places = [i for i, r in enumerate(rounds) if r.draft_token_ids]
        paths = [self._path(rounds[i]) for i in places]
        ends = [
            Round(rounds[i].state, rounds[i].rule, rounds[i].start_row + (path[-1] + 1 if path else 0))
            for i, path in zip(places, paths, strict=True)
        ]
        for i, path, end in zip(places, paths, super().verify(logits, ends), strict=True):
            drafted = tuple(rounds[i].draft_token_ids[place] for place in path)
            outcomes[i] = replace(end, num_accepted=len(path), token_ids=(*drafted, *end.token_ids), path=path)
        return outcomes

    def _path(self, r: Round) -> Sequence[int]:
        """The drafted tokens to accept: of a tree the first child each time."""
        whole, share = divmod(self.length - 1.0, 1.0)
        wanted = int(whole) + (self._random.random() < share)
        parents = r.parents or range(-1, len(r.draft_token_ids) - 1)
        path: list[int] = []
        for place, parent in enumerate(parents):
            if len(path) < wanted and parent == (path[-1] if path else -1):
                path.append(place)
        return path


if __name__ == "__main__":
    SyntheticVerifier.length = float(sys.argv[1])
    TargetCore.verifier_class = SyntheticVerifier
    sys.exit(main(sys.argv[2:]))
