"""Products with weights that modules read themselves, by the packed kernels: a row is the same in any company."""

from __future__ import annotations

from typing import Final

import torch
from torch.utils.weak import WeakIdKeyDictionary

from engine.native.library import DTYPES, Memory, loaded
from engine.native.linears import Matrix, NativeLinear, group_bytes, pack_group

#: Packed copies, by the weight.
_packed: Final[WeakIdKeyDictionary] = WeakIdKeyDictionary()


def knows(weight: object, columns: object) -> bool:
    """Whether ``weight @ columns`` is [N, K] @ [1, K, T], a weight and rows of a pass on a CPU."""
    if not isinstance(weight, torch.nn.Parameter) or not isinstance(columns, torch.Tensor):
        return False
    is_on_cpu = weight.device.type == columns.device.type == "cpu"
    fits = weight.dim() == 2 and columns.dim() == 3 and columns.shape[:2] == (1, weight.shape[1])
    return is_on_cpu and fits and weight.dtype == columns.dtype and weight.dtype in DTYPES


def multiply(weight: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """[N, K] @ [1, K, T], to [1, N, T]."""
    rows = apply(columns[0].t().contiguous(), weight)
    return rows.t()[None]


def knows_rows(rows: object, weight: object, bias: object = None) -> bool:
    """Whether a linear function, such as a router's, is of a weight [N, K] and rows [..., K] of a pass on a CPU."""
    if not isinstance(weight, torch.nn.Parameter) or not isinstance(rows, torch.Tensor) or bias is not None:
        return False
    is_on_cpu = weight.device.type == rows.device.type == "cpu"
    fits = weight.dim() == 2 and rows.shape[-1] == weight.shape[1]
    return is_on_cpu and fits and weight.dtype == rows.dtype and weight.dtype in DTYPES


def apply(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Rows [..., K] to [..., N]."""
    if weight not in _packed:
        library = loaded()
        with torch.inference_mode(False), torch.no_grad():
            matrix, threads = Matrix(weight.detach()), torch.get_num_threads()
            memory = Memory(library, group_bytes(library, [matrix]))
            (packed,) = pack_group(library, memory, [matrix], threads)
            _packed[weight] = NativeLinear(packed, weight.dtype, None, threads)
    out: torch.Tensor = _packed[weight](rows)
    return out
