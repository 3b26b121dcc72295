"""What a request may ask of engines, which verify and draft by themselves."""

from __future__ import annotations

from gateway.access.caller import Caller
from gateway.types import GenerationRequest
from specdec.errors import InvalidRequest
from specdec.params import SamplingParams


def check_for_engines(request: GenerationRequest, caller: Caller) -> None:
    """Refuse what an engine cannot honour.

    Raises:
        InvalidRequest: it names the field, its value and what to do.
    """
    share = caller.limits.max_client_kv_share
    refused = {
        "verification": request.rule and str(request.rule),
        "num_speculative_tokens": request.num_speculative_tokens,
        "bad_token_ids": request.params.bad_token_ids or None,
    }
    remedies = {"bad_token_ids": "use bad_words, or logit_bias for single tokens"}
    for param, value in refused.items():
        if value is not None:
            remedy = remedies.get(param, "leave it out: the engine has its own options")
            raise InvalidRequest(
                f"{param} is {value!r}, which the engines behind this gateway cannot honour; {remedy}", param=param
            )
    if share is not None:
        raise InvalidRequest(
            f"key {caller.key!r} has max_client_kv_share {share:g}, which the engines behind this gateway cannot"
            " honour; the operator of the server has to remove it from the key's line"
        )


def is_resumable(params: SamplingParams) -> bool:
    """Whether another engine continues a text exactly, given its tokens so far as a prompt.

    The noise of a seed depends on what was drawn before; penalties and bad words count generated tokens only.
    """
    is_same_noise = params.greedy or params.seed is None
    return is_same_noise and not (params.presence_penalty or params.frequency_penalty or params.bad_words)
