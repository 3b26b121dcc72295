"""Which prompts are sent when: to warm up, to be measured, to be timed in parts."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from typing import Final

from specdec.errors import InvalidRequest
from specdec.structured_outputs import StructuredOutputsParams
from tandem.bench.prompts import pick_prompts, pick_texts, read_prompts
from tandem.bench.tasks import ALL_TASKS, TASKS, make_task_prompts

Tokens = tuple[int, ...]
Prompt = str | Tokens

#: What ``--text`` names beside the tasks: code nobody has seen.
PROSE: Final = "prose"

NUM_WARM_UP: Final = 2
NUM_PROBES: Final = 3
#: Of each task, of which there are many; of the first alone where drafts have a fixed length.
_NUM_TASK_WARM_UP: Final = 1
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
    #: :data:`PROSE` or one of :data:`~tandem.bench.tasks.TASKS`; None for the user's own prompts.
    text: str | None = None
    #: For the parts of a round; none where only the front of a server can be reached.
    probes: Sequence[Sequence[Tokens]] = ()
    #: What the answers must look like; None: anything.
    language: StructuredOutputsParams | None = None

    @property
    def num_sessions(self) -> int:
        """Prompts in a batch."""
        return len(self.batches[0])


def make_plans(args: argparse.Namespace, encode: Callable[[str], Tokens] | None) -> list[Plan]:
    """A plan per text and number of sessions. ``encode`` is None for a server whose tokens are not known: prompts stay
    text.

    Held-out prompts are never used twice. The user's own are all measured, unless their number is given; they come
    round again where more are needed, and for warming up.
    """
    names = texts_of(args)
    if args.prompts:
        texts = read_prompts(args.prompts)
        own: list[Prompt] = list(texts) if encode is None else [encode(text) for text in texts]
        return _plans(args, None, lambda _: cycle(own), len(own), has_probes=encode is not None)
    plans: list[Plan] = []
    for text in names:
        make = partial(_task, text, encode) if text in TASKS else partial(_prose, args, encode)
        more = _plans(args, text, make, 0, has_probes=encode is not None)
        plans += [replace(each, warm_up=()) for each in more] if plans and args.fixed_draft_length else more
    return plans


def texts_of(args: argparse.Namespace) -> list[str]:
    """The kinds of text ``--text`` names, none for own prompts; by default prose, and the tasks for all drafters."""
    if args.prompts:
        if args.text:
            raise InvalidRequest("--prompts is the text; leave --text out", param="text")
        return []
    names = [part.strip() for part in (args.text or "").split(",") if part.strip()]
    if not names and args.drafter == "all":
        names = [ALL_TASKS]
    names = [each for name in names for each in (TASKS if name == ALL_TASKS else (name,))]
    known = (PROSE, ALL_TASKS, *TASKS)
    if unknown := [name for name in names if name not in known]:
        raise InvalidRequest(f"--text names {', '.join(unknown)}; choose from {', '.join(known)}", param="text")
    return names or [PROSE]


def _plans(
    args: argparse.Namespace,
    text: str | None,
    make: Callable[[int], Iterable[Prompt]],
    num_own: int,
    *,
    has_probes: bool,
) -> list[Plan]:
    """A plan per number of sessions; ``make`` gives so many prompts, of which one session's follow each other."""
    needs: list[tuple[int, int]] = []
    for size in args.batch_size:
        default = -(-num_own // size) if num_own else NUM_LARGE_BATCHES if size >= _LARGE else NUM_BATCHES
        needs.append((size, args.num_prompts or default))
    num_warm_up = _NUM_TASK_WARM_UP if text in TASKS else NUM_WARM_UP
    num_probes = NUM_PROBES if has_probes and text not in TASKS else 0
    prompts = iter(make(sum(size * (num_warm_up + count + num_probes) for size, count in needs)))

    def take(size: int, count: int) -> list[list[Prompt]]:
        sessions = [list(islice(prompts, count)) for _ in range(size)]
        return [list(batch) for batch in zip(*sessions, strict=True)]

    plans = []
    for size, count in needs:
        warm_up, measured = take(size, num_warm_up), take(size, count)
        probes = [[prompt for prompt in batch if not isinstance(prompt, str)] for batch in take(size, num_probes)]
        plans.append(Plan(warm_up=warm_up, batches=measured, probes=probes, text=text))
    return plans


def _prose(args: argparse.Namespace, encode: Callable[[str], Tokens] | None, count: int) -> Sequence[Prompt]:
    if encode is None:
        return pick_texts(count, args.prompt_tokens * _CHARACTERS_PER_TOKEN)
    return pick_prompts(encode, count, args.prompt_tokens)


def _task(category: str, encode: Callable[[str], Tokens] | None, count: int) -> Sequence[Prompt]:
    prompts = make_task_prompts(category, count)
    return prompts if encode is None else [encode(prompt) for prompt in prompts]
