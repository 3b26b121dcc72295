from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from engine.grouped_weight import GroupedWeight
from engine.native.autotune import DISTANCES, Prefetch
from engine.native.linears import NativeLinear, pack_linears
from engine.native.rounded import GroupedLinear, Int8Linear, quantise_linears
from tests.engine.native.grouped_weights import random_grouped

Rounding = None | str | tuple[int, int, bool]
#: In, out: single panels, partial panels, odd depths, more than one sub-sum, a stride the caches dislike, and more than
#: one chunk with too few panels to go round.
SHAPES = [(1, 1), (7, 3), (16, 32), (48, 97), (513, 65), (1031, 129), (2048, 256), (2049, 40), (5000, 130)]
DTYPES = [torch.float32, torch.bfloat16]
#: Of activations, and how weights are rounded: by output to 8 bits, or in groups (bits, group, with offsets).
KINDS: list[tuple[torch.dtype, Rounding]] = [
    (torch.float32, None),
    (torch.bfloat16, None),
    (torch.float32, "int8"),
    (torch.bfloat16, "int8"),
    (torch.float32, (4, 64, False)),
    (torch.bfloat16, (4, 32, True)),
    (torch.float32, (4, 10**6, True)),
    (torch.bfloat16, (8, 10**6, False)),
    (torch.float32, (4, 128, True)),
    (torch.float32, (8, 16, False)),
    (torch.bfloat16, (8, 64, True)),
]

pytestmark = pytest.mark.usefixtures("kernels")


def _pack(
    shape: tuple[int, int],
    dtype: torch.dtype,
    num_threads: int = 2,
    weights: Rounding = None,
    bias: bool = True,
) -> tuple[nn.Module, NativeLinear]:
    """A layer before and after packing; rounded to 8 bits before, where weights are int8."""
    generator = torch.Generator().manual_seed(shape[0])
    plain = nn.Linear(*shape, bias=bias).requires_grad_(False)
    plain.weight.copy_(torch.randn(plain.weight.shape, generator=generator) / shape[0] ** 0.5)
    if bias:
        plain.bias.copy_(torch.randn(plain.bias.shape, generator=generator))
    model = nn.Sequential(plain.to(dtype))
    if weights == "int8":
        assert quantise_linears(model) == 1
    elif isinstance(weights, tuple):
        grouped = random_grouped(shape, *weights, generator=generator)
        model[0] = GroupedLinear(grouped, dtype, plain.bias)
    before = copy.deepcopy(model[0])
    assert pack_linears(model, num_threads) == 1
    assert isinstance(model[0], NativeLinear)
    return before, model[0]


def _rounded(x: torch.Tensor) -> torch.Tensor:
    """Activations as products with grouped weights take them: float64, 127 steps to the largest of 64 neighbours."""
    runs = F.pad(x.float(), (0, -x.shape[-1] % 64)).unflatten(-1, (-1, 64))
    peaks = runs.abs().amax(-1, keepdim=True)
    whole = (runs * (torch.full_like(peaks, 127.0) / peaks).where(peaks > 0, 0.0)).round()
    return (whole.double() * (peaks / 127).double()).flatten(-2)[..., : x.shape[-1]]


