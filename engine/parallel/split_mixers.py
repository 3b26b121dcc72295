"""Recurrent layers on the ranks of a split model: each has the states of its heads.

transformers' plans have every rank run whole recurrences. Here a rank keeps the rows of the projections, the channels
of the convolution and the columns of the output layer that belong to its heads, of layers whose code is known; others
run whole on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import nn

from engine.parallel.ranks import Ranks

#: Layers of the gated delta net, and of Mamba2 whose heads follow one another in one projection.
_DELTA_NETS: Final = frozenset({"Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet", "Qwen3NextGatedDeltaNet"})
_MAMBAS: Final = frozenset({"BambaMixer", "GraniteMoeHybridMambaLayer", "NemotronHMamba2Mixer", "FalconH1Mixer"})


def split_mixer(mixer: Any, ranks: Ranks) -> nn.Module | None:
    """Reduce a recurrent layer to this rank's heads, in place; returns its output layer, whose columns are split. None:
    the layer is left whole, as its code is unknown or its heads cannot be shared out.
    """
    name = type(mixer).__name__
    if name in _DELTA_NETS and mixer.num_k_heads % ranks.place.size == 0:
        _split_delta_net(mixer, ranks)
    elif name in _MAMBAS and _group_heads(mixer, ranks.place.size):
        _split_mamba(mixer, ranks)
    else:
        return None
    out: nn.Module = mixer.out_proj
    return out


def _split_delta_net(mixer: Any, ranks: Ranks) -> None:
    rank, size = ranks.place.rank, ranks.place.size
    keys, values = (_part(count, rank, size) for count in (mixer.key_dim, mixer.value_dim))
    heads = _part(mixer.num_v_heads, rank, size)
    channels = torch.cat((keys, mixer.key_dim + keys, 2 * mixer.key_dim + values))
    if hasattr(mixer, "in_proj_qkvz"):  # its rows are those of one key head after another
        for layer in (mixer.in_proj_qkvz, mixer.in_proj_ba):
            _keep(layer, _part(layer.out_features, rank, size))
    else:
        _keep(mixer.in_proj_qkv, channels)
        _keep(mixer.in_proj_z, values)
        _keep(mixer.in_proj_b, heads)
        _keep(mixer.in_proj_a, heads)
    _keep(mixer.conv1d, channels)
    _keep(mixer, heads, ("A_log", "dt_bias"))
    _keep_columns(mixer.out_proj, values)
    for field in ("num_k_heads", "num_v_heads", "key_dim", "value_dim", "conv_dim"):
        setattr(mixer, field, getattr(mixer, field) // size)


def _group_heads(mixer: Any, size: int) -> int:
    """Groups of B and C that each of ``size`` ranks needs; 0: its heads do not belong to whole ones, or to one."""
    if mixer.num_heads % size:
        return 0
    if mixer.n_groups % size == 0:
        return int(mixer.n_groups) // size
    return int(size % mixer.n_groups == 0)


def _split_mamba(mixer: Any, ranks: Ranks) -> None:
    rank, size = ranks.place.rank, ranks.place.size
    inner, groups, state = mixer.intermediate_size, mixer.n_groups, mixer.ssm_state_size
    own, heads = _part(inner, rank, size), _part(mixer.num_heads, rank, size)
    num_own = _group_heads(mixer, size)
    first = rank * groups // size * state
    shared = torch.arange(first, first + num_own * state)
    channels = torch.cat((own, inner + shared, inner + groups * state + shared))
    rows = torch.cat((own, inner + channels, 2 * (inner + groups * state) + heads))
    _keep(mixer.in_proj, rows)
    if (factors := getattr(mixer, "mup_vector", None)) is not None:  # of Falcon-H1
        mixer.mup_vector = factors[..., rows]
    _keep(mixer.conv1d, channels)
    _keep(mixer, heads, ("A_log", "D", "dt_bias"))
    _keep_columns(mixer.out_proj, own)
    if not isinstance(mixer.norm, nn.Identity):
        if groups % size:
            mixer.norm = GatheredNorm(mixer.norm, own, ranks)
        else:
            _keep(mixer.norm, own)
            if hasattr(mixer.norm, "n_groups"):
                mixer.norm.n_groups = num_own
    mixer.num_heads, mixer.intermediate_size, mixer.n_groups = len(heads), len(own), num_own
    mixer.conv_dim = len(channels)


class GatheredNorm(nn.Module):
    """A gated norm over the channels of several ranks."""

    def __init__(self, norm: nn.Module, own: torch.Tensor, ranks: Ranks) -> None:
        """``own``: this rank's channels, int64 [C]."""
        super().__init__()
        self.norm = norm
        self._own, self._ranks = slice(int(own[0]), int(own[-1]) + 1), ranks

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """[..., own channels] each, to the same."""
        whole = (self._ranks.gather(part.contiguous()).movedim(0, -2).flatten(-2) for part in (hidden_states, gate))
        out: torch.Tensor = self.norm(*whole)
        return out[..., self._own]


def _part(count: int, rank: int, size: int) -> torch.Tensor:
    return torch.arange(rank * count // size, (rank + 1) * count // size)


def _keep(module: Any, rows: torch.Tensor, names: Sequence[str] = ("weight", "bias")) -> None:
    """Reduce parameters to some rows."""
    for name in names:
        if (parameter := module._parameters.get(name)) is not None:
            module._parameters[name] = nn.Parameter(parameter[rows.to(parameter.device)], requires_grad=False)
    if isinstance(module, nn.Linear):
        module.out_features = len(rows)


def _keep_columns(layer: Any, columns: torch.Tensor) -> None:
    layer.weight = nn.Parameter(layer.weight[:, columns.to(layer.weight.device)].contiguous(), requires_grad=False)
    layer.in_features = len(columns)
