"""First layers of heads as bytes: a safetensors file whose metadata says how the tensors belong together."""

from __future__ import annotations

import json
from typing import Any, Final

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from engine.heads.layer import RMSNorm
from engine.state_map import StateMap
from specdec.errors import InvalidRequest

_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)


def pack_state_map(state_map: StateMap) -> bytes:
    """As :func:`unpack_state_map` reads it; the fingerprint stays."""
    norms = {name: module.eps for name, module in state_map.named_modules() if isinstance(module, RMSNorm)}
    about = {
        "layers": state_map.layers,
        "stages": [len(list(stage.children())) for stage in state_map.norms],
        "eps": norms,
    }
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state_map.state_dict().items()}
    return safetensors.torch.save(tensors, {name: json.dumps(value) for name, value in about.items()})


def unpack_state_map(data: bytes, fingerprint: str) -> StateMap:
    """A map on the CPU, in the dtype of its linear layer, without gradients.

    Raises:
        InvalidRequest: the bytes are damaged, or are those of another map.
    """
    try:
        state_map = _unpack(data)
        is_it = state_map.fingerprint() == fingerprint
        state_map(torch.zeros(1, state_map.linear.in_features, dtype=state_map.linear.weight.dtype))
    # Whatever a stranger's bytes lead to.
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise InvalidRequest(f"the first layer of a head is damaged ({error}); send it again", param="data") from error
    if not is_it:
        raise InvalidRequest(
            f"the first layer has another fingerprint than {fingerprint[:12]}…: the files of the head were replaced"
            " while the draft service ran; start it again",
            param="fingerprint",
        )
    return state_map


def _unpack(data: bytes) -> StateMap:
    size = int.from_bytes(data[:8], "little")
    about: dict[str, Any] = {
        name: json.loads(text) for name, text in json.loads(data[8 : 8 + size])["__metadata__"].items()
    }
    tensors = safetensors.torch.load(data)
    if any(tensor.dtype not in _DTYPES for tensor in tensors.values()):
        raise ValueError(f"its tensors must be one of {_DTYPES}")

    def norm_of(name: str) -> RMSNorm:
        norm = RMSNorm(tensors[f"{name}.weight"].numel(), float(about["eps"][name]))
        norm.weight = _frozen(tensors[f"{name}.weight"])
        return norm

    out_features, in_features = tensors["linear.weight"].shape
    with torch.device("meta"):
        linear = nn.Linear(in_features, out_features, bias="linear.bias" in tensors)
    linear.weight = _frozen(tensors["linear.weight"])
    if "linear.bias" in tensors:
        linear.bias = _frozen(tensors["linear.bias"])
    stages = [[norm_of(f"norms.{i}.{j}") for j in range(count)] for i, count in enumerate(about["stages"])]
    layers = tuple(map(int, about["layers"]))
    return StateMap(layers, linear, stages, norm_of("norm") if "norm.weight" in tensors else None).eval()


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
