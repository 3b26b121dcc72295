"""A pass over segments in one native call: a small one costs no torch operation but the memory for its logits."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

import torch

from engine.batch import Segment, check_segment
from engine.hidden_states import STATE_DTYPE, StateRows
from engine.native.decoder import NativeDecoder
from engine.native.model_structs import CFeed
from specdec.errors import InvalidRequest


def takes(segments: Sequence[Segment]) -> bool:
    """Whether all token ids are host integers."""
    return not any(isinstance(segment.token_ids, torch.Tensor) for segment in segments)


def feed(
    decoder: NativeDecoder,
    segments: Sequence[Segment],
    *,
    block_size: int,
    vocab_size: int,
    max_model_len: int,
    states: StateRows | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """:meth:`engine.engine.Engine.forward` on a native decoder whose engine has begun a pass: the logits, and
    the hidden states where some are wanted, bfloat16 [rows, layers, H].

    Raises as :func:`engine.batch.build_batch`.
    """
    tokens, parents = array("q"), array("q")
    starts = []
    longest = num_logits = 0
    for segment in segments:
        check_segment(segment, max_model_len)
        longest = max(longest, segment.sequence.length + len(segment.token_ids))
        num_logits += segment.num_logits
        starts.append((len(tokens), len(parents)))
        tokens.extend(segment.token_ids)
        parents.extend(segment.parents)
    if len({id(segment.sequence) for segment in segments}) != len(segments):
        raise ValueError("a sequence stands in two segments of one batch")
    smallest, largest = min(tokens), max(tokens)
    if smallest < 0 or largest >= vocab_size:
        wrong = smallest if smallest < 0 else largest
        raise InvalidRequest(f"token id {wrong} is outside the vocabulary of {vocab_size} tokens", param="token_ids")

    (at, _), (parents_at, _) = tokens.buffer_info(), parents.buffer_info()
    feeds = (CFeed * len(segments))()
    new_bases = []
    blocks = [segment.sequence.blocks for segment in segments]  # held: the event loop may replace a sequence's own
    for fed, segment, table, (start, parent_start) in zip(feeds, segments, blocks, starts, strict=True):
        fed.blocks = None if segment.sequence.released else table.__array_interface__["data"][0]
        fed.token_ids, fed.num_tokens = at + 8 * start, len(segment.token_ids)
        fed.length = segment.sequence.length
        fed.num_logits, fed.num_states = segment.num_logits, segment.num_states
        fed.parents = parents_at + 8 * parent_start if segment.parents else None
        if (slot := segment.sequence.states) is not None:
            fed.slot = slot.index
            fed.base, fed.new_base = slot.bases(fed.length, fed.num_tokens)
            new_bases.append((slot, fed.new_base, fed.length + fed.num_tokens))
    logits = torch.empty(num_logits, decoder.num_outputs)
    caches = decoder.caches_for(longest)
    kept = None
    if states is not None:
        kept = torch.empty(states.num_rows, len(states.layers), decoder.hidden_size, dtype=STATE_DTYPE)
        layers = array("q", states.layers)
        caches.state_layers, caches.num_state_layers = layers.buffer_info()
        caches.states = kept.data_ptr()
    caches.plan.block_size = block_size
    decoder.check(
        decoder.library.feed(
            decoder.address,
            ctypes.addressof(caches),
            ctypes.addressof(feeds),
            len(segments),
            logits.data_ptr(),
            decoder.num_threads,
        )
    )
    for segment in segments:
        segment.sequence.length += len(segment.token_ids)
    for slot, base, end in new_bases:
        slot.base, slot.end = base, end
    return decoder.widen(logits), kept
