"""The limits of what one request may hold."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from gateway.access.request_id import MAX_NAME_LENGTH
from gateway.requests.types import GenerationRequest
from specdec.errors import ContextLengthExceeded, InvalidRequest
from specdec.flags import flag_of
from specdec.params import SamplingParams
from specdec.settings import RequestLimits
from specdec.types import ModelInfo

#: Bytes of a body where no limit is set: so many a token of the model's context, in this range.
BYTES_PER_TOKEN: Final = 64
LEAST_BODY_BYTES: Final = 2**20
MOST_BODY_BYTES: Final = 2**24


def body_limit(limits: RequestLimits, max_model_len: int | None = None) -> int:
    """Bytes of the largest body. Reading one costs time by its length, so it follows what a prompt can need; without a
    model it is that of the longest context.
    """
    if limits.max_body_bytes is not None:
        return limits.max_body_bytes
    if max_model_len is None:
        return MOST_BODY_BYTES
    return min(max(BYTES_PER_TOKEN * max_model_len, LEAST_BODY_BYTES), MOST_BODY_BYTES)


def check_request(request: GenerationRequest, limits: RequestLimits, model: ModelInfo) -> None:
    """Refuse what holds too much.

    Raises:
        InvalidRequest: it names the field, its size, the limit and the limit's option.
    """
    check_name("session_id", request.session_id)
    check_name("prompt_cache_key", request.prompt_cache_key)
    check_name("attachment", request.attachment)
    check_name("cache_salt", request.cache_salt)
    check_name("request_id", request.request_id)
    check_params(request.params, limits, model)


def check_text(text: str, limits: RequestLimits, model: ModelInfo, *, param: str = "prompt") -> None:
    """Refuse a text whose tokens cannot fit in the model's context."""
    if len(text) > limits.max_characters_per_token * model.max_model_len:
        raise ContextLengthExceeded(
            f"this model's maximum context length is {model.max_model_len} tokens, and the text has {len(text)}"
            f" characters, above {limits.max_characters_per_token} per token (--max-characters-per-token); shorten it",
            param=param,
        )


def check_length(num_tokens: int, model: ModelInfo, *, is_all: bool = True) -> None:
    """Refuse a prompt that leaves no room for an answer; it has more tokens unless these are all."""
    if num_tokens >= model.max_model_len:
        raise ContextLengthExceeded(
            f"this model's maximum context length is {model.max_model_len} tokens, and the prompt has"
            f" {'' if is_all else 'more than '}{num_tokens}; shorten it, so that there is room for an answer",
            param="prompt",
        )


def check_params(params: SamplingParams, limits: RequestLimits, model: ModelInfo) -> None:
    """Refuse parameters with too many or too long entries."""
    check_count("stop", len(params.stop), "strings", limits, "max_stop_strings")
    _check_lengths("stop", params.stop, "characters", limits, "max_stop_characters")
    check_count("stop_token_ids", len(params.stop_token_ids), "tokens", limits, "max_stop_token_ids")
    check_count("bad_words", len(params.bad_words), "words", limits, "max_bad_words")
    _check_lengths("bad_words", params.bad_words, "characters", limits, "max_bad_word_characters")
    check_count("bad_token_ids", len(params.bad_token_ids), "sequences", limits, "max_bad_words")
    _check_lengths("bad_token_ids", params.bad_token_ids, "tokens", limits, "max_bad_word_characters")
    check_count("logit_bias", len(params.logit_bias), "tokens", limits, "max_logit_bias")
    if (wanted := params.structured_outputs) is not None:
        check_count("structured_outputs", wanted.num_bytes, "bytes", limits, "max_grammar_bytes")
    if len(params.allowed_token_ids) > model.vocab_size:
        raise InvalidRequest(
            f"allowed_token_ids holds {len(params.allowed_token_ids)} tokens, more than the vocabulary's"
            f" {model.vocab_size}; name each once",
            param="allowed_token_ids",
        )


def check_count(param: str, count: int, what: str, limits: RequestLimits, option: str) -> None:
    """Refuse more entries than an option allows."""
    limit = getattr(limits, option)
    if count > limit:
        raise InvalidRequest(
            f"{param} holds {count} {what}; {limit} are allowed ({flag_of(option)}); send fewer", param=param
        )


def _check_lengths(param: str, entries: Iterable[object], what: str, limits: RequestLimits, option: str) -> None:
    limit, longest = getattr(limits, option), max(map(len, entries), default=0)  # type: ignore[arg-type]
    if longest > limit:
        raise InvalidRequest(
            f"{param} holds an entry of {longest} {what}; {limit} are allowed ({flag_of(option)}); send a shorter one",
            param=param,
        )


def check_name(param: str, name: str) -> None:
    """Refuse a name that is too long to be logged and given back."""
    if len(name) > MAX_NAME_LENGTH:
        raise InvalidRequest(
            f"{param} has {len(name)} characters; {MAX_NAME_LENGTH} are allowed; send a shorter one", param=param
        )
