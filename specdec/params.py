"""What a request may ask of sampling. Free of torch: the gateway reads it too."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from specdec.errors import InvalidRequest

MAX_SEED: Final = 2**64 - 1
MAX_LOGPROBS: Final = 20
MAX_LOGIT_BIAS: Final = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request, under vLLM's names.

    Raises :class:`InvalidRequest` naming the field when a value is out of range.
    """

    n: int = 1
    #: Tokens to generate at most; None means up to the model's context.
    max_tokens: int | None = 16
    #: Stop tokens are forbidden until this many tokens were generated.
    min_tokens: int = 0
    #: 0 is greedy.
    temperature: float = 1.0
    #: 0 and -1 keep all tokens.
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    #: Empty means every token.
    allowed_token_ids: Sequence[int] = ()
    #: Texts that must not appear.
    bad_words: Sequence[str] = ()
    #: The same as token sequences; :mod:`gateway` adds those of ``bad_words``.
    bad_token_ids: Sequence[Sequence[int]] = ()
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    #: None draws a fresh one; a given one makes the text a function of (seed, prompt, target).
    seed: int | None = None
    #: Number of most likely tokens reported per position; 0 reports only the chosen one; None reports nothing.
    logprobs: int | None = None
    #: The same for the prompt's own tokens.
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "bad_words", tuple(self.bad_words))
        object.__setattr__(self, "allowed_token_ids", tuple(self.allowed_token_ids))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "bad_token_ids", tuple(tuple(ids) for ids in self.bad_token_ids))
        object.__setattr__(self, "logit_bias", {int(t): float(b) for t, b in self.logit_bias.items()})
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        self._check("n", self.n, low=1, high=128, whole=True)
        if self.max_tokens is not None:
            self._check("max_tokens", self.max_tokens, low=1, whole=True)
        self._check("min_tokens", self.min_tokens, low=0, whole=True)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens})", param="min_tokens"
            )
        self._check("temperature", self.temperature, low=0.0)
        self._check("top_k", self.top_k, low=0, whole=True)
        self._check("top_p", self.top_p, low=0.0, high=1.0, above=True)
        self._check("min_p", self.min_p, low=0.0, high=1.0)
        self._check("presence_penalty", self.presence_penalty, low=-2.0, high=2.0)
        self._check("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0)
        self._check("repetition_penalty", self.repetition_penalty, low=0.0, above=True)
        for bias in self.logit_bias.values():
            self._check("logit_bias", bias, low=-MAX_LOGIT_BIAS, high=MAX_LOGIT_BIAS)
        if self.seed is not None:
            self._check("seed", self.seed, low=-(2**63), high=MAX_SEED, whole=True)
            object.__setattr__(self, "seed", self.seed & MAX_SEED)
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                self._check(name, value, low=0, high=MAX_LOGPROBS, whole=True)
        if any(not text for text in stop):
            raise InvalidRequest("stop contains an empty string; leave it out", param="stop")
        if any(not ids for ids in self.bad_token_ids):
            raise InvalidRequest("bad_token_ids contains an empty sequence; leave it out", param="bad_token_ids")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    def with_seed(self, seed: int) -> SamplingParams:
        """The same parameters under another seed (unsigned 64-bit)."""
        return replace(self, seed=seed & MAX_SEED)

    @staticmethod
    def _check(
        name: str, value: Any, *, low: float, high: float = math.inf, above: bool = False, whole: bool = False
    ) -> None:
        kind = int if whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kind) or not math.isfinite(value):
            wanted = "a whole number" if whole else "a finite number"
            raise InvalidRequest(f"{name} must be {wanted}, not {value!r}", param=name)
        if value < low or value > high or (above and value == low):
            left = "(" if above else "["
            raise InvalidRequest(f"{name} is {value}, outside {left}{low}, {high}]", param=name)
