"""The answers of an engine as checked data: of ``/v1/models``, of ``/tokenize``, and of ``/v1/completions``."""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from specdec.errors import Unavailable
from specdec.params import MAX_UINT32

T = TypeVar("T", bound="EngineAnswer")
TokenId = Annotated[int, Field(ge=0, le=MAX_UINT32)]
#: It has room in a float32.
Logprob = Annotated[float, Field(ge=-1e30, le=1e30)]


class BadAnswer(Unavailable):
    """The engine answers, and its answer cannot be used: an error, or not what the API promises."""


class EngineAnswer(BaseModel):
    """An object whose other fields are not read."""

    model_config = ConfigDict(allow_inf_nan=False)


class EngineModel(EngineAnswer):
    """One entry of ``/v1/models``."""

    id: str
    owned_by: str = ""
    max_model_len: int | None = Field(None, ge=2)


class EngineModels(EngineAnswer):
    """``/v1/models``."""

    data: list[EngineModel]


class EngineTokens(EngineAnswer):
    """``/tokenize``."""

    tokens: list[TokenId]


class EngineLogprobs(EngineAnswer):
    """Log-probabilities of the generated tokens, whose names are ``token_id:N``."""

    token_logprobs: list[Logprob | None]
    top_logprobs: list[dict[str, Logprob] | None] | None = None


class EnginePromptLogprob(EngineAnswer):
    """A token at a position of the prompt."""

    logprob: Logprob
    rank: int | None = None


class EngineChoice(EngineAnswer):
    """A piece of a completion, or all of it."""

    token_ids: list[TokenId] | None = None
    logprobs: EngineLogprobs | None = None
    finish_reason: str | None = None


class EngineCachedTokens(EngineAnswer):
    """What of the prompt was cached."""

    cached_tokens: int | None = None


class EngineUsage(EngineAnswer):
    """Token counts."""

    prompt_tokens_details: EngineCachedTokens | None = None


class EngineError(EngineAnswer):
    """OpenAI's error object."""

    message: str = ""
    param: str | None = None
    code: int | str | None = None


class EngineFailure(EngineAnswer):
    """The body of a refusal."""

    error: EngineError = EngineError()


class EngineCompletion(EngineAnswer):
    """An event of a stream, or a whole answer."""

    choices: list[EngineChoice] = []
    usage: EngineUsage | None = None
    error: EngineError | None = None


def parse(kind: type[T], data: bytes) -> T:
    """An answer.

    Raises:
        BadAnswer: it is not what the API promises.
    """
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        where = ".".join(map(str, error.errors(include_input=False, include_url=False)[0]["loc"]))
        raise BadAnswer(f"the engine's answer cannot be read{': ' + where if where else ''}") from None
