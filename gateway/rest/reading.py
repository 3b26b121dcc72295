"""From the bytes of a body to a checked body. Workers call these functions for large bodies, and do the work on text as
well, so that little is left for the event loop.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from pydantic import ValidationError

from gateway.requests.bounded_json import parse_json
from gateway.requests.conversation import Conversation, read_conversation
from gateway.requests.limits import check_count, check_length, check_name, check_params, check_text
from gateway.requests.prompt import encode_prediction, encode_prompt
from gateway.rest.body import Body, invalid_request_of
from gateway.rest.json_bytes import encode_json
from gateway.rest.schemas import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    Prompts,
    SamplingBody,
    TokenizeBody,
)
from gateway.text.processor import TextProcessor
from specdec.errors import InvalidRequest
from specdec.settings import GatewaySettings
from specdec.structured_outputs import asked_by
from specdec.types import ModelInfo

B = TypeVar("B", bound=Body)


def read_completion(text: TextProcessor, raw: bytes, model: ModelInfo, is_large: bool) -> CompletionBody:
    """The body of ``POST /v1/completions``."""
    body = parse_body(CompletionBody, raw, text, model)
    given = body.prompts()
    check_count("prompt", len(given), "prompts", text.settings, "max_concurrent_sequences")
    special = body.add_special_tokens is not False
    _keep(
        body,
        Prompts(given, [each if isinstance(each, str) else None for each in given], frozenset(body.ignored())),
        text,
        model,
        special=special,
        is_large=is_large,
    )
    return body


def read_chat(text: TextProcessor, raw: bytes, model: ModelInfo, is_large: bool) -> ChatBody:
    """The body of ``POST /v1/chat/completions``, its prompt rendered."""
    body = parse_body(ChatBody, raw, text, model)
    render_chat(body, text, model, is_large=is_large)
    return body


def render_chat(
    body: ChatBody, text: TextProcessor, model: ModelInfo, *, is_large: bool, ignored: Iterable[str] = ()
) -> None:
    """Keep the prompt of a chat with its body; ``ignored`` names more fields without effect.

    Raises:
        InvalidRequest: the chat template refuses it, or this model cannot do what is asked for.
    """
    variables, unread = body.variables(text.chat_variables)
    conversation = Conversation(
        messages=[message.as_template() for message in body.messages],
        tools=body.tools or (),
        tool_choice=body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls,
        streams=body.stream is True,
        add_generation_prompt=body.add_generation_prompt is not False,
        variables=variables,
        structured_outputs=body.wanted_outputs(),
    )
    with asked_by(body.outputs_field):
        prompt, plan = read_conversation(text, conversation, model)
    body.keep_plan(plan)
    # The template has put the special tokens where they belong.
    special = body.add_special_tokens is True
    prompts = Prompts([prompt], [None], frozenset([*body.ignored(), *unread, *ignored]))
    _keep(body, prompts, text, model, special=special, is_large=is_large)


def read_tokenize(text: TextProcessor, raw: bytes, model: ModelInfo, is_large: bool) -> TokenizeBody:
    """The body of ``POST /tokenize``, with its answer."""
    body = parse_body(TokenizeBody, raw, text, model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("give either prompt or messages", param="prompt")
    prompt, special = body.prompt, body.add_special_tokens is not False
    if prompt is None:
        special = body.add_special_tokens is True
        conversation = Conversation(
            messages=[message.as_template() for message in body.messages or ()],
            tools=body.tools or (),
            add_generation_prompt=body.add_generation_prompt is not False,
            variables=body.chat_template_kwargs or {},
        )
        prompt, _ = read_conversation(text, conversation, model)
    check_text(prompt, text.settings, model)
    tokens = text.encode(prompt, add_special_tokens=special)
    tokenizer = text.require_tokenizer("prompt")
    strings = [tokenizer.raw_token(token) for token in tokens] if body.return_token_strs else None
    limit = model.max_model_len
    answer = {"count": len(tokens), "max_model_len": limit, "tokens": tokens, "token_strs": strings}
    return TokenizeBody(model=body.model).with_answer(encode_json(answer))


def read_detokenize(text: TextProcessor, raw: bytes, model: ModelInfo, is_large: bool) -> DetokenizeBody:
    """The body of ``POST /detokenize``, with its answer."""
    body = parse_body(DetokenizeBody, raw, text, model)
    check_count("tokens", len(body.tokens), "token ids", text.settings, "max_detokenize_ids")
    answer = {"prompt": text.decode(body.tokens, skip_special_tokens=False)}
    return DetokenizeBody(model=body.model, tokens=[]).with_answer(encode_json(answer))


def parse_body(kind: type[B], raw: bytes, text: TextProcessor, model: ModelInfo) -> B:
    """A checked body. Raises :class:`InvalidRequest` naming what is wrong with it."""
    value = parse_json(raw, text.settings, max_model_len=model.max_model_len)
    if not isinstance(value, dict):
        raise InvalidRequest('the body is no JSON object; send one, such as {"prompt": "…"}')
    _check_messages(value.get("messages"), text.settings)
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise invalid_request_of(error) from None


def _check_messages(messages: Any, settings: GatewaySettings) -> None:
    """Refuse a chat of too many pieces before each of them is looked at."""
    if not isinstance(messages, list):
        return
    check_count("messages", len(messages), "messages", settings, "max_messages")
    parts = num_parts(messages, "content", "tool_calls")
    check_count("messages", parts, "content parts and calls", settings, "max_content_parts")


def num_parts(given: Sequence[Any], *names: str) -> int:
    """How many parts the lists of these names hold in messages or items."""
    lists = (each.get(name) for each in given if isinstance(each, dict) for name in names)
    return sum(len(parts) for parts in lists if isinstance(parts, list))


def _keep(
    body: SamplingBody, prompts: Prompts, text: TextProcessor, model: ModelInfo, *, special: bool, is_large: bool
) -> None:
    """Keep the prompts with their body; of a large one, keep their tokens, and nothing that is not needed any more."""
    prediction: str | Sequence[int] = "" if body.prediction is None else body.prediction.text
    if is_large:
        check_name("request_id", body.request_id or "")
        check_name("session_id", body.session_id or "")
        check_name("prompt_cache_key", body.prompt_cache_key or "")
        with asked_by(body.outputs_field):
            check_params(body.sampling(max_tokens=None, logprobs=None), text.settings, model)
        tokens = [_token_ids(prompt, text, model, special=special) for prompt in prompts.given]
        prompts = replace(prompts, given=[_packed(ids) for ids in tokens])
        prediction = _packed(encode_prediction(text, str(prediction), model))
        body.drop_what_was_read()
    body.keep(replace(prompts, prediction=prediction))


def _token_ids(prompt: str | Sequence[int], text: TextProcessor, model: ModelInfo, *, special: bool) -> Sequence[int]:
    if isinstance(prompt, str):
        return encode_prompt(text, prompt, model, add_special_tokens=special)
    check_length(len(prompt), model)
    return prompt


def _packed(token_ids: Sequence[int]) -> Sequence[int]:
    try:
        return array("I", token_ids)
    except OverflowError:
        return token_ids  # refused later, by name
