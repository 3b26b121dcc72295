"""Hidden states of a pass: which rows' are wanted, and how they are had from a transformers model's own modules.

Layers are numbered as in :class:`specdec.sessions.HiddenStates`. What a model's modules pass on is caught by hooks that
are there for the passes alone that need them, so all others cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from transformers import PreTrainedModel

from specdec.engine.batch import Segment
from specdec.engine.layers import LayerShape
from specdec.errors import InvalidRequest

#: Of all hidden states that leave the engine, whatever it computes in.
STATE_DTYPE: Final = torch.bfloat16
#: Layers a session may ask for at most.
MAX_STATE_LAYERS: Final = 16


@dataclass(frozen=True, slots=True)
class StateRows:
    """The hidden states wanted of one pass: of some of its rows, of all layers that any of its segments names."""

    layers: tuple[int, ...]
    #: Rows of the pass, ascending.
    rows: list[int]
    #: Of each segment: how many of those are its own.
    counts: list[int]

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> StateRows | None:
        """None where no segment wants any.

        Raises:
            ValueError: a segment wants more rows than it has.
        """
        asking = [segment.state_layers for segment in segments if segment.num_states]
        if not asking:
            return None
        alike = all(layers == asking[0] for layers in asking)
        layers = asking[0] if alike else tuple(sorted({layer for layers in asking for layer in layers}))
        rows: list[int] = []
        end = 0
        for segment in segments:
            count = len(segment.token_ids)
            if not 0 <= segment.num_states <= count:
                raise ValueError(f"a segment of {count} tokens cannot give {segment.num_states} rows of hidden states")
            end += count
            rows += range(end - segment.num_states, end)
        return cls(layers, rows, [segment.num_states for segment in segments])

    def split(self, states: torch.Tensor, segments: Sequence[Segment]) -> list[torch.Tensor]:
        """Of states [rows, layers, H] each segment's own: [its rows, its layers * H], in the order it names them."""
        pieces = []
        row = 0
        for segment, count in zip(segments, self.counts, strict=True):
            own = states[row : row + count]
            row += count
            is_alike = not count or segment.state_layers == self.layers
            order = [] if is_alike else [self.layers.index(layer) for layer in segment.state_layers]
            pieces.append((own if is_alike else own[:, order]).flatten(1))
        return pieces


class StateTap:
    """Catches hidden states on their way through a transformers model."""

    def __init__(self, model: PreTrainedModel, shapes: Sequence[LayerShape]) -> None:
        """``shapes``: the model's attention, layer by layer."""
        self._layers = _layers_of(model, [shape.module for shape in shapes])
        #: What returns the states behind the final norm: a model calls the one or the other.
        self._bodies: tuple[nn.Module, ...] = (model.base_model, model.get_decoder())  # type: ignore[no-untyped-call]
        #: Layers of the model; None where its modules do not show what passes between them.
        self.num_layers = None if self._layers is None else len(self._layers)

    @contextmanager
    def catch(self, layers: Sequence[int], rows: torch.Tensor) -> Iterator[list[torch.Tensor]]:
        """While a pass runs: the list holds what is caught of its rows (int64 [R]), [R, layers, H], once it has run."""
        assert self._layers is not None
        caught: dict[int, torch.Tensor] = {}
        whole: list[torch.Tensor] = []

        def keep(layer: int) -> Callable[[Any], None]:
            def hook(value: Any) -> None:
                caught[layer] = _states_of(value)[0].index_select(0, rows).to(STATE_DTYPE)  # [R, H]

            return hook

        with ExitStack() as hooks:
            for layer in set(layers):
                take = keep(layer)
                if 0 <= layer < len(self._layers):
                    handle = self._layers[layer].register_forward_pre_hook(
                        lambda _m, args, kwargs, take=take: take(args or kwargs["hidden_states"]), with_kwargs=True
                    )
                    hooks.callback(handle.remove)
                    continue
                for module in self._bodies if layer == -1 else self._layers[-1:]:
                    handle = module.register_forward_hook(lambda _m, _a, out, take=take: take(out))
                    hooks.callback(handle.remove)
            yield whole
        whole.append(torch.stack([caught[layer] for layer in layers], dim=1))


def check_layers(layers: Sequence[int], num_layers: int | None) -> None:
    """Raise :class:`InvalidRequest` unless a model of so many layers can give the hidden states of ``layers``."""
    if not layers:
        return
    if num_layers is None:
        raise InvalidRequest(
            "hidden_state_layers is set, but the target's layers are not arranged in a way that shows their states: use"
            " a drafter that reads none",
            param="hidden_state_layers",
        )
    if len(layers) > MAX_STATE_LAYERS:
        raise InvalidRequest(
            f"hidden_state_layers names {len(layers)} layers; at most {MAX_STATE_LAYERS} may be asked for",
            param="hidden_state_layers",
        )
    for layer in layers:
        if not -1 <= layer <= num_layers:
            raise InvalidRequest(
                f"hidden_state_layers names {layer}; the target has the states 0 to {num_layers}, and -1 after its"
                " final norm",
                param="hidden_state_layers",
            )


def _layers_of(model: nn.Module, attention: Sequence[nn.Module]) -> list[nn.Module] | None:
    """The modules that hold one attention module each, in order: the items of one list."""
    for module in model.modules():
        if not isinstance(module, nn.ModuleList) or len(module) != len(attention):
            continue
        if all(any(part is own for part in layer.modules()) for layer, own in zip(module, attention, strict=True)):
            return list(module)
    return None


def _states_of(value: Any) -> torch.Tensor:
    """The states [1, T, H] in what a module is given or returns: itself, or the first of several things."""
    while not isinstance(value, torch.Tensor):
        value = value[0]
    return value
