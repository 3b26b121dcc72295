"""How many KV blocks a machine can hold beside the weights and the largest pass."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil
import torch
from transformers import PreTrainedModel

from engine.engine import LARGE_PASS_ROWS, Engine, Segment
from engine.layers import LayerShape
from engine.mixers import Mixer
from engine.parallel.ranks import Ranks
from specdec.errors import InvalidRequest
from specdec.settings import ModelSettings

logger = logging.getLogger(__name__)

#: Full-length sequences beyond which more cache is of no use on a CPU.
MAX_USEFUL_SEQUENCES: Final = 256
#: Sequences that the check at load feeds together.
_MIN_SLOTS: Final = 2
#: Share of the cache that the recurrent states of open sessions take at most.
_SHARE_OF_STATES: Final = 0.5
#: Share of a GPU's free memory that a cache takes at most: other processes on it have their peaks, too.
_SHARE_OF_FREE: Final = 0.9


def machine_bytes() -> int:
    """Memory this process may use: the machine's, or its control group's where that is less."""
    total = int(psutil.virtual_memory().total)
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(name).read_text(encoding="ascii").strip()
        except OSError:
            continue
        if text.isdigit():
            total = min(total, int(text))
    return total


def free_bytes(device: torch.device) -> int:
    """Memory that one more tensor may take on a device; on a CPU a third of what is free, for what is made of it."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int((torch.cuda.mem_get_info(device)[0] + cached) * _SHARE_OF_FREE)
    own = machine_bytes() - psutil.Process().memory_info().rss
    return max(0, min(own, int(psutil.virtual_memory().available))) // 3


def bytes_per_slot(mixers: Sequence[Mixer]) -> int:
    """Bytes of one sequence's recurrent states and records."""
    return sum(shape.bytes_per_slot for mixer in mixers for shape in mixer.shapes)


def size_cache(
    settings: ModelSettings,
    shapes: Sequence[LayerShape],
    mixers: Sequence[Mixer] = (),
    *,
    device: torch.device,
    max_model_len: int,
    weight_bytes: int = 0,
    activation_bytes: int = 0,
    ranks: Ranks | None = None,
) -> tuple[int, int, int]:
    """Blocks the budget pays for, block 0 (padding) not counted; sequences whose recurrent states it pays for; and
    ``max_model_len``, cut to what the blocks hold where no setting asks for it. Of several ranks, the blocks
    and sequences that each can pay for.

    ``kv_cache_memory_bytes`` where it is set; else on a CPU ``cpu_kv_cache_share`` of the memory but no more than
    :data:`MAX_USEFUL_SEQUENCES` full sequences need; else ``gpu_memory_utilization`` of the device less
    ``weight_bytes`` and ``activation_bytes``, as far as it is free: others may use the device, too, such as the target
    of a draft.

    Raises:
        InvalidRequest: not one block fits, or the ``max_model_len`` of the settings does not.
    """
    # Without attention a block costs nothing but its number.
    block_bytes = settings.block_size * max(1, sum(shape.bytes_per_token for shape in shapes))
    slot_bytes = bytes_per_slot(mixers)
    if settings.kv_cache_memory_bytes is not None:
        budget = settings.kv_cache_memory_bytes
    elif device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        own = int(total * settings.gpu_memory_utilization) - weight_bytes
        budget = min(own, int((free + cached) * _SHARE_OF_FREE)) - activation_bytes
    else:
        useful = MAX_USEFUL_SEQUENCES * -(-max_model_len // settings.block_size) + 1
        share = settings.cpu_kv_cache_share / (1 if ranks is None else ranks.place.local_size)
        budget = min(int(machine_bytes() * share), useful * block_bytes + (MAX_USEFUL_SEQUENCES + 1) * slot_bytes)
    num_slots = 0
    if slot_bytes:
        num_slots = min(int(budget * _SHARE_OF_STATES // slot_bytes) - 1, MAX_USEFUL_SEQUENCES)
        num_slots = num_slots if ranks is None else ranks.smallest(num_slots)
        if num_slots < _MIN_SLOTS:
            least = int((_MIN_SLOTS + 1) * slot_bytes / _SHARE_OF_STATES)
            raise InvalidRequest(
                f"the KV cache may take {max(budget, 0)} bytes, half of it for recurrent states, and those of a session"
                f" take {slot_bytes}: raise kv_cache_memory_bytes to {least} or more (or the memory shares)",
                param="kv_cache_memory_bytes",
            )
        budget -= (num_slots + 1) * slot_bytes
    num_blocks = int(budget // block_bytes) - 1
    if ranks is not None:
        num_blocks = ranks.smallest(num_blocks)
    if num_blocks < 1:
        raise InvalidRequest(
            f"the KV cache may take {max(budget, 0)} bytes and two blocks of {settings.block_size} tokens take"
            f" {2 * block_bytes}: raise kv_cache_memory_bytes (or the memory shares), or take a smaller model",
            param="kv_cache_memory_bytes",
        )
    return num_blocks, num_slots, _fit_max_model_len(settings, max_model_len, num_blocks)


def _fit_max_model_len(settings: ModelSettings, max_model_len: int, num_blocks: int) -> int:
    capacity = num_blocks * settings.block_size
    if max_model_len <= capacity:
        return max_model_len
    if settings.max_model_len is not None:
        raise InvalidRequest(
            f"max_model_len is {max_model_len} but the KV cache holds {capacity} tokens: lower it or raise"
            " kv_cache_memory_bytes",
            param="max_model_len",
        )
    logger.warning("the KV cache holds %d tokens: max_model_len is cut from %d to that", capacity, max_model_len)
    return capacity


@dataclass(frozen=True, slots=True)
class LargestStep:
    """The largest step that a service runs."""

    num_rows: int = LARGE_PASS_ROWS
    #: What follows the pass, given the logits of all its rows, float32 [num_rows, V]: the choice of tokens.
    decide: Callable[[torch.Tensor], object] | None = None


def measure_activation(
    model: PreTrainedModel,
    shapes: Sequence[LayerShape],
    largest: LargestStep,
    *,
    block_size: int,
    vocab_size: int,
    max_model_len: int,
    device: torch.device,
    mixers: Sequence[Mixer] = (),
) -> int:
    """Bytes that the largest step needs on a GPU beyond weights and cache."""
    rows = [min(max_model_len, largest.num_rows - start) for start in range(0, largest.num_rows, max_model_len)]
    engine = Engine(
        model,
        shapes,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        num_blocks=sum(-(-count // block_size) for count in rows),
        block_size=block_size,
        device=device,
        mixers=mixers,
        num_slots=len(rows),
    )
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    logits = engine.forward([Segment(engine.pool.open(count), [0] * count, count) for count in rows])
    if largest.decide is not None:
        with torch.inference_mode():
            largest.decide(logits)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
