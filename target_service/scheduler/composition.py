"""What one step feeds: rounds first, prompts in the room that is left, shared fairly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

#: Share of a step's tokens kept for prompts while any is waiting, so that many rounds cannot shut new sessions out.
PREFILL_SHARE: Final = 1 / 8
#: Prompts get at least this many tokens each: the fixed cost of a sequence in a batch should not dominate.
MIN_CHUNK: Final = 32


def take_rounds(tokens: Sequence[int], num_prefill: int, max_tokens: int) -> int:
    """How many rounds, in order of arrival, one step takes.

    ``tokens``: tokens of each waiting round; ``num_prefill``: prompt tokens waiting. At least one is taken.
    """
    room = max_tokens - min(num_prefill, int(max_tokens * PREFILL_SHARE))
    taken = 0
    for need in tokens:
        if need > room and taken:
            break
        room -= need
        taken += 1
    return taken


def prefill_room(num_round_tokens: int, max_tokens: int, *, is_drafting: bool) -> int:
    """Tokens of a step that prompts may have; rounds take ``num_round_tokens`` of ``max_tokens``.

    ``is_drafting``: a session is between two rounds, or has one in this step. Its round waits for the step that runs
    when it arrives, and then for its own. Prompts fill steps by half, so that both delay it by one full step at most.
    """
    least = int(max_tokens * PREFILL_SHARE)
    room = max_tokens - num_round_tokens
    return max(min(room, least), max_tokens // 2 - num_round_tokens) if is_drafting else room


def share_prefill(needs: Sequence[int], room: int) -> list[int]:
    """Tokens each waiting prompt gets, in order: what it needs, or an equal share of the room if that is less.

    What short prompts leave of their share goes to the longer ones. Where the shares would fall below ``MIN_CHUNK``,
    the first prompts share alone; the caller moves them to the back of the queue.
    """
    shares = [0] * len(needs)
    chosen = range(min(len(needs), max(1, room // MIN_CHUNK)))
    for count, index in enumerate(sorted(chosen, key=lambda index: needs[index])):
        shares[index] = max(0, min(needs[index], room // (len(chosen) - count)))
        room -= shares[index]
    return shares
