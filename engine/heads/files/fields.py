"""A head's ``config.json``, read field by field. An unknown field is refused by name.

An unknown field may change the mathematics, and a head that is computed wrongly drafts nonsense without an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from specdec.errors import ModelNotSupported

#: Fields that change nothing about what a head computes: dropout and initialisation (training), bookkeeping of files
#: and tools, tokenizer, and what a generic configuration of transformers carries along.
_HARMLESS: Final = frozenset(
    """
    _attn_implementation _name_or_path architectures attention_dropout attn_implementation auto_map
    base_model_name_or_path bos_token_id chunk_size_feed_forward draft_window_size dtype embed_requires_grad
    enable_sp_ulysses
    eos_token_id eos_token_ids has_no_defaults_at_init hidden_dropout id2label initializer_range is_decoder
    is_encoder_decoder label2id layer_types max_length max_window_layers mlp_dropout model_type
    modelopt_version name output_attentions output_hidden_states pad_token_id pretraining_tp problem_type
    quantization_config
    residual_dropout return_dict rms_norm_eps sliding_window speculators_config speculators_model_type
    speculators_version target_model_type tie_word_embeddings torch_dtype torchscript transformers_version
    ttt_length use_cache use_sliding_window version
    """.split()  # noqa: SIM905 - a list of forty lines says no more
)
#: Fields of a target with experts, copied into its heads' configs. The tensors of a head with experts would show them.
_OF_EXPERTS: Final = frozenset(
    """
    mlp_only_layers moe_intermediate_size norm_topk_prob num_experts num_experts_per_tok num_local_experts
    output_router_logits router_aux_loss_coef router_jitter_noise shared_expert_intermediate_size
    """.split()  # noqa: SIM905
)
#: Fields that change nothing at this value.
_NEUTRAL: Final[Mapping[str, Any]] = {
    "decoder_sparse_step": 1,
    "is_causal": True,
    "logit_scale": 1.0,
    "partial_rotary_factor": 1.0,
    "position_embedding_type": "rope",
}


class Fields:
    """The fields of a config, each to be taken once."""

    def __init__(self, values: Mapping[str, Any], origin: str) -> None:
        """``origin`` names the file in errors."""
        self._values = dict(values)
        self._left = set(values)
        self.origin = origin

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def take(self, name: str, default: Any = None) -> Any:
        """A field's value, ``default`` where it is missing or null."""
        self._left.discard(name)
        value = self._values.get(name)
        return default if value is None else value

    def number(self, name: str, default: int | None = None) -> int:
        """A whole number above 0.

        Raises:
            ModelNotSupported: the field is something else, or is missing without a default.
        """
        value = self.take(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise self.refusal(name, "a whole number above 0 is needed")
        return value

    def require(self, name: str, allowed: tuple[Any, ...]) -> Any:
        """The value of a field that may only have these; the first where it is missing.

        Raises:
            ModelNotSupported: it has another.
        """
        value = self.take(name, allowed[0])
        if value not in allowed:
            raise self.refusal(name, f"only {' and '.join(repr(each) for each in allowed)} can be run")
        return value

    def refusal(self, name: str, reason: str) -> ModelNotSupported:
        """The error that names a field."""
        return ModelNotSupported(f"{self.origin}: {name} is {self._values.get(name)!r}; {reason}")

    def finish(self) -> None:
        """Refuse the fields that were not taken: those that are neither known to be harmless nor empty, false, 0 or
        another value that changes nothing.

        Raises:
            ModelNotSupported: names them.
        """
        left = (name for name in self._left - _HARMLESS - _OF_EXPERTS if self._values[name])
        unknown = sorted(name for name in left if name not in _NEUTRAL or self._values[name] != _NEUTRAL[name])
        if unknown:
            shown = ", ".join(f"{name} = {self._values[name]!r}" for name in unknown)
            raise ModelNotSupported(
                f"{self.origin} has fields that are not known here and may change what the head computes: {shown}"
            )
