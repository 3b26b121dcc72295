from __future__ import annotations

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from engine.native import autotune
from engine.native.autotune import DISTANCES, Prefetch, choose_prefetch, fastest
from engine.native.library import WEIGHT_DTYPES, Memory, NativeLibrary
from engine.native.weight_sweeps import WeightRun
from specdec.compiler import cache_folder, only_one

_IN_FEATURES = 320


@pytest.fixture
def library(kernels: NativeLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NativeLibrary:
    """The kernels, with an empty cache folder; three rounds are measured."""
    monkeypatch.setattr(autotune, "SECONDS", 0.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return kernels


def _weights(library: NativeLibrary, num_bytes: int, dtype: torch.dtype = torch.float32) -> tuple[Memory, WeightRun]:
    panel_bytes = library.packed_bytes(WEIGHT_DTYPES[dtype], 1, _IN_FEATURES)
    num_panels = -(-num_bytes // panel_bytes)
    memory = Memory(library, num_panels * panel_bytes)
    num_bytes = num_panels * panel_bytes
    return memory, WeightRun(memory.take(num_bytes), num_panels, _IN_FEATURES, dtype, num_bytes)


def _files() -> list[Path]:
    return list(cache_folder().glob("autotune-*.json"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_a_choice_is_measured_once_and_kept(library: NativeLibrary, dtype: torch.dtype) -> None:
    memory, run = _weights(library, 9 << 20, dtype)
    found = choose_prefetch(library, [run], 2)
    assert found.source == "measured"
    (file,) = _files()
    kept = json.loads(file.read_text())
    assert kept["prefetch"] == [found.one_row, found.several_rows]
    assert [int(distance) for distance in kept["ms"]] == list(DISTANCES)
    assert all(0 < ms < 1000 for times in kept["ms"].values() for ms in times)

    file.write_text(json.dumps({"prefetch": [0, 16384], "amx_rows": 0}))  # what no measurement decides
    assert choose_prefetch(library, [run], 2) == Prefetch(0, 16384, "cached")
    assert choose_prefetch(library, [run], 2, "always").source == "measured"
    assert json.loads(file.read_text())["ms"]
    assert choose_prefetch(library, [run], 2, "off") == Prefetch(0, 0, "default")
    assert memory.num_bytes


def test_one_process_measures_at_a_time_and_the_next_reads_its_choice(library: NativeLibrary) -> None:
    memory, run = _weights(library, 9 << 20)
    assert choose_prefetch(library, [run], 1).source == "measured"
    (file,) = _files()
    kept = file.read_text()
    file.unlink()
    with ThreadPoolExecutor(1) as thread:
        with only_one(cache_folder() / "autotune.lock"):
            waiting = thread.submit(choose_prefetch, library, [run], 1)
            with pytest.raises(TimeoutError):
                waiting.result(0.1)
            file.write_text(kept)
        assert waiting.result(10).source == "cached"
    assert memory.num_bytes


def test_other_shapes_and_threads_have_choices_of_their_own(library: NativeLibrary) -> None:
    memory, run = _weights(library, 9 << 20)
    for runs, num_threads in (([run], 1), ([run], 2), ([run, run], 2)):
        assert choose_prefetch(library, runs, num_threads).source == "measured"
    assert len(_files()) == 3
    assert memory.num_bytes


def test_small_weights_and_off_measure_nothing(library: NativeLibrary) -> None:
    memory, run = _weights(library, 7 << 20)
    assert choose_prefetch(library, [run], 2, "always") == Prefetch(0, 0, "default")
    assert choose_prefetch(library, [run, run], 2, "off") == Prefetch(0, 0, "default")
    assert not _files()
    assert memory.num_bytes


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"[]", b'{"a": 0}', b'{"prefetch": [0, 0]}', b"\xff"),
        *(b'{"prefetch": 0, "amx_rows": 0}', b'{"prefetch": [0, 77], "amx_rows": 0}'),
        *(b'{"prefetch": [0, false], "amx_rows": 0}', b'{"prefetch": [0, 0], "amx_rows": 3}'),
    ],
)
def test_a_broken_file_is_replaced(library: NativeLibrary, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    memory, run = _weights(library, 9 << 20)
    choose_prefetch(library, [run], 1)
    (file,) = _files()
    file.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert choose_prefetch(library, [run], 1).source == "measured"
    assert str(file) in caplog.text
    assert choose_prefetch(library, [run], 1).source == "cached"
    assert memory.num_bytes


def test_without_a_place_to_keep_it_every_load_measures(
    library: NativeLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    memory, run = _weights(library, 9 << 20)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for _ in range(2):
        with caplog.at_level(logging.WARNING):
            assert choose_prefetch(library, [run], 1).source == "measured"
    assert caplog.text.count("is not kept") == 2
    assert memory.num_bytes


def test_other_kernels_of_the_same_name_have_a_choice_of_their_own(library: NativeLibrary, tmp_path: Path) -> None:
    """A prebuilt library is called after its instruction set, whatever version and processor."""
    copy = tmp_path / library.path.name
    copy.write_bytes(library.path.read_bytes() + b"other")
    memory, run = _weights(library, 9 << 20)
    assert choose_prefetch(library, [run], 1).source == "measured"
    assert choose_prefetch(NativeLibrary(copy), [run], 1).source == "measured"
    assert len(_files()) == 2
    assert memory.num_bytes


def test_a_distance_must_save_two_per_cent() -> None:
    assert fastest({0: 10.0, 4096: 9.9, 8192: 11.0}) == 0
    assert fastest({0: 15.0, 4096: 10.2, 8192: 10.0}) == 8192
    assert fastest({0: 10.0, 4096: 10.0}) == 0


def test_products_of_one_row_and_of_several_have_distances_of_their_own() -> None:
    prefetch = Prefetch(one_row=0, several_rows=8192)
    assert [prefetch.distance(num_rows) for num_rows in (1, 2, 5, 64)] == [0, 8192, 8192, 8192]
