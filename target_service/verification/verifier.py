"""The verifier: from the logits and rounds of a step to what each round commits."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import compress, islice
from operator import not_
from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor

from engine.cuda.graphs import CudaCapture
from engine.device import has_triton
from engine.native import library
from engine.native.library import NativeLibrary
from engine.native.sampling_verify import decides, verify_rounds
from engine.sampling.state import SamplingState
from specdec.params import SamplingParams
from specdec.rules import DEFAULT_RULE, Rule
from target_service.grammar.masks import MaskedRows, MaskFiller, StepMasks
from target_service.verification.captured import GpuVerdicts
from target_service.verification.logprobs import read, score
from target_service.verification.rounds import Outcome, Round
from target_service.verification.tensor_verifier import verify_with_tensors

logger = logging.getLogger(__name__)

#: Of the rounds that :func:`decide_many` makes.
_MEASURED_DRAFTS: Final = 4
_MEASURED_LOGPROBS: Final = 20
#: Sessions of verdicts that are captured at start, others when they first come.
_WARM_ROUNDS: Final = (16, 8, 4, 2, 1)
#: Of the rounds that a GPU's way is checked with: a chain and a tree; all kinds of sampling.
_CHECKED_PARENTS: Final = (tuple(range(-1, 4)), (-1, -1, 0, 0, 2))
_CHECKED_PARAMS: Final[tuple[dict[str, Any], ...]] = ({"temperature": 0.0}, {}, {"top_p": 0.9}, {"top_k": 20})


class Verifier:
    """Converts the logits of one step to tokens. Stateless; the states of the rounds are read, not advanced.

    On a CPU the kernels decide all rounds that they know in one call. Where there are no kernels, for rounds whose rule
    or parameters they do not know, and on other devices, the rules run on tensors; on a GPU with kernels of its own
    after :meth:`warm_up`. All decide alike (but for the last bits of sums over the vocabulary).
    """

    def __init__(self, *, native: bool = True, num_threads: int | None = None) -> None:
        """``native``: whether to use the kernels where they can be; ``num_threads``: theirs, None takes torch's."""
        self._kernels = library.load() if native else None
        self._num_threads = num_threads
        self._filler = MaskFiller()
        #: What decides on a GPU in place of tensors where it knows how.
        self.on_gpu: GpuVerdicts | None = None

    def warm_up(self, device: torch.device, vocab_size: int, num_tokens: int, *, captures: bool = True) -> None:
        """Compile the kernels of a GPU and capture common verdicts (unless it ``captures`` none), which are used from
        now on if they decide as tensors do.
        """
        if device.type != "cuda":
            return
        choices: ModuleType | None = None
        if has_triton():
            from engine.cuda import choices  # noqa: PLC0415 - there is no Triton without a GPU
        size = vocab_size, min(num_tokens or vocab_size, vocab_size)
        kernels = checked(GpuVerdicts(choices, None, device), device, *size)
        choices = None if kernels is None else choices
        self.on_gpu = kernels
        if captures:
            graphs = GpuVerdicts(choices, CudaCapture(device, of_verdicts=True), device)
            self.on_gpu = checked(graphs, device, *size) or kernels

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
            return verify_with_tensors(logits, rounds, on_gpu=self.on_gpu)
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


def checked(on_gpu: GpuVerdicts, device: torch.device, vocab_size: int, num_tokens: int) -> GpuVerdicts | None:
    """The same, where it decides random rounds as tensors do; else the log says why not."""
    try:
        found = None if _agree(on_gpu, device, vocab_size, num_tokens) else "they decide otherwise than tensors"
    except Exception as error:  # compilers of kernels raise anything
        found = f"{type(error).__name__}: {error}"
    if found is None:
        return on_gpu
    logger.warning("verdicts run without %s: %s", on_gpu, found)
    return None


def _agree(on_gpu: GpuVerdicts, device: torch.device, vocab_size: int, num_tokens: int) -> bool:
    """Rounds of every rule, chains and trees, some masked, with tokens that are the target's choice and one that is
    not; and rows that no token can be drawn from.
    """
    with torch.inference_mode():
        generator = torch.Generator().manual_seed(5)
        cases = [(rule, params, parents) for parents in _CHECKED_PARENTS for rule in Rule for params in _CHECKED_PARAMS]
        size = len(_CHECKED_PARENTS[0]) + 1
        logits = 4 * torch.randn(2 * size, vocab_size, generator=generator)
        logits[-1, -1], logits[size] = torch.nan, -torch.inf
        logits = logits.to(device)
        for i, (rule, params, parents) in enumerate(cases):
            made = SamplingParams(seed=i, **params)
            state = SamplingState(made, [1, 2], 2, vocab_size, tokenizer_size=num_tokens, device=device)
            masks = _random_masks(size, vocab_size, generator) if i % 2 else None
            drafts: list[int] = []
            for count in range(size):
                own = None if masks is None else masks[: count + 1]
                rounds = [Round(state, rule, at, drafts, parents=parents[:count], masks=own) for at in (0, size)]
                if count == 0:  # capture the largest first: the others compute in its memory
                    for num_rounds in _WARM_ROUNDS:
                        verify_with_tensors(logits, rounds[:1] * num_rounds, on_gpu=on_gpu)
                answers = [verify_with_tensors(logits, rounds, on_gpu=way) for way in (None, on_gpu)]
                decided = [[(one.path, one.token_ids, one.error is None) for one in found] for found in answers]
                if decided[0] != decided[1]:
                    return False
                drafts.append((answers[0][0].token_ids[-1] + (count == size - 3)) % num_tokens)
    return True


def _random_masks(num_rows: int, vocab_size: int, generator: torch.Generator) -> Tensor:
    """Half of the tokens may be drawn: int32 [num_rows, W]."""
    size = num_rows, -(-vocab_size // 32)
    return torch.randint(-(2**31), 2**31, size, generator=generator).to(torch.int32)


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
    scored = score(logits[rows], token_ids, num_top, num_tokens).numpy()
    num_tops = [r.logprobs or 0 for r, outcome in asked for _ in outcome.token_ids]
    positions = iter(read(scored, token_ids.tolist(), num_tops))
    for i, (r, outcome) in enumerate(zip(rounds, outcomes, strict=True)):
        if r.logprobs is not None:
            outcomes[i] = replace(outcome, logprobs=tuple(islice(positions, len(outcome.token_ids))))
