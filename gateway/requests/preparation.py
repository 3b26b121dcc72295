"""From a request to what the decoding loop gets: limits checked, text tokenized, seeds and stop tokens fixed."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import replace

from gateway.access.caller import current_caller
from gateway.access.session_hint import current_session_hint
from gateway.access.trace_context import current_trace_context
from gateway.decoding.drafters import Drafters
from gateway.decoding.request import DecodingRequest
from gateway.placement.routing import Router
from gateway.requests.draft_methods import DraftMethods
from gateway.requests.engine_requests import check_for_engines, is_resumable
from gateway.requests.limits import check_length
from gateway.requests.types import GenerationRequest
from gateway.text.tokenizer import TextTokenizer
from specdec.codec import SharedTokenIds
from specdec.errors import ContextLengthExceeded, InvalidRequest, quote
from specdec.lookup.prediction import PredictionLookup
from specdec.params import MAX_SEED, SamplingParams
from specdec.rules import SEEDED_RULE, Rule
from specdec.settings import GatewaySettings
from specdec.tree_shape import MAX_SPECULATIVE_TOKENS
from specdec.types import ModelInfo


def mix_seed(seed: int, index: int) -> int:
    """Seed of sample ``index``; sample 0 keeps the request's. SplitMix64 (Steele et al. 2014) of seed and index."""
    if index == 0:
        return seed
    z = (seed + index * 0x9E3779B97F4A7C15) & MAX_SEED
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MAX_SEED
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MAX_SEED
    return z ^ (z >> 31)


class Preparation:
    """Prepares the requests of one gateway."""

    def __init__(self, settings: GatewaySettings, tokenizer: TextTokenizer | None, methods: DraftMethods) -> None:
        self._settings = settings
        self._methods = methods
        self._tokenizer = tokenizer
        self._seeds = random.SystemRandom() if settings.seed is None else random.Random(settings.seed)

    def prepare(
        self,
        request: GenerationRequest,
        prompt: Sequence[int],
        prediction: PredictionLookup | None,
        model: ModelInfo,
        *,
        deadline: float | None,
        attached: Router | None = None,
    ) -> list[DecodingRequest]:
        """One decoding request per sample. ``prediction``: that of the request; ``attached``: with the draft that its
        client brings, which drafts where there is no prediction.

        Raises:
            InvalidRequest: a value is impossible for this model.
        """
        params, prompt, caller = request.params, SharedTokenIds(prompt), current_caller()
        _check_prompt(prompt, model)
        if self._settings.has_engines:
            check_for_engines(request, caller)
        fixed = self._fix(params, len(prompt), model)
        rule = self._rule(request)
        method = self._methods.choose(request.method)
        if request.method and request.attachment:
            raise InvalidRequest("method and attachment both name what drafts; give one", param="attachment")
        _check_num_speculative_tokens(request)
        # A round commits one token of the target's own besides.
        most = (fixed.max_tokens or 1) - 1
        if request.num_speculative_tokens is not None:
            most = min(most, request.num_speculative_tokens)
        k = min(most, method.num_speculative_tokens)
        if not self._may_predict(request, rule, k):
            prediction = None
        if prediction:
            attached = None
        # Below the name of the caller's key, which has no slash.
        name = request.session_id or current_session_hint() or request.prompt_cache_key
        session_id = f"{caller.key}/{name}" if name else None
        return [
            DecodingRequest(
                prompt=prompt,
                params=fixed if index == 0 else _sample_params(fixed, index),
                rule=rule,
                num_speculative_tokens=k,
                drafters=method.drafters if attached is None else Drafters(),
                attached=attached,
                num_looked_up_tokens=min(most, method.num_looked_up_tokens),
                prediction=prediction,
                num_predicted_tokens=MAX_SPECULATIVE_TOKENS if prediction else 0,
                # The first sample continues the caches of a conversation.
                session_id=session_id if index == 0 else None,
                cache_salt=request.cache_salt,
                caller=caller,
                is_resumable=not self._settings.has_engines or is_resumable(fixed),
                deadline=deadline,
                # The client's, where the trace has no spans of this gateway.
                trace_headers=current_trace_context()[1],
            )
            for index in range(params.n)
        ]

    def _may_predict(self, request: GenerationRequest, rule: Rule | None, k: int) -> bool:
        """Whether a prediction is drafted. Under a ratio rule no draft may depend on the noise that decides on it, and
        what a client predicts may be what it got with the same seed.
        """
        params = request.params
        is_independent = params.greedy or params.seed is None or (rule is not None and rule.is_draft_invariant)
        return k > 0 and is_independent and not self._settings.has_engines

    def _rule(self, request: GenerationRequest) -> Rule | None:
        """The rule of a request; None leaves it to the target. A ratio rule believes the q that a draft sends."""
        rule = request.rule or (self._settings.verification if request.params.seed is None else SEEDED_RULE)
        is_untrusted = self._settings.untrusted_drafts or bool(request.attachment)
        if is_untrusted and not (rule is not None and rule.is_draft_invariant):
            return SEEDED_RULE
        return rule

    def _fix(self, params: SamplingParams, prompt_len: int, model: ModelInfo) -> SamplingParams:
        """The parameters of sample 0, with everything decided that the request left open."""
        max_tokens = _max_tokens(params, prompt_len, model)
        _check_token_ids("logit_bias", params.logit_bias, model)
        _check_token_ids("allowed_token_ids", params.allowed_token_ids, model)
        _check_token_ids("stop_token_ids", params.stop_token_ids, model)
        for ids in params.bad_token_ids:
            _check_token_ids("bad_token_ids", ids, model)
        if params.min_tokens > max_tokens:
            raise InvalidRequest(
                f"min_tokens ({params.min_tokens}) is above max_tokens ({max_tokens})", param="min_tokens"
            )
        if params.stop and self._tokenizer is None:
            raise InvalidRequest("stop needs a tokenizer and this server has none; use stop_token_ids", param="stop")
        bad_words = _bad_words(params.bad_words, self._tokenizer)
        if params.allowed_token_ids and {(token,) for token in params.allowed_token_ids} <= set(bad_words):
            raise InvalidRequest(
                "bad_words forbids every token that allowed_token_ids allows; leave out one of the two",
                param="bad_words",
            )
        if self._settings.has_engines:  # which know bad words and ends of sequences, and draw seeds if none is given
            seed = params.seed if self._settings.seed is None else self._seed(params)
            return replace(params, n=1, max_tokens=max_tokens, seed=seed)
        eos = () if params.ignore_eos else model.eos_token_ids
        return replace(
            params,
            n=1,
            max_tokens=max_tokens,
            stop_token_ids=tuple(dict.fromkeys((*params.stop_token_ids, *eos))),
            bad_words=(),
            bad_token_ids=(*params.bad_token_ids, *bad_words),
            seed=self._seed(params),
        )

    def _seed(self, params: SamplingParams) -> int:
        return self._seeds.getrandbits(64) if params.seed is None else params.seed


