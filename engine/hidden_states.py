"""Hidden states of a pass: which rows' are wanted, and how they are had from a transformers model's own modules.

Layers are numbered as in :class:`specdec.types.HiddenStates`. What a model's modules pass on is caught by hooks that
are there for the passes alone that need them, so all others cost nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.batch import Segment
from engine.layers import LayerShape
from engine.rounded_states import round_states
from engine.sampling.transfer import Fetched
from engine.state_map import StateMap
from specdec.errors import InvalidRequest
from specdec.state_dtypes import STATE_DTYPES
from specdec.types import HiddenStates, SessionSpec

#: Of all hidden states that leave the engine, whatever it computes in.
STATE_DTYPE: Final = torch.bfloat16
#: Layers a session may ask for at most.
MAX_STATE_LAYERS: Final = 16


class StateRows:
    """The hidden states wanted of one pass: of the last rows of some of its segments, of all layers that any names."""

    __slots__ = ("is_alike", "layers", "num_rows", "segments", "starts")

    def __init__(self, segments: Sequence[Segment]) -> None:
        """Raises:
        ValueError: a segment wants more rows than it has.
        """
        self.segments = segments
        #: Of each segment, its first row among those wanted.
        self.starts: list[int] = []
        self.layers: tuple[int, ...] = ()
        #: Every segment wants the same layers.
        self.is_alike = True
        self.num_rows = 0
        for segment in segments:
            self.starts.append(self.num_rows)
            if not segment.num_states:
                continue
            count = len(segment.token_ids)
            if not 0 < segment.num_states <= count:
                raise ValueError(f"a segment of {count} tokens cannot give {segment.num_states} rows of hidden states")
            self.num_rows += segment.num_states
            self.is_alike &= self.layers in ((), segment.state_layers)
            self.layers = self.layers or segment.state_layers
        if not self.is_alike:
            asked = (segment.state_layers for segment in segments if segment.num_states)
            self.layers = tuple(sorted({layer for layers in asked for layer in layers}))

    def rows(self) -> list[int]:
        """The rows of the pass that are wanted, ascending."""
        rows: list[int] = []
        end = 0
        for segment in self.segments:
            end += len(segment.token_ids)
            rows += range(end - segment.num_states, end)
        return rows


class PassStates:
    """The hidden states of a pass, segment by segment, on their way to the host."""

    __slots__ = ("_at", "_data", "_fetched", "_row_bytes", "_wanted")

    def __init__(self, wanted: StateRows, data: torch.Tensor) -> None:
        """``data``: bfloat16 [rows, layers, H]."""
        self._wanted = wanted
        self._data = data
        self._at, self._row_bytes = data.data_ptr(), data.nbytes // max(1, wanted.num_rows)
        #: By what maps them and by the size of the groups in which they are rounded; 0: not at all.
        self._fetched: dict[tuple[StateMap | None, int], Fetched] = {}

    def of(self, index: int) -> torch.Tensor:
        """A segment's own, [num_states, layers * H]: its last rows, and its layers as it names them."""
        start, segment = self._wanted.starts[index], self._wanted.segments[index]
        own = self._fetch(None, 0).wait()[start : start + segment.num_states]
        return own[:, self._places(segment.state_layers)].flatten(1)

    def fetch(self, index: int, dtype: str, through: StateMap | None) -> None:
        """Start what :meth:`rows` waits for."""
        self._fetch(*_form(self._wanted.segments[index].state_layers, self._data.shape[2], dtype, through))

    def rows(
        self, index: int, rows: Sequence[int], start: int, dtype: str = "", through: StateMap | None = None
    ) -> HiddenStates:
        """Some rows of :meth:`of`, the first of which is that of position ``start``, as ``dtype`` (a key of
        :data:`~specdec.state_dtypes.STATE_DTYPES`). Groups that do not divide a state become one.

        ``through``: what makes features of them, if it reads the segment's layers.
        """
        layers = self._wanted.segments[index].state_layers
        through, group_size = _form(layers, self._data.shape[2], dtype, through)
        encoded, first = self._fetch(through, group_size).wait(), self._wanted.starts[index]
        if through is None and not self._wanted.is_alike:
            encoded = encoded[first : first + rows[-1] + 1, self._places(layers)]
            first = 0
        size = encoded.shape[1] * encoded.shape[2] * encoded.itemsize
        at = encoded.data_ptr() + first * size
        if isinstance(rows, range):
            data = ctypes.string_at(at + rows.start * size, len(rows) * size)
        else:
            data = b"".join([ctypes.string_at(at + row * size, size) for row in rows])
        width = len(layers) * self._data.shape[2] if through is None else through.width
        return HiddenStates(start, width, "int8" if group_size else "bfloat16", data, group_size)

    def raw(self, index: int, rows: Sequence[int]) -> bytes:
        """The same as they are, for :func:`encode_states`: bfloat16 [rows, layers * H]. On a CPU."""
        if not self._wanted.is_alike or not isinstance(rows, range):
            return self.rows(index, rows, 0).data
        size = self._row_bytes
        return ctypes.string_at(self._at + (self._wanted.starts[index] + rows.start) * size, len(rows) * size)

    def _places(self, layers: Sequence[int]) -> list[int]:
        """Of a segment's layers among all that are wanted."""
        return list(range(len(layers))) if self._wanted.is_alike else [self._wanted.layers.index(i) for i in layers]

    def _fetch(self, through: StateMap | None, group_size: int) -> Fetched:
        """The states of all rows, [rows, layers, bytes or H], or the features, [rows, 1, bytes or H]."""
        if (fetched := self._fetched.get((through, group_size))) is None:
            states = self._data if through is None else self._data[:, self._places(through.layers)]
            fetched = Fetched(_encoded(states, through, group_size))
            self._fetched[through, group_size] = fetched
        return fetched


