"""Which prompts are sent when: to warm up, to be measured, to be timed in parts."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Final

from tandem.bench.prompts import pick_prompts, pick_texts, read_prompts

Tokens = tuple[int, ...]
Prompt = str | Tokens

NUM_WARM_UP: Final = 2
NUM_PROBES: Final = 3
#: Batches measured: with few sessions, and from ``_LARGE`` sessions on.
NUM_BATCHES: Final = 8
NUM_LARGE_BATCHES: Final = 4
_LARGE: Final = 8
#: Characters per token of source code, about, where a server's tokens are not known.
_CHARACTERS_PER_TOKEN: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to run with one number of sessions; each batch is sent at once."""

    warm_up: Sequence[Sequence[Prompt]]
    batches: Sequence[Sequence[Prompt]]
    #: For the parts of a round; none where only the front of a server can be reached.
    probes: Sequence[Sequence[Tokens]] = ()

    @property
    def num_sessions(self) -> int:
        """Prompts in a batch."""
        return len(self.batches[0])


def make_plans(args: argparse.Namespace, encode: Callable[[str], Tokens] | None) -> list[Plan]:
    """A plan per number of sessions. ``encode`` is None for a server whose tokens are not known: prompts stay text.

    Held-out prompts are never used twice. The user's own are all measured, unless their number is given; they come
    round again where more are needed, and for warming up.
    """
    own: list[Prompt] = []
    if args.prompts:
        texts = read_prompts(args.prompts)
        own = list(texts) if encode is None else [encode(text) for text in texts]
    needs: list[tuple[int, int]] = []
    for size in args.batch_size:
        default = -(-len(own) // size) if own else NUM_LARGE_BATCHES if size >= _LARGE else NUM_BATCHES
        needs.append((size, args.num_prompts or default))
    num_probes = 0 if encode is None else NUM_PROBES
    total = sum(size * (NUM_WARM_UP + count + num_probes) for size, count in needs)
    prompts: Iterator[Prompt]
    if own:
        prompts = cycle(own)
    elif encode is None:
        prompts = iter(pick_texts(total, args.prompt_tokens * _CHARACTERS_PER_TOKEN))
    else:
        prompts = iter(pick_prompts(encode, total, args.prompt_tokens))

    def take(size: int, count: int) -> list[list[Prompt]]:
        return [list(islice(prompts, size)) for _ in range(count)]

    plans = []
    for size, count in needs:
        measured = take(size, count)
        probes = [[prompt for prompt in batch if not isinstance(prompt, str)] for batch in take(size, num_probes)]
        plans.append(Plan(warm_up=take(size, NUM_WARM_UP), batches=measured, probes=probes))
    return plans
