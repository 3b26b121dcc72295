"""What a session asks for, checked before its admission."""

from __future__ import annotations

from engine.kv_pool import KVPool
from specdec.errors import InvalidRequest
from specdec.state_dtypes import STATE_DTYPES
from specdec.tree_shape import MAX_SPECULATIVE_TOKENS
from specdec.types import ModelInfo, SessionSpec
from target_service.stop_criteria import StopCriteria


def check_spec(spec: SessionSpec, info: ModelInfo, pool: KVPool) -> StopCriteria:
    """The limits of a session on a target of a model and a pool.

    Raises:
        InvalidRequest: it asks for what no amount of waiting would make possible.
    """
    num_tokens, params, context = len(spec.token_ids), spec.params, info.max_model_len
    vocabulary = min(info.tokenizer_size or info.vocab_size, info.vocab_size)
    if not num_tokens:
        raise InvalidRequest("the prompt is empty; give at least one token", param="token_ids")
    if not 0 < spec.prompt_len <= num_tokens:
        raise InvalidRequest(
            f"prompt_len is {spec.prompt_len}, outside [1, {num_tokens}], the number of tokens", param="prompt_len"
        )
    if num_tokens >= context:
        raise InvalidRequest(
            f"the prompt has {num_tokens} tokens, which leaves no room in the model's context of {context};"
            f" shorten it to at most {context - 1} tokens",
            param="token_ids",
        )
    if not 0 <= min(spec.token_ids) <= max(spec.token_ids) < vocabulary:
        wrong = next(token_id for token_id in spec.token_ids if not 0 <= token_id < vocabulary)
        raise InvalidRequest(
            f"the prompt holds token {wrong}; the model's tokens are 0 to {vocabulary - 1}", param="token_ids"
        )
    if not 0 <= spec.num_speculative_tokens <= MAX_SPECULATIVE_TOKENS:
        raise InvalidRequest(
            f"num_speculative_tokens is {spec.num_speculative_tokens}, outside [0, {MAX_SPECULATIVE_TOKENS}]",
            param="num_speculative_tokens",
        )
    if spec.hidden_state_dtype not in ("", *STATE_DTYPES):
        raise InvalidRequest(
            f"hidden_state_dtype is {spec.hidden_state_dtype!r}; known are {', '.join(STATE_DTYPES)}",
            param="hidden_state_dtype",
        )
    max_len = context if params.max_tokens is None else min(context, spec.prompt_len + params.max_tokens)
    if num_tokens >= max_len:
        raise InvalidRequest(
            f"{num_tokens - spec.prompt_len} tokens were generated already and max_tokens is {params.max_tokens};"
            " there is nothing left to generate",
            param="max_tokens",
        )
    pool.check_fits(max_len - 1)
    num_blocks, limit = pool.blocks_for(max_len - 1), kv_share(spec, pool.total_blocks)
    if spec.max_kv_share is not None and num_blocks > limit:
        raise InvalidRequest(
            f"the request needs {num_blocks} KV blocks and its client may hold {limit} of"
            f" {pool.total_blocks} (max_client_kv_share); shorten the prompt or lower max_tokens",
            param="max_tokens",
        )
    return StopCriteria(spec.prompt_len, max_len, frozenset(params.stop_token_ids), params.min_tokens)


def kv_share(spec: SessionSpec, total_blocks: int) -> int:
    """Blocks that the sessions of a client may hold together."""
    return total_blocks if spec.max_kv_share is None else int(spec.max_kv_share * total_blocks)
