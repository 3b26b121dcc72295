"""Log-probabilities of an engine as positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from gateway.backends.engines.answer import EngineLogprobs, EnginePromptLogprob
from specdec.errors import Unavailable
from specdec.logprobs import PositionLogprobs, pack_top
from specdec.params import MAX_UINT32

#: What a token is named where ids are asked for in place of texts.
_NAME: Final = "token_id:"
#: The rank of a token that is not among the most likely ones reported: the API does not tell it.
UNKNOWN_RANK: Final = 0


def output_positions(given: EngineLogprobs | None, token_ids: Sequence[int], count: int) -> list[PositionLogprobs]:
    """The positions of generated tokens, each with the ``count`` most likely ones.

    Raises:
        Unavailable: they are not those of the tokens.
    """
    if given is None or len(given.token_logprobs) != len(token_ids):
        raise Unavailable("the engine left out log-probabilities that were asked for")
    tops = given.top_logprobs or [None] * len(token_ids)
    if len(tops) != len(token_ids):
        raise Unavailable("the engine left out log-probabilities that were asked for")
    return [_output(*each, count) for each in zip(token_ids, given.token_logprobs, tops, strict=True)]


def _output(token_id: int, logprob: float | None, top: dict[str, float] | None, count: int) -> PositionLogprobs:
    if logprob is None:
        raise Unavailable("the engine left out the log-probability of a token")
    entries = {_id_of(name): value for name, value in (top or {}).items()}
    if len(entries) > count:  # the chosen token stands beside the most likely ones
        entries.pop(token_id, None)
    best = sorted(entries.items(), key=lambda entry: -entry[1])[:count]
    rank = next((rank for rank, (each, _) in enumerate(best, 1) if each == token_id), UNKNOWN_RANK)
    return PositionLogprobs(token_id, logprob, rank, pack_top(best))


def prompt_position(token_id: int, entries: Mapping[int, EnginePromptLogprob] | None, count: int) -> PositionLogprobs:
    """The position of a token of the prompt, with the ``count`` most likely ones.

    Raises:
        Unavailable: the token is not among its entries.
    """
    if entries is None or token_id not in entries:
        raise Unavailable("the engine left out the log-probability of a prompt's token")
    chosen = entries[token_id]
    others = {each: entry.logprob for each, entry in entries.items() if each != token_id or len(entries) <= count}
    best = sorted(others.items(), key=lambda entry: -entry[1])[:count]
    return PositionLogprobs(token_id, chosen.logprob, chosen.rank or UNKNOWN_RANK, pack_top(best))


def _id_of(name: str) -> int:
    digits = name.removeprefix(_NAME)
    if not name.startswith(_NAME) or not digits.isdecimal() or len(digits) > 10 or int(digits) > MAX_UINT32:
        raise Unavailable("the engine named a token by its text where its id was asked for")
    return int(digits)