def _sample_params(first: SamplingParams, index: int) -> SamplingParams:
    seed = None if first.seed is None else mix_seed(first.seed, index)
    return replace(first, seed=seed, prompt_logprobs=None)


def _check_prompt(prompt: Sequence[int], model: ModelInfo) -> None:
    if not prompt:
        raise InvalidRequest("the prompt is empty; give at least one token", param="prompt")
    _check_token_ids("prompt", prompt, model)
    check_length(len(prompt), model)


def _max_tokens(params: SamplingParams, prompt_len: int, model: ModelInfo) -> int:
    rest = model.max_model_len - prompt_len
    if params.max_tokens is None:
        return rest
    if params.max_tokens > rest:
        raise ContextLengthExceeded(
            f"this model's maximum context length is {model.max_model_len} tokens, of which the prompt of {prompt_len}"
            f" leaves {rest}, but max_tokens is {params.max_tokens}; shorten the prompt or lower max_tokens",
            param="max_tokens",
        )
    return params.max_tokens


def _check_token_ids(param: str, token_ids: Collection[int], model: ModelInfo) -> None:
    limit = model.tokenizer_size or model.vocab_size
    # Twenty times as fast as the loop, which finds the culprit.
    if set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) < limit:
        return
    for token_id in token_ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < limit:
            raise InvalidRequest(
                f"{param} holds token id {quote(token_id)}, outside the vocabulary [0, {limit})", param=param
            )


def _check_num_speculative_tokens(request: GenerationRequest) -> None:
    asked = request.num_speculative_tokens
    if asked is not None and not 0 <= asked <= MAX_SPECULATIVE_TOKENS:
        raise InvalidRequest(
            f"num_speculative_tokens is {quote(asked)}, outside [0, {MAX_SPECULATIVE_TOKENS}]",
            param="num_speculative_tokens",
        )


def _bad_words(words: Sequence[str], tokenizer: TextTokenizer | None) -> list[tuple[int, ...]]:
    """Each word as token sequences: as it is and after a space, since tokens hold the space before a word.

    vLLM does the same (``update_from_tokenizer``) but drops the second where it has another length; here it is
    dropped only where the first forbids it already.
    """
    if not words:
        return []
    if tokenizer is None:
        raise InvalidRequest("bad_words needs a tokenizer and this server has none", param="bad_words")
    result: list[tuple[int, ...]] = []
    for word in words:
        bare = tuple(tokenizer.encode(word.lstrip(), add_special_tokens=False))
        spaced = tuple(tokenizer.encode(" " + word.lstrip(), add_special_tokens=False))
        if not bare:
            raise InvalidRequest(f"bad_words holds {quote(word)}, which is no token", param="bad_words")
        result.append(bare)
        if spaced[-len(bare) :] != bare:
            result.append(spaced)
    return result
