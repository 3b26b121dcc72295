"""Names that other servers give to fields of this one, for the errors of unknown fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

#: Name → the fields that mean the same here: the first that the body has counts.
FOREIGN_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(
        ("max_gen_len", "max_length", "max_new_tokens", "max_output_tokens", "max_tokens_to_sample", "maxOutputTokens",
         "maxTokens", "n_predict", "num_predict"),
        ("max_tokens", "max_output_tokens"),
    ),
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), ("max_output_tokens", "max_tokens")),
    "stop": ("stop_sequences",),
    **dict.fromkeys(("stop_sequences", "stop_strings", "stopSequences", "until"), ("stop", "stop_sequences")),
    **dict.fromkeys(("min_length", "min_new_tokens"), ("min_tokens",)),
    **dict.fromkeys(("best_of_n", "candidateCount", "num_completions", "num_return_sequences"), ("n",)),
    **dict.fromkeys(("repeat_penalty", "repetitionPenalty"), ("repetition_penalty",)),
    **dict.fromkeys(("do_sample", "greedy"), ("temperature",)),
    **dict.fromkeys(("input", "inputs", "prompt_text", "query", "text"), ("prompt", "messages", "input")),
    "prompt": ("messages", "input"),
    "messages": ("prompt", "input"),
    "history": ("messages",),
    **dict.fromkeys(("system", "system_prompt"), ("instructions", "messages")),
    "topK": ("top_k",),
    "topP": ("top_p",),
    "random_seed": ("seed",),
    "n_probs": ("top_logprobs", "logprobs"),
    "logit_biases": ("logit_bias",),
    "cache_prompt": ("cache_salt", "prompt_cache_key"),
    "id_slot": ("session_id", "prompt_cache_key"),
    **dict.fromkeys(("format", "json_schema", "schema"), ("response_format", "text")),
    "regex": ("structured_outputs",),
    "grammar": ("structured_outputs",),
    "ebnf": ("structured_outputs",),
    **dict.fromkeys(("enable_thinking", "think", "thinking"), ("chat_template_kwargs", "reasoning")),
    "num_speculative_tokens": ("speculation",),
    "verification": ("speculation",),
}  # fmt: skip
#: Objects whose content belongs into the body itself.
WRAPPERS: Final = frozenset({"extra_body", "extra_params", "options", "parameters", "sampling_params"})
