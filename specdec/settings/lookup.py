"""Settings of lookups, under the names of vLLM's ``speculative_config``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from specdec.settings.option import check_options, option, require

_NGRAM: Final = ("ngram",)
_SUFFIX: Final = ("suffix",)


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupSettings:
    """How what stood in some text before is looked up."""

    GROUPS: ClassVar = {"lookups": "prompt_lookup_max"}

    prompt_lookup_max: int = option(4, "longest n-gram looked up", only=_NGRAM)
    prompt_lookup_min: int = option(1, "shortest n-gram looked up", ge=1, only=_NGRAM)
    suffix_decoding_max_tree_depth: int = option(24, "longest match and its continuation", ge=1, le=512, only=_SUFFIX)
    suffix_decoding_max_cached_requests: int = option(10000, "past requests looked up in, too", ge=0, only=_SUFFIX)
    suffix_decoding_max_spec_factor: float = option(1.0, "drafted tokens for each one that matched", ge=0, only=_SUFFIX)
    suffix_decoding_min_token_prob: float = option(0.1, "least likelihood of the draft", ge=0, le=1, only=_SUFFIX)

    def __post_init__(self) -> None:
        check_options(self)
        require(
            1 <= self.prompt_lookup_min <= self.prompt_lookup_max,
            "prompt_lookup_min",
            f"prompt_lookup_min ({self.prompt_lookup_min}) and prompt_lookup_max ({self.prompt_lookup_max}) must"
            " satisfy 1 <= min <= max",
        )
