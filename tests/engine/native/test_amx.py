"""Products on AMX: by the processor, or by the same machine code emulated where the processor has none."""

from __future__ import annotations

import ctypes
import errno
import logging
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from engine.grouped_weight import GroupedWeight
from engine.native import amx, autotune
from engine.native.library import NativeLibrary
from engine.native.linears import NativeLinear, pack_linears, run_of
from engine.native.rounded import GroupedLinear, quantise_linears
from specdec.compiler import find_compiler
from tests.engine.native.conftest import make_model
from tests.engine.native.grouped_weights import random_grouped
from tests.engine.native.test_decoder import Runner

#: Bits, group, with offsets; a group of 10**6 is all inputs.
KINDS = [
    *(
        (bits, group, offsets)
        for bits in (8, 4)
        for group, offsets in ((16, False), (32, True), (64, False), (128, True))
    ),
    *((8, 10**6, False), (4, 10**6, False), (4, 10**6, True), (4, 48, True)),
]
#: In, out: less than a run, odd depths and columns, more than one sub-sum, more than one chunk.
SHAPES = [(7, 3), (64, 64), (513, 65), (1031, 129), (2600, 40)]


@pytest.fixture(scope="module")
def emulator(kernels: NativeLibrary, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ctypes.CDLL | None]:
    """None where the processor has AMX."""
    refused = kernels.ask_for_amx()
    if refused == -2:
        pytest.skip("kernels without AVX-512 VNNI do without AMX")
    if refused != -1:
        assert not refused, errno.errorcode[refused]
        yield None
        return
    made = tmp_path_factory.mktemp("amx") / "emulator.so"
    source = Path(__file__).with_name("amx_emulator.cpp")
    subprocess.run([*find_compiler(), "-O3", "-std=c++17", "-fPIC", "-shared", source, "-o", made], check=True)
    emulator = ctypes.CDLL(str(made))
    emulator.emulated_products.restype = ctypes.c_int64
    emulator.emulate_amx()
    yield emulator
    emulator.stop_emulating_amx()


