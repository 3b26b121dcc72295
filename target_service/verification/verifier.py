"""The verifier: from the logits and rounds of a step to what each round commits."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import compress
from operator import not_
from typing import Final

import torch
from torch import Tensor

from engine.native import library
from engine.native.library import NativeLibrary
from engine.native.sampling_verify import decides, verify_rounds
from engine.sampling.state import SamplingState
from specdec.params import SamplingParams
from specdec.rules import DEFAULT_RULE
from target_service.grammar.masks import MaskedRows, MaskFiller, StepMasks
from target_service.verification.logprobs import read, score
from target_service.verification.rounds import Outcome, Round
from target_service.verification.tensor_verifier import verify_with_tensors

#: Of the rounds that :func:`decide_many` makes.
_MEASURED_DRAFTS: Final = 4
_MEASURED_LOGPROBS: Final = 20


class Verifier:
    """Converts the logits of one step to tokens. Stateless; the states of the rounds are read, not advanced.

    On a CPU the kernels decide all rounds that they know in one call. Where there are no kernels, for rounds whose rule
    or parameters they do not know, and on other devices, the rules run on tensors. Both decide alike (but for the last
    bits of sums over the vocabulary).
    """

    def __init__(self, *, native: bool = True, num_threads: int | None = None) -> None:
        """``native``: whether to use the kernels where they can be; ``num_threads``: theirs, None takes torch's."""
        self._kernels = library.load() if native else None
        self._num_threads = num_threads
        self._filler = MaskFiller()

    def begin_masks(self, rounds: Sequence[Round]) -> Future[StepMasks] | None:
        """Start to fill the masks of the rounds with a grammar, before their forward pass; None where there is none."""
        masked = [MaskedRows(r.grammar, r.draft_token_ids, r.parents) for r in rounds if r.grammar is not None]
        return self._filler.submit(masked, rounds[0].state.num_tokens) if masked else None

    def verify(self, logits: Tensor, rounds: Sequence[Round], masks: Sequence[Tensor] = ()) -> list[Outcome]:
        """Decide every round: ``logits`` float32 [R, V] raw, which are not written to; one transfer to the host in all.

        ``masks`` are those of the rounds with a grammar, in order. Log-probabilities are those of the model, before the
        masks. The caller commits: ``state.commit(outcome.token_ids)`` (as many of them as the sequence keeps).
        """
        if not rounds:
            return []
        if masks:
            each = iter(masks)
            rounds = [r if r.grammar is None else replace(r, masks=next(each)) for r in rounds]
        return self._decide(logits, rounds)

    def close(self) -> None:
        """End the thread of the masks."""
        self._filler.close()

    def _decide(self, logits: Tensor, rounds: Sequence[Round]) -> list[Outcome]:
        if self._kernels is None or logits.device.type != "cpu" or not logits.is_contiguous():
            return verify_with_tensors(logits, rounds)
        known = [decides(r) for r in rounds]
        if all(known):
            return self._verify_natively(self._kernels, logits, rounds)
        natively = iter(self._verify_natively(self._kernels, logits, list(compress(rounds, known))))
        with_tensors = iter(verify_with_tensors(logits, list(compress(rounds, map(not_, known)))))
        return [next(natively if is_known else with_tensors) for is_known in known]

    def _verify_natively(self, kernels: NativeLibrary, logits: Tensor, rounds: Sequence[Round]) -> list[Outcome]:
        decisions = verify_rounds(kernels, logits, rounds, num_threads=self._num_threads) if rounds else []
        if decisions is None:  # a proposal is malformed: tensors say which
            return verify_with_tensors(logits, rounds)
        return _outcomes(logits, rounds, decisions)


def decide_many(logits: Tensor) -> None:
    """Decide rounds that need the most memory, one for every few rows of ``logits`` float32 [R, V]."""
    params = SamplingParams(temperature=1.0, top_p=0.9, presence_penalty=1.0, seed=0)
    state = SamplingState(params, [0], 1, logits.shape[1], device=logits.device)
    rows = range(0, logits.shape[0], _MEASURED_DRAFTS + 1)
    drafts = tuple(range(_MEASURED_DRAFTS)) if logits.shape[1] >= _MEASURED_DRAFTS else ()
    verify_with_tensors(
        logits,
        [
            Round(state, DEFAULT_RULE, row, drafts[: logits.shape[0] - row - 1], logprobs=_MEASURED_LOGPROBS)
            for row in rows
        ],
    )


def _outcomes(logits: Tensor, rounds: Sequence[Round], decisions: Sequence[tuple[int, int, bool]]) -> list[Outcome]:
    outcomes = []
    for r, (end, token_id, valid) in zip(rounds, decisions, strict=True):
        outcomes.append(r.outcome(end, token_id) if valid else r.failure(end, logits))
    if any(r.logprobs is not None for r in rounds):
        _add_logprobs(logits, rounds, outcomes)
    return outcomes


def _add_logprobs(logits: Tensor, rounds: Sequence[Round], outcomes: list[Outcome]) -> None:
    asked = [(r, outcome) for r, outcome in zip(rounds, outcomes, strict=True) if r.logprobs is not None]
    at = [
        (r.start_row + row, token_id)
        for r, outcome in asked
        for row, token_id in zip((0, *(i + 1 for i in outcome.path)), outcome.token_ids, strict=False)
    ]
    if not at:
        return
    rows, token_ids = torch.tensor(at).unbind(1)
    num_tokens = rounds[0].state.num_tokens
    num_top = min(max(r.logprobs or 0 for r, _ in asked), num_tokens)
    scored = iter(score(logits[rows], token_ids, num_top, num_tokens).tolist())
    for i, (r, outcome) in enumerate(zip(rounds, outcomes, strict=True)):
        if r.logprobs is not None:
            logprobs = tuple(read(next(scored), token_id, r.logprobs) for token_id in outcome.token_ids)
            outcomes[i] = replace(outcome, logprobs=logprobs)
