"""From the bytes of a message to a request. Workers call these functions for large messages, and do the work on text as
well, so that little is left for the event loop.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from typing import Any, Final

from google.protobuf.message import Message

from gateway.requests.bounded_json import parse_json
from gateway.requests.conversation import Conversation, read_conversation
from gateway.requests.limits import check_count, check_length, check_request, check_text
from gateway.requests.prompt import encode_prediction, encode_prompt
from gateway.requests.types import GenerationRequest
from gateway.text.processor import TextProcessor
from specdec import codec
from specdec.errors import InvalidRequest
from specdec.params import SamplingParams
from specdec.params_codec import read_parameters
from specdec.settings import RequestLimits
from specdec.types import ModelInfo
from specdec.v1 import generation_service_pb2 as pb

#: What counts the entries of repeated fields, before they become Python's objects.
_COUNTS: Final = {
    "stop": ("strings", "max_stop_strings"),
    "stop_token_ids": ("tokens", "max_stop_token_ids"),
    "bad_token_ids": ("sequences", "max_bad_words"),
    "bad_words": ("words", "max_bad_words"),
    "logit_bias": ("tokens", "max_logit_bias"),
}


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """What a ``GenerateRequest`` asks for."""

    #: Without its deadline.
    request: GenerationRequest
    #: Whether the prompt is reported, and its text; None: that of its tokens.
    echo: bool
    prompt_text: str | None
    #: No tokens were asked for: one is generated all the same, and left out.
    prompt_only: bool


def read_generate(text: TextProcessor, raw: bytes, model: ModelInfo, is_large: bool) -> GenerateCall:
    """What a ``GenerateRequest`` asks for.

    Raises:
        DecodeError: it is no message of that type.
        InvalidRequest: it has no prompt, or a value is out of range.
    """
    message = pb.GenerateRequest.FromString(raw)
    for part in (message, message.sampling):
        _check_counts(part, text.settings)
    check_length(len(message.token_ids.ids), model)
    prompt_only = message.echo and message.HasField("max_tokens") and message.max_tokens == 0
    if prompt_only:
        message.max_tokens = 1
    request = _read_request(text, message, model)
    prompt_text = request.prompt if message.echo and isinstance(request.prompt, str) else None
    if is_large:
        check_request(request, text.settings, model)
        token_ids = request.prompt
        if isinstance(token_ids, str):
            token_ids = encode_prompt(text, token_ids, model, add_special_tokens=request.add_special_tokens)
        prediction = encode_prediction(text, message.prediction, model)
        request = replace(request, prompt=array("I", token_ids), prediction=array("I", prediction))
    return GenerateCall(request, message.echo, prompt_text, prompt_only)


def read_tokenize(text: TextProcessor, raw: bytes, model: ModelInfo, is_large: bool) -> tuple[str, bytes]:
    """The model that a ``TokenizeRequest`` names, and the response.

    Raises:
        DecodeError: it is no message of that type.
        InvalidRequest: the text is too long, or the chat template refuses the conversation.
    """
    request = pb.TokenizeRequest.FromString(raw)
    is_chat = request.HasField("chat")
    if is_chat and request.text:
        raise InvalidRequest("give either text or chat", param="text")
    prompt = request.text
    if is_chat:
        prompt, _ = read_conversation(text, _read_chat(text, request.chat, model), model)
    check_text(prompt, text.settings, model)
    token_ids = text.encode(prompt, add_special_tokens=_adds_special_tokens(request, is_chat=is_chat))
    response = pb.TokenizeResponse(token_ids=token_ids, max_model_len=model.max_model_len)
    return request.model, response.SerializeToString()


def read_detokenize(text: TextProcessor, raw: bytes, model: ModelInfo, is_large: bool) -> tuple[str, bytes]:
    """The model that a ``DetokenizeRequest`` names, and the response.

    Raises:
        DecodeError: it is no message of that type.
        InvalidRequest: there are too many ids, or an unknown one.
    """
    request = pb.DetokenizeRequest.FromString(raw)
    check_count("token_ids", len(request.token_ids), "token ids", text.settings, "max_detokenize_ids")
    decoded = text.decode(request.token_ids, skip_special_tokens=request.skip_special_tokens)
    return request.model, pb.DetokenizeResponse(text=decoded).SerializeToString()


def _check_counts(message: Message, limits: RequestLimits) -> None:
    for name, (what, option) in _COUNTS.items():
        if name in message.DESCRIPTOR.fields_by_name:
            check_count(name, len(getattr(message, name)), what, limits, option)


def _read_request(text: TextProcessor, message: pb.GenerateRequest, model: ModelInfo) -> GenerationRequest:
    kind = message.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequest("the request has no prompt; set text, token_ids or chat", param="prompt")
    params, reply = _read_params(message), None
    prompt: str | tuple[int, ...]
    if kind == "chat":
        prompt, reply = read_conversation(text, _read_chat(text, message.chat, model, params), model)
        params = reply.constrain(params)
    else:
        prompt = message.text if kind == "text" else tuple(message.token_ids.ids)
    speculation = message.speculation
    k = speculation.num_speculative_tokens if speculation.HasField("num_speculative_tokens") else None
    return GenerationRequest(
        prompt=prompt,
        params=params,
        model=message.model,
        rule=codec.decode_rule(speculation.verification),
        num_speculative_tokens=k,
        method=speculation.method,
        attachment=speculation.attachment,
        session_id=message.session_id,
        cache_salt=message.cache_salt,
        prediction=message.prediction,
        return_token_metrics=message.return_token_metrics,
        add_special_tokens=_adds_special_tokens(message, is_chat=kind == "chat"),
        reply=reply,
    )


def _adds_special_tokens(message: pb.GenerateRequest | pb.TokenizeRequest, *, is_chat: bool) -> bool:
    """A template has put the special tokens where they belong."""
    return message.add_special_tokens if message.HasField("add_special_tokens") else not is_chat


def _read_chat(
    text: TextProcessor, chat: pb.Chat, model: ModelInfo, params: SamplingParams | None = None
) -> Conversation:
    """A conversation in OpenAI's form; ``params`` are those of its answer."""
    check_count("messages", len(chat.messages), "messages", text.settings, "max_messages")
    num_calls = sum(len(message.tool_calls) for message in chat.messages)
    check_count("messages", num_calls, "calls", text.settings, "max_content_parts")
    check_count("tools", len(chat.tools), "tools", text.settings, "max_tools")

    def read_object(param: str, given: str) -> dict[str, Any]:
        value = {}
        if given:
            value = parse_json(given.encode(), text.settings, max_model_len=model.max_model_len, param=param)
        if not isinstance(value, dict):
            raise InvalidRequest(f"{param} is no JSON object", param=param)
        return value

    return Conversation(
        messages=[_read_message(message) for message in chat.messages],
        tools=[_read_tool(tool, read_object("tools.parameters", tool.parameters)) for tool in chat.tools],
        tool_choice=_read_tool_choice(chat.tool_choice),
        parallel_tool_calls=chat.parallel_tool_calls if chat.HasField("parallel_tool_calls") else None,
        add_generation_prompt=chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True,
        variables=read_object("template_kwargs", chat.template_kwargs),
        structured_outputs=None if params is None else params.structured_outputs,
    )


