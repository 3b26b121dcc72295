"""Products of few rows in one launch: against torch, and how they are chosen."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.cuda import few_rows
from engine.cuda.few_rows import ROWS, TILES, FewRows, Product, Tiles, by_torch, choose, multiply
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


@pytest.mark.parametrize("num_rows", [1, 5, 16, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "parts",
    [{}, {"has_norm": True, "has_bias": True}, {"has_norm": True, "is_gated": True, "has_bias": True}, {"adds": True}],
)
def test_products_are_torchs(parts: dict[str, bool], dtype: torch.dtype, num_rows: int) -> None:
    own = product(dtype, **parts)
    x = torch.randn(num_rows, 200, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    before = torch.randn(num_rows, 70, generator=torch.Generator().manual_seed(2)).to(DEVICE, dtype)
    wide = own._replace(
        **{name: part.float() for name in ("weight", "bias", "norm") if (part := getattr(own, name)) is not None}
    )
    wanted = by_torch(x.float(), wide, EPS, before.float())
    found = multiply(x, own, EPS, Tiles(32, 64, 4, 3), before.clone() if own.adds else None)
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
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

    def __init__(self, ours: dict[Tiles, float], most_rows: int = 64, ticks: float = 0.0) -> None:
        self.now, self.num_timed = 0.0, 0
        self._ours, self._most_rows, self._ticks = ours, most_rows, ticks

    def __call__(self) -> float:
        return self.now

    def time(self, calls: Sequence[Callable[[], object]]) -> float:
        assert len({id(call.args[1].weight) for call in calls}) == 3, "each layer has its own weight"  # type: ignore[attr-defined]
        self.now += self._ticks
        self.num_timed += 1
        call: Any = calls[0]
        call()
        if "tiles" not in call.keywords:
            return 1.0
        return self._ours.get(call.keywords["tiles"], 0.9) if len(call.args[0]) <= self._most_rows else 2.0


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(few_rows, "cache_folder", lambda: tmp_path)
    return tmp_path


@pytest.mark.parametrize("most_rows", [0, 64, *(pytest.param(rows, marks=pytest.mark.exhaustive) for rows in (16, 32))])
def test_the_fastest_tiles_are_chosen_and_kept(most_rows: int, cache: Path) -> None:
    clock, layers = Clock({TILES[2]: 0.5}, most_rows), layers_of()
    found = choose(layers, EPS, timer=clock.time, clock=clock)
    assert found.max_rows == most_rows
    if most_rows:
        assert set(found.tiles.values()) == {TILES[2]}
    assert choose(layers, EPS, timer=clock.time, clock=clock).max_rows == most_rows
    num_timed = clock.num_timed
    assert choose(layers, EPS, timer=clock.time, clock=clock) == choose(layers, EPS, timer=clock.time, clock=clock)
    assert clock.num_timed == num_timed
    (file,) = cache.iterdir()
    file.write_text(json.dumps({"max_rows": 64, "tiles": [[1, 2]]}))
    assert choose(layers, EPS, timer=clock.time, clock=clock) == found


def test_the_search_ends_in_time() -> None:
    """Each product has one way at least, and decoding is compared whatever it takes."""
    clock = Clock({TILES[1]: 0.5}, ticks=1.0)
    found = choose(layers_of(), EPS, timer=clock.time, seconds=2.0, clock=clock)
    assert found.max_rows == ROWS[0]
    assert [*found.tiles.values()] == [TILES[1], TILES[0], TILES[0]]
    assert clock.now == 2 + 2 + 6 + 6


def test_what_is_wrong_or_does_not_compile_is_not_chosen(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original = few_rows.multiply

    def faulty(x: torch.Tensor, own: Product, eps: float, tiles: Tiles, out: torch.Tensor | None) -> torch.Tensor:
        if tiles == TILES[0]:
            raise RuntimeError("out of resources: shared memory")
        found = original(x, own, eps, tiles, out)
        return found.index_fill_(0, torch.tensor([2], device=found.device), 9.0) if tiles == TILES[1] else found

    monkeypatch.setattr(few_rows, "multiply", faulty)
    clock = Clock({TILES[1]: 0.1, TILES[0]: 0.1, TILES[3]: 0.3})
    found = choose(layers_of(), EPS, timer=clock.time, clock=clock)
    assert set(found.tiles.values()) == {TILES[3]}
    assert "out of resources: shared memory" in caplog.text
    assert "a product is off by" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_torch_multiplies_where_it_must(dtype: torch.dtype) -> None:
    layers = [[product(dtype)]]
    mode = "off" if dtype == torch.float32 else "always"
    assert choose(layers, EPS, timer=lambda calls: 1 / 0, mode=mode) == FewRows(0, {})


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
    assert fused.few_rows == FewRows(0, {})
