"""What one step feeds: rounds first, prompts in the room that is left, shared fairly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

#: Share of a step's tokens kept for prompts while any is waiting, so that many rounds cannot shut new sessions out.
PREFILL_SHARE: Final = 1 / 8
#: Share of a step's tokens that prompts may have while sessions decode. Eight sessions on a target of 12 M parameters
#: and two cores then wait 2.4 times as long as without prompts (99th percentile), and prompts are fed at 0.97 of the
#: speed of full steps, which make them wait 3.0 times as long (``python -m benchmarks.memory prefill``).
DECODING_SHARE: Final = 3 / 4
#: Prompts get at least this many tokens each: the fixed cost of a sequence in a batch should not dominate. With 128 the
#: first tokens of 12 prompts come no sooner.
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
    Where sessions decode without drafts, prompts fill :data:`DECODING_SHARE`; where none do, all.
    """
    least = int(max_tokens * PREFILL_SHARE)
    room = max_tokens - num_round_tokens
    if not (is_drafting or num_round_tokens):
        return room
    share = 1 / 2 if is_drafting else DECODING_SHARE
    return max(min(room, least), int(max_tokens * share) - num_round_tokens)


def share_prefill(needs: Sequence[int], room: int) -> list[int]:
    """Tokens each waiting prompt gets, in order: :data:`MIN_CHUNK` or what it needs, as long as there is room; what is
    left goes to the first ones. The caller moves those that got some to the back of the queue.
    """
    shares = [0] * len(needs)
    for limit in (MIN_CHUNK, room):
        for index, need in enumerate(needs):
            more = min(need, limit, shares[index] + room) - shares[index]
            shares[index] += more
            room -= more
    return shares