def encode_states(raw: bytearray, start: int, width: int, spec: SessionSpec, through: StateMap | None) -> HiddenStates:
    """What :meth:`PassStates.rows` would have made of rows of :meth:`PassStates.raw`, the first of which is that of
    position ``start``; ``width`` is H.
    """
    layers = spec.hidden_state_layers
    through, group_size = _form(layers, width, spec.hidden_state_dtype, through)
    data = torch.frombuffer(raw, dtype=STATE_DTYPE).view(-1, len(layers), width)
    encoded = _encoded(data, through, group_size)
    width = len(layers) * width if through is None else through.width
    written = ctypes.string_at(encoded.data_ptr(), encoded.nbytes)
    return HiddenStates(start, width, "int8" if group_size else "bfloat16", written, group_size)


def _form(layers: tuple[int, ...], width: int, dtype: str, through: StateMap | None) -> tuple[StateMap | None, int]:
    """What maps the states of these layers, and the size of the groups in which they are rounded."""
    if through is not None and through.layers != layers:
        through = None
    width, group_size = width if through is None else through.width, STATE_DTYPES.get(dtype)
    if group_size is None:
        return through, 0
    return through, group_size if group_size and not width % group_size else width


def _encoded(states: torch.Tensor, through: StateMap | None, group_size: int) -> torch.Tensor:
    """States, bfloat16 [rows, layers, H], as they are sent: [rows, layers, bytes or H], or features, [rows, 1, …]."""
    if through is not None:
        with torch.inference_mode():
            features = through(states.flatten(1).to(through.linear.weight.dtype))
        states = features.to(STATE_DTYPE).unsqueeze(1)
    return (round_states(states, group_size) if group_size else states).contiguous()


class StateTap:
    """Catches hidden states in transit through a transformers model."""

    def __init__(
        self, model: PreTrainedModel, shapes: Sequence[LayerShape], recurrent: Sequence[nn.Module] = ()
    ) -> None:
        """``shapes``: the model's attention, layer by layer; ``recurrent``: modules that stand in its place or beside
        it, or let layers do without either.
        """
        attention = [shape.module for shape in shapes]
        if recurrent:
            count = model.config.get_text_config(decoder=True).num_hidden_layers
            self._layers = _layers_that_hold(model, [*attention, *recurrent], count)
        else:
            self._layers = _layers_of(model, attention)
        #: What returns the states behind the final norm: a model calls the one or the other.
        self._bodies: tuple[nn.Module, ...] = (model.base_model, model.get_decoder())  # type: ignore[no-untyped-call]
        #: Layers of the model; None where its modules do not show what passes between them.
        self.num_layers = None if self._layers is None else len(self._layers)

    @contextmanager
    def catch(self, layers: Sequence[int], rows: torch.Tensor | None) -> Iterator[list[torch.Tensor]]:
        """While a pass runs: the list holds what is caught of its rows (int64 [R]; None: of all), [R, layers, H], once
        it has run.
        """
        assert self._layers is not None
        caught: dict[int, torch.Tensor] = {}
        whole: list[torch.Tensor] = []

        def keep(layer: int) -> Callable[[Any], None]:
            def hook(value: Any) -> None:
                states = _states_of(value)[0]  # [T, H]
                caught[layer] = (states if rows is None else states.index_select(0, rows)).to(STATE_DTYPE)

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


#: Stands for the state before the final norm, whatever its number is; one less for that of the layer before, and so on.
BEFORE_NORM: Final = -2


def check_layers(layers: Sequence[int], num_layers: int | None) -> None:
    """Raise :class:`InvalidRequest` unless a model of so many layers can give the hidden states of ``layers``."""
    if not layers:
        return
    if num_layers is None:
        raise InvalidRequest(
            "hidden_state_layers is set, but the target's layers do not show their states: use"
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


def _layers_that_hold(model: nn.Module, parts: Sequence[nn.Module], count: int) -> list[nn.Module] | None:
    """The items of a list of so many modules that hold all parts."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            inner = {id(part) for layer in module for part in layer.modules()}
            if all(id(part) in inner for part in parts):
                return list(module)
    return None


def _states_of(value: Any) -> torch.Tensor:
    """The states [1, T, H] in what a module is given or returns: itself, or the first of several things."""
    while not isinstance(value, torch.Tensor):
        value = value[0]
    return value
