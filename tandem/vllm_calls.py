"""Methods of ``vllm.LLM``, arguments of its calls and keys of its prompts that Tandem does not have."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Final

from specdec.errors import InvalidRequest, did_you_mean, quote

_NO_VECTORS: Final = "this engine generates text; prompt_logprobs tells how likely a given text is"
_NO_QUEUE: Final = "generate and chat take lists, stream and stream_chat give one answer piece by piece"
#: Method → why there is none.
REFUSED_METHODS: Final[Mapping[str, str]] = {
    "beam_search": "there is no beam search; sample n texts and choose by cumulative_logprob",
    **dict.fromkeys(("classify", "embed", "encode", "reward", "score"), _NO_VECTORS),
    **dict.fromkeys(("enqueue", "enqueue_chat", "wait_for_completion"), _NO_QUEUE),
    **dict.fromkeys(("sleep", "wake_up", "release_kv_cache_memory"), "close() frees the models"),
    **dict.fromkeys(("apply_model", "collective_rpc"), "no code of others runs in the engine"),
    **dict.fromkeys(("start_profile", "stop_profile"), "profile the process, with py-spy or perf"),
    "from_engine_args": "give LLM the arguments themselves",
    "get_metrics": "each output has metrics",
    "llm_engine": "LLM is the engine; its methods are in docs/offline.md",
    "reset_mm_cache": "prompts are text only",
    "reset_prefix_cache": "what is cached yields by itself where memory is needed; cache_salt separates requests",
    "set_tokenizer": "give LLM(tokenizer=…)",
}
#: Argument of ``generate`` or ``chat`` → the values that are taken, and what to do instead of others.
_ARGUMENTS: Final[Mapping[str, tuple[tuple[Any, ...], str]]] = {
    "chat_template": ((), "give LLM(chat_template=…)"),
    "chat_template_content_format": (("auto", "string"), "content is given to the chat template as text"),
    "continue_final_message": ((), "use generate with the text of the conversation"),
    "guided_options_request": ((), "give SamplingParams(structured_outputs=…)"),
    "lora_request": ((), "only the base model is served: merge the adapter into it"),
    "mm_processor_kwargs": ((), "prompts are text only"),
    "prompt_adapter_request": ((), "there are no prompt adapters"),
    "tokenization_kwargs": ((), "give token ids"),
}


def check_further(given: Mapping[str, Any]) -> None:
    """Check what ``generate`` or ``chat`` got beside its own arguments; empty values ask for nothing.

    Raises:
        InvalidRequest: an argument is unknown, or asks for something that is not done here.
    """
    for name, value in given.items():
        if name == "priority":
            if value is not None:
                warnings.warn("priority: no effect here: all prompts of a call are of one client", stacklevel=3)
            continue
        if name not in _ARGUMENTS:
            raise InvalidRequest(f"no argument {name!r} is known; {did_you_mean(name, _ARGUMENTS)}", param=name)
        same, reason = _ARGUMENTS[name]
        if value and value not in same:
            raise InvalidRequest(f"{name}={quote(value)} is not supported; {reason}", param=name)


def check_prompt(prompt: Mapping[str, Any]) -> None:
    """Refuse what a prompt holds beside text or token ids and ``cache_salt``.

    Raises:
        InvalidRequest: there is such a thing.
    """
    for name, value in prompt.items():
        if name not in ("prompt", "prompt_token_ids", "cache_salt") and value:
            raise InvalidRequest(
                f"a prompt has {name!r}, which is not supported; give text or token ids", param="prompts"
            )
