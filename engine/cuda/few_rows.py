"""Linear layers of few rows in one launch with what stands around them: the norm before, the gate or the sum after.

Reading the weights takes all the time then, so any kernel that reads them at the memory's speed is as good as
another, and what it does besides is free. How large its tiles are, and up to how many rows it is faster than the
product of torch between kernels of our own, is measured at load for each kind of product, for a bounded time, and kept
in the cache folder.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from engine.cuda import linear_kernels as kernels
from engine.cuda.attention import padded_size
from engine.cuda.row_kernels import norm, silu_multiply
from specdec.compiler import cache_folder

logger = logging.getLogger(__name__)

#: Rows that are measured: passes of more are multiplied by torch.
ROWS: Final = (16, 32, 64, 128, 256, 512)
#: Rows that a tile holds where there are more than 64; from so many on other tiles are tried.
LARGE_ROWS: Final = 128
#: float16 has no room for numbers that are normed after they are weighed.
DTYPES: Final = (torch.bfloat16, torch.float32)
#: Seconds of the search; what has not been tried by then is not chosen.
SECONDS: Final = 20.0
#: Distance of a product from torch's, relative to the largest of its row: a few roundings.
_BOUNDS: Final = {torch.bfloat16: 3e-2, torch.float32: 1e-3}
_REPEATS: Final = 5
#: Weights that are made float32 together.
_AT_ONCE: Final = 2**22


class Tiles(NamedTuple):
    """How a product is cut, and how the kernel is compiled."""

    outputs: int
    inputs: int
    warps: int
    stages: int


#: Candidates; 16 rows of the last take more shared memory than consumers' GPUs have.
TILES: Final = (Tiles(32, 128, 4, 4), Tiles(16, 256, 4, 4), Tiles(64, 64, 4, 5), Tiles(32, 256, 8, 4))
#: Candidates for :data:`LARGE_ROWS` and more.
LARGE_TILES: Final = (Tiles(128, 64, 8, 3), Tiles(64, 64, 8, 4))


class Product(NamedTuple):
    """One kind of linear layer of a model: weight [N, K] (gated: [2 N, K]) with what stands around it."""

    weight: Tensor
    bias: Tensor | None = None
    #: Weight of the norm before it; None: there is none.
    norm: Tensor | None = None
    is_gated: bool = False
    adds: bool = False

    @property
    def num_outputs(self) -> int:
        """Columns of the result."""
        return self.weight.shape[0] // (1 + self.is_gated)

    @property
    def shape(self) -> tuple[Any, ...]:
        """Products of one shape are cut alike."""
        return *self.weight.shape, self.bias is not None, self.norm is not None, self.is_gated, self.adds


def multiply(x: Tensor, product: Product, eps: float, tiles: Tiles, out: Tensor | None = None) -> Tensor:
    """[T, K] to [T, N]; ``out`` is added to where the product adds."""
    num_rows, num_inputs = x.shape
    out = x.new_empty(num_rows, product.num_outputs) if out is None else out
    tile_rows = min(max(padded_size(num_rows), ROWS[0]), LARGE_ROWS)
    kernels.multiply[(-(-num_rows // tile_rows), -(-product.num_outputs // tiles.outputs))](
        x,
        product.weight,
        x if product.bias is None else product.bias,
        x if product.norm is None else product.norm,
        out,
        num_rows,
        eps,
        IN=num_inputs,
        OUT=product.num_outputs,
        HAS_BIAS=product.bias is not None,
        HAS_NORM=product.norm is not None,
        IS_GATED=product.is_gated,
        ADDS=product.adds,
        TILE_M=tile_rows,
        TILE_N=tiles.outputs,
        TILE_K=tiles.inputs,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return out


def by_torch(x: Tensor, product: Product, eps: float, out: Tensor | None = None) -> Tensor:
    """The same by torch's operations."""
    if product.norm is not None:
        x = F.rms_norm(x, (x.shape[1],), product.norm, eps)
    y = F.linear(x, product.weight, product.bias)
    if product.is_gated:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    return y if out is None or not product.adds else out + y


