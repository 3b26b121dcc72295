"""From the bytes of a message to a request. Workers call these functions for large messages, and do the work on text as
well, so that little is left for the event loop.
"""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Final

from google.protobuf.message import Message

from gateway.limits import check_count, check_length, check_request, check_text
from gateway.prompt import encode_prompt
from gateway.text.processor import TextProcessor
from gateway.types import GenerationRequest
from specdec import codec
from specdec.errors import InvalidRequest
from specdec.params import SamplingParams
from specdec.settings import RequestLimits
from specdec.types import ModelInfo
from specdec.v1 import generation_service_pb2 as pb

#: What counts the entries of repeated fields, before they become Python's objects.
_COUNTS: Final = {
    "stop": ("strings", "max_stop_strings"),
    "stop_token_ids": ("tokens", "max_stop_token_ids"),
    "bad_token_ids": ("sequences", "max_bad_words"),
    "logit_bias": ("tokens", "max_logit_bias"),
}


def read_generate(text: TextProcessor, raw: bytes, model: ModelInfo, is_large: bool) -> GenerationRequest:
    """The request of a ``GenerateRequest``, without its deadline.

    Raises:
        DecodeError: it is no message of that type.
        InvalidRequest: it has no prompt, or a value is out of range.
    """
    message = pb.GenerateRequest.FromString(raw)
    for part in (message, message.sampling):
        _check_counts(part, text.settings)
    check_length(len(message.token_ids.ids), model)
    request = _read_request(message)
    if not is_large:
        return request
    check_request(request, text.settings, model)
    token_ids = request.prompt
    if isinstance(token_ids, str):
        token_ids = encode_prompt(text, token_ids, model)
    return replace(request, prompt=array("I", token_ids))


def read_tokenize(text: TextProcessor, raw: bytes, model: ModelInfo, is_large: bool) -> tuple[str, bytes]:
    """The model that a ``TokenizeRequest`` names, and the response.

    Raises:
        DecodeError: it is no message of that type.
        InvalidRequest: the text is too long.
    """
    request = pb.TokenizeRequest.FromString(raw)
    check_text(request.text, text.settings, model)
    special = request.add_special_tokens if request.HasField("add_special_tokens") else True
    token_ids = text.encode(request.text, add_special_tokens=special)
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


def _read_request(message: pb.GenerateRequest) -> GenerationRequest:
    kind = message.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequest("the request has no prompt; set text or token_ids", param="prompt")
    speculation = message.speculation
    k = speculation.num_speculative_tokens if speculation.HasField("num_speculative_tokens") else None
    return GenerationRequest(
        prompt=message.text if kind == "text" else tuple(message.token_ids.ids),
        params=_read_params(message),
        model=message.model,
        rule=codec.decode_rule(speculation.verification),
        num_speculative_tokens=k,
        session_id=message.session_id,
        return_token_metrics=message.return_token_metrics,
    )


def _read_params(message: pb.GenerateRequest) -> SamplingParams:
    """The request's own fields come after its transforms, whose seed is ignored."""
    transforms = codec.read_parameters(message.sampling)
    return SamplingParams(**transforms | {"seed": None} | codec.read_parameters(message))
