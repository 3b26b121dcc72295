"""Products of few rows in one launch: against torch, and how they are chosen."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.cuda import few_rows
from engine.cuda.few_rows import (
    LARGE_TILES,
    ROWS,
    TILES,
    FewRows,
    Product,
    TileChoice,
    Tiles,
    between_kernels,
    by_torch,
    choose,
    multiply,
)
from engine.loading import acceleration

DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"
EPS = 1e-5


def product(dtype: torch.dtype = torch.float32, seed: int = 0, *, adds: bool = False, **more: bool) -> Product:
    """Neither inputs nor outputs are whole tiles."""
    g = torch.Generator().manual_seed(seed)

    def made(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=g).to(DEVICE, dtype)

    rows = 70 * (1 + more.get("is_gated", False))
    return Product(
        made(rows, 200) / 14,
        made(rows) if more.get("has_bias") else None,
        made(200) if more.get("has_norm") else None,
        more.get("is_gated", False),
        adds,
    )


@pytest.mark.parametrize("num_rows", [1, 5, 33, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"has_norm": True, "has_bias": True},
        {"has_norm": True, "is_gated": True, "has_bias": True},
        {"adds": True},
        {"adds": True, "has_bias": True},
    ],
)
def test_products_are_torchs(parts: dict[str, bool], dtype: torch.dtype, num_rows: int) -> None:
    own = product(dtype, **parts)
    x = torch.randn(num_rows, 200, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    before = torch.randn(num_rows, 70, generator=torch.Generator().manual_seed(2)).to(DEVICE, dtype)
    wide = own._replace(
        **{name: part.float() for name in ("weight", "bias", "norm") if (part := getattr(own, name)) is not None}
    )
    wanted = by_torch(x.float(), wide, EPS, before.float())
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    for way in (partial(multiply, tiles=Tiles(32, 64, 4, 3)), between_kernels):
        out = before.clone() if own.adds else None
        found = way(x, own, EPS, out=out)
        assert (found is out) is own.adds
        torch.testing.assert_close(found.float(), wanted, atol=tolerance, rtol=tolerance)


def test_a_product_is_checked_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows, "_AT_ONCE", 200 * 32)
    for parts in ({"adds": True}, {"has_norm": True, "is_gated": True, "has_bias": True}):
        own = product(**parts)
        x, out = torch.randn(3, 200).to(DEVICE), torch.randn(3, 70).to(DEVICE)
        torch.testing.assert_close(few_rows._exact(x, own, EPS, out), by_torch(x, own, EPS, out))  # noqa: SLF001


def layers_of(count: int = 3) -> list[list[Product]]:
    return [
        [product(seed=i, has_norm=True), product(seed=i, adds=True), product(seed=i, has_norm=True, is_gated=True)]
        for i in range(count)
    ]


class Clock:
    """Times by what is called: of the kernel those of ``ours`` by tiles, of torch 1 each; ticks at each timing."""

    def __init__(
        self, ours: dict[Tiles, float], most_rows: Sequence[int] = (512, 512, 512), ticks: float = 0.0
    ) -> None:
        self.now, self.num_timed = 0.0, 0
        self._ours, self._most_rows, self._ticks = ours, most_rows, ticks

    def __call__(self) -> float:
        return self.now

    def time(self, calls: Sequence[Callable[[], object]]) -> float:
        assert len({id(call.args[1].weight) for call in calls}) == 3, "each layer has its own weight"  # type: ignore[attr-defined]
        self.now += self._ticks
        self.num_timed += 1
        call: Any = calls[0]
        if "tiles" not in call.keywords:
            if len(call.args[0]) == 1:
                call()
            return 1.0
        own = call.args[1]
        index = 1 if own.adds else 2 if own.is_gated else 0
        return self._ours.get(call.keywords["tiles"], 0.9) if len(call.args[0]) <= self._most_rows[index] else 2.0


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(few_rows, "cache_folder", lambda: tmp_path)
    return tmp_path


@pytest.mark.parametrize("most_rows", [(0, 0, 0), (16, 64, 256), (512, 1, 128)])
def test_the_fastest_tiles_are_chosen_and_kept(
    most_rows: Sequence[int], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each product up to how many rows."""
    monkeypatch.setattr(few_rows, "_is_right", lambda *_: True)
    clock, layers = Clock({TILES[2]: 0.5, LARGE_TILES[1]: 0.4}, most_rows), layers_of()
    found = choose(layers, EPS, timer=clock.time, clock=clock)
    for product, most in zip(layers[0], most_rows, strict=True):
        choice = found.choices[product.shape]
        assert choice.max_rows == most
        if most > 1:
            assert choice.tiles == TILES[2]
        if most > 64:
            assert (choice.large, choice.tiles_of(64), choice.tiles_of(96)) == (
                LARGE_TILES[1],
                TILES[2],
                LARGE_TILES[1],
            )
    assert found.max_rows == max(most_rows)
    num_timed = clock.num_timed
    assert choose(layers, EPS, timer=clock.time, clock=clock) == found
    assert clock.num_timed == num_timed
    (file,) = cache.iterdir()
    for text in (json.dumps([[64, [1, 2, 3, 4], LARGE_TILES[0]]] * 3), json.dumps({"max_rows": 64})):
        file.write_text(text)
        assert choose(layers, EPS, timer=clock.time, clock=clock) == found