class TileChoice(NamedTuple):
    """What was measured of a kind of product."""

    #: Up to so many rows the kernel is used; 0: never.
    max_rows: int = 0
    tiles: Tiles = TILES[0]
    #: From :data:`LARGE_ROWS` on.
    large: Tiles = LARGE_TILES[0]

    def tiles_of(self, num_rows: int) -> Tiles:
        """For so many rows."""
        return self.tiles if num_rows <= LARGE_ROWS // 2 else self.large


class FewRows(NamedTuple):
    """What was measured, by :attr:`Product.shape`."""

    choices: Mapping[tuple[Any, ...], TileChoice]

    @property
    def max_rows(self) -> int:
        """Up to so many rows a kernel is used for some product."""
        return max((choice.max_rows for choice in self.choices.values()), default=0)

    def multiply(self, x: Tensor, product: Product, eps: float, out: Tensor | None = None) -> Tensor:
        """[T, K] to [T, N] in the way that was faster; ``out`` is added to in place where the product adds."""
        choice = self.choices[product.shape]
        if len(x) <= choice.max_rows:
            return multiply(x, product, eps, choice.tiles_of(len(x)), out)
        return between_kernels(x, product, eps, out)


#: Seconds of a call of each of some functions.
Timer = Callable[[Sequence[Callable[[], object]]], float]


def choose(
    layers: Sequence[Sequence[Product]],
    eps: float,
    *,
    timer: Timer,
    mode: str = "cached",
    seconds: float = SECONDS,
    clock: Callable[[], float] = time.monotonic,
) -> FewRows:
    """Tiles for the products of a model, ``layers`` alike, and up to how many rows they are worth it.

    ``mode``: "cached" measures unless a choice is kept, "always" measures, "off" takes torch's products. A kernel that
    is wrong, or does not compile, is never chosen.
    """
    if mode == "off" or not _are_known(layers):
        return FewRows({})
    path = cache_folder() / f"cuda-{_key(layers)}.json"
    if mode == "cached" and (kept := _read(path, layers[0])) is not None:
        return kept
    ends = clock() + seconds
    found: dict[int, TileChoice] = {}

    def fastest(i: int, num_rows: int, candidates: Sequence[Tiles]) -> tuple[float, Tiles]:
        """Those of the candidates that are right, one at least while there is time for no more."""
        best = math.inf, candidates[0]
        for tiles in candidates:
            if best[0] < math.inf and clock() >= ends:
                break
            if _is_right(layers[0][i], eps, tiles, num_rows):
                way = partial(multiply, eps=eps, tiles=tiles)
                best = min(best, (_seconds(layers, i, num_rows, timer, way), tiles))
        return best

    for i in range(len(layers[0])):
        found[i] = TileChoice(tiles=fastest(i, ROWS[0], TILES)[1])
    before = 0
    for num_rows in (1, *ROWS):
        for i, choice in found.items():
            if choice.max_rows < before or (num_rows > ROWS[0] and clock() >= ends):
                continue
            candidates = LARGE_TILES if num_rows == LARGE_ROWS else (choice.tiles_of(num_rows),)
            ours, tiles = fastest(i, num_rows, candidates)
            if ours <= _seconds(layers, i, num_rows, timer, partial(between_kernels, eps=eps)):
                found[i] = choice._replace(max_rows=num_rows, **{"large": tiles} if num_rows >= LARGE_ROWS else {})
        before = num_rows
    chosen = FewRows({layers[0][i].shape: choice for i, choice in found.items()})
    logger.info("linear layers of up to %d rows take one launch each (measured)", chosen.max_rows)
    if clock() < ends:  # what time cut short is measured again by the next process
        _write(path, chosen, layers[0])
    return chosen


def _are_known(layers: Sequence[Sequence[Product]]) -> bool:
    shapes = [[product.shape for product in layer] for layer in layers]
    return layers[0][0].weight.dtype in DTYPES and all(own == shapes[0] for own in shapes)


def _seconds(
    layers: Sequence[Sequence[Product]], index: int, num_rows: int, timer: Timer, way: Callable[..., Tensor]
) -> float:
    """Of a product in all layers, so that no weight is still near when it is read again."""
    x = _rows(layers[0][index], num_rows)
    out = x.new_zeros(num_rows, layers[0][index].num_outputs)
    return timer([partial(way, x, layer[index], out=out if layer[index].adds else None) for layer in layers])


