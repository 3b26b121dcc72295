"""What one step feeds: rounds first, prompts in the room that is left, shared fairly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

#: Share of a step's rows kept for prompts while any is waiting, so that many rounds cannot shut new sessions out.
PREFILL_SHARE: Final = 1 / 8
#: Prompts get at least this many rows each: the fixed cost of a sequence in a batch should not dominate.
MIN_CHUNK: Final = 32


def take_rounds(rows: Sequence[int], num_prefill: int, max_rows: int) -> int:
    """How many rounds, in order of arrival, one step takes.

    ``rows``: rows of each waiting round; ``num_prefill``: prompt tokens waiting. At least one is taken.
    """
    room = max_rows - min(num_prefill, int(max_rows * PREFILL_SHARE))
    taken = 0
    for need in rows:
        if need > room and taken:
            break
        room -= need
        taken += 1
    return taken


def prefill_room(num_round_rows: int, max_rows: int, *, is_drafting: bool) -> int:
    """Rows of a step that prompts may have, ``num_round_rows`` being taken by rounds.

    ``is_drafting``: some session is between two rounds, or has one in this step. It waits for the end of the step that
    runs when its round comes in, and for the one that takes the round; so that both together delay it by no more than
    one full step, prompts fill steps by half.
    """
    least = int(max_rows * PREFILL_SHARE)
    room = max_rows - num_round_rows
    return max(min(room, least), max_rows // 2 - num_round_rows) if is_drafting else room


def share_prefill(needs: Sequence[int], room: int) -> list[int]:
    """Rows each waiting prompt gets, in order: what it needs, or an equal share of the room if that is less.

    What short prompts leave of their share goes to the longer ones. Where the shares would fall below ``MIN_CHUNK``,
    the first prompts share alone; the caller moves them to the back of the queue.
    """
    shares = [0] * len(needs)
    chosen = range(min(len(needs), max(1, room // MIN_CHUNK)))
    for count, index in enumerate(sorted(chosen, key=lambda index: needs[index])):
        shares[index] = max(0, min(needs[index], room // (len(chosen) - count)))
        room -= shares[index]
    return shares
