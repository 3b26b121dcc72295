"""The self-test of drafts that read states, at start: does the target accept what one of its kind should get right?

A head whose files are read wrongly, or that belongs to another target, drafts nonsense without any error. The text
stays right, but drafting is slower than none. Only the gateway, where target and draft meet, can see that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Final

from gateway.decoding.context import DecodingContext
from gateway.decoding.drafters import Drafters
from gateway.decoding.loop import Decoding
from gateway.decoding.metrics import SpeculationMetrics
from gateway.decoding.request import DecodingRequest
from gateway.generation import Generation
from gateway.placement.routing import Replica, Router
from specdec.errors import InvalidRequest, TandemError
from specdec.methods import BETTER, GOOD_SHARE, last_method
from specdec.params import SamplingParams
from specdec.types import ModelInfo

logger = logging.getLogger(__name__)

#: Tokens the target generates for each prompt, and drafted tokens of a round.
NUM_TOKENS: Final = 24
NUM_DRAFT_TOKENS: Final = 3
#: Share of the usual gain below which a head is not what it should be. Other layers, which are tried below
#: :data:`~specdec.methods.GOOD_SHARE`, must bring half of the usual gain, too.
LEAST_SHARE: Final = 0.25
#: Rounds below which nothing can be said, and seconds the test may take for each prompt.
MIN_ROUNDS: Final = 5
TIMEOUT_S: Final = 20.0
#: The number of the last layer's state before the final norm.
_BEFORE_NORM: Final = (-2,)
#: What is said where no cause is found.
USUAL_CAUSES: Final = (
    "Usual causes: the head was trained for another target, or for another version or quantization of it; its config"
    " means other hidden states, masks, norms or rotary embeddings here than where it was trained; its weights are"
    " incomplete or untrained"
)
#: Code and prose, which every head has learned. The second is tested only if the first has no good result.
PROMPTS: Final = (
    "Write a Python function that adds two numbers, then one that sorts a list.\n\n```python\ndef ",
    "Explain in simple words why the sky is blue and why the sea is salty.",
)


async def check_acceptance(generation: Generation, head: ModelInfo, usual: float) -> None:
    """Let a head draft for text that the target generates, and warn if hardly anything is accepted.

    ``usual``: tokens a round commits with a good head of its kind. If the head does better on hidden states of other
    layers, the warning names them.
    """
    try:
        counted = await _draft(generation, generation.router, head, usual)
        gain = GOOD_SHARE if counted is None else _gain(counted, usual)
        cause = "" if gain >= GOOD_SHARE else await _better_layers(generation, head, usual, gain)
    except TandemError as error:
        logger.info("the self-test of draft %s was given up: %s", head.name, error)
        return
    if counted is None or (gain >= LEAST_SHARE and not cause):
        return
    logger.warning(
        "SELF-TEST FAILED: the target accepted %d of %d tokens that draft %s (%s) proposed: %.2f tokens a round, where"
        " %.1f are usual for this kind. The text is right, but drafting costs time. %s (docs/drafters.md#draft-heads)",
        counted.num_accepted_draft_tokens,
        counted.num_draft_tokens,
        head.name,
        head.method,
        counted.mean_acceptance_length,
        usual,
        cause or USUAL_CAUSES,
    )


async def _draft(generation: Generation, router: Router, head: ModelInfo, usual: float) -> SpeculationMetrics | None:
    """What was counted on the prompts, on the first alone where its result is good; None: nothing can be said."""
    context = DecodingContext(router, replace(generation.settings, fixed_draft_length=True))
    counted = SpeculationMetrics()
    for text in PROMPTS:
        request = await _request(generation, head, text)
        if request is None:
            return None
        decoding = Decoding(context, request)
        async with aclosing(decoding.verdicts()) as verdicts:
            async for _ in verdicts:
                pass
        counted.add(decoding.metrics)
        if counted.num_spec_steps < MIN_ROUNDS:
            return None
        if _gain(counted, usual) >= GOOD_SHARE:
            break
    return counted


def _gain(counted: SpeculationMetrics, usual: float) -> float:
    """The share of the usual gain."""
    return float(counted.mean_acceptance_length - 1) / (usual - 1)


async def _better_layers(generation: Generation, head: ModelInfo, usual: float, gain: float) -> str:
    """Let it draft on the states of the layers beside; what to change if that is right, else empty."""
    given, router = head.hidden_state_layers, generation.router
    found = ""
    for layers in _layers_beside(head):
        # The target sends them as they are: what it may run in the head's place belongs to the head's own layers.
        shifted = replace(head, hidden_state_layers=layers, hidden_state_map="")
        trial = Router(
            [Replica(each.name, each.backend) for each in router.targets.usable[:1]],
            [Replica(each.name, each.backend) for each in router.drafts.usable if each.info is head],
        )
        for target in trial.targets.replicas:
            trial.target_up(target, router.model())
        for draft in trial.drafts.replicas:
            trial.draft_up(draft, shifted)
        try:
            counted = await _draft(generation, trial, shifted, usual)
        except TandemError:  # the target has no such layer
            continue
        if counted is not None and _gain(counted, usual) >= max(0.5, BETTER * gain):
            gain = _gain(counted, usual)
            is_norm = layers == _BEFORE_NORM
            what = "the state before the final norm"
            if not is_norm:
                what = f"the hidden states {_named(head, layers)}, not {_named(head, given)},"
            found = (
                f"Likely cause: {'the norm of its state' if is_norm else 'its layer ids, which are off by one'}. On"
                f" {what} it commits {counted.mean_acceptance_length:.2f} tokens a round"
            )
    return found


def _is_head(head: ModelInfo) -> bool:
    method = last_method(head.method)
    return method is not None and method.is_head


def _named(head: ModelInfo, layers: Sequence[int]) -> list[int]:
    """As the draft's files name them: PARD-2 by indices of transformers' hidden_states, whose -2 is our -3."""
    return [i + 1 if i < -1 and not _is_head(head) else i for i in layers]


def _layers_beside(head: ModelInfo) -> list[tuple[int, ...]]:
    """Numbers of the states that its config may mean: those before or after the ones it names."""
    given = head.hidden_state_layers
    if _is_head(head):
        shifts = [tuple(i + by for i in given) for by in (-1, 1)]
        return [_BEFORE_NORM] if given == (-1,) else [each for each in shifts if min(each) >= 0]
    # PARD-2 names indices of transformers' hidden_states. The last of them, -1, is after the final norm, and the one
    # before it is our -3. Only the target knows its number, so the highest state is followed by either, -1 by none.
    before, after = tuple(i - 1 if i >= 0 else -3 for i in given), tuple(i + 1 for i in given)
    return [before] if -1 in given else [before, after, tuple(-1 if i == max(after) else i for i in after)]


async def _request(generation: Generation, head: ModelInfo, text: str) -> DecodingRequest | None:
    """Greedy text on a prompt; None where nothing is drafted or there is no room."""
    k = min(NUM_DRAFT_TOKENS, generation.settings.num_speculative_tokens)
    if generation.tokenizer is None:
        return None
    try:
        prompt = await generation.encode(
            generation.text.render_chat([{"role": "user", "content": text}]), add_special_tokens=False
        )
    except InvalidRequest:  # without a template, or one that wants other messages
        prompt = await generation.encode(text)
    if not k or len(prompt) + NUM_TOKENS > generation.router.model().max_model_len:
        return None
    return DecodingRequest(
        prompt=tuple(prompt),
        params=SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, seed=0),
        num_speculative_tokens=k,
        drafters=Drafters((), head.method),
        cache_salt=f"self-test {head.hidden_state_layers}",  # no entries that were made of other states
        deadline=asyncio.get_running_loop().time() + TIMEOUT_S,
    )


class StartUpCheck:
    """Checks each draft that reads states once, when it comes up."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._checked: set[str] = set()

    async def run(self) -> None:
        """Check those that can be used now and were not checked before."""
        for replica in self._generation.router.drafts.usable:
            head = replica.info
            method = None if head is None else last_method(head.method)
            if head is None or method is None or not head.hidden_state_layers or head.name in self._checked:
                continue
            self._checked.add(head.name)
            await check_acceptance(self._generation, head, method.usual_acceptance_length)
