"""Settings of speculation, under the names of vLLM's ``speculative_config``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from specdec.errors import did_you_mean
from specdec.methods import HEAD_METHODS, LOOKUP_METHODS, METHODS, MODEL_METHODS
from specdec.refused_methods import refuse_method
from specdec.settings.lookup import LookupSettings
from specdec.settings.model import QUANTIZATIONS
from specdec.settings.option import option, options_of, require
from specdec.state_dtypes import STATE_DTYPES
from specdec.tree_shape import MAX_SPECULATIVE_TOKENS, TreeShape


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeSettings(LookupSettings):
    """Speculation, under the names of vLLM's ``speculative_config``."""

    GROUPS: ClassVar = {"speculation": "model"}

    model: str | None = option(None, "folder of the draft model or head")
    method: str | tuple[str, ...] | None = option(
        None, "how to draft, or a lookup and what drafts where it finds too little", choices=METHODS
    )
    num_speculative_tokens: int = option(4, "drafted tokens a round at most", ge=0, le=MAX_SPECULATIVE_TOKENS)
    tree_top_k: int = option(1, "children of each node of a drafted tree; 1: chains", ge=1, le=MAX_SPECULATIVE_TOKENS)
    tree_depth: int | None = option(
        None, "levels of a tree; by default k / 2, from 2 to 6", ge=1, le=MAX_SPECULATIVE_TOKENS
    )
    speculative_token_tree: str | None = option(None, "a static tree instead, such as '[(0,), (1,), (0, 0)]'")
    draft_window_size: int | None = option(
        None,
        "most tokens of a text that a draft attends to, the first and the last; 0: all; by default what the checkpoint"
        " names",
        ge=0,
    )
    draft_sink_size: int = option(4, "first tokens of a longer text that it attends to", ge=0)
    draft_vocab: str | None = option(
        None,
        "JSON file of the token ids that may be drafted",
        only=("draft_model", "eagle3", "mtp", "dflash", "dspark"),
    )
    hidden_state_dtype: str = option("int8", "type of the target's states that drafts read", choices=STATE_DTYPES)
    draft_confidence_threshold: float = option(
        0.0, "a draft ends before a token whose confidence is below this", ge=0, le=1, only=("dspark",)
    )
    parallel_drafting: bool | None = option(
        None, "one pass drafts all tokens (PARD); by default where the checkpoint names a mask token", flag=False
    )
    draft_tensor_parallel_size: int = option(1, "processes of the draft model; only 1", flag=False)
    quantization: str | None = option("auto", "rounds the draft's weights", choices=QUANTIZATIONS, flag=False)
    disable_by_batch_size: int | None = option(None, "no drafting while more sequences are open", ge=1, flag=False)

    def __post_init__(self) -> None:
        methods = _read_methods(self.method or ("draft_model" if self.model else "none"))
        object.__setattr__(self, "method", methods if len(methods) > 1 else methods[0])
        LookupSettings.__post_init__(self)
        needing = next((method for method in methods if method in MODEL_METHODS), None)
        require(
            needing is None or self.model is not None,
            "model",
            f'method "{needing}" needs "model", the folder of the draft checkpoint',
        )
        require(
            self.draft_tensor_parallel_size == 1,
            "draft_tensor_parallel_size",
            f"draft_tensor_parallel_size is {self.draft_tensor_parallel_size}: a draft runs in one process; use 1",
        )
        _ = self.tree

    @property
    def tree(self) -> TreeShape | None:
        """The trees to draft; None: chains.

        Raises:
            InvalidRequest: the settings describe none that can be drafted.
        """
        return TreeShape.of(self.tree_top_k, self.tree_depth, self.speculative_token_tree, self.num_speculative_tokens)

    @property
    def methods(self) -> tuple[str, ...]:
        """What drafts, in order of preference."""
        assert self.method is not None  # since __post_init__
        return (self.method,) if isinstance(self.method, str) else self.method

    @property
    def needs_model(self) -> bool:
        """Whether a checkpoint is loaded to draft."""
        return any(method in MODEL_METHODS for method in self.methods)

    @property
    def reads_target(self) -> bool:
        """Whether tensors of the target's checkpoint are loaded to draft."""
        return any(method in HEAD_METHODS for method in self.methods)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read vLLM's ``speculative_config``; an unknown key is an error naming it."""
        known = options_of(cls)
        for key in config:
            remedy = did_you_mean(key, known, f"it knows {', '.join(sorted(known))}")
            require(key in known, key, f"speculative_config has no option {key!r}; {remedy}")
        settings = cls(**config)
        if settings.method == "suffix" and "num_speculative_tokens" not in config:  # vLLM's default, too
            settings = replace(
                settings, num_speculative_tokens=min(settings.suffix_decoding_max_tree_depth, MAX_SPECULATIVE_TOKENS)
            )
        return settings


def _read_methods(given: Any) -> tuple[str, ...]:
    """One method's name, or a lookup's and another's, as a tuple."""
    methods = tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else (given,)
    for method in methods:
        refuse_method(str(method))
        require(method in METHODS, "method", f"method is {method!r}; choose one of {', '.join(METHODS)}")
    first, *rest = methods
    require(
        not rest or (len(rest) == 1 and first in LOOKUP_METHODS and rest[0] not in (first, "none")),
        "method",
        f"method is {list(methods)}; of two methods the first must be one of {', '.join(LOOKUP_METHODS)}, the second"
        " another one, and there can be no third",
    )
    return (first, *rest)
