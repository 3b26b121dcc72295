"""Log-probabilities of an engine as positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from gateway.backends.engines.answer import EngineLogprobs, EnginePromptLogprob
from specdec.errors import Unavailable
from specdec.types import PositionLogprobs, TokenLogprob

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
    ranked = [TokenLogprob(each, value, rank) for rank, (each, value) in enumerate(best, 1)]
    chosen = next((each for each in ranked if each.token_id == token_id), None)
    return PositionLogprobs(chosen or TokenLogprob(token_id, logprob, UNKNOWN_RANK), tuple(ranked))


def prompt_position(token_id: int, entries: Mapping[int, EnginePromptLogprob] | None, count: int) -> PositionLogprobs:
    """The position of a token of the prompt, with the ``count`` most likely ones.

    Raises:
        Unavailable: the token is not among its entries.
    """
    if entries is None or token_id not in entries:
        raise Unavailable("the engine left out the log-probability of a prompt's token")
    ranked = sorted(
        (TokenLogprob(each, entry.logprob, entry.rank or UNKNOWN_RANK) for each, entry in entries.items()),
        key=lambda entry: -entry.logprob,
    )
    chosen = next(entry for entry in ranked if entry.token_id == token_id)
    if len(ranked) > count:
        ranked.remove(chosen)
    return PositionLogprobs(chosen, tuple(ranked[:count]))


def _id_of(name: str) -> int:
    digits = name.removeprefix(_NAME)
    if not name.startswith(_NAME) or not digits.isdecimal() or len(digits) > 10:
        raise Unavailable("the engine named a token by its text where its id was asked for")
    return int(digits)
