"""Where a transformers model meets the paged cache: one attention function for every model, and a recording twin.

transformers models call their attention through a registry by name. The name :data:`PAGED` leads to a function that
writes the rows' keys and values into the cache and attends through the block tables; what it needs hangs on the
attention module it is called with, so engines in one process share nothing. No mask function goes with the name,
which is how transformers spells "this attention needs no mask".

The name :data:`RECORDING` is used for one short pass at load. It learns from the calls themselves which modules attend,
with how many heads of which size, and, from the mask the model builds for them, with which window. So no architecture
needs code of its own, and a model that attends differently is noticed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from engine.attention import AttentionKernels, PagedBatch, paged_attention, write_kv
from specdec.errors import ModelNotSupported

PAGED: Final = "tandem_paged"
RECORDING: Final = "tandem_recording"

_LAYER: Final = "tandem_layer"
_RECORDER: Final = "tandem_recorder"
_KEPT: Final = "tandem_kept"
#: Positions at which a mask is read: the last ones of a million, so windows and chunks below that show.
_PROBES: Final = (2**20 - 1, 2**20 - 2, 2**20 - 5)
#: Arguments of an attention call that are applied here, are in the mask, or change nothing. Any other, such as the
#: entries that a sparse attention has chosen, would be dropped.
_KNOWN_ARGUMENTS: Final = frozenset(
    """
    cache_position deterministic dropout is_causal layer_idx logits_to_keep num_items_in_batch output_attentions
    output_hidden_states output_router_logits position_embeddings position_ids return_dict s_aux scaling sliding_window
    softcap use_cache
    """.split()  # noqa: SIM905
)


@dataclass(frozen=True, slots=True)
class LayerShape:
    """How one attention module attends."""

    module: nn.Module
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    #: Entries a row sees, itself included; None means all.
    window: int | None
    #: Tokens of an attention chunk, where the model attends within chunks.
    chunk: int | None

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one entry's key and value."""
        return self.num_kv_heads * (self.head_dim + self.value_dim) * self.dtype.itemsize