@pytest.fixture
def allowed(
    kernels: NativeLibrary, emulator: ctypes.CDLL | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The kernels may use AMX; nothing was measured before, and every model is."""
    monkeypatch.setattr(kernels, "ask_for_amx", lambda: 0)
    monkeypatch.setattr(autotune, "_SMALLEST_BYTES", 0)
    monkeypatch.setattr(autotune, "SECONDS", 0.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def _pack(weight: GroupedWeight, num_threads: int = 2) -> NativeLinear:
    model = nn.Sequential(GroupedLinear(weight, torch.float32, None))
    assert pack_linears(model, num_threads) == 1
    assert isinstance(model[0], NativeLinear)
    return model[0]


def _random(shape: tuple[int, int], kind: tuple[int, int, bool], num_threads: int = 2) -> NativeLinear:
    return _pack(random_grouped(shape, *kind, generator=torch.Generator().manual_seed(shape[0])), num_threads)


def _use(layer: NativeLinear, from_rows: int) -> None:
    amx.use(layer.packed.library, [run_of([layer.packed])], from_rows)


def _bits(y: torch.Tensor) -> torch.Tensor:
    return y.view(torch.int32)


def _check(layer: NativeLinear, x: torch.Tensor, all_rows: list[int], emulator: ctypes.CDLL | None) -> None:
    """As many first rows have the bits of the kernel without AMX; of 191 a thread multiplies 96, then 95."""
    _use(layer, 0)
    wanted = _bits(layer(x))
    _use(layer, 1)
    for rows in all_rows:
        before = emulator.emulated_products() if emulator else 0
        assert torch.equal(_bits(layer(x[:rows])), wanted[:rows])
        assert emulator is None or emulator.emulated_products() > before
    assert emulator is None or emulator.configured_amx_threads() == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_are_those_of_the_kernel_without_amx(
    shape: tuple[int, int], kind: tuple[int, int, bool], emulator: ctypes.CDLL | None
) -> None:
    all_rows = [1, 5, 15, 16, 17, 33, 48, 97, *([191] if shape == (513, 65) else [])]
    _check(_random(shape, kind), torch.randn(all_rows[-1], shape[0]), all_rows, emulator)


@pytest.mark.parametrize("kind", [(8, 10**6, False), (4, 32, True)])
def test_every_number_of_rows(kind: tuple[int, int, bool], emulator: ctypes.CDLL | None) -> None:
    """All remainders of one to three tiles, and more about where a tile or what a thread multiplies ends."""
    all_rows = [*range(1, 50), 63, 64, 65, 95, 96, 97, 98, 127, 128, 129, 130]
    _check(_random((200, 65), kind), torch.randn(130, 200), all_rows, emulator)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(63, 5), (577, 70)])
def test_sums_of_whole_numbers_are_exact(
    shape: tuple[int, int], kind: tuple[int, int, bool], emulator: ctypes.CDLL | None
) -> None:
    """A run's largest activation is 127, scales are 1 or -1, offsets 0 or 3: all sums are whole and below 2^24."""
    weight = random_grouped(shape, *kind, generator=torch.Generator().manual_seed(shape[0]))
    offsets = None if weight.offsets is None else 3.0 * (weight.offsets > 0)
    signs = replace(weight, scales=weight.scales.sign(), offsets=offsets)
    layer = _pack(signs)
    _use(layer, 1)
    order = torch.arange(shape[0]) if weight.order is None else weight.order.long()
    x = torch.randint(-127, 128, (50, shape[0]))
    x[:, order[::64]] = 127
    wanted = x.double() @ signs.decode().double().T
    assert wanted.abs().max() < 2**24
    assert torch.equal(layer(x.float()).double(), wanted)


@pytest.mark.usefixtures("emulator", "allowed")
@pytest.mark.parametrize("bits", [8, 4])
def test_a_decoder_has_the_same_logits(bits: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Layers that are interleaved and, beside 4 bits, an output layer of 8; AMX from one row on, and never."""
    ids, logits = torch.randint(91, (60,), generator=torch.Generator().manual_seed(1)), []
    for fewest in (1, 0):
        monkeypatch.setattr(amx, "measure", lambda *_: {})
        monkeypatch.setattr(amx, "fewest_rows", lambda _, fewest=fewest: fewest)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / str(fewest)))
        model = make_model("llama-tied-odd")
        quantise_linears(model, bits)
        runner = Runner(model)
        assert runner.decoder.prefetch.amx_rows == fewest
        table = runner.open(60)
        logits.append(
            torch.cat([runner.feed([(table, start, ids[start:end])])[0] for start, end in ((0, 41), (41, 60))])
        )
    assert torch.equal(*logits)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize("kind", [(8, 10**6, False), (4, 64, True)])
def test_the_number_of_threads_changes_no_bit(
    threads: int, kind: tuple[int, int, bool], emulator: ctypes.CDLL | None
) -> None:
    x = torch.randn(37, 5000)
    wanted = _random((5000, 130), kind, 1)(x)
    layer = _random((5000, 130), kind, threads)
    _use(layer, 1)
    assert all(torch.equal(layer(x[:rows]), wanted[:rows]) for rows in (1, 16, 37))


def test_several_threads_have_tiles_of_their_own(emulator: ctypes.CDLL | None) -> None:
    def work(seed: int) -> list[int]:
        layer = _random((64 + 16 * seed, 96), KINDS[seed], 1 + seed % 2)
        x = torch.randn(40, 64 + 16 * seed)
        wanted = layer(x)
        _use(layer, 1)
        return [rows for rows in range(1, 41) if not torch.equal(layer(x[:rows]), wanted[:rows])]

    with ThreadPoolExecutor(5) as threads:
        assert list(threads.map(work, range(5))) == [[]] * 5


def test_it_is_used_from_the_rows_on_that_are_measured_faster(
    emulator: ctypes.CDLL | None, allowed: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(amx, "measure", lambda *_: {4: (1.0, 2.0), 8: (2.0, 1.9), 16: (3.0, 2.0)})
    with caplog.at_level(logging.INFO):
        layer = _random((200, 70), (8, 10**6, False))
    assert layer.prefetch.amx_rows == 8
    assert "AMX from 8 rows on" in caplog.text
    if emulator:
        for rows, on_amx in ((7, False), (8, True), (60, True)):
            before = emulator.emulated_products()
            layer(torch.randn(rows, 200))
            assert (emulator.emulated_products() > before) == on_amx
    again = _random((200, 70), (8, 10**6, False))
    assert (again.prefetch.amx_rows, again.prefetch.source) == (8, "cached")


def test_what_is_emulated_is_not_faster(emulator: ctypes.CDLL | None, allowed: None) -> None:
    layer = _random((2048, 256), (4, 64, True))
    assert layer.prefetch.source == "measured"
    assert layer.prefetch.amx_rows in ((0,) if emulator else (0, *amx.ROWS))


def test_faster_is_by_two_per_cent_at_all_larger_numbers_of_rows() -> None:
    assert amx.fewest_rows({4: (1.0, 0.5), 8: (2.0, 1.99), 16: (4.0, 3.0), 32: (8.0, 4.0)}) == 16
    assert amx.fewest_rows({4: (1.0, 0.5), 8: (2.0, 1.0)}) == 4
    assert amx.fewest_rows({4: (1.0, 0.5), 8: (2.0, 2.0)}) == 0


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_without_permission_one_line_says_so(
    kernels: NativeLibrary, allowed: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernels, "ask_for_amx", lambda: errno.EPERM)
    monkeypatch.setattr(amx, "measure", lambda *_: pytest.fail("measured"))
    layer = _random((200, 70), (8, 10**6, False))
    assert layer.prefetch.amx_rows == 0
    assert _warnings(caplog) == ["AMX is not used, the system refuses it: Operation not permitted"]


def test_other_bits_keep_it_from_being_used(
    emulator: ctypes.CDLL | None, allowed: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if emulator is None:
        pytest.skip("only the emulator can be made wrong")
    monkeypatch.setattr(amx, "measure", lambda *_: pytest.fail("measured"))
    emulator.make_amx_wrong(1)
    try:
        layer = _random((200, 70), (4, 64, True))
        before = emulator.emulated_products()
        layer(torch.randn(60, 200))
        assert emulator.emulated_products() == before
    finally:
        emulator.make_amx_wrong(0)
    assert layer.prefetch.amx_rows == 0
    assert _warnings(caplog) == ["AMX is not used: its products are other bits than those of AVX-512"]


@pytest.mark.usefixtures("allowed")
def test_processors_without_amx_and_weights_of_other_kinds_log_nothing(
    kernels: NativeLibrary, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(amx, "measure", lambda *_: pytest.fail("measured"))
    assert pack_linears(nn.Sequential(nn.Linear(200, 70)).requires_grad_(False), 2) == 1
    monkeypatch.setattr(kernels, "ask_for_amx", lambda: -1)
    assert _random((200, 70), (8, 10**6, False)).prefetch.amx_rows == 0
    assert not _warnings(caplog)