def _fed(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    """Activations as a product with the layer's weight takes them: float64."""
    if not isinstance(layer, GroupedLinear) or layer.grouped is None:
        return x.double()
    order = torch.arange(x.shape[-1]) if layer.grouped.order is None else layer.grouped.order.long()
    return _rounded(x[..., order])[..., order.argsort()]


def _weight(layer: nn.Module) -> torch.Tensor:
    if isinstance(layer, GroupedLinear):
        assert layer.grouped is not None
        return layer.grouped.decode()
    return layer.quantised * layer.scales[:, None] if isinstance(layer, Int8Linear) else layer.weight  # type: ignore[return-value]


@pytest.mark.parametrize(("dtype", "weights"), KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_it_computes_the_plain_layer(shape: tuple[int, int], dtype: torch.dtype, weights: Rounding) -> None:
    plain, packed = _pack(shape, dtype, weights=weights)
    for rows in (1, 2, 5, 12, 13, 25, 200, 401):
        x = torch.randn(rows, shape[0]).to(dtype)
        fed = _fed(x, plain)
        exact = F.linear(fed, _weight(plain).double(), plain.bias.double())  # type: ignore[operator]
        rounding = 2.0**-8 if dtype == torch.bfloat16 else 2e-4 if weights == "int8" else 2e-6
        torch.testing.assert_close(packed(x).double(), exact, atol=4 * rounding, rtol=rounding)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["whole", "offsets", "ordered", "8 bits", "real", "e4m3", "plain"])
@pytest.mark.parametrize("shape", [(7, 3), (48, 97), (1031, 129), (2304, 40)])
def test_decoded_weights_are_multiplied_as_plain_ones(shape: tuple[int, int], kind: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(shape[0])
    bits, group = (8, 32) if kind in {"8 bits", "e4m3"} else (4, 128 if kind == "ordered" else 64)
    grouped = random_grouped(shape, bits, group, kind == "offsets", generator=generator)
    if kind == "real":
        grouped = replace(grouped, table=torch.randn(16, generator=generator))
    elif kind == "e4m3":  # but the two that are no numbers
        codes = torch.randint(0, 254, shape[::-1], generator=generator)
        grouped = replace(grouped, codes=(codes + (codes > 126)).to(torch.uint8).view(torch.float8_e4m3fn))
    elif kind == "plain":
        grouped = GroupedWeight.plain(torch.randn(shape[::-1], generator=generator).to(dtype))
    plain = nn.Linear(*shape, dtype=dtype).requires_grad_(False)
    order = torch.arange(shape[0]) if grouped.order is None else grouped.order.long()
    plain.weight.copy_(grouped.decode()[:, order])
    models = [nn.Sequential(GroupedLinear(replace(grouped, rounds=False), dtype, plain.bias)), nn.Sequential(plain)]
    for model in models:
        assert pack_linears(model, 2) == 1
    for rows in (1, 2, 5, 8, 40, 100):
        x = torch.randn(rows, shape[0]).to(dtype)
        assert torch.equal(models[0](x), models[1](x[:, order]))


@pytest.mark.parametrize(("dtype", "weights"), KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_is_the_same_to_the_bit_in_any_company(
    shape: tuple[int, int], dtype: torch.dtype, weights: Rounding
) -> None:
    _, packed = _pack(shape, dtype, weights=weights)
    x = torch.randn(420, shape[0]).to(dtype)
    alone = torch.cat([packed(row[None]) for row in x])
    for rows in [*range(1, 41), 191, 192, 193, 420]:
        first = 420 - rows
        assert torch.equal(packed(x[first:]), alone[first:])
    for distance in DISTANCES:
        packed.prefetch = Prefetch(distance, distance)
        for rows in (1, 5, 8, 9, 33, 200):
            assert torch.equal(packed(x[-rows:]), alone[-rows:])


@pytest.mark.parametrize(("dtype", "weights"), KINDS)
@pytest.mark.parametrize(
    "shape", [(300, 200), *(pytest.param(s, marks=pytest.mark.exhaustive) for s in [(5000, 130), (130, 7000)])]
)
def test_the_number_of_threads_changes_no_bit(shape: tuple[int, int], dtype: torch.dtype, weights: Rounding) -> None:
    x = torch.randn(37, shape[0]).to(dtype)
    wanted = _pack(shape, dtype, 1, weights)[1](x)
    for threads in (1, 2, 3, 7):
        _, packed = _pack(shape, dtype, threads, weights)
        for distance in DISTANCES:
            packed.prefetch = Prefetch(distance, distance)
            assert all(torch.equal(packed(x[:rows]), wanted[:rows]) for rows in (1, 5, 16, 37))


def test_weights_are_rounded_to_the_nearest_of_255_steps_per_output() -> None:
    plain = nn.Linear(50, 4, bias=False).requires_grad_(False)
    plain.weight[0] *= 1000.0
    plain.weight[1] = 0.0
    weight = plain.weight.clone()
    layer = Int8Linear(plain.weight, None)
    steps = weight.abs().amax(1) / 127
    assert layer.quantised.dtype == torch.int8
    assert layer.quantised.abs().amax(1).tolist() == [127, 0, 127, 127]
    assert bool(((_weight(layer) - weight).abs() <= steps[:, None] * 0.5001).all())
    x = torch.randn(3, 50)
    assert torch.equal(layer(x), F.linear(x, _weight(layer)))


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e30])
def test_activations_of_any_size_keep_their_precision_with_int8_weights(scale: float) -> None:
    plain, packed = _pack((130, 70), torch.float32, weights="int8", bias=False)
    x = torch.randn(5, 130) * torch.tensor([scale, scale, 1.0, 0.0, scale])[:, None]
    exact = F.linear(x.double(), _weight(plain).double())
    worst = (packed(x).double() - exact).abs().amax(1)
    assert bool((worst <= 2e-4 * x.abs().amax(1)).all())


def test_leading_dimensions_and_strides() -> None:
    plain, packed = _pack((24, 40), torch.float32)
    x = torch.randn(2, 3, 48)[..., :24]
    torch.testing.assert_close(packed(x), plain(x))
    x = torch.randn(24, 5).t()
    torch.testing.assert_close(packed(x), plain(x))
    assert packed(torch.empty(0, 24)).shape == (0, 40)


def test_another_dtype_or_width_is_an_error() -> None:
    _, packed = _pack((24, 40), torch.float32)
    for x in (torch.randn(1, 24).bfloat16(), torch.randn(1, 23)):
        with pytest.raises(RuntimeError, match="24 inputs"):
            packed(x)


class _Model(nn.Module):
    """Every kind of layer there is to take or to leave."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.first = nn.Linear(16, 16)
        self.again = self.first
        self.conv = Conv1D(20, 16)
        self.half = nn.Linear(20, 20).to(torch.float16)
        self.subclass = nn.modules.linear.NonDynamicallyQuantizableLinear(20, 16)
        self.lm_head = nn.Linear(16, 50, bias=False)
        self.lm_head.weight = self.embedding.weight
        self.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.again(self.first(self.embedding(ids)))
        return self.lm_head(self.subclass(self.conv(x)))


def test_which_layers_are_taken() -> None:
    model = _Model()
    torch.nn.init.normal_(model.conv.weight)
    ids = torch.arange(9)
    wanted = model(ids)
    table = model.embedding.weight
    assert pack_linears(model, 2) == 3
    assert model.first is model.again
    assert [isinstance(layer, NativeLinear) for layer in (model.first, model.conv, model.lm_head)] == [True] * 3
    assert not isinstance(model.half, NativeLinear)
    assert not isinstance(model.subclass, NativeLinear)
    assert model.embedding.weight is table
    torch.testing.assert_close(model(ids), wanted, atol=1e-5, rtol=1e-5)
    assert pack_linears(model, 2) == 0


def test_which_layers_are_rounded() -> None:
    torch.manual_seed(0)  # random weights are off by 5 % of the spread now and then
    model = _Model()
    torch.nn.init.normal_(model.conv.weight)
    ids, table = torch.arange(9), model.embedding.weight
    exact = model(ids)
    assert quantise_linears(model) == 3
    assert model.first is model.again
    assert [isinstance(layer, Int8Linear) for layer in (model.first, model.conv, model.lm_head)] == [True] * 3
    assert model.embedding.weight is table
    rounded = model(ids)
    assert not torch.equal(rounded, exact)
    torch.testing.assert_close(rounded, exact, atol=0.05 * float(exact.std()), rtol=0)
    assert pack_linears(model, 2) == 3
    torch.testing.assert_close(model(ids), rounded, atol=1e-3 * float(exact.std()), rtol=0)


def test_several_threads_run_their_own_models() -> None:
    def work(seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        _, packed = _pack((64 + seed, 96), torch.float32, num_threads=1 + seed % 3)
        x = torch.randn(17, 64 + seed, generator=generator)
        wanted = packed(x)
        return [i for i in range(300) if not torch.equal(packed(x[: 1 + i % 17]), wanted[: 1 + i % 17])]

    with ThreadPoolExecutor(5) as threads:
        assert list(threads.map(work, range(5))) == [[]] * 5


def test_the_numbers_of_threads_may_change_from_call_to_call() -> None:
    _, packed = _pack((40, 200), torch.float32)
    x = torch.randn(3, 40)
    wanted = packed(x)
    for round_ in range(600):
        packed.num_threads = 1 + round_ * 7 % 6
        assert torch.equal(packed(x), wanted)
