"""A session as the body of ``/v1/completions``, under vLLM's names."""

from __future__ import annotations

from typing import Any, Final

from specdec.types import SessionSpec

#: The parameters of sampling that the body carries; the gateway itself sees to those of its own stage.
SENT: Final = frozenset(
    (
        *("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "ignore_eos"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids"),
        *("stop_token_ids", "bad_words", "logprobs", "prompt_logprobs", "structured_outputs"),
    )
)
#: What a seed is taken modulo, and the first that vLLM does not take: it reads 64 bits with a sign.
_SEEDS: Final = 2**64
_SIGN: Final = 2**63


def body_of(spec: SessionSpec, model: str) -> dict[str, Any]:
    """The body that asks for all remaining tokens of a session.

    Every parameter of sampling is named, for an engine's own defaults may come from its model's files. A whole answer
    is asked for where the prompt's log-probabilities are: vLLM does not stream them.
    """
    params, num_done = spec.params, spec.num_output_tokens
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(spec.token_ids),
        "max_tokens": (params.max_tokens or 1) - num_done,
        "min_tokens": max(0, params.min_tokens - num_done),
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "repetition_penalty": params.repetition_penalty,
        "ignore_eos": params.ignore_eos,
        "return_token_ids": True,
    }
    lists = {
        "logit_bias": {str(token_id): bias for token_id, bias in params.logit_bias.items()},
        "allowed_token_ids": list(params.allowed_token_ids),
        "stop_token_ids": list(params.stop_token_ids),
        "bad_words": list(params.bad_words),
    }
    body |= {name: value for name, value in lists.items() if value}
    if (outputs := params.structured_outputs) is not None:
        body["structured_outputs"] = {outputs.kind: getattr(outputs, outputs.kind)}
        if outputs.disable_any_whitespace:
            body["structured_outputs"]["disable_any_whitespace"] = True
    if params.seed is not None:
        body["seed"] = params.seed - _SEEDS if params.seed >= _SIGN else params.seed
    if params.logprobs is not None:
        body |= {"logprobs": params.logprobs, "return_tokens_as_token_ids": True}
    if params.prompt_logprobs is not None:
        return body | {"prompt_logprobs": params.prompt_logprobs}
    return body | {"stream": True, "stream_options": {"include_usage": True}}