def between_kernels(x: Tensor, product: Product, eps: float, out: Tensor | None = None) -> Tensor:
    """A product of torch, and what stands around it by kernels, but the sum, which is torch's, too."""
    if product.norm is not None:
        x = norm(x, None, product.norm, eps)
    if product.adds and product.bias is None:
        assert out is not None
        return out.addmm_(x, product.weight.t())
    y = F.linear(x, product.weight, product.bias)
    if product.adds:
        assert out is not None
        return out.add_(y)
    return silu_multiply(y) if product.is_gated else y


def cuda_timer(calls: Sequence[Callable[[], object]]) -> float:
    """Seconds of all calls, one after another, as a graph: the shortest of a few replays."""
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            calls[0]()
        stream.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for call in calls:
                call()
        finally:
            graph.capture_end()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * _REPEATS)]  # type: ignore[no-untyped-call]
        for first, last in zip(events[::2], events[1::2], strict=True):
            first.record()
            graph.replay()
            last.record()
        stream.synchronize()
    return float(min(first.elapsed_time(last) for first, last in zip(events[::2], events[1::2], strict=True))) / 1e3


def _rows(product: Product, num_rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_rows, product.weight.shape[1], generator=generator)
    return x.to(product.weight.device, product.weight.dtype)


def _is_right(product: Product, eps: float, tiles: Tiles, num_rows: int) -> bool:
    """Whether a product is torch's in float32, of all rows of a tile and of some."""
    dtype = product.weight.dtype
    try:
        for count in {num_rows, max(1, num_rows - 5)}:
            x = _rows(product, count)
            out = x.new_ones(count, product.num_outputs)
            wanted = _exact(x.float(), product, eps, out.float())
            distance = (multiply(x, product, eps, tiles, out).float() - wanted).abs().amax(1) / wanted.abs().amax(1)
            if not bool((distance <= _BOUNDS[dtype]).all()):
                logger.warning("%s is not used: a product is off by %.2g", tiles, float(distance.max()))
                return False
    except Exception as error:  # Triton's compiler raises anything
        logger.warning("%s is not used: %s: %s", tiles, type(error).__name__, error)
        return False
    return True


def _exact(x: Tensor, product: Product, eps: float, out: Tensor) -> Tensor:
    """:func:`by_torch` in float32, some outputs at a time: a whole weight may not fit twice."""
    if product.norm is not None:
        x = F.rms_norm(x, (x.shape[1],), product.norm.float(), eps)
    parts = []
    for at in torch.split(torch.arange(product.num_outputs), max(1, _AT_ONCE // x.shape[1])):
        rows = torch.cat([at, at + product.num_outputs]) if product.is_gated else at
        rows = rows.to(x.device)
        bias = None if product.bias is None else product.bias[rows].float()
        part = product._replace(weight=product.weight[rows].float(), bias=bias, norm=None)
        parts.append(by_torch(x, part, eps, out[:, at.to(x.device)]))
    return torch.cat(parts, 1)


def _key(layers: Sequence[Sequence[Product]]) -> str:
    device = layers[0][0].weight.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    source = hashlib.sha256(Path(kernels.__file__).read_bytes()).hexdigest()
    shapes = [product.shape for product in layers[0]]
    text = json.dumps(
        [
            name,
            triton.__version__,
            torch.__version__,
            source,
            TILES,
            LARGE_TILES,
            shapes,
            str(layers[0][0].weight.dtype),
        ]
    )
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _read(path: Path, products: Sequence[Product]) -> FewRows | None:
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        choices = {
            product.shape: TileChoice(int(max_rows), Tiles(*tiles), Tiles(*large))
            for product, (max_rows, tiles, large) in zip(products, kept, strict=True)
        }
        if not all(choice.tiles in TILES and choice.large in LARGE_TILES for choice in choices.values()):
            raise ValueError("it names unknown tiles")
        return FewRows(choices)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        logger.warning("%s is measured again: %s", path, error)
        return None


def _write(path: Path, found: FewRows, products: Sequence[Product]) -> None:
    part = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps([found.choices[product.shape] for product in products]) + "\n", encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        logger.warning("what was measured is not kept: %s", error)