def test_the_search_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each product has one way at least, and decoding is compared whatever it takes."""
    monkeypatch.setattr(few_rows, "_is_right", lambda *_: True)
    clock = Clock({TILES[1]: 0.5}, ticks=1.0)
    found = choose(layers_of(), EPS, timer=clock.time, seconds=2.0, clock=clock)
    assert found.max_rows == ROWS[0]
    assert [choice.tiles for choice in found.choices.values()] == [TILES[1], TILES[0], TILES[0]]
    assert clock.now == 2 + 2 + 6 + 6


def test_what_is_wrong_or_does_not_compile_is_not_chosen(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original = few_rows.multiply

    def faulty(x: torch.Tensor, own: Product, eps: float, tiles: Tiles, out: torch.Tensor | None) -> torch.Tensor:
        if tiles in {TILES[0], LARGE_TILES[0]}:
            raise RuntimeError("out of resources: shared memory")
        # The interpreter takes seconds for more rows.
        found = original(x, own, eps, tiles, out) if len(x) <= ROWS[0] else by_torch(x, own, eps, out)
        is_wrong = tiles == TILES[1] or len(x) > 256
        return found.index_fill_(0, torch.tensor([2], device=found.device), 9.0) if is_wrong else found

    monkeypatch.setattr(few_rows, "multiply", faulty)
    clock = Clock({TILES[1]: 0.1, TILES[0]: 0.1, TILES[3]: 0.3, LARGE_TILES[0]: 0.1})
    found = choose(layers_of(), EPS, timer=clock.time, clock=clock)
    assert set(found.choices.values()) == {TileChoice(256, TILES[3], LARGE_TILES[1])}
    assert "out of resources: shared memory" in caplog.text
    assert "a product is off by" in caplog.text


def test_a_product_takes_the_way_that_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows, "multiply", lambda x, own, eps, tiles, out: tiles)
    monkeypatch.setattr(few_rows, "between_kernels", lambda *_: "by torch")
    own = product()
    chosen = FewRows({own.shape: TileChoice(128, TILES[1], LARGE_TILES[1])})
    ways = [chosen.multiply(torch.empty(count, 200), own, EPS) for count in (64, 65, 128, 129)]
    assert ways == [TILES[1], LARGE_TILES[1], LARGE_TILES[1], "by torch"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_torch_multiplies_where_it_must(dtype: torch.dtype) -> None:
    layers = [[product(dtype)]]
    mode = "off" if dtype == torch.float32 else "always"
    assert choose(layers, EPS, timer=lambda calls: 1 / 0, mode=mode) == FewRows({})


def test_a_search_that_fails_leaves_them_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.engine.conftest import build

    model: Any = build("llama").to(DEVICE)
    size = 2, 2, 4, model.model.layers[0].self_attn.head_dim
    caches = [(torch.empty(size, device=DEVICE), torch.empty(size, device=DEVICE)) for _ in model.model.layers]
    shapes: Any = [SimpleNamespace(window=None) for _ in caches]
    monkeypatch.setattr(few_rows, "cuda_timer", lambda calls: 1 / 0)
    engine: Any = SimpleNamespace(caches=caches)
    fused = acceleration.fused_decoder(engine, model, shapes, "always")
    assert fused is not None
    assert fused.few_rows == FewRows({})
