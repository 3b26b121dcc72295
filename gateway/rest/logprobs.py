"""Log-probabilities in the shapes of OpenAI and vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from gateway.requests.types import TokenLogprobs
from gateway.text.tokenizer import TextTokenizer
from specdec.logprobs import PositionLogprobs

#: JSON has no infinity; vLLM reports impossible tokens with this, too.
LOWEST_LOGPROB: Final = -9999.0


class LogprobWriter:
    """Writes the log-probabilities of one answer. A token's text is made once."""

    def __init__(self, tokenizer: TextTokenizer | None, *, shows_ids: bool) -> None:
        """``shows_ids``: a token is called by vLLM's name of its id, in place of its text."""
        self._tokenizer = tokenizer
        self._shows_ids = shows_ids
        self._known: dict[int, tuple[str, list[int]]] = {}

    def chat(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """OpenAI's object of chat choices."""
        return {"content": [self._chat_position(entry.position) for entry in entries], "refusal": None}

    def completion(self, entries: Sequence[TokenLogprobs], offset: int = 0) -> dict[str, list[Any]]:
        """OpenAI's object of completion choices; ``offset`` characters stand before the generated text."""
        positions = [entry.position for entry in entries]
        return {
            "text_offset": [offset + entry.text_offset for entry in entries],
            "token_logprobs": [finite(position.logprob) for position in positions],
            "tokens": [self.name(position.token_id) for position in positions],
            "top_logprobs": [self._completion_top(position) for position in positions],
        }

    def echo(self, positions: Sequence[PositionLogprobs]) -> dict[str, list[Any]]:
        """The same of a prompt, whose first token has none, without names and offsets."""
        return {
            "token_logprobs": [None, *(finite(position.logprob) for position in positions)],
            "top_logprobs": [None, *map(self._completion_top, positions)],
        }

    def name(self, token_id: int) -> str:
        """What a token is called."""
        return self._token(token_id)[0]

    def _chat_position(self, position: PositionLogprobs) -> dict[str, Any]:
        top = [self._chat_token(token_id, logprob) for token_id, logprob in position.top]
        return self._chat_token(position.token_id, position.logprob) | {"top_logprobs": top}

    def _chat_token(self, token_id: int, logprob: float) -> dict[str, Any]:
        name, data = self._known.get(token_id) or self._token(token_id)
        return {"token": name, "logprob": finite(logprob), "bytes": data}

    def _completion_top(self, position: PositionLogprobs) -> dict[str, float]:
        return {self.name(token_id): finite(logprob) for token_id, logprob, _ in position.all}

    def _token(self, token_id: int) -> tuple[str, list[int]]:
        """A token's name, and its bytes in running text."""
        if (known := self._known.get(token_id)) is None:
            tokenizer = self._tokenizer
            text = "" if tokenizer is None else tokenizer.token_text(token_id)
            data = None if tokenizer is None else tokenizer.token_bytes(token_id)
            name = f"token_id:{token_id}" if self._shows_ids else text
            known = self._known[token_id] = (name, list(text.encode() if data is None else data))
        return known


def prompt_logprobs(positions: Sequence[PositionLogprobs], tokenizer: TextTokenizer | None) -> list[Any]:
    """vLLM's ``prompt_logprobs``: null for the first token, then an object by token id."""
    return [
        None,
        *(
            {
                str(token_id): {
                    "logprob": finite(logprob),
                    "rank": rank,
                    "decoded_token": tokenizer.token_text(token_id) if tokenizer is not None else None,
                }
                for token_id, logprob, rank in position.all
            }
            for position in positions
        ),
    ]


def finite(logprob: float) -> float:
    """A log-probability that JSON can carry."""
    return max(logprob, LOWEST_LOGPROB)
