"""Why a head drafts badly: its first text is drafted again with each of its settings changed.

A setting that a checkpoint does not mean (which mask, which norm, who sees whom in a block) changes no shape, so no
error shows it. The first greedy text of a head with fewer accepted tokens than are usual is kept with its hidden
states. A setting with which more of that text is foreseen is named in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, Final

import torch
from torch import Tensor

from draft_service.drafters.heads.base import LoadedHead, tensor_of
from engine.chains import ChainJob
from engine.device_thread import DeviceThread
from engine.heads.blocks import PagedBlocks
from engine.heads.dflash import DFlashHead
from engine.heads.eagle import EagleHead
from engine.heads.eagle3 import Eagle3Head
from engine.heads.head import DraftHead
from engine.heads.mtp import MtpHead
from engine.heads.paged import PagedHead
from engine.sampling.state import SamplingState
from specdec.errors import Unavailable
from specdec.methods import BETTER, GOOD_SHARE, METHODS
from specdec.params import SamplingParams
from specdec.rules import one_rule_per_sampling
from specdec.settings import ModelSettings
from specdec.types import HiddenStates, SessionSpec

logger = logging.getLogger(__name__)

#: Rounds of a text below which nothing can be said, and tokens of it that are read.
MIN_ROUNDS: Final = 8
MAX_TOKENS: Final = 160
#: Tokens a round more that tell a cause, beside :data:`~specdec.methods.BETTER`.
LEAST_GAIN: Final = 0.2
#: Drafted tokens at each position, positions, and masks that are tried.
_NUM_TOKENS: Final = 3
_NUM_POSITIONS: Final = 40
_NUM_MASKS: Final = 12
_CACHE_BYTES: Final = 2**26

#: What to set instead: object, attribute and value.
Change = tuple[Any, str, Any]


@dataclass(slots=True)
class FirstText:
    """The first greedy text of a head, until enough is known of it."""

    loaded: LoadedHead
    #: The session that is followed.
    owner: object = None
    token_ids: list[int] = field(default_factory=list)
    states: list[HiddenStates] = field(default_factory=list)
    is_over: bool = False
    _drafted: Sequence[int] = ()
    _num_rounds: int = 0
    _num_accepted: int = 0

    def open(self, owner: object, spec: SessionSpec, num_cached: int) -> None:
        """A session begins: follow it if no other one is followed, and its states will come from the first one on."""
        if not self.is_over and self.owner is None and not num_cached and spec.params.temperature == 0:
            self.owner, self.token_ids, self.states = owner, [*spec.token_ids], []
            self._drafted, self._num_rounds, self._num_accepted = (), 0, 0

    def commit(self, owner: object, keep: int, token_ids: Sequence[int], states: Sequence[HiddenStates]) -> None:
        """Tokens were committed, and states came."""
        if owner is not self.owner or len(self.token_ids) > MAX_TOKENS:
            return
        if len(self._drafted) >= _NUM_TOKENS and keep == len(self.token_ids):
            self._num_rounds += 1
            self._num_accepted += len(token_ids) - 1
        self.token_ids[keep:] = token_ids
        self.states += states
        self._drafted = ()

    def draft(self, owner: object, token_ids: Sequence[int]) -> None:
        """Tokens were drafted."""
        if owner is self.owner:
            self._drafted = token_ids

    def close(self, owner: object) -> bool:
        """A session ends; whether :meth:`explain` should be called."""
        if owner is not self.owner:
            return False
        self.owner = None
        usual = METHODS[self.loaded.info.method].usual_acceptance_length - 1.0
        self.is_over = self._num_rounds >= MIN_ROUNDS
        if self.is_over and self._num_accepted < GOOD_SHARE * usual * self._num_rounds:
            return True
        self.token_ids, self.states = [], []
        return False

    async def explain(self, thread: DeviceThread) -> None:
        """Read the head again, try other settings, and log the best one if it is better. Between two settings the
        device thread drafts for sessions. A service that closes meanwhile ends the trials without a word.
        """
        with suppress(Unavailable):
            await self._try_settings(thread)

    async def _try_settings(self, thread: DeviceThread) -> None:
        info = self.loaded.info
        ends = [each.end for each in self.states]
        if not ends or any(each.start != end for each, end in zip(self.states, (0, *ends), strict=False)):
            return
        features = tensor_of(self.states)
        head = await thread.run(self.loaded.read)
        as_read = best = await thread.run(self._gain, head, features)
        cause = ""
        for text, changes in other_settings(head):
            before = [(part, name, getattr(part, name)) for part, name, _ in changes]
            _apply(changes)
            gain = await thread.run(self._gain, head, features)
            _apply(before)
            if gain > best:
                best, cause = gain, text
        self.token_ids, self.states = [], []
        if cause and best >= max(BETTER * as_read, as_read + LEAST_GAIN):
            logger.warning(
                "SELF-TEST FAILED: draft %s (%s) foresees %.2f tokens a round of its first text. Likely cause: %s. With"
                " that changed it foresees %.2f: correct its config.json (docs/drafters.md#draft-heads)",
                *(info.name, info.method, as_read, cause, best),
            )

    @torch.inference_mode()
    def _gain(self, head: DraftHead, features: Tensor) -> float:
        """Tokens of the text that greedy drafts foresee, on average over its last positions."""
        drafts, text = GreedyDrafts(head, self.loaded.model), self.token_ids
        count = min(len(features), len(text) - 1 - _NUM_TOKENS)
        ends = range(max(1, count - _NUM_POSITIONS), count + 1)
        num_right = 0
        for end in ends:
            pairs = zip(drafts.after(text[: end + 1], features), text[end + 1 :], strict=False)
            num_right += sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return num_right / len(ends)


class GreedyDrafts:
    """What a head drafts along one text."""

    def __init__(self, head: DraftHead, model: ModelSettings) -> None:
        small = replace(model, enforce_eager=True, kv_cache_memory_bytes=_CACHE_BYTES)
        self._paged: PagedHead | PagedBlocks
        if isinstance(head, DFlashHead):
            self._paged = PagedBlocks(head, small, 2 * MAX_TOKENS, num_tokens=_NUM_TOKENS)
        else:
            assert isinstance(head, EagleHead | Eagle3Head | MtpHead)
            self._paged = PagedHead(head, small, 2 * MAX_TOKENS)
        most = head.max_tokens if isinstance(head, MtpHead) else None
        self._num_tokens = min(_NUM_TOKENS, most or _NUM_TOKENS)
        self._sequence = self._paged.pool.open(2 * MAX_TOKENS)

    def after(self, token_ids: Sequence[int], features: Tensor) -> Sequence[int]:
        """Greedy tokens after some, at least one more than the last time; ``features`` [T, F] of the first positions,
        all but the last one's of ``token_ids`` at least.
        """
        start, end, device = self._sequence.length, len(token_ids) - 1, self._paged.device
        state = SamplingState(
            SamplingParams(temperature=0.0, seed=0), token_ids, 1, self._paged.head.config.vocab_size, device=device
        )
        rule, features = one_rule_per_sampling()[0], features[start:end]  # greedy tokens are those of any rule
        job = ChainJob(
            self._sequence, token_ids[start + 1 :], self._num_tokens, state, rule, features, positions=range(start, end)
        )
        return self._paged.draft_chains([job])[0].token_ids


def other_settings(head: DraftHead) -> Iterator[tuple[str, list[Change]]]:
    """What a config might say wrongly: in words, and what to set instead."""
    config = head.config
    if isinstance(head, Eagle3Head):
        flag = config.norm_before_residual
        other = (head, "config", replace(config, norm_before_residual=not flag))
        yield (
            f"a wrong norm: norm_before_residual is {flag}",
            [other, (head.midlayer, "norm_before_residual", not flag)],
        )
        yield f"a wrong norm: norm_output is {config.norm_output}", _with(head, norm_output=not config.norm_output)
    elif isinstance(head, MtpHead):
        order = "the state first" if config.hidden_first else "the embedding first"
        yield f"the order in which the projection reads: {order}", _with(head, hidden_first=not config.hidden_first)
    elif isinstance(head, DFlashHead):
        is_causal = any(reach.is_causal for reach in config.reaches)
        reaches = tuple(replace(reach, is_causal=not is_causal) for reach in config.reaches)
        yield (
            f"wrong causality: the rows of a block are {'' if is_causal else 'not '}causal",
            _with(head, reaches=reaches),
        )
        layout = f"a wrong layout: sample_from_anchor is {config.predicts_next}"
        yield layout, _with(head, predicts_next=not config.predicts_next)
        for mask in _other_masks(head):
            yield f"a wrong mask: mask_token_id is {config.mask_token_id}, not {mask}", _with(head, mask_token_id=mask)


def _other_masks(head: DFlashHead) -> list[int]:
    """The last ids of the vocabulary, where masks are as a rule, and those beside the one that is named."""
    given, size = head.config.mask_token_id, head.config.vocab_size
    near = [given - 1, given + 1, *range(size - 1, max(-1, size - _NUM_MASKS), -1), 0]
    return [mask for mask in dict.fromkeys(near) if mask != given and 0 <= mask < size]


def _with(head: DraftHead, **changes: Any) -> list[Change]:
    return [(head, "config", replace(head.config, **changes))]


def _apply(changes: Sequence[Change]) -> None:
    for part, name, value in changes:
        setattr(part, name, value)
