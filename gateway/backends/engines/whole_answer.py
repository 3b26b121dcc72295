"""A whole answer, which has the log-probabilities of its prompt: tens of MB of a long one.

It is read in slices of the event loop. A thread would not do: reading JSON holds Python's lock.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from typing import Final

from pydantic import ConfigDict, RootModel

from gateway.backends.engines.answer import BadAnswer, EngineCompletion, EnginePromptLogprob, TokenId, parse
from gateway.backends.engines.logprobs import prompt_position
from specdec.logprobs import PositionLogprobs

#: Positions read at once: with 20 log-probabilities each they take about a millisecond.
POSITIONS_AT_ONCE: Final = 8
#: A key: the quotes of a text within a text have a backslash before them.
_ARRAY: Final = re.compile(r'"prompt_logprobs"[ \n\r\t]*:[ \n\r\t]*\[[ \n\r\t]*')
_SEPARATOR: Final = re.compile(r"[ \n\r\t]*([,\]])[ \n\r\t]*")
_DECODER: Final = json.JSONDecoder()


class _Entries(RootModel[dict[TokenId, EnginePromptLogprob] | None]):
    """The tokens at one position of the prompt; none at the first."""

    model_config = ConfigDict(allow_inf_nan=False)


async def read_whole(
    data: bytes, prompt: Sequence[int], count: int
) -> tuple[EngineCompletion, tuple[PositionLogprobs, ...] | None]:
    """The answer, and the positions of its prompt from the second token on, each with the ``count`` most likely ones;
    None: it has none.

    Raises:
        BadAnswer: it is not what the API promises, or the positions are not those of the prompt.
    """
    try:
        text = data.decode()
        array = _ARRAY.search(text)
        if array is None:
            return parse(EngineCompletion, data), None
        positions, end = await _read_positions(text, array.end(), prompt, count)
    except (ValueError, RecursionError) as error:  # of decoding, of JSON, and of pydantic
        raise BadAnswer("the engine's prompt_logprobs cannot be read") from error
    rest = f'{text[: array.start()]}"prompt_logprobs":null{text[end:]}'
    return parse(EngineCompletion, rest.encode()), positions


async def _read_positions(
    text: str, at: int, prompt: Sequence[int], count: int
) -> tuple[tuple[PositionLogprobs, ...], int]:
    """The elements of the array whose first one begins at ``at``, and where it ends."""
    positions = []
    for number, token_id in enumerate(prompt):
        if number % POSITIONS_AT_ONCE == 0:
            await asyncio.sleep(0)
        element, at = _DECODER.raw_decode(text, at)
        entries = _Entries.model_validate(element).root
        if number:
            positions.append(prompt_position(token_id, entries, count))
        separator = _SEPARATOR.match(text, at)
        is_last = number == len(prompt) - 1
        if separator is None or (separator[1] == "]") != is_last:
            raise BadAnswer("the engine's prompt_logprobs are not those of the prompt")
        at = separator.end()
    return tuple(positions), at
