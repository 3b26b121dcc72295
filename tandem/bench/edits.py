"""Code that is edited again and again: successive versions of a text, and requests for the next one.

What a client sends that has its code changed: the version there is, and the beginning of the one wanted. An answer
repeats most of its prompt, and much of the answers before it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from itertools import islice
from typing import Final

from tandem.bench.prompts import pick_texts

#: Versions of one text that follow each other.
NUM_EDITS: Final = 6
#: What stands between a version and the next.
MARK: Final = "\n# Edited:\n"


def versions(text: str, seed: int) -> Iterator[tuple[str, str]]:
    """:data:`NUM_EDITS` pairs of a version and the next, from ``text`` on."""
    rng, before = random.Random(seed), text
    for _ in range(NUM_EDITS):
        after = _edited(before, rng)
        yield before, after
        before = after


def pick_edits(count: int, num_characters: int) -> list[tuple[str, str]]:
    """``count`` requests: what is shown, a piece of held-out code of ``num_characters``, and what is wanted, its next
    version. The versions of one piece follow each other.

    Raises :class:`~specdec.errors.InvalidRequest` when the held-out files do not yield so many.
    """
    pieces = pick_texts(-(-count // NUM_EDITS), num_characters)
    pairs = (pair for seed, piece in enumerate(pieces) for pair in versions(piece, seed))
    return [(before + MARK, after) for before, after in islice(pairs, count)]


def _edited(text: str, rng: random.Random) -> str:
    """One name is another everywhere, one line is gone, one is new."""
    names = sorted(set(re.findall(r"[a-z_]{4,}", text)))
    if names:
        name = rng.choice(names)
        text = re.sub(rf"\b{name}\b", f"{name}_{rng.randrange(10)}", text)
    lines = text.splitlines(keepends=True)
    if len(lines) > 1:
        del lines[rng.randrange(len(lines))]
    at = rng.randrange(len(lines))
    indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())].rstrip("\n")
    lines.insert(at, f"{indent}checked = {rng.random()}\n")
    return "".join(lines)