def _read_message(message: pb.ChatMessage) -> dict[str, Any]:
    """Role, content, and what else is given."""
    names = ("name", "reasoning_content", "tool_call_id")
    more: dict[str, Any] = {name: value for name in names if (value := getattr(message, name))}
    if message.tool_calls:
        more["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return {"role": message.role, "content": message.content, **more}


def _read_tool(tool: pb.Tool, parameters: dict[str, Any]) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": parameters, "strict": tool.strict}
    return {"type": "function", "function": function}


def _read_tool_choice(choice: pb.ToolChoice) -> str | dict[str, Any] | None:
    if choice.WhichOneof("choice") == "function":
        return {"type": "function", "function": {"name": choice.function}}
    if choice.mode == pb.TOOL_CHOICE_MODE_UNSPECIFIED:
        return None
    if choice.mode not in pb.ToolChoiceMode.values():
        raise InvalidRequest(f"tool_choice has the unknown mode {choice.mode}; give NONE, AUTO or REQUIRED",
                             param="tool_choice")  # fmt: skip
    return pb.ToolChoiceMode.Name(choice.mode).removeprefix("TOOL_CHOICE_MODE_").lower()


def _read_params(message: pb.GenerateRequest) -> SamplingParams:
    """The request's own fields come after its transforms, whose seed is ignored."""
    transforms = read_parameters(message.sampling)
    limit = {"max_tokens": None} if message.HasField("chat") else {}
    return SamplingParams(**transforms | limit | {"seed": None} | read_parameters(message))