def allocate_caches(
    shapes: Sequence[LayerShape], num_blocks: int, block_size: int, device: torch.device
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Key and value cache of every layer, [num_blocks + 1, num_kv_heads, block_size, dim].

    On a CPU the memory is reserved here and backed by the system as it is first written.
    """
    caches = []
    for shape in shapes:
        size = (num_blocks + 1, shape.num_kv_heads, block_size)
        k_cache = torch.empty(*size, shape.head_dim, dtype=shape.dtype, device=device)
        v_cache = torch.empty(*size, shape.value_dim, dtype=shape.dtype, device=device)
        caches.append((k_cache, v_cache))
    return caches


@dataclass(slots=True)
class ForwardState:
    """What one engine's attention modules share: the batch being run and the kernels that run it."""

    batch: PagedBatch | None = None
    #: None means torch.
    kernels: AttentionKernels | None = None


@dataclass(slots=True)
class PagedLayer:
    """One attention module's cache, [num_blocks, num_kv_heads, block_size, dim] each."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    window: int | None
    state: ForwardState


def keep_as_it_is(layer: nn.Module) -> None:
    """Have nobody pack or round a linear layer: its weight is read by others."""
    layer.__dict__[_KEPT] = True


def is_kept_as_it_is(layer: nn.Module) -> bool:
    """Whether a linear layer must not be packed or rounded."""
    return _KEPT in layer.__dict__


def bind(shape: LayerShape, layer: PagedLayer) -> None:
    """Hang a layer's cache on its attention module."""
    shape.module.__dict__[_LAYER] = layer


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of :data:`PAGED`: [1, H, T, D] each, to [1, T, Hq, Dv]."""
    layer: PagedLayer = module.__dict__[_LAYER]
    state = layer.state
    batch = state.batch
    assert batch is not None, "the model was called outside Engine.forward"
    rows, keys, values = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)  # [T, H, D]
    scale = rows.shape[-1] ** -0.5 if scaling is None else float(scaling)
    plan = batch.batch.plan
    if state.kernels is not None and (s_aux is None or state.kernels.KNOWS_SINKS):
        state.kernels.write_kv(layer.k_cache, layer.v_cache, keys, values, plan)
        out = state.kernels.paged_attention(
            rows, layer.k_cache, layer.v_cache, plan, scale, layer.window, softcap, sinks=s_aux
        )
    else:
        write_kv(layer.k_cache, layer.v_cache, keys, values, batch)
        out = paged_attention(
            rows, layer.k_cache, layer.v_cache, batch, scale=scale, window=layer.window, softcap=softcap, sinks=s_aux
        )
    return out.unsqueeze(0), None


def positions_of(module: nn.Module, num_rows: int, device: torch.device) -> torch.Tensor:
    """int64 [T]: where the rows of the pass stand in their sequences, for a module that is not told by its model."""
    layer: PagedLayer | None = module.__dict__.get(_LAYER)
    if layer is None or layer.state.batch is None:  # a recording pass
        return torch.arange(num_rows, device=device)
    return layer.state.batch.batch.plan.positions


class _Recorder:
    """Collects the calls of one recording pass over ``num_rows`` rows."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.shapes: list[LayerShape] = []


def _record(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of :data:`RECORDING`; its output is zero."""
    recorder: _Recorder = module.__dict__[_RECORDER]
    name = type(module).__name__
    if not query.shape[2] == key.shape[2] == value.shape[2] == recorder.num_rows:
        raise ModelNotSupported(f"{name} attends to something else than the tokens fed (cross-attention or a cache)")
    for extra, given in kwargs.items():
        if given is not None and extra not in _KNOWN_ARGUMENTS:
            raise ModelNotSupported(f"{name} passes {extra!r} to its attention, which paged attention cannot apply")
    if any(shape.module is module for shape in recorder.shapes):
        raise ModelNotSupported(f"{name} attends twice in one pass (layers that share one attention module)")
    window, chunk = _window_of(name, attention_mask, kwargs.get("sliding_window"))
    recorder.shapes.append(
        LayerShape(
            module=module,
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_dim=key.shape[3],
            value_dim=value.shape[3],
            dtype=key.dtype,
            window=window,
            chunk=chunk,
        )
    )
    return query.new_zeros(1, recorder.num_rows, query.shape[1], value.shape[3]), None


def _record_mask(*, mask_function: Any, device: torch.device | None = None, **_: Any) -> torch.Tensor:
    """The mask function of :data:`RECORDING`: bool [1, 1, probes, 2^20], what rows at the probed positions may see."""
    position = torch.tensor(_PROBES, device=device)[:, None]
    entry = torch.arange(_PROBES[0] + 1, device=device)[None, :]
    try:
        seen: torch.Tensor = mask_function(0, 0, position, entry)
        return seen.broadcast_to(1, 1, len(_PROBES), _PROBES[0] + 1)
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        raise ModelNotSupported(f"the model's attention mask depends on more than positions ({error})") from error


def _window_of(name: str, mask: torch.Tensor | None, window: int | None) -> tuple[int | None, int | None]:
    """Window and chunk of a layer: from the mask it was given, else from its ``sliding_window`` argument."""
    if mask is None:
        return window, None
    if mask.shape != (1, 1, len(_PROBES), _PROBES[0] + 1) or mask.dtype != torch.bool:
        raise ModelNotSupported(f"{name} builds an attention mask of its own, which paged attention would ignore")
    counts = []
    for row, position in zip(mask[0, 0], _PROBES, strict=True):
        count = int(row.sum())
        if count == 0 or not bool(row[position - count + 1 : position + 1].all()):
            raise ModelNotSupported(f"{name} is not causal, or attends with gaps; only causal attention is supported")
        counts.append(count)
    if all(count == position + 1 for count, position in zip(counts, _PROBES, strict=True)):
        return None, None
    if len(set(counts)) == 1:
        return counts[0], None
    return None, max(counts)


def record_layers(model: PreTrainedModel, num_layers: int | None, device: torch.device) -> tuple[list[LayerShape], int]:
    """Run a short recording pass; returns the attention layers in order of their calls, and the logits' width.

    ``num_layers`` None: layers may do without attention.

    Raises:
        ModelNotSupported: not exactly ``num_layers`` modules attend, once each and causally, or the model cannot be
            called with explicit positions.
    """
    recorder = _Recorder(num_rows=6)
    modules = list(model.modules())
    model.set_attn_implementation(RECORDING)
    for module in modules:
        module.__dict__[_RECORDER] = recorder
    try:
        ids = torch.arange(recorder.num_rows, device=device)[None] % 7
        positions = torch.arange(recorder.num_rows, device=device)[None]
        with torch.inference_mode():
            logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    except (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise ModelNotSupported(
            f"{type(model).__name__} cannot be run without padding and cache: {type(error).__name__}: {error}"
        ) from error
    finally:
        for module in modules:
            module.__dict__.pop(_RECORDER, None)
    if num_layers is not None and len(recorder.shapes) != num_layers:
        raise ModelNotSupported(
            f"{type(model).__name__} has {num_layers} layers but {len(recorder.shapes)} of them attend through"
            " transformers' attention interface: recurrent, linear or home-made attention cannot be paged"
        )
    return recorder.shapes, logits.shape[-1]


AttentionInterface.register(PAGED, _attend)
AttentionInterface.register(RECORDING, _record)
AttentionMaskInterface.register(RECORDING, _record_mask)
