"""What PARD-2 reads beside its tokens (arXiv 2605.08632): the target's states, through a matrix, on its embeddings.

The row of the token at p gets scale · target_proj(the states of p - 1, which predicted that token); masks get what the
last token got. Unknown states, and those before the first token, are zeros: a PARD-2 draft has learned to do without.
Files: ``warp_model.bin`` with ``target_proj.weight`` [H, n · Ht] and maybe ``target_proj.bias``; ``config.json`` names
the n states as indices of transformers' ``hidden_states``. A target may multiply by the matrix in the draft's place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.heads.files.tensors import TargetTensors, read_tensors
from engine.rounded_states import tensor_of_states
from engine.state_map import StateMap
from specdec.checkpoint_config import read_config
from specdec.errors import InvalidRequest, ModelNotSupported
from specdec.methods import STATES_FILE
from specdec.types import HiddenStates

#: Names of the fields with the states and with the scale: the first that is there counts.
_LAYERS: Final = ("pard2_target_layers", "target_layers")
_SCALES: Final = ("pard2_scale", "pard_scale", "feat_scale")
_DEFAULT_SCALE: Final = 0.02


@dataclass(frozen=True, slots=True)
class StateInputs:
    """The matrix, float32 on the CPU."""

    weight: Tensor
    bias: Tensor | None
    scale: float
    #: The matrix as the file has it, and the states it reads, as :class:`~specdec.types.SessionSpec` names them.
    matrix: StateMap

    @classmethod
    def read(cls, folder: str, target: str) -> Self | None:
        """Of a checkpoint; None: it has no :data:`STATES_FILE`.

        Raises:
            InvalidRequest: a file cannot be read, or the target has other states.
            ModelNotSupported: the file or ``config.json`` says something that is not known.
        """
        if not Path(folder, STATES_FILE).is_file():
            return None
        config, own = read_config(folder), TargetTensors(Path(target))
        tensors = read_tensors(Path(folder), (STATES_FILE,))
        weight, bias = tensors.pop("target_proj.weight", None), tensors.pop("target_proj.bias", None)
        layers: Any = next((config[name] for name in _LAYERS if config.get(name) is not None), None)
        if weight is None or weight.dim() != 2 or tensors:
            raise ModelNotSupported(
                f"{folder}/{STATES_FILE} must hold target_proj.weight, a matrix, and maybe target_proj.bias; it has"
                f" {', '.join(sorted(tensors)) or 'no such matrix'}"
            )
        count = own.num_layers + 1
        if not (isinstance(layers, list) and layers and all(type(i) is int and -count <= i < count for i in layers)):
            raise ModelNotSupported(
                f"{_LAYERS[0]} is {layers!r} in {folder}/config.json; a list of the target's states is needed,"
                f" {-count} to {count - 1}"
            )
        if weight.shape[1] != len(layers) * own.hidden_size:
            raise InvalidRequest(
                f"{folder} reads {weight.shape[1]} numbers a token, and {len(layers)} states of {target} have"
                f" {len(layers) * own.hidden_size}: it was trained for another target; without target_model it drafts"
                " without states",
                param="target_model",
            )
        scale = next((float(config[name]) for name in _SCALES if config.get(name) is not None), _DEFAULT_SCALE)
        # The last one is named -1 where states are asked for, as it is after the final norm.
        named = tuple(-1 if i in (-1, count - 1) else i % count for i in layers)
        with torch.device("meta"):
            linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
        linear.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            linear.bias = nn.Parameter(bias, requires_grad=False)
        return cls(weight.float(), None if bias is None else bias.float(), scale, StateMap(named, linear))

    @property
    def layers(self) -> tuple[int, ...]:
        """The states."""
        return self.matrix.layers

    @property
    def mapped_width(self) -> int | None:
        """Numbers of what a target sends that has multiplied; None where these are no fewer."""
        return self.matrix.width if self.matrix.width < self.width else None

    @property
    def width(self) -> int:
        """Numbers of the states of one position."""
        return self.weight.shape[1]

    def rows(self, states: Sequence[HiddenStates], positions: Sequence[int]) -> Tensor:
        """What is added to the embeddings of the tokens at these positions, float32 [len(positions), H]."""
        wanted = torch.tensor(positions) - 1
        # Unknown states are zeros.
        bias = torch.zeros(len(self.weight)) if self.bias is None else self.bias
        rows = bias.repeat(len(positions), 1)
        for part in states:
            if (here := (wanted >= part.start) & (wanted < part.end)).any():
                own = tensor_of_states(part).float()[wanted[here] - part.start]
                is_mapped = part.num_features != self.width
                rows[here] = own if is_mapped else F.linear(own, self.weight, self.bias)
        return rows * self.scale
