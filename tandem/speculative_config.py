"""Read vLLM's ``speculative_config``, or its older flags, into settings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from engine.refused_checkpoints import check_checkpoint, check_tree
from specdec.errors import InvalidRequest, quote
from specdec.methods import HEAD_METHODS, check_prediction_layers, method_of
from specdec.settings import SpeculativeSettings
from specdec.settings.option import options_of
from tandem.checkpoints import DRAFT, TARGET, bundled_drafter, check_pair, find_checkpoint

#: Other vLLM spellings, older ones and short ones: flags and ``LLM`` arguments, and the key of ``speculative_config``.
OLDER_NAMES: Final[Mapping[str, str]] = {
    "speculative_model": "model",
    "num_speculative_tokens": "num_speculative_tokens",
    "ngram_prompt_lookup_max": "prompt_lookup_max",
    "ngram_prompt_lookup_min": "prompt_lookup_min",
    "speculative_draft_tensor_parallel_size": "draft_tensor_parallel_size",
    "speculative_disable_by_batch_size": "disable_by_batch_size",
    "spec_method": "method",
    "spec_model": "model",
    "spec_tokens": "num_speculative_tokens",
}
#: Names that ask for n-gram lookup where a model is expected.
_NGRAM: Final = ("ngram", "[ngram]")


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """The models to run: folders that exist, and the speculation between them."""

    #: Folder of the target.
    target: str
    #: The name it is served under: the folder's, or the one on the hub.
    name: str
    speculative: SpeculativeSettings
    #: The tokenizer that the draft model goes by, where it is not its own.
    draft_tokenizer: str | None = None

    @property
    def speculates(self) -> bool:
        """Whether a drafter runs at all."""
        return self.speculative.method != "none" and self.speculative.num_speculative_tokens > 0


def read_speculation(
    config: Mapping[str, Any] | str | None, older: Mapping[str, Any] | None = None, *, target: str | None = None
) -> SpeculativeSettings | None:
    """Settings from ``speculative_config`` and the older names; None when nothing was said.

    A value given by both must be the same. Without ``method`` the checkpoint tells; without ``model`` a bundled one
    that is made for ``target`` (None: the bundled target) is taken.

    Raises:
        InvalidRequest: an option is wrong, and named, or the checkpoint does not exist.
        ModelNotSupported: the checkpoint is made for a method that is not known.
    """
    merged: dict[str, Any] = {}
    named = [(OLDER_NAMES[name], value, name) for name, value in (older or {}).items() if value is not None]
    for key, value, place in [*named, *((*each, "speculative_config") for each in _mapping(config).items())]:
        if key in merged and merged[key] != value:
            raise InvalidRequest(f"{key} is given twice, as {merged[key]!r} and as {value!r} in {place}", param=key)
        merged[key] = value
    if merged.get("model") in _NGRAM:
        del merged["model"]
        merged.setdefault("method", "ngram")
    if not merged:
        return None
    given = [key for key, value in merged.items() if value is not None]
    is_known = merged.keys() <= options_of(SpeculativeSettings).keys()  # what is not known is named below
    if is_known and given and not {"model", "method"} & {*given} and merged.get("num_speculative_tokens") != 0:
        raise InvalidRequest(
            f'{", ".join(given)} given without a drafter: give "model", or "method": "ngram"', param=given[0]
        )
    _widen_lookup(merged)
    model, method = merged.get("model"), merged.get("method")
    if isinstance(model, str) and method is None:
        merged["method"] = method_of(find_checkpoint(model))
    elif model is None and isinstance(method, str | list | tuple):
        methods = [method] if isinstance(method, str) else method
        merged["model"] = (target or TARGET) if "mtp" in methods else bundled_drafter(target, methods)
        _require_head(merged["model"], methods)
    return SpeculativeSettings.from_config(merged)


def _require_head(model: str | None, methods: Sequence[str]) -> None:
    """A head is made for one target: where none comes with it, say how to get one."""
    head = next((method for method in methods if method in HEAD_METHODS), None)
    if model is None and head is not None:
        trained_as = "mlp" if head == "mlp_speculator" else head
        raise InvalidRequest(
            f'method "{head}" needs "model", the folder of a head made for this target; none comes with it, and'
            f" tandem train {trained_as} makes one",
            param="model",
        )


def _widen_lookup(merged: dict[str, Any]) -> None:
    """One bound alone moves the other along, as in vLLM, instead of contradicting its default."""
    low, high = merged.get("prompt_lookup_min"), merged.get("prompt_lookup_max")
    if high is None and isinstance(low, int) and low > SpeculativeSettings().prompt_lookup_max:
        merged["prompt_lookup_max"] = low


def _mapping(config: Mapping[str, Any] | str | None) -> Mapping[str, Any]:
    if isinstance(config, str):
        try:
            config = json.loads(config)
        except json.JSONDecodeError as error:
            raise InvalidRequest(
                f"speculative_config is {quote(config)}, which is not JSON ({error}); write it as"
                """ '{"method": "ngram"}'""",
                param="speculative_config",
            ) from None
    if config is None:
        return {}
    if not isinstance(config, Mapping):
        raise InvalidRequest(
            f"speculative_config must be an object, not {type(config).__name__}", param="speculative_config"
        )
    return config


def choose_models(
    model: str | None, speculative: SpeculativeSettings | None, *, tokenizer: str | None = None
) -> ModelChoice:
    """Find the checkpoints and check that they fit.

    No model at all means the bundled pair; a model without speculation runs plain. Raises :class:`InvalidRequest` for
    a checkpoint that does not exist or is damaged, and :class:`ModelNotSupported` for one of a format that is refused
    and for a draft with another vocabulary.
    """
    target = find_checkpoint(model or TARGET)
    check_checkpoint(target)
    draft_tokenizer = None
    if speculative is None:
        speculative = SpeculativeSettings(model=DRAFT) if model is None else SpeculativeSettings(method="none")
    if speculative.tree is not None and speculative.methods != ("none",):
        check_tree(target)
    if speculative.model is not None:
        draft = find_checkpoint(speculative.model)
        check_checkpoint(draft, is_head=any(method in HEAD_METHODS for method in speculative.methods))
        if speculative.tree is not None and "draft_model" in speculative.methods:
            check_tree(draft)
        speculative = replace(speculative, model=draft)
        if "mtp" in speculative.methods:
            check_prediction_layers(draft)
        if "draft_model" in speculative.methods:
            draft_tokenizer = check_pair(target, draft, tokenizer=tokenizer)
    return ModelChoice(target, _served_name(model or TARGET), speculative, draft_tokenizer)


def _served_name(model: str) -> str:
    path = Path(model).expanduser()
    if path.is_file():  # GGUF
        return path.stem
    return path.resolve().name if path.is_dir() else model
